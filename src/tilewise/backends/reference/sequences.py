"""One sequence at a time: dense, packed and paged operands as plain (heads, seqlen, dim) arrays, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.operands import Operands
from tilewise.problem import AttentionProblem


@dataclass(frozen=True)
class Sequence:
    """The position of one sequence: batch index, rows of q, and rows of k and v (slots of pages when paged)."""

    index: int
    q_rows: Tensor
    k_rows: Tensor


def sequences(problem: AttentionProblem, operands: Operands) -> Iterator[Sequence]:
    """Every sequence of the batch, in order."""
    for index in range(problem.batch):
        yield Sequence(index, _q_rows(problem, operands, index), _k_rows(problem, operands, index))


def heads_first(problem: AttentionProblem, tensor: Tensor, sequence: Sequence, rows: Tensor) -> Tensor:
    """A fp64 copy (heads, seqlen, dim) of one sequence's rows of q, k, v or a gradient of theirs."""
    if problem.kind == "dense":
        return tensor[sequence.index].double()
    flat = tensor.flatten(0, 1) if tensor.dim() == 4 else tensor
    return flat[rows].transpose(0, 1).double()


def row_scales(
    problem: AttentionProblem, scale: Tensor, block: int | None, sequence: Sequence, rows: Tensor, *, in_pages: bool
) -> Tensor:
    """The fp64 scales (heads, seqlen, 1) of one sequence's rows of an operand in 8 bits."""
    if in_pages:
        assert problem.page_size is not None
        slot = rows % problem.page_size // (block or problem.page_size)
        return scale[rows // problem.page_size, :, slot].transpose(0, 1)[..., None].double()
    position = torch.arange(len(rows), device=rows.device)
    return scale[sequence.index][:, position // block if block else 0 * position, None].double()


def accumulate(problem: AttentionProblem, total: Tensor, part: Tensor, sequence: Sequence, rows: Tensor) -> None:
    """Add (heads, seqlen, dim) into `total`, shaped like the operand: pages may be shared by several sequences."""
    if problem.kind == "dense":
        total[sequence.index] += part
        return
    flat = total.flatten(0, 1) if total.dim() == 4 else total
    flat.index_add_(0, rows, part.transpose(0, 1))


def empty_out(problem: AttentionProblem, device: torch.device) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 as if no row saw any key; dense out is heads-first."""
    out = torch.zeros(problem.out_shape, dtype=torch.float64, device=device)
    lse = torch.full(problem.lse_shape, -torch.inf, dtype=torch.float64, device=device)
    return in_layout(problem, out), lse


def zero_gradient(problem: AttentionProblem, operand: Tensor) -> Tensor:
    """fp64 zeros for the gradient of q, k or v, in the memory order of the layout regardless of the operand's
    strides.
    """
    zeros = torch.zeros_like(in_layout(problem, operand), dtype=torch.float64, memory_format=torch.contiguous_format)
    return in_layout(problem, zeros)


def in_layout(problem: AttentionProblem, tensor: Tensor) -> Tensor:
    """Swap heads-first and the caller's order of dimensions; its own inverse."""
    return tensor.transpose(1, 2) if problem.layout == "bshd" else tensor


def _q_rows(problem: AttentionProblem, operands: Operands, index: int) -> Tensor:
    if problem.kind == "dense":
        return torch.arange(problem.seqlen_q, device=operands.q.device)
    if operands.cu_seqlens_q is None:
        return torch.arange(index, index + 1, device=operands.q.device)
    return _between(operands.cu_seqlens_q, index)


def _k_rows(problem: AttentionProblem, operands: Operands, index: int) -> Tensor:
    if problem.kind == "dense":
        return torch.arange(problem.seqlen_k, device=operands.q.device)
    if operands.cu_seqlens_k is not None:
        return _between(operands.cu_seqlens_k, index)
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    assert problem.page_size is not None
    position = torch.arange(int(operands.seqlens_k[index]), device=operands.q.device)
    page = operands.block_table[index].long()[position // problem.page_size]
    return page * problem.page_size + position % problem.page_size


def _between(cu_seqlens: Tensor, index: int) -> Tensor:
    start, stop = cu_seqlens[index : index + 2].tolist()
    return torch.arange(start, stop, device=cu_seqlens.device)
