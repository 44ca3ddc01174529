"""flash-attn 3's extras: chunks, used lengths, qv, FP8, packed caches, combine. FA2's tests cover what they share."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import int32, randn
from tilewise import dispatch
from tilewise.integrations import flash_attn as fa2
from tilewise.integrations import flash_attn_interface as fa3

pytestmark = pytest.mark.slow


def pair(result: Any) -> tuple[Tensor, Tensor]:
    out, lse = result
    return out, lse


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=3e-6, rtol=3e-6)


def same_chunk(seqlen_q: int, seqlen_k: int, chunk: int) -> Tensor:
    own = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    return own.div(chunk, rounding_mode="floor") == torch.arange(seqlen_k)[None, :] // chunk


FLAGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (2, 0)},
    {"window_size": (1, 1), "softcap": 2.0},
]


def ours(flags: dict[str, Any]) -> dict[str, Any]:
    """The same flags in tilewise's words."""
    return {"causal": flags.get("causal", False), "window": flags.get("window_size"), "softcap": flags.get("softcap")}


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("lengths", [(12, 12), (3, 11), (9, 4), (1, 9), (7, 7)], ids=str)
def test_attention_chunk(lengths: tuple[int, int], flags: dict[str, Any]) -> None:
    q, k, v = randn(2, lengths[0], 4, 8).requires_grad_(), randn(2, lengths[1], 2, 8), randn(2, lengths[1], 2, 6)
    out, lse = pair(fa3.flash_attn_func(q, k, v, attention_chunk=4, return_attn_probs=True, **flags))
    mask = same_chunk(*lengths, 4)
    expected = tw.attention(q, k, v, mask=mask, layout="bshd", return_lse=True, **ours(flags))
    close(out, expected[0])
    close(lse, expected[1])
    close(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected[0])))


def test_longest_lengths_beside_chunks() -> None:
    q, totals = randn(20, 2, 8), int32(0, 20)

    def call(most: Any) -> Any:
        return fa3.flash_attn_varlen_func(q, q, q, totals, totals, 20, most, causal=True, attention_chunk=4)

    for most in (10**9, None):
        close(call(most), call(20))
    for most in (10, -1):
        with pytest.raises(tw.InvalidProblem, match="max_seqlen_k"):
            call(most)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("chunk", [0, 3])
def test_varlen_with_used_lengths_and_chunks(chunk: int, flags: dict[str, Any]) -> None:
    cu_q, cu_k, used_q, used_k = int32(0, 4, 5, 11), int32(0, 6, 6, 13), int32(3, 1, 6), int32(5, 0, 4)
    q, k, v = randn(12, 4, 8), randn(14, 2, 8, seed=1), randn(14, 2, 8, seed=2)
    spoiled_k, spoiled_v = k.clone(), v.clone()
    for b in range(3):
        spoiled_k[cu_k[b] + used_k[b] : cu_k[b + 1]] = spoiled_v[cu_k[b] + used_k[b] : cu_k[b + 1]] = torch.nan
    lengths = (cu_q, cu_k, 6, 7, used_q, used_k)
    asked: Any = {"attention_chunk": chunk, "return_attn_probs": True, **flags}
    out, lse = pair(fa3.flash_attn_varlen_func(q, spoiled_k, spoiled_v, *lengths, **asked))
    seen = torch.zeros(12, dtype=torch.bool)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b] + used_q[b]), slice(cu_k[b], cu_k[b] + used_k[b])
        seen[rows] = True
        mask = same_chunk(int(used_q[b]), int(used_k[b]), chunk) if chunk else None
        one = [t[None] for t in (q[rows], k[keys], v[keys])]
        expected = tw.attention(*one, mask=mask, layout="bshd", return_lse=True, **ours(flags))
        close(out[rows], expected[0][0])
        close(lse[:, rows], expected[1][0])
    assert (out[~seen] == 0).all()
    assert (lse[:, ~seen] == -torch.inf).all()


