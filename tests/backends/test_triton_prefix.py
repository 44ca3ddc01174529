"""The pass over shared prefixes without a GPU: in the interpreter against fp64, and what is compiled for GPUs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import watched
from sampling import sampled
from tilewise import device as devices
from tilewise import fp8
from tilewise.operands import Flags, Operands
from tilewise.problem import AttentionProblem
from tilewise.validation import problem_of

triton = pytest.importorskip("triton")
prefix = pytest.importorskip("tilewise.backends.triton.prefix")
triton_backend = pytest.importorskip("tilewise.backends.triton").BACKEND
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
gpu_offline = pytest.importorskip("tilewise.backends.gpu.offline")
launching = pytest.importorskip("tilewise.backends.gpu.launching")

INTERPRETED = bool(triton.knobs.runtime.interpret)
BF16, FP32 = torch.bfloat16, torch.float32
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="only in the interpreter")
only_compiled = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")


class Shared(NamedTuple):
    """A batch of one token a sequence: `groups` are (sequences, shared pages), `own` the keys each has alone."""

    groups: tuple[tuple[int, int], ...] = ((5, 3), (2, 7))
    own: int = 3
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    dtype: torch.dtype = BF16
    softcap: float | None = None
    in_order: bool = False
    codes: torch.dtype | None = None


CASES = {
    "pages_of_16": Shared(),
    "pages_of_64": Shared(page_size=64, groups=((3, 2),), in_order=True),
    "pages_of_3": Shared(page_size=3, groups=((9, 30), (3, 5)), heads=(2, 2)),
    "fp32": Shared(dtype=FP32, dims=(40, 24), groups=((3, 3), (2, 2))),
    "softcap": Shared(softcap=2.0, groups=((3, 2),), heads=(2, 1)),
    "no_own_keys": Shared(own=0, groups=((3, 3), (1, 2)), heads=(2, 1)),
    "a_group_of_none": Shared(groups=((4, 3), (0, 2))),
    "e4m3": Shared(codes=torch.float8_e4m3fn),
    "int8": Shared(codes=torch.int8),
    "e4m3_odd_head_dim": Shared(codes=torch.float8_e4m3fn, dims=(33, 31)),
}


class Batch:
    """Tensors of a case: pages in random order, NaN where nobody may look, sequences in random order."""

    def __init__(self, case: Shared) -> None:
        generator = torch.Generator().manual_seed(3)
        self.case, (heads, kv_heads), (dim, dim_v) = case, case.heads, case.dims
        size, own_pages = case.page_size, -(-case.own // case.page_size)
        members = [group for group, (count, _) in enumerate(case.groups) for _ in range(count)]
        free = iter(torch.randperm(400, generator=generator).int().tolist())
        prefixes = [[next(free) for _ in range(pages)] for _, pages in case.groups]
        own = [[next(free) for _ in range(own_pages)] for _ in members]
        places = torch.arange(len(members))
        self.rows = places if case.in_order else torch.randperm(len(members), generator=generator)
        width = max(pages for _, pages in case.groups)
        self.table = torch.full((len(members), width + own_pages), 399, dtype=torch.int32)
        self.own_table = torch.full((len(members), max(1, own_pages)), 399, dtype=torch.int32)
        self.lengths = torch.zeros(len(members), dtype=torch.int32)
        self.k, self.v = (torch.full((400, size, kv_heads, n), torch.nan) for n in (dim, dim_v))
        for place, (group, mine) in enumerate(zip(members, own, strict=True)):
            row, pages = int(self.rows[place]), [*prefixes[group], *mine]
            self.table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self.own_table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            self.lengths[row] = len(prefixes[group]) * size + case.own
        self.prefix_table = torch.zeros(len(case.groups), width, dtype=torch.int32)
        for group, pages in enumerate(prefixes):
            self.prefix_table[group, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for page in {page for pages in (*prefixes, *own) for page in pages}:
            for tensor in (self.k, self.v):
                tensor[page] = torch.randn(tensor.shape[1:], generator=generator)
        self.q = torch.randn(len(members), heads, dim, generator=generator).to(case.dtype)
        self.k, self.v = self.k.to(case.dtype), self.v.to(case.dtype)

    def prefix(self) -> Operands:
        """The operands of the pass: groups in the place of sequences."""
        counts = [count for count, _ in self.case.groups]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        keys = torch.tensor([pages * self.case.page_size for _, pages in self.case.groups], dtype=torch.int32)
        return Operands(
            self.q, self.k, self.v, cu_seqlens_q=starts, block_table=self.prefix_table, seqlens_k=keys
        )  # fmt: skip


def flags_of(case: Shared) -> Flags:
    rows = 1 if case.codes == torch.int8 else None
    return Flags(softcap=case.softcap, k_block=rows, v_block=rows)


@only_interpreted
@pytest.mark.parametrize("case", sampled(CASES, ("pages_of_3", "fp32", "no_own_keys", "e4m3", "int8")))
def test_interpreted_prefixes_complete_what_rows_see_of_their_own_keys(case: Shared) -> None:
    completes(case)


@only_interpreted
def test_interpreted_prefixes_in_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper: whole tiles of pages come by tensor maps."""
    monkeypatch.setattr(devices.DeviceSpec, "has_tma", True)
    made = watched(monkeypatch, prefix, "_boxes")
    completes(CASES["pages_of_64"])
    assert made
    assert all(None not in call.result.values() for call in made)


