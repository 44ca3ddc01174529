"""Tile masks in the forward and backward kernels: the key tiles of a query block (the query tiles of a key block) come
from a list instead of a range.

Forward: a block of 128 queries and one or two key tiles are one tile of the mask. A list (see tiles.lists_of) has the
tiles that need a mask first: those with bits, and the last tile of keys, which may not be whole. The kernel visits them
in the loop with a mask, and all others in the loop without one. A list has at least one tile, which hides everything if
the block sees nothing. The producer reads where a list lies and how it begins, and sends that to the consumers.

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
from tilewise.backends.hopper.primitives import NEG_INF, only_seen
from tilewise.backends.hopper.schedule import LIST_WORDS, place_of
from tilewise.backends.hopper.scores import over, quads

TILE, WORD, FULL = gl.constexpr(tiles.TILE), gl.constexpr(tiles.WORD), gl.constexpr(tiles.FULL)
# Words of a tile's bits, and of a list before its entries.
TILE_WORDS, HEADER = gl.constexpr(tiles.WORDS * tiles.TILE), gl.constexpr(tiles.GROUPS_HEADER)

# Key tiles of 64 in a tile of the mask.
HALVES = gl.constexpr(2)


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
def list_at(lists, batch_idx, head, number):
    """A list by its number: of a row of tiles the rank, of a column the column."""
    first = batch_idx.to(gl.int64) * lists.stride_batch + head.to(gl.int64) * lists.stride_head
    return lists.ptr + first + number.to(gl.int64) * lists.stride_row


@gluon.jit
def place_words(lists, tile, sizes):
    """(rank, words for the mailbox) of the block of queries with a number; past the last one, the rank is num_tiles.

    The words are the rank, the block, its item and sequence, its tiles, those with a mask, the first one and its kind.
    """
    WORDS: gl.constexpr = LIST_WORDS
    exists = tile < sizes.num_tiles
    rank, item = place_of(gl.where(exists, tile, 0), sizes, False)
    batch_idx = item // sizes.num_heads
    entries = list_at(lists, batch_idx, item - batch_idx * sizes.num_heads, rank)
    words = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [1], [0]))
    # Where the list has words 1 and 4 to 7.
    at = gl.where(words < 4, 0, gl.where(words < 6, words - 3, words - 2))
    listed = gl.load(entries + at)
    rank = gl.where(exists, rank, sizes.num_tiles)
    listed = gl.where(words == 0, rank, gl.where(words == 2, item, gl.where(words == 3, batch_idx, listed)))
    return rank, listed


@gluon.jit
def send_place(lists, tile, mailbox, at, sizes):
    """Producer: send the words of a block of queries, and return its rank."""
    rank, words = place_words(lists, tile, sizes)
    mailbox.send(at, words)
    return rank


@gluon.jit
def entry_at(entries, index):
    """(tile, kind) of an entry."""
    at = entries + (HEADER + 2 * index)
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def half_at(entries, step):
    """(half of a tile, kind of the tile) of a step over halves."""
    tile, kind = entry_at(entries, step // HALVES)
    return tile * HALVES + step % HALVES, kind


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
def load_words(bits, kind, row, first_word, C: gl.constexpr):
    """The bits of 64 queries from `row` on for BLOCK_N keys from a word of 32 on: all of them in a full tile, none in
    an empty one. Four tensors; for 64 keys the last two are not used.
    """
    rows = gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))
    at = bits + kind.to(gl.int64) * TILE_WORDS + (first_word * TILE + row % TILE + rows)
    has_bits = (kind >= 0) & (rows >= 0)
    # Not combined with what is loaded, which would wait for it.
    whole = gl.where(kind == FULL, -1, rows * 0)
    first = gl.load(at, mask=has_bits, other=whole)
    second = gl.load(at + TILE, mask=has_bits, other=whole)
    third = second
    fourth = second
    if C.BLOCK_N == TILE:
        third = gl.load(at + 2 * TILE, mask=has_bits, other=whole)
        fourth = gl.load(at + 3 * TILE, mask=has_bits, other=whole)
    return first, second, third, fourth


@gluon.jit
def thread_word(word, keys, x):
    """The bits of `keys` keys, 32 at most, in a word of each row, for the elements of `x`, scores in quads. Lowest is
    the bit of a thread's first column of 32.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    some = (1 << min(max(keys, 0), WORD - 1)) - 1
    word = gl.where(keys < WORD, word & some, word)
    threads = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    return over(gl.convert_layout(word, gl.SliceLayout(1, LAYOUT))[:, None] >> (2 * threads)[None, :], x)


@gluon.jit
def hide_scores(scores, words, keys, C: gl.constexpr):
    """Scores with -inf where a bit is 0, and past the first `keys` keys."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    x = quads(scores, BLOCK_N)
    COLUMNS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout))
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout))
    # A thread has two columns in each group of eight, and a word has four groups.
    group = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, COLUMNS))[None, :][:, :, None][:, :, :, None]
    first = thread_word(words[0], keys, x)
    second = thread_word(words[1], keys - WORD, x)
    word = gl.where(group // 4 == 0, first, second)
    if BLOCK_N == TILE:
        word = gl.where(group // 4 == 2, thread_word(words[2], keys - 2 * WORD, x), word)
        word = gl.where(group // 4 == 3, thread_word(words[3], keys - 3 * WORD, x), word)
    if BLOCK_N == TILE:
        # All ones where a pair is seen. Fewer instructions, as for 64 keys, would spill next to two accumulators.
        pair = gl.arange(0, 2, gl.SliceLayout(0, PAIRS))[None, :][:, None, :][:, :, None, :]
        seen = (word << (WORD - 1 - group % 4 * 8 - pair)) >> (WORD - 1)
        hidden = gl.cast(gl.full([1, 1, 1, 1], NEG_INF, gl.float32, x.type.layout), gl.int32, bitcast=True)
        x = gl.cast((gl.cast(x, gl.int32, bitcast=True) & seen) | (hidden & ~seen), gl.float32, bitcast=True)
    else:
        x = only_seen(x, word, BLOCK_N // 2)
    return gl.convert_layout(gl.reshape(x, [64, BLOCK_N]), accumulator_layout(BLOCK_N))
