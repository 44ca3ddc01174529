"""Scores so large that fp32 keeps few of their digits: one key wins, or equal ones share, and nothing is NaN."""

import pytest
import torch
from torch import Tensor

import tilewise as tw

BACKENDS = ("cpu", "reference")


def qkv(rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to(dtype) for n in (rows, keys, keys))
    return q, k, v


LOWEST = float(torch.finfo(torch.float32).min)


@pytest.mark.parametrize("bias", [-1e8, -1e10, -1e12, -1e20, -1e30, 1e12, LOWEST])
@pytest.mark.parametrize("keys", [7, 70, 3000])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_equal_scores_share(name: str, keys: int, bias: float) -> None:
    """As in padding that is hidden by numbers to be added: -1e10 gave NaN, also in the gradients of every key."""
    q, k, v = (t.requires_grad_() for t in qkv(5, keys, torch.float32))
    added = torch.zeros(5, keys)
    added[2] = bias
    # Scores are lost beside such numbers; where they are not, they are equal.
    out, lse = tw.attention(q * 0.0, k, v, bias=added, backend=name, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    # The CPU counts in log2 units, which hold no more.
    held = max(bias, -2.3e38) if name == "cpu" else bias
    torch.testing.assert_close(
        lse[..., 2], torch.full_like(lse[..., 2], held), rtol=3e-7 if held == bias else 0.01, atol=0
    )
    seen = [0, 1, 3, 4]
    gradients = torch.autograd.grad(out[:, :, seen].sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(gradients[2], torch.full_like(v, 4 / keys))


@pytest.mark.parametrize("name", BACKENDS)
def test_ordinary_rows_stay_what_they_are_beside_hidden_ones(name: str) -> None:
    q, k, v = qkv(40, 300, torch.float32)
    bias = torch.zeros(40, 300)
    bias[::3] = -1e20
    hidden, plain = (tw.attention(q, k, v, bias=added, backend=name) for added in (bias, torch.zeros(40, 300)))
    rest = [i for i in range(40) if i % 3]
    assert torch.equal(hidden[:, :, rest], plain[:, :, rest])
