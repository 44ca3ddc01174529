"""The specification itself: agreement with torch where torch has the feature, and the empty row. Finite differences are
those of test_derivatives.py.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from making import int32


def randn(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (3, 5), (4, 1, 1), (4, 3, 5), (2, 1, 1, 5), (2, 4, 3, 5)])
def test_gradcheck_bias_broadcast(shape: tuple[int, ...]) -> None:
    q, k = randn(2, 4, 3, 3, grad=False), randn(2, 2, 5, 3, grad=False, seed=1)
    call = lambda b: tw.attention(q, k, k, bias=b, backend="reference")  # noqa: E731
    assert torch.autograd.gradcheck(call, randn(*shape), fast_mode=True)


@pytest.mark.parametrize("case", ["plain", "causal", "gqa", "mask", "bias", "scale"])
def test_agrees_with_torch(case: str) -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 4, 6, 8, seed=1), randn(2, 4, 6, 5, seed=2)
    if case == "gqa":
        k, v = (t[:, ::2].detach().requires_grad_() for t in (k, v))
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(5)) < 0.7
    mask |= torch.eye(6, dtype=torch.bool)
    bias = randn(4, 6, 6, grad=False, seed=6)
    ours: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "scale": {"scale": 0.3},
    }
    torchs: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "gqa": {"enable_gqa": True},
        "mask": {"attn_mask": mask},
        "bias": {"attn_mask": bias},
        "scale": {"scale": 0.3},
    }
    out = tw.attention(q, k, v, backend="reference", **ours.get(case, {}))
    expected = scaled_dot_product_attention(q, k, v, **torchs.get(case, {}))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = randn(*out.shape, grad=False, seed=7)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sink", [None, -0.5])
def test_a_row_without_keys(sink: float | None) -> None:
    q, k = randn(1, 2, 3, 4), randn(1, 2, 3, 4, seed=1)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    sinks = None if sink is None else torch.full((2,), sink, dtype=torch.float64, requires_grad=True)
    out, lse = tw.attention(q, k, k, mask=mask, sinks=sinks, return_lse=True, backend="reference")
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 4, dtype=torch.float64))
    assert torch.equal(lse[:, :, 1], torch.full((1, 2), -math.inf if sink is None else sink, dtype=torch.float64))
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert torch.equal(dq[:, :, 1], torch.zeros(1, 2, 4, dtype=torch.float64))
    assert torch.isfinite(dk).all()


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    q = randn(1, 2, 3, 4)
    never = torch.full((2,), -math.inf, dtype=torch.float64, requires_grad=True)
    out = tw.attention(q, q, q, sinks=never, window=(0, 0), backend="reference")
    assert torch.equal(out, tw.attention(q, q, q, window=(0, 0), backend="reference"))
    (gradient,) = torch.autograd.grad(out.sum(), never)
    assert torch.equal(gradient, torch.zeros(2, dtype=torch.float64))


def test_scores_are_built_in_the_order_of_the_contract() -> None:
    """One query, two keys, worked by hand: scale, softcap, ALiBi, bias, sink."""
    q, k = torch.tensor([[[[2.0]]]], dtype=torch.float64), torch.tensor([[[[1.0], [3.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[10.0], [20.0]]]], dtype=torch.float64)
    out, lse = tw.attention(
        q, k, v, scale=0.5, softcap=2.0, alibi_slopes=torch.tensor([0.25]), return_lse=True, backend="reference",
        bias=torch.tensor([[0.1, -0.2]], dtype=torch.float64), sinks=torch.tensor([0.3], dtype=torch.float64),
    )  # fmt: skip
    s = [2 * math.tanh(1.0 / 2) - 0.25 * 1 + 0.1, 2 * math.tanh(3.0 / 2) - 0.25 * 0 - 0.2]
    denominator = math.exp(s[0]) + math.exp(s[1]) + math.exp(0.3)
    assert lse.item() == pytest.approx(math.log(denominator), rel=1e-14)
    assert out.item() == pytest.approx((10 * math.exp(s[0]) + 20 * math.exp(s[1])) / denominator, rel=1e-14)


def test_dropout_does_not_depend_on_the_layout_or_the_packing() -> None:
    q, k, v = (randn(2, 4, 6, 8, grad=False, seed=i) for i in range(3))
    dense = tw.attention(q, k, v, dropout=0.5, seed=21, backend="reference")
    swapped = tw.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), dropout=0.5, seed=21, layout="bshd", backend="reference"
    )
    cu = int32(0, 6, 12)
    packed_q, packed_k, packed_v = (t.transpose(1, 2).reshape(12, 4, 8) for t in (q, k, v))
    varlen = tw.attention_varlen(packed_q, packed_k, packed_v, cu, cu, dropout=0.5, seed=21, backend="reference")
    assert torch.equal(dense, swapped.transpose(1, 2))
    assert torch.equal(dense, varlen.reshape(2, 6, 4, 8).transpose(1, 2))
