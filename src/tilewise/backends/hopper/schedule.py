"""Which tile comes next, and which keys it sees: the tile counter, and the device mirror of tilewise.masks.

A persistent CTA starts with the tile of its own number. It takes every further tile from a counter in global memory, so
a CTA with cheap tiles takes more of them. Under a causal mask the heavy query blocks, those with many keys, come first.
Heads are walked in waves whose K and V fit into L2.

Packed sequences have different numbers of blocks. A small kernel lists the blocks first (gpu/work_list.py), heavy ones
first. A tile is then an entry of the list and a head. The producer sends its words through the mailbox, so that no
consumer searches for the sequence. Under a tile mask the forward sends words, too (listed.place_words).

Figures: bench/results/hopper-forward-choices.csv and hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.records import Span, Window
from tilewise.backends.hopper.channels import make_mailbox, start

# Words of a list entry and of the mailbox: tile number, block, head, sequence, first query row, query rows, first key
# row, keys. The list leaves the number unset, and also the head unless every head has entries of its own.
LIST_WORDS = gl.constexpr(8)
# Slots of the mailbox: consumers read a tile's words until they finish it, and the producer is up to two tiles ahead.
LIST_SLOTS = gl.constexpr(3)


class Sizes(NamedTuple):
    """The sizes of a launch, on which no kernel is specialised. An item is a (batch, head) pair; packed, a head.

    Packed: num_blocks and num_tiles are upper bounds of the list on the device. row_tiles: query tiles of row
    statistics (backward) that an item has space for.
    """

    num_heads: int
    group_size: int
    num_items: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    num_blocks: int
    num_tiles: int
    items_per_wave: int
    row_tiles: int
    window: Window


@gluon.jit
def place_of(tile, sizes, LAST_FIRST: gl.constexpr, ENDING: gl.constexpr = 1):
    """(block, item) of a tile number: waves of `items_per_wave` items; a wave walks one block of all its items, then
    the next block.

    ENDING: how many of the last waves are merged into one.
    """
    block, item = _place(tile, sizes.num_blocks, sizes, ENDING)
    if LAST_FIRST:
        block = sizes.num_blocks - 1 - block
    return block, item


@gluon.jit
def _place(tile, num_blocks, sizes, ENDING: gl.constexpr = 1):
    wave_tiles = sizes.items_per_wave * num_blocks
    wave = tile // wave_tiles
    if ENDING > 1:
        wave = min(wave, max(gl.cdiv(sizes.num_items, sizes.items_per_wave) - ENDING, 0))
    rank = tile - wave * wave_tiles
    first_item = wave * sizes.items_per_wave
    left = sizes.num_items - first_item
    if ENDING > 1:
        wave_items = gl.where(left > ENDING * sizes.items_per_wave, sizes.items_per_wave, left)
    else:
        wave_items = min(left, sizes.items_per_wave)
    block = rank // wave_items
    item = first_item + (rank - block * wave_items)
    return block, item


@gluon.jit
def make_tiles(NUM_CONSUMERS: gl.constexpr, C: gl.constexpr):
    """The mailbox for tiles: a number or, if places are sent, the words of a list entry."""
    if C.SENDS_PLACES:
        return make_mailbox(NUM_CONSUMERS, LIST_SLOTS, LIST_WORDS)
    else:
        return make_mailbox(NUM_CONSUMERS, 1, 1)


@gluon.jit
def first_turn(C: gl.constexpr):
    """The cursor with which a role starts in the mailbox."""
    if C.SENDS_PLACES:
        return start(LIST_SLOTS)
    else:
        return start(1)


@gluon.jit
def first_tile(tiles, at, C: gl.constexpr):
    """Consumer: the CTA's first tile."""
    tile = gl.program_id(0)
    if C.SENDS_PLACES:
        tiles.wait(at)
        tile = tiles.word(at, 0, 4)
    return tile


@gluon.jit
def following_tile(tiles, at, C: gl.constexpr):
    """Consumer: the next tile and its cursor in the mailbox. Releases this tile's words."""
    if C.SENDS_PLACES:
        tiles.release(at)
        following = at.next()
        tiles.wait(following)
        return tiles.word(following, 0, 4), following
    else:
        return tiles.receive(at), at.next()