def test_equals_fa2_where_they_share() -> None:
    q, k, v = randn(2, 5, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8, seed=1)
    flags: dict[str, Any] = {"causal": True, "window_size": (3, 0), "softcap": 1.5}
    tuning: dict[str, Any] = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8}
    mine, theirs = fa3.flash_attn_func(q, k, v, 0.3, **flags, **tuning), fa2.flash_attn_func(q, k, v, 0.0, 0.3, **flags)
    assert torch.equal(mine, theirs)  # type: ignore[arg-type]
    qkv = randn(2, 5, 3, 4, 8)
    packed = fa3.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(packed, fa2.flash_attn_qkvpacked_func(qkv, causal=True))  # type: ignore[arg-type]
    stacked = fa3.flash_attn_qkvpacked_func(qkv.flatten(2, 3), causal=True, num_heads_q=4)
    assert torch.equal(stacked, packed)  # type: ignore[arg-type]


def test_qv_adds_to_the_scores() -> None:
    q, qv, k, v = randn(2, 3, 4, 8), randn(2, 3, 4, 16), randn(2, 5, 2, 8), randn(2, 5, 2, 16)
    out = fa3.flash_attn_func(q, k, v, qv=qv, causal=True)
    k_all, v_all = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    extra = torch.einsum("bihd,bjhd->bhij", qv, v_all) / 24**0.5
    expected = tw.attention(q, k_all, v_all, bias=extra, scale=24**-0.5, causal=True, layout="bshd")
    close(out, expected)  # type: ignore[arg-type]
    # The default scale of the function below takes no account of qv.
    inner, _, _, _ = fa3._flash_attn_forward(q, k, v, qv=qv, causal=True)
    assert torch.equal(inner, fa3.flash_attn_func(q, k, v, qv=qv, causal=True, softmax_scale=8**-0.5))  # type: ignore[arg-type]
    latent_v, latent_qv = randn(1, 5, 1, 512), randn(1, 3, 4, 512)
    with pytest.raises(tw.Unsupported, match="584, above 576"):
        fa3.flash_attn_func(randn(1, 3, 4, 72), randn(1, 5, 1, 72), latent_v, qv=latent_qv)


@pytest.mark.parametrize("grad", [False, True])
def test_qv_of_a_latent(grad: bool) -> None:
    """k is stored behind v, as DeepSeek's models do: the same result as copies, and gradients too."""
    q, qv, latent = randn(2, 3, 16, 64), randn(2, 3, 16, 512), randn(2, 5, 1, 576).requires_grad_(grad)
    out = fa3.flash_attn_func(q, latent[..., 512:], latent[..., :512], qv=qv, causal=True)
    k, v = latent[..., 512:].detach().clone(), latent[..., :512].detach().clone()
    k.requires_grad_(grad)
    v.requires_grad_(grad)
    want = fa3.flash_attn_func(q, k, v, qv=qv, causal=True)
    close(out, want)  # type: ignore[arg-type]
    if grad:
        (got,) = torch.autograd.grad(out.square().sum(), latent)  # type: ignore[union-attr]
        dk, dv = torch.autograd.grad(want.square().sum(), (k, v))  # type: ignore[union-attr]
        close(got, torch.cat((dv, dk), -1))


