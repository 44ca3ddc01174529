"""Index tensors of int64 (`cu_seqlens`, `block_table`, `seqlens_k`) are taken as those of int32 are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.api import attention_backward
from tilewise.integrations import flash_attn, flash_attn_interface

TABLE = torch.tensor([[4, 1, 0], [2, 3, 5]], dtype=torch.int32)
LENGTHS = torch.tensor([10, 3], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)


def pages() -> Tensor:
    return torch.randn(6, 4, 2, 16, generator=torch.Generator().manual_seed(0))


def queries(rows: int = 2) -> Tensor:
    return torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(1))


def wide(tensor: Tensor, how: str) -> Tensor:
    """The same numbers in int64, in memory of their own, with gaps, or one for all."""
    if how == "strided":
        return torch.stack((tensor.long(), tensor.long() + 2**40), -1)[..., 0]
    return tensor.long()


def attended(kind: str, indices: dict[str, Tensor], by: str) -> tuple[Tensor, ...]:
    """out, lse and gradients of pages, or of packed sequences whose rows are theirs."""
    q, kv = (queries() if kind == "paged" else queries(5)).requires_grad_(), pages().requires_grad_()
    keys = kv if kind == "paged" else kv.flatten(0, 1)
    call: Any = tw.attention_paged if kind == "paged" else tw.attention_varlen
    out, lse = call(q, keys, keys, **indices, backend=by, causal=True, return_lse=True)
    return out, lse, *torch.autograd.grad(out.square().sum(), (q, kv))


INDICES: dict[str, dict[str, Tensor]] = {
    "paged": {"block_table": TABLE, "seqlens_k": LENGTHS},
    "varlen": {"cu_seqlens_q": STARTS, "cu_seqlens_k": torch.tensor([0, 10, 24], dtype=torch.int32)},
}


@pytest.mark.parametrize("how", ["plain", "strided"])
@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("by", ["cpu", "reference"])
def test_results_are_those_of_int32(kind: str, which: str, how: str, by: str) -> None:
    narrow = INDICES[kind]
    chosen = {"first": [*narrow][:1], "second": [*narrow][1:], "both": [*narrow]}[which]
    given = {name: wide(t, how) if name in chosen else t for name, t in narrow.items()}
    expected = attended(kind, narrow, by)
    for _ in range(2):
        assert all(map(torch.equal, attended(kind, given, by), expected))


def test_packed_queries_over_pages_and_without_gradients() -> None:
    q, kv = queries(5), pages()

    def call(table: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        return tw.attention_paged(q, kv, kv, table, lengths, cu_seqlens_q=starts, max_seqlen_q=3, causal=True)

    expected = call(TABLE, LENGTHS, STARTS)
    for _ in range(3):
        assert torch.equal(call(TABLE.long(), LENGTHS.long(), STARTS.long()), expected)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(TABLE.long(), LENGTHS.long(), STARTS.long()), expected)


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("seqlens_k", torch.tensor([10, 2**32 + 3]), "lengths between 0 and max_pages"),
        ("seqlens_k", torch.tensor([10, -(2**32) + 3]), "lengths between 0 and max_pages"),
        ("block_table", TABLE.long() + torch.tensor([[0, 0, 0], [2**32, 0, 0]]), "page numbers below"),
        ("seqlens_k", LENGTHS.to(torch.int16), "dtype int32 or int64"),
        ("block_table", TABLE.float(), "dtype int32 or int64"),
    ],
)
@pytest.mark.parametrize("seen", [False, True], ids=["first", "after a good one"])
def test_numbers_past_int32_are_refused(name: str, bad: Tensor, expected: str, seen: bool) -> None:
    given: dict[str, Any] = {"block_table": TABLE.long(), "seqlens_k": LENGTHS.long()}
    if seen:
        tw.attention_paged(queries(), pages(), pages(), **given)
    with pytest.raises(tw.InvalidProblem, match=expected) as caught:
        tw.attention_paged(queries(), pages(), pages(), **given | {name: bad})
    assert caught.value.argument == name


def test_entries_that_are_not_read_may_be_anything() -> None:
    garbage = TABLE.long()
    garbage[1, 1:] = 2**40
    expected = tw.attention_paged(queries(), pages(), pages(), TABLE, LENGTHS)
    assert torch.equal(tw.attention_paged(queries(), pages(), pages(), garbage, LENGTHS.long()), expected)


def through_fa2(table: Tensor, lengths: Tensor, starts: Tensor) -> Any:
    del starts
    return flash_attn.flash_attn_with_kvcache(
        queries()[:, None], pages(), pages(), cache_seqlens=lengths, block_table=table
    )


def through_fa3(table: Tensor, lengths: Tensor, starts: Tensor) -> Any:
    return flash_attn_interface.flash_attn_with_kvcache(
        queries(5), pages(), pages(), cache_seqlens=lengths, page_table=table, cu_seqlens_q=starts, max_seqlen_q=3
    )


def through_varlen(table: Tensor, lengths: Tensor, starts: Tensor) -> Any:
    totals = torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))
    return flash_attn.flash_attn_varlen_func(
        queries(5), pages(), pages(), starts, totals, 3, 10, block_table=table, causal=True
    )


@pytest.mark.parametrize("call", [through_fa2, through_fa3, through_varlen])
def test_the_drop_ins_take_int64(call: Callable[..., Any]) -> None:
    expected = call(TABLE, LENGTHS, STARTS)
    assert torch.equal(call(TABLE.long(), LENGTHS.long(), STARTS.long()), expected)


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_known_backward_looks_at_contents_again(calls: int) -> None:
    """Drop-ins whose callers keep what autograd would save pass index tensors again."""
    q, k, v = torch.randn(3, 22, 2, 16, generator=torch.Generator().manual_seed(2))
    totals = torch.tensor([0, 11, 22], dtype=torch.int32)
    out, lse = tw.attention_varlen(q, k, v, totals, totals, max_seqlen_q=22, max_seqlen_k=22, return_lse=True)

    def backward(totals: Tensor) -> tuple[Tensor, ...]:
        saved, wanted = (torch.ones_like(out), out, lse), (True, True, True)
        sizes: Any = {"max_seqlen_q": 22, "max_seqlen_k": 22}
        return attention_backward("varlen", (q, k, v), saved, wanted, cu_seqlens_q=totals, cu_seqlens_k=totals, **sizes)

    expected = backward(totals)
    for _ in range(calls):
        assert all(torch.equal(a, b) for a, b in zip(backward(totals), expected, strict=True))
    for wrong in ([0, 23, 22], [0, 11, 5000], [1, 11, 22], [0, 11, -1]):
        with pytest.raises(tw.InvalidProblem, match="cu_seqlens"):
            backward(torch.tensor(wrong, dtype=torch.int32))