def completes(case: Shared) -> None:
    """Prefixes that are attended after a row's own keys give what fp64 gives for both."""
    batch = Batch(case)
    k: Any = batch.k
    v: Any = batch.v
    operands = batch.prefix()
    if case.codes is not None:
        codes = [fp8.quantize_pages(t.nan_to_num(0.0), dtype=case.codes) for t in (k, v)]
        k, v = codes
        operands = operands._replace(
            k=codes[0].data, v=codes[1].data, k_scale=codes[0].scale, v_scale=codes[1].scale
        )  # fmt: skip
    own = torch.full((len(batch.q),), case.own, dtype=torch.int32)
    flags: dict[str, Any] = {"softcap": case.softcap, "return_lse": True, "backend": "reference"}
    out, lse = tw.attention_paged(batch.q, k, v, batch.own_table, own, **flags)
    exact_k, exact_v = (t.double() if case.codes is None else t.dequantize().double() for t in (k, v))
    want, want_lse = tw.attention_paged(batch.q.double(), exact_k, exact_v, batch.table, batch.lengths, **flags)
    problem = problem_of("paged", operands, flags_of(case))
    triton_backend.attend_prefixes(
        problem, operands, len(batch.q), None if case.in_order else batch.rows, out, lse
    )  # fmt: skip
    # Of rounding twice, and of probabilities in 16 bits.
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(out.double(), want, atol=4 * eps, rtol=2 * eps)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)


def own_and_prefixes(batch: Batch, unread: tuple[str, ...]) -> tuple[Any, list[Any], tuple[Any, Any]]:
    """Both passes of a batch as one, the tensors it is called with, and exact pages."""
    case, prefix = batch.case, batch.prefix()
    exact = batch.k.double(), batch.v.double()
    if case.codes is not None:
        k, v = (fp8.quantize_pages(t.nan_to_num(0.0), dtype=case.codes) for t in (batch.k, batch.v))
        prefix = prefix._replace(k=k.data, v=v.data, k_scale=k.scale, v_scale=v.scale)
        exact = k.dequantize().double(), v.dequantize().double()
    lengths = torch.full((len(batch.q),), case.own, dtype=torch.int32)
    own = prefix._replace(cu_seqlens_q=None, block_table=batch.own_table, seqlens_k=lengths)
    flags, rows = flags_of(case), None if case.in_order else batch.rows
    bound = triton_backend.bind_forward(problem_of("paged", own, flags), own, want_lse=True)
    results = batch.q.new_empty(*batch.q.shape[:2], case.dims[1]), torch.empty(batch.q.shape[1::-1])
    attend = triton_backend.bind_prefixes(problem_of("paged", prefix, flags), prefix, len(batch.q), rows, *results)
    count = len(own)
    # The batch's own tables are not read.
    whole = own._replace(block_table=torch.full_like(batch.table, 399), seqlens_k=batch.lengths)
    hint = (prefix.block_table, prefix.seqlens_k, prefix.cu_seqlens_q, rows, own.block_table, own.seqlens_k)
    both = triton_backend.bind_after(bound, attend, count, unread, problem_of("paged", own, flags))
    return both, [*whole, *hint], exact


def poisoned(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype)
    return made.fill_(255 if dtype == torch.uint8 else torch.nan)


