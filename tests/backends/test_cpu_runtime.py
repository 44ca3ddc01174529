"""The CPU backend as a citizen of its process: threads, forks, the cache, memory, the same bits for any threads."""

from __future__ import annotations

import concurrent.futures
import itertools
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from making import check_merging
from tilewise.backends.cpu import BACKEND, threads
from tilewise.testing.threads import one_thread

pytestmark = pytest.mark.slow


@pytest.fixture
def thread_count() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def inputs(
    seqlen: int = 300, heads: int = 4, kv_heads: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, seqlen, 64), (1, kv_heads, seqlen, 64), (1, kv_heads, seqlen, 64))
    return [torch.randn(shape, generator=make).to(dtype).requires_grad_() for shape in shapes]


def results(**flags: Any) -> list[torch.Tensor]:
    q, k, v = inputs()
    bias = torch.randn(1, 4, 300, 300, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sinks = torch.zeros(4, requires_grad=True)
    out, lse = tw.attention(q, k, v, bias=bias, sinks=sinks, backend="cpu", return_lse=True, **flags)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, bias, sinks))
    return [out, lse, *grads]


@pytest.mark.parametrize(
    "flags", [{}, {"causal": True, "dropout": 0.2, "seed": 3}, {"window": (40, 9), "softcap": 4.0}], ids=str
)
def test_bits_do_not_depend_on_threads(flags: dict[str, Any], thread_count: int) -> None:
    expected = None
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        got = results(**flags)
        expected = expected or got
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [50, 70])
def test_heads_of_a_group_are_computed_together_to_the_bits_of_heads_alone(
    rows: int, dtype: torch.dtype, thread_count: int
) -> None:
    make = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, rows, 40, generator=make).to(dtype)
    k, v = (torch.randn(1, 2, 2100, 40, generator=make).to(dtype) for _ in range(2))
    # 50 rows are split over keys, 70 are not; with 9 threads blocks are one panel, which starts within any head.
    for causal in (False, True):
        torch.set_num_threads(thread_count)
        apart = (t.repeat_interleave(3, 1) for t in (k, v))
        alone = tw.attention(q, *apart, causal=causal, window=(1500, None), backend="cpu", return_lse=True)
        for count in (1, 2, 9):
            torch.set_num_threads(count)
            together = tw.attention(q, k, v, causal=causal, window=(1500, None), backend="cpu", return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_decode_bits_do_not_depend_on_threads(kv_heads: int, thread_count: int) -> None:
    q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, kv_heads, 5000, 64), torch.randn(2, kv_heads, 5000, 64)
    outs = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        outs.append(tw.attention(q, k, v, backend="cpu"))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("page_size", "heads", "kv_heads", "dim"), [(16, 8, 8, 64), (24, 12, 6, 40), (7, 8, 1, 128)])
def test_pages_and_layouts_decode_to_the_bits_of_dense_tensors(
    page_size: int, heads: int, kv_heads: int, dim: int, thread_count: int
) -> None:
    """An item takes as many K/V heads as threads and lengths allow, and pages end anywhere."""
    seqlen = 336 * 7
    q, k, v = torch.randn(2, 1, heads, dim), *(torch.randn(2, seqlen, kv_heads, dim) for _ in "kv")
    torch.set_num_threads(1)
    expected = tw.attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), backend="cpu").transpose(1, 2)
    order = torch.randperm(2 * seqlen // page_size)
    k_pages, v_pages = (torch.empty(len(order), page_size, kv_heads, dim) for _ in "kv")
    k_pages[order], v_pages[order] = k.view(k_pages.shape), v.view(v_pages.shape)
    lengths = torch.full((2,), seqlen, dtype=torch.int32)
    table = order.to(torch.int32).view(2, -1)
    for count in (1, 4, 16):
        torch.set_num_threads(count)
        assert torch.equal(tw.attention(q, k, v, layout="bshd", backend="cpu"), expected)
        paged = tw.attention_paged(q[:, 0], k_pages, v_pages, table, lengths, backend="cpu")
        assert torch.equal(paged, expected[:, 0])


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    """Packed with others or alone, the same bits, few rows and many; the bounds say which kernel is taken."""
    lengths = (3, 333, 1, 64)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    q, k, v = (torch.randn(sum(lengths), heads, 64, requires_grad=True) for heads in (4, 2, 2))

    def attend(begin: int, end: int, *cuts: int) -> list[torch.Tensor]:
        cu_seqlens = torch.tensor(cuts, dtype=torch.int32)
        rows = (q[begin:end], k[begin:end], v[begin:end])
        out = tw.attention_varlen(
            *rows, cu_seqlens, cu_seqlens, causal=True, backend="cpu", max_seqlen_q=512, max_seqlen_k=512
        )
        return [out, *torch.autograd.grad(out.square().sum(), rows)]

    together = attend(0, ends[-1], *ends)
    for begin, end in itertools.pairwise(ends):
        for whole, alone in zip(together, attend(begin, end, 0, end - begin), strict=True):
            assert torch.equal(whole[begin:end], alone)


@pytest.mark.parametrize("some", [False, True], ids=["first rows", "named rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_partial_rows_are_merged_in_place(dtype: torch.dtype, some: bool) -> None:
    check_merging(BACKEND.merge_rows, dtype, some)


def test_nan_in_a_key_is_nan_in_lse_and_gradients_of_its_head() -> None:
    """And lse is not -inf: who merges the result would take it for one without keys, and so would dV of other keys."""
    q, k, v, dout = torch.randn(4, 1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    k[0, 1, 9] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for backend in ("cpu", "reference"):
        out, lse = tw.attention(q, k, v, backend=backend, return_lse=True)
        found.append([x.isnan() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))])
    assert found[0][1][0, 1].all()
    assert not found[0][1][0, 0].any()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
def test_nan_queries_stay_nan_when_keys_are_chunked(seqlen_q: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)) for n in (seqlen_q, 6000, 6000))
    q[0, 1, 0] = torch.nan
    out, lse = tw.attention(q, k, v, backend="cpu", return_lse=True)
    assert out[0, 1, 0].isnan().all()
    assert lse[0, 1, 0].isnan()
    assert not out[0, 0].isnan().any()
    assert not out[0, 1, 1:].isnan().any()


