"""The Hopper decode kernel run on the CPU over the stand-in for Gluon, against the fp64 specification."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulated_backend import Emulated
from gluon_emulator import MODE, PACKAGE
from sampling import sampled
from test_hopper_protocol import Case, assert_near, expected, in_pages, reference
from tilewise import fp8
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

LENGTHS = ((1, 1, 1, 1, 1), (700, 33, 1, 130, 64))
SEVERAL = ((2, 0, 1, 3, 0), (300, 33, 0, 200, 1))
DENSE = {
    "group of four": Case(128, heads=(8, 2), batch=2, seqlens=(1, 700)),
    "no group": Case(64, heads=(2, 2), seqlens=(1, 300)),
    "one share": Case(128, heads=(1, 1), seqlens=(1, 40)),
    "several tokens": Case(128, heads=(4, 2), seqlens=(5, 333), causal=True),
    "wide, padded": Case(200, 96, heads=(4, 1), seqlens=(1, 500)),
    "512 columns": Case(512, heads=(4, 2), batch=2, seqlens=(1, 300)),
    "512 columns, packed": Case(512, 320, heads=(4, 1), lengths=SEVERAL, causal=True, padding=2, sinks=True),
    "window": Case(128, heads=(4, 2), seqlens=(3, 600), window=(100, 1)),
    "softcap, sinks": Case(96, heads=(6, 2), seqlens=(2, 400), causal=True, softcap=2.0, sinks=True),
    "fewer keys": Case(64, heads=(4, 1), seqlens=(6, 3), causal=True, sinks=True),
    "packed": Case(128, heads=(4, 2), lengths=SEVERAL, causal=True, padding=2),
    "packed window": Case(64, heads=(2, 2), lengths=SEVERAL, window=(40, 0), padding=1),
}
PAGED = {
    "small pages": (Case(128, heads=(8, 2), lengths=LENGTHS), 16, "rows first", False),
    "tiny pages": (Case(64, heads=(4, 2), lengths=LENGTHS, sinks=True), 8, "heads first", False),
    "a page a tile": (Case(128, heads=(4, 2), lengths=SEVERAL, causal=True), 64, "together", True),
    "large pages": (Case(256, heads=(2, 1), lengths=LENGTHS, window=(50, None)), 256, "rows first", False),
    "512 columns": (Case(512, heads=(2, 1), lengths=LENGTHS, softcap=2.0), 64, "rows first", False),
    "odd pages": (Case(96, heads=(4, 2), lengths=SEVERAL, causal=True, padding=2), 24, "heads first", True),
}


def one_each(operands: Operands, problem: AttentionProblem, several: bool) -> tuple[Operands, AttentionProblem]:
    """One query a sequence unless there are several."""
    return (operands, problem) if several else (operands._replace(cu_seqlens_q=None), replace(problem, seqlen_q=1))


@pytest.fixture
def decode(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    launch = importlib.import_module(f"{PACKAGE}.launch")
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(emulated("counters").HostCounters, "current", lambda *_: counters)

    def run(problem: AttentionProblem, operands: Operands) -> Any:
        out, lse = launch.run_forward(problem, operands)
        assert not counters.any(), "counters must come back to zero"
        return out, lse

    return run


@pytest.mark.parametrize("case", sampled(DENSE, set(DENSE) - {"no group", "one share", "packed"}))
def test_rows(case: Case, decode: Callable[..., Any]) -> None:
    MODE.late_loads = False
    operands = case.inputs()
    assert_near(decode(case.problem, operands), expected(case, operands))


@pytest.mark.parametrize(("case", "page_size", "storage", "several"), PAGED.values(), ids=PAGED.keys())
def test_pages(case: Case, page_size: int, storage: str, several: bool, decode: Callable[..., Any]) -> None:
    """Pages in any order, NaN in every row that no sequence has, nonsense in the unused part of the table."""
    MODE.late_loads = True
    packed = case.inputs()
    operands, problem = one_each(*in_pages(case, packed, page_size, storage), several)
    assert_near(decode(problem, operands), expected(case, packed))


@pytest.mark.parametrize("name", ["several tokens", "packed"])
def test_rows_into_memory_of_the_caller(name: str, decode: Callable[..., Any]) -> None:
    MODE.late_loads = False
    case = DENSE[name]
    operands = case.inputs()
    ref, ref_lse = decode(case.problem, operands)
    width, padding = ref.shape[-1], 3 if name != "packed" else 0
    memory = torch.full((*ref.shape[:-1], width + padding), 7.0, dtype=ref.dtype)
    given = memory[..., :width]
    assert importlib.import_module(f"{PACKAGE}.launch").writes_into(case.problem, given)
    out, lse = decode(case.problem, operands._replace(out=given))
    assert out is given
    assert torch.equal(out, ref)
    assert torch.equal(lse, ref_lse)
    assert bool((memory[..., width:] == 7.0).all())


@pytest.mark.parametrize("longest", [700, 9000], ids=["as long as may be", "far shorter"])
def test_one_sequence_in_pages(longest: int, decode: Callable[..., Any]) -> None:
    """Page ids are read ahead where its share would begin if the sequence were as long as it may be."""
    MODE.late_loads = True
    case = Case(64, heads=(4, 2), lengths=((1,), (700,)))
    packed = case.inputs()
    operands, problem = in_pages(case, packed, 16, "rows first")
    assert operands.block_table is not None
    table = torch.nn.functional.pad(operands.block_table, (0, longest // 16), value=1 << 30)
    operands = operands._replace(cu_seqlens_q=None, block_table=table)
    assert_near(decode(replace(problem, seqlen_k=longest), operands), expected(case, packed))


def test_many_sequences(decode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are added up at a time, among them empty ones at both ends."""
    MODE.late_loads = False
    monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.decode_schedule"), "SCAN", 2)
    case = Case(64, heads=(2, 1), lengths=((0, 1, 0, 2, 1, 1, 0), (9, 300, 5, 70, 0, 129, 400)), causal=True)
    operands = case.inputs()
    assert_near(decode(case.problem, operands), expected(case, operands))


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release"])
def test_parts_that_are_handed_over_without_order_are_found(
    sem: str, decode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts last must see what the others wrote before they counted: the emulator tells if it need not."""
    language = importlib.import_module(f"{PACKAGE}.decode").gl
    plain = language.atomic_add
    monkeypatch.setattr(language, "atomic_add", lambda pointer, operand: plain(pointer, operand, sem=sem))
    case = DENSE["group of four"]
    with pytest.raises(AssertionError, match="no release and acquire order"):
        decode(case.problem, case.inputs())


def test_parts_that_not_all_threads_have_written_are_found(
    decode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread 0 publishes what the others wrote only behind a barrier."""
    monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.decode"), "barrier", lambda: None)
    case = DENSE["group of four"]
    with pytest.raises(AssertionError, match="no release and acquire order"):
        decode(case.problem, case.inputs())


LATENTS: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512}
IN_8_BITS = {
    "small pages": (Case(128, heads=(8, 2), lengths=LENGTHS), 16, False),
    "a page a tile": (Case(64, heads=(4, 2), lengths=SEVERAL, causal=True, sinks=True), 128, True),
    "large pages": (Case(256, heads=(2, 1), lengths=LENGTHS, window=(50, None), softcap=3.0), 256, False),
    "padded": (Case(96, heads=(4, 2), lengths=LENGTHS), 32, False),
    "latents, 16 heads": (Case(**LATENTS, heads=(16, 1), lengths=LENGTHS), 64, False),
    "latents, small pages": (Case(**LATENTS, heads=(3, 1), lengths=LENGTHS, sinks=True), 16, False),
    "latents, drafts": (Case(**LATENTS, heads=(5, 1), lengths=SEVERAL, causal=True, padding=2), 128, True),
    "latents, window": (Case(**LATENTS, heads=(8, 2), lengths=LENGTHS, window=(50, None), softcap=3.0), 256, False),
    "latents, narrower rest": (Case(head_dim=528, head_dim_v=512, heads=(2, 1), lengths=LENGTHS), 32, False),
}


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize(("case", "page_size", "several"), IN_8_BITS.values(), ids=IN_8_BITS.keys())
def test_8_bit_pages(case: Case, page_size: int, several: bool, codes: torch.dtype, decode: Callable[..., Any]) -> None:
    """The attention of the dequantised pages, with P in fp16; scales differ by powers of ten, and some of V's own are
    negative. Of pages that nobody reads they are NaN. V of latents is a view.
    """
    MODE.late_loads = True
    operands, problem = one_each(*in_pages(case, case.inputs(), page_size, "rows first"), several)
    latent, is_int8 = case.head_dim > 512, codes == torch.int8
    pages = torch.arange(operands.k.shape[0])[:, None, None, None]
    k, v = (fp8.quantize_pages(t * 10.0 ** (pages % 3 - 1), dtype=codes) for t in (operands.k, operands.v))
    v.scale[::3] *= -1.0
    unused = torch.ones(len(v.scale), dtype=torch.bool)
    assert operands.block_table is not None
    assert case.lengths is not None
    for row, length in zip(operands.block_table, case.lengths[1], strict=True):
        unused[row[: -(-length // page_size)].long()] = False
    k.scale[unused] = v.scale[unused] = float("nan")
    values, v_scale = (k.data[..., :512], k.scale) if latent else (v.data, v.scale)
    operands = operands._replace(k=k.data, v=values, k_scale=k.scale, v_scale=v_scale)
    blocks = (None, 1, 1) if is_int8 else (None, None, None)
    problem = replace(problem, fp8=("k", "v"), int8=is_int8, scale_blocks=blocks, latent=latent)
    assert importlib.import_module(PACKAGE).reads_latents(problem) == latent
    got = decode(problem, operands)
    want = reference().forward(replace(problem, dtype=torch.float64), operands._replace(q=operands.q.double()))
    assert_near(got, want, 0.02 * max(1.0, want[0].abs().max().item() if latent else 1.0))


@pytest.mark.parametrize("of", ["k", "v"])
def test_an_int8_row_that_is_not_finite_reads_as_nan(of: str, decode: Callable[..., Any]) -> None:
    MODE.late_loads = True
    case = Case(64, heads=(4, 2), lengths=((1, 1), (700, 130)))
    operands, problem = in_pages(case, case.inputs(), 64, "rows first")
    assert operands.block_table is not None
    page = int(operands.block_table[0, 2])
    (operands.k if of == "k" else operands.v)[page, 5, 1, 3] = float("inf")
    k, v = (fp8.quantize_pages(t, dtype=torch.int8) for t in (operands.k, operands.v))
    operands = operands._replace(k=k.data, v=v.data, k_scale=k.scale, v_scale=v.scale, cu_seqlens_q=None)
    problem = replace(problem, fp8=("k", "v"), int8=True, scale_blocks=(None, 1, 1), seqlen_q=1)
    out, _ = decode(problem, operands)
    assert out.isnan()[0, 2:].all()
    assert not out.isnan()[0, :2].any()
    assert not out.isnan()[1].any()
