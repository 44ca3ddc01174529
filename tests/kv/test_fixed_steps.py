"""Fixed steps: one row for every seat and the same tensors each time, while requests grow, come and go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from shadow import KV_HEADS, LAYERS, SEATS, Served
from tilewise.kv.tables import HostTables, StagedTables, Tables

HEADS, DIM, PAGE = 4, 16, 4


def served_by(tables: type[Tables] = HostTables) -> Served:
    torch.manual_seed(0)
    served = Served()
    served.cache._tables = tables(served.cache.book, served.cache.device)
    return served


def places(cache: tw.PagedKVCache) -> tuple[int, ...]:
    tensors = cache.block_table(), cache.seqlens(), cache.slots()
    return tuple(part for t in tensors for part in (t.data_ptr(), *t.shape, *t.stride()))


@pytest.mark.parametrize("tables", [HostTables, StagedTables])
def test_a_fixed_batch_while_requests_grow_come_and_go(tables: type[Tables]) -> None:
    served = served_by(tables)
    cache = served.cache
    a, b = served.prefill([1] * 9), served.prefill([1] * 8 + [2, 3])
    served.decode([a], 5)
    where = places(cache)
    for token in range(9):
        served.decode([a, b], token)
    # A request joins with a prefix that others have, and one splits: whoever writes first copies the page.
    c = served.prefill([1] * 8 + [7])
    d = cache.fork(b)
    served.kept[d] = served.kept[b]
    for token in range(6):
        served.decode([d, a, c, b] if token % 2 else [b, c, d], token)
    cache.free(a)
    served.decode([c, d], 1)
    e = served.prefill([4])
    assert cache.seats([e]) == [0]
    for token in range(9):
        served.decode([e, b], token)
    assert places(cache) == where
    assert cache.stats().copies > 0
    assert min(cache.length(request) for request in (b, c, d, e)) > 2 * PAGE


def test_a_replayed_step_is_marked_as_written() -> None:
    served = served_by()
    cache = served.cache
    request = served.prefill([1, 2, 3])
    with pytest.raises(tw.InvalidProblem, match="step: expected"):
        served_by().cache.mark_written()
    cache.step([request], tokens=[4], fixed=True)
    with pytest.raises(tw.InvalidProblem, match="every layer of the step before appended"):
        cache.step([request], tokens=[5], fixed=True)
    # What a graph's replay does, behind the cache's back.
    for layer in range(LAYERS):
        for pages in cache.pages(layer):
            pages.flatten(0, 1)[cache.slots()[cache.slots() >= 0]] = 1.0
    cache.mark_written()
    assert cache.length(cache.add([1, 2, 3, 4, 5])) == PAGE
    cache.step([request], tokens=[5], fixed=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [2]}, "counts: expected None or ones in a fixed step"),
        ({"tokens": [1, 2]}, "tokens: expected 1 entry"),
    ],
)
def test_bad_fixed_steps_change_nothing(arguments: dict[str, Any], message: str) -> None:
    served = served_by()
    request = served.prefill([1, 2, 3])
    before = served.cache.stats()
    with pytest.raises(tw.InvalidProblem, match=message):
        served.cache.step([request], fixed=True, **arguments)
    assert served.cache.stats() == before
    served.decode([request], 1)


def test_seats_are_counted() -> None:
    served = served_by()
    for n in range(SEATS):
        served.prefill([n])
    with pytest.raises(tw.InvalidProblem, match="at most max_requests = 6 at a time"):
        served.cache.add([1])
    plain = tw.PagedKVCache(8, 4, 1, 1, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(tw.InvalidProblem, match="fixed: expected False, because the cache has no seats"):
        plain.step([plain.add([1])], fixed=True)
    with pytest.raises(tw.InvalidProblem, match="max_requests: expected an integer of at least 1"):
        tw.PagedKVCache(8, 4, 1, 1, 8, dtype=torch.float32, device="cpu", max_requests=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("tables", [HostTables, StagedTables])
@pytest.mark.parametrize("fixed", [False, True])
def test_torch_s_default_device_and_dtype_change_nothing(tables: type[Tables], fixed: bool, dtype: torch.dtype) -> None:
    """Programs that serve from a GPU call torch.set_default_device("cuda"); what lands on "meta" has no memory."""

    def life() -> tuple[Tensor, ...]:
        generator = torch.Generator(device="cpu").manual_seed(0)
        cache = tw.PagedKVCache(
            16, PAGE, 1, KV_HEADS, DIM, dtype=dtype, device="cpu", max_seqlen=32, max_requests=SEATS if fixed else None
        )
        cache._tables = tables(cache.book, cache.device)
        first = cache.add([1, 2, 3, 4, 5])
        requests = [first]
        outs: list[Tensor] = []
        for _ in range(3):
            rows = cache.step(requests, tokens=[7] * len(requests) if outs else None, fixed=fixed and bool(outs))
            q, k, v = (
                torch.randn(rows, heads, DIM, dtype=torch.float32, device="cpu", generator=generator)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            cache.append(k, v, layer=0)
            outs.append(cache.attention(q, layer=0))
            if len(requests) == 1:
                requests.append(cache.fork(first))  # its next token is written to a copy of the last page
        return tuple(outs)

    expected, before = life(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = life()
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tables", [HostTables, StagedTables])
def test_a_copy_lives_a_life_of_its_own(tables: type[Tables]) -> None:
    served = served_by(tables)
    requests = [served.prefill([1, 2, 3, 4, 5]), served.prefill([6, 7])]
    clone = copy.deepcopy(served)
    for token in range(2 * PAGE):  # both take pages that they were not copied with, each its own
        served.decode(requests, token)
        clone.decode(requests[::-1], token + 50)


def test_a_cache_says_what_it_is() -> None:
    served = served_by()
    served.prefill([1, 2, 3, 4, 5])
    sizes = f"64 pages of {PAGE} tokens, {LAYERS} layers of {KV_HEADS} x {DIM}, torch.float32 on cpu"
    assert repr(served.cache) == f"<PagedKVCache: {sizes}; 2 pages held by 1 request>"


@pytest.mark.parametrize("tables", [HostTables, StagedTables])
@pytest.mark.parametrize("inference", [False, True])
def test_gradients_of_a_fixed_step_are_taken_before_the_next_one(tables: type[Tables], inference: bool) -> None:
    """Its lengths are written in place: afterwards torch refuses, where other keys would be read in silence."""
    served = served_by(tables)
    request = served.prefill([1, 2, 3])
    q = torch.randn(SEATS, HEADS, DIM, requires_grad=True)

    def decode() -> Tensor:
        served.cache.step([request], fixed=True)
        for layer in range(LAYERS):
            served.cache.append(*torch.randn(2, SEATS, KV_HEADS, DIM).unbind(), layer=layer)
        out: Tensor = served.cache.attention(q)
        return out

    out = decode()
    (found,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert bool(found.isfinite().all())
    with torch.inference_mode(inference):
        decode()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)
