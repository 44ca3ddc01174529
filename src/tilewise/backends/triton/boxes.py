"""Tiles through tensor descriptors of four dimensions, (batch, heads, rows, columns): the hardware knows where rows
end, so no pointer and no mask takes a register (64 x 64 tiles at head_dim 128: 158 a thread, with pointers 254).
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def box_place(batch_idx, head, start, PACKED: tl.constexpr):
    """(sequence, head, row) of token 0 of a (sequence, head) where a descriptor sees (batch, heads, rows, columns); a
    packed tensor is one sequence.
    """
    if PACKED:
        return start * 0, head, start
    return batch_idx, head, batch_idx * 0


@triton.jit
def load_box(desc, place, first, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Rows `first` to `first + BLOCK` from a place; those past the end of the tensor's rows are 0."""
    sequence, head, row = place
    return desc.load([sequence, head, row + first, 0]).reshape([BLOCK, DIM])


@triton.jit
def store_box(desc, place, first, tile):
    """Write a tile to rows `first` on; those past the end of the tensor's rows are left out."""
    sequence, head, row = place
    rows = tile.to(desc.dtype).reshape([1, 1, tile.shape[0], tile.shape[1]])
    desc.store([sequence, head, row + first, 0], rows)


@triton.jit
def in_registers(tile, T: tl.constexpr):
    """The same tile of 16-bit numbers, which wgmma then takes from registers and not from shared memory."""
    if T.INTERPRETED:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2)
