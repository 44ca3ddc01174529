"""Plain PyTorch attention: the whole score matrix, autograd, the dtype of its inputs. The tolerances derive from it.

Written independently of the reference backend, so that the two also check each other (in fp64 they must agree).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.numerics import dropout_keep
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs


class SequenceView(NamedTuple):
    """One sequence, heads first: q (num_heads, seqlen_q, d), k and v with as many heads; `rows` of a packed q."""

    sequence: int
    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice


def plain_attention(case: Case, inputs: Inputs, dropout_seed: int, *, coarse: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) in the shapes of the public API, differentiable by autograd; `coarse` rounds probabilities to e4m3."""
    outs, lses = [], []
    for view in sequence_views(case, inputs):
        out, lse = _attend(case, inputs, view, dropout_seed, coarse=coarse)
        outs.append(out)
        lses.append(lse)
    if case.kind != "dense":
        return _packed(case, inputs, outs, lses)
    out_shape = (0, case.num_heads, case.seqlen_q, case.head_dim_v)
    out = torch.stack(outs) if outs else inputs.q.new_zeros(out_shape)
    lse = torch.stack(lses) if lses else inputs.q.new_zeros(out_shape[:3], dtype=case.accumulate_dtype)
    return (out.transpose(1, 2) if case.layout == "bshd" else out), lse


def sequence_views(case: Case, inputs: Inputs) -> Iterator[SequenceView]:
    """Every sequence as differentiable views or gathers of the operands."""
    group = case.num_heads // case.num_kv_heads
    start_q = start_k = 0
    for index, (seqlen_q, seqlen_k) in enumerate(zip(case.seqlens_q, case.seqlens_k, strict=True)):
        rows = slice(start_q, start_q + seqlen_q)
        if case.kind == "dense":
            q, k, v = (
                t[index].transpose(0, 1) if case.layout == "bshd" else t[index] for t in (inputs.q, inputs.k, inputs.v)
            )
        else:
            slots = _slots(case, inputs, index, start_k)
            q, k, v = (
                inputs.q[rows].transpose(0, 1),
                *(t.flatten(0, -3)[slots].transpose(0, 1) for t in (inputs.k, inputs.v)),
            )
        yield SequenceView(index, q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), rows)
        start_q, start_k = start_q + seqlen_q, start_k + seqlen_k


def masked_scores(case: Case, inputs: Inputs, view: SequenceView) -> Tensor:
    """Scores (num_heads, seqlen_q, seqlen_k) after scale, softcap, ALiBi, bias and masks; -inf where masked."""
    seqlen_q, seqlen_k = view.q.shape[1], view.k.shape[1]
    scale = 1.0 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    s = _product(view.q * scale, view.k.transpose(1, 2))
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    # How far key j is to the right of the query's own position, bottom-right aligned.
    rows, keys = (torch.arange(length, device=s.device) for length in (seqlen_q, seqlen_k))
    ahead = keys[None, :] - rows[:, None] - (seqlen_k - seqlen_q)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.expand(case.batch, case.num_heads)[view.sequence]
        s = s - slopes[:, None, None].to(s.dtype) * ahead.abs().to(s.dtype)
    scores_shape = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    if inputs.bias is not None:
        s = s + inputs.bias.expand(scores_shape)[view.sequence, :, :seqlen_q, :seqlen_k]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if case.causal:
        hidden = hidden | (ahead > 0)
    left, right = case.window or (None, None)
    if left is not None:
        hidden = hidden | (ahead < -left)
    if right is not None:
        hidden = hidden | (ahead > right)
    if inputs.mask is not None:
        hidden = hidden | ~inputs.mask.expand(scores_shape)[view.sequence, :, :seqlen_q, :seqlen_k]
    return s.masked_fill(hidden, -math.inf)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in the dtype of its factors. Of half precision CPUs without such instructions are slow, so they
    sum in fp32 and round once, as the others do.
    """
    if a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def dropout_factor(case: Case, view: SequenceView, dropout_seed: int) -> Tensor:
    """The factor of dropout on the probabilities: 0 or 1 / (1 - p)."""
    kept = _kept(dropout_seed, case.dropout, view.sequence, case.num_heads, view.q.shape[1], view.k.shape[1])
    return kept.to(torch.float64) / (1.0 - case.dropout)


@functools.lru_cache(maxsize=16)
def _kept(seed: int, dropout: float, index: int, num_heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    rows, cols = np.arange(seqlen_q), np.arange(seqlen_k)
    heads = [dropout_keep(seed, dropout, index, head, rows, cols) for head in range(num_heads)]
    return torch.from_numpy(np.stack(heads))


def _attend(
    case: Case, inputs: Inputs, view: SequenceView, dropout_seed: int, *, coarse: bool
) -> tuple[Tensor, Tensor]:
    s = masked_scores(case, inputs, view)
    if inputs.sinks is not None:
        sink = inputs.sinks.to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)
        s = torch.cat([s, sink], -1)
    # softmax of a row of -inf is NaN, also in its gradient: compute on zeros there and discard.
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, -1).masked_fill(empty, 0.0)[..., : view.k.shape[1]]
    lse = torch.logsumexp(s.to(case.accumulate_dtype), -1) if s.shape[-1] else s.sum(-1).to(case.accumulate_dtype)
    if case.dropout > 0.0:
        p = p * dropout_factor(case, view, dropout_seed).to(p.dtype)
    if coarse and p.shape[-1]:
        # As the contract says: relative to the row's largest one, times 2^8.
        unit = p.float().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 2.0**8
        p = (p.float() / unit).to(torch.float8_e4m3fn).float() * unit
    out = _product(p.to(view.v.dtype), view.v)
    return out, lse.masked_fill(empty.squeeze(-1), -math.inf)


def _packed(case: Case, inputs: Inputs, outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences one after the other, then padding: out 0, lse -inf."""
    outs = [*outs, inputs.q.new_zeros(case.num_heads, case.padding, case.head_dim_v)]
    lses = [*lses, torch.full((case.num_heads, case.padding), -math.inf, dtype=case.accumulate_dtype)]
    return torch.cat(outs, 1).transpose(0, 1), torch.cat([lse.to(case.accumulate_dtype) for lse in lses], 1)


def _slots(case: Case, inputs: Inputs, index: int, start_k: int) -> Tensor:
    """Rows of the flattened keys that belong to the sequence."""
    position = torch.arange(case.seqlens_k[index])
    if inputs.block_table is None:
        return start_k + position
    page = inputs.block_table[index].long()[position // case.page_size]
    return page * case.page_size + position % case.page_size
