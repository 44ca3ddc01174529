"""Tensors and numbers as arguments of kernels: the records that both GPU backends fill from the views of a call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewise.backends.gpu.launching import Allocation, View
from tilewise.backends.gpu.records import Lengths, Paging, Rows, Scales, Window
from tilewise.backends.gpu.symbols import Address
from tilewise.problem import AttentionProblem

Views = Mapping[str, View]
# An edge of a window that hides nothing: more keys than a sequence has.
NO_EDGE = 1 << 30


def result_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The results of the forward: out and lse."""
    rows = (problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim_v)
    return {
        "out": Allocation.rows(problem, *rows, problem.dtype),
        "lse": Allocation.contiguous(problem.lse_shape, torch.float32),
    }


def single_address(views: Views, name: str) -> Address | None:
    """A tensor that is read one element at a time, so its alignment does not matter; None without one."""
    return Address(name, views[name].dtype, aligned=False) if name in views else None


def lengths_of(views: Views) -> Lengths:
    """The lengths of packed sequences and of sequences in pages."""
    return Lengths(*(single_address(views, name) for name in Lengths._fields))


def paging_of(views: Views, k_rows: int | None = None, v_rows: int | None = None) -> Paging:
    """The block table; `k_rows` and `v_rows` are for kernels that read pages by tensor maps of rows."""
    stride = views["block_table"].strides[0] if "block_table" in views else None
    return Paging(single_address(views, "block_table"), stride, k_rows, v_rows)


def scales_of(problem: AttentionProblem, views: Views) -> Scales:
    """The scales of 8-bit operands, with a stride of 0 where blocks share one."""
    found: list[Rows | None] = []
    for name, block in zip(("q_scale", "k_scale", "v_scale"), problem.scale_blocks, strict=True):
        address = single_address(views, name)
        batch, head, step = (0, 0, 0) if address is None else views[name].strides
        found.append(None if address is None else Rows(address, batch, head, step if block else 0))
    return Scales(*found)


def window_of(problem: AttentionProblem) -> Window:
    """The window of a problem, NO_EDGE where it has none. One wider than the sequences cuts nothing, but may have 31
    bits: sums with it would overflow int32.
    """
    left, right = problem.band
    return Window(
        NO_EDGE if left is None else min(left, problem.seqlen_k),
        NO_EDGE if right is None else min(right, problem.seqlen_q),
    )
