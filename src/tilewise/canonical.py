"""Canonical operands: the views that backends receive, and the way back. Only a strided last dimension is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.operands import Gradients, Operands, Tangents
from tilewise.problem import AttentionProblem

# Index tensors.
COUNTS = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k")
OUT = Operands._fields.index("out")


def canonical(problem: AttentionProblem, operands: Operands) -> Operands:
    """Heads-first q, k, v with a contiguous last dimension; bias, masks and slopes expanded without a copy.

    Lengths and block tables become contiguous too (`n.expand(batch)` has stride 0), and int64 becomes int32: validation
    has checked that the row counts fit.
    """
    operands = _with_counts(operands)
    q, k, v, *rest = operands
    if problem.layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if operands.out is not None:
            rest[OUT - 3] = operands.out.transpose(1, 2)
    rows = k
    q, k = contiguous_last(q), contiguous_last(k)
    # A copied latent is copied once.
    v = k[..., : problem.head_dim_v] if problem.latent and k is not rows else contiguous_last(v)
    if not (problem.bias_shape or problem.mask_shape or problem.tiles_shape or problem.has_alibi):
        same = q is operands.q and k is operands.k and v is operands.v
        return operands if same else Operands(q, k, v, *rest)
    scores = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    slopes, tiles = operands.alibi_slopes, operands.tiles
    return Operands(q, k, v, *rest)._replace(
        bias=None if operands.bias is None else operands.bias.expand(scores),
        mask=None if operands.mask is None else operands.mask.expand(scores),
        tiles=None if tiles is None else tiles.expand(problem.batch, problem.num_heads, -1, -1),
        alibi_slopes=None if slopes is None else slopes.expand(problem.batch, problem.num_heads),
    )


def canonical_tangents(problem: AttentionProblem, tangents: Tangents) -> Tangents:
    """Tangents in the form of their canonical operands."""
    q, k, v = (None if t is None else contiguous_last(heads_first(problem, t)) for t in tangents[:3])
    bias = tangents.bias
    if bias is not None:
        bias = bias.expand(problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    return Tangents(q, k, v, bias, tangents.sinks)


def _with_counts(operands: Operands) -> Operands:
    """Contiguous int32: kernels index these by address."""
    moved = {}
    for name in COUNTS:
        tensor = getattr(operands, name)
        if tensor is not None and (tensor.stride(-1) != 1 or tensor.dtype == torch.int64):
            moved[name] = contiguous_last(tensor.to(torch.int32))
    return operands._replace(**moved) if moved else operands


def heads_first(problem: AttentionProblem, tensor: Tensor) -> Tensor:
    """Swap (batch, seqlen, heads, dim) and (batch, heads, seqlen, dim) for `layout="bshd"`; its own inverse."""
    return tensor.transpose(1, 2) if problem.layout == "bshd" else tensor


def contiguous_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension has stride 1, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def restored(problem: AttentionProblem, operands: Operands, gradients: Gradients) -> Gradients:
    """Gradients in the caller's layout and shapes."""
    dbias = gradients.dbias
    if dbias is None and problem.layout != "bshd":
        return gradients
    dq, dk, dv = (None if g is None else heads_first(problem, g) for g in gradients[:3])
    if dbias is not None and operands.bias is not None:
        dbias = dbias.reshape(operands.bias.shape)
    return gradients._replace(dq=dq, dk=dk, dv=dv, dbias=dbias)