@gluon.jit
def announce(tile, num_entries, work_ptr, tiles, at, sizes, BY_HEAD: gl.constexpr = False):
    """Producer: send a tile of the list; returns its number, or sizes.num_tiles past the list's end."""
    number, words = listed_words(tile, num_entries, work_ptr, sizes, BY_HEAD)
    tiles.send(at, words)
    return number


@gluon.jit
def listed_words(tile, num_entries, work_ptr, sizes, BY_HEAD: gl.constexpr = False):
    """(number, words) of a tile of the list; past the list's end the number is sizes.num_tiles.

    BY_HEAD: every head has entries of its own, and a tile is one entry.
    """
    WORDS: gl.constexpr = LIST_WORDS
    words = gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [1], [0]))
    if BY_HEAD:
        exists = tile < num_entries
        listed = gl.load(work_ptr + (tile + 1) * WORDS + words, mask=exists & (words >= 0), other=0)
        number = gl.where(exists, tile, sizes.num_tiles)
        return number, gl.where(words == 0, number, listed)
    else:
        num_tiles = num_entries * sizes.num_items
        exists = tile < num_tiles
        entry, head = _place(gl.where(exists, tile, 0), max(num_entries, 1), sizes)
        listed = gl.load(work_ptr + (entry + 1) * WORDS + words, mask=exists & (words >= 0), other=0)
        number = gl.where(exists, tile, sizes.num_tiles)
        return number, gl.where(words == 0, number, gl.where(words == 2, head, listed))


@gluon.jit
def listed_rows(tile, work_ptr):
    """(block, head, span of queries, number of keys) of a tile in a list with entries for every head."""
    WORDS: gl.constexpr = LIST_WORDS
    at = work_ptr + (tile + 1) * WORDS
    queries = Span(gl.load(at + 3), gl.load(at + 4), gl.load(at + 5))
    return gl.load(at + 1), gl.load(at + 2), queries, gl.load(at + 7)


@gluon.jit
def place_at(
    tile, tiles, at, sizes, LAST_FIRST: gl.constexpr, NUM_WARPS: gl.constexpr, C: gl.constexpr,
    ENDING: gl.constexpr = 1,
):  # fmt: skip
    """(block, item) of a tile: from its words at `at` in the mailbox or from its number."""
    if C.SENDS_PLACES:
        return tiles.word(at, 1, NUM_WARPS), tiles.word(at, 2, NUM_WARPS)
    else:
        return place_of(tile, sizes, LAST_FIRST, ENDING)


@gluon.jit
def spans_at(item, tiles, at, sizes, NUM_WARPS: gl.constexpr, C: gl.constexpr):
    """(head, queries, keys) of a tile; the last two are Spans."""
    if C.IS_VARLEN:
        batch_idx = tiles.word(at, 3, NUM_WARPS)
        queries = Span(batch_idx, tiles.word(at, 4, NUM_WARPS), tiles.word(at, 5, NUM_WARPS))
        return item, queries, Span(batch_idx, tiles.word(at, 6, NUM_WARPS), tiles.word(at, 7, NUM_WARPS))
    else:
        batch_idx = tiles.word(at, 3, NUM_WARPS) if C.SENDS_PLACES else item // sizes.num_heads
        head = item - batch_idx * sizes.num_heads
        return head, Span(batch_idx, 0, sizes.seqlen_q), Span(batch_idx, 0, sizes.seqlen_k)


@gluon.jit
def own_tile(work_ptr, sizes, LAST_FIRST: gl.constexpr, C: gl.constexpr):
    """(block, item, head, queries, keys) of the tile with the program's number; empty spans past the list's end."""
    tile = gl.program_id(0)
    if C.IS_VARLEN:
        WORDS: gl.constexpr = LIST_WORDS
        num_entries = gl.load(work_ptr)
        exists = tile < num_entries * sizes.num_items
        entry, head = _place(gl.where(exists, tile, 0), max(num_entries, 1), sizes)
        at = work_ptr + (entry + 1) * WORDS
        batch_idx = gl.load(at + 3, mask=exists, other=0)
        queries = Span(batch_idx, gl.load(at + 4, mask=exists, other=0), gl.load(at + 5, mask=exists, other=0))
        keys = Span(batch_idx, gl.load(at + 6, mask=exists, other=0), gl.load(at + 7, mask=exists, other=0))
        return gl.load(at + 1, mask=exists, other=0), head, head, queries, keys
    else:
        block, item = place_of(tile, sizes, LAST_FIRST)
        batch_idx = item // sizes.num_heads
        head = item - batch_idx * sizes.num_heads
        return block, item, head, Span(batch_idx, 0, sizes.seqlen_q), Span(batch_idx, 0, sizes.seqlen_k)


