"""What cannot be made of attention, refused in one place: second derivatives, those along a direction, and graphs of
torch.jit.trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import Unsupported

__all__ = ["refuse_forward_mode", "refuse_second", "refuse_tangents", "refuse_tracing"]


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise if torch is asked for the derivative along a tensor's tangent (torch.func.jvp, dual tensors).

    An op that has reverse derivatives alone would drop it and return results that look constant.
    """
    active = forward_ad._current_level >= 0  # noqa: SLF001
    if active and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        refuse_forward_mode()


def refuse_forward_mode(ctx: Any = None, *_: Any) -> None:
    """Raise, whatever there is."""
    del ctx
    raise Unsupported("forward-mode derivatives (jvp) of attention are not computed; take vjp or backward() instead")


def refuse_second(ctx: Any, *_: Any) -> None:
    """Raise, whatever there is."""
    del ctx
    raise Unsupported("second derivatives of attention are not computed; take them of a formula in plain torch instead")


def refuse_tracing() -> None:
    """Raise while torch.jit.trace records (and the exporters that are made of it): it would keep the result as a
    constant, or flags and lengths of this call for all later ones.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():  # noqa: SLF001
        raise Unsupported(
            "torch.jit.trace cannot record attention: the kernels are not operators of TorchScript. Use torch.compile, "
            "or torch.export (torch.onnx.export(..., dynamo=True) is made of it)"
        )
