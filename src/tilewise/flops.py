"""FLOP formulas of the ops for `torch.utils.flop_counter`. As for torch's own attention, every (query, key) pair
counts, even if causal, window or mask hide it, and a backward counts five products where the forward counts two. Packed
and paged sequences count by their lengths, or by the longest where those are unknown (fake tensors).

The counter is not imported here, because it would load Triton. The formulas are registered once it observes a call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from tilewise import calls, validation
from tilewise.problem import AttentionProblem, Kind
from tilewise.schemas import OPERANDS, unpack
from tilewise.totals import lengths_of

COUNTER = "torch.utils.flop_counter"
# Arguments of a backward op before those of its forward: dout, dlse, out, lse, wanted. Tangent ops have out, lse and
# five tangents, twice ops dout, dlse, the results with their tangents, wanted and five tangents.
SAVED, ALONG, SAVED_TWICE = 5, 7, 12


def tell_counters() -> None:
    """Register the formulas if torch's counter is loaded, also with active counters that lack them: each copies the
    registry when it is made.
    """
    if COUNTER not in sys.modules:
        return
    formulas = _registered()
    for mode in _python_dispatch._get_current_dispatch_mode_stack():  # noqa: SLF001
        counter = getattr(mode, "counter", None)
        if isinstance(counter, sys.modules[COUNTER].FlopCounterMode):
            for op, formula in formulas.items():
                counter.flop_registry.setdefault(op, formula)


@functools.cache
def _registered() -> dict[Any, Callable[..., int]]:
    """The formula of each op, registered with torch's counter."""
    formulas: dict[Any, Callable[..., int]] = {}
    passes = {"": _forward, "_logits": _forward, "_out": _forward_out, "_backward": _backward}
    passes |= {"_tangent": _tangent, "_twice": _twice}
    for kind in OPERANDS:
        for suffix, formula in passes.items():
            formulas[getattr(torch.ops.tilewise, kind + suffix)] = functools.partial(formula, kind)
    for op, formula in formulas.items():
        sys.modules[COUNTER].register_flop_formula(op, get_raw=True)(formula)
    return formulas


def _forward(kind: Kind, *args: Any, out_val: Any = None) -> int:
    """S = Q K^T and O = P V."""
    del out_val
    problem, pairs = _sizes(kind, args)
    return 2 * pairs * problem.num_heads * (problem.head_dim + problem.head_dim_v)


def _forward_out(kind: Kind, *args: Any, out_val: Any = None) -> int:
    """The same; the last argument is the memory of the result."""
    return _forward(kind, *args[:-1], out_val=out_val)


def _backward(kind: Kind, *args: Any, out_val: Any = None) -> int:
    """S again, dQ and dK; dP and dV."""
    del out_val
    problem, pairs = _sizes(kind, args[SAVED:])
    return 2 * pairs * problem.num_heads * (3 * problem.head_dim + 2 * problem.head_dim_v)


def _tangent(kind: Kind, *args: Any, out_val: Any = None) -> int:
    """S and O, unless it is known, Q' K^T, Q K'^T, P V' and (P S') V."""
    del out_val
    problem, pairs = _sizes(kind, args[ALONG:])
    of_values = 3 if args[0] is None else 2
    return 2 * pairs * problem.num_heads * (3 * problem.head_dim + of_values * problem.head_dim_v)


def _twice(kind: Kind, *args: Any, out_val: Any = None) -> int:
    """S and S' again, two products for each of dQ and dK; dO V^T, dO V'^T and dV."""
    del out_val
    problem, pairs = _sizes(kind, args[SAVED_TWICE:])
    return 2 * pairs * problem.num_heads * (7 * problem.head_dim + 3 * problem.head_dim_v)


def _sizes(kind: Kind, args: tuple[Any, ...]) -> tuple[AttentionProblem, int]:
    """The problem, and the number of (query, key) pairs of all sequences."""
    operands, flags = unpack(kind, args)
    problem = validation.describe(kind, operands, flags)
    queries = _lengths(operands.cu_seqlens_q, None, problem.seqlen_q, problem.batch)
    keys = _lengths(operands.cu_seqlens_k, operands.seqlens_k, problem.seqlen_k, problem.batch)
    return problem, sum(q * k for q, k in zip(queries, keys, strict=True))


def _lengths(cu_seqlens: Tensor | None, lengths: Tensor | None, longest: int, batch: int) -> list[int]:
    """The lengths, from running totals or as they are; all `longest` where there are none, or none with data."""
    for given, made in ((lengths, list), (cu_seqlens, lengths_of)):
        if given is not None and calls.are_plain((given,)):
            return made(given.tolist())
    return [longest] * batch
