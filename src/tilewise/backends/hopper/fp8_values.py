"""Values for FP8 wgmma: tiles of V^T, because 8-bit operands must be contiguous along the summed dimension.

The keys of every 16 are stored in the order in which a warpgroup's scores lie in its registers: there, thread t of a
row's four holds keys 8b + 2t + c, and as an operand positions 4t + 2b + c. With V's keys in that order P goes from
the softmax into P V without moving between threads.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803

import triton
import triton.language as tl

__all__ = ["transpose_values_kernel"]


@triton.jit(do_not_specialize=["seqlen", "num_heads", "tiles_per_head"])
def transpose_values_kernel(
    v_ptr, out_ptr, cu_seqlens, seqlen, num_heads, tiles_per_head, v_strides,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """V (strides of batch, head, row), or packed rows with cu_seqlens, into tiles (slot, D, BLOCK_N) of bytes.

    One program per (tile, head, sequence). Keys past the sequence's end and channels past HEAD_DIM are 0. Where a tile
    of a sequence goes is what `value_slot` in fp8_forward.py says.
    """
    tile, head, batch_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = (batch_idx * num_heads + head) * tiles_per_head + tile
    first = batch_idx.to(tl.int64) * v_strides[0]
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + batch_idx)
        length = tl.load(cu_seqlens + batch_idx + 1) - start
        first = start.to(tl.int64) * v_strides[2]
        slot = head * tiles_per_head + start // BLOCK_N + batch_idx + tile
    # A sequence without keys has one tile, of zeros: the forward multiplies it by a P of 0.
    if tile * BLOCK_N < max(length, 1):
        place, channel = tl.arange(0, BLOCK_N), tl.arange(0, D)
        within = place % 16
        key = tile * BLOCK_N + (place - within) + (within // 2 % 2) * 8 + (within // 4) * 2 + within % 2
        inside = (key < length)[:, None] & (channel < HEAD_DIM)[None, :]
        at = first + head * v_strides[1] + key[:, None].to(tl.int64) * v_strides[2] + channel[None, :]
        values = tl.load(v_ptr + at, mask=inside, other=0)
        out = out_ptr + slot.to(tl.int64) * (D * BLOCK_N) + channel[:, None] * BLOCK_N + place[None, :]
        tl.store(out, tl.trans(values))
