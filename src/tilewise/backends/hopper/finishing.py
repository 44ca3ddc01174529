"""The two warps that prepare later heads also convert dQ from its sums, inside the main backward kernel.

Sums live in a ring of `ring_items` heads, which stays in L2 if it is small. Each warpgroup of a tile adds one to its
head's count once TMA has added all of its blocks. Whoever takes tile t from the counter converts the share of tile
t - lag: block b of a head owns the b-th part of the head's query tiles. It waits until all tiles of the head are done,
loads the sums by TMA (24 registers a thread keep too few loads in flight), stores dQ scaled and rounded, and writes
zeros for the head that uses this slot of the ring next, which waits for them (preparing.await_prepared).

Deadlock-free: everything waits only for lower tile numbers. All tiles come from the counter, so they are taken in
order, by CTAs that run. A share waits for the tiles of its head, which lie less than a wave after t - lag, and the lag
is at least a wave. A tile of head h waits for shares of head h - ring_items. These went to tiles less than a wave and
the lag after that head's first tile, and the ring is at least that long (backward_plan.ring_items). A CTA's producer
sends tile t to the preparers once they are done with its previous tile, whose number is smaller. The last heads have
shares without a number; backward_rows.finish_queries_kernel converts them.

Figures: bench/results/hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.releases import async_load, barrier, reinterpreted
from tilewise.backends.hopper.primitives import await_writes, load_acquire, order_copies, publish
from tilewise.backends.hopper.schedule import place_of

# Elements that two warps clear at a time: 16 bytes a thread.
PIECE = gl.constexpr(256)
# Rows of a block in register order that two warps read at a time: 16 columns of 64 rows of dQ.
ROWS = gl.constexpr(32)


@gluon.jit
def ring_tile(item, g, ahead, sizes):
    """Index of a query head's first tile in the ring of sums; item: its K/V head, g: its number in the group."""
    return ((item - item // ahead.ring_items * ahead.ring_items) * sizes.group_size + g) * sizes.row_tiles


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
def count_done(item, counts_ptr, sizes):
    """Consumer: count this warpgroup's tile for its head once all its additions to dQ have arrived.

    Its last two TMA stores, dV and dK, may still be in flight.
    """
    await_writes(2)
    barrier()
    gl.atomic_add(counts_ptr + sizes.num_items + item, 1, sem="release")


@gluon.jit
def load_sums(dq_desc, tiles, at, row_tile):
    """Start the copies of a query tile's sums into the preparer's buffers for O and dO."""
    ready = tiles.ring.acquire(at, 2 * dq_desc.block_type.nbytes)
    for part in gl.static_range(2):
        buffer = tiles.out_smem if part == 0 else tiles.dout_smem
        sums = reinterpreted(buffer, dq_desc.dtype, [1, 128, 32], dq_desc.layout)
        async_load(dq_desc, [(row_tile * 2 + part) * 128, 0], ready, sums.index(0))


@gluon.jit
def store_block(sums, dq, rows_left, scale, ahead, PART: gl.constexpr, C: gl.constexpr):
    """Store rows of dQ from a 64 x 64 block in register order; dq: address of the query tile's first row."""
    # A thread has 8 columns of rows 8 apart; lanes read without bank conflicts and write sectors of 32 bytes.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 4], [0, 8], [0, 2]], [[0, 16], [1, 0], [2, 0], [16, 0], [4, 0]], [[8, 0]], [], [32, 32]
    )
    FIRST_ROW: gl.constexpr = PART * 64 // C.D * 64
    for i in gl.static_range(128 // ROWS):
        x = (sums.slice(i * ROWS, ROWS, dim=0).load(LAYOUT) * scale).to(dq.dtype.element_ty)
        x = gl.reshape(gl.permute(gl.reshape(x, [2, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5)), [64, 16])
        rows = FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        cols = PART * 64 % C.D + i * 16 + gl.arange(0, 16, gl.SliceLayout(0, x.type.layout))
        keep = (rows < rows_left)[:, None] & (cols < ahead.head_units * 8)[None, :]
        gl.store(dq + (rows * (ahead.row_stride * 8))[:, None] + cols[None, :], x, mask=keep)


@gluon.jit
def finish_share(tile, turn, dq_desc, dq_ptr, sums_ptr, scale, row_tiles, counts_ptr, ahead, sizes, C: gl.constexpr):
    """Convert the query tiles that belong to a tile; returns the next cursor of row_tiles."""
    block, item = place_of(tile, sizes, False, C.ENDING)
    if item < ahead.finished_items:
        while load_acquire(counts_ptr + sizes.num_items + item) < 2 * sizes.num_blocks:
            pass
        order_copies()
        batch_idx = item // sizes.num_heads
        first_head = (item - batch_idx * sizes.num_heads) * sizes.group_size
        count = gl.cdiv(sizes.row_tiles, sizes.num_blocks)
        begin = block * count
        for g in range(sizes.group_size):
            first = ring_tile(item, g, ahead, sizes)
            place = gl.to_tensor(batch_idx * ahead.batch_stride + (first_head + g) * ahead.head_stride).to(gl.int64)
            for m_block in range(begin, min(begin + count, sizes.row_tiles)):
                load_sums(dq_desc, row_tiles, turn, first + m_block)
                row = m_block * C.BLOCK_M
                row_tiles.ring.wait(turn)
                if dq_ptr is not None:
                    dq = dq_ptr + (place + gl.to_tensor(row).to(gl.int64) * ahead.row_stride) * 8
                    for part in gl.static_range(2):
                        buffer = row_tiles.out_smem if part == 0 else row_tiles.dout_smem
                        sums = reinterpreted(buffer, dq_desc.dtype, [1, 128, 32], dq_desc.layout)
                        store_block(sums.index(0), dq, sizes.seqlen_q - row, scale, ahead, part, C)
                row_tiles.ring.release(turn)
                turn = turn.next()
                clear_tile(sums_ptr, first + m_block, C)
        publish()
        if item + ahead.ring_items < sizes.num_items:
            gl.atomic_add(counts_ptr + item + ahead.ring_items, 1, sem="relaxed")
    return turn
