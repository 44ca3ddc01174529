"""What the main backward kernel reads and adds to, made ready beside it by two warps that have nothing else to do.

A head of keys needs the row statistics of its query heads (row_statistics.py) and zeros in their sums of dQ. The row
kernel prepares the first `front_items` heads. All others are prepared in shares: to every tile belongs the part with
the number of its block of its head's query tiles. Whoever takes tile t from the counter prepares the share of tile
t - num_programs + front_items * num_blocks (without num_programs, where the first tiles come from the counter as well)
and counts it for its head; the producer of a tile waits until all shares of its head are counted. Hence sums are
cleared, and dO is read, shortly before they are used, and are still in L2. Where dQ is finished here, too
(finishing.py), zeros come from there.

Nobody waits in a circle: the last share of the head of tile t belongs to a tile less than a wave after t, and the host
sees to it that the front is at least a wave and num_programs long (backward_plan.front_items). So that share went to a
tile with a smaller number than t, which was taken before t, by a CTA that runs. Preparers wait for TMA alone, but where
they finish dQ, too: for whom, finishing.py says.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.channels import start
from tilewise.backends.hopper.finishing import clear_tile, finish_share
from tilewise.backends.hopper.row_statistics import compute_statistics, load_rows
from tilewise.backends.hopper.schedule import place_of, row_tile_of
from tilewise.backends.hopper.signals import load_acquire, publish

__all__ = ["Ahead", "await_prepared", "preparer"]


class Ahead(NamedTuple):
    """How far ahead heads are prepared, how far behind finished, and where dQ lies: strides and width in 8 elements."""

    front_items: int
    ring_items: int
    finished_items: int
    lag: int
    batch_stride: int
    head_stride: int
    row_stride: int
    head_units: int


@gluon.jit
def prepare_share(
    share, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, sizes, C: gl.constexpr
):
    """The query tiles of one share, of every query head; (head of keys, turn of the row tiles)."""
    block, item = place_of(share, sizes, False)
    batch_idx = item // sizes.num_heads
    first_head = (item - batch_idx * sizes.num_heads) * sizes.group_size
    count = gl.cdiv(sizes.row_tiles, sizes.num_blocks)
    begin = block * count
    end = min(begin + count, sizes.row_tiles)
    for g in range(sizes.group_size):
        query_item = item * sizes.group_size + g
        row_tile = row_tile_of(query_item, (batch_idx, 0, sizes.seqlen_q), sizes, C)
        for m_block in range(begin, end):
            row = m_block * C.BLOCK_M
            if C.STATS_AHEAD:
                load_rows(out_desc, dout_desc, row_tiles, turn, batch_idx, first_head + g, row)
            if not C.FINISHES:
                clear_tile(sums_ptr, row_tile + m_block, C)
            if C.STATS_AHEAD:
                stats = stats_ptr + gl.to_tensor(row_tile + m_block).to(gl.int64) * (2 * C.BLOCK_M)
                first_row = gl.to_tensor(query_item).to(gl.int64) * sizes.seqlen_q + row
                compute_statistics(lse_ptr, dlse_ptr, stats, row_tiles, turn, first_row, sizes.seqlen_q - row, C)
                turn = turn.next()
    return item, turn


@gluon.jit
def preparer(
    out_desc, dout_desc, dq_desc, lse_ptr, dlse_ptr, dq_ptr, stats_ptr, sums_ptr, scale, row_tiles, counts_ptr, ahead,
    tiles, sizes, C: gl.constexpr,
):  # fmt: skip
    """For every tile that this CTA takes, a share of a head that comes later and one of a head that is done."""
    turn = start(1)
    tile_turn = start(1)
    tile = gl.program_id(0) * 0
    while tile < sizes.num_tiles:
        tiles.wait(tile_turn)
        tile = tiles.word(tile_turn, 0, 2)
        tiles.release(tile_turn)
        tile_turn = tile_turn.next()
        share = tile + ahead.front_items * sizes.num_blocks
        if not C.FINISHES:  # the first tiles are not taken from the counter
            share -= gl.num_programs(0)
        if share < sizes.num_tiles:
            item, turn = prepare_share(
                share, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, sizes, C
            )
            publish()
            gl.atomic_add(counts_ptr + item, 1, sem="relaxed")
        if C.FINISHES and tile >= ahead.lag:
            turn = finish_share(
                tile - ahead.lag, turn, dq_desc, dq_ptr, sums_ptr, scale, row_tiles, counts_ptr, ahead, sizes, C
            )


@gluon.jit
def await_prepared(item, counts_ptr, ahead, sizes, C: gl.constexpr):
    """Producer: wait until all shares of a head are counted."""
    shares = gl.where(item >= ahead.front_items, sizes.num_blocks, 0)
    if C.FINISHES:
        shares += gl.where(item >= ahead.ring_items, sizes.num_blocks, 0)
    if shares > 0:
        while load_acquire(counts_ptr + item) < shares:
            pass
