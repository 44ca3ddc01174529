"""Validates FP8 containers and unpacks them into data, scales and scale layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import Fp8Tensor
from tilewise.operands import Flags, Operands

__all__ = ["Quantised", "taken_apart", "unwrapped", "with_scales"]


# Padding up to the scales.
_NONES = (None,) * Operands._fields.index("q_scale")
# q, k and v as tensors.
Data = tuple[Tensor, Tensor, Tensor]


class Quantised(NamedTuple):
    """What a call with FP8 operands has in addition to the data."""

    q_scale: Tensor | None
    k_scale: Tensor
    v_scale: Tensor
    q_block: int | None
    k_block: int | None
    v_block: int | None
    out_dtype: torch.dtype | None


def unwrapped(q: Any, k: Any, v: Any, *layouts: str) -> tuple[Data, Quantised | None]:
    """((q, k, v), scales) with containers replaced by their data. `layouts` are the layouts the call reads: q's, then
    k's and v's.

    Refuses combinations that would mix scales or bases: k without v, q without k, another layout, q and k not rotated
    alike.
    """
    if isinstance(k, Tensor) and isinstance(q, Tensor) and isinstance(v, Tensor):
        return (q, k, v), None
    containers = {name: t for name, t in (("q", q), ("k", k), ("v", v)) if isinstance(t, Fp8Tensor)}
    if not containers:
        return (q, k, v), None
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Fp8Tensor):
            expected = f"an Fp8Tensor as {next(iter(containers))} is"
            raise InvalidProblem(name, expected, type(tensor).__name__, "Quantise k and v, or neither of them.")
    for name, tensor in containers.items():
        layout = layouts[0 if name == "q" else -1]
        if tensor.layout != layout:
            fix = "Quantise it in the layout that the call reads."
            raise InvalidProblem(name, f"data in layout {layout!r}", repr(tensor.layout), fix)
    _check_basis(q, k, v)
    q_parts = (q.scale, q.block, q.dtype) if isinstance(q, Fp8Tensor) else (None, None, None)
    scales = Quantised(q_parts[0], k.scale, v.scale, q_parts[1], k.block, v.block, q_parts[2])
    return (q.data if isinstance(q, Fp8Tensor) else q, k.data, v.data), scales


def taken_apart(given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(operands with scales, other container fields) of operands in order, where q, k, v may be containers.

    Nothing is validated: the result is the signature of calls with containers.
    """
    q, k, v = given[:3]
    others, between = given[3:], _NONES[len(given) :]
    if q.__class__ is k.__class__ is v.__class__ is Fp8Tensor:
        scales = (q.scale, k.scale, v.scale)
        return (q.data, k.data, v.data, *others, *between, *scales), (q.about, k.about, v.about)
    q_data, q_scale, q_about = (q.data, q.scale, q.about) if q.__class__ is Fp8Tensor else (q, None, None)
    k_data, k_scale, k_about = (k.data, k.scale, k.about) if k.__class__ is Fp8Tensor else (k, None, None)
    v_data, v_scale, v_about = (v.data, v.scale, v.about) if v.__class__ is Fp8Tensor else (v, None, None)
    return (q_data, k_data, v_data, *others, *between, q_scale, k_scale, v_scale), (q_about, k_about, v_about)


def with_scales(operands: Operands, flags: Flags, scales: Quantised | None) -> tuple[Operands, Flags]:
    """The operands and flags with their scales filled in."""
    if scales is None:
        return operands, flags
    operands = operands._replace(q_scale=scales.q_scale, k_scale=scales.k_scale, v_scale=scales.v_scale)
    return operands, flags._replace(
        q_block=scales.q_block, k_block=scales.k_block, v_block=scales.v_block, out_dtype=scales.out_dtype
    )


def _check_basis(q: Any, k: Fp8Tensor, v: Fp8Tensor) -> None:
    q_rotated = isinstance(q, Fp8Tensor) and q.rotated
    if q_rotated != k.rotated:
        got = "a rotated q and a k that is not" if q_rotated else "a rotated k and a q that is not"
        fix = "Their products are q.k only in one basis: quantise both with rotation=True, or neither."
        raise InvalidProblem("q, k", "the same rotation", got, fix)
    if v.rotated:
        raise InvalidProblem("v", "no rotation", "rotated values", "The rotation is for q and k; quantise v without.")
