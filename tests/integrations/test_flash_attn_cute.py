"""flash-attn 4's names: the features that tilewise has, and refusals by name for the others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import int32, randn
from tilewise.integrations import flash_attn

# Called with arguments put together by name.
cute: Any = flash_attn.cute
interface: Any = flash_attn.cute.interface

MODS = ("score_mod", "score_mod_bwd", "mask_mod")


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "one side": ({"window_size": (None, 1)}, {"window": (None, 1)}),
    "no side": ({"window_size": (-1, -1)}, {}),
    "causal and no left side": ({"window_size": (-1, 0), "causal": True}, {"causal": True}),
    "causal window": ({"window_size": (2, None), "causal": True}, {"causal": True, "window": (2, None)}),
    "a window of a tensor": ({"window_size": (torch.tensor(2), 0)}, {"window": (2, 0)}),
    "softcap and scale": ({"softcap": 2.0, "softmax_scale": 0.3}, {"softcap": 2.0, "scale": 0.3}),
    "no softcap": ({"softcap": None}, {}),
    "tuned": ({"num_splits": 4, "pack_gqa": True, "deterministic": True}, {}),
}  # fmt: skip


def same(found: Any, want: Any, inputs: list[Tensor]) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
    weights = [randn(*t.shape, seed=5) for t in found]
    gradients = [
        torch.autograd.grad([r.nan_to_num(neginf=0.0) for r in results], inputs, weights, retain_graph=True)
        for results in (found, want)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", FLAGS)
def test_dense(name: str, sink: bool) -> None:
    given, meant = FLAGS[name]
    q, k, v = (randn(2, n, h, 8, seed=i).requires_grad_() for i, (n, h) in enumerate(((5, 4), (7, 2), (7, 2))))
    sinks = randn(4).requires_grad_() if sink else None
    found = cute.flash_attn_func(q, k, v, **given, learnable_sink=sinks)
    want = tw.attention(q, k, v, layout="bshd", return_lse=True, sinks=sinks, **meant)
    same(found, want, [q, k, v] if sinks is None else [q, k, v, sinks])


@pytest.mark.parametrize("form_q", ["packed", "rows"])
@pytest.mark.parametrize("form_k", ["packed", "rows", "pages"])
@pytest.mark.parametrize("name", ["plain", "causal", "causal window"])
def test_sequences_of_different_lengths(form_q: str, form_k: str, name: str) -> None:
    given, meant = FLAGS[name]
    sinks = randn(4)
    lengths_q, lengths_k = [3, 5], [7, 4]
    queries, keys = randn(2, 5, 4, 8), randn(2, 8, 2, 8, seed=1)
    extra: dict[str, Any] = {"learnable_sink": sinks}
    q, k = queries, keys
    if form_q == "packed":
        q = torch.cat([queries[b, :n] for b, n in enumerate(lengths_q)])
        extra |= {"cu_seqlens_q": int32(0, 3, 8), "max_seqlen_q": 5}
    elif form_k != "pages":
        extra["seqused_q"] = int32(*lengths_q)
    else:
        lengths_q = [5, 5]
    if form_k == "packed":
        k = torch.cat([keys[b, :n] for b, n in enumerate(lengths_k)])
        extra |= {"cu_seqlens_k": int32(0, 7, 11), "max_seqlen_k": 7}
    else:
        extra["seqused_k"] = int32(*lengths_k)
    if form_k == "pages":
        extra["page_table"] = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        k = torch.empty(4, 4, 2, 8)
        k[extra["page_table"].long()] = keys.view(2, 2, 4, 2, 8)
    out, lse = cute.flash_attn_varlen_func(q, k, k, **extra, **given)
    for b in range(2):
        n, m = lengths_q[b], lengths_k[b]
        want, want_lse = tw.attention(
            queries[b, None, :n], keys[b, None, :m], keys[b, None, :m], layout="bshd", sinks=sinks, return_lse=True,
            **meant,
        )  # fmt: skip
        begin = sum(lengths_q[:b])
        mine = out[begin : begin + n] if form_q == "packed" else out[b, :n]
        mine_lse = lse[:, begin : begin + n] if form_q == "packed" else lse[b, :, :n]
        torch.testing.assert_close(mine, want[0])
        torch.testing.assert_close(mine_lse, want_lse[0])


def test_qv_adds_to_the_scores_and_turns_lse_round() -> None:
    q, k, v, qv = randn(2, 3, 4, 8), randn(2, 6, 1, 8), randn(2, 6, 1, 16), randn(2, 3, 4, 16)
    out, lse = cute.flash_attn_func(q, k, v, qv)
    want, want_lse = tw.attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, layout="bshd", return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.transpose(1, 2))
    totals = int32(0, 3, 6), int32(0, 6, 12)
    packed, packed_lse = cute.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v, qv)), *totals, 3, 6)
    torch.testing.assert_close(packed, want.flatten(0, 1))
    torch.testing.assert_close(packed_lse, lse.flatten(0, 1))


def test_lse_of_a_latent_that_is_keys_and_values_has_heads_last() -> None:
    q, latent = randn(2, 3, 4, 512), randn(2, 6, 1, 512)
    _, want = tw.attention(q, latent, latent, layout="bshd", return_lse=True)
    torch.testing.assert_close(cute.flash_attn_func(q, latent, latent)[1], want.transpose(1, 2))
    torch.testing.assert_close(cute.flash_attn_varlen_func(q, latent, latent)[1], want.transpose(1, 2))
    torch.testing.assert_close(cute.flash_attn_func(q, latent, latent.clone())[1], want)


def test_fp8_without_descales_is_taken_as_it_is() -> None:
    q, k, v = (randn(1, 4, 2, 16, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    out, _ = cute.flash_attn_func(q, k, v, causal=True)
    want = tw.attention(q.float(), k.float(), v.float(), layout="bshd", causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    needy = q.detach().requires_grad_()
    with pytest.raises(tw.Unsupported, match="gradients through FP8"):
        cute.flash_attn_func(needy, k, v)[0].float().sum().backward()
    with pytest.raises(tw.Unsupported, match="learnable_sink beside FP8"):
        cute.flash_attn_func(q, k, v, learnable_sink=torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("name", sorted(interface.ADVICE))
def test_what_is_not_there_is_refused_by_name(name: str) -> None:
    x, given = randn(1, 4, 2, 8), {name: (lambda *_: None) if name in MODS else [torch.zeros(1)]}
    with pytest.raises(tw.Unsupported, match=f"^{name} of flash-attn 4: "):
        cute.flash_attn_func(x, x, x, **given)
    if name in inspect.signature(cute.flash_attn_varlen_func).parameters:
        with pytest.raises(tw.Unsupported, match=f"^{name} of flash-attn 4: "):
            cute.flash_attn_varlen_func(x, x, x, **given)


def test_errors_name_the_arguments() -> None:
    x = randn(1, 4, 2, 8)
    wrong: Any
    for wrong in ((-1, 3), (3, -1), (1,), 5, "ab", (torch.ones(2), 0)):
        with pytest.raises(tw.InvalidProblem, match=r"^window_size: expected"):
            cute.flash_attn_func(x, x, x, window_size=wrong)
    with pytest.raises(tw.InvalidProblem, match=r"^learnable_sink: expected"):
        cute.flash_attn_func(x, x, x, learnable_sink=torch.zeros(3))
    with pytest.raises(tw.InvalidProblem, match=r"^q: expected .batch, seqlen, heads, dim."):
        cute.flash_attn_varlen_func(x[0], x[0], x[0])
    with pytest.raises(tw.InvalidProblem, match=r"^seqused_k: expected the tokens in the pages"):
        cute.flash_attn_varlen_func(x, x, x, page_table=int32(0)[None])
    with pytest.raises(tw.Unsupported, match="qv where k is v"):
        cute.flash_attn_func(x, x, x, qv=x)


def test_combine() -> None:
    out, lse = randn(3, 2, 5, 4, 8), randn(3, 2, 5, 4)
    found, found_lse = interface.flash_attn_combine(out, lse)
    torch.testing.assert_close(found, (lse.softmax(0)[..., None] * out).sum(0))
    assert found_lse is not None
    torch.testing.assert_close(found_lse, lse.logsumexp(0))
    assert interface.flash_attn_combine(out, lse, return_lse=False)[1] is None
    with pytest.raises(tw.Unsupported, match="seqused"):
        interface.flash_attn_combine(out, lse, seqused=int32(1, 2))
