"""The deterministic dQ, summed in integers, against the ordinary one: the same range, and nothing lost unnoticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import extreme_inputs as extreme
from emulated_backend import Emulated
from extreme_inputs import Inputs, Shape, check, made
from gluon_emulator import MODE
from sampling import marks_of, sampled
from test_hopper_protocol import PACKED, Case, expected, in_double, reference
from tilewise.operands import Operands, Wanted

pytestmark = pytest.mark.slow

CASES = {
    "d64": Case(heads=(2, 2), seqlens=(200, 260), causal=True),
    "d128": Case(128, heads=(2, 1), seqlens=(130, 260)),
    "d96 capped": Case(96, heads=(1, 1), seqlens=(70, 200), softcap=20.0),
}


def inputs(case: Case, kind: Callable[[Inputs], None], dtype: torch.dtype = torch.bfloat16) -> Inputs:
    x = made(Shape(case.heads, case.seqlens, case.head_dim), dtype)
    kind(x)
    return x


def both_ways(case: Case, x: Inputs, emulated: Emulated, *, by_kernel: bool = False) -> tuple[Tensor, Tensor]:
    """DQ in any order, and in integers; with out and lse of the specification or, `by_kernel`, of our own forward.

    The specification multiplies hidden values by 0, where infinity becomes NaN.
    """
    MODE.late_loads = False
    problem = replace(case.problem, dtype=x.q.dtype)
    operands = Operands(x.q, x.k, x.v)
    if by_kernel:
        out, lse = emulated("launch").run_forward(problem, operands)
    else:
        out, lse = reference().forward(replace(problem, dtype=torch.float64), in_double(operands))
    run = emulated("launch").run_backward
    given = (operands, out.to(x.q.dtype), lse.float(), x.dout, x.dlse, Wanted())
    found = [run(replace(problem, deterministic=deterministic), *given).dq for deterministic in (False, True)]
    return found[0], found[1]


# In the ordinary run of wider heads, and under a softcap, those in which scores matter.
SCORES = (extreme.large_scores, extreme.lost_query, extreme.overflow)
ORDINARY = [("d64", kind) for kind in extreme.KINDS[::2]] + [
    ("d128", extreme.overflow),
    ("d96 capped", extreme.large_scores),
]
JUDGED = [(name, kind) for name in CASES for kind in extreme.KINDS if name != "d96 capped" or kind in SCORES]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, f, id=f"{n}, {f.__name__}", marks=() if (n, f) in ORDINARY else pytest.mark.exhaustive)
        for n, f in JUDGED
    ],
)
def test_integers_have_the_range_of_floats(name: str, kind: Callable[[Inputs], None], emulated: Emulated) -> None:
    case = CASES[name]
    x = inputs(case, kind)
    check(*both_ways(case, x, emulated), x, case.problem.scale)


@pytest.mark.parametrize("case", sampled(CASES, ("d128",)))
def test_infinities_of_fp16_are_seen(case: Case, emulated: Emulated) -> None:
    x = inputs(case, extreme.half_overflow, torch.float16)
    ordinary, integers = both_ways(case, x, emulated)
    assert not bool(ordinary.isfinite().all())
    assert bool(ordinary.isfinite().any())
    check(ordinary, integers, x, case.problem.scale)


@pytest.mark.parametrize("case", sampled(CASES, ("d64",)))
def test_a_large_key_costs_bits_and_nothing_else(case: Case, emulated: Emulated) -> None:
    x = inputs(case, extreme.large_key)
    scale = case.problem.scale
    check(*both_ways(case, x, emulated), x, scale, extreme.small_scores(x, scale))


@pytest.mark.parametrize(("head_dim", "kind"), [(64, extreme.lost_key), (128, extreme.lost_value)])
def test_lost_keys_are_lost_for_the_rows_that_meet_them(
    head_dim: int, kind: Callable[[Inputs], None], emulated: Emulated
) -> None:
    """Under a causal mask the first query tiles do not meet the second block of keys, nor does the other head."""
    case = Case(head_dim, heads=(2, 2), seqlens=(400, 400), causal=True)
    x = inputs(case, kind)
    ordinary, integers = both_ways(case, x, emulated, by_kernel=True)
    assert bool(ordinary[:, 0, :128].isfinite().all())
    assert not bool(ordinary[:, 0, 210:].isfinite().all(-1).any())
    check(ordinary, integers, x, case.problem.scale)


# A sequence and a key of it that some query tiles, or all, do not meet.
EDGES = {
    "d64 window": (Case(heads=(2, 1), seqlens=(300, 600), window=(100, 0)), 0, 3),
    "d128 window": (Case(128, seqlens=(300, 500), window=(70, 20)), 0, 300),
    "d64 left edge": (Case(heads=(1, 1), seqlens=(400, 400), window=(50, None)), 0, 140),
    "d64 causal": (Case(heads=(1, 1), seqlens=(400, 400), causal=True), 0, 300),
    "d128 more queries": (Case(128, heads=(1, 1), seqlens=(500, 200), causal=True), 0, 190),
    "d128, 33 blocks and a window": (Case(128, heads=(1, 1), seqlens=(130, 4200), window=(4000, 0)), 0, 60),
    "d64 packed window": (Case(lengths=PACKED, padding=3, window=(100, 0)), 3, 10),
    "d128 packed causal": (Case(128, lengths=PACKED, padding=3, causal=True), 3, 290),
}


# Of a long key all rows of the head know where there is no left edge.
UNMET = [(n, s) for n in EDGES for s in (math.nan, -math.inf, 1e8) if s != 1e8 or EDGES[n][0].window[0] is not None]


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(n, s, marks=marks_of((n, s) in UNMET[:: len(UNMET) // 4])) for n, s in UNMET]
)
def test_keys_that_a_tile_does_not_meet_take_nothing_from_it(name: str, size: float, emulated: Emulated) -> None:
    """Not a bit, and nothing of other sequences: behind a left edge 1e8 left dQ an error of 100 %, NaN made it NaN."""
    MODE.late_loads = False
    case, sequence, key = EDGES[name]
    problem, operands = replace(case.problem, deterministic=True), case.inputs()
    out, lse = expected(case, operands)
    given = (out.bfloat16(), lse.float(), torch.randn(out.shape).bfloat16(), None, Wanted(True, False, False))
    spoilt = operands._replace(k=operands.k.clone(), v=operands.v.clone())
    lengths = case.lengths or ((case.seqlens[0],), (case.seqlens[1],))
    first_q, first_k = (sum(n[:sequence]) for n in lengths)
    rows = slice(first_q, first_q + lengths[0][sequence])
    for tensor in (spoilt.k, spoilt.v):
        (tensor if case.lengths else tensor[0].transpose(0, 1))[first_k + key, 0, 5] = size
    run = emulated("launch").run_backward
    whole, found = (run(problem, x, *given).dq for x in (operands, spoilt))
    whole, found = (t if case.lengths else t[0].transpose(0, 1) for t in (whole, found))
    kept = torch.ones(sum(lengths[0]), dtype=torch.bool)
    kept[rows] = extreme.unmet_rows(problem, lengths[0][sequence], lengths[1][sequence], key)
    assert bool(kept[rows].any())
    assert bool(whole[: len(kept)].isfinite().all())
    assert torch.equal(found[: len(kept)][kept], whole[: len(kept)][kept])
