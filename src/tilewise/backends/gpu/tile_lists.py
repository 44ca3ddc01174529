"""The lists of a tile mask (see tilewise.tiles). A call comes without them under `vmap`, or from a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.gpu import releases
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.tiles import bits_by_queries, lists_of


def has_kernels(tensor: Tensor) -> bool:
    """Whether the kernels that make masks and their lists can run. Neither a compiler that traces, fake tensors nor
    torch.func know them, and no trial judges them on a newer release of Triton.
    """
    plain = type(tensor) is Tensor and tensor.is_cuda and not torch.compiler.is_compiling()
    plain = plain and not torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return plain and releases.missing() is None and releases.is_known()


def made(tile_map: Tensor) -> Tensor:
    """The lists of a map: by two kernels, or by many where these cannot run."""
    if not has_kernels(tile_map):
        return lists_of(tile_map)
    from tilewise.backends.gpu import listing

    return listing.listed(tile_map)


def are_missing(problem: AttentionProblem, lists: Tensor | None) -> bool:
    """Whether every call must make the lists."""
    return problem.tiles_shape is not None and lists is None


def with_lists(problem: AttentionProblem, operands: Operands) -> Operands:
    """The operands with the lists of their tile mask, and its bits by queries, if they have one."""
    if not are_missing(problem, operands.tile_lists):
        return operands
    assert problem.tiles_shape is not None
    assert operands.tiles is not None
    assert operands.tile_bits is not None
    # Without those of broadcast sequences and heads.
    stored = operands.tiles[: problem.tiles_shape[0], : problem.tiles_shape[1]]
    return operands._replace(tile_lists=made(stored), tile_bits=bits_by_queries(operands.tile_bits))
