"""Tiles through tensor descriptors that know where rows end, so no pointer and no mask takes a register.

Dense rows use four dimensions: (batch, heads, rows, columns). Packed rows use five: (ROWS_APART, ends, heads, rows,
columns), so that the hardware knows where each sequence ends. One step along `ends` is one row. For a sequence whose
rows end before row `end`, row 0 has the coordinate `end` along `ends` and ROWS_APART - length along `rows`. The row
after the last one would then have the row coordinate ROWS_APART, which is out of bounds: it is read as zeros and not
stored. These coordinates are ROWS_APART rows too far. The first dimension compensates: its stride is 2^64 / ROWS_APART
less one row, taken ROWS_APART times, and addresses wrap at 2^64 (as in Triton's tools/ragged_tma.py).
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

# More rows than a packed tensor in boxes may have.
ROWS_APART = tl.constexpr(1 << 30)


@triton.jit
def box_place(batch_idx, head, start, length, PACKED: tl.constexpr):
    """Coordinates of token 0 of a (sequence, head) in a descriptor, without columns. A packed sequence begins at row
    `start` and has `length` rows.
    """
    if PACKED:
        # The run-time value comes first: Triton 3.9's interpreter makes a constant of a constant minus a run-time
        # value.
        return ROWS_APART, start + length, head, -length + ROWS_APART
    else:
        return batch_idx, head, batch_idx * 0


@triton.jit
def load_box(desc, place, first, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Rows `first` to `first + BLOCK` after `place`. Rows past the end of the sequence are 0."""
    if len(desc.block_shape) == 5:
        return desc.load([place[0], place[1], place[2], place[3] + first, 0]).reshape([BLOCK, DIM])
    else:
        return desc.load([place[0], place[1], place[2] + first, 0]).reshape([BLOCK, DIM])


@triton.jit
def store_box(desc, place, first, tile):
    """Write a tile to the rows from `first` on. Rows past the end of the sequence are dropped."""
    rows = tile.to(desc.dtype).reshape(desc.block_shape)
    if len(desc.block_shape) == 5:
        desc.store([place[0], place[1], place[2], place[3] + first, 0], rows)
    else:
        desc.store([place[0], place[1], place[2] + first, 0], rows)


@triton.jit
def in_registers(tile, T: tl.constexpr):
    """The same tile of 16-bit numbers, forced into registers: wgmma then does not read it from shared memory."""
    if T.INTERPRETED:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2)
