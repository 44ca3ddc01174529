"""Tiles of e4m3 as fp16 left operands: from shared memory to registers with wide loads and no shuffles.

wgmma expects a thread's elements of a left operand far apart, but wide loads give adjacent e4m3 bytes. The order of
summed columns does not matter, and permuted rows of a result can be restored when they are stored. So a thread reads
adjacent bytes and treats them as the elements that wgmma expects of it:
  K   (keys x columns)  16 bytes of a row are the thread's columns of four wgmmas; Q's columns are permuted to match
  V^T (columns x keys)  2 adjacent bytes for every 64 columns are the thread's rows of the operand, hence of O^T
e4m3 is exact in fp16, and one instruction converts two numbers (for bf16 it would take three).
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout

__all__ = ["keys_operand", "power_of_two", "query_column", "value_column", "values_operand"]


@gluon.constexpr_function
def _powers(first, stop):
    """first, 2 * first ... below stop."""
    found = []
    while first < stop:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _key_layout(rows, columns):
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    registers += [[0, c] for c in _powers(64, columns)] + [[r, 0] for r in _powers(64, rows)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.constexpr_function
def _value_layout(rows, columns):
    side = columns // 32  # adjacent bytes of a row that a thread reads: 2 for every 64 columns
    registers = [[0, c] for c in _powers(1, side)] + [[1, 0], [8, 0]] + [[r, 0] for r in _powers(16, rows)]
    lanes = [[2, 0], [4, 0], [0, side], [0, 2 * side], [0, 4 * side]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * side], [0, 16 * side]], [], [rows, columns])


@gluon.jit
def keys_operand(smem, C: gl.constexpr):
    """K (keys x columns) in fp16, its columns in the order of `query_column`."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    D: gl.constexpr = C.D
    k = smem.load(_key_layout(BLOCK_N, D)).to(gl.float16)
    k = gl.permute(gl.reshape(k, [BLOCK_N, D // 64, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return gl.convert_layout(gl.reshape(k, [BLOCK_N, D]), left_operand_layout(accumulator_layout(C.ROWS)))


@gluon.jit
def query_column(position, C: gl.constexpr):
    """Which column of Q belongs at a position, so that it meets the same column of K."""
    if C.IS_FP8:
        within = (position & 1) + (position >> 3 & 1) * 2 + (position >> 4 & 3) * 4 + (position >> 1 & 3) * 16
        return within + (position >> 6) * 64
    else:
        return position


@gluon.jit
def values_operand(smem, C: gl.constexpr):
    """V^T (columns x keys) in fp16, its rows in the order of `value_column`."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    v = smem.load(_value_layout(BLOCK_N, DV)).to(gl.float16)
    v = gl.reshape(gl.permute(v, [1, 0]), [4, 8, DV // 64, 2, BLOCK_N])
    v = gl.reshape(gl.permute(v, [2, 0, 3, 1, 4]), [DV, BLOCK_N])
    return gl.convert_layout(v, left_operand_layout(accumulator_layout(C.ROWS)))


@gluon.jit
def value_column(row, C: gl.constexpr):
    """Which column of V a row of O^T belongs to."""
    if C.IS_FP8:
        SIDE: gl.constexpr = C.DV // 32
        return (row >> 3 & 1) + (row >> 6) * 2 + (row & 7) * SIDE + (row >> 4 & 3) * (8 * SIDE)
    else:
        return row


@gluon.jit
def power_of_two(x):
    """The power of two at or below x >= 0; 1 for 0."""
    whole = gl.cast(gl.cast(x, gl.int32, bitcast=True) & 0x7F800000, gl.float32, bitcast=True)
    return gl.where(whole == 0.0, 1.0, whole)
