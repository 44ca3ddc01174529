"""Rotary position embedding: pairs of features rotated by an angle that grows with the position."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.subclasses import check_class
from tilewise.units import counted


def rotary_table(
    seqlen: int, rotary_dim: int, *, start: int = 0, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """fp32 (cos, sin), (seqlen, rotary_dim / 2): pair p is turned by position * base^(-2p / rotary_dim)."""
    check_rotary(rotary_dim, base)
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(start, start + seqlen, dtype=torch.float32, device=device)
    angles = positions[:, None] * base ** (-pairs / rotary_dim)
    return angles.cos(), angles.sin()


def check_rotary(rotary_dim: int, base: object, names: tuple[str, str] = ("rotary_dim", "base")) -> None:
    """Raise for sizes that no table can have; `names` are those of the caller's arguments."""
    if rotary_dim < 2 or rotary_dim % 2:
        raise InvalidProblem(names[0], "an even number >= 2", rotary_dim, "Features are turned in pairs.")
    if isinstance(base, bool) or not (isinstance(base, int | float | np.number) and base > 0):
        raise InvalidProblem(names[1], "a number above 0", base, "10000.0 is the usual one.")


def check_tables(cos: object, sin: object, names: tuple[str, str] = ("cos", "sin"), *, dims: int | None = 2) -> None:
    """Raise unless these are two tables of one shape on one device: a single column would be broadcast."""
    for name, table in zip(names, (cos, sin), strict=True):
        if not (isinstance(table, Tensor) and table.is_floating_point() and table.dim() == (dims or table.dim() or 1)):
            got = f"{table.dtype} of shape {tuple(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
            expected = "a floating-point tensor (seqlen, rotary_dim / 2)" if dims else "a floating-point tensor"
            raise InvalidProblem(name, expected, got, "See rotary_table.")
        check_class(name, table)
    assert isinstance(cos, Tensor)
    assert isinstance(sin, Tensor)
    if cos.shape != sin.shape or cos.device != sin.device:
        expected = f"shape {tuple(cos.shape)} on {cos.device} as {names[0]} has"
        fix = "Make both from the same angles: see rotary_table."
        raise InvalidProblem(names[1], expected, f"{tuple(sin.shape)} on {sin.device}", fix)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first rotary_dim features of x (..., heads, dim); cos, sin (..., rotary_dim / 2), one row per token.

    `interleaved` pairs features 0 and 1, 2 and 3, ...; otherwise feature p goes with p + rotary_dim / 2. Computed in
    fp32 (fp64 for fp64) for every dtype of x. Rejects a rotary_dim above dim, and tables of unequal shapes.
    """
    check_tables(cos, sin, dims=None)
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        fix = "cos and sin have half as many columns as there are features to turn."
        raise InvalidProblem("cos", f"at most {counted(x.shape[-1] // 2, 'column')}", cos.shape[-1], fix)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    turning = x[..., :rotary_dim].to(wide)
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), -1)
