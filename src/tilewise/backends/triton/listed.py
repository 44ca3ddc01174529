"""Tile masks: loops over the tiles that a mask lists (see tilewise.tiles), in place of the loops over all keys or
queries of the other kernels.

A list has the number of its entries, then (tile, kind) of each, in order. Sides of kernel tiles divide 128, so each
lies in one tile of the mask, and one test per kernel tile says whether bits are read.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

from tilewise import tiles
from tilewise.backends.triton.primitives import NEG_INF

TILE, WORD = tl.constexpr(tiles.TILE), tl.constexpr(tiles.WORD)
EMPTY = tl.constexpr(tiles.EMPTY)
# Words of a tile's bits.
TILE_WORDS = tl.constexpr(tiles.WORDS * tiles.TILE)


@triton.jit
def list_of(lists, batch_idx, head, first):
    """The list of the row (or column) of tiles that token `first` lies in."""
    base = lists.ptr + tl.cast(batch_idx, tl.int64) * lists.stride_batch + tl.cast(head, tl.int64) * lists.stride_head
    return base + tl.cast(first // TILE, tl.int64) * lists.stride_row


@triton.jit
def entries_before(entries, tile):
    """How many entries of a list come before a tile, by bisection."""
    low = tl.load(entries) * 0
    high = tl.load(entries)
    while low < high:
        middle = (low + high) // 2
        if tl.load(entries + 1 + 2 * middle) < tile:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def listed_steps(entries, begin, end, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """(first, end) of a loop over blocks of the tiles in a list; BANDED: those with tokens in [begin, end)."""
    PARTS: tl.constexpr = TILE // BLOCK
    if BANDED:
        return (
            entries_before(entries, begin // TILE) * PARTS,
            entries_before(entries, (end + TILE - 1) // TILE) * PARTS,
        )
    else:
        return begin * 0, tl.load(entries) * PARTS


@triton.jit
def listed_block(entries, step, BLOCK: tl.constexpr):
    """(first token, kind of the tile) of a step. The interpreter's loop counter is a number without these operators."""
    PARTS: tl.constexpr = TILE // BLOCK
    step = tl.to_tensor(step)
    at = entries + 1 + 2 * (step // PARTS)
    return tl.load(at) * TILE + step % PARTS * BLOCK, tl.load(at + 1)


@triton.jit
def are_seen(bits, kind, m_idx, n_idx):
    """Which pairs the bits of a partial tile show; m_idx and n_idx broadcast against each other."""
    words = bits + tl.cast(kind, tl.int64) * TILE_WORDS
    word = tl.load(words + (m_idx % TILE // WORD * TILE + n_idx % TILE))
    return ((word >> (m_idx % WORD)) & 1) != 0


@triton.jit
def hide_scores(scores, bits, kind, m_idx, n_idx):
    """Scores with -inf for the pairs that the bits of the tile hide."""
    if kind >= 0:
        scores = tl.where(are_seen(bits, kind, m_idx, n_idx), scores, NEG_INF)
    return scores


@triton.jit
def hide_listed(p, bits, kind, m_idx, n_idx):
    """P with 0 for the pairs that the tile mask hides."""
    if kind >= 0:
        p = tl.where(are_seen(bits, kind, m_idx, n_idx), p, 0.0)
    if kind == EMPTY:
        p = tl.zeros_like(p)
    return p


@triton.jit
def kind_at(tile_map, batch_idx, head, m_first, n_first):
    """The kind of the tile of a map that holds a query and a key."""
    base = tile_map.ptr + tl.cast(batch_idx, tl.int64) * tile_map.stride_batch
    base += tl.cast(head, tl.int64) * tile_map.stride_head + tl.cast(m_first // TILE, tl.int64) * tile_map.stride_row
    return tl.load(base + n_first // TILE * tile_map.stride_col)
