"""The contract as code: scores, softmax, output and every gradient, in fp64, one sequence at a time.

The order of the steps in `score` is the order of docs/contract.md. Nothing here is fast; everything here is meant to
be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import tiles
from tilewise.backends.reference.sequences import (
    Sequence,
    accumulate,
    empty_out,
    heads_first,
    row_scales,
    sequences,
    zero_gradient,
)
from tilewise.numerics import dropout_keep
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem


class Scores(NamedTuple):
    """Masked scores (heads, seqlen_q, seqlen_k); softcap's tanh at each of them, and its derivative."""

    s: Tensor
    softcap_slope: Tensor | float
    tanh: Tensor | float


class Softmax(NamedTuple):
    """Probabilities, their row-wise lse (heads, seqlen_q), and dropout's factor: 0 or 1 / (1 - p) per probability."""

    p: Tensor
    lse: Tensor
    keep: Tensor | float


class SequenceGradients(NamedTuple):
    """Gradients of one sequence, heads first; dbias has one element per score, dsinks one per head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor
    dsinks: Tensor


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) for canonical operands."""
    out, lse = empty_out(problem, operands.q.device)
    for sequence in sequences(problem, operands):
        q, k, v = load(problem, operands, sequence)
        s = score(problem, operands, sequence, q, k).s
        p, row_lse, keep = softmax(problem, operands, sequence, s)
        if operands.max_logits is not None and s.shape[1] and s.shape[2]:
            largest = s.amax((1, 2)).to(operands.max_logits.dtype)
            operands.max_logits.copy_(torch.maximum(operands.max_logits, largest))
        accumulate(problem, out, (p * keep) @ v, sequence, sequence.q_rows)
        if problem.kind == "dense":
            lse[sequence.index] = row_lse
        else:
            lse[:, sequence.q_rows] = row_lse
    return out.to(problem.dtype), lse.to(problem.accumulate_dtype)


