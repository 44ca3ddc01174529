"""flash-attn 2's documented semantics as tables of cases, against the textbook formula in fp64."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import int32, randn
from tilewise.integrations import flash_attn as fa

FULL = (-1, -1)


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = FULL,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (seqlen_q, heads, dim), lse (heads, seqlen_q)) of one sequence, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    ahead = torch.arange(len(k))[None, :] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size
    keep = torch.ones_like(ahead, dtype=torch.bool)
    keep &= (ahead <= 0) | (not causal)
    keep &= (ahead >= -left) | (left < 0)
    keep &= (ahead <= right) | (right < 0)
    s = s.masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("hij,jhd->ihd", p, v), lse


def close(mine: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(mine.double(), expected, atol=3e-6, rtol=3e-6)


# One row per documented behaviour; "slopes" stands for one slope a head.
SEMANTICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softmax_scale": {"softmax_scale": 0.07},
    "causal is bottom-right aligned": {"causal": True},
    "window of both sides": {"window_size": (2, 1)},
    "window unbounded on the left": {"window_size": (-1, 1)},
    "window unbounded on the right": {"window_size": (1, -1)},
    "window of the diagonal only": {"window_size": (0, 0)},
    "causal cuts the right side of a window": {"causal": True, "window_size": (2, 5)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": "slopes"},
    "all at once": {"causal": True, "window_size": (3, -1), "softcap": 2.0, "alibi_slopes": "slopes"},
}
SHAPES = {"square": (6, 6, 4, 4), "few queries": (2, 5, 4, 2), "few keys": (5, 2, 4, 1), "one query": (1, 9, 6, 2)}


def with_slopes(flags: dict[str, Any], heads: int) -> dict[str, Any]:
    return {**flags, "alibi_slopes": 2.0 ** -torch.arange(1.0, heads + 1)} if "alibi_slopes" in flags else flags


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row", SEMANTICS)
def test_dense(row: str, shape: str) -> None:
    seqlen_q, seqlen_k, heads, kv_heads = SHAPES[shape]
    flags = with_slopes(SEMANTICS[row], heads)
    q, k, v = randn(2, seqlen_q, heads, 8), randn(2, seqlen_k, kv_heads, 8, seed=1), randn(2, seqlen_k, kv_heads, 8)
    result = fa.flash_attn_func(q, k, v, **flags, return_attn_probs=True)
    assert isinstance(result, tuple)
    out, lse, dmask = result
    assert (out.shape, lse.shape, dmask.numel()) == (q.shape, (2, heads, seqlen_q), 0)
    assert torch.equal(fa.flash_attn_func(q, k, v, **flags), out)  # type: ignore[arg-type]
    packed = fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **flags)
    assert torch.equal(packed, out)  # type: ignore[arg-type]
    for b in range(2):
        expected, expected_lse = textbook(q[b], k[b], v[b], **flags)
        close(out[b], expected)
        close(lse[b], expected_lse)


@pytest.mark.parametrize("row", SEMANTICS)
def test_varlen(row: str) -> None:
    flags = with_slopes(SEMANTICS[row], 4)
    seqlens_q, seqlens_k = (3, 0, 1, 6), (5, 2, 0, 4)
    cu_q, cu_k = (torch.tensor((0, *s)).cumsum(0).int() for s in (seqlens_q, seqlens_k))
    q, k, v = randn(10, 4, 8), randn(11, 2, 8, seed=1), randn(11, 2, 8, seed=2)
    lengths = (cu_q, cu_k, 6, 5)
    result = fa.flash_attn_varlen_func(q, k, v, *lengths, **flags, return_attn_probs=True)
    assert isinstance(result, tuple)
    out, lse, _ = result
    assert lse.shape == (4, 10)
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *lengths, **flags), out)  # type: ignore[arg-type]
    pages_k, pages_v, table = paged(k, v, cu_k, page_size=2)
    through_pages = fa.flash_attn_varlen_func(q, pages_k, pages_v, *lengths, **flags, block_table=table)
    assert isinstance(through_pages, Tensor)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected, expected_lse = textbook(q[rows], k[keys], v[keys], **flags)
        close(out[rows], expected)
        close(through_pages[rows], expected)
        close(lse[:, rows], expected_lse)


def paged(k: Tensor, v: Tensor, cu_k: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The packed sequences in pages in reversed order; what is not in use is NaN."""
    lengths = cu_k.diff().tolist()
    per_sequence = [-(-n // page_size) for n in lengths]
    total = sum(per_sequence) + 1
    table = torch.full((len(lengths), max(per_sequence)), -1, dtype=torch.int32)
    pages_k, pages_v = (torch.full((total, page_size, *t.shape[1:]), math.nan) for t in (k, v))
    free = iter(range(total - 1, -1, -1))
    for b, count in enumerate(per_sequence):
        table[b, :count] = torch.tensor([next(free) for _ in range(count)])
        for j in range(lengths[b]):
            for pages, t in ((pages_k, k), (pages_v, v)):
                pages[table[b, j // page_size], j % page_size] = t[cu_k[b] + j]
    return pages_k, pages_v, table


def test_qkvpacked_equals_its_parts_with_gradients() -> None:
    qkv = randn(2, 7, 3, 4, 8).requires_grad_()
    a = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    q, k, v = qkv.unbind(2)
    b = fa.flash_attn_func(q, k, v, causal=True)
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    assert torch.equal(a, b)
    grads = [torch.autograd.grad(out.square().sum(), qkv)[0] for out in (a, b)]
    assert torch.equal(*grads)
    packed = qkv.detach().flatten(0, 1)
    varlen = fa.flash_attn_varlen_qkvpacked_func(packed, int32(0, 7, 14), 7, causal=True)
    torch.testing.assert_close(varlen, a.detach().flatten(0, 1))


def test_gradients_equal_the_textbook() -> None:
    q, k, v = (randn(1, s, h, 8, seed=i).requires_grad_() for i, (s, h) in enumerate(((5, 4), (7, 2), (7, 2))))
    out = fa.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), softcap=2.0)
    assert isinstance(out, Tensor)
    expected, _ = textbook(q[0], k[0], v[0], causal=True, window_size=(3, 0), softcap=2.0)
    mine = torch.autograd.grad(out.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seqlen_k", [7, 300])
def test_dmask_shows_what_was_dropped(seqlen_k: int) -> None:
    q, k, v = randn(2, 5, 4, 8), randn(2, seqlen_k, 2, 8, seed=1), randn(2, seqlen_k, 2, 8, seed=2)
    torch.manual_seed(0)
    result = fa.flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=True)
    assert isinstance(result, tuple)
    out, lse, dmask = result
    assert dmask.shape == (2, 4, 5, seqlen_k)
    plain, plain_lse = tw.attention(q, k, v, causal=True, layout="bshd", return_lse=True)
    assert torch.equal(lse, plain_lse), "lse is of the undropped probabilities"
    probabilities = dmask.abs()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 5))
    values = v.repeat_interleave(2, 2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probabilities, values), plain)
    kept = dmask.clamp(min=0.0) / 0.75
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, values), out)
    assert (dmask < 0).any()
    torch.manual_seed(0)
    assert torch.equal(out, fa.flash_attn_func(q, k, v, 0.25, causal=True)), "asking for it changes no random number"  # type: ignore[arg-type]


