"""Refuses what attention does not support: second derivatives, forward-mode derivatives, and torch.jit.trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import Unsupported

__all__ = ["refuse_forward_mode", "refuse_second", "refuse_tangents", "refuse_tracing"]


def refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    """Raise if torch asks for a forward-mode derivative (torch.func.jvp, dual tensors).

    An op with reverse-mode derivatives only would drop the tangent, and the result would look constant.
    """
    active = forward_ad._current_level >= 0  # noqa: SLF001
    if active and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        refuse_forward_mode()


def refuse_forward_mode(ctx: Any = None, *_: Any) -> None:
    """Always raises."""
    del ctx
    raise Unsupported("forward-mode derivatives (jvp) of attention are not computed; take vjp or backward() instead")


def refuse_second(ctx: Any, *_: Any) -> None:
    """Always raises."""
    del ctx
    raise Unsupported("second derivatives of attention are not computed; take them of a formula in plain torch instead")


def refuse_tracing() -> None:
    """Raise while torch.jit.trace (or an exporter based on it) records: it would bake the result, or this call's flags
    and lengths, into the graph as constants.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():  # noqa: SLF001
        raise Unsupported(
            "torch.jit.trace cannot record attention: the kernels are not operators of TorchScript. Use torch.compile, "
            "or torch.export (torch.onnx.export(..., dynamo=True) is made of it)"
        )