def test_qv_whose_gradient_nothing_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that require a gradient are attended to, as in FA3; asking for the gradient says why there is none."""
    cpu = dispatch.load("cpu")
    monkeypatch.setattr(cpu, "supports", lambda problem, _: "gradients are short" if problem.needs_grad else None)
    monkeypatch.setattr(dispatch.load("reference"), "supports", lambda *_: "not today")
    q, qv, k, v = randn(2, 3, 4, 24), randn(2, 3, 4, 40), randn(2, 5, 2, 24), randn(2, 5, 2, 40)
    want = fa3.flash_attn_func(q, k, v, qv=qv)
    for needy in (q, k, v, qv):
        needy.requires_grad_()
        out = fa3.flash_attn_func(q, k, v, qv=qv)
        assert torch.equal(out, want)  # type: ignore[arg-type]
        with pytest.raises(tw.Unsupported, match="gradients are short"):
            out.sum().backward()  # type: ignore[union-attr]
        needy.requires_grad_(False)


@pytest.mark.parametrize("paged", [False, True])
def test_qv_with_a_cache_of_latents(paged: bool) -> None:
    q, qv, latent = randn(2, 2, 16, 64), randn(2, 2, 16, 512), randn(2, 32, 1, 576)
    k_new, v_new = randn(2, 2, 1, 64, seed=5), randn(2, 2, 1, 512, seed=6)
    lengths, whole = int32(5, 9), latent.clone()
    for i, start in enumerate(lengths.tolist()):
        whole[i, start : start + 2, :, :512], whole[i, start : start + 2, :, 512:] = v_new[i], k_new[i]
    stored = latent.view(4, 16, 1, 576).clone() if paged else latent.clone()
    table = int32(0, 1, 2, 3).view(2, 2) if paged else None
    out = fa3.flash_attn_with_kvcache(
        q, stored[..., 512:], stored[..., :512], k_new, v_new, qv, cache_seqlens=lengths, page_table=table, causal=True
    )
    assert torch.equal(stored.view_as(whole), whole)
    for i, start in enumerate(lengths.tolist()):
        keys = whole[i : i + 1, : start + 2]
        want = tw.attention(torch.cat((qv, q), -1)[i : i + 1], keys, keys[..., :512], causal=True, layout="bshd")
        close(out[i : i + 1], want)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_fp8_comes_with_its_descales(packed: bool) -> None:
    q, k, v = (randn(2, 6, h, 16, seed=h).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    descales = {f"{n}_descale": randn(2, 2, seed=i).abs() + 0.5 for i, n in enumerate("qkv")}
    if packed:
        cu = int32(0, 6, 12)
        flat_q, flat_k, flat_v = (t.flatten(0, 1) for t in (q, k, v))
        out = fa3.flash_attn_varlen_func(flat_q, flat_k, flat_v, cu, cu, 6, 6, causal=True, **descales)  # type: ignore[arg-type]
    else:
        out = fa3.flash_attn_func(q, k, v, causal=True, **descales)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    assert out.dtype is torch.bfloat16
    wide = [
        t.float() * d.repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
        for t, d in zip((q, k, v), descales.values(), strict=True)
    ]
    expected = tw.attention(*wide, causal=True, layout="bshd")
    # bf16 keeps 8 bits: q * descale is rounded once, out twice.
    torch.testing.assert_close(out.float().view_as(expected), expected, atol=2e-2, rtol=2e-2)


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("flags", [{}, {"attention_chunk": 4}], ids=["fp8", "widened"])
def test_a_descale_of_one_element_is_that_of_all(shape: tuple[int, ...], flags: dict[str, Any]) -> None:
    q, k, v = (randn(2, 6, heads, 16, seed=heads).to(E4M3) for heads in (4, 2, 2))
    names = ("q_descale", "k_descale", "v_descale")
    results: list[Any] = []
    for size in (shape, (2, 2)):
        factors = zip(names, (0.5, 2.0, 3.0), strict=True)
        given: dict[str, Any] = {**flags, **{name: torch.full(size, factor) for name, factor in factors}}
        dense = fa3.flash_attn_func(q, k, v, **given)
        rows, keys, values = (t.flatten(0, 1) for t in (q, k, v))
        packed = fa3.flash_attn_varlen_func(rows, keys, values, int32(0, 4, 12), int32(0, 4, 12), 8, 8, **given)
        cached = fa3.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=int32(5, 3), **given)
        results.append((dense, packed, cached))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("flags", [{}, {"attention_chunk": 4}, {"packed": True}], ids=["fp8", "widened", "packed"])
def test_fp8_inputs_may_require_a_gradient_that_nobody_asks_for(flags: dict[str, Any]) -> None:
    packed = "packed" in flags
    shape = (6, 2, 16) if packed else (1, 6, 2, 16)
    q, k, v = (randn(*shape, seed=seed).to(E4M3) for seed in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
        if packed:
            return fa3.flash_attn_varlen_func(q, k, v, int32(0, 6), int32(0, 6), 6, 6, return_attn_probs=True, **others)
        return fa3.flash_attn_func(q, k, v, return_attn_probs=True, **flags, **others)

    want, want_lse = attend(q, k, v)
    for needy in range(3):
        given = [t.detach().requires_grad_(i == needy) for i, t in enumerate((q, k, v))]
        out, lse = attend(*given)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        for result in (out, lse):
            with pytest.raises(tw.Unsupported, match="gradients through FP8 inputs are not computed"):
                torch.autograd.grad(result.float().sum(), given[needy], retain_graph=True)
        with torch.no_grad():
            assert not attend(*given)[0].requires_grad
    descale = torch.ones(1, requires_grad=True)
    out, _ = attend(q, k, v, v_descale=descale)
    with pytest.raises(tw.Unsupported, match="gradients through FP8"):
        out.float().sum().backward()
    # Other parts of a graph are left alone.
    weight = torch.ones((), requires_grad=True)
    out, _ = attend(q, k, v)
    (weight * out.float()).sum().backward()
    assert weight.grad is not None


def test_fp8_caches_may_require_a_gradient_that_they_never_have() -> None:
    q, cache, new = randn(2, 1, 2, 16).to(E4M3), randn(2, 8, 2, 16).to(E4M3), randn(2, 1, 2, 16, seed=1).to(E4M3)
    want = fa3.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, cache_seqlens=5)
    needy_q, k_cache, v_cache, k, v = (t.clone().requires_grad_() for t in (q, cache, cache, new, new))
    found = fa3.flash_attn_with_kvcache(needy_q, k_cache, v_cache, k, v, cache_seqlens=5)
    assert torch.equal(found, want)  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=str)
def test_nothing_to_attend_to_or_from(batch: int, seqlen_q: int, seqlen_k: int, chunk: int, dtype: torch.dtype) -> None:
    q, k = (torch.randn(batch, n, heads, 16).to(dtype) for n, heads in ((seqlen_q, 4), (seqlen_k, 2)))
    for descale in (None, torch.ones(batch, 2)):
        out, lse = pair(
            fa3.flash_attn_func(
                q, k, k, causal=True, q_descale=descale, k_descale=descale, v_descale=descale, attention_chunk=chunk,
                return_attn_probs=True,
            )
        )  # fmt: skip
        assert (out.shape, out.dtype, lse.shape) == (q.shape, torch.bfloat16, (batch, 4, seqlen_q))
        assert seqlen_k or not out.any()
        assert seqlen_k or bool((lse == -torch.inf).all())


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("store", ["whole", "leftpad", "paged"])
def test_kvcache_with_packed_queries_and_new_keys(store: str, chunk: int) -> None:
    cu_q, cu_new, before = int32(0, 2, 3), int32(0, 3, 4), int32(5, 2)
    q, k_new, v_new = randn(4, 4, 8), randn(4, 2, 8, seed=1), randn(4, 2, 8, seed=2)
    k_cache, v_cache = randn(2, 12, 2, 8, seed=3), randn(2, 12, 2, 8, seed=4)
    extra: dict[str, Any] = {"cache_leftpad": int32(1, 2)} if store == "leftpad" else {}
    skip = [1, 2] if store == "leftpad" else [0, 0]
    if store == "paged":
        k_cache, v_cache = k_cache.reshape(6, 4, 2, 8), v_cache.reshape(6, 4, 2, 8)
        extra["page_table"] = torch.tensor([[4, 0, 5], [2, 1, 3]], dtype=torch.int32)

    def cached(cache: Tensor, b: int) -> Tensor:
        return cache[extra["page_table"][b].long()].flatten(0, 1) if store == "paged" else cache[b]

    result = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, cache_seqlens=before, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new,
        max_seqlen_q=2, causal=True, attention_chunk=chunk, return_softmax_lse=True, **extra,
    )  # fmt: skip
    assert isinstance(result, tuple)
    out, lse, *accumulators = result
    assert [a.numel() for a in accumulators] == [0, 0]
    for b in range(2):
        rows, new = slice(cu_q[b], cu_q[b + 1]), slice(cu_new[b], cu_new[b + 1])
        end = int(before[b] + cu_new.diff()[b])
        assert torch.equal(cached(k_cache, b)[before[b] : end], k_new[new])
        keys, values = cached(k_cache, b)[skip[b] : end], cached(v_cache, b)[skip[b] : end]
        mask = same_chunk(int(cu_q.diff()[b]), len(keys), chunk) if chunk else None
        one = [t[None] for t in (q[rows], keys, values)]
        expected = tw.attention(*one, causal=True, mask=mask, layout="bshd", return_lse=True)
        close(out[rows], expected[0][0])
        close(lse[:, rows], expected[1][0])


def test_queries_are_turned_by_their_own_positions_where_keys_are_left_out() -> None:
    """All of q by the position of the first, unless causality, a window or chunks tell queries apart."""
    cache, q, new, cos, sin = randn(2, 32, 2, 16), randn(2, 3, 4, 16), randn(2, 3, 2, 16), randn(40, 8), randn(40, 8)

    def call(module: Any, **flags: Any) -> Tensor:
        given: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": int32(5, 9), **flags}
        out: Tensor = module.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, **given)
        return out

    for module in (fa2, fa3):
        together, apart = call(module), call(module, window_size=(31, 31))
        assert not torch.allclose(together, apart, atol=1e-3)
        assert torch.equal(call(module, window_size=[-1, -1]), together)
        assert torch.equal(call(module, window_size=(-1, -2)), together)
    torch.testing.assert_close(call(fa3, attention_chunk=32), apart)


def test_kvcache_rotary_offsets() -> None:
    cos, sin = torch.rand(32, 4), torch.rand(32, 4)
    q, k_new, cache = randn(2, 1, 2, 8), randn(2, 1, 2, 8, seed=1), randn(2, 6, 2, 8, seed=2)
    a, b = cache.clone(), cache.clone()
    shifted = fa3.flash_attn_with_kvcache(
        q, a, a.clone(), k_new, k_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=3, rotary_seqlens=int32(9, 20)
    )
    turn = fa2.layers.rotary.apply_rotary_emb
    q_turned, k_turned = (turn(t, cos, sin, True, seqlen_offsets=int32(9, 20)) for t in (q, k_new))
    plain = fa3.flash_attn_with_kvcache(q_turned, b, b.clone(), k_turned, k_new, cache_seqlens=3)
    close(shifted, plain)  # type: ignore[arg-type]
    close(a, b)


def test_kvcache_refuses_what_would_copy_the_cache() -> None:
    q, cache = randn(1, 1, 2, 8), randn(1, 4, 2, 8)
    with pytest.raises(tw.Unsupported, match="keep k right behind v"):
        fa3.flash_attn_with_kvcache(q, cache, cache, qv=q, cache_seqlens=2)
    with pytest.raises(tw.InvalidProblem, match="columns of v_cache"):
        fa3.flash_attn_with_kvcache(q, cache[..., 4:], cache[..., :4], qv=q, cache_seqlens=2)


@pytest.mark.parametrize("kind", ["whole", "lengths", "permuted", "padded", "paged", "packed q"])
def test_an_fp8_cache_comes_with_its_descales(kind: str) -> None:
    """New rows go in as they are, whatever the cache looks like, and the result is that of the widened tensors."""
    fp8 = torch.float8_e4m3fn
    q, k, v, k_new, v_new = (
        randn(2, n, h, 16, seed=i).to(fp8) for i, (n, h) in enumerate(((3, 4), (12, 2), (12, 2), (3, 2), (3, 2)))
    )
    descales: dict[str, Any] = {f"{n}_descale": randn(2, 2, seed=i).abs() + 0.5 for i, n in enumerate("qkv")}
    lengths = torch.full((2,), 5, dtype=torch.int32) if kind in ("whole", "padded") else int32(5, 8)
    options: dict[str, Any] = {"cache_seqlens": 5 if kind == "whole" else lengths}
    if kind == "permuted":
        options["cache_batch_idx"] = int32(1, 0)
    elif kind == "padded":
        options["cache_leftpad"] = int32(2, 0)
    k_cache, v_cache = (t.clone() for t in (k, v))
    if kind in ("paged", "packed q"):
        order = int32(3, 1, 5, 0, 2, 4)
        k_cache, v_cache = (t.view(torch.uint8).view(6, 4, 2, 16)[order.argsort()].view(fp8) for t in (k, v))
        options["page_table"] = order.view(2, 3)
    rows = q
    if kind == "packed q":
        rows = q.flatten(0, 1)
        options |= {"cu_seqlens_q": int32(0, 3, 6), "max_seqlen_q": 3}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        rows, k_cache, v_cache, k_new, v_new, causal=True, return_softmax_lse=True, **options, **descales
    )
    assert out.dtype is torch.bfloat16
    wide_q, wide_k, wide_v, wide_k_new, wide_v_new = (
        t.float() * d.repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
        for t, d in zip((q, k, v, k_new, v_new), [descales[f"{n}_descale"] for n in "qkvkv"], strict=True)
    )
    if kind == "permuted":
        raw_k, raw_v = ((t.float().flip(0)) for t in (k, v))
        wide_k, wide_v = (t * descales[f"{n}_descale"][:, None, :, None] for n, t in (("k", raw_k), ("v", raw_v)))
    for b in range(2):
        length, pad = int(lengths[b]), 2 if kind == "padded" and b == 0 else 0
        keys, values = (
            torch.cat((old[b, pad:length], new[b]))[None] for old, new in ((wide_k, wide_k_new), (wide_v, wide_v_new))
        )
        expected, expected_lse = tw.attention(
            wide_q[b : b + 1], keys, values, causal=True, layout="bshd", return_lse=True
        )
        mine = out.unflatten(0, (2, 3))[b] if kind == "packed q" else out[b]
        torch.testing.assert_close(mine.float(), expected[0], atol=2e-2, rtol=2e-2)
        mine_lse = lse.unflatten(1, (2, 3))[:, b] if kind == "packed q" else lse[b]
        torch.testing.assert_close(mine_lse, expected_lse[0], atol=1e-4, rtol=1e-4)
    if kind == "whole":
        assert torch.equal(k_cache[:, 5:8].view(torch.uint8), k_new.view(torch.uint8))
        assert torch.equal(v_cache[:, :5].view(torch.uint8), v[:, :5].view(torch.uint8))


@pytest.mark.parametrize("tables", [E4M3, torch.bfloat16, torch.float32], ids=str)
def test_fp8_queries_and_keys_are_turned_and_rounded_again(tables: torch.dtype) -> None:
    fp8 = torch.float8_e4m3fn
    q, k_new, v_new, cache = (randn(2, n, 2, 16, seed=n).to(fp8) for n in (1, 2, 3, 8))
    k_new, v_new = k_new[:, :1], v_new[:, :1]
    k_new[0, 0, 0, :2] = torch.tensor(448.0)  # turned, it is beyond e4m3
    angles = randn(8, 4) * 3
    cos, sin = angles.cos().to(tables), angles.sin().to(tables)
    found, other = cache.clone(), cache.clone()
    descales: dict[str, Any] = {f"{n}_descale": torch.full((2, 2), 0.5) for n in "qkv"}
    flags: dict[str, Any] = {"cache_seqlens": int32(3, 5), "causal": True, **descales}
    turned = fa3.flash_attn_with_kvcache(q, found, found.clone(), k_new, v_new, rotary_cos=cos, rotary_sin=sin, **flags)
    rounded = []
    for t in (q, k_new):
        wide = fa2.layers.rotary.apply_rotary_emb(t.float(), cos.float(), sin.float(), True, seqlen_offsets=int32(3, 5))
        rounded.append(wide.clamp(-448, 448).to(fp8))
    plain = fa3.flash_attn_with_kvcache(rounded[0], other, other.clone(), rounded[1], v_new, **flags)
    assert torch.equal(turned, plain)  # type: ignore[arg-type]
    assert torch.equal(found.view(torch.uint8), other.view(torch.uint8))
    assert not found.float().isnan().any()


def test_fp8_caches_refuse_what_they_cannot_take() -> None:
    q, cache = (randn(1, n, 2, 8).to(torch.float8_e4m3fn) for n in (1, 4))
    with pytest.raises(tw.InvalidProblem, match="q: expected float8_e4m3fn"):
        fa3.flash_attn_with_kvcache(q.float(), cache, cache, cache_seqlens=int32(2))
    with pytest.raises(tw.InvalidProblem, match=r"k: expected dtype torch\.float8_e4m3fn"):
        fa3.flash_attn_with_kvcache(q, cache, cache, q.float(), q.float(), cache_seqlens=2)
    with pytest.raises(tw.InvalidProblem, match="scales"):
        fa2.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=int32(2))


def test_combine_puts_splits_together() -> None:
    q, k, v = randn(2, 3, 4, 8), randn(2, 10, 4, 8), randn(2, 10, 4, 6)
    parts = [
        tw.attention(q, k[:, i:j], v[:, i:j], layout="bshd", return_lse=True) for i, j in ((0, 3), (3, 3), (3, 10))
    ]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    whole, whole_lse = tw.attention(q, k, v, layout="bshd", return_lse=True)
    close(out, whole)
    close(lse, whole_lse.transpose(1, 2))
    into = torch.empty(2, 3, 4, 6, dtype=torch.bfloat16)
    result, _ = fa3.flash_attn_combine(outs, lses, into, torch.bfloat16)
    assert result is into
    assert torch.equal(into, whole.bfloat16())
    with pytest.raises(tw.InvalidProblem, match="lse_partial"):
        fa3.flash_attn_combine(outs, lses.transpose(2, 3))


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("junk", [0.0, 7.0, float("nan"), float("inf")])
def test_combine_leaves_out_what_saw_no_key(splits: int, junk: float) -> None:
    out, lse = randn(splits, 2, 3, 4, 8), randn(splits, 2, 3, 4)
    # The first row of every split is empty, the second row of the first split alone.
    empty = torch.zeros(splits, 2, 3, 4, dtype=torch.bool)
    empty[:, 0, 0], empty[0, 0, 1] = True, True
    out, lse = out.masked_fill(empty[..., None], junk), lse.masked_fill(empty, -torch.inf)
    weights = lse.softmax(0).masked_fill(empty, 0.0)
    found, found_lse = fa3.flash_attn_combine(out, lse)
    close(found, (weights[..., None] * out.masked_fill(empty[..., None], 0.0)).sum(0))
    close(found_lse, lse.logsumexp(0))
    assert not found[0, 0].any()
    assert (found_lse[0, 0] == -torch.inf).all()


def test_combine_rounds_once_and_refuses_what_does_not_fit() -> None:
    out, lse = randn(9, 2, 3, 4, 8).bfloat16(), randn(9, 2, 3, 4)
    found, _ = fa3.flash_attn_combine(out, lse)
    assert torch.equal(found, fa3.flash_attn_combine(out.float(), lse)[0].bfloat16())
    with pytest.raises(tw.InvalidProblem, match="out: expected shape"):
        fa3.flash_attn_combine(out, lse, torch.empty(5, 2, 3, 4, 8))
    for wrong in (out.to(torch.float8_e4m3fn), out.int()):
        with pytest.raises(tw.InvalidProblem, match="out_partial: expected float32"):
            fa3.flash_attn_combine(wrong, lse)


def test_scheduler_metadata_is_harmless() -> None:
    lengths = int32(3)
    metadata = fa3.get_scheduler_metadata(1, 1, 4, 2, 2, 8, lengths)
    q, cache = randn(1, 1, 2, 8), randn(1, 4, 2, 8)
    with_it = fa3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata)
    assert torch.equal(with_it, fa3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths))  # type: ignore[arg-type]


def test_chunks_and_descales_that_make_no_sense() -> None:
    x = torch.zeros(2, 8, 4, 16)
    nothing: Any = None
    with pytest.raises(tw.InvalidProblem, match=r"k: expected a torch.Tensor, got NoneType"):
        fa3.flash_attn_func(x, nothing, x)
    for qv in (x[..., :8], x[:, :1], x[0]):
        with pytest.raises(tw.InvalidProblem, match="qv: expected q's shape with the columns of v"):
            fa3.flash_attn_func(x, x, x, qv=qv)
    with pytest.raises(tw.InvalidProblem, match="attention_chunk: expected an integer >= 0, got -3"):
        fa3.flash_attn_func(x, x, x, attention_chunk=-3)
    e4m3 = x.to(torch.float8_e4m3fn)
    for wrong in (torch.ones(2), torch.ones(2, 3), torch.ones(5, 4)):
        with pytest.raises(tw.InvalidProblem, match=r"q_descale: expected \(2, kv_heads\)"):
            fa3.flash_attn_func(e4m3, e4m3, e4m3, q_descale=wrong)
