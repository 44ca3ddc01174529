"""`out=` on a real GPU: every kind of kernel writes into memory of the caller, without a copy and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from making import NoWaiting, prefix_of_all
from making import cuda_int32 as int32
from making import cuda_randn as randn
from tilewise.errors import InvalidProblem

pytestmark = pytest.mark.hopper

Attend = Callable[..., Any]


def dense(backend: str) -> Attend:
    q, k, v = randn(2, 8, 1000, 128), randn(2, 2, 1000, 128), randn(2, 2, 1000, 128)
    return lambda **more: tw.attention(q, k, v, causal=True, backend=backend, **more)


def seqlen_first(backend: str) -> Attend:
    q, k, v = randn(2, 1000, 8, 64), randn(2, 1000, 2, 64), randn(2, 1000, 2, 64)
    return lambda **more: tw.attention(q, k, v, layout="bshd", backend=backend, **more)


def packed(backend: str) -> Attend:
    q, k, v, cu = randn(900, 8, 128), randn(900, 2, 128), randn(900, 2, 128), int32(0, 130, 130, 800)
    lengths: Any = {"max_seqlen_q": 670, "max_seqlen_k": 670}
    return lambda **more: tw.attention_varlen(q, k, v, cu, cu, causal=True, backend=backend, **lengths, **more)


def pages(backend: str, rows: int) -> Attend:
    q, k, v = randn(4 * rows, 8, 128), randn(200, 64, 2, 128), randn(200, 64, 2, 128)
    table, lengths = torch.randperm(200, device="cuda").int().view(4, 50), int32(3200, 1, 700, 1500)
    cu = None if rows == 1 else int32(*range(0, 4 * rows + 1, rows))
    more: Any = {} if rows == 1 else {"max_seqlen_q": rows, "causal": True}
    return lambda **others: tw.attention_paged(
        q, k, v, table, lengths, cu_seqlens_q=cu, backend=backend, **more, **others
    )


CALLS: dict[str, Callable[[], Attend]] = {
    **{f"{make.__name__} {backend}": lambda make=make, backend=backend: make(backend)  # type: ignore[misc]
       for make in (dense, seqlen_first, packed) for backend in ("hopper", "triton")},
    **{f"{name} {backend}": lambda rows=rows, backend=backend: pages(backend, rows)  # type: ignore[misc]
       for name, rows in (("decode", 1), ("chunk", 200)) for backend in ("hopper", "triton")},
    "decode with several rows": lambda: pages("hopper", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_in_memory_of_the_caller(name: str, no_waiting: NoWaiting) -> None:
    attend = CALLS[name]()
    expected, lse = attend(return_lse=True)
    for padding in (0, 8, 3):
        memory = torch.full((*expected.shape[:-1], expected.shape[-1] + padding), 7.0).to(expected)
        given = memory[..., : expected.shape[-1]]
        for _ in range(3):
            given.fill_(7.0)
            with no_waiting():
                out, made_lse = attend(return_lse=True, out=given)
            assert out is given
            assert torch.equal(given, expected)
            assert torch.equal(made_lse, lse)
            assert bool((memory[..., expected.shape[-1] :] == 7.0).all())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(out=given)
    given.zero_()
    graph.replay()
    assert torch.equal(given, expected)


@pytest.mark.parametrize("name", CALLS)
def test_no_memory_is_allocated_for_the_result(name: str) -> None:
    attend = CALLS[name]()
    out = torch.empty_like(attend())
    allocated = []
    for given in (None, out):
        for _ in range(2):
            attend(out=given)
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        attend(out=given)
        allocated.append(torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before)
    assert allocated[0] - allocated[1] >= out.numel() * out.element_size()


def test_memory_of_an_operand_is_refused_in_known_calls() -> None:
    memory = randn(4, 1, 8, 512, 128)
    q, k, v, out = memory
    tw.attention(q, k, v, out=out)
    tw.attention(q, k, v, out=out)
    with pytest.raises(InvalidProblem, match="does not overlap k"):
        tw.attention(q, k, v, out=k)


@pytest.mark.parametrize("padding", [0, 8])
def test_with_a_shared_prefix(padding: int) -> None:
    """64 sequences share 4096 keys: one bound pass for own keys and prefix from the second call on."""
    batch, shared_pages, own_pages = 64, 64, 2
    count = shared_pages + batch * own_pages
    q, k, v = randn(batch, 8, 128), randn(count, 64, 2, 128), randn(count, 64, 2, 128)
    own = torch.arange(shared_pages, count, device="cuda").int().view(batch, own_pages)
    prefix = torch.arange(shared_pages, device="cuda").int()[None]
    table, lengths = torch.cat([prefix.expand(batch, -1), own], 1), int32(*[64 * 64 + 100] * batch)
    shared = prefix_of_all(table, lengths, 64 * 64, 64)
    expected, lse = tw.attention_paged(q, k, v, table, lengths, shared_prefix=shared, return_lse=True)
    memory = torch.empty(batch, 8, 128 + padding, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        out = memory.fill_(7.0)[..., :128]
        made, made_lse = tw.attention_paged(q, k, v, table, lengths, shared_prefix=shared, return_lse=True, out=out)
        assert made is out
        assert torch.equal(out, expected)
        assert torch.equal(made_lse, lse)
        assert tw.attention_paged(q, k, v, table, lengths, shared_prefix=shared, out=out) is out
        assert torch.equal(out, expected)
        assert bool((memory[..., 128:] == 7.0).all())
