"""Where tiles live: wgmma register layouts, swizzled shared-memory layouts, and tensor-map coordinates of packed rows.

A warpgroup (4 warps) owns 64 rows of every product. The register layout of its accumulator equals that of a 16-bit left
operand, so P goes from the softmax into P V without moving between threads.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Row coordinate one past the last row of every packed sequence, see `tile_at`.
PACKED_ORIGIN = gl.constexpr(1 << 30)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Registers of one warpgroup's 64 x columns wgmma accumulator."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def left_operand_layout(accumulator):
    """Registers of a 16-bit left operand of the product that accumulates in `accumulator`."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=2)


def tile_box(rows: int, columns: int, *, packed: bool) -> list[int]:
    """The box of a tensor map over (batch, head, row, column), or over packed rows as `tile_at` addresses them."""
    return [1] * (3 if packed else 2) + [rows, columns]


def smem_layout(box: list[int], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """The widest swizzle that TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for(box, dtype)


@gluon.constexpr_function
def slots_shape(slots, rows, columns, packed):
    """The shape of a ring of tiles in shared memory, each with the dimensions of its TMA box."""
    return [slots] + [1] * (3 if packed else 2) + [rows, columns]


@gluon.jit
def tile_at(span, head, row, col: gl.constexpr, PACKED: gl.constexpr):
    """TMA coordinates of the tile whose first row is `row` of a sequence; `span` is its Span.

    Packed rows are addressed through a five-dimensional tensor map. Its two extra dimensions cancel: they add a
    multiple of 2^64 to the address. They move the sequence's end to row 2^30, where the map ends. So TMA fills rows
    past the end with zeros and drops stores there, although the next sequence's rows follow in memory.
    """
    if PACKED:
        return [PACKED_ORIGIN, span.start + span.length, head, PACKED_ORIGIN - span.length + row, col]
    else:
        return [span.sequence, head, row, col]
