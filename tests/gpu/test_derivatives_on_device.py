"""Tangents and second derivatives on a real GPU, against the reference in fp64.

The conformance suite has many more cases: `pytest tests/backends/test_conformance.py --backend triton --device cuda -k
tangents`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.testing.poison import uninitialised_is_nan

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

BF16 = torch.bfloat16
# Of the root mean square of a result: a few roundings of 16 bits, or of sums in fp32.
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 2e-5}
LENGTHS = (513, 0, 200, 64)


def draw(kind: str, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, their tangents, and dout: ragged tiles, four heads that share two."""
    rows = (sum(LENGTHS) + 5,) if kind == "packed" else (2, 333)
    shapes = [(*rows, heads, head_dim) for heads in (4, 2, 2, 4, 2, 2, 4)]
    drawn = [torch.randn(shape, device="cuda") for shape in shapes]
    return [(t if kind == "packed" else t.transpose(1, 2)).to(dtype) for t in drawn]


def derivatives(kind: str, drawn: list[Tensor], backend: str, **flags: Any) -> dict[str, Tensor]:
    """Results, tangents (by jvp), and the double backward, which gives tangents too."""
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if kind == "packed":
            longest = max(LENGTHS)
            return tw.attention_varlen(
                q, k, v, bounds, bounds, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True, backend=backend,
                **flags,
            )  # fmt: skip
        return tw.attention(q, k, v, return_lse=True, backend=backend, **flags)

    primals, tangents, dout = tuple(drawn[:3]), tuple(drawn[3:6]), drawn[6]
    pushed: Any = torch.func.jvp(attend, primals, tangents)
    (out, lse), (dot_out, dot_lse) = pushed
    leaves = [t.detach().clone().requires_grad_() for t in (*primals, dout)]
    first = torch.autograd.grad(attend(*leaves[:3])[0], leaves[:3], leaves[3], create_graph=True)
    dq, dk, dv, ddout = torch.autograd.grad(first, leaves, tangents)
    found = {"out": out, "lse": lse, "dot_out": dot_out, "dot_lse": dot_lse}
    return found | {"dq": dq, "dk": dk, "dv": dv, "ddout": ddout}


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (128, BF16), (128, torch.float16), (96, BF16), (256, BF16), (64, torch.float32)]
)
@pytest.mark.parametrize(
    "flags", [{}, {"causal": True}, {"window": (50, 20), "softcap": 5.0}], ids=["full", "causal", "capped_window"]
)
def test_agrees_with_the_reference(kind: str, head_dim: int, dtype: torch.dtype, flags: dict[str, Any]) -> None:
    drawn = draw(kind, head_dim, dtype)
    wide = [t.double() for t in drawn]
    if kind == "packed":  # rows that belong to no sequence must not be read
        for tensor in drawn[:6]:
            tensor[sum(LENGTHS) :] = torch.nan
    with uninitialised_is_nan():
        found = derivatives(kind, drawn, "triton", **flags)
    wanted = derivatives(kind, wide, "reference", **flags)
    for name, got in found.items():
        want = wanted[name].double()
        assert torch.equal(got.isfinite(), want.isfinite()), name  # lse of rows of no sequence is -inf
        seen = want.isfinite()
        rms = want[seen].square().mean().sqrt()
        error = (got.double()[seen] - want[seen]).square().mean().sqrt()
        assert error <= TOLERANCES[dtype] * rms, (name, float(error / rms))


def test_second_derivatives_give_the_same_bits() -> None:
    drawn = draw("dense", 128, BF16)
    first = derivatives("dense", drawn, "triton", causal=True)
    for _ in range(50):
        again = derivatives("dense", drawn, "triton", causal=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_memory_is_linear_in_sequence_length() -> None:
    heads, length, dim = 8, 32768, 128
    q, k, v, *tangents = (torch.randn(1, heads, length, dim, device="cuda", dtype=BF16) for _ in range(6))
    tensor = q.numel() * q.element_size()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.func.jvp(lambda *t: tw.attention(*t, causal=True), (q, k, v), tuple(tangents))
    assert torch.cuda.max_memory_allocated() - before < 4 * tensor  # out and its tangent
    leaves = [t.requires_grad_() for t in (q, k, v)]
    first = torch.autograd.grad(tw.attention(*leaves, causal=True).square().sum(), leaves, create_graph=True)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(first, leaves, tangents)
    assert torch.cuda.max_memory_allocated() - before < 24 * tensor
