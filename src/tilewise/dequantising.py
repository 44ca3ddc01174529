"""Quantised operands as plain tensors, for kernels that compute in 16 or 32 bits.

Only pages named by the table are converted, into new pages; the cache itself stays in 8 bits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

UNNAMED = {"q_scale": None, "k_scale": None, "v_scale": None}


def dequantised(problem: AttentionProblem, operands: Operands, dtype: torch.dtype) -> tuple[AttentionProblem, Operands]:
    """The problem in `dtype` and matching canonical operands. One without scales is returned unchanged."""
    if not problem.fp8:
        return problem, operands
    plain = dataclasses.replace(problem, fp8=(), int8=False, scale_blocks=(None, None, None), dtype=dtype, latent=False)
    q_block, k_block, v_block = problem.scale_blocks
    q = _rows(problem, operands.q, operands.q_scale, q_block, _query_starts(problem, operands))
    if problem.page_size is not None:
        plain, operands = _named_pages(plain, operands)
        k, v = (_pages(t, scale) for t, scale in ((operands.k, operands.k_scale), (operands.v, operands.v_scale)))
    else:
        k = _rows(problem, operands.k, operands.k_scale, k_block, operands.cu_seqlens_k)
        v = _rows(problem, operands.v, operands.v_scale, v_block, operands.cu_seqlens_k)
    return plain, operands._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), **UNNAMED)


def _query_starts(problem: AttentionProblem, operands: Operands) -> Tensor | None:
    """Running totals of packed queries. A paged call with one row per sequence counts each row."""
    if problem.kind == "paged" and operands.cu_seqlens_q is None:
        return torch.arange(problem.batch + 1, dtype=torch.int32, device=operands.q.device)
    return operands.cu_seqlens_q


def _rows(
    problem: AttentionProblem, data: Tensor, scale: Tensor | None, block: int | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Rows times their scales, in fp32; dense rows are heads first."""
    if scale is None:
        return data
    if problem.kind == "dense":
        row = torch.arange(data.shape[2], device=data.device)
        return data.float() * scale[:, :, row // block if block else row * 0, None]
    assert cu_seqlens is not None
    row = torch.arange(data.shape[0], device=data.device)
    if not scale.shape[0]:
        return data.float()
    starts = cu_seqlens.long()
    sequence = (torch.bucketize(row, starts, right=True) - 1).clamp(0, scale.shape[0] - 1)
    within = (row - starts[sequence]) // block if block else row * 0
    # Rows of no sequence have no scale; their values are never read.
    return data.float() * scale[sequence, :, within.clamp(0, scale.shape[2] - 1)][..., None]


def _pages(data: Tensor, scale: Tensor | None) -> Tensor:
    return data if scale is None else data.float() * scale.transpose(1, 2)[..., None]


def _named_pages(problem: AttentionProblem, operands: Operands) -> tuple[AttentionProblem, Operands]:
    """Every table entry as a page of its own, in order, so that pages and scales can be converted at once."""
    table, lengths = operands.block_table, operands.seqlens_k
    assert table is not None
    assert lengths is not None
    assert problem.page_size is not None
    assert operands.k_scale is not None
    assert operands.v_scale is not None
    columns = torch.arange(table.shape[1], device=table.device)
    used = columns * problem.page_size < lengths[:, None]
    # Page 0 stands in for entries past a sequence's end, which may hold anything.
    named = torch.where(used, table, 0).flatten().long()
    count = len(named)
    own = torch.arange(count, dtype=torch.int32, device=table.device).view(table.shape)
    if not operands.k.shape[0]:
        return problem, operands
    operands = operands._replace(
        k=operands.k[named], v=operands.v[named], k_scale=operands.k_scale[named], v_scale=operands.v_scale[named],
        block_table=own,
    )  # fmt: skip
    return dataclasses.replace(problem, total_k=count * problem.page_size), operands
