"""Runs a call and its gradients: the results of every implementation."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.testing.cases import GRADIENTS, Case
from tilewise.testing.inputs import Inputs

# "out", "lse" and the gradients asked for, by name, in the shapes of the public API.
Results = dict[str, Tensor]
Attend = Callable[[Inputs], tuple[Tensor, Tensor]]


def dropout_seed(case: Case) -> int:
    """The seed of a case's dropout: 64 bits, so that both halves of Philox's key matter."""
    low = zlib.crc32(repr(case.seed).encode())
    return (low << 32 | 0x9E3779B9) - (1 << 63)


def differentiate(case: Case, inputs: Inputs, attend: Attend) -> Results:
    """Call `attend` on leaves that require the case's gradients, and pull the case's cotangents back through it.

    The gradient of an operand that the results do not depend on is zero.
    """
    wanted = case.wants_grad
    if not wanted:
        with torch.no_grad():
            out, lse = attend(inputs)
        return {"out": out, "lse": lse}
    leaves = inputs.map(lambda name, t: t.detach().requires_grad_(name in wanted))
    out, lse = attend(leaves)
    cotangents = {"out": (out, inputs.dout.to(out.dtype)), "lse": (lse, inputs.dlse.to(lse.dtype))}
    pulled = [cotangents[name] for name in case.cotangents if cotangents[name][0].requires_grad]
    sources = [getattr(leaves, name) for name in wanted]
    gradients = torch.autograd.grad(
        [result for result, _ in pulled],
        sources,
        [cotangent for _, cotangent in pulled],
        allow_unused=True,
        materialize_grads=True,
    )
    named = zip((GRADIENTS[name] for name in wanted), gradients, strict=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(named)}
