"""Values for FP8 wgmma: tiles of V^T, because 8-bit operands must be contiguous along the summed dimension.

Within every 16 keys, V^T is stored in operand order. Of the scores, thread t of a row's four holds keys 8b + 2t + c; as
a left operand it must hold positions 4t + 2b + c. With V's keys permuted accordingly, P goes from the softmax into P V
without moving between threads.

Figures: bench/results/hopper-fp8-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

import triton
import triton.language as tl

__all__ = ["transpose_values_kernel"]


@triton.jit
def byte_columns(rows):
    """A 4 x 4 transposition of bytes: word i of the result holds byte i of every row, in the order of the rows."""
    first, second, third, fourth = rows
    even, odd = interleaved(first, second)
    even_below, odd_below = interleaved(third, fourth)
    return (
        (even & 0xFFFF) | (even_below << 16),
        (odd & 0xFFFF) | (odd_below << 16),
        ((even >> 16) & 0xFFFF) | (even_below & ~0xFFFF),
        ((odd >> 16) & 0xFFFF) | (odd_below & ~0xFFFF),
    )


@triton.jit
def interleaved(above, below):
    """Two words: bytes 0 and 2 of both arguments interleaved, and bytes 1 and 3 interleaved."""
    even = (above & 0x00FF00FF) | ((below & 0x00FF00FF) << 8)
    return even, ((above >> 8) & 0x00FF00FF) | (below & ~0x00FF00FF)


@triton.jit(do_not_specialize=["seqlen", "num_heads", "tiles_per_head"])
def transpose_values_kernel(
    v_ptr, out_ptr, cu_seqlens, seqlen, num_heads, tiles_per_head, v_strides,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Transpose V (strides of batch, head, row), or packed rows with cu_seqlens, into tiles (slot, D, BLOCK_N).

    Memory is accessed as words of four bytes, and strides count words: four channels of a key are read, four keys of a
    channel are written. One program per (tile, head, sequence), all in the first dimension of the grid, because the
    others end at 65535. Keys past the sequence's end and channels past HEAD_DIM are 0. Slots are numbered as by
    `value_slot` in fp8_forward.py.
    """
    tiles = tl.cdiv(seqlen, BLOCK_N)
    tile, item = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    head, batch_idx = item % num_heads, item // num_heads
    slot = (batch_idx * num_heads + head) * tiles_per_head + tile
    first = batch_idx.to(tl.int64) * v_strides[0]
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + batch_idx)
        length = tl.load(cu_seqlens + batch_idx + 1) - start
        first = start.to(tl.int64) * v_strides[2]
        slot = head * tiles_per_head + start // BLOCK_N + batch_idx + tile
    # A sequence without keys has one tile of zeros, which the forward multiplies by P = 0.
    if tile * BLOCK_N < max(length, 1):
        WIDTH: tl.constexpr = BLOCK_N // 4
        place, channel = tl.arange(0, WIDTH), tl.arange(0, D // 4)
        # The first key of each word; the others are key + 1, + 8 and + 9 (operand order, see above).
        key = tile * BLOCK_N + place // 4 * 16 + place % 4 * 2
        v_ptr += first + head.to(tl.int64) * v_strides[1]
        rows = (
            load_words(v_ptr, key, length, channel, v_strides[2], HEAD_DIM),
            load_words(v_ptr, key + 1, length, channel, v_strides[2], HEAD_DIM),
            load_words(v_ptr, key + 8, length, channel, v_strides[2], HEAD_DIM),
            load_words(v_ptr, key + 9, length, channel, v_strides[2], HEAD_DIM),
        )
        columns = byte_columns(rows)
        out = out_ptr + slot.to(tl.int64) * (D * WIDTH) + channel[:, None] * (4 * WIDTH) + place[None, :]
        for i in tl.static_range(4):
            tl.store(out + i * WIDTH, tl.trans(columns[i]))


@triton.jit
def load_words(v_ptr, key, length, channel, stride, HEAD_DIM: tl.constexpr):
    """Words of four channels of each key, 0 past the end."""
    inside = (key < length)[:, None] & (channel < HEAD_DIM // 4)[None, :]
    at = v_ptr + key[:, None].to(tl.int64) * stride + channel[None, :]
    return tl.load(at, mask=inside, other=0)
