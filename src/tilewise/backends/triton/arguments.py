"""Tensors as kernels see them: pointers with strides, descriptors where TMA can load, and what every score needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends.triton.configs import Config
from tilewise.backends.triton.planning import Plan
from tilewise.backends.triton.traits import Box, Grid4, Lengths, Rows, padded
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = [
    "dense_rows", "empty_like_rows", "key_descriptors", "packed_rows", "packed_stats", "page_rows", "query_descriptors",
    "query_rows", "score_arguments", "stat_rows",
]  # fmt: skip


def key_descriptors(plan: Plan, arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """Descriptors of K and V, or None for both."""
    problem = plan.problem
    on = config.descriptors and problem.kind != "paged"
    rows = problem.seqlen_k if problem.kind == "dense" else problem.total_k
    k = _described(plan, arguments["k"], problem.num_kv_heads, rows, config.block_n) if on else None
    v = _described(plan, arguments["v"], problem.num_kv_heads, rows, config.block_n) if on else None
    return _pair("k", k, "v", v)


def query_descriptors(plan: Plan, arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """Descriptors of q and dout, or None for both."""
    problem = plan.problem
    on = config.descriptors and (problem.kind == "dense" or plan.traits.PACKED_Q)
    rows = problem.seqlen_q if problem.kind == "dense" else problem.total_q
    q = _described(plan, arguments["q"], problem.num_heads, rows, config.block_m) if on else None
    dout = _described(plan, arguments["dout"], problem.num_heads, rows, config.block_m) if on else None
    return _pair("q", q, "dout", dout)


Described = tuple[TensorDescriptor, Box]


def _pair(a: str, described_a: Described | None, b: str, described_b: Described | None) -> dict[str, Any]:
    """Both or neither: one compiled kernel less."""
    if described_a is None or described_b is None:
        return dict.fromkeys((f"{a}_desc", f"{a}_box", f"{b}_desc", f"{b}_box"))
    return {
        f"{a}_desc": described_a[0],
        f"{a}_box": described_a[1],
        f"{b}_desc": described_b[0],
        f"{b}_box": described_b[1],
    }


def _described(plan: Plan, rows: Rows, heads: int, num_rows: int, block: int) -> Described | None:
    """A view of the rows as one matrix, if they have one row stride, TMA's alignment and no padding of head_dim."""
    tensor, dim = rows.ptr, rows.ptr.shape[-1]
    align = 16 // tensor.element_size()
    if rows.stride_row % align or rows.stride_row < dim or tensor.data_ptr() % 16 or padded(dim) != dim:
        return None
    if rows.stride_batch % rows.stride_row:
        return None
    per_batch = rows.stride_batch // rows.stride_row
    if rows.stride_head % rows.stride_row == 0:
        box, width = Box(per_batch, rows.stride_head // rows.stride_row, 0), dim
    elif rows.stride_head % align == 0 and rows.stride_head * (heads - 1) + dim <= rows.stride_row:
        box, width = Box(per_batch, 0, rows.stride_head), rows.stride_row
    else:
        return None
    height = (plan.problem.batch - 1) * box.rows_per_batch + (heads - 1) * box.rows_per_head + num_rows
    if num_rows == 0 or height >= 2**31:
        return None
    return TensorDescriptor(tensor, [height, width], [rows.stride_row, 1], [block, dim]), box


def score_arguments(plan: Plan, operands: Operands) -> dict[str, Any]:
    """What every kernel that computes scores is given."""
    kind = plan.problem.kind
    keys = page_rows if kind == "paged" else packed_rows if kind == "varlen" else dense_rows
    slopes, mask, table = operands.alibi_slopes, operands.mask, operands.block_table
    return {
        "q": query_rows(plan, operands.q),
        "k": keys(operands.k),
        "v": keys(operands.v),
        "bias": None if operands.bias is None else Grid4(operands.bias, *operands.bias.stride()),
        "mask": None if mask is None else Grid4(mask.view(torch.uint8), *mask.stride()),
        "alibi_slopes": None if slopes is None else Rows(slopes, slopes.stride(0), slopes.stride(1), 0),
        "seed_ptr": _seed_on_device(operands) if plan.problem.dropout > 0.0 else None,
        "lengths": Lengths(
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            table,
            operands.seqlens_k,
            None if table is None else table.stride(0),
        ),
        "sizes": plan.sizes,
        "band": plan.band,
        "scalars": plan.scalars,
        "T": plan.traits,
    }


def _seed_on_device(operands: Operands) -> Tensor:
    seed = operands.seed
    assert seed is not None
    if seed.device == operands.q.device:
        return seed
    # A fill, not a copy: it needs no pinned memory and can be captured in a graph.
    return torch.full((), int(seed), dtype=torch.int64, device=operands.q.device)


def dense_rows(tensor: Tensor) -> Rows:
    """Rows of a heads-first dense tensor, or of its lse."""
    return Rows(tensor, *tensor.stride()[:3])


def packed_rows(tensor: Tensor) -> Rows:
    """Rows of a packed (total, heads, dim) tensor."""
    return Rows(tensor, 0, tensor.stride(1), tensor.stride(0))


def packed_stats(tensor: Tensor) -> Rows:
    """Rows of a packed (heads, total) lse."""
    return Rows(tensor, 0, tensor.stride(0), tensor.stride(1))


def page_rows(tensor: Tensor) -> Rows:
    """Rows of (pages, page_size, heads, dim); a page takes the place of a sequence."""
    return Rows(tensor, tensor.stride(0), tensor.stride(2), tensor.stride(1))


def query_rows(plan: Plan, tensor: Tensor) -> Rows:
    """Rows of q, out, dout or dq. Paged queries of one token a sequence are a batch of sequences of length 1."""
    if plan.problem.kind == "dense":
        return dense_rows(tensor)
    return packed_rows(tensor) if plan.traits.PACKED_Q else Rows(tensor, tensor.stride(0), tensor.stride(1), 0)


def stat_rows(plan: Plan, tensor: Tensor) -> Rows:
    """Rows of lse or delta, likewise."""
    if plan.problem.kind == "dense":
        return dense_rows(tensor)
    return packed_stats(tensor) if plan.traits.PACKED_Q else Rows(tensor, tensor.stride(1), tensor.stride(0), 0)


def empty_like_rows(problem: AttentionProblem, like: Tensor, heads: int, seqlen: int, dim: int) -> Tensor:
    """A new tensor with the rows of `like`, heads first over the memory order of the problem's layout."""
    if problem.kind != "dense":
        return like.new_empty((like.shape[0], heads, dim))
    if problem.layout == "bshd":
        return like.new_empty((problem.batch, seqlen, heads, dim)).transpose(1, 2)
    return like.new_empty((problem.batch, heads, seqlen, dim))