@gluon.jit
def row_tile_of(item, q_span, sizes, C: gl.constexpr):
    """Index of the first row-statistics tile of a query item; every packed sequence starts on a tile of its own."""
    if C.IS_VARLEN:
        return item * sizes.row_tiles + q_span.start // C.BLOCK_M + q_span.sequence
    elif C.IS_LISTED:  # whole tiles of the mask
        return item * (gl.cdiv(sizes.seqlen_q, 128) * (128 // C.BLOCK_M))
    else:  # equals item * sizes.row_tiles, but the hot loops of the backward spill less with this expression
        return item * gl.cdiv(sizes.seqlen_q, C.BLOCK_M)


@gluon.jit
def right_of(sizes, C: gl.constexpr):
    """Keys visible right of the diagonal. A causal mask knows it at compile time, which saves a register."""
    if C.IS_CAUSAL:
        return 0
    else:
        return sizes.window.right


@gluon.jit
def key_tiles(block, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """(last key tile that a query block sees, number of key tiles down to the first one).

    The number is at least one: a block that sees nothing runs one fully masked tile and writes zeros.
    """
    BLOCK_M: gl.constexpr = 64 * C.NUM_WARPGROUPS
    stop = gl.cdiv(seqlen_k, C.BLOCK_N)
    if C.HAS_RIGHT or C.IS_VARLEN:
        if C.HAS_RIGHT:
            edge = (block + 1) * BLOCK_M + (seqlen_k - seqlen_q) + right_of(sizes, C)
            stop = min(stop, gl.cdiv(edge, C.BLOCK_N))
        stop = max(stop, 1)
    if C.HAS_LEFT:
        begin = max(block * BLOCK_M + (seqlen_k - seqlen_q) - sizes.window.left, 0) // C.BLOCK_N
        return stop - 1, max(stop - begin, 1)
    else:
        return stop - 1, stop


@gluon.jit
def hidden_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """Tiles, counted from the rightmost one, that none of 64 rows from `row` on sees; at most count - 1."""
    edge = min(row + 64 + seqlen_k - seqlen_q + right_of(sizes, C), seqlen_k)
    return min(max(last + 1 - gl.cdiv(max(edge, 0), C.BLOCK_N), 0), count - 1)


@gluon.jit
def whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C: gl.constexpr, SEEN: gl.constexpr = False):
    """(begin, end) of the tiles, counted from the rightmost one, that need no mask for 64 rows from `row` on.

    SEEN: in addition, all of these rows have seen a key in the tiles before.
    """
    begin = 1
    end = count
    if C.HAS_RIGHT:
        # Tile j is whole on the right iff (j + 1) * BLOCK_N <= min(row + 1 + diagonal + window_right, seqlen_k). The
        # first row sees a key right of the tile iff (j + 1) * BLOCK_N is less than the first of these.
        FURTHER: gl.constexpr = 0 if SEEN else 1
        whole = max(min(row + FURTHER + seqlen_k - seqlen_q + right_of(sizes, C), seqlen_k), 0) // C.BLOCK_N
        begin = min(max(last + 1 - whole, 1), count)
    if C.HAS_LEFT:
        # Tile j is whole on the left iff j * BLOCK_N >= row + 63 + diagonal - window_left.
        first = gl.cdiv(max(row + 63 + seqlen_k - seqlen_q - sizes.window.left, 0), C.BLOCK_N)
        end = min(max(last + 1 - first, begin), count)
    return begin, end


@gluon.jit
def seen_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """(hidden, begin, end) of tiles counted from the rightmost one, for 64 rows from `row` on.

    The first `hidden` tiles lie right of all that these rows see; begin .. end-1 need no mask. IS_LAZY: in addition,
    all of these rows have seen a key before `begin`.
    """
    FIRST_MASKED: gl.constexpr = 1 if C.IS_LAZY else 0
    hidden = 0
    end = count
    whole = seqlen_k // C.BLOCK_N
    if C.HAS_RIGHT:
        edge = row + 1 + seqlen_k - seqlen_q + right_of(sizes, C)  # the first row sees so many keys, the last 63 more
        whole = max(min(edge - FIRST_MASKED, seqlen_k), 0) // C.BLOCK_N
        seen = gl.cdiv(max(min(edge + 63, seqlen_k), 0), C.BLOCK_N)
        hidden = min(max(last + 1 - seen, 0), count)
    begin = min(max(last + 1 - whole, hidden + FIRST_MASKED), count)
    if C.HAS_LEFT:
        first = gl.cdiv(max(row + 63 + seqlen_k - seqlen_q - sizes.window.left, 0), C.BLOCK_N)
        end = min(max(last + 1 - first, begin), count)
    return hidden, begin, end


@gluon.jit
def next_tile(counter_ptr, sizes):
    """Take a tile from the counter."""
    return take_tile(counter_ptr, sizes.num_tiles)


@gluon.jit
def take_tile(counter_ptr, num_tiles, RELAXED: gl.constexpr = False):
    """Take a tile number from the counter; the first num_programs numbers are the programs' own.

    A launch takes exactly num_tiles times, once after every tile. Whoever takes last finds num_tiles - 1 and resets the
    counter to 0 for the next launch.
    """
    ORDER: gl.constexpr = "relaxed" if RELAXED else "acq_rel"
    taken = gl.atomic_add(counter_ptr, 1, sem=ORDER)
    if taken == num_tiles - 1:
        gl.atomic_xchg(counter_ptr, 0, sem=ORDER)
    return taken + gl.num_programs(0)


@gluon.jit
def take_any(counter_ptr, num_tiles):
    """Take a tile number from a counter that hands out all numbers, the first ones too.

    Every program takes one number past the end, so the last take finds num_tiles + num_programs - 1 and resets it.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if taken == num_tiles + gl.num_programs(0) - 1:
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return taken


@gluon.jit
def query_tiles(first, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """(begin, end) of the query tiles that see any of BLOCK_N keys from `first` on."""
    end = gl.cdiv(seqlen_q, C.BLOCK_M)
    begin = 0
    if C.HAS_RIGHT:
        begin = min(max(first - (seqlen_k - seqlen_q) - right_of(sizes, C), 0) // C.BLOCK_M, end)
    if C.HAS_LEFT:
        last = first + (C.BLOCK_N - 1) - (seqlen_k - seqlen_q) + sizes.window.left
        end = max(min(end, gl.cdiv(max(last + 1, 0), C.BLOCK_M)), begin)
    return begin, end


@gluon.jit
def first_seeing_tile(key, lo, hi, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """The first of the query tiles lo .. hi-1 that sees this key or a later one."""
    edge = max(key - (seqlen_k - seqlen_q) - right_of(sizes, C), 0)
    return min(max(edge // C.BLOCK_M, lo), hi)


@gluon.jit
def whole_query_tiles(first, lo, hi, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """(begin, end) of the query tiles among lo .. hi-1 that see all of BLOCK_N keys from `first` on."""
    begin = lo
    end = hi
    if C.HAS_RIGHT:
        # Tile m is whole on the right iff first + BLOCK_N - 1 <= m * BLOCK_M + diagonal + window_right.
        edge = max(first + (C.BLOCK_N - 1) - (seqlen_k - seqlen_q) - right_of(sizes, C), 0)
        begin = min(max(gl.cdiv(edge, C.BLOCK_M), lo), hi)
    if C.HAS_LEFT:
        # Tile m is whole on the left iff first >= m * BLOCK_M + BLOCK_M - 1 + diagonal - window_left.
        edge = max(first - (seqlen_k - seqlen_q) + sizes.window.left + 1, 0)
        end = min(max(edge // C.BLOCK_M, begin), hi)
    if not C.EVEN_K:
        begin = gl.where(first + C.BLOCK_N > seqlen_k, hi, begin)
        end = gl.where(first + C.BLOCK_N > seqlen_k, hi, end)
    return begin, end
