"""Inputs of a backward at the ends of the range of 16-bit floats; its dQ in integers is judged by that in floats.

Row by row: where the ordinary dQ is finite, the deterministic one is and agrees; where it is not, neither is the other;
rows that are as usual do not see what is beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import AttentionProblem

# Of the largest element of a row: roundings to bf16, which the two ways share, and the last bit of dQ.
AGREEMENT = 2.0**-7
TINY = 2.0**-126


class Shape(NamedTuple):
    """Sizes of the operands, batch 1."""

    heads: tuple[int, int]
    seqlens: tuple[int, int]
    head_dim: int


@dataclass
class Inputs:
    """What a backward gets; out and lse are computed from it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def plain(_: Inputs) -> None:
    """As they are."""


def small_dout(x: Inputs) -> None:
    x.dout *= 1e-30
    x.dlse *= 0


def smaller_rows(x: Inputs) -> None:
    """Every row of another size, down to nothing."""
    x.dout *= torch.exp2(-torch.arange(x.dout.shape[2]).remainder(140).double())[:, None].to(x.dout)
    x.dlse *= 0


def larger_rows(x: Inputs) -> None:
    """Every row of another size, up to where a dS could pass the end of bf16."""
    x.dout *= torch.exp2(torch.arange(x.dout.shape[2]).remainder(115).double())[:, None].to(x.dout)


def large_dout(x: Inputs) -> None:
    x.dout *= 1e30


def long_rows(x: Inputs) -> None:
    """Lengths whose squares are no fp32 numbers."""
    x.dout *= 1e20
    x.v *= 1e-20


def large_values(x: Inputs) -> None:
    x.v *= 1e30


def small_values(x: Inputs) -> None:
    x.v *= 1e-30
    x.dlse *= 0


def opposite_sizes(x: Inputs) -> None:
    x.dout *= 1e-36
    x.v *= 1e36
    x.dlse *= 0


def small_keys(x: Inputs) -> None:
    x.k *= 1e-30


def nothing(x: Inputs) -> None:
    x.dout *= 0
    x.dlse *= 0


def no_keys(x: Inputs) -> None:
    x.k *= 0


def lse_alone(x: Inputs) -> None:
    """The bound is reached: all keys are one."""
    x.dout *= 0
    x.k[:] = x.k[:, :, :1]


def large_dlse(x: Inputs) -> None:
    x.dlse *= 1e30


def large_scores(x: Inputs) -> None:
    """Up to 4e6 nats: rounded in fp32, P sums to more than 1, and the keys of a row are of one sign."""
    x.dout *= 0
    x.k.abs_()
    x.q[:] = x.q.abs() * torch.linspace(1e4, 6e5, x.q.shape[2])[:, None].to(x.q)


def lost_gradient(x: Inputs) -> None:
    x.dout[:, :, 3, 5] = math.nan
    x.dout[:, :, 67, 5] = math.inf
    x.dlse[:, :, 9] = math.inf
    x.dlse[:, :, 10] = math.nan


def lost_query(x: Inputs) -> None:
    x.q[:, :, 3, 5] = math.nan
    x.q[:, :, 67, 5] = math.inf
    x.q[:, :, 68, 5] = -math.inf


def overflow(x: Inputs) -> None:
    """DS of some rows passes the end of bf16, for many keys; their delta does not, nor would their dQ."""
    x.dout[:, :, 1::7] *= 1e37
    x.v *= 20
    x.k *= 1e-10


def large_key(x: Inputs) -> None:
    """One key is 1e20 times as long as the others: queries that do not see it have its bound all the same."""
    x.k[:, :1, 100] *= 1e20


def lost_key(x: Inputs) -> None:
    """Of the first head; what hides it makes 0 of its P, and NaN of that in one column."""
    x.k[:, :1, 200, 13] = math.nan


def lost_value(x: Inputs) -> None:
    """Of the first head."""
    x.v[:, :1, 210, 13] = math.inf


def half_overflow(x: Inputs) -> None:
    """DS of some rows passes 65504, and their dQ, whose keys are small, would not."""
    x.dout[:, :, 1::5] *= 15000.0
    x.v *= 5000.0
    x.k *= 1e-3


KINDS: tuple[Callable[[Inputs], None], ...] = (
    plain, small_dout, smaller_rows, larger_rows, large_dout, long_rows, large_values, small_values, opposite_sizes,
    small_keys, nothing, no_keys, lse_alone, large_dlse, large_scores, lost_gradient, lost_query, overflow,
)  # fmt: skip


def made(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """N(0, 1), the same on every device."""
    generator = torch.Generator().manual_seed(3)

    def rows(heads: int, seqlen: int) -> Tensor:
        return torch.randn(1, heads, seqlen, shape.head_dim, generator=generator).to(device, dtype)

    (heads, kv_heads), (seqlen_q, seqlen_k) = shape.heads, shape.seqlens
    dlse = torch.randn(1, heads, seqlen_q, generator=generator).to(device)
    return Inputs(
        rows(heads, seqlen_q), rows(kv_heads, seqlen_k), rows(kv_heads, seqlen_k), rows(heads, seqlen_q), dlse
    )


def lost_rows(ordinary: Tensor, integers: Tensor) -> Tensor:
    """Which rows of the ordinary dQ are not finite: none of them may be in integers."""
    lost = ~ordinary.isfinite().all(-1)
    assert not bool(integers[lost].isfinite().all(-1).any()), "a row is not finite, and finite in integers"
    return lost


def check(ordinary: Tensor, integers: Tensor, x: Inputs, scale: float, judged: Tensor | None = None) -> None:
    """The same range and the same values, up to 2^-26 of a row's bound, of which integers hold 2^-30.

    Rows that are not `judged` may be anything but finite where the ordinary ones are not.
    """
    kept = ~lost_rows(ordinary, integers)
    if judged is not None:
        kept &= judged
    assert bool(integers[kept].isfinite().all()), "a row is finite, and not in integers"
    finite = [t.double().nan_to_num(0, 0, 0) for t in (x.dout, x.v, x.dlse, x.k)]
    bound = finite[0].norm(dim=-1) * finite[1].norm(dim=-1).max() * 2 + finite[2].abs()
    bound = (bound * finite[3].abs().max() * scale)[kept][:, None]
    ordinary, integers = ordinary[kept].double(), integers[kept].double()
    allowed = AGREEMENT * ordinary.abs().amax(-1, keepdim=True) + 2.0**-26 * bound + TINY
    assert bool(((integers - ordinary).abs() <= allowed).all())


def small_scores(x: Inputs, scale: float) -> Tensor:
    """With `large_key`: rows that it does not take. P of the others is what rounding makes of it, 0 or infinite."""
    return (x.q.double() * x.k[:, :1, 100:101].double()).sum(-1) * scale < 0


def unmet_rows(problem: AttentionProblem, seqlen_q: int, seqlen_k: int, key: int) -> Tensor:
    """Rows of a sequence whose query tile sees no key of the block of 128 that `key` is in."""
    left, right = problem.band
    own = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    keys = torch.arange(key // 128 * 128, min(key // 128 * 128 + 128, seqlen_k))
    seen = torch.ones(seqlen_q, len(keys), dtype=torch.bool)
    if left is not None:
        seen &= keys >= own - left
    if right is not None:
        seen &= keys <= own + right
    block = 128 if problem.head_dim <= 64 else 64
    return torch.cat([(~tile.any()).expand(len(tile)) for tile in seen.split(block)])
