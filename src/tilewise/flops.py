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
# By the end of an op's name: its arguments before those of the forward, and how many of its products have the width of
# K and how many that of V.
PASSES = {
    "": (0, 1, 1),  # S = Q K^T; O = P V
    "_logits": (0, 1, 1),
    "_out": (0, 1, 1),
    "_backward": (5, 3, 2),  # S again, dQ and dK; dP and dV
    "_tangent": (7, 3, 3),  # S, Q' K^T and Q K'^T; P V' and (P S') V, and O unless it is known
    "_twice": (12, 7, 3),  # S and S' again, two products for each of dQ and dK; dO V^T, dO V'^T and dV
}


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
    formulas: dict[Any, Callable[..., int]] = {
        getattr(torch.ops.tilewise, kind + suffix): functools.partial(_products, kind, suffix)
        for kind in OPERANDS
        for suffix in PASSES
    }
    for op, formula in formulas.items():
        sys.modules[COUNTER].register_flop_formula(op, get_raw=True)(formula)
    return formulas


def _products(kind: Kind, suffix: str, *args: Any, out_val: Any = None) -> int:
    del out_val
    first, of_keys, of_values = PASSES[suffix]
    # The last argument of an out op is the memory of the result.
    problem, pairs = _sizes(kind, args[first:-1] if suffix == "_out" else args[first:])
    of_values -= suffix == "_tangent" and args[0] is not None
    return 2 * pairs * problem.num_heads * (of_keys * problem.head_dim + of_values * problem.head_dim_v)


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
