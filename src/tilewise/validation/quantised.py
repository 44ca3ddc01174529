"""Validates FP8 containers and unpacks them into data, scales and scale layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.fp8.container import Fp8Tensor
from tilewise.operands import Operands

# Padding up to the scales.
_NONES = (None,) * Operands._fields.index("q_scale")
# q, k and v as tensors.
Data = tuple[Tensor, Tensor, Tensor]


# The scales as operands, and their blocks and the result's dtype as flags.
Scales = tuple[dict[str, Any], dict[str, Any]]


def unwrapped(q: Any, k: Any, v: Any, *layouts: str) -> tuple[Data, Scales]:
    """((q, k, v), scales) with containers replaced by their data. `layouts` are the layouts the call reads: q's, then
    k's and v's.

    Refuses combinations that would mix scales or bases: k without v, q without k, another layout, q and k not rotated
    alike.
    """
    if isinstance(k, Tensor) and isinstance(q, Tensor) and isinstance(v, Tensor):
        return (q, k, v), ({}, {})
    containers = {name: t for name, t in (("q", q), ("k", k), ("v", v)) if isinstance(t, Fp8Tensor)}
    if not containers:
        return (q, k, v), ({}, {})
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
    operands = {f"{name}_scale": tensor.scale for name, tensor in containers.items()}
    flags: dict[str, Any] = {f"{name}_block": tensor.block for name, tensor in containers.items()}
    if isinstance(q, Fp8Tensor):
        return (q.data, k.data, v.data), (operands, flags | {"out_dtype": q.dtype})
    return (q, k.data, v.data), (operands, flags)


def split_scales(given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
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


def _check_basis(q: Any, k: Fp8Tensor, v: Fp8Tensor) -> None:
    q_rotated = isinstance(q, Fp8Tensor) and q.rotated
    if q_rotated != k.rotated:
        got = "a rotated q and a k that is not" if q_rotated else "a rotated k and a q that is not"
        fix = "Their products are q.k only in one basis: quantise both with rotation=True, or neither."
        raise InvalidProblem("q, k", "the same rotation", got, fix)
    if v.rotated:
        raise InvalidProblem("v", "no rotation", "rotated values", "The rotation is for q and k; quantise v without.")
