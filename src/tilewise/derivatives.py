"""Derivatives of attention that are not computed, refused in one place: second ones, and those along a direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import Unsupported

__all__ = ["refuse_forward_mode", "refuse_second", "refuse_tangents"]


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
