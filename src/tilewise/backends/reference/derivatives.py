"""Tangents and second derivatives in fp64, with materialised scores: docs/derivatives.md as code.

A prime is a derivative along the tangents: s' of the scores, m = lse' of the log-sum-exp, out' of the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.reference.sequences import Sequence, accumulate, empty_out, heads_first, sequences
from tilewise.backends.reference.specification import (
    Scores,
    SequenceGradients,
    Softmax,
    dlse_of,
    load,
    score,
    sink_probability,
    softmax,
    sum_groups,
    summed,
)
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem


class Direction(NamedTuple):
    """The tangents of one sequence in fp64, heads first; `raw` is that of the scores before softcap, `s` after it."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw: Tensor
    s: Tensor
    sinks: Tensor


class Primal(NamedTuple):
    """One sequence: operands, scores and probabilities."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores
    softmax: Softmax


def forward_tangent(
    problem: AttentionProblem, operands: Operands, tangents: Tangents
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out', lse')."""
    out, lse = empty_out(problem, operands.q.device)
    dot_out, dot_lse = torch.zeros_like(out), torch.zeros_like(lse)
    for sequence in sequences(problem, operands):
        at, along = _at(problem, operands, tangents, sequence)
        p, row_lse, keep = at.softmax
        m = _lse_tangent(operands, at, along)
        centred = p * (along.s - m[..., None])
        accumulate(problem, out, (p * keep) @ at.v, sequence, sequence.q_rows)
        accumulate(problem, dot_out, (centred * keep) @ at.v + (p * keep) @ along.v, sequence, sequence.q_rows)
        rows = sequence.index if problem.kind == "dense" else (slice(None), sequence.q_rows)
        lse[rows], dot_lse[rows] = row_lse, m
    wide = problem.accumulate_dtype
    return out.to(problem.dtype), lse.to(wide), dot_out.to(problem.dtype), dot_lse.to(wide)


def backward_twice(
    problem: AttentionProblem, operands: Operands, tangents: Tangents, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Gradients of sum(out' * dout) + sum(lse' * dlse) with respect to the operands."""
    return summed(problem, operands, wanted, lambda one: _twice_one(problem, operands, tangents, one, dout, dlse))


def _twice_one(
    problem: AttentionProblem,
    operands: Operands,
    tangents: Tangents,
    sequence: Sequence,
    dout: Tensor,
    dlse: Tensor | None,
) -> SequenceGradients:
    at, along = _at(problem, operands, tangents, sequence)
    p, lse, keep = at.softmax
    slope = at.scores.softcap_slope
    do = heads_first(problem, dout, sequence, sequence.q_rows)
    dl = dlse_of(problem, dlse, sequence, lse)
    m = _lse_tangent(operands, at, along)
    centred = p * (along.s - m[..., None])

    x = do @ at.v.transpose(1, 2) * keep
    y = do @ along.v.transpose(1, 2) * keep
    delta = (p * x).sum(-1)
    # r = dout . out'
    r = (centred * x + p * y).sum(-1)
    pull = x + (dl - delta)[..., None]
    ds = p * pull
    h = centred * pull + p * (y - r[..., None])
    dsinks = torch.zeros(problem.num_heads, dtype=torch.float64, device=at.q.device)
    if operands.sinks is not None:
        dsinks = (sink_probability(operands, lse) * ((dl - delta) * (along.sinks - m) - r)).sum(-1)
    # w and u: the gradients with respect to the scores before softcap, and to their tangents.
    w, u = h * slope, ds * slope
    if problem.softcap is not None:
        # softcap'' = -2 slope tanh / c
        w = w - 2.0 * ds * along.raw * slope * at.scores.tanh / problem.softcap
    return SequenceGradients(
        dq=problem.scale * (w @ at.k + u @ along.k),
        dk=sum_groups(problem, problem.scale * (w.transpose(1, 2) @ at.q + u.transpose(1, 2) @ along.q)),
        dv=sum_groups(problem, (centred * keep).transpose(1, 2) @ do),
        dbias=h,
        dsinks=dsinks,
    )


def _at(
    problem: AttentionProblem, operands: Operands, tangents: Tangents, sequence: Sequence
) -> tuple[Primal, Direction]:
    q, k, v = load(problem, operands, sequence)
    scores = score(problem, operands, sequence, q, k)
    dot_q, dot_k, dot_v = (
        torch.zeros_like(x) if t is None else heads_first(problem, t, sequence, rows)
        for x, t, rows in zip((q, k, v), tangents[:3], (sequence.q_rows, sequence.k_rows, sequence.k_rows), strict=True)
    )
    if tangents.k is not None:
        dot_k = dot_k.repeat_interleave(problem.group_size, 0)
    if tangents.v is not None:
        dot_v = dot_v.repeat_interleave(problem.group_size, 0)
    raw = problem.scale * (dot_q @ k.transpose(1, 2) + q @ dot_k.transpose(1, 2))
    dot_s = raw * scores.softcap_slope
    if tangents.bias is not None:
        dot_s = dot_s + tangents.bias[sequence.index, :, : q.shape[1], : k.shape[1]].double()
    sinks = q.new_zeros(problem.num_heads, 1) if tangents.sinks is None else tangents.sinks.double()[:, None]
    primal = Primal(q, k, v, scores, softmax(problem, operands, sequence, scores.s))
    return primal, Direction(dot_q, dot_k, dot_v, raw, dot_s, sinks)


def _lse_tangent(operands: Operands, at: Primal, along: Direction) -> Tensor:
    """The sum of P s', with the sink's share."""
    m = (at.softmax.p * along.s).sum(-1)
    return m if operands.sinks is None else m + sink_probability(operands, at.softmax.lse) * along.sinks
