"""Two otherwise idle warps of the main backward kernel prepare the rows of later heads.

A K/V head needs the row statistics of its query heads and zeros in their sums of dQ.
prepare_rows_kernel prepares the first `front_items` heads, the lead. All others are prepared in shares. A share belongs
to a tile: block b of a head owns the b-th part of the head's query tiles. Whoever takes tile t from the counter
prepares the share of tile t - num_programs + front_items * num_blocks and counts it for that share's head. (Without
num_programs where the first tiles come from the counter too.) The producer of a tile waits until all shares of its head
are counted. So sums are cleared and dO is read shortly before they are used, while they are still in L2.

Deadlock-free: each tile waits only for shares that were handed out with lower-numbered tiles. The last share of the
head of tile t belongs to a tile less than a wave after t, and the lead is at least the largest wave plus num_programs
(backward_plan.front_items). So the share went to a tile with a smaller number than t, which was taken earlier, by a CTA
that runs. Preparers themselves wait only for TMA.

Packed: a (sequence, head) pair takes the role of a head, a list entry is a tile, and all tiles come from the counter. A
share is prepared `front_tiles` numbers before its tile: as many as heads that are walked together may have, and a round
of CTAs (backward_plan.front_tiles). Only the device knows which pairs this serves, and marks them
(work_list.mark_beside). Not served are the pairs at the start of the list, and a pair whose last share would be handed
out after its first tile, because pairs that are walked together with it have more entries. prepare_rows_kernel prepares
those.

The row statistics of a query tile are [lse * log2(e) | delta - dlse].
delta is the sum of dO * O over a row. TMA loads both tiles into shared memory that no other role uses, because two
warps with 24 registers a thread cannot keep enough loads in flight themselves. Rows past the end and rows without keys
get lse = +inf, as in backward_rows.py.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.records import Span
from tilewise.backends.gpu.releases import aggregate, async_load
from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.layouts import slots_shape, tile_at
from tilewise.backends.hopper.primitives import LARGEST_LSE, LOG2E, load_acquire, publish
from tilewise.backends.hopper.schedule import first_turn, listed_rows, place_of, row_tile_of

# Elements that two warps clear at a time: 16 bytes a thread.
PIECE = gl.constexpr(256)


class Ahead(NamedTuple):
    """The lead of preparation, in K/V heads and in tiles."""

    front_items: int
    front_tiles: int


@gluon.jit
def clear_tile(sums_ptr, row_tile, C: gl.constexpr):
    """Zeros into the sums of a query tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [2], [0])
    SIZE: gl.constexpr = C.BLOCK_M * C.D
    elements = gl.arange(0, PIECE, LAYOUT)
    zeros = gl.full([PIECE], 0, sums_ptr.dtype.element_ty, LAYOUT)
    at = sums_ptr + gl.to_tensor(row_tile).to(gl.int64) * SIZE
    for _ in range(SIZE // PIECE):
        gl.store(at + elements, zeros, eviction_policy="evict_last")  # TMA adds to them soon: keep them in L2
        at += PIECE


@gluon.jit
def prepare_tiles(
    block, num_blocks, item, kv_head, span, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr,
    row_tiles, sizes, C: gl.constexpr,
):  # fmt: skip
    """Prepare the query tiles that belong to one of `num_blocks` key blocks, of every query head of the group; returns
    the next cursor of row_tiles.
    """
    seqlen_q = span.length
    num_tiles = gl.cdiv(seqlen_q, C.BLOCK_M) if C.IS_VARLEN else sizes.row_tiles
    count = gl.cdiv(num_tiles, num_blocks)
    begin = block * count
    end = min(begin + count, num_tiles)
    for g in range(sizes.group_size):
        query_item = item * sizes.group_size + g
        row_tile = row_tile_of(query_item, span, sizes, C)
        for m_block in range(begin, end):
            row = m_block * C.BLOCK_M
            if C.STATS_AHEAD:
                load_rows(out_desc, dout_desc, row_tiles, turn, span, kv_head * sizes.group_size + g, row, C)
            clear_tile(sums_ptr, row_tile + m_block, C)
            if C.STATS_AHEAD:
                stats = stats_ptr + gl.to_tensor(row_tile + m_block).to(gl.int64) * (2 * C.BLOCK_M)
                rows = sizes.total_q if C.IS_VARLEN else sizes.seqlen_q
                first_row = gl.to_tensor(query_item).to(gl.int64) * rows + (span.start + row)
                compute_statistics(lse_ptr, dlse_ptr, stats, row_tiles, turn, first_row, seqlen_q - row, C)
                turn = turn.next()
    return turn


@gluon.jit
def prepare_share(
    share, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, counts_ptr, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """Prepare and count one share of a dense head; returns the next cursor of row_tiles."""
    block, item = place_of(share, sizes, False, C.ENDING)
    batch_idx = item // sizes.num_heads
    span = Span(batch_idx, 0, sizes.seqlen_q)
    turn = prepare_tiles(
        block, sizes.num_blocks, item, item - batch_idx * sizes.num_heads, span, turn, out_desc, dout_desc, lse_ptr,
        dlse_ptr, stats_ptr, sums_ptr, row_tiles, sizes, C)  # fmt: skip
    publish()
    gl.atomic_add(counts_ptr + item, 1, sem="release")
    return turn


@gluon.jit
def prepare_listed(
    share, work_ptr, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, counts_ptr, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """Prepare and count one share of a packed (sequence, head), if that is marked for it; returns the next cursor."""
    block, head, span, num_keys = listed_rows(share, work_ptr)
    counts = counts_of(span.sequence, head, counts_ptr, sizes)
    if gl.load(counts) != 0:
        turn = prepare_tiles(
            block, gl.cdiv(num_keys, C.BLOCK_N), head, head, span, turn, out_desc, dout_desc, lse_ptr, dlse_ptr,
            stats_ptr, sums_ptr, row_tiles, sizes, C)  # fmt: skip
        publish()
        gl.atomic_add(counts + 1, 1, sem="release")
    return turn


@gluon.jit
def counts_of(sequence, head, counts_ptr, sizes):
    """Address of two words of a packed (sequence, head): whether it is prepared here, and how many shares are done."""
    return counts_ptr + (sequence * sizes.num_items + head) * 2


@gluon.jit
def preparer(
    out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, counts_ptr, work_ptr, ahead, tiles, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """For every tile that this CTA takes: prepare a share of a later head."""
    turn = start(1)
    tile_turn = first_turn(C)
    tile = gl.program_id(0) * 0
    num_tiles = sizes.num_tiles
    if C.IS_VARLEN:
        num_tiles = gl.load(work_ptr)
    while tile < sizes.num_tiles:
        tiles.wait(tile_turn)
        tile = tiles.word(tile_turn, 0, 2)
        tiles.release(tile_turn)
        tile_turn = tile_turn.next()
        share = tile + ahead.front_tiles
        if not C.IS_VARLEN:  # the first tiles are not taken from the counter
            share -= gl.num_programs(0)
        if share < num_tiles:
            if C.IS_VARLEN:
                turn = prepare_listed(
                    share, work_ptr, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles,
                    counts_ptr, sizes, C)  # fmt: skip
            else:
                turn = prepare_share(
                    share, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, counts_ptr,
                    sizes, C)  # fmt: skip


@gluon.jit
def await_prepared(item, counts_ptr, ahead, sizes):
    """Producer: wait until all shares of a head are counted."""
    if item >= ahead.front_items:
        while load_acquire(counts_ptr + item) < sizes.num_blocks:
            pass


@gluon.jit
def await_listed(head, q_span, kv_span, counts_ptr, sizes, C: gl.constexpr):
    """Producer: wait until all shares of a head of a packed sequence are counted."""
    counts = counts_of(q_span.sequence, head, counts_ptr, sizes)
    if gl.load(counts) != 0:
        while load_acquire(counts + 1) < gl.cdiv(kv_span.length, C.BLOCK_N):
            pass


# Rows that two warps reduce at a time, 16 bytes a thread.
ROWS = gl.constexpr(8)


@aggregate
class RowTiles:
    """Buffers for a tile of O and one of dO, and the barriers that guard them."""

    out_smem: gl.shared_memory_descriptor
    dout_smem: gl.shared_memory_descriptor
    ring: Ring


@gluon.jit
def make_row_tiles(dout_desc, C: gl.constexpr):
    """Allocate the buffers. The caller must fence before the roles start."""
    SHAPE: gl.constexpr = slots_shape(1, C.BLOCK_M, C.D, C.IS_VARLEN)
    out_smem = gl.allocate_shared_memory(dout_desc.dtype, SHAPE, dout_desc.layout)
    dout_smem = gl.allocate_shared_memory(dout_desc.dtype, SHAPE, dout_desc.layout)
    return RowTiles(out_smem, dout_smem, make_ring(1, 1))


@gluon.jit
def load_rows(out_desc, dout_desc, tiles, at, span, head, row, C: gl.constexpr):
    """Start the copies of a tile of O and dO."""
    ready = tiles.ring.acquire(at, 2 * dout_desc.block_type.nbytes)
    place = tile_at(span, head, row, 0, C.IS_VARLEN)
    async_load(out_desc, place, ready, tiles.out_smem.index(0))
    async_load(dout_desc, place, ready, tiles.dout_smem.index(0))


@gluon.jit
def partial_sums(out, dout, STEP: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of 8 products of O and dO: a thread's part of a row takes one register instead of 8 of its 24."""
    o = out.slice(STEP * ROWS, ROWS, dim=0).slice(HALF * 64, 64, dim=1).load(LAYOUT)
    do = dout.slice(STEP * ROWS, ROWS, dim=0).slice(HALF * 64, 64, dim=1).load(LAYOUT)
    return gl.sum(gl.reshape(o.to(gl.float32) * do.to(gl.float32), [ROWS, 8, 8]), 2)


@gluon.jit
def compute_statistics(lse_ptr, dlse_ptr, stats_ptr, tiles, at, first_row, left, C: gl.constexpr):
    """Write a tile's statistics to stats_ptr; first_row: the tile's first row in lse; left: rows up to the end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    FEW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    out = tiles.out_smem.index(0).reshape([C.BLOCK_M, C.D])
    dout = tiles.dout_smem.index(0).reshape([C.BLOCK_M, C.D])
    rows = gl.arange(0, C.BLOCK_M, ALL)
    lse = gl.load(lse_ptr + first_row + rows, mask=rows < left, other=float("inf"))
    gl.store(stats_ptr + rows, gl.where(gl.abs(lse) > LARGEST_LSE, float("inf"), lse) * LOG2E)
    tiles.ring.wait(at)
    for i in gl.static_range(C.BLOCK_M // ROWS):
        sums = partial_sums(out, dout, i, 0, LAYOUT)
        if C.D == 128:
            sums += partial_sums(out, dout, i, 1, LAYOUT)
        delta = gl.convert_layout(gl.sum(sums, 1), FEW)
        few = i * ROWS + gl.arange(0, ROWS, FEW)
        if dlse_ptr is not None:
            delta -= gl.load(dlse_ptr + first_row + few, mask=few < left, other=0.0)
        gl.store(stats_ptr + C.BLOCK_M + few, delta)
    tiles.ring.release(at)
