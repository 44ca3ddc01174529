"""What the main backward kernel reads and adds to, made ready beside it by two warps that have nothing else to do.

A head of keys needs the row statistics of its query heads (row_statistics.py) and zeros in their sums of dQ. The row
kernel prepares the first `front_items` heads. All others are prepared in shares: to every tile belongs the part with
the number of its block of its head's query tiles. Whoever takes tile t from the counter prepares the share of tile
t - num_programs + front_items * num_blocks and counts it for its head; the producer of a tile waits until all shares of
its head are counted. Hence sums are cleared, and dO is read, shortly before they are used, and are still in L2.

Nobody waits in a circle: the last share of the head of tile t belongs to a tile less than a wave after t, and the host
sees to it that the front is at least a wave and num_programs long (backward_plan.front_items). So that share went to a
tile with a smaller number than t, which was taken before t, by a CTA that runs, and preparers wait for nobody but TMA.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tilewise.backends.hopper.channels import start
from tilewise.backends.hopper.row_statistics import compute_statistics, load_rows
from tilewise.backends.hopper.schedule import place_of, row_tile_of
from tilewise.backends.hopper.signals import load_acquire, publish

__all__ = ["Progress", "await_prepared", "preparer"]

# Elements that two warps clear at a time: 16 bytes a thread.
PIECE = gl.constexpr(256)


@aggregate
class Progress:
    """Of every head of keys the shares that are prepared, and how many heads were before the launch."""

    counts_ptr: gl.tensor
    front_items: gl.tensor

    @gluon.constexpr_function
    def __init__(self, counts_ptr, front_items):
        self.counts_ptr = counts_ptr
        self.front_items = front_items


@gluon.jit
def clear_tile(sums_ptr, row_tile, C: gl.constexpr):
    """Zeros into the sums of a query tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [2], [0])
    SIZE: gl.constexpr = C.BLOCK_M * C.D
    elements = gl.arange(0, PIECE, LAYOUT)
    zeros = gl.full([PIECE], 0, sums_ptr.dtype.element_ty, LAYOUT)
    at = sums_ptr + gl.to_tensor(row_tile).to(gl.int64) * SIZE
    for _ in range(SIZE // PIECE):
        gl.store(at + elements, zeros)
        at += PIECE


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
            clear_tile(sums_ptr, row_tile + m_block, C)
            if C.STATS_AHEAD:
                stats = stats_ptr + gl.to_tensor(row_tile + m_block).to(gl.int64) * (2 * C.BLOCK_M)
                first_row = gl.to_tensor(query_item).to(gl.int64) * sizes.seqlen_q + row
                compute_statistics(lse_ptr, dlse_ptr, stats, row_tiles, turn, first_row, sizes.seqlen_q - row, C)
                turn = turn.next()
    return item, turn


@gluon.jit
def preparer(
    out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, progress, tiles, sizes, C: gl.constexpr
):
    """One share for every tile that this CTA takes."""
    turn = start(1)
    tile_turn = start(1)
    tile = gl.program_id(0)
    while tile < sizes.num_tiles:
        tiles.wait(tile_turn)
        tile = tiles.word(tile_turn, 0, 2)
        tiles.release(tile_turn)
        tile_turn = tile_turn.next()
        share = tile - gl.num_programs(0) + progress.front_items * sizes.num_blocks
        if share < sizes.num_tiles:
            item, turn = prepare_share(
                share, turn, out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, sizes, C
            )
            publish()
            gl.atomic_add(progress.counts_ptr + item, 1, sem="relaxed")


@gluon.jit
def await_prepared(item, progress, sizes):
    """Producer: wait until all shares of a head are counted."""
    if item >= progress.front_items:
        while load_acquire(progress.counts_ptr + item) < sizes.num_blocks:
            pass
