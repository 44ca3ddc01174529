"""Tile masks: loops over the tiles that a mask lists (see tilewise.tiles), in place of the loops over all keys or
queries of the other kernels.

Sides of kernel tiles (blocks) divide 128, so each lies in one tile of the mask, and one test per block says whether
bits are read. A loop counts the blocks of the tiles in a list, and looks each up one step ahead: a lookup in the step
that needs it would take a pipeline stage.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

from tilewise import tiles

TILE, WORD = tl.constexpr(tiles.TILE), tl.constexpr(tiles.WORD)
EMPTY = tl.constexpr(tiles.EMPTY)
# Words of a tile's bits.
TILE_WORDS = tl.constexpr(tiles.WORDS * tiles.TILE)


# Where a list's entries begin (see tiles.lists_of).
ENTRIES = tl.constexpr(2)


@triton.jit
def list_of(lists, batch_idx, head, first):
    """The list of the row (or column) of tiles that token `first` lies in."""
    base = lists.ptr + tl.cast(batch_idx, tl.int64) * lists.stride_batch + tl.cast(head, tl.int64) * lists.stride_head
    return base + tl.cast(first // TILE, tl.int64) * lists.stride_row


@triton.jit
def ranked_block(lists, batch_idx, head, block, BLOCK: tl.constexpr):
    """The block that a program takes, such that long rows (or columns) of tiles come first."""
    PARTS: tl.constexpr = TILE // BLOCK
    return tl.load(list_of(lists, batch_idx, head, block * BLOCK) + 1) * PARTS + block % PARTS


@triton.jit
def num_listed_blocks(length, BLOCK: tl.constexpr):
    """Blocks of whole tiles."""
    return (length + TILE - 1) // TILE * (TILE // BLOCK)


@triton.jit
def blocks_before(entries, token, BLOCK: tl.constexpr):
    """How many blocks of a list's tiles come before a token, a multiple of BLOCK."""
    PARTS: tl.constexpr = TILE // BLOCK
    count = tl.load(entries)
    tile = token // TILE
    # Most often all of them, or all but the last.
    low = count * 0
    high = count
    if tl.load(entries + ENTRIES + 2 * (count - 1), mask=count > 0, other=-1) < tile:
        low = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(entries + ENTRIES + 2 * middle) < tile:
            low = middle + 1
        else:
            high = middle
    inside = tl.load(entries + ENTRIES + 2 * low, mask=low < count, other=-1) == tile
    return low * PARTS + tl.where(inside, token % TILE // BLOCK, 0)


@triton.jit
def listed_steps(entries, begin, end, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """(first, end) of a loop over the listed blocks with tokens in [begin, end); without BANDED `begin` is 0."""
    upper = blocks_before(entries, (end + BLOCK - 1) // BLOCK * BLOCK, BLOCK)
    if BANDED:
        return blocks_before(entries, begin // BLOCK * BLOCK, BLOCK), upper
    else:
        return upper * 0, upper


@triton.jit
def listed_block(entries, step, BLOCK: tl.constexpr):
    """(first token, kind of the tile) of a step."""
    PARTS: tl.constexpr = TILE // BLOCK
    at = entries + ENTRIES + 2 * (step // PARTS)
    return tl.load(at) * TILE + step % PARTS * BLOCK, tl.load(at + 1)


@triton.jit
def are_seen(bits, kind, rows, first, BLOCK: tl.constexpr):
    """Which pairs the bits of a partial tile show: of queries `rows`, (number, 1), and the BLOCK keys from `first` on.
    A word holds 32 pairs of a query.
    """
    words = bits + tl.cast(kind, tl.int64) * TILE_WORDS + (first % TILE // WORD * TILE + rows % TILE)
    column = tl.arange(0, BLOCK)[None, :]
    word = tl.load(words)
    for group in tl.static_range(1, BLOCK // WORD):
        word = tl.where(column >= group * WORD, tl.load(words + group * TILE), word)
    return ((word >> ((first + column) % WORD)) & 1) != 0


@triton.jit
def hide_listed(p, bits, kind, m_idx, n_first, BLOCK_N: tl.constexpr):
    """P with 0 for the pairs that the tile mask hides."""
    if kind >= 0:
        p = tl.where(are_seen(bits, kind, m_idx, n_first, BLOCK_N), p, 0.0)
    if kind == EMPTY:
        p = tl.zeros_like(p)
    return p


@triton.jit
def are_seen_at(bits, kind, m_idx, n_idx):
    """Which pairs the bits of a partial tile show, read pair by pair; m_idx and n_idx broadcast."""
    words = bits + tl.cast(kind, tl.int64) * TILE_WORDS
    word = tl.load(words + (n_idx % TILE // WORD * TILE + m_idx % TILE))
    return ((word >> (n_idx % WORD)) & 1) != 0


@triton.jit
def hide_scores(scores, bits, kind, m_idx, n_idx):
    """Scores with -inf for the pairs that the bits of a tile hide."""
    if kind >= 0:
        scores = tl.where(are_seen_at(bits, kind, m_idx, n_idx), scores, float("-inf"))
    return scores


@triton.jit
def hide_pairs(p, bits, kind, m_idx, n_idx):
    """P with 0 for the pairs that the tile mask hides."""
    if kind >= 0:
        p = tl.where(are_seen_at(bits, kind, m_idx, n_idx), p, 0.0)
    if kind == EMPTY:
        p = tl.zeros_like(p)
    return p


@triton.jit
def kind_at(tile_map, batch_idx, head, m_first, n_first):
    """The kind of the tile of a map that holds a query and a key."""
    base = tile_map.ptr + tl.cast(batch_idx, tl.int64) * tile_map.stride_batch
    base += tl.cast(head, tl.int64) * tile_map.stride_head + tl.cast(m_first // TILE, tl.int64) * tile_map.stride_row
    return tl.load(base + n_first // TILE * tile_map.stride_col)
