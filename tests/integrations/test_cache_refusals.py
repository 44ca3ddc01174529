"""`flash_attn_with_kvcache` refuses before it writes: a call that raises leaves the cache as it was."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from making import int32
from tilewise.integrations import cache, sdpa
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.kv.writing import write_rows


def sliding(capacity: int) -> Tensor:
    """Rows of 8 slots that begin a slot after one another."""
    return torch.zeros(capacity + 1, 2, 16).as_strided((2, capacity, 2, 16), (32, 32, 16, 1))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def caches(k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    """Caches, and new tokens and queries of their widths."""
    k, v = (torch.ones(2, 1, 2, cache.shape[-1]) for cache in (k_cache, v_cache))
    return {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "q": zeros(2, 1, 4, k_cache.shape[-1])}


Q, ONE, E4M3 = zeros(2, 1, 4, 16), torch.ones(2, 1, 2, 16), torch.float8_e4m3fn
PAGED: dict[str, Any] = {"k_cache": zeros(6, 4, 2, 16), "v_cache": zeros(6, 4, 2, 16)}
TABLED: dict[str, Any] = PAGED | {"block_table": int32([0, 1], [2, 3]), "k": None, "v": None}
PACKED: dict[str, Any] = {"k": torch.ones(4, 2, 16), "v": torch.ones(4, 2, 16)}
CHUNKS: dict[str, Any] = {"q": Q[:, 0], "max_seqlen_q": 2}
TURNED: dict[str, Any] = {"rotary_cos": torch.ones(12, 8), "rotary_sin": torch.ones(12, 8)}
EIGHTS: dict[str, Any] = {
    "q": torch.ones(3, 1, 4, 16).to(E4M3), "k": torch.ones(3, 1, 2, 16).to(E4M3), "v": torch.ones(3, 1, 2, 16).to(E4M3),
    "k_cache": zeros(6, 4, 2, 16).to(E4M3), "v_cache": zeros(6, 4, 2, 16).to(E4M3), "cache_seqlens": int32(5, 4, 3),
    "page_table": int32([0, 1], [2, 3], [4, 5]), "causal": True,
}  # fmt: skip
DESCALES: dict[str, Any] = {"other heads": (2, 3), "more rows": (5, 2), "fewer rows": (2, 2), "a vector": (3,)}
BOTH = zeros(2, 8, 2, 24)
APART, OTHERS = "expected rows that share no memory", "expected memory that k_cache"
INTEGERS, GROWING = "expected a tensor of integers of shape", "expected entries that never decrease"
SHAPE = "expected a tensor .batch, seqlen, heads, dim."
# What is changed of a call that is right, and what it says. Of FA3 alone where a name or a message is.
CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "offsets in fractions": (fa3, PACKED | {"cu_seqlens_k_new": zeros(3)}, f"cu_seqlens_k_new: {INTEGERS}"),
    "offsets of another batch": (fa3, PACKED | {"cu_seqlens_k_new": int32(0, 4)}, f"cu_seqlens_k_new: {INTEGERS}"),
    "a late start": (fa3, PACKED | {"cu_seqlens_k_new": int32(1, 2, 4)}, "cu_seqlens_k_new: expected 0 as its first"),
    "before the first": (fa3, PACKED | {"cu_seqlens_k_new": int32(0, -1, 4)}, f"cu_seqlens_k_new: {GROWING}"),
    "decreasing": (fa3, PACKED | {"cu_seqlens_k_new": int32(0, 3, 2)}, f"cu_seqlens_k_new: {GROWING}"),
    "past the end": (fa3, PACKED | {"cu_seqlens_k_new": int32(0, 2, 9)}, "cu_seqlens_k_new: expected a last entry"),
    "queries from 1 on": (fa3, CHUNKS | {"cu_seqlens_q": int32(1, 1, 2)}, "cu_seqlens_q"),
    "queries backwards": (fa3, CHUNKS | {"cu_seqlens_q": int32(0, 2, 1)}, "cu_seqlens_q"),
    "queries past the end": (fa3, CHUNKS | {"cu_seqlens_q": int32(0, 1, 9)}, "cu_seqlens_q"),
    "no dimension": (None, {"q": torch.tensor(0.0)}, f"q: {SHAPE}, got shape .."),
    "one dimension": (None, {"q": zeros(16)}, f"q: {SHAPE}, got shape .16,."),
    "three dimensions": (fa2, {"q": Q[:, 0]}, "q: expected"),
    "five dimensions": (None, {"q": zeros(1, 2, 1, 4, 16)}, f"q: {SHAPE}"),
    "sparse queries": (None, {"q": Q.to_sparse()}, "q: expected a dense tensor, got layout torch.sparse_coo"),
    "a sparse cache": (fa2, {"k_cache": zeros(2, 8, 2, 16).to_sparse()}, "k_cache: expected a dense tensor"),
    "sparse tokens": (fa2, {"v": ONE.to_sparse()}, "v: expected a dense tensor"),
    "heads that do not divide": (fa2, {"q": Q[:, :, :3]}, "expected"),
    "another head_dim": (fa2, {"q": Q[..., :8]}, "expected"),
    "another dtype": (fa2, {"q": Q.half()}, "expected"),
    "fewer rows than queries": (
        fa2, {"k_cache": zeros(1, 8, 2, 16), "v_cache": zeros(1, 8, 2, 16)},
        "k_cache: expected at least 2 rows as q has sequences, got 1",
    ),
    "caches of two sizes": (fa2, {"v_cache": zeros(2, 4, 2, 16)}, "k_cache, v_cache: expected 4 dimensions each"),
    "a negative length": (fa2, {"cache_seqlens": int32(3, -1)}, "cache_seqlens: .*got -1. Numbers are counted from 0"),
    "length of a fraction": (fa2, {"cache_seqlens": 3.0}, "cache_seqlens: expected the tokens already in the cache"),
    "lengths in fractions": (fa2, {"cache_seqlens": zeros(2)}, f"cache_seqlens: {INTEGERS} .2,."),
    "lengths of others": (fa2, {"cache_seqlens": int32(3, 3, 3)}, "cache_seqlens: expected a tensor of integers"),
    "no such sequence": (fa2, {"cache_batch_idx": int32(0, 5)}, "cache_batch_idx: expected from 0 to 1"),
    "before all sequences": (fa2, {"cache_batch_idx": int32(0, -1)}, "cache_batch_idx: expected from 0 to 1"),
    "a full cache": (fa2, {"cache_seqlens": 8}, "from 0 to 7"),
    "a length past the end": (fa2, {"k": None, "v": None, "cache_seqlens": 9}, "at most 8"),
    "no length": (fa2, {"cache_seqlens": None}, "cache_seqlens"),
    "k alone": (fa2, {"v": None}, "both or neither"),
    "k of another dtype": (fa2, {"k": ONE.half()}, "dtype"),
    "rotary alone": (fa2, TURNED | {"k": None, "v": None}, "apply_rotary_emb"),
    "cos alone": (fa2, {"rotary_cos": TURNED["rotary_cos"]}, "both or neither"),
    "a window of one number": (fa2, {"window_size": 128}, "a pair .left, right."),
    "a pad past the pages": (fa2, TABLED | {"cache_leftpad": int32(9, 0)}, "cache_leftpad"),
    "no such row of the table": (fa2, TABLED | {"cache_batch_idx": int32(0, 2)}, "cache_batch_idx"),
    "fewer heads": (fa2, {"k": ONE[:, :, :1], "v": ONE[:, :, :1]}, "k: expected .2, seqlen, 2, 16. on cpu"),
    "fewer values": (fa2, {"v": ONE[:1]}, "v: expected .2, seqlen, 2, 16. on cpu"),
    "tokens of another batch": (fa2, {"k": ONE[:1], "v": ONE[:1]}, "k: expected .2, seqlen, 2, 16. on cpu"),
    "a scale that is none": (fa2, {"softmax_scale": float("nan")}, "softmax_scale"),
    "a window of fractions": (fa2, {"window_size": (1.5, 2)}, "window_size"),
    "slopes of other heads": (fa2, {"alibi_slopes": zeros(3)}, "alibi_slopes"),
    "k expanded": (fa2, caches(zeros(1, 8, 2, 16).expand(2, -1, -1, -1), zeros(2, 8, 2, 16)), f"k_cache: {APART}"),
    "v expanded": (fa2, caches(zeros(2, 8, 2, 16), zeros(1, 8, 2, 16).expand(2, -1, -1, -1)), f"v_cache: {APART}"),
    "slots expanded": (fa2, caches(zeros(2, 1, 2, 16).expand(-1, 8, -1, -1), zeros(2, 8, 2, 16)), f"k_cache: {APART}"),
    "heads expanded": (fa2, caches(zeros(2, 8, 1, 16).expand(-1, -1, 2, -1), zeros(2, 8, 2, 16)), f"k_cache: {APART}"),
    "rows that overlap": (fa2, caches(sliding(8), zeros(2, 8, 2, 16)), f"k_cache: {APART}"),
    "the same cache": (fa2, caches(*(zeros(2, 8, 2, 16),) * 2), f"v_cache: {OTHERS}"),
    "v in k": (fa2, caches(BOTH, BOTH[..., :16]), f"v_cache: {OTHERS}"),
    "v in k and beyond": (fa2, caches(BOTH[..., :16], BOTH[..., 15:]), f"v_cache: {OTHERS}"),
    **{
        f"page {page}": (fa2, PAGED | {"block_table": int32([0, 1], [2, page])}, "block_table: expected from 0 to")
        for page in (6, -1, 2**30)
    },
    "an older page": (fa2, PAGED | {"block_table": int32([9, 1], [2, 3])}, "expected"),
    "a table of one dimension": (fa2, TABLED | {"block_table": int32(0, 1)}, "block_table: expected a tensor .batch"),
    "page 6 of FA3": (fa3, PAGED | {"page_table": int32([0, 1], [2, 6])}, "page_table: expected from 0 to 23"),
    "behind the pages": (
        fa2, PAGED | {"block_table": int32([0, 1], [2, 3]), "cache_seqlens": int32(5, 8)},
        "cache_seqlens: expected from 0 to 7, within the tokens of capacity",
    ),
    "more than the pages hold": (
        fa2, PAGED | {"block_table": int32([0, 1], [2, 3]), "cache_seqlens": int32(5, 9), "k": None, "v": None},
        "cache_seqlens: expected from 0 to 8, within the tokens of capacity.*more pages in block_table",
    ),
    **{
        f"{which}, {name}": (fa3, EIGHTS | {which: torch.ones(shape)}, f"{which}: expected .3, kv_heads. on cpu")
        for name, shape in DESCALES.items()
        for which in ("q_descale", "k_descale", "v_descale")
    },
    "turned from one": (fa3, TURNED | {"rotary_seqlens": int32(7)}, "rotary_seqlens: expected"),
    "turned from three": (fa3, TURNED | {"rotary_seqlens": int32(7, 7, 7)}, "rotary_seqlens: expected"),
    "turned by fractions": (fa3, TURNED | {"rotary_seqlens": torch.tensor([7.0, 7.0])}, "rotary_seqlens: expected"),
    "turned from a list": (fa3, TURNED | {"rotary_seqlens": [7, 7]}, "rotary_seqlens: expected"),
    "a short sin": (fa3, TURNED | {"rotary_sin": torch.ones(3, 8)}, "rotary_sin: expected"),
    "a sin of one column": (fa3, TURNED | {"rotary_sin": torch.ones(12, 1)}, "rotary_sin: expected"),
    "a cos of integers": (fa3, TURNED | {"rotary_cos": torch.ones(12, 8, dtype=torch.int32)}, "rotary_cos: expected"),
    "a cos of one dimension": (fa3, TURNED | {"rotary_cos": torch.ones(12)}, "rotary_cos: expected"),
    "a cos in a list": (fa3, TURNED | {"rotary_cos": [[1.0] * 8] * 12}, "rotary_cos: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused_writes_nothing(name: str) -> None:
    module, changes, message = CALLS[name]
    given = {"q": Q, "k_cache": zeros(2, 8, 2, 16), "v_cache": zeros(2, 8, 2, 16), "k": ONE, "v": ONE} | changes
    # One length for all of them, too, where nothing is said of each.
    lengths = [given["cache_seqlens"]] if "cache_seqlens" in given else [int32(5, 4), *([5] if module is fa2 else [])]
    for called, length in itertools.product((fa2, fa3) if module is None else (module,), lengths):
        with pytest.raises(tw.InvalidProblem, match=message):
            called.flash_attn_with_kvcache(**given | {"cache_seqlens": length})
        for held in (given["k_cache"], given["v_cache"]):
            assert not held.float().to_dense().any()


def test_caches_whose_rows_alias_may_be_read() -> None:
    for _, changes, message in CALLS.values():
        if APART in message or OTHERS in message:
            given = {name: changes[name] for name in ("q", "k_cache", "v_cache")}
            paged: dict[str, Any] = {"block_table": int32([0], [1])}
            fa2.flash_attn_with_kvcache(**given, cache_seqlens=int32(5, 4))
            fa2.flash_attn_with_kvcache(**given, **paged, cache_seqlens=int32(5, 4))


def test_slots_of_another_dtype_are_refused() -> None:
    pages, rows = zeros(1, 4, 2, 16), torch.ones(2, 2, 16)
    with pytest.raises(tw.InvalidProblem, match="slots: expected an int64 tensor"):
        write_rows(rows, rows, pages, pages, int32(0, 1))
    assert not pages.any()


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


def test_compiled_steps_with_pages_write_what_eager_ones_do() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    step: Any = torch.compile(fa2.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    q, new, pages = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(6, 4, 2, 16)
    caches = [pages.clone() for _ in range(4)]
    table: dict[str, Any] = {"block_table": int32([0, 1], [2, 3])}
    for lengths in (int32(5, 4), int32(6, 5)):
        mine = step(q, *caches[:2], new, new, cache_seqlens=lengths, **table)
        other = fa2.flash_attn_with_kvcache(q, caches[2], caches[3], new, new, cache_seqlens=lengths, **table)
        assert torch.equal(mine, other)  # type: ignore[arg-type]
    assert torch.equal(caches[0], caches[2])
    # A row without a page goes nowhere; nobody can say so from inside a graph.
    before = caches[0].clone()
    store = cache.Store(caches[0], caches[1], int32([0, 9], [2, 3]))
    write = torch.compile(lambda: append(store, q, new), backend="aot_eager")
    write()
    before[3, 0] = new[1, 0]
    assert torch.equal(caches[0], before)


def append(store: cache.Store, q: Tensor, new: Tensor) -> None:
    write, _ = cache._appending(store, q, new, new, int32(4, 4), None, 2, None, None)
    write()


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "routed": sdpa.routed,
    "counted": lambda: FlopCounterMode(display=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("lengths", [5, int32(5, 4)], ids=["int", "tensor"])
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


@pytest.mark.parametrize("lengths", [5, int32(5, 5)], ids=["int", "tensor"])
@pytest.mark.parametrize("appended", [True, False])
def test_a_cache_may_have_more_rows_than_queries(lengths: Any, appended: bool) -> None:
    torch.manual_seed(0)
    q, new, old = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(4, 8, 2, 16)
    rows: Any = new if appended else None
    found = fa2.flash_attn_with_kvcache(q, old.clone(), old.clone(), rows, rows, cache_seqlens=lengths)
    want = fa2.flash_attn_with_kvcache(q, old[:2].clone(), old[:2].clone(), rows, rows, cache_seqlens=lengths)
    assert torch.equal(found, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("name", DESCALES)
def test_descales_of_packed_chunks_are_judged(name: str, which: str) -> None:
    x, totals = torch.ones(6, 4, 16).to(E4M3), int32(0, 1, 3, 6)
    given: dict[str, Any] = {which: torch.ones(DESCALES[name])}
    with pytest.raises(tw.InvalidProblem, match=f"{which}: expected .3, kv_heads. on cpu"):
        fa3.flash_attn_varlen_func(x, x[:, :2], x[:, :2], totals, totals, 3, 3, attention_chunk=8, **given)


def test_new_tokens_of_a_left_padded_cache_that_is_not_contiguous() -> None:
    torch.manual_seed(0)
    wide = torch.randn(2, 16, 2, 16)
    new, q = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 4, 16)
    flags: dict[str, Any] = {"cache_seqlens": int32(5, 4), "cache_leftpad": int32(1, 2)}
    want = fa2.flash_attn_with_kvcache(q, wide[:, :8].clone(), wide[:, :8].clone(), new, new, **flags)
    found = fa2.flash_attn_with_kvcache(q, wide[:, :8], wide[:, :8].clone(), new, new, **flags)
    assert torch.equal(found, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_in", [fa2, fa3])
def test_lengths_past_a_cache_without_a_table_ask_for_a_longer_cache(drop_in: Any) -> None:
    kept = zeros(2, 8, 2, 16)
    with pytest.raises(RuntimeError, match=r"cache_seqlens.* or a longer cache if there is no table"):
        drop_in.flash_attn_with_kvcache(Q, kept, kept.clone(), cache_seqlens=int32(3, 9))
