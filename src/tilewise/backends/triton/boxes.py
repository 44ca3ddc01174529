"""Tiles through tensor descriptors, of dense rows with four dimensions, (batch, heads, rows, columns): the hardware
knows where rows end, so no pointer and no mask takes a register (64 x 64 tiles at head_dim 128: 158 a thread, with
pointers 254).

Of packed rows it knows where each sequence ends, with five dimensions: (ROWS_APART, ends, heads, rows, columns). A step
along `ends` is a row long. Of a sequence whose last row is the one before `end`, row 0 is at `end` and at ROWS_APART -
length: that is ROWS_APART rows too far, and the row behind the last one would be the ROWS_APART-th, which does not
exist: it comes as zeros and is not stored. The first dimension goes back: its step is 2^64 / ROWS_APART less a row,
ROWS_APART times, and of 2^64 an address keeps nothing (as in Triton's tools/ragged_tma.py).
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

# More rows than a packed tensor in boxes has.
ROWS_APART = tl.constexpr(1 << 30)


@triton.jit
def box_place(batch_idx, head, start, length, PACKED: tl.constexpr):
    """Where token 0 of a (sequence, head) lies in a descriptor's dimensions, without its columns; of packed rows the
    sequence begins at `start` and has `length`.
    """
    if PACKED:
        # A number at run time comes first: in the interpreter of Triton 3.9 a constant less a number is a constant.
        return ROWS_APART, start + length, head, -length + ROWS_APART
    else:
        return batch_idx, head, batch_idx * 0


@triton.jit
def load_box(desc, place, first, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Rows `first` to `first + BLOCK` from a place; those past the end of the sequence are 0."""
    if len(desc.block_shape) == 5:
        return desc.load([place[0], place[1], place[2], place[3] + first, 0]).reshape([BLOCK, DIM])
    else:
        return desc.load([place[0], place[1], place[2] + first, 0]).reshape([BLOCK, DIM])


@triton.jit
def store_box(desc, place, first, tile):
    """Write a tile to rows `first` on; those past the end of the sequence are left out."""
    rows = tile.to(desc.dtype).reshape(desc.block_shape)
    if len(desc.block_shape) == 5:
        desc.store([place[0], place[1], place[2], place[3] + first, 0], rows)
    else:
        desc.store([place[0], place[1], place[2] + first, 0], rows)


@triton.jit
def in_registers(tile, T: tl.constexpr):
    """The same tile of 16-bit numbers, which wgmma then takes from registers and not from shared memory."""
    if T.INTERPRETED:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2)
