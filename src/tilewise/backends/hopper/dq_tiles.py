"""How tiles of dQ leave the backward kernels: TMA adds 64 x 64 blocks to an accumulator in global memory.

The accumulator keeps each block in the order of a warpgroup's wgmma registers, so every thread stores 16 bytes without
bank conflicts. backward_rows.finish_queries_kernel restores the row order.

FIXED_POINT makes the sum independent of the order of additions, hence repeatable bit for bit. A row of dQ is added in
integers that count units, of which 2^28 or 2^30 make a bound of the row (backward_plan.BOUND_BITS). A block is rounded
by at most 2^-29 of the bound, far less than rounding dS to 16 bits costs. Every integer has a bias, which
finish_queries_kernel subtracts once for each block that was added. At head_dim 64 the units come in register order too,
16 bytes a thread, because reading them by rows takes another address register. At 128 reading by rows is faster.

Integers would hide a dS that is not finite (fp16 ends at 65504). Such a dS makes its row's part of dQ not finite in
every column, so checking one column is enough: the row's units, by which the sum is divided at the end, become NaN.
Where units_ptr is None, no dS of a row with units can be infinite (backward_rows.units_at_the_ends).

Figures: bench/results/hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.gpu.releases import reduce_add
from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import count_units


@gluon.jit
def in_register_order(block):
    """A [64, 64] fp32 accumulator as [128, 32]: row t holds the registers of thread t."""
    return gl.reshape(gl.permute(gl.reshape(block, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5)), [128, 32])


@gluon.jit
def from_register_order(smem, like):
    """The [64, 64] accumulator that another warpgroup stored in register order; every thread reads its own elements."""
    stored = smem.load(in_register_order(like).type.layout)
    block = gl.permute(gl.reshape(stored, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(block, [64, 64]), like.type.layout)


@gluon.jit
def load_units(units_smem, slot, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """The units of the query tile in a slot, in the layout that in_units needs."""
    if C.D == 64:
        like = in_register_order(gl.zeros([64, 64], gl.float32, accumulator_layout(64)))
        LAYOUT: gl.constexpr = gl.reshape(like, [8, 16, 32]).type.layout
        return units_smem.index(slot * 2 + WARPGROUP).load(gl.SliceLayout(0, LAYOUT))
    else:
        return units_smem.index(slot).load(gl.SliceLayout(1, accumulator_layout(64)))


@gluon.jit
def in_units(block, units, units_ptr, dq_row, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """A block in register order; FIXED_POINT: as integers that count units.

    With units_ptr, the units there of rows that are not finite become NaN.
    """
    stored = in_register_order(block)
    if C.FIXED_POINT:
        rows = None
        if units_ptr is not None:
            first = dq_row * C.BLOCK_M + (WARPGROUP * 64 if C.D == 64 else 0)
            rows = (first + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(64))))[:, None]
        if C.D == 64:
            if units_ptr is not None:
                rows = gl.reshape(in_register_order(gl.broadcast(rows, block)[0]), [8, 16, 32])
            stored = count_units(gl.reshape(stored, [8, 16, 32]), units[None, :, :], rows, units_ptr, 32)
            stored = gl.reshape(stored, [128, 32])
        else:
            stored = in_register_order(count_units(block, units[:, None], rows, units_ptr, 32))
    return stored


@gluon.jit
def add_block(stored, dq_desc, index, smem):
    """Start adding a 64 x 64 block to the accumulator's block `index`, through a buffer that TMA no longer reads."""
    smem.store(stored)
    fence_async_shared()  # orders the store before TMA reads it
    reduce_add(dq_desc, [index * 128, 0], smem)
