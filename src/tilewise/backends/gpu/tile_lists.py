"""The lists of a tile mask (see tilewise.tiles), where a call comes without them: under `vmap`, or from a CPU."""

from __future__ import annotations

from torch import Tensor

from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.tiles import lists_of


def are_missing(problem: AttentionProblem, lists: Tensor | None) -> bool:
    """Whether every call must make the lists."""
    return problem.tiles_shape is not None and lists is None


def with_lists(problem: AttentionProblem, operands: Operands) -> Operands:
    """The operands with the lists of their tile mask, if they have one."""
    if not are_missing(problem, operands.tile_lists):
        return operands
    assert problem.tiles_shape is not None
    assert operands.tiles is not None
    assert operands.tile_bits is not None
    # Without those of broadcast sequences and heads.
    stored = operands.tiles[: problem.tiles_shape[0], : problem.tiles_shape[1]]
    return operands._replace(tile_lists=lists_of(stored, operands.tile_bits))
