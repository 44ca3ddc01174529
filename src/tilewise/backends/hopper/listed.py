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
    """The bits by queries, and lists: in the forward of rows of tiles, by (sequence, head, rank), in the backward of
    columns, by (sequence, head, column).
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


@gluon.constexpr_function
def half_layout(queries):
    """Registers of 64 keys x `queries` of an accumulator, as [2, 32, queries]: a warp has keys of one half."""
    wide = [[0, 0, 1 << i] for i in range(3, 7) if 1 << i < queries]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], *wide],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 16, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 32, queries],
    )


@gluon.jit
def load_query_words(bits, kind, m_block, first_key, C: gl.constexpr):
    """The bits of 64 keys from `first_key` on, [2, queries]: a word for 32 keys and a query of a query tile."""
    PARTS: gl.constexpr = TILE // C.BLOCK_M
    LAYOUT: gl.constexpr = gl.SliceLayout(1, half_layout(C.BLOCK_M))
    half = gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))[:, None]
    queries = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))[None, :]
    word = (first_key % TILE // WORD + half) * TILE + (m_block % PARTS * C.BLOCK_M + queries)
    has_bits = (kind >= 0) & (word >= 0)
    return gl.load(bits + kind.to(gl.int64) * TILE_WORDS + word, mask=has_bits, other=-1)


@gluon.jit
def hide_transposed(p, words, first_key, seqlen_k, C: gl.constexpr):
    """P with zeros where the bit of a key (row, 64 from first_key on) and a query (column) is 0, or the key is past the
    end.
    """
    LAYOUT: gl.constexpr = half_layout(C.BLOCK_M)
    keys = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    seen = (words[:, None, :] >> keys) & 1
    p = gl.where(gl.convert_layout(gl.reshape(seen, [64, C.BLOCK_M]), p.type.layout, assert_trivial=True) != 0, p, 0.0)
    if not C.EVEN_K:
        rows = first_key + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_M)))
        p = gl.where((rows < seqlen_k)[:, None], p, 0.0)
    return p


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