# Batches with the splits of their prefixes, and what nobody reads of the results.
AS_ONE: dict[str, tuple[Shared, int, tuple[str, ...]]] = {
    "two groups": (Shared(groups=((2, 3), (1, 2)), heads=(2, 1)), 3, ()),
    "e4m3, no lse": (Shared(groups=((3, 3),), heads=(2, 1), codes=torch.float8_e4m3fn, in_order=True), 2, ("lse",)),
    "no own keys": (Shared(groups=((2, 2),), own=0, heads=(2, 2), softcap=2.0), 1, ()),
    "many splits": (Shared(groups=((2, 12), (1, 3)), heads=(2, 1)), 11, ()),
    "as many as are joined": (Shared(groups=((3, 9),), heads=(6, 2), in_order=True), 4, ("lse",)),
}


@only_interpreted
@pytest.mark.parametrize(
    ("case", "splits", "unread"), sampled(AS_ONE, ("e4m3, no lse", "many splits", "as many as are joined"))
)
def test_interpreted_passes_of_own_keys_and_prefixes_as_one(
    case: Shared, splits: int, unread: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the pass that `bind_after` makes gives what fp64 gives, in memory full of NaN, for other queries in
    other places as well.
    """
    monkeypatch.setattr(prefix, "num_splits", lambda *_: splits)
    launching.kept.cache_clear()
    batch = Batch(case)
    both, given, (exact_k, exact_v) = own_and_prefixes(batch, unread)
    both._allocate = poisoned
    counters = torch.zeros(both.num_counters, dtype=torch.int32)
    monkeypatch.setattr(both, "_counters", SimpleNamespace(current=lambda *_: counters))
    assert both.made == ("out", "lse")[: 2 - len(unread)]
    # Few splits are merged by the program that comes last, many by a kernel for that.
    names = [call.kernel.__name__ for call in both.calls]
    assert names[-1] == ("prefix_kernel" if splits <= prefix.JOINED_SPLITS else "merge_prefix_kernel")
    flags: dict[str, Any] = {"softcap": case.softcap, "return_lse": True, "backend": "reference"}
    for number in range(2):
        given[0] = q = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(number)).to(case.dtype)
        made = both(given)
        assert made is not None
        want, want_lse = tw.attention_paged(q.double(), exact_k, exact_v, batch.table, batch.lengths, **flags)
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(made[0].double(), want, atol=4 * eps, rtol=2 * eps)
        if not unread:
            torch.testing.assert_close(made[1].double(), want_lse, atol=1e-4, rtol=1e-5)
        # Whoever came last has left none for the next call on this stream.
        assert not counters.any()
    launching.kept.cache_clear()


@pytest.mark.slow
@only_compiled
@pytest.mark.parametrize(
    ("device", "dim", "page_size", "e4m3", "joined"),
    [
        ("h200", 128, 64, False, True),
        ("h200", 128, 64, True, False),
        ("a100", 64, 16, False, True),
        pytest.param("h200", 256, 64, False, False, marks=pytest.mark.exhaustive),
        pytest.param("a100", 256, 64, False, False, marks=pytest.mark.exhaustive),
        pytest.param("a100", 128, 64, True, True, marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_fit_the_device(device: str, dim: int, page_size: int, e4m3: bool, joined: bool) -> None:
    problem = AttentionProblem(
        kind="paged", dtype=BF16, batch=2, seqlen_q=64, seqlen_k=4096, total_q=80, total_k=8192, num_heads=32,
        num_kv_heads=8, head_dim=dim, head_dim_v=dim, scale=0.1, page_size=page_size, fp8=("k", "v") if e4m3 else (),
    )  # fmt: skip
    views = gpu_offline.operand_views(problem, packed_queries=True)
    for name, shape, dtype in (("out", (80, 32, dim), BF16), ("lse", (32, 80), FP32), ("rows", (80,), torch.int64)):
        views[name] = launching.Allocation.contiguous(shape, dtype).view
    spec = devices.named(device)
    calls = prefix.prefix_calls(problem, 80, spec, views, joined=joined)
    for call in calls:
        compiled = compilation.compile_call(call, spec, -1)
        assert compiled.metadata.shared <= spec.smem_bytes
        if joined:
            # Every warp has read a row's own lse before one of them writes the merged one.
            steps = re.findall(r"tt\.load|tt\.store|barrier\b", compiled.asm["ttir"])
            last = len(steps) - 1 - steps[::-1].index("tt.load")
            assert steps[last:] == ["tt.load", "barrier", "tt.store", "tt.store"]
    attended = calls[0].arguments
    # Whole tiles of a page come by TMA where there is any.
    assert (attended["k_desc"] is not None) == (device == "h200" and page_size == 64 and not e4m3)
    assert calls[0].grid[0] == attended["num_blocks"] * attended["num_splits"] * 8 * 2
