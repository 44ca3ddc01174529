"""The online softmax of one row: block after block, a running maximum and sum, and what came before is corrected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.errors import InvalidProblem

__all__ = ["BlockState", "OnlineSoftmax", "online_softmax"]


@dataclass(frozen=True, slots=True)
class BlockState:
    """After one block: the maximum and sum so far, the factor that corrected the earlier sum, and this block's terms.

    `terms` are exp(score - row_max). The first block corrects nothing: its factor is 0, as exp(-inf - row_max) is.
    """

    scores: tuple[float, ...]
    row_max: float
    correction: float
    row_sum: float
    terms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OnlineSoftmax:
    """The states after each block, and the softmax of the whole row from the last maximum and sum."""

    states: tuple[BlockState, ...]
    probabilities: tuple[float, ...]


def online_softmax(row: Sequence[float], block: int) -> OnlineSoftmax:
    """A row of scores in blocks of `block`; -inf is a masked score, and a row of nothing else has probabilities 0.

    >>> [round(state.row_sum, 4) for state in online_softmax([2, 8, 1, 9, 3, 7], 3).states]
    [1.0034, 1.5069]
    """
    if block < 1:
        raise InvalidProblem("block", "at least 1", block, "Blocks hold at least one score.")
    if not row or any(math.isnan(score) or score == math.inf for score in row):
        raise InvalidProblem("row", "numbers below infinity, one at least", list(row), "Mask a score with -inf.")
    row_max, row_sum = -math.inf, 0.0
    states = []
    for start in range(0, len(row), block):
        scores = tuple(float(score) for score in row[start : start + block])
        new_max = max(row_max, *scores)
        correction = _exp(row_max, new_max)
        terms = tuple(_exp(score, new_max) for score in scores)
        row_max, row_sum = new_max, row_sum * correction + math.fsum(terms)
        states.append(BlockState(scores, row_max, correction, row_sum, terms))
    return OnlineSoftmax(tuple(states), tuple(_exp(score, row_max) / (row_sum or 1.0) for score in row))


def _exp(score: float, row_max: float) -> float:
    """exp(score - row_max), where nothing but masked scores so far gives 0 and not NaN."""
    return 0.0 if score == -math.inf else math.exp(score - row_max)
