"""Decoding by the Triton backend without a GPU: in the interpreter against fp64 (test_triton_interpreter.py runs those
tests), and what is compiled for GPUs.

The interpreted suite is cut to lengths that are not worth splitting, so the split kernel is judged here.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from making import watched
from sampling import sampled
from tilewise import device as devices
from tilewise import fp8
from tilewise.problem import AttentionProblem
from tilewise.testing import BackendImplementation, Case, check
from tilewise.testing.invariance import Sequences, check_invariant
from tilewise.testing.tiles import overridden
from triton_cases import assembled, registers_of

triton = pytest.importorskip("triton")
quantised = pytest.importorskip("tilewise.backends.triton.quantised")
launch = pytest.importorskip("tilewise.backends.triton.launch")
configs = pytest.importorskip("tilewise.backends.triton.configs")
planning = pytest.importorskip("tilewise.backends.triton.planning")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
launching = pytest.importorskip("tilewise.backends.gpu.launching")

INTERPRETED = bool(triton.knobs.runtime.interpret)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
only_compiled = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")

PAGED: dict[str, Any] = {
    "kind": "paged", "decode": True, "dtype": BF16, "seqlens_q": (1, 1, 1), "seqlens_k": (300, 3, 277),
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32, "grad_of": (),
}  # fmt: skip
DENSE: dict[str, Any] = {
    "dtype": BF16, "seqlens_q": (1, 1), "seqlens_k": (300, 300), "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "head_dim_v": 32, "grad_of": (),
}  # fmt: skip
LATENT: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 48, "latent": True}
CASES = {
    "dense": Case(**DENSE),
    "dense_window_sinks": Case(**DENSE | {"window": (150, 0), "sinks": True}),
    "few_tokens": Case(**DENSE | {"seqlens_q": (3, 3), "causal": True}),
    "pages_of_16": Case(**PAGED),
    "pages_of_64": Case(**PAGED | {"page_size": 64, "window": (250, 0)}),
    "pages_of_3_packed": Case(**PAGED | {"decode": False, "seqlens_q": (3, 1, 2), "page_size": 3, "causal": True}),
    "e4m3": Case(**DENSE | {"fp8": "kv"}),
    "e4m3_blocks": Case(**DENSE | {"fp8": "block", "seqlens_q": (3, 3), "causal": True}),
    "e4m3_fp32_q": Case(**DENSE | {"fp8": "kv", "dtype": FP32}),
    "e4m3_odd_head_dim": Case(**DENSE | {"fp8": "kv", "head_dim": 33, "head_dim_v": 31}),
    "e4m3_pages_of_16": Case(**PAGED | {"fp8": "kv"}),
    "e4m3_pages_of_128": Case(**PAGED | {"fp8": "kv", "page_size": 128, "dtype": FP16, "head_dim_v": 24}),
    "int8_pages_of_16": Case(**PAGED | {"fp8": "int8", "window": (250, 0), "sinks": True}),
    "int8_pages_of_128": Case(**PAGED | {"fp8": "int8", "page_size": 128, "dtype": FP16, "head_dim_v": 24}),
    "int8_odd_head_dim": Case(**PAGED | {"fp8": "int8", "head_dim": 33, "head_dim_v": 31}),
    "int8_fp32_q": Case(**PAGED | {"fp8": "int8", "dtype": FP32, "decode": False, "seqlens_q": (3, 1, 2)}),
    "latent_int8": Case(**PAGED | LATENT | {"fp8": "int8", "page_size": 64}),
    "latent_rows": Case(**PAGED | LATENT | {"num_heads": 70, "page_size": 64, "sinks": True}),
    "latent_tokens": Case(**PAGED | LATENT | {"decode": False, "seqlens_q": (3, 0, 2), "window": (90, 0)}),
    "latent_dense": Case(**DENSE | LATENT | {"seqlens_q": (5, 5), "causal": True, "head_dim": 70, "head_dim_v": 35}),
    "latent_e4m3": Case(**PAGED | LATENT | {"fp8": "kv", "num_heads": 40}),
    "e4m3_pages_features": Case(
        **PAGED | {"fp8": "tensor", "alibi": "h", "softcap": 3.0, "sinks": True, "bias": "b1qk"}
    ),
}  # fmt: skip


# Every loader once, with something else special about each.
ORDINARY = (
    "dense_window_sinks", "few_tokens", "pages_of_16", "pages_of_3_packed", "e4m3_blocks", "e4m3_pages_of_128",
    "int8_pages_of_16", "int8_pages_of_128", "latent_rows", "latent_tokens", "latent_e4m3",
)  # fmt: skip


@only_interpreted
@pytest.mark.parametrize("case", sampled(CASES, ORDINARY))
def test_interpreted_cases(case: Case) -> None:
    check(case, BackendImplementation("triton", "cpu"))


@only_interpreted
@pytest.mark.parametrize("name", ["latent_tokens", pytest.param("latent_rows", marks=pytest.mark.exhaustive)])
def test_interpreted_latents_in_boxes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: whole tiles of pages by tensor maps, one for each part of the keys, the last tiles by pointers."""
    made = watched(monkeypatch, launch, "part_boxes")
    with overridden({"latent": configs.Config(16, 16, 4, 1, boxes=True)}):
        check(CASES[name], BackendImplementation("triton", "cpu"))
    assert made
    assert all(None not in call.result.values() for call in made)


