"""The row statistics of a query tile, computed by idle warps of the backward: [lse * log2(e) | delta - dlse].

delta is the sum of dO * O over a row. TMA loads both tiles into shared memory that no other role uses, because two
warps with 24 registers a thread cannot keep enough loads in flight themselves. Rows past the end and rows without keys
get lse = +inf, as in backward_rows.py.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.releases import aggregate, async_load
from tilewise.backends.hopper.channels import Ring, make_ring
from tilewise.backends.hopper.layouts import slots_shape, tile_at
from tilewise.backends.hopper.primitives import LARGEST_LSE, LOG2E

__all__ = ["RowTiles", "compute_statistics", "load_rows", "make_row_tiles"]

# Rows that two warps reduce at a time, 16 bytes a thread.
ROWS = gl.constexpr(8)


@aggregate
class RowTiles:
    """Buffers for a tile of O and one of dO, and the barriers that guard them."""

    out_smem: gl.shared_memory_descriptor
    dout_smem: gl.shared_memory_descriptor
    ring: Ring

    @gluon.constexpr_function
    def __init__(self, out_smem, dout_smem, ring):
        self.out_smem = out_smem
        self.dout_smem = dout_smem
        self.ring = ring


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
