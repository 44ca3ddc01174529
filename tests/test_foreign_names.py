"""Arguments by the names of other libraries end in an error that names the right one."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.distributed import context_parallel_attention
from tilewise.errors import UnexpectedArgument
from tilewise.validation import foreign

X = torch.ones(1, 2, 4, 8)
ROWS, TOTALS = torch.ones(4, 2, 8), torch.tensor([0, 4])
PAGES, TABLE, LENGTHS = torch.ones(3, 4, 2, 8), torch.tensor([[0, 1]]), torch.tensor([5])
CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **given: tw.attention(X, X, X, **given),
    "attention_varlen": lambda **given: tw.attention_varlen(ROWS, ROWS, ROWS, TOTALS, TOTALS, **given),
    "attention_paged": lambda **given: tw.attention_paged(ROWS[:1], PAGES, PAGES, TABLE, LENGTHS, **given),
    "explain": lambda **given: tw.explain(X, X, X, **given),
    "context_parallel_attention": lambda **given: context_parallel_attention(X, X, X, **given),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("is_causal", "causal="),
        ("attn_mask", "mask= if it is boolean"),
        ("key_padding_mask", "mask=~key_padding_mask"),
        ("dropout_p", "dropout="),
        ("softmax_scale", "scale="),
        ("window_size", "window="),
        ("return_attn_probs", "return_lse="),
    ],
)
def test_names_of_other_libraries(function: str, name: str, meant: str) -> None:
    with pytest.raises(tw.InvalidProblem, match=f"^{name}: expected an argument of {function} ") as caught:
        CALLS[function](**{name: True})
    assert meant in caught.value.fix
    assert isinstance(caught.value, TypeError)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UnexpectedArgument)


@pytest.mark.parametrize(
    ("function", "name", "where"),
    [
        ("attention", "cu_seqlens_q", "attention_varlen"),
        ("attention", "block_table", "attention_paged"),
        ("attention_varlen", "layout", "attention"),
        ("attention_paged", "dropout", "attention and attention_varlen"),
        ("attention_paged", "page_table", "block_table="),
        ("attention_paged", "cache_seqlens", "seqlens_k="),
    ],
)
def test_names_of_other_calls(function: str, name: str, where: str) -> None:
    with pytest.raises(UnexpectedArgument) as caught:
        CALLS[function](**{name: X})
    assert where in caught.value.fix


@pytest.mark.parametrize(("name", "close"), [("casual", "causal"), ("xyzzy", None), ("return_lses", "return_lse")])
def test_misspelt_names(name: str, close: str | None) -> None:
    with pytest.raises(UnexpectedArgument) as caught:
        tw.attention(X, X, X, **{name: True})  # type: ignore[call-overload]
    assert ("Did you mean" in caught.value.fix) == (close is not None)
    assert close is None or f"{close}=" in caught.value.fix


def test_no_call_takes_what_is_listed_as_foreign() -> None:
    for function in (tw.attention, tw.attention_varlen, tw.attention_paged, tw.explain):
        assert not set(inspect.signature(function).parameters) & set(foreign.MEANT)


def test_a_compiled_call_says_it_too() -> None:
    compiled = torch.compile(lambda x: tw.attention(x, x, x, is_causal=True), backend="eager")  # type: ignore[call-overload]
    with pytest.raises(Exception, match="causal="):
        compiled(X)
