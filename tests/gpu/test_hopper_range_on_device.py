"""Gradients at the ends of the range, on a Hopper GPU: the deterministic dQ against the ordinary one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import extreme_inputs as extreme
from extreme_inputs import Inputs, Shape, check, made
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.hopper

# Two configurations that are timed; every one rounds and marks rows in the same two ways.
CASES = {"d64 causal": (Shape((2, 2), (1024, 1024), 64), True), "d128 full": (Shape((2, 2), (1024, 1024), 128), False)}


def problem_of(
    shape: Shape, causal: bool, dtype: torch.dtype, window: tuple[int | None, int | None] = (None, None)
) -> AttentionProblem:
    return AttentionProblem(
        kind="dense", dtype=dtype, batch=1, seqlen_q=shape.seqlens[0], seqlen_k=shape.seqlens[1],
        total_q=shape.seqlens[0], total_k=shape.seqlens[1], num_heads=shape.heads[0], num_kv_heads=shape.heads[1],
        head_dim=shape.head_dim, head_dim_v=shape.head_dim, scale=shape.head_dim**-0.5, causal=causal, needs_grad=True,
        window_left=window[0], window_right=window[1],
    )  # fmt: skip


def both_ways(name: str, kind: Callable[[Inputs], None], dtype: torch.dtype) -> tuple[Tensor, Tensor, Inputs, float]:
    """DQ in any order and in integers, and what they were made of."""
    from tilewise.backends.hopper import BACKEND

    shape, causal = CASES[name]
    x = made(shape, dtype, "cuda")
    kind(x)
    problem, operands = problem_of(shape, causal, dtype), Operands(x.q, x.k, x.v)
    out, lse = BACKEND.forward(problem, operands)
    found = []
    for deterministic in (False, True):
        asked = replace(problem, deterministic=deterministic)
        found.append(BACKEND.backward(asked, operands, out, lse, x.dout, x.dlse, Wanted()).dq)
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1], x, problem.scale


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", extreme.KINDS, ids=lambda f: f.__name__)
def test_integers_have_the_range_of_floats(kind: Callable[[Inputs], None], name: str) -> None:
    check(*both_ways(name, kind, torch.bfloat16))


@pytest.mark.parametrize("name", CASES)
def test_infinities_of_fp16_are_seen(name: str) -> None:
    ordinary, integers, x, scale = both_ways(name, extreme.half_overflow, torch.float16)
    assert not bool(ordinary.isfinite().all())
    assert bool(ordinary.isfinite().any())
    check(ordinary, integers, x, scale)


@pytest.mark.parametrize("name", CASES)
def test_a_large_key_costs_bits_and_nothing_else(name: str) -> None:
    ordinary, integers, x, scale = both_ways(name, extreme.large_key, torch.bfloat16)
    check(ordinary, integers, x, scale, extreme.small_scores(x, scale))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [extreme.lost_key, extreme.lost_value], ids=lambda f: f.__name__)
def test_lost_keys_are_lost_for_the_rows_that_meet_them(kind: Callable[[Inputs], None], name: str) -> None:
    """Under a causal mask the first query tiles do not; nor does the other head."""
    ordinary, integers, x, scale = both_ways(name, kind, torch.bfloat16)
    assert bool(ordinary[:, 0, :128].isfinite().all()) == CASES[name][1]
    check(ordinary, integers, x, scale)


@pytest.mark.parametrize("size", [math.nan, -math.inf, 1e8])
@pytest.mark.parametrize(
    ("head_dim", "window", "key"), [(64, (200, 0), 5), (128, (100, 30), 5), (64, (300, None), 500), (128, (64, 0), 700)]
)
def test_keys_that_a_tile_does_not_meet_take_nothing_from_it(
    head_dim: int, window: tuple[int | None, int | None], key: int, size: float
) -> None:
    """Behind a left edge, and before the right one: not a bit."""
    from tilewise.backends.hopper import BACKEND

    shape = Shape((2, 1), (1024, 1024), head_dim)
    problem = replace(problem_of(shape, False, torch.bfloat16, window), deterministic=True)
    x = made(shape, torch.bfloat16, "cuda")
    whole = Operands(x.q, x.k, x.v)
    out, lse = BACKEND.forward(problem, whole)
    spoilt = whole._replace(k=x.k.clone(), v=x.v.clone())
    spoilt.k[:, 0, key, 3] = spoilt.v[:, 0, key, 3] = size
    wanted = Wanted(True, False, False)
    first, second = (BACKEND.backward(problem, o, out, lse, x.dout, None, wanted).dq for o in (whole, spoilt))
    assert first is not None
    assert second is not None
    kept = extreme.unmet_rows(problem, *shape.seqlens, key)
    assert bool(kept.any())
    assert bool(first.isfinite().all())
    assert torch.equal(first[:, :, kept], second[:, :, kept])