def test_concurrent_callers_agree() -> None:
    expected = results(causal=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: results(causal=True), range(12)):
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_gil_is_released() -> None:
    q, k, v = (x.detach() for x in inputs(6000))
    tw.attention(q, k, v, backend="cpu")
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    worker = threading.Thread(target=tick)
    worker.start()
    before = ticks[0]
    tw.attention(q, k, v, backend="cpu")
    seen = ticks[0] - before
    stop.set()
    worker.join()
    assert seen >= 3


def test_pool_takes_over_without_openmp(monkeypatch: pytest.MonkeyPatch, thread_count: int) -> None:
    expected = results(causal=True)
    monkeypatch.setattr(threads, "_openmp_parallel", lambda: None)
    torch.set_num_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(expected, results(causal=True), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="the list of loaded libraries is Linux's")
def test_openmp_of_a_torch_behind_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, other = (tmp_path / folder / "lib" / "libgomp.so.1" for folder in ("torch", "another"))
    own.parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to(own.parents[1])
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "link" / "__init__.py"))
    monkeypatch.setattr(Path, "read_text", lambda _: f"0-1 r-xp 0 00:00 1 {other}\n0-1 r-xp 0 00:00 1 {own}\n")
    assert threads.openmp_library() == own


def test_memory_is_linear() -> None:
    q, k, v = (torch.randn(1, 1, 32768, 16) for _ in range(3))
    tw.attention(q[:, :, :600], k[:, :, :600], v[:, :, :600], backend="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tw.attention(q, k, v, causal=True, window=(256, 0), backend="cpu")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, "KiB beyond the inputs"


LOOSE = 2**31 - 1
CUTS = torch.tensor([0, 5, 5, 74], dtype=torch.int32)


def gradients(flags: dict[str, Any]) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(74, 2, 32, generator=make).requires_grad_() for _ in range(3))
    out, lse = tw.attention_varlen(q, k, v, CUTS, CUTS, **flags)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))]


@pytest.mark.parametrize("flags", [{}, {"causal": True, "alibi_slopes": torch.ones(2)}], ids=["full", "alibi"])
@pytest.mark.parametrize("bounds", ["max_seqlen_k", "max_seqlen_q"])
@pytest.mark.parametrize("threads", [1, 5])
def test_a_loose_bound_asks_for_no_memory(threads: int, bounds: str, flags: dict[str, Any]) -> None:
    """dk and dv of 2^31 - 1 keys would take 550 GB a thread; 5 threads run two passes, 1 thread runs one."""
    flags = flags | {"return_lse": True, "backend": "cpu"}
    expected = gradients(flags)
    with one_thread():
        torch.set_num_threads(threads)
        found = gradients(flags | {bounds: LOOSE})
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


SUITE = Path(__file__).parent / "test_conformance.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", ["NEON", "AVX2", "GENERIC"])
def test_kernels_of_other_processors_conform(table: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(SUITE), "--backend", "cpu", "--isa", table]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
