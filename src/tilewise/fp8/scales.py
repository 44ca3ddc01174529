"""Scales: amax / 448 for e4m3, amax / 127 for int8, and the shapes of given ones."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import E4M3_MAX

__all__ = ["AMAX_FLOOR", "broadcast_scale", "inverse_of", "scale_of"]

# Groups of smaller numbers use this amax: its inverse stays finite, and so does the ratio of any two scales.
AMAX_FLOOR = 2.0**-96


def scale_of(amax: Tensor, most: float = E4M3_MAX) -> Tensor:
    """The scale of groups with these largest magnitudes; `most` is the largest code."""
    amax = amax.clamp_min(AMAX_FLOOR)
    # Divide by a tensor: for a number, torch multiplies by its reciprocal on a GPU, which rounds twice.
    return amax / torch.full_like(amax, most)


def inverse_of(amax: Tensor, most: float = E4M3_MAX) -> Tensor:
    """The factor of values before rounding."""
    amax = amax.clamp_min(AMAX_FLOOR)
    return torch.full_like(amax, most) / amax


def broadcast_scale(given: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A given scale for every (batch entry, head, block)."""
    fits = given.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(given.shape), reversed(shape), strict=False)
    )
    if not fits:
        expected = f"a shape that broadcasts to (batch, heads, blocks) = {shape}"
        raise InvalidProblem("scale", expected, tuple(given.shape), "One for every (sequence, head, block), or 1.")
    return given.expand(shape)
