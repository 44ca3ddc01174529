"""Memory of the CPU kernels follows the sequences, not the bounds that a caller gives for their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.testing.threads import one_thread

LOOSE = 2**31 - 1
CUTS = torch.tensor([0, 5, 5, 74], dtype=torch.int32)


def gradients(flags: dict[str, Any]) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(74, 2, 32, generator=make).requires_grad_() for _ in range(3))
    out, lse = tw.attention_varlen(q, k, v, CUTS, CUTS, **flags)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))]


@pytest.mark.parametrize("flags", [{}, {"causal": True, "alibi_slopes": torch.ones(2)}], ids=["full", "alibi"])
@pytest.mark.parametrize("bounds", ["max_seqlen_k", "max_seqlen_q"])
@pytest.mark.parametrize("threads", [1, 5])
def test_a_loose_bound_asks_for_no_memory(threads: int, bounds: str, flags: dict[str, Any]) -> None:
    """dk and dv of 2^31 - 1 keys would take 550 GB a thread; 5 threads run two passes, 1 thread runs one."""
    flags = flags | {"return_lse": True, "backend": "cpu"}
    expected = gradients(flags)
    with one_thread():
        torch.set_num_threads(threads)
        found = gradients(flags | {bounds: LOOSE})
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
