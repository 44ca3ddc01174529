"""`flash_attn_with_kvcache` refuses before it writes: a call that raises leaves the cache as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.integrations import cache, sdpa
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.kv.writing import write_rows


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


OFFSETS: dict[str, tuple[Tensor, str]] = {
    "fractions": (torch.tensor([0.0, 2.0, 4.0]), "a tensor of integers of shape"),
    "another batch": (int32([0, 4]), "a tensor of integers of shape"),
    "a late start": (int32([1, 2, 4]), "0 as its first entry, got 1"),
    "before the first": (int32([0, -1, 4]), "entries that never decrease"),
    "decreasing": (int32([0, 3, 2]), "entries that never decrease"),
    "past the end": (int32([0, 2, 9]), "a last entry of at most 4"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_of_new_tokens(name: str) -> None:
    offsets, message = OFFSETS[name]
    k_cache, v_cache = torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16)
    new = torch.ones(4, 2, 16)
    with pytest.raises(tw.InvalidProblem, match=f"cu_seqlens_k_new: expected {message}"):
        fa3.flash_attn_with_kvcache(
            torch.zeros(2, 1, 4, 16), k_cache, v_cache, new, new, cache_seqlens=int32([3, 5]), cu_seqlens_k_new=offsets
        )
    assert not k_cache.any()
    assert not v_cache.any()


def test_slots_of_another_dtype_are_refused() -> None:
    pages, rows = torch.zeros(1, 4, 2, 16), torch.ones(2, 2, 16)
    with pytest.raises(tw.InvalidProblem, match="slots: expected an int64 tensor"):
        write_rows(rows, rows, pages, pages, int32([0, 1]))
    assert not pages.any()


QUERIES: dict[str, tuple[Tensor, str]] = {
    "no dimension": (torch.tensor(0.0), "q: expected a tensor .batch, seqlen, heads, dim., got shape .."),
    "one dimension": (torch.zeros(16), "q: expected a tensor .batch, seqlen, heads, dim., got shape .16,."),
    "five dimensions": (torch.zeros(1, 2, 1, 4, 16), "q: expected a tensor .batch, seqlen, heads, dim."),
    "sparse": (torch.zeros(2, 1, 4, 16).to_sparse(), "q: expected a dense tensor, got layout torch.sparse_coo"),
}


@pytest.mark.parametrize("appended", [True, False])
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("name", QUERIES)
def test_queries_of_another_kind_are_refused(name: str, module: Any, appended: bool) -> None:
    q, message = QUERIES[name]
    cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16) if appended else None
    with pytest.raises(tw.InvalidProblem, match=message):
        module.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=5)
    assert not cache.any()


def test_sparse_caches_and_tokens_are_refused() -> None:
    cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16)
    with pytest.raises(tw.InvalidProblem, match="k_cache: expected a dense tensor"):
        fa2.flash_attn_with_kvcache(Q, cache.to_sparse(), cache, cache_seqlens=5)
    with pytest.raises(tw.InvalidProblem, match="v: expected a dense tensor"):
        fa2.flash_attn_with_kvcache(Q, cache, cache.clone(), new, new.to_sparse(), cache_seqlens=5)
    assert not cache.any()


def sliding(capacity: int) -> Tensor:
    """Rows of 8 slots that begin a slot after one another."""
    return torch.zeros(capacity + 1, 2, 16).as_strided((2, capacity, 2, 16), (32, 32, 16, 1))


BOTH = torch.zeros(2, 8, 2, 24)
ALIASED: dict[str, tuple[tuple[Tensor, Tensor], str]] = {
    "k expanded": ((torch.zeros(1, 8, 2, 16).expand(2, -1, -1, -1), torch.zeros(2, 8, 2, 16)), "k_cache"),
    "v expanded": ((torch.zeros(2, 8, 2, 16), torch.zeros(1, 8, 2, 16).expand(2, -1, -1, -1)), "v_cache"),
    "slots expanded": ((torch.zeros(2, 1, 2, 16).expand(-1, 8, -1, -1), torch.zeros(2, 8, 2, 16)), "k_cache"),
    "heads expanded": ((torch.zeros(2, 8, 1, 16).expand(-1, -1, 2, -1), torch.zeros(2, 8, 2, 16)), "k_cache"),
    "rows that overlap": ((sliding(8), torch.zeros(2, 8, 2, 16)), "k_cache"),
    "the same cache": ((torch.zeros(2, 8, 2, 16),) * 2, "v_cache"),
    "v in k": ((BOTH, BOTH[..., :16]), "v_cache"),
    "v in k and beyond": ((BOTH[..., :16], BOTH[..., 15:]), "v_cache"),
}


@pytest.mark.parametrize("lengths", [5, int32([5, 4])], ids=["int", "tensor"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ALIASED)
def test_caches_whose_rows_alias_are_refused(name: str, paged: bool, lengths: Any) -> None:
    (k_cache, v_cache), message = ALIASED[name]
    table: dict[str, Any] = {"block_table": int32([[0], [1]])} if paged else {}
    k, v = (torch.ones(2, 1, 2, cache.shape[-1]) for cache in (k_cache, v_cache))
    q = torch.zeros(2, 1, 4, k_cache.shape[-1])
    with pytest.raises(tw.InvalidProblem, match=f"{message}: expected (rows that share no memory|memory that k_cache)"):
        fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **table)
    assert not k_cache.any()
    assert not v_cache.any()
    # Without new tokens they are only read.
    fa2.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **table)


def blocks(memory: Tensor) -> tuple[Tensor, Tensor]:
    """For every row its keys, then its values."""
    keys = memory.as_strided((2, 8, 2, 16), (640, 32, 16, 1))
    return keys, memory.as_strided((2, 8, 2, 24), (640, 48, 24, 1), 256)


POOLS: dict[str, Callable[[], Any]] = {
    "one after the other": lambda: torch.zeros(2, 2, 8, 2, 16).unbind(0),
    "row by row": lambda: torch.zeros(2, 2, 8, 2, 16).unbind(1),
    "slot by slot": lambda: torch.zeros(2, 8, 2, 2, 16).unbind(2),
    "head by head": lambda: torch.zeros(2, 8, 2, 2, 16).unbind(3),
    "number by number": lambda: torch.zeros(2, 8, 2, 16, 2).unbind(4),
    "of two widths": lambda: torch.zeros(2, 8, 2, 40).split((16, 24), -1),
    "v first": lambda: torch.zeros(2, 8, 2, 40).split((24, 16), -1)[::-1],
    "blocks of two widths": lambda: blocks(torch.zeros(2, 640)),
    "heads first": lambda: torch.zeros(2, 2, 2, 8, 16).transpose(2, 3).unbind(0),
}


@pytest.mark.parametrize("name", POOLS)
def test_caches_that_lie_in_one_another_without_sharing_memory_are_written(name: str) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = POOLS[name]()
    k, v = (torch.randn(2, 3, 2, cache.shape[-1]) for cache in (k_cache, v_cache))
    q = torch.randn(2, 1, 4, k.shape[-1])
    out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0)
    assert torch.equal(k_cache[:, :3], k)
    assert torch.equal(v_cache[:, :3], v)
    torch.testing.assert_close(out, tw.attention(q, k, v, layout="bshd"))


@pytest.mark.parametrize("begin", [None, 0, 8])
def test_values_may_be_a_part_of_the_keys_in_cache_and_new_rows(begin: int | None) -> None:
    torch.manual_seed(0)
    part = slice(None) if begin is None else slice(begin, begin + 16)
    cache, new, q = torch.randn(2, 8, 1, 24), torch.randn(2, 1, 1, 24), torch.randn(2, 1, 4, 24)
    apart = cache.clone(), cache[..., part].clone()
    want = fa2.flash_attn_with_kvcache(q, *apart, new, new[..., part].clone(), cache_seqlens=5)
    found = fa2.flash_attn_with_kvcache(q, cache, cache[..., part], new, new[..., part], cache_seqlens=5)
    assert torch.equal(found, want)  # type: ignore[arg-type]
    assert torch.equal(cache, apart[0])
    with pytest.raises(tw.InvalidProblem, match="v_cache: expected memory that k_cache does not use"):
        fa2.flash_attn_with_kvcache(q, cache, cache[..., part], new, new[..., part].clone(), cache_seqlens=5)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("page", [6, -1, 2**30])
def test_pages_that_do_not_exist_are_named_before_the_cache_is_written(module: Any, page: int) -> None:
    pages, new = torch.zeros(6, 4, 2, 16), torch.ones(2, 1, 2, 16)
    name = "block_table" if module is fa2 else "page_table"
    table: dict[str, Any] = {name: int32([[0, 1], [2, page]])}
    with pytest.raises(tw.InvalidProblem, match=f"{name}: expected positions below 24, the slots of all pages"):
        module.flash_attn_with_kvcache(Q, pages, pages.clone(), new, new, cache_seqlens=int32([5, 4]), **table)
    table[name] = int32([[0, 1], [2, 3]])
    with pytest.raises(tw.InvalidProblem, match="cache_seqlens: expected positions below 8, the tokens of capacity"):
        module.flash_attn_with_kvcache(Q, pages, pages.clone(), new, new, cache_seqlens=int32([5, 8]), **table)
    assert not pages.any()


def test_compiled_steps_with_pages_write_what_eager_ones_do() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    step: Any = torch.compile(fa2.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    q, new, pages = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(6, 4, 2, 16)
    caches = [pages.clone() for _ in range(4)]
    table: dict[str, Any] = {"block_table": int32([[0, 1], [2, 3]])}
    for lengths in (int32([5, 4]), int32([6, 5])):
        mine = step(q, *caches[:2], new, new, cache_seqlens=lengths, **table)
        other = fa2.flash_attn_with_kvcache(q, caches[2], caches[3], new, new, cache_seqlens=lengths, **table)
        assert torch.equal(mine, other)  # type: ignore[arg-type]
    assert torch.equal(caches[0], caches[2])
    # A row without a page goes nowhere; nobody can say so from inside a graph.
    before = caches[0].clone()
    store = cache.Store(caches[0], caches[1], int32([[0, 9], [2, 3]]))
    write = torch.compile(lambda: append(store, q, new), backend="aot_eager")
    write()
    before[3, 0] = new[1, 0]
    assert torch.equal(caches[0], before)


def append(store: cache.Store, q: Tensor, new: Tensor) -> None:
    write, _ = cache._appending(store, q, new, new, int32([4, 4]), None, 2, None, None)
    write()


Q = torch.zeros(2, 1, 4, 16)
PAGED = {"k_cache": torch.zeros(4, 4, 2, 16), "v_cache": torch.zeros(4, 4, 2, 16)}
REFUSED: dict[str, dict[str, Any]] = {
    "a scale that is none": {"softmax_scale": float("nan")},
    "a window of fractions": {"window_size": (1.5, 2)},
    "slopes of other heads": {"alibi_slopes": torch.zeros(3)},
    "heads that do not divide": {"q": Q[:, :, :3]},
    "another head_dim": {"q": Q[..., :8]},
    "another dtype": {"q": Q.half()},
    "three dimensions": {"q": Q[:, 0]},
    "an older page outside": {**PAGED, "block_table": int32([[9, 1], [2, 3]])},
}


@pytest.mark.parametrize("lengths", [5, int32([5, 4])], ids=["int", "tensor"])
@pytest.mark.parametrize("name", REFUSED)
def test_the_attention_is_judged_before_the_cache_is_written(name: str, lengths: Any) -> None:
    given: dict[str, Any] = {"q": Q, "k_cache": torch.zeros(2, 8, 2, 16), "v_cache": torch.zeros(2, 8, 2, 16)}
    given |= {"k": torch.ones(2, 1, 2, 16), "v": torch.ones(2, 1, 2, 16), "cache_seqlens": lengths, **REFUSED[name]}
    with pytest.raises(tw.InvalidProblem):
        fa2.flash_attn_with_kvcache(**given)
    assert not given["k_cache"].any()
    assert not given["v_cache"].any()


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "routed": sdpa.routed,
    "counted": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("lengths", [5, int32([5, 4])], ids=["int", "tensor"])
@pytest.mark.parametrize("mode", MODES)
def test_the_attention_is_judged_before_the_cache_is_written_whoever_watches(mode: str, lengths: Any) -> None:
    torch.manual_seed(0)
    q, new, old = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 8, 2, 16)
    k_cache, v_cache = old.clone(), old.clone()
    with MODES[mode](), pytest.raises(tw.InvalidProblem, match="softmax_scale"):
        fa2.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, softmax_scale=float("nan"))
    slopes = torch.zeros(3)
    with MODES[mode](), pytest.raises(tw.InvalidProblem, match="alibi_slopes"):
        fa2.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, alibi_slopes=slopes)
    assert torch.equal(k_cache, old)
    # What is right is attended as ever, the new keys too.
    with MODES[mode]():
        out = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths)
        again = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths + 1)
    assert torch.equal(out, again)  # type: ignore[arg-type]
    assert torch.equal(k_cache[0, 5], new[0, 0])


@pytest.mark.parametrize("lengths", [5, int32([5, 5])], ids=["int", "tensor"])
@pytest.mark.parametrize("appended", [True, False])
def test_a_cache_may_have_more_rows_than_queries(lengths: Any, appended: bool) -> None:
    torch.manual_seed(0)
    q, new, old = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(4, 8, 2, 16)
    rows: Any = new if appended else None
    found = fa2.flash_attn_with_kvcache(q, old.clone(), old.clone(), rows, rows, cache_seqlens=lengths)
    want = fa2.flash_attn_with_kvcache(q, old[:2].clone(), old[:2].clone(), rows, rows, cache_seqlens=lengths)
    assert torch.equal(found, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [[1, 1, 2], [0, 2, 1], [0, 1, 9]], ids=str)
def test_the_offsets_of_queries_are_judged_before_the_cache_is_written(offsets: list[int]) -> None:
    cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16)
    with pytest.raises(tw.InvalidProblem, match="cu_seqlens_q"):
        fa3.flash_attn_with_kvcache(
            Q[:, 0], cache, cache.clone(), new, new, cache_seqlens=int32([5, 4]), cu_seqlens_q=int32(offsets),
            max_seqlen_q=2,
        )  # fmt: skip
    assert not cache.any()


@pytest.mark.parametrize("lengths", [5, int32([5, 5])], ids=["int", "tensor"])
@pytest.mark.parametrize("appended", [True, False])
def test_a_cache_of_fewer_rows_than_queries(lengths: Any, appended: bool) -> None:
    cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16) if appended else None
    with pytest.raises(tw.InvalidProblem, match="k_cache: expected at least 2 rows as q has sequences, got 1"):
        fa2.flash_attn_with_kvcache(Q, cache[:1], cache[:1].clone(), new, new, cache_seqlens=lengths)
    assert not cache.any()


E4M3 = torch.float8_e4m3fn
DESCALES: dict[str, Any] = {"other heads": (2, 3), "more rows": (5, 2), "fewer rows": (2, 2), "a vector": (3,)}


@pytest.mark.parametrize("which", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", DESCALES)
def test_descales_are_judged_before_the_cache_is_written(name: str, queries: int, which: str) -> None:
    cache, new = torch.zeros(6, 4, 2, 16).to(E4M3), torch.ones(3, 1, 2, 16).to(E4M3)
    q, table = torch.ones(3, queries, 4, 16).to(E4M3), int32([[0, 1], [2, 3], [4, 5]])
    given: dict[str, Any] = {which: torch.ones(DESCALES[name])}
    with pytest.raises(tw.InvalidProblem, match=f"{which}: expected .3, kv_heads. on cpu"):
        fa3.flash_attn_with_kvcache(
            q, cache, cache.clone(), new, new, cache_seqlens=int32([5, 4, 3]), page_table=table, causal=True, **given
        )
    assert not cache.float().any()


@pytest.mark.parametrize("which", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("name", DESCALES)
def test_descales_of_packed_chunks_are_judged(name: str, which: str) -> None:
    x, totals = torch.ones(6, 4, 16).to(E4M3), int32([0, 1, 3, 6])
    given: dict[str, Any] = {which: torch.ones(DESCALES[name])}
    with pytest.raises(tw.InvalidProblem, match=f"{which}: expected .3, kv_heads. on cpu"):
        fa3.flash_attn_varlen_func(x, x[:, :2], x[:, :2], totals, totals, 3, 3, attention_chunk=8, **given)


TABLES = {"rotary_cos": torch.ones(12, 8), "rotary_sin": torch.ones(12, 8)}
ROTARY: dict[str, dict[str, Any]] = {
    "offsets of one": {"rotary_seqlens": int32([7])},
    "offsets of three": {"rotary_seqlens": int32([7, 7, 7])},
    "offsets in fractions": {"rotary_seqlens": torch.tensor([7.0, 7.0])},
    "offsets in a list": {"rotary_seqlens": [7, 7]},
    "a short sin": {"rotary_sin": torch.ones(3, 8)},
    "a sin of one column": {"rotary_sin": torch.ones(12, 1)},
    "a cos of integers": {"rotary_cos": torch.ones(12, 8, dtype=torch.int32)},
    "a cos of one dimension": {"rotary_cos": torch.ones(12)},
    "a cos in a list": {"rotary_cos": [[1.0] * 8] * 12},
}


@pytest.mark.parametrize("name", ROTARY)
def test_what_turns_nothing_is_named_before_the_cache_is_written(name: str) -> None:
    cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16)
    (wrong,) = ROTARY[name]
    with pytest.raises(tw.InvalidProblem, match=f"{wrong}: expected"):
        fa3.flash_attn_with_kvcache(
            Q, cache, cache.clone(), new, new, cache_seqlens=int32([5, 4]), **{**TABLES, **ROTARY[name]}
        )
    assert not cache.any()


def test_new_tokens_of_a_left_padded_cache_that_is_not_contiguous() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 16, 2, 16)
    new, q = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 4, 16)
    flags: dict[str, Any] = {"cache_seqlens": int32([5, 4]), "cache_leftpad": int32([1, 2])}
    want = fa2.flash_attn_with_kvcache(q, wide[:, :8].clone(), wide[:, :8].clone(), new, new, **flags)
    found = fa2.flash_attn_with_kvcache(q, wide[:, :8], wide[:, :8].clone(), new, new, **flags)
    assert torch.equal(found, want)  # type: ignore[arg-type]
