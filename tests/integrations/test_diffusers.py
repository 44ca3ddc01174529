"""diffusers: `set_attention_backend("tilewise")`, judged against diffusers' own "native" backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import randn, watched
from tilewise.integrations import diffusers as adapter

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers==0.42.0")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="diffusers before 0.35 has no backends")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry = dispatch._AttentionBackendRegistry
    active = registry._active_backend
    adapter.register()
    yield
    registry.set_active_backend(active)


def attend(backend: str, *tensors: Tensor, **flags: Any) -> Any:
    return dispatch.dispatch_attention_fn(*tensors, backend=backend, **flags)


MASKS: dict[str, Tensor | None] = {
    "no mask": None,
    "keys of each sequence": torch.arange(7)[None] < torch.tensor([[4], [7]]),
    "keys, added": randn(2, 7),
    "queries and keys": torch.ones(5, 7, dtype=torch.bool).tril(3),
    "heads": randn(1, 4, 5, 7) > 0,
    "all, added": randn(2, 4, 5, 7),
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_scales(mask: str, scale: float | None) -> None:
    tensors = [randn(2, n, 4, 8, seed=i).requires_grad_() for i, n in enumerate((5, 7, 7))]
    flags = {"attn_mask": MASKS[mask], "scale": scale}
    found, want = (attend(backend, *tensors, **flags) for backend in ("tilewise", "native"))
    torch.testing.assert_close(found, want)
    weight = randn(*want.shape)
    for a, b in zip(*(torch.autograd.grad(out, tensors, weight) for out in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_causal_is_aligned_as_in_native(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = randn(2, seqlen_q, 4, 8), randn(2, seqlen_k, 4, 8), randn(2, seqlen_k, 4, 8, seed=1)
    found, want = (attend(backend, q, k, v, is_causal=True) for backend in ("tilewise", "native"))
    torch.testing.assert_close(found, want)


def test_grouped_heads_need_the_flag() -> None:
    q, k = randn(2, 5, 4, 8), randn(2, 7, 2, 8)
    found, want = (attend(backend, q, k, k, enable_gqa=True) for backend in ("tilewise", "native"))
    torch.testing.assert_close(found, want)
    with pytest.raises(tw.InvalidProblem, match="key: expected 4 heads as query has, got 2"):
        attend("tilewise", q, k, k)


def test_dropout_window_softcap_and_lse() -> None:
    q, k, v = (randn(2, 6, 4, 8, seed=i) for i in range(3))
    torch.manual_seed(0)
    found = attend("tilewise", q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(found, tw.attention(q, k, v, dropout=0.5, layout="bshd"))
    kwargs = {"window_size": (2, 1), "softcap": 2.0, "return_lse": True}
    out, lse = attend("tilewise", q, k, v, attention_kwargs=kwargs)
    want = tw.attention(q, k, v, window=(2, 1), softcap=2.0, layout="bshd", return_lse=True)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert lse.shape == (2, 4, 6)


def test_what_cannot_be_honoured_is_refused() -> None:
    q, k = randn(2, 5, 4, 8), randn(2, 7, 4, 8)
    with pytest.raises(tw.Unsupported, match="context parallelism of diffusers"):
        attend("tilewise", q, k, k, parallel_config=object())
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected None because is_causal is True"):
        attend("tilewise", q, k, k, attn_mask=torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected a shape that broadcasts"):
        attend("tilewise", q, k, k, attn_mask=torch.ones(5, 6, dtype=torch.bool))
    with pytest.raises(tw.InvalidProblem, match="attn_mask: expected dtype bool"):
        attend("tilewise", q, k, k, attn_mask=torch.ones(5, 7, dtype=torch.int64))
    with pytest.raises(tw.InvalidProblem, match="window_size: expected no window beside is_causal"):
        attend("tilewise", q, k, k, is_causal=True, attention_kwargs={"window_size": (2, 0)})
    with pytest.raises(tw.InvalidProblem, match="dropout_p: expected a probability"):
        attend("tilewise", q, k, k, dropout_p=1.5)
    with pytest.raises(tw.Unsupported, match="return_attn_probs"):
        attend("tilewise", q, k, k, attention_kwargs={"return_attn_probs": True})


def test_every_argument_of_a_backend_is_known() -> None:
    """The dispatcher drops what a backend does not name."""
    registry = dispatch._AttentionBackendRegistry
    names = set().union(*registry._supported_arg_names.values())
    assert names == registry._supported_arg_names[dispatch.AttentionBackendName("tilewise")]


def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", "0.41.1")
    with pytest.raises(tw.Unsupported, match=r"diffusers 0\.41\.1 is older than 0\.42"):
        adapter.register()


def flux() -> Any:
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def inputs() -> dict[str, Any]:
    return {
        "hidden_states": randn(2, 16, 4), "encoder_hidden_states": randn(2, 8, 32), "timestep": torch.ones(2),
        "pooled_projections": randn(2, 32), "img_ids": randn(16, 3), "txt_ids": randn(8, 3),
    }  # fmt: skip


def test_a_model_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched(monkeypatch, adapter, "attention")
    model = flux()
    want = model(**inputs()).sample
    assert not calls
    model.set_attention_backend("tilewise")
    found = model(**inputs()).sample
    assert len(calls) == 2
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    parameter = model.transformer_blocks[0].attn.to_q.weight
    gradients = [torch.autograd.grad(out.square().sum(), parameter)[0] for out in (found, want)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    with dispatch.attention_backend("native"):
        model.reset_attention_backend()
        model(**inputs())
    assert len(calls) == 2
    with dispatch.attention_backend("tilewise"):
        model(**inputs())
    assert len(calls) == 4


def test_a_model_under_context_parallelism_keeps_its_backend() -> None:
    model = flux()
    model.transformer_blocks[0].attn.processor._parallel_config = object()
    with pytest.raises(ValueError, match="does not support context parallelism"):
        model.set_attention_backend("tilewise")