def paged_call(k: fp8.Fp8Tensor, v: fp8.Fp8Tensor, q: torch.Tensor, length: int) -> torch.Tensor:
    """One sequence over pages in reverse order, half of the last one unused."""
    pages = -(-length // k.shape[1])
    table = torch.arange(k.shape[0] - 1, k.shape[0] - 1 - pages, -1, dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    out: torch.Tensor = tw.attention_paged(q, k, v, table, lengths, backend="triton")
    return out


def exact(k: fp8.Fp8Tensor, v: fp8.Fp8Tensor, q: torch.Tensor, length: int) -> torch.Tensor:
    """The formula in fp64."""
    keys, values = (t.dequantize().double().flip(0).flatten(0, 1)[:length].transpose(0, 1) for t in (k, v))
    groups = q.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = torch.einsum("hd,hnd->hn", q[0].double(), keys) * q.shape[-1] ** -0.5
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), values)[None]


@only_interpreted
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("page_size", "dtype", "limit"), [(16, BF16, 2.0**-7), (128, FP16, 2.0**-10)])
def test_interpreted_scales_may_differ_by_orders_of_magnitude(
    page_size: int, dtype: torch.dtype, limit: float, codes: torch.dtype
) -> None:
    """Within a tile, too: of e4m3 from page to page, of int8 from token to token. Values ten million times smaller
    count in full where their keys have the weight.

    Limits are what rounding the result makes; the interpreter cuts to bf16 instead of rounding.
    """
    torch.manual_seed(0)
    pages = 320 // page_size + 2
    x = torch.randn(2, pages, page_size, 2, 32)
    scales = pages if codes == torch.float8_e4m3fn else pages * page_size
    x[1] *= 10.0 ** torch.linspace(-3, 4, scales)[torch.randperm(scales)].view(pages, -1, 1, 1)
    k, v = (fp8.quantize_pages(t, dtype=codes) for t in x)
    q = torch.randn(1, 4, 32).to(dtype) * 30
    q[0, 1] *= 1e30 if dtype == BF16 else 1e2
    q[0, 2] *= 1e-38 if dtype == BF16 else 1e-7
    expected = exact(k, v, q, 300)
    errors = (paged_call(k, v, q, 300).double() - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(errors.max()) < limit


@only_interpreted
def test_interpreted_int8_pages_with_scales_in_the_cells_of_tokens() -> None:
    """Keys, values and their scales next to each other, as engines store them."""
    torch.manual_seed(0)
    k, v = (fp8.quantize_pages(torch.randn(22, 16, 2, 32), dtype=torch.int8) for _ in range(2))
    q = torch.randn(1, 4, 32, dtype=BF16)
    cells = torch.full((22, 16, 2, 80), -1, dtype=torch.int8)
    rows, numbers = cells.split([32, 32, 16], -1)[:2], cells.view(torch.float32).transpose(1, 2)
    for n, given in enumerate((k, v)):
        rows[n].copy_(given.data)
        numbers[..., n - 2].copy_(given.scale)
    inside = [fp8.Fp8Tensor(rows[n], numbers[..., n - 2], "token", "paged", 1) for n in range(2)]
    assert torch.equal(paged_call(inside[0], inside[1], q, 300), paged_call(k, v, q, 300))


@only_interpreted
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_interpreted_a_large_value_outside_the_window_changes_nothing(codes: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 16, 1, 64)
    y.view(128, 64)[3] *= 1e12
    k, v = (fp8.quantize_pages(t, dtype=codes) for t in (x, y))
    table, lengths = torch.arange(8, dtype=torch.int32)[None], torch.tensor([40], dtype=torch.int32)
    q = torch.randn(1, 2, 64).to(BF16)
    exact = (q.double(), k.dequantize().double(), v.dequantize().double(), table, lengths)
    expected = tw.attention_paged(*exact, window=(20, 0), backend="reference")
    out = tw.attention_paged(q, k, v, table, lengths, window=(20, 0), backend="triton")
    assert float((out.double() - expected).abs().max() / expected.abs().max()) < 2.0**-6


@only_interpreted
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("page_size", [16, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_interpreted_nan_stays_where_it_is_read(page_size: int, codes: torch.dtype) -> None:
    """e4m3 has it as a number and as the scale of a page, int8 as the scale of a token."""
    torch.manual_seed(0)
    pages, is_int8 = 320 // page_size + 3, codes == torch.int8
    k, v = (fp8.quantize_pages(torch.randn(pages, page_size, 2, 32), dtype=codes) for _ in range(2))
    q = torch.randn(1, 4, 32, dtype=BF16)
    clean = paged_call(k, v, q, 300)
    last = pages - -(-300 // page_size)
    for t in (k, v):
        t.scale[0] = torch.nan  # a page that the table does not name
        behind = t.scale[last, :, 300 % page_size :] if is_int8 else t.data[last, 300 % page_size :]
        behind.fill_(torch.nan)  # slots past the end
    if not is_int8:
        k.data[0] = v.data[0] = torch.nan
    assert torch.equal(paged_call(k, v, q, 300), clean)
    for t in (k, v) if is_int8 else (k,):
        place = t.scale[pages - 1, 1, 5] if is_int8 else t.data[pages - 1, 5, 1, 7]
        before = place.clone()
        place.fill_(torch.nan)
        broken = paged_call(k, v, q, 300)
        assert torch.equal(broken[:, :2], clean[:, :2])
        assert bool(broken[:, 2:].isnan().all())
        place.copy_(before)


def evaluated(assembly: str, word: Any) -> dict[str, Any]:
    """The registers after a few lines of PTX arithmetic on 32-bit words, `$2` being `word`."""
    registers: dict[str, Any] = {"$2": word}
    actions = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "add": lambda a, b: a + b,
        "shl": lambda a, b: a << b,
        "shr": lambda a, b: a >> b,
    }
    for action, target, left, right in re.findall(r"(\w+)\.[bu]32 (\S+), (\S+), (\w+|\$2);", assembly):
        values = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in (left, right)]
        registers[target] = actions[action](*values).astype(np.uint32)
    return registers


def test_arithmetic_for_gpus_without_the_instruction_is_exact() -> None:
    """Every pair of codes in both halves of a word, through the very text that is compiled for them."""
    pairs = np.arange(65536, dtype=np.uint32)
    after = evaluated(quantised.BY_ARITHMETIC.value, pairs | (pairs[::-1] << np.uint32(16)))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    for name, shift in (("$0", 0), ("$1", 8)):
        for half, source in ((0, pairs), (16, pairs[::-1])):
            bits = ((after[name] >> np.uint32(half)) & np.uint32(0xFFFF)).astype(np.uint16)
            found = bits.view(np.float16).astype(np.float32) * np.float32(quantised.CODE_UNIT.value)
            assert np.array_equal(found, codes[(source >> np.uint32(shift)) & np.uint32(0xFF)], equal_nan=True)


def halves(bits: Any) -> Any:
    """Both halves of words as fp16 numbers."""
    return bits.astype(np.uint32).view(np.float16).reshape(-1, 2)


def test_int8_is_widened_exactly() -> None:
    """Every pair of codes in both halves of a word, through the very text that is compiled for them."""
    pairs = np.arange(65536, dtype=np.uint32)
    registers: dict[str, Any] = {"$2": pairs | (pairs[::-1] << np.uint32(16))}

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in quantised.FROM_INT8.value.splitlines()[2:-1]:
        action, target, *sources = line.strip(" ;").replace(",", "").split()
        x = [value(name) for name in sources]
        if action == "mov.b32":
            registers[target] = np.full_like(pairs, x[0])
        elif action == "xor.b32":
            registers[target] = x[0] ^ x[1]
        elif action == "prmt.b32":
            both = x[0].astype(np.uint64) | (np.uint64(x[1]) << np.uint64(32))
            picked = [(both >> np.uint64(8 * (int(x[2]) >> 4 * n & 7))) & np.uint64(0xFF) for n in range(4)]
            registers[target] = sum(byte << np.uint64(8 * n) for n, byte in enumerate(picked)).astype(np.uint32)
        else:
            assert action == "sub.rn.f16x2"
            registers[target] = halves(x[0]) - halves(x[1])
    codes = np.arange(256, dtype=np.uint8).view(np.int8)
    for name, shift in (("$0", 0), ("$1", 8)):
        for half, source in ((0, pairs), (1, pairs[::-1])):
            assert np.array_equal(registers[name][:, half], codes[(source >> np.uint32(shift)) & np.uint32(0xFF)])


def decoding(page_size: int | None, *, codes: str, dtype: torch.dtype = BF16, head_dim: int = 128) -> AttentionProblem:
    """32 query and 8 K/V heads, 16 sequences of 8192 keys."""
    return AttentionProblem(
        kind="dense" if page_size is None else "paged", dtype=dtype, batch=16, seqlen_q=1, seqlen_k=8192, total_q=16,
        total_k=16 * 8192, num_heads=32, num_kv_heads=8, head_dim=head_dim, head_dim_v=head_dim, scale=head_dim**-0.5,
        page_size=page_size, fp8=("k", "v") if codes else (), int8=codes == "int8",
        scale_blocks=(None, 1, 1) if codes == "int8" else (None, None, None),
    )  # fmt: skip


# Bytes of registers through memory where they are bounded: e4m3 from pages of 16 spills 56 on an H200 and reads as of
# 8073 GB/s so, 7650 unbounded. int8 has a scale for each key whatever the pages are; it spills 152 on an A100.
SPILL_LIMIT = {"": 0, "e4m3": 128, "int8": 160}
# Every loader once in the fast run; the rest with `-m exhaustive`.
SAMPLED = {("h200", 256, ""), ("h200", 16, "e4m3"), ("a100", 16, "e4m3"), ("h200", 64, "int8")}
COMPILED = [
    pytest.param(*choice, id="-".join(map(str, choice)), marks=() if choice in SAMPLED else pytest.mark.exhaustive)
    for choice in itertools.product(("h200", "a100"), (None, 16, 64, 256), ("", "e4m3", "int8"))
    if choice[1:] != (None, "int8")
]


@pytest.mark.slow
@only_compiled
@pytest.mark.parametrize(("device", "page_size", "codes"), COMPILED)
def test_compiled_decoding_keeps_its_pipeline(device: str, page_size: int | None, codes: str) -> None:
    """Pages and scales are looked up without taking a stage away from the tiles of K and V, nothing spills, and 8-bit
    tiles are not read byte by byte.
    """
    spec = devices.named(device)
    call = launch.calls_of(decoding(page_size, codes=codes), spec)[0]
    compiled = compilation.compile_call(call, spec, -1)
    tile = call.arguments["BLOCK_N"] * 128 * (1 if codes else 2)
    assert compiled.metadata.shared >= 2 * (call.num_stages - 1) * tile
    assert compiled.metadata.shared <= spec.smem_bytes
    registers, spilled = registers_of(assembled(compiled.asm["ptx"]))
    assert registers <= 255
    assert spilled <= (SPILL_LIMIT[codes] if call.max_registers else 0)
    assert not re.search(r"ld\.shared\S*\.[bu]8 ", compiled.asm["ptx"])
    assert ("cvt.rn.f16x2.e4m3x2" in compiled.asm["ptx"]) == (codes == "e4m3" and spec.has_fp8)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fixed splits of 128 keys, merged two at a time."""
    caches = (planning._plan, launching.kept)
    monkeypatch.setattr(planning, "SPLIT_KEYS", 128)
    monkeypatch.setattr(launch, "COMBINED_ELEMENTS", 2 * 64)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@only_interpreted
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("kind", ["decode", "paged", "varlen", "dense"])
def test_results_do_not_depend_on_the_batch(kind: str) -> None:
    """Sequences have one, two or three splits; the last splits are empty for most. Only decoding splits keys, so it has
    two batches and a window, the others one batch.
    """
    sequences = Sequences(kind, BF16, lengths=(1, 200, 128, 257, 64))
    for window in (None, (70, 0)) if kind == "decode" else (None,):
        check_invariant(sequences, rounds=2 if kind == "decode" else 1, backend="triton", window=window)


@only_interpreted
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    "name", ["pages_of_16", "dense_window_sinks", "pages_of_3_packed", "e4m3_pages_of_128", "latent_tokens"]
)
def test_fixed_splits_compute_the_same(name: str) -> None:
    check(replace(CASES[name], deterministic="batch"), BackendImplementation("triton", "cpu"))
