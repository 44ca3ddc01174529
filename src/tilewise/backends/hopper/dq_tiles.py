"""How tiles of dQ leave the backward kernels: 64 x 64 blocks, added to an accumulator in global memory by TMA.

The accumulator keeps each block in the order of a warpgroup's wgmma registers, so that every thread stores 16 bytes
without bank conflicts (2-4 % at D=128); backward_rows.finish_queries_kernel puts rows together again.

FIXED_POINT makes the sum independent of the order of the additions, hence repeatable bit by bit: a row of dQ is added
in integers, in units of which 2^30 are a bound of the row (backward_rows.py). The rounding of a block is then 2^-31 of
that bound, far below what rounding dS to 16 bits costs.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import round_scaled
from tilewise.backends.hopper.reduction import reduce_add

__all__ = ["add_block", "from_register_order", "in_register_order", "row_units"]


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
def row_units(units_smem, slot, FIRST_ROW: gl.constexpr, C: gl.constexpr):
    """How many units make 1, for 64 rows of a query tile; 0 where dQ is summed in floating point."""
    units = 0
    if C.FIXED_POINT:
        units = units_smem.index(slot).slice(FIRST_ROW, 64).load(gl.SliceLayout(1, accumulator_layout(64)))
    return units


@gluon.jit
def add_block(block, units, dq_desc, index, smem, C: gl.constexpr):
    """Start adding a 64 x 64 block to the accumulator's block `index`, through a buffer that TMA has finished with."""
    if C.FIXED_POINT:
        block = round_scaled(block, units[:, None])
    smem.store(in_register_order(block))
    fence_async_shared()  # orders the store before TMA reads it
    reduce_add(dq_desc, [index * 128, 0], smem)
