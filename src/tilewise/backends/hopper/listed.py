"""Tile masks in the forward and backward kernels: the key tiles of a query block (the query tiles of a key block) come
from a list instead of a range.

Forward: a block of 128 queries and a tile of 128 keys are one tile of the mask. A list (see tiles.lists_of) has the
tiles that need a mask first: those with bits, and the last tile of keys, which may not be whole. The kernel visits them
in the loop with a mask, and all others in the loop without one. A list has at least one tile, which hides everything if
the block sees nothing.

Backward: a block of 128 keys and one or two query tiles are one tile of the mask. The lists of a K/V head's query heads
may differ; the first one decides which block comes next. A list may be empty.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise import tiles
from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import NEG_INF
from tilewise.backends.hopper.schedule import place_of

TILE, WORD, FULL = gl.constexpr(tiles.TILE), gl.constexpr(tiles.WORD), gl.constexpr(tiles.FULL)
# Words of a tile's bits, and of a list before its entries.
TILE_WORDS, HEADER = gl.constexpr(tiles.WORDS * tiles.TILE), gl.constexpr(tiles.GROUPS_HEADER)


class Lists(NamedTuple):
    """Forward: the lists of all rows of tiles, by (sequence, head, rank), and the bits by rows. Backward: those of all
    columns, by (sequence, head, column), and the bits by columns.
    """

    ptr: Any
    bits: Any
    stride_batch: int
    stride_head: int
    stride_row: int


@gluon.jit
def list_at(lists, tile, sizes):
    """(list, block, number of tiles, number of those with a mask, first tile, its kind) of the block with a number;
    of another one past the last number.
    """
    rank, item = place_of(gl.where(tile < sizes.num_tiles, tile, 0), sizes, False)
    batch_idx = item // sizes.num_heads
    head = item - batch_idx * sizes.num_heads
    first = batch_idx.to(gl.int64) * lists.stride_batch + head.to(gl.int64) * lists.stride_head
    entries = lists.ptr + first + rank.to(gl.int64) * lists.stride_row
    n_block, kind = entry_at(entries, 0)
    return entries, gl.load(entries), gl.load(entries + 1), gl.load(entries + 2), n_block, kind


@gluon.jit
def entry_at(entries, index):
    """(tile, kind) of an entry."""
    at = entries + (HEADER + 2 * index)
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def column_at(lists, batch_idx, head, column):
    """The list of a column of tiles. Its first word is the column with this rank among the longest."""
    first = batch_idx.to(gl.int64) * lists.stride_batch + head.to(gl.int64) * lists.stride_head
    return lists.ptr + first + column.to(gl.int64) * lists.stride_row


@gluon.jit
def query_steps(entries, first, seqlen_k, C: gl.constexpr):
    """(steps with a mask, all steps) of a column's list: those with a mask come first. `first` is the first key."""
    PARTS: gl.constexpr = TILE // C.BLOCK_M
    count = gl.load(entries + 1) * PARTS
    masked = gl.load(entries + 2) * PARTS
    if not C.EVEN_K:
        masked = gl.where(first + C.BLOCK_N > seqlen_k, count, masked)
    return masked, count


@gluon.jit
def query_tile_at(entries, step, C: gl.constexpr):
    """(query tile, kind) of a step."""
    PARTS: gl.constexpr = TILE // C.BLOCK_M
    tile, kind = entry_at(entries, step // PARTS)
    return tile * PARTS + step % PARTS, kind


@gluon.jit
def load_query_words(bits, kind, m_block, first_key, seqlen_k, C: gl.constexpr):
    """The bits of 64 keys from `first_key` on, in words of 32 queries of a query tile: all of them in a full tile, none
    for keys past the end.
    """
    PARTS: gl.constexpr = TILE // C.BLOCK_M
    keys = gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_M)))
    at = (
        bits + kind.to(gl.int64) * TILE_WORDS + (m_block % PARTS * (C.BLOCK_M // WORD * TILE) + first_key % TILE + keys)
    )
    has_bits = (kind >= 0) & (keys >= 0)
    whole = gl.where(has_bits, 0, -1)
    if not C.EVEN_K:
        has_bits = has_bits & (first_key + keys < seqlen_k)
        whole = gl.where(first_key + keys < seqlen_k, whole, 0)
    first = gl.load(at, mask=has_bits, other=0) | whole
    second = gl.load(at + TILE, mask=has_bits, other=0) | whole
    third = first
    fourth = second
    if C.BLOCK_M == 128:
        third = gl.load(at + 2 * TILE, mask=has_bits, other=0) | whole
        fourth = gl.load(at + 3 * TILE, mask=has_bits, other=0) | whole
    return first, second, third, fourth


@gluon.jit
def hide_transposed(p, words, C: gl.constexpr):
    """P with zeros where the bit of a key (row) and a query (column) is 0."""
    cols = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, accumulator_layout(C.BLOCK_M)))
    group = (cols // WORD)[None, :]
    word = gl.where(group == 0, words[0][:, None], words[1][:, None])
    if C.BLOCK_M == 128:
        word = gl.where(group == 2, words[2][:, None], word)
        word = gl.where(group == 3, words[3][:, None], word)
    return gl.where(((word >> (cols % WORD)[None, :]) & 1) != 0, p, 0.0)


@gluon.jit
def load_words(bits, kind, row, C: gl.constexpr):
    """The bits of 64 queries from `row` on, in words of 32 keys: all of them in a full tile, none in an empty one."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))
    at = bits + kind.to(gl.int64) * TILE_WORDS + (row % TILE + rows)
    has_bits = (kind >= 0) & (rows >= 0)
    whole = gl.where(kind == FULL, -1, 0)
    first = gl.load(at, mask=has_bits, other=0) | whole
    second = gl.load(at + TILE, mask=has_bits, other=0) | whole
    third = gl.load(at + 2 * TILE, mask=has_bits, other=0) | whole
    fourth = gl.load(at + 3 * TILE, mask=has_bits, other=0) | whole
    return first, second, third, fourth


@gluon.jit
def hide_scores(scores, words, C: gl.constexpr):
    """Scores with -inf where a bit is 0."""
    cols = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, accumulator_layout(C.BLOCK_N)))
    group = (cols // WORD)[None, :]
    word = gl.where(group == 0, words[0][:, None], words[1][:, None])
    word = gl.where(group == 2, words[2][:, None], word)
    word = gl.where(group == 3, words[3][:, None], word)
    return gl.where(((word >> (cols % WORD)[None, :]) & 1) != 0, scores, NEG_INF)