def test_dmask_of_packed_sequences_whose_longest_is_not_told() -> None:
    q, totals = randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    told: list[Any] = [3, None]
    masks: list[Any] = []
    for longest in told:
        torch.manual_seed(0)
        given = (q, q, q, totals, totals, longest, longest, 0.5)
        masks.append(fa.flash_attn_varlen_func(*given, return_attn_probs=True)[2])
    assert masks[0].shape == (2, 2, 3, 3)
    assert torch.equal(*masks)


def test_dropout_with_pages_names_the_way_out() -> None:
    q, pages = randn(1, 2, 8), randn(1, 4, 2, 8)
    with pytest.raises(tw.Unsupported, match="gather them into packed k and v"):
        fa.flash_attn_varlen_func(q, pages, pages, int32(0, 1), int32(0, 3), 1, 3, 0.1, block_table=int32(0)[None])


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Complex multiplication, token by token: x (seqlen, heads, dim)."""
    half = cos.shape[1]
    turned = x[..., : 2 * half].double()
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else torch.stack(turned.split(half, -1), -1)
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = pairs.flatten(-2) if interleaved else torch.cat(pairs.unbind(-1), -1)
    return torch.cat((turned, x[..., 2 * half :].double()), -1).float()


STORES = ("whole", "idx", "leftpad", "paged", "paged idx", "paged leftpad")


@pytest.mark.parametrize(
    ("store", "seqlen_q", "new", "causal", "lengths"),
    [*itertools.product(STORES, (1, 3), (0, 2), (False, True), ("int", "tensor"))],
)
def test_kvcache(store: str, seqlen_q: int, new: int, causal: bool, lengths: str) -> None:
    seqlens = [6, 6] if lengths == "int" else [6, 3]
    q, k_new, v_new = randn(2, seqlen_q, 4, 8), randn(2, max(new, 1), 2, 8, seed=1), randn(2, max(new, 1), 2, 8, seed=2)
    cos, sin = (f(torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01]))) for f in (torch.cos, torch.sin))
    k_cache, v_cache = randn(4, 12, 2, 8, seed=3), randn(4, 12, 2, 8, seed=4)
    rows, leftpad = [0, 1], [0, 0]
    extra: dict[str, Any] = {}
    if store in ("idx", "leftpad", "paged idx", "paged leftpad"):
        rows, extra["cache_batch_idx"] = [3, 1], int32(3, 1)
    if store in ("leftpad", "paged leftpad"):
        leftpad, extra["cache_leftpad"] = [2, 1], int32(2, 1)
    if store == "whole":
        k_cache, v_cache = k_cache[:2], v_cache[:2]
    if store.startswith("paged"):
        k_cache, v_cache = (t.reshape(12, 4, 2, 8) for t in (k_cache, v_cache))
        table = torch.tensor([[5, 0, 7], [2, 11, 1], [9, 9, 9], [3, 6, 4]], dtype=torch.int32)
        extra["block_table"] = table[:2] if store == "paged" else table

    def cached(cache: Tensor, b: int) -> Tensor:
        return cache[table[rows[b]].long()].flatten(0, 1) if store.startswith("paged") else cache[rows[b]]

    before_k, before_v = k_cache.clone(), v_cache.clone()
    fresh: dict[str, Any] = {"k": k_new, "v": v_new, "rotary_cos": cos, "rotary_sin": sin} if new else {}
    given = seqlens[0] if lengths == "int" else int32(*seqlens)
    result = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, **fresh, cache_seqlens=given, causal=causal, return_softmax_lse=True, **extra
    )
    out, lse = result
    assert (out.shape, lse.shape) == (q.shape, (2, 4, seqlen_q))
    for b, length in enumerate(seqlens):
        keys, values, queries = cached(before_k, b)[:length], cached(before_v, b)[:length], q[b]
        if new:
            keys = torch.cat((keys, rotated(k_new[b], length + torch.arange(new), cos, sin, True)))
            values = torch.cat((values, v_new[b]))
            index = torch.arange(seqlen_q) if causal else torch.zeros(seqlen_q, dtype=torch.int64)
            queries = rotated(queries, length + index, cos, sin, True)
        torch.testing.assert_close(cached(k_cache, b)[: length + new], keys)
        assert torch.equal(cached(v_cache, b)[: length + new], values)
        assert torch.equal(cached(k_cache, b)[length + new :], cached(before_k, b)[length + new :])
        expected, expected_lse = textbook(queries, keys[leftpad[b] :], values[leftpad[b] :], causal)
        torch.testing.assert_close(out[b].double(), expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[b].double(), expected_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_kvcache_of_a_part_of_a_cache_with_a_left_pad(rows: int) -> None:
    q, new, whole = randn(rows, 1, 2, 8), randn(rows, 1, 2, 8, seed=1), randn(rows, 14, 2, 8, seed=2)
    part, copy = whole[:, 2:12], whole[:, 2:12].clone()
    flags: dict[str, Any] = {"k": new, "v": new, "cache_seqlens": 6, "cache_leftpad": int32(*[2] * rows)}
    of_part, of_copy = (fa.flash_attn_with_kvcache(q, cache, cache.clone(), **flags) for cache in (part, copy))
    assert torch.equal(of_part, of_copy)  # type: ignore[arg-type]
    assert torch.equal(part, copy)


def test_kvcache_appends_zeros_that_have_no_memory() -> None:
    cache, zeros = randn(1, 9, 2, 8), torch._efficientzerotensor(1, 1, 2, 8)
    fa.flash_attn_with_kvcache(randn(1, 1, 2, 8), cache, cache.clone(), zeros, zeros, cache_seqlens=3)
    assert not cache[:, 3].any()


def test_kvcache_ignores_what_lies_outside_the_lengths() -> None:
    q, cache = randn(2, 1, 2, 8), randn(2, 10, 2, 8, seed=1)
    spoiled = cache.clone()
    spoiled[0, 6:], spoiled[1, 3:], spoiled[0, :2], spoiled[1, :1] = (math.nan,) * 4
    flags: dict[str, Any] = {"cache_seqlens": int32(6, 3), "cache_leftpad": int32(2, 1)}
    clean = fa.flash_attn_with_kvcache(q, cache, cache, **flags)
    assert torch.equal(fa.flash_attn_with_kvcache(q, spoiled, spoiled, **flags), clean)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count", "flags", "message"),
    [
        ("func", 3, {"dropout_p": 2.0}, "dropout_p: expected a probability"),
        ("func", 3, {"softmax_scale": "x"}, "softmax_scale: expected None or a finite number"),
        ("func", 3, {"window_size": (2**40, 0)}, "window_size: expected None or a pair"),
        ("func", 3, {"causal": "no"}, "causal: expected True or False, got 'no'"),
        ("qkvpacked_func", 1, {}, "qkv: expected a tensor (batch, seqlen, 3, heads, dim), got (1, 8, 4, 16)"),
        ("varlen_kvpacked_func", 6, {}, "kv: expected a tensor (total, 2, heads, dim), got (1, 8, 4, 16)"),
    ],
)
def test_errors_name_the_arguments_of_flash_attn(name: str, count: int, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(tw.InvalidProblem, match=re.escape(message)):
        getattr(fa, f"flash_attn_{name}")(*[torch.zeros(1, 8, 4, 16)] * count, **flags)


def test_pages_need_lengths_in_cu_seqlens_k() -> None:
    q, pages, totals, nothing = torch.zeros(2, 4, 16), torch.zeros(3, 4, 4, 16), torch.tensor([0, 2]), None
    with pytest.raises(tw.InvalidProblem, match="cu_seqlens_k: expected a torch"):
        fa.flash_attn_varlen_func(q, pages, pages, totals, nothing, 2, 8, block_table=totals[None])  # type: ignore[arg-type]


def test_causal_may_be_none() -> None:
    q = randn(1, 4, 2, 8)
    given: Any = None
    assert torch.equal(fa.flash_attn_func(q, q, q, causal=given), fa.flash_attn_func(q, q, q))  # type: ignore[arg-type]


def test_masks_of_another_length_are_not_taken_for_the_rows() -> None:
    with pytest.raises(tw.InvalidProblem, match=re.escape("attention_mask: expected shape (2, 4), got (2, 3)")):
        fa.bert_padding.unpad_input(torch.zeros(2, 4, 8), torch.ones(2, 3))