def backward(
    problem: AttentionProblem, operands: Operands, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Gradients of sum(out * dout) + sum(lse * dlse), in the shapes of the canonical operands."""
    return summed(problem, operands, wanted, lambda one: _backward_one(problem, operands, one, dout, dlse))


def summed(
    problem: AttentionProblem, operands: Operands, wanted: Wanted, gradients_of: Callable[[Sequence], SequenceGradients]
) -> Gradients:
    """The sum of the gradients of all sequences."""
    dq, dk, dv = (zero_gradient(problem, t) for t in (operands.q, operands.k, operands.v))
    dbias = None if problem.bias_shape is None else operands.q.new_zeros(problem.bias_shape, dtype=torch.float64)
    dsinks = operands.q.new_zeros(problem.num_heads, dtype=torch.float64)
    for sequence in sequences(problem, operands):
        part = gradients_of(sequence)
        accumulate(problem, dq, part.dq, sequence, sequence.q_rows)
        accumulate(problem, dk, part.dk, sequence, sequence.k_rows)
        accumulate(problem, dv, part.dv, sequence, sequence.k_rows)
        if dbias is not None:
            _accumulate_broadcast(dbias, part.dbias, sequence.index)
        dsinks += part.dsinks
    return Gradients(
        dq=dq.to(problem.dtype),
        dk=dk.to(problem.dtype),
        dv=dv.to(problem.dtype),
        dbias=dbias.to(problem.bias_dtype) if dbias is not None and wanted.dbias else None,
        dsinks=dsinks.to(operands.sinks.dtype) if operands.sinks is not None and wanted.dsinks else None,
    )


def _backward_one(
    problem: AttentionProblem, operands: Operands, sequence: Sequence, dout: Tensor, dlse: Tensor | None
) -> SequenceGradients:
    q, k, v = load(problem, operands, sequence)
    scores = score(problem, operands, sequence, q, k)
    p, lse, keep = softmax(problem, operands, sequence, scores.s)
    do = heads_first(problem, dout, sequence, sequence.q_rows)
    dl = dlse_of(problem, dlse, sequence, lse)

    dv = (p * keep).transpose(1, 2) @ do
    dp = do @ v.transpose(1, 2) * keep
    # Softmax's Jacobian: delta = sum_j p_j dp_j is subtracted from every score gradient of a row, and lse's own
    # gradient is added.
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None] + dl[..., None])
    dsinks = torch.zeros(problem.num_heads, dtype=torch.float64, device=q.device)
    if operands.sinks is not None:
        dsinks = (sink_probability(operands, lse) * (dl - delta)).sum(-1)
    dqk = ds * scores.softcap_slope * problem.scale
    return SequenceGradients(
        dq=dqk @ k, dk=sum_groups(problem, dqk.transpose(1, 2) @ q), dv=sum_groups(problem, dv), dbias=ds, dsinks=dsinks
    )


def load(problem: AttentionProblem, operands: Operands, sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one sequence in fp64, scales applied, each K/V head repeated for the query heads it serves."""
    q = heads_first(problem, operands.q, sequence, sequence.q_rows)
    k = heads_first(problem, operands.k, sequence, sequence.k_rows)
    v = heads_first(problem, operands.v, sequence, sequence.k_rows)
    q_block, k_block, v_block = problem.scale_blocks
    paged = problem.page_size is not None
    if operands.q_scale is not None:
        q = q * row_scales(problem, operands.q_scale, q_block, sequence, sequence.q_rows, in_pages=False)
    if operands.k_scale is not None:
        k = k * row_scales(problem, operands.k_scale, k_block, sequence, sequence.k_rows, in_pages=paged)
    if operands.v_scale is not None:
        v = v * row_scales(problem, operands.v_scale, v_block, sequence, sequence.k_rows, in_pages=paged)
    return q, k.repeat_interleave(problem.group_size, 0), v.repeat_interleave(problem.group_size, 0)


def score(problem: AttentionProblem, operands: Operands, sequence: Sequence, q: Tensor, k: Tensor) -> Scores:
    """Steps 1 to 5 of the contract: scale, softcap, ALiBi, bias, masks."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    s = problem.scale * (q @ k.transpose(1, 2))
    slope: Tensor | float = 1.0
    capped: Tensor | float = 0.0
    if problem.softcap is not None:
        capped = torch.tanh(s / problem.softcap)
        s, slope = problem.softcap * capped, 1.0 - capped**2

    m_idx = torch.arange(seqlen_q, device=q.device)[:, None]
    n_idx = torch.arange(seqlen_k, device=q.device)[None, :]
    distance = n_idx - (m_idx + seqlen_k - seqlen_q)
    if operands.alibi_slopes is not None:
        s = s - operands.alibi_slopes[sequence.index].double()[:, None, None] * distance.abs()
    if operands.bias is not None:
        s = s + operands.bias[sequence.index, :, :seqlen_q, :seqlen_k].double()
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    left, right = problem.band
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if operands.mask is not None:
        visible = visible & operands.mask[sequence.index, :, :seqlen_q, :seqlen_k]
    if operands.tiles is not None and operands.tile_bits is not None:
        visible = visible & tiles.visible(operands.tiles[sequence.index], operands.tile_bits, seqlen_q, seqlen_k)
    return Scores(s.masked_fill(~visible, -math.inf), slope, capped)


def softmax(problem: AttentionProblem, operands: Operands, sequence: Sequence, s: Tensor) -> Softmax:
    """Steps 6 and 7: the sink joins the denominator, dropout affects the numerator only."""
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    if operands.sinks is not None:
        lse = torch.logaddexp(lse, operands.sinks.double()[:, None].expand_as(lse))
    return Softmax(_probabilities(operands, s), lse, _keep_factor(problem, operands, sequence, s))


def _probabilities(operands: Operands, s: Tensor) -> Tensor:
    """Divided by their sum, not exp(s - lse): next to a score of 1e17, lse has no digits left for the logarithm."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    top = torch.where(top.isinf(), 0.0, top)
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    if operands.sinks is not None:
        total = total + torch.exp(operands.sinks.double()[:, None, None] - top)
    return weights / torch.where(total == 0.0, 1.0, total)


def sink_probability(operands: Operands, lse: Tensor) -> Tensor:
    """The share of the sink in each row's denominator, (heads, seqlen_q)."""
    assert operands.sinks is not None
    return torch.exp(operands.sinks.double()[:, None] - _finite(lse))


def _finite(lse: Tensor) -> Tensor:
    """An empty row has lse -inf; subtracting 0 instead gives probabilities exp(-inf) = 0, not NaN."""
    return torch.where(lse == -math.inf, 0.0, lse)


def _keep_factor(problem: AttentionProblem, operands: Operands, sequence: Sequence, s: Tensor) -> Tensor | float:
    if problem.dropout == 0.0:
        return 1.0
    assert operands.seed is not None
    seed, batch, first_head, row, key = (operands.seed.reshape(-1).tolist() + [0] * 4)[:5]
    rows, cols = np.arange(s.shape[1]) + row, np.arange(s.shape[2]) + key
    heads = range(first_head, first_head + problem.num_heads)
    kept = [dropout_keep(seed, problem.dropout, sequence.index + batch, head, rows, cols) for head in heads]
    return torch.from_numpy(np.stack(kept)).to(s.device).double() / (1.0 - problem.dropout)


def dlse_of(problem: AttentionProblem, dlse: Tensor | None, sequence: Sequence, lse: Tensor) -> Tensor:
    """The cotangent of one sequence's lse, zeros if there is none."""
    if dlse is None:
        return torch.zeros_like(lse)
    part = dlse[sequence.index] if problem.kind == "dense" else dlse[:, sequence.q_rows]
    return part.double()


def sum_groups(problem: AttentionProblem, per_query_head: Tensor) -> Tensor:
    """The gradient of a K/V head is the sum over the query heads it serves."""
    return per_query_head.view(problem.num_kv_heads, problem.group_size, *per_query_head.shape[1:]).sum(1)


def _accumulate_broadcast(dbias: Tensor, part: Tensor, index: int) -> None:
    """Add one sequence's (heads, seqlen_q, seqlen_k) into dbias, summing over the dimensions broadcast along."""
    heads, rows, cols = dbias.shape[1:]
    for dim, size in enumerate((heads, rows, cols)):
        if size == 1:
            part = part.sum(dim, keepdim=True)
    target = dbias[index if dbias.shape[0] > 1 else 0]
    target[:, : part.shape[1], : part.shape[2]] += part
