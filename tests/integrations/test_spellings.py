"""Arguments of the drop-ins as callers spell them: numbers of numpy's are numbers, what is none is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.integrations import diffusers, flex, sdpa
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.integrations.flash_attn import bert_padding, cute
from tilewise.integrations.flash_attn.layers.rotary import apply_rotary_emb

X = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(0))
ROWS = X[:, :3].flatten(0, 1)
TOTALS = torch.tensor([0, 2, 6], dtype=torch.int32)
PAGES = torch.zeros(4, 8, 4, 16)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
FIVE = torch.tensor([5, 5], dtype=torch.int32)


def varlen(module: Any, **given: Any) -> Tensor:
    longest = {"max_seqlen_q": 4, "max_seqlen_k": 4, **given}
    out: Tensor = module.flash_attn_varlen_func(ROWS, ROWS, ROWS, TOTALS, TOTALS, **longest)
    return out


SAME: dict[str, tuple[Any, Any]] = {
    "max_seqlen": (lambda: varlen(fa2, max_seqlen_q=np.int64(4)), lambda: varlen(fa2)),
    "max_seqlen of FA3": (lambda: varlen(fa3, max_seqlen_k=np.int32(4)), lambda: varlen(fa3)),
    "attention_chunk": (
        lambda: fa3.flash_attn_func(X, X, X, attention_chunk=np.int64(2)),  # type: ignore[arg-type]
        lambda: fa3.flash_attn_func(X, X, X, attention_chunk=2),
    ),
    "cache_seqlens": (
        lambda: fa2.flash_attn_with_kvcache(X[:, :1], X, X, cache_seqlens=np.int64(5)),  # type: ignore[arg-type]
        lambda: fa2.flash_attn_with_kvcache(X[:, :1], X, X, cache_seqlens=5),
    ),
    "is_causal": (
        lambda: sdpa.scaled_dot_product_attention(X, X, X, is_causal=np.True_),  # type: ignore[arg-type]
        lambda: sdpa.scaled_dot_product_attention(X, X, X, is_causal=True),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    one, other = SAME[name]
    assert torch.equal(one(), other())


NUMBERS: dict[str, Any] = {
    "window_size": (3, 0),
    "softmax_scale": 0.3,
    "softcap": 2.0,
    "causal": True,
    "deterministic": True,
}
SPELLINGS: dict[str, Any] = {"tensor": torch.tensor, "array": np.array, "numpy": lambda number: np.array(number)[()]}


def spelt(value: Any, how: Any) -> Any:
    return tuple(map(how, value)) if isinstance(value, tuple) else how(value)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_numbers_without_dimensions_are_numbers(module: Any, name: str, how: str) -> None:
    given = {name: spelt(NUMBERS[name], SPELLINGS[how])}
    meant = {name: NUMBERS[name]}
    assert torch.equal(module.flash_attn_func(X, X, X, **given), module.flash_attn_func(X, X, X, **meant))
    assert torch.equal(varlen(module, **given), varlen(module, **meant))
    if name != "deterministic":
        found, want = (module.flash_attn_with_kvcache(X[:, :1], X, X, cache_seqlens=FIVE, **f) for f in (given, meant))
        assert torch.equal(found, want)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("probs", [False, True])
def test_dropout_without_dimensions_is_a_number(how: str, probs: bool) -> None:
    results: list[Any] = []
    for dropout in (0.3, SPELLINGS[how](0.3), SPELLINGS[how](0.0), 0.0):
        torch.manual_seed(0)
        results.append(fa2.flash_attn_func(X, X, X, dropout, return_attn_probs=probs))
        torch.manual_seed(0)
        results.append(
            fa2.flash_attn_varlen_func(ROWS, ROWS, ROWS, TOTALS, TOTALS, 4, 4, dropout, return_attn_probs=probs)
        )
    first, first_packed, second, second_packed, off, off_packed, none, none_packed = results
    for one, other in ((first, second), (first_packed, second_packed), (off, none), (off_packed, none_packed)):
        pairs = zip(one, other, strict=True) if probs else ((one, other),)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_numbers_that_require_a_gradient_are_refused(name: str) -> None:
    number = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(tw.InvalidProblem, match=f"^{name}: expected a number that requires no gradient"):
        fa2.flash_attn_func(X, X, X, **{name: number})  # type: ignore[arg-type]
    with torch.no_grad():
        fa2.flash_attn_func(X, X, X, softmax_scale=number)  # type: ignore[arg-type]


def test_one_length_without_dimensions_is_that_of_every_sequence() -> None:
    five: Any = torch.tensor(5, dtype=torch.int32)
    assert torch.equal(cached(cache_seqlens=five), cached(cache_seqlens=5))


def cached(module: Any = fa2, **given: Any) -> Any:
    everything = {"q": X[:, :1], "k_cache": PAGES, "v_cache": PAGES, "cache_seqlens": FIVE, **given}
    return module.flash_attn_with_kvcache(**everything)


NAMED: dict[str, tuple[Any, str]] = {
    "no window": (lambda: fa2.flash_attn_func(X, X, X, window_size=(None, None)), "window_size"),  # type: ignore[arg-type]
    "a window of pairs": (lambda: fa2.flash_attn_func(X, X, X, window_size=(FIVE, FIVE)), "window_size"),  # type: ignore[arg-type]
    "a window of fractions": (lambda: fa2.flash_attn_func(X, X, X, window_size=(torch.tensor(1.5), 0)), "window_size"),  # type: ignore[arg-type]
    "two scales": (lambda: fa2.flash_attn_func(X, X, X, softmax_scale=torch.ones(2)), "softmax_scale"),  # type: ignore[arg-type]
    "two dropouts": (lambda: fa2.flash_attn_func(X, X, X, torch.ones(2)), "dropout_p"),  # type: ignore[arg-type]
    "a causal of two": (lambda: fa2.flash_attn_func(X, X, X, causal=2), "causal"),  # type: ignore[arg-type]
    "a window of letters": (lambda: fa2.flash_attn_func(X, X, X, window_size="ab"), "window_size"),  # type: ignore[arg-type]
    "no softcap": (lambda: fa2.flash_attn_func(X, X, X, softcap=None), "softcap"),  # type: ignore[arg-type]
    "a softcap of NaN": (lambda: fa2.flash_attn_func(X, X, X, softcap=float("nan")), "softcap"),
    "two lengths": (lambda: varlen(fa2, max_seqlen_q=FIVE), "max_seqlen_q"),
    "used in fractions": (lambda: varlen(fa3, seqused_k=torch.tensor([1.9, 2.9])), "seqused_k"),
    "more used than stored": (lambda: varlen(fa3, seqused_k=FIVE), "seqused_k"),
    "used in a list": (lambda: varlen(fa3, seqused_q=[1, 2]), "seqused_q"),
    "used of one": (lambda: varlen(fa3, seqused_k=FIVE[:1]), "seqused_k"),
    "no q": (lambda: cached(q=None), "q"),
    "no cache": (lambda: cached(k_cache=None), "k_cache"),
    "rows in a list": (lambda: cached(cache_batch_idx=[0, 1]), "cache_batch_idx"),
    "True tokens": (lambda: cached(cache_seqlens=True), "cache_seqlens"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_is_no_argument_is_named(name: str) -> None:
    call, argument = NAMED[name]
    with pytest.raises(tw.InvalidProblem, match=rf"^{argument}: expected"):
        call()


def test_numbers_of_numpy_place_tokens() -> None:
    x, angles = torch.randn(2, 3, 4, 8), torch.randn(16, 4)
    twos: tuple[Any, ...] = (2, np.int64(2))
    turned = [apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=two) for two in twos]
    assert torch.equal(*turned)
    q, k_cache, v_cache = torch.randn(3, 4, 8), torch.randn(2, 16, 4, 8), torch.randn(2, 16, 4, 8)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    found: list[Any] = [
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=two)
        for two in twos
    ]
    assert torch.equal(*found)


def test_rows_in_use_of_fake_tensors_are_not_read() -> None:
    with FakeTensorMode():
        q = torch.randn(6, 4, 8)
        starts, used = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
        out: Any = fa3.flash_attn_varlen_func(q, q, q, starts, starts, 3, 3, seqused_k=used)
    assert out.shape == q.shape


PARTS = X[:, :, :3]
# What each original refuses with RuntimeError (a check in C++) or ValueError.
WRONG: dict[str, tuple[str, Any]] = {
    "flash_attn_func": ("k", lambda: fa2.flash_attn_func(X, X[..., :8], X)),
    "packed": ("qkv", lambda: fa2.flash_attn_qkvpacked_func(X)),
    "packed varlen": ("kv", lambda: fa2.flash_attn_varlen_kvpacked_func(ROWS, ROWS, TOTALS, TOTALS, 4, 4)),
    "varlen": ("cu_seqlens_q", lambda: fa2.flash_attn_varlen_func(ROWS, ROWS, ROWS, TOTALS.long()[:0], TOTALS, 4, 4)),
    "more than the table has": (
        "block_table",
        lambda: fa2.flash_attn_with_kvcache(X[:, :1], PAGES, PAGES, cache_seqlens=FIVE * 2, block_table=TABLE),
    ),
    "appended to a full table": (
        "block_table",
        lambda: fa2.flash_attn_with_kvcache(
            X[:, :1], PAGES, PAGES, X[:, :1], X[:, :1], cache_seqlens=FIVE + 3, block_table=TABLE
        ),
    ),
    "FA3": ("k", lambda: fa3.flash_attn_func(X, X[..., :8], X)),
    "FA3 packed": ("num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(X)),
    "FA3 combine": ("lse_partial", lambda: fa3.flash_attn_combine(X, X)),
    "FA4": ("k", lambda: cute.flash_attn_func(X, X[..., :8], X)),
    "unpad_input": ("attention_mask", lambda: bert_padding.unpad_input(X, X[:, :3, 0, 0] > 0)),
    "apply_rotary_emb": ("cos", lambda: apply_rotary_emb(X, torch.ones(3, 4), torch.ones(3, 4))),
    "sdpa": ("key", lambda: sdpa.scaled_dot_product_attention(X, X[..., :8], X)),
    "flex": ("key", lambda: flex.flex_attention(X, X[:, :3], X[:, :3])),
    "diffusers": ("key", lambda: diffusers.attend(X, PARTS, PARTS)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_errors_that_callers_of_the_original_catch(name: str) -> None:
    argument, call = WRONG[name]
    for kind in (RuntimeError, ValueError, tw.InvalidProblem):
        with pytest.raises(kind, match=argument):
            call()
