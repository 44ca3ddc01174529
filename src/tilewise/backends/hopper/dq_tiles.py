"""How tiles of dQ leave the backward kernels: 64 x 64 blocks, added to an accumulator in global memory by TMA.

The accumulator keeps each block in the order of a warpgroup's wgmma registers, so that every thread stores 16 bytes
without bank conflicts (2-4 % at D=128); backward_rows.finish_queries_kernel puts rows together again.

FIXED_POINT makes the sum independent of the order of the additions, hence repeatable bit by bit: a row of dQ is added
in integers, in units of which 2^30 are a bound of the row (backward_rows.py). The rounding of a block is then 2^-31 of
that bound, far below what rounding dS to 16 bits costs. At D=64 units come in the order of the registers, too, 16
bytes a thread: read by rows they need an address of their own, and more registers spill (14 instead of 6; D=64 causal,
N=1024: the main kernel 478 -> 463 us). At D=128 it is the other way round (causal 362 -> 378 us).

Integers would hide a dS that is not finite (fp16 ends at 65504). It makes its row's part of dQ not finite in every
column, so that one of them tells: the row's units, by which its sum is divided in the end, become NaN (mark_rows).
Where units_ptr is None no dS of a row with units can be infinite (backward_rows.units_at_the_ends).
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import mark_lost, round_scaled
from tilewise.backends.hopper.reduction import reduce_add

__all__ = ["add_block", "from_register_order", "in_register_order", "in_units", "mark_rows"]


@gluon.jit
def in_register_order(block):
    """A [64, 64] fp32 accumulator as [128, 32]: a row is what one thread holds."""
    return gl.reshape(gl.permute(gl.reshape(block, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5)), [128, 32])


@gluon.jit
def from_register_order(smem, like):
    """The [64, 64] accumulator that another warpgroup stored in register order: every thread reads its own elements."""
    stored = smem.load(in_register_order(like).type.layout)
    block = gl.permute(gl.reshape(stored, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(block, [64, 64]), like.type.layout)


@gluon.jit
def in_units(block, units_smem, slot, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """A block in register order; in fixed point as integers, in the units of the query tile in a slot."""
    stored = in_register_order(block)
    if C.FIXED_POINT and C.D == 64:
        stored = gl.reshape(stored, [8, 16, 32])
        units = units_smem.index(slot * 2 + WARPGROUP).load(gl.SliceLayout(0, stored.type.layout))
        stored = gl.reshape(round_scaled(stored, units[None, :, :]), [128, 32])
    elif C.FIXED_POINT:
        units = units_smem.index(slot).load(gl.SliceLayout(1, accumulator_layout(64)))
        stored = in_register_order(round_scaled(block, units[:, None]))
    return stored


@gluon.jit
def mark_rows(block, units_ptr, dq_row, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Make the units of rows NaN whose part of dQ is not finite; of 16 columns a thread looks at one."""
    x = gl.permute(gl.reshape(block, [64, 2, 2, 2, 4, 2]), (0, 4, 1, 2, 3, 5))
    for _ in gl.static_range(4):
        x, _ = gl.split(x)
    first = dq_row * C.BLOCK_M + (WARPGROUP * 64 if C.D == 64 else 0)
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    mark_lost(x, rows[:, None], units_ptr)


@gluon.jit
def add_block(stored, dq_desc, index, smem):
    """Start adding a 64 x 64 block to the accumulator's block `index`, through a buffer that TMA has finished with."""
    smem.store(stored)
    fence_async_shared()  # orders the store before TMA reads it
    reduce_add(dq_desc, [index * 128, 0], smem)
