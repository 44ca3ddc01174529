"""The quantising kernel: rotation, largest magnitude, scale and e4m3 in one pass, with the bits of quantisation.py.

One program per (block of rows, head, sequence). Scales per block need this one kernel; scales per head or tensor need
the largest magnitude of all blocks first, which the same code finds in a pass of its own (MODE "amax").
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

import triton
import triton.language as tl

__all__ = ["quantize_kernel"]

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(2.0**-96)
# Of fp32 numbers: all bits but the sign, and the smallest magnitude that is no finite number. Magnitudes are ordered
# like their bits.
MAGNITUDE, INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def butterfly(x, sizes, DISTANCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(a + b, a - b) of channels DISTANCE apart, in the parts of the head that are longer than that."""
    pairs = tl.reshape(x, [ROWS, COLUMNS // (2 * DISTANCE), 2, DISTANCE])
    left, right = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    mixed = tl.reshape(tl.permute(tl.join(left + right, left - right), [0, 1, 3, 2]), [ROWS, COLUMNS])
    if sizes is None:
        return mixed
    else:
        return tl.where((sizes > DISTANCE)[None, :], mixed, x)


@triton.jit
def rotated(x, cols, basis, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Signs, butterflies of growing distance, one multiplication: the order that rotation.py defines."""
    signs_ptr, sizes_ptr, norms_ptr = basis
    inside = cols < HEAD_DIM
    sizes = None
    if HEAD_DIM != COLUMNS:
        sizes = tl.load(sizes_ptr + cols, mask=inside, other=1)
    x = x * tl.load(signs_ptr + cols, mask=inside, other=1.0)[None, :]
    LOG_COLUMNS: tl.constexpr = (COLUMNS - 1).bit_length()
    for i in tl.static_range(LOG_COLUMNS):
        x = butterfly(x, sizes, 1 << i, ROWS, COLUMNS)
    return x * tl.load(norms_ptr + cols, mask=inside, other=1.0)[None, :]


@triton.jit
def e4m3_bits(y, HARDWARE: tl.constexpr):
    """The e4m3 code of y to nearest even, saturated: by one instruction where there is one (from sm_89 on)."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    # Three bits of fraction are left of 23, the exponent's bias becomes 7.
    normal = tl.minimum(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    # Below 2^-6 codes count steps of 2^-9, the last place of numbers around 2^14: adding that rounds.
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > INFINITY, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["seqlen", "num_heads", "num_blocks"])
def quantize_kernel(
    x_ptr, data_ptr, scale_ptr, amax_ptr, cu_seqlens, basis, seqlen, num_heads, num_blocks, x_strides, data_strides,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
    PER_TENSOR: tl.constexpr, BLOCK_SCALES: tl.constexpr, ROTATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Strides are of (batch, head, row); packed rows have cu_seqlens. Scales are contiguous (batch, heads, blocks).

    MODE "own" gives each block its scale, "amax" finds the largest magnitude of each head (or of all, PER_TENSOR) in
    amax_ptr, "shared" takes it from there, "given" takes scales (of blocks, or of heads) from scale_ptr.
    """
    block, head, batch_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = block * BLOCK + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x_first = batch_idx.to(tl.int64) * x_strides[0]
    data_first = batch_idx.to(tl.int64) * data_strides[0]
    first_scale = scale_ptr + (batch_idx * num_heads + head) * num_blocks
    own_scale = first_scale + block
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + batch_idx)
        length = tl.load(cu_seqlens + batch_idx + 1) - start
        x_first = start.to(tl.int64) * x_strides[2]
        data_first = start.to(tl.int64) * data_strides[2]
    if block * BLOCK >= length:
        if MODE == "own":
            tl.store(own_scale, AMAX_FLOOR / E4M3_MAX)
        return
    inside = ((rows < length) & (tl.arange(0, ROWS) < BLOCK))[:, None] & (cols < HEAD_DIM)[None, :]
    at = x_first + head * x_strides[1] + rows[:, None].to(tl.int64) * x_strides[2] + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        x = rotated(x, cols, basis, HEAD_DIM, ROWS, COLUMNS)
    largest = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE)
    # Only blocks with NaN or infinities have to select among their elements.
    is_finite = largest < INFINITY
    if not is_finite:
        largest = tl.max(tl.where(tl.abs(x) <= LARGEST, tl.abs(x), 0.0)).to(tl.int32, bitcast=True)
    group = 0 if PER_TENSOR else batch_idx * num_heads + head
    if MODE == "amax":
        tl.atomic_max(amax_ptr + group, largest)
        return
    if MODE == "given":
        inverse = tl.div_rn(1.0, tl.load(own_scale if BLOCK_SCALES else first_scale))
    else:
        if MODE == "shared":
            largest = tl.load(amax_ptr + group)
        amax = tl.maximum(largest.to(tl.float32, bitcast=True), AMAX_FLOOR)
        inverse = tl.div_rn(E4M3_MAX, amax)
        if MODE == "own":
            tl.store(own_scale, tl.div_rn(amax, E4M3_MAX))
    y = x * inverse
    if not is_finite:
        y = tl.where(tl.abs(x) <= LARGEST, y, float("nan"))
    at = data_first + head * data_strides[1] + rows[:, None].to(tl.int64) * data_strides[2] + cols[None, :]
    tl.store(data_ptr + at, e4m3_bits(y, HARDWARE), mask=inside)
