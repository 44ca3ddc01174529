"""Arithmetic every backend must agree on: log2 constants, merging partial results, the empty row, and the dropout bits.

The empty-row convention: a row with no key left has `out` 0 and `lse` -inf. It is the neutral element of
`merge_all`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): two multipliers, two Weyl key
# increments.
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
# One Philox call yields four words for four neighbouring keys: key j takes word j % 4 of counter j // 4.
KEYS_PER_DRAW = 4

if TYPE_CHECKING:
    # numpy.typing is slow to import.
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]
    Counter = NDArray[np.integer[Any]]


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_all` of two results."""
    return merge_all((out_a, out_b), (lse_a, lse_b))


def merge_all(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine results over disjoint keys: `lse = log(sum e^lse)`, each `out` weighted by its share of the denominator.

    An `lse` has the shape of its `out` without the last dimension. Differentiable; an empty result (lse -inf)
    contributes nothing, even if its `out` holds NaN.
    """
    acc = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    top = functools.reduce(torch.maximum, lses).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    weights = [torch.exp(lse - top) for lse in lses]
    total = functools.reduce(torch.add, weights)
    empty = total == 0.0
    # Divide by 1 where all are empty: 0 / 0 would be NaN in the result and in its gradient.
    total = torch.where(empty, 1.0, total)
    shares = [_share(out, weight / total, acc) for out, weight in zip(outs, weights, strict=True)]
    lse = torch.where(empty, -math.inf, top + torch.log(total))
    return functools.reduce(torch.add, shares).to(outs[0].dtype), lse


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """Merge row i of a partial result into row `rows[i]` (or i) of `out` and `lse`, in place."""
    rows = torch.arange(len(part), device=out.device) if rows is None else rows.long()
    both, both_lse = merge_partials(out[rows], lse[:, rows].mT, part, part_lse.mT)
    out.index_copy_(0, rows, both)
    lse.index_copy_(1, rows, both_lse.mT)


def _share(out: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    weight = weight.unsqueeze(-1).to(dtype)
    # Select before the product: NaN times a weight of 0 would return through the gradient.
    return torch.where(weight == 0.0, 0.0, out.to(dtype)) * weight


def philox_4x32(
    counter: tuple[Counter, Counter, Counter, Counter], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Philox 4x32-10 on arrays of counters (broadcast against each other) under one 64-bit key."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = np.uint64(PHILOX_M0) * c0, np.uint64(PHILOX_M1) * c2
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> half) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + PHILOX_W0) & 0xFFFFFFFF, (k1 + PHILOX_W1) & 0xFFFFFFFF
    words = np.broadcast_arrays(*(c.astype(np.uint32) for c in (c0, c1, c2, c3)))
    return words[0], words[1], words[2], words[3]


def dropout_threshold(dropout: float) -> int:
    """A key is dropped iff its 32-bit word is below this."""
    return min(round(dropout * 2**32), 2**32 - 1)


def dropout_keep(
    seed: int, dropout: float, batch: int, head: int, rows: NDArray[np.int64], cols: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which probabilities survive, as a (rows, cols) array: the contract's bits.

    Philox keyed by (seed low, seed high) and counted by (j // 4, i, head, batch) gives four words; key j takes word j
    % 4.
    """
    draws = np.unique(cols // KEYS_PER_DRAW)
    counter = (draws[None, :], rows[:, None], np.full((1, 1), head), np.full((1, 1), batch))
    words = np.stack(philox_4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)), axis=-1)
    at = np.searchsorted(draws, cols // KEYS_PER_DRAW)
    kept: NDArray[np.bool_] = words[:, at, cols % KEYS_PER_DRAW] >= np.uint32(dropout_threshold(dropout))
    return kept
