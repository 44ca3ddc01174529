"""A decoding batch that comes again takes a shorter way: it must give what the long one gives."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
import tilewise.kv.book
from tilewise.errors import InvalidProblem
from tilewise.kv.tables import HostTables, StagedTables, Tables

PAGE = 4


def cache_of(tables: type[Tables], num_pages: int = 400) -> tw.PagedKVCache:
    cache = tw.PagedKVCache(num_pages, PAGE, 1, 1, 4, dtype=torch.float32, device="cpu", max_requests=16, max_seqlen=80)
    cache._tables = tables(cache.book, cache.device)
    return cache


def run(cache: tw.PagedKVCache, requests: list[int], **options: Any) -> None:
    rows = cache.step(requests, **options)
    cache.append(*torch.zeros(2, rows, 1, 4).unbind())


def seen(cache: tw.PagedKVCache) -> tuple[Any, ...]:
    """All that a step's tensors say, the unused part of tables left out."""
    lengths, hint = cache.seqlens().tolist(), cache.shared_prefix()
    table = [pages[: -(-n // PAGE)] for pages, n in zip(cache.block_table().tolist(), lengths, strict=True)]
    dtypes = [t.dtype for t in (cache.block_table(), cache.seqlens(), cache.slots())]
    own: Any = None
    if hint is not None:
        own_lengths = hint.own_seqlens.tolist()
        own = [pages[: -(-n // PAGE)] for pages, n in zip(hint.own_table.tolist(), own_lengths, strict=True)]
        own = own_lengths, own, hint.groups, hint.block_table.tolist(), hint.seqlens_k.tolist()
    return lengths, table, cache.slots().tolist(), dtypes, own


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_the_short_way_gives_what_the_long_one_gives(number: int) -> None:
    """The same steps on the host's tables with the batch forgotten before each, and on staged ones."""
    rng, short, long = random.Random(number), cache_of(StagedTables), cache_of(HostTables)
    prompts = [[*range(9), *[n] * (n + 1)] for n in range(number)]
    requests = [short.add(prompt) for prompt in prompts]
    assert requests == [long.add(prompt) for prompt in prompts]
    for step in range(50):
        tokens = None if step < 1 else [rng.randrange(3) for _ in requests]
        if step in (9, 30):
            requests.append(short.fork(requests[0]))
            assert requests[-1] == long.fork(requests[0])
            tokens = None
        if step in (17, 31):
            for cache in (short, long):
                cache.truncate(requests[-1], cache.length(requests[-1]) - 2)
        if step == 40:
            for cache in (short, long):
                cache.free(requests[0])
            tokens = (tokens or [])[1:]
            del requests[0]
        long.book._batch = None
        for cache in (short, long):
            run(cache, requests, tokens=tokens, fixed=step in (20, 21, 35))
        assert seen(short) == seen(long)
        if step == 25:
            short = copy.deepcopy(short)
    assert short.stats() == long.stats()


def edit(cache: tw.PagedKVCache) -> None:
    """Everything that a step hands out, whole and through views."""
    hint = cache.shared_prefix()
    for tensor in (cache.block_table(), cache.seqlens(), cache.slots(), *(() if hint is None else hint[1:])):
        if tensor is not None and tensor.numel():
            tensor.add_(3)
            tensor[-1:].neg_()


@pytest.mark.parametrize("kinds", ["plain", "fixed", "both"])
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("tables", [HostTables, StagedTables])
def test_an_edit_of_a_steps_tensors_stays_in_that_step(tables: type[Tables], inference: bool, kinds: str) -> None:
    """Steps that take pages and steps that take none, with a shared prefix: edited tensors are not handed out again."""
    with torch.inference_mode(inference):
        edited, plain = cache_of(tables), cache_of(tables)
        for cache in (edited, plain):
            requests = [cache.add([*range(9), n]) for n in range(3)]
            run(cache, requests)
        hints = 0
        for step in range(24):
            fixed = kinds == "fixed" or (kinds == "both" and step % 4 > 1)
            for cache in (edited, plain):
                run(cache, requests, tokens=[step, step, step], fixed=fixed)
            assert seen(edited) == seen(plain)
            hints += edited.shared_prefix() is not None
            edit(edited)
            if step == 9:
                edited = copy.deepcopy(edited)
        assert hints == {"plain": 24, "fixed": 0, "both": 12}[kinds]
        q = torch.ones(16 if fixed else 3, 1, 4)
        run(edited, requests, fixed=fixed)
        run(plain, requests, fixed=fixed)
        assert torch.equal(edited.attention(q), plain.attention(q))


@pytest.mark.parametrize("tables", [HostTables, StagedTables])
def test_fixed_steps_have_the_same_tensors_every_time(tables: type[Tables]) -> None:
    """A graph that was captured over them finds them where they were, also after somebody wrote to one."""
    cache = cache_of(tables)
    requests = [cache.add([n] * 5) for n in range(3)]
    run(cache, requests)
    places = set()
    for step in range(12):
        run(cache, requests, fixed=True)
        places.add(tuple(t.data_ptr() for t in (cache.block_table(), cache.seqlens(), cache.slots())))
        if step % 3 == 0:
            edit(cache)
    assert len(places) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_pages_made_in_inference_mode_serve_outside_of_it(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        cache = tw.PagedKVCache(8, PAGE, 1, 1, 16, dtype=dtype, device="cpu")
    source = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    request = cache.add([1, 2, 3, 4, 5])
    cache.append(*torch.ones(2, cache.step([request]), 1, 16, dtype=source).unbind())
    rows = cache.step([request, cache.fork(request)])
    cache.append(*torch.ones(2, rows, 1, 16, dtype=source).unbind())
    assert cache.stats().copies == 1
    assert cache.book.length(request) == 6


ODD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one id": ([0], {"tokens": torch.tensor(3)}, "tokens: expected a 1-D tensor of ids"),
    "no list of ids": ([0], {"tokens": 3}, "tokens: expected a list of ids, got 3"),
    "text": ([0], {"tokens": "7"}, "tokens: expected a list of ids, got '7'"),
    "ragged counts": ([0], {"counts": [[1, 2], [1]]}, "counts: expected"),
    "one count": ([0], {"counts": 3}, "counts: expected"),
    "a set and a bad count": ({0}, {"counts": [0]}, "counts: expected"),
    "keys and a bad id": ({0: 1}.keys(), {"counts": [1], "tokens": ["7"]}, "tokens: expected"),
    "a table of requests": (np.zeros((2, 2), np.int64), {}, "requests: expected a list of request numbers"),
    "no requests": (None, {}, "requests: expected a list of request numbers, got None"),
    "a tensor as a request": ([torch.tensor(0)], {}, r"request: expected a request .*, got tensor.0."),
    "tensors of requests": ([torch.tensor([0, 1])], {}, r"request: expected a request .*, got tensor.\[0, 1"),
    "a list of lists": ([[0]], {}, "request: expected a request that was added and not freed, got .0."),
}


@pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed"])
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_step_is_named(name: str, fixed: bool) -> None:
    requests, options, message = ODD[name]
    for known in (False, True):
        cache = cache_of(HostTables)
        cache.add([1])
        if known:
            run(cache, [0])
        with pytest.raises(InvalidProblem, match=message):
            cache.step(requests, fixed=fixed, **options)


def test_rows_of_any_layout_are_written_and_nothing_else() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = tw.PagedKVCache(40, 5, 1, 3, 7, dtype=dtype, device="cpu", head_dim_v=9)
        cache.k.fill_(-1)
        cache.v.fill_(-1)
        rows = cache.step([cache.add(range(33)), cache.add(range(100, 171))])
        qkv = torch.randn(rows, 3, 2 * 7 + 9).to(dtype)
        k, v = qkv[..., :14:2], qkv[..., 14:]
        cache.append(k, v)
        flat_k, flat_v = cache.k.flatten(1, 2)[0], cache.v.flatten(1, 2)[0]
        assert torch.equal(flat_k[cache.slots()], k)
        assert torch.equal(flat_v[cache.slots()], v)
        untouched = torch.ones(200, dtype=torch.bool)
        untouched[cache.slots()] = False
        assert (flat_k[untouched] == -1).all()
        assert (flat_v[untouched] == -1).all()


def test_sizes_are_integers_of_at_least_one() -> None:
    sizes: Any = np.int64(8), np.int32(4), 1, 1, 8
    cache = tw.PagedKVCache(*sizes, dtype=torch.float32, device="cpu", max_seqlen=sizes[0])
    assert [type(size) for size in (cache.book.page_size, cache.book.max_seqlen)] == [int, int]
    bad: tuple[Any, ...] = (True, np.True_, 0, -1, 2.0, None)
    for wrong in bad:
        with pytest.raises(InvalidProblem, match="num_pages: expected an integer of at least 1"):
            tw.PagedKVCache(wrong, 4, 1, 1, 8, dtype=torch.float32, device="cpu")


def test_rows_that_are_not_dense_are_refused() -> None:
    cache = cache_of(HostTables)
    cache.step([cache.add([1])])
    for rows in (
        torch.zeros(1, 1, 4).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(1, 4)], layout=torch.jagged),
    ):
        with pytest.raises(InvalidProblem, match="k: expected a dense tensor"):
            cache.append(rows, torch.zeros(1, 1, 4))
