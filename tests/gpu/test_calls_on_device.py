"""Every kind of call as a program makes it on a real GPU: again and again, in graphs, on streams, in threads, compiled.

A call that was made before finds its kernels' parameters laid out and its counters kept by the stream, so these
ask whether any of that is ever used where it should not be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import NoWaiting, prefix_of_all
from making import cuda_int32 as int32
from making import cuda_randn as randn
from tilewise import fp8

pytestmark = [pytest.mark.hopper, pytest.mark.usefixtures("always_cascade")]

BATCH, PAGE, PAGES, SHARED_PAGES = 4, 64, 20, 12
Attend = Callable[[Tensor], Any]


def prompts() -> tuple[Tensor, Attend]:
    k, v = randn(2, 4, 333, 128), randn(2, 4, 333, 128)
    return randn(2, 4, 333, 128), lambda q: tw.attention(q, k, v, causal=True)


def e4m3_prompts() -> tuple[Tensor, Attend]:
    k, v = (fp8.quantize(randn(2, 4, 333, 128), granularity="block") for _ in range(2))
    return randn(2, 4, 333, 128), lambda q: tw.attention(fp8.quantize(q, granularity="block"), k, v, causal=True)


def packed_prompts() -> tuple[Tensor, Attend]:
    k, v, cu = randn(500, 4, 128), randn(500, 4, 128), int32(0, 130, 500)

    def attend(q: Tensor) -> Tensor:
        return tw.attention_varlen(q, k, v, cu, cu, causal=True, max_seqlen_q=370, max_seqlen_k=370)

    return randn(500, 4, 128), attend


def rows() -> tuple[Tensor, Attend]:
    k, v = randn(2, 4, 3000, 128), randn(2, 4, 3000, 128)
    return randn(2, 16, 1, 128), lambda q: tw.attention(q, k, v)


def _pages() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, pages of which the first ones are shared by all sequences, the table, the lengths."""
    k, v = randn(100, PAGE, 4, 128), randn(100, PAGE, 4, 128)
    table = torch.randperm(100)[: BATCH * PAGES].view(BATCH, PAGES).int()
    table[:, :SHARED_PAGES] = table[0, :SHARED_PAGES]
    return randn(BATCH, 16, 128), k, v, table.cuda(), int32(1200, 1280, 800, 1001)


def pages() -> tuple[Tensor, Attend]:
    q, k, v, table, lengths = _pages()
    return q, lambda q: tw.attention_paged(q, k, v, table, lengths)


def e4m3_pages() -> tuple[Tensor, Attend]:
    q, k, v, table, lengths = _pages()
    keys, values = fp8.quantize_pages(k), fp8.quantize_pages(v)
    return q, lambda q: tw.attention_paged(q, keys, values, table, lengths)


def shared_pages() -> tuple[Tensor, Attend]:
    q, k, v, table, lengths = _pages()
    prefix = prefix_of_all(table, lengths, SHARED_PAGES * PAGE, PAGE)
    return q, lambda q: tw.attention_paged(q, k, v, table, lengths, shared_prefix=prefix)


def masked() -> tuple[Tensor, Attend]:
    k, v = randn(2, 4, 1000, 128), randn(2, 4, 1000, 128)
    mask = tw.TileMask.documents(torch.arange(1000, device="cuda") // 130)
    return randn(2, 4, 1000, 128), lambda q: tw.attention(q, k, v, mask=mask)


KINDS = [prompts, e4m3_prompts, packed_prompts, rows, pages, e4m3_pages, shared_pages, masked]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_a_call_does_not_wait_for_the_device(kind: Any, no_waiting: NoWaiting) -> None:
    q, attend = kind()
    attend(q)
    with no_waiting(), torch.inference_mode():
        for _ in range(3):
            attend(q)
            attend(torch.empty_like(q))  # at another address


@every_kind
def test_graphs_and_calls_side_by_side(kind: Any) -> None:
    """Two graphs are replayed on two streams while calls run on a third: nobody writes where another one reads."""
    q, attend = kind()
    other = randn(*q.shape)
    wanted = [attend(q).clone(), attend(other).clone()]
    captured = []
    for tensor in (q, other):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [attend(tensor) for _ in range(3)]
        captured.append((graph, results, torch.cuda.Stream()))
    for _ in range(20):
        torch.cuda.synchronize()
        for graph, _, stream in captured:
            with torch.cuda.stream(stream):
                graph.replay()
        mine = [attend(q) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(torch.equal(one, wanted[0]) for one in mine)
        for want, (_, results, _) in zip(wanted, captured, strict=True):
            assert all(torch.equal(one, want) for one in results)


@every_kind
def test_streams_and_threads(kind: Any) -> None:
    """Eight threads, two on each of four streams."""
    q, attend = kind()
    inputs = [randn(*q.shape) for _ in range(8)]
    wanted = [attend(tensor).clone() for tensor in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]

    def work(number: int) -> bool:
        with torch.cuda.stream(streams[number % 4]):
            found = [attend(inputs[number]) for _ in range(30)]
            streams[number % 4].synchronize()
            return all(torch.equal(one, wanted[number]) for one in found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# Importing inductor is enough for torch 2.11 to warn about its own use of TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
# Not of e4m3 prompts: compiled code quantises q by other kernels, with other roundings.
@pytest.mark.parametrize("kind", [k for k in KINDS if k is not e4m3_prompts], ids=lambda kind: kind.__name__)
def test_compiled_whole(kind: Any) -> None:
    q, attend = kind()
    compiled = torch.compile(lambda q: attend(q * 2), fullgraph=True)
    torch.testing.assert_close(compiled(q), attend(q * 2), atol=1e-2, rtol=1e-2)


@every_kind
def test_addresses_that_are_not_aligned(kind: Any) -> None:
    """Between calls that look the same but are."""
    q, attend = kind()
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape).copy_(q)
    wanted = attend(q)
    for tensor in (shifted, q, shifted, q):
        torch.testing.assert_close(attend(tensor), wanted, atol=1e-2, rtol=1e-2)


def test_a_thread_without_a_context() -> None:
    """The driver refuses its first launch, which is then started in the public way."""
    q, attend = rows()
    wanted, found = attend(q), list[Tensor]()
    thread = threading.Thread(target=lambda: found.append(attend(q)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)
