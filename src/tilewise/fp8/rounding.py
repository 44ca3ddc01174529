"""Scales, and rounding by them: to e4m3 (amax / 448) and int8 (amax / 127), to the nearest number, and of rotated rows
so that their largest channel keeps its value.

Rotation spreads a row's outlier over all channels, and their rounding errors add up again to an error of the outlier.
That is the channel in which products with other outliers are large, so its error matters most. Of the two codes around
a value the farther one may be taken if that restores the outlier:

    y      = the rotated row times 448 / amax
    j      = the channel of the row before rotation that is largest, by the upper 14 bits of its magnitude's fp32
             number; of equal ones the first
    d      = the rotated direction of channel j as +1, -1 or, outside j's part, 0
    error  = e4m3(y) - y, in multiples of 2^-11 (so that sums are exact, whatever their order)
    t      = sum(error * d) / size of j's part
    data   = e4m3(y - t * d) where that is within 1/16 of y, else e4m3(y); NaN in rows that are not finite

Values stay within the 1/16 that nearest rounding promises, and t changes only a few codes per row. The effect on
accuracy is in bench/results/fp8-accuracy.csv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import E4M3, E4M3_MAX, INT8_MAX
from tilewise.fp8.rotation import directions, part_sizes

# Low bits of a magnitude that are replaced by the channel number (rows are up to 512 wide).
INDEX_BITS = 9
# Adding and subtracting it rounds errors, which are at most 16, to multiples of 2^-11.
GRID = 1.5 * 2.0**12
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


def encode(x: Tensor, inverse: Tensor) -> Tensor:
    """e4m3 of fp32 values times `inverse`: to nearest, saturated, NaN where not finite."""
    scaled = (x * inverse).clamp(-E4M3_MAX, E4M3_MAX)
    # Explicit, because torch releases differ in how they cast infinities.
    return torch.where(torch.isfinite(x), scaled, torch.nan).to(E4M3)


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale (...)) of the last dimension in int8, each row by its own scale:

        scale = amax / 127                              fp32, of the row's largest magnitude, at least 2^-96
        codes = round(x * (127 / amax))                 fp32 products, ties to even

    int8 has no NaN: a row with a NaN or infinity has the scale NaN and codes 0, so all of it reads as NaN.
    """
    x = x.float()
    amax = x.abs().amax(-1)
    is_finite = torch.isfinite(amax)
    amax = torch.where(is_finite, amax, 0.0)
    codes = (x * inverse_of(amax, INT8_MAX)[..., None]).round().clamp(-INT8_MAX, INT8_MAX)
    scale = torch.where(is_finite, scale_of(amax, INT8_MAX), torch.nan)
    return torch.where(is_finite[..., None], codes, 0.0).to(torch.int8), scale


def encode_rotated(x: Tensor, rotated: Tensor, inverse: Tensor) -> Tensor:
    """e4m3 of `rotated` times `inverse`, where `rotated` is the rotation of the rows of x: see the module docstring."""
    y = (rotated * inverse).clamp(-E4M3_MAX, E4M3_MAX)
    largest = _largest_channel(x.float())
    direction = directions(x.shape[-1], x.device)[largest].float()
    error = (y.to(E4M3).float() - y + GRID) - GRID
    moved = (error * direction).sum(-1, keepdim=True) / part_sizes(x.shape[-1], x.device)[largest][..., None]
    shifted = y - moved * direction
    is_far = (shifted.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() - y).abs() > y.abs() * (1 / 16)
    chosen = torch.where(is_far, y, shifted.clamp(-E4M3_MAX, E4M3_MAX))
    return torch.where(torch.isfinite(rotated).all(-1, keepdim=True), chosen, torch.nan).to(E4M3)


def _largest_channel(x: Tensor) -> Tensor:
    last = (1 << INDEX_BITS) - 1
    magnitude = x.contiguous().view(torch.int32) & (0x7FFFFFFF - last)
    channel = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    return last - ((magnitude | (last - channel)).amax(-1) & last)
