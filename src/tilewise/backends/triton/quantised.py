"""K and V in e4m3 or int8: widened to fp16 in registers, their scales applied to scores, probabilities and sums.

Two neighbouring columns of a row are read as one 16-bit number, so that tiles are loaded, buffered and transposed on
their way to the matrix units like tiles of fp16. (8-bit elements cannot be transposed there and would be read one by
one.) Each pair is split just before it is multiplied: everything with head_dim columns is a pair of tiles here, its
even and its odd columns.

fp16 holds every number of both. A query is exact in it after a power of two has made its largest element fit.
Probabilities are multiplied by 2^14, so that 2^-38 of the largest is still representable. fp32 queries are multiplied
in fp32.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import Columns, KeyScales, QuantisedQueries, Rows, Source
from tilewise.backends.triton.primitives import NEG_INF, dot, dot_add, head_base, load_keys, page_base

# The range of fp16 above 1, also as a float's exponent bits.
HEADROOM = tl.constexpr(16384.0)
EXPONENT = tl.constexpr(0x7F800000)
# Exponents of queries and scales beyond these could not be inverted.
SMALLEST = tl.constexpr(2.0**-100)
LARGEST = tl.constexpr(2.0**126)
# Without an instruction, a code's bits are shifted to their position in fp16, whose exponent bias is larger by 8.
CODE_UNIT = tl.constexpr(256.0)

# Four codes in a register, as columns 0 and 1 of two rows: e4m3 to fp16 by an instruction (from sm_89 on) ...
BY_INSTRUCTION = tl.constexpr("""{
    .reg .b32 columns;
    .reg .b16 even, odd;
    prmt.b32 columns, $2, 0, 0x3120;
    mov.b32 {even, odd}, columns;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# ... by arithmetic on two at a time: shift the magnitude, carry 0x7F (NaN) into the top exponent bit, add the sign.
BY_ARITHMETIC = tl.constexpr("""{
    .reg .b32 code, size, carry, sign;
    shl.b32 code, $2, 8;
    and.b32 size, code, 0x7f007f00;
    shr.u32 size, size, 1;
    add.u32 carry, size, 0x00800080;
    and.b32 carry, carry, 0x40004000;
    or.b32 size, size, carry;
    and.b32 sign, code, 0x80008000;
    or.b32 $0, size, sign;
    and.b32 size, $2, 0x7f007f00;
    shr.u32 size, size, 1;
    add.u32 carry, size, 0x00800080;
    and.b32 carry, carry, 0x40004000;
    or.b32 size, size, carry;
    and.b32 sign, $2, 0x80008000;
    or.b32 $1, size, sign;
}""")

# ... and int8: code + 128 in the last bits of 1024 gives 1152 + code, exactly.
FROM_INT8 = tl.constexpr("""{
    .reg .b32 code, even, odd, zero;
    xor.b32 code, $2, 0x80808080;
    mov.b32 zero, 0x64806480;
    prmt.b32 even, code, 0x64646464, 0x4240;
    prmt.b32 odd, code, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, even, zero;
    sub.rn.f16x2 $1, odd, zero;
}""")


@triton.jit
def widened(code):
    """The fp16 number of an e4m3 code in the low byte, times 1 / CODE_UNIT."""
    size = (code & 0x7F) << 7
    return (size | ((size + 0x80) & 0x4000) | ((code & 0x80) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def columns_of(pairs, T: tl.constexpr):
    """(even, odd) columns of a tile of 16-bit pairs, in fp16: multiply by `code_unit`."""
    if T.INT8 and T.INTERPRETED:
        return (pairs & 0xFF).to(tl.int8).to(tl.float16), (pairs >> 8).to(tl.int8).to(tl.float16)
    elif T.INT8:
        return tl.inline_asm_elementwise(
            FROM_INT8, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif T.INTERPRETED:
        return widened(pairs & 0xFF), widened(pairs >> 8)
    elif T.E4M3_INSTRUCTION:
        return tl.inline_asm_elementwise(
            BY_INSTRUCTION, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            BY_ARITHMETIC, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def code_unit(T: tl.constexpr):
    """The factor for the numbers of `columns_of`."""
    if T.INT8:
        return 1.0
    elif T.INTERPRETED or not T.E4M3_INSTRUCTION:
        return CODE_UNIT
    else:
        return 1.0


@triton.jit
def scaling(scales, batch_idx, head, T: tl.constexpr):
    """The scales from the first of a (sequence, head) on, or from that of page 0 of a head; 0 without scales."""
    if scales is None:
        return 0
    elif T.PAGED:
        return Rows(page_base(scales, head), scales.stride_batch, scales.stride_head, scales.stride_row)
    else:
        base = head_base(scales, batch_idx, head, 0, False)
        return Rows(base, scales.stride_batch, scales.stride_head, scales.stride_row)


@triton.jit
def tile_scales(
    source, pages, first, seqlen_k, SHARED_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The scales of keys first..first+BLOCK_N, code_unit included: one number where they share it, else (1, BLOCK_N).

    SHARED_ROWS rows share a scale, 0 means all rows of a head, or of a page.
    """
    scales, base = source.scales, source.scales.ptr
    PER_KEY: tl.constexpr = (T.PAGE_SIZE if T.PAGED and SHARED_ROWS == 0 else SHARED_ROWS) % BLOCK_N != 0
    if not PER_KEY:
        if T.PAGED:
            at = base + tl.cast(pages, tl.int64) * scales.stride_batch
        elif SHARED_ROWS == 0:
            at = base
        else:
            at = base + first // SHARED_ROWS * scales.stride_row
        return tl.load(at) * code_unit(T)
    else:
        n_idx = first + tl.arange(0, BLOCK_N)
        if T.PAGED and SHARED_ROWS == 0:
            offsets = pages.to(tl.int64) * scales.stride_batch
        elif T.PAGED:
            block = n_idx % T.PAGE_SIZE // SHARED_ROWS
            offsets = tl.cast(pages, tl.int64) * scales.stride_batch + block * scales.stride_row
        else:
            offsets = (n_idx // SHARED_ROWS * scales.stride_row).to(tl.int64)
        return tl.load(base + offsets, mask=n_idx < seqlen_k, other=0.0)[None, :] * code_unit(T)


@triton.jit
def load_columns_of_keys(
    source, pages, first, seqlen_k, CHECK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(even, odd) columns of a tile of K or V, in the dtype it is multiplied in."""
    even, odd = columns_of(load_keys(source, pages, first, seqlen_k, CHECK_ROWS, BLOCK_N, DIM // 2, BLOCK_D // 2, T), T)
    if not T.HALF:
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
    return Columns(even, odd)


@triton.jit
def load_query_columns(q_scale, q_rows, batch_idx, head, m_idx, row_ok, T: tl.constexpr):
    """The QuantisedQueries at pointers `q_rows`: a query is its columns times its unit. `head` is a scalar or
    (rows,).
    """
    first = query_pairs(q_rows, row_ok, 0, T.BLOCK_D // 2, T.FIRST_DIM // 2, T)
    tail = first
    if T.BLOCK_TAIL > 0:
        tail = query_pairs(q_rows, row_ok, T.FIRST_DIM // 2, T.BLOCK_TAIL // 2, T.HEAD_DIM // 2, T)
    if T.FP8_Q:
        base = head_base(q_scale, batch_idx, head, 0, False)
        block = m_idx * 0
        if T.Q_SHARED_ROWS > 0:
            block = m_idx // T.Q_SHARED_ROWS
        unit = tl.load(base + block * q_scale.stride_row, mask=row_ok, other=0.0) * code_unit(T)
    else:
        unit = tl.zeros([row_ok.shape[0]], tl.float32) + 1.0
        if T.HALF:
            top = largest_of(first)
            if T.BLOCK_TAIL > 0:
                top = tl.maximum(top, largest_of(tail))
            power = (top.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            power = tl.minimum(tl.maximum(power, SMALLEST), LARGEST)
            unit = power * (1.0 / HEADROOM)
            lift = (1.0 / power * HEADROOM)[:, None]
            first = Columns(first.even * lift, first.odd * lift)
            if T.BLOCK_TAIL > 0:
                tail = Columns(tail.even * lift, tail.odd * lift)
    DTYPE: tl.constexpr = tl.float16 if T.HALF else tl.float32
    first = Columns(first.even.to(DTYPE), first.odd.to(DTYPE))
    if T.BLOCK_TAIL > 0:
        tail = Columns(tail.even.to(DTYPE), tail.odd.to(DTYPE))
    return QuantisedQueries(first, unit[:, None], tail)


@triton.jit
def query_pairs(q_rows, row_ok, begin, WIDTH: tl.constexpr, end, T: tl.constexpr):
    """(even, odd) columns of the pairs begin..begin+WIDTH of query rows; 0 from pair `end` on."""
    pair = begin + tl.arange(0, WIDTH)[None, :]
    ok = row_ok[:, None] & (pair < end)
    if T.FP8_Q:
        even, odd = columns_of(tl.load(q_rows[:, None] + pair, mask=ok, other=0), T)
        return Columns(even, odd)
    else:
        even = tl.load(q_rows[:, None] + 2 * pair, mask=ok, other=0.0).to(tl.float32)
        return Columns(even, tl.load(q_rows[:, None] + (2 * pair + 1), mask=ok, other=0.0).to(tl.float32))


@triton.jit
def largest_of(columns):
    """The largest magnitude in each row of (even, odd) columns."""
    return tl.maximum(tl.max(tl.abs(columns.even), 1), tl.max(tl.abs(columns.odd), 1))


@triton.jit
def quantised_products(
    q, k_source, pages, first, seqlen_k, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """(q.k of a tile of keys, scales included; its (even, odd) columns before the tail)."""
    columns = load_columns_of_keys(k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.FIRST_DIM, T.BLOCK_D, T)
    dots = dot_add(q.first.odd, tl.trans(columns.odd), dot(q.first.even, tl.trans(columns.even), T), T)
    if T.BLOCK_TAIL > 0:
        source = Source(k_source.rows, k_source.base + T.FIRST_DIM // 2, k_source.table, None, None, k_source.scales)
        REST: tl.constexpr = T.HEAD_DIM - T.FIRST_DIM
        tail = load_columns_of_keys(source, pages, first, seqlen_k, EDGE, BLOCK_N, REST, T.BLOCK_TAIL, T)
        dots = dot_add(q.tail.odd, tl.trans(tail.odd), dot_add(q.tail.even, tl.trans(tail.even), dots, T), T)
    dots = dots * (q.unit * tile_scales(k_source, pages, first, seqlen_k, T.K_SHARED_ROWS, BLOCK_N, T))
    return dots, columns


@triton.jit
def value_scales(v_source, pages, first, seqlen_k, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """The scales of a tile of V, see tile_scales; 1 without scales."""
    if T.FP8:
        return tile_scales(v_source, pages, first, seqlen_k, T.V_SHARED_ROWS, BLOCK_N, T)
    else:
        return 1.0


@triton.jit
def larger_of_each(score, scale, other_score, other_scale):
    """Combine two columns of (scores, scales)."""
    return tl.maximum(score, other_score), tl.maximum(scale, other_scale)


@triton.jit
def row_tops(scores, scales, T: tl.constexpr):
    """(the largest score of each row, scales): scales of single keys become (scales, the largest that a row sees
    (rows,)). A large value that a row does not see must not push the others below fp16's range.

    One reduction serves both: the warps of a decode tile share its keys, so each reduction costs two barriers.
    """
    if not T.HALF or len(scales.shape) == 0:
        return tl.max(scores, 1), scales
    else:
        sizes = tl.where(scores == NEG_INF, 0.0, tl.abs(scales))
        if T.INTERPRETED:
            return tl.max(scores, 1), KeyScales(scales, tl.max(sizes, 1))
        else:
            tops, scale_tops = tl.reduce((scores, sizes), 1, larger_of_each)
            return tops, KeyScales(scales, scale_tops)


@triton.jit
def add_quantised_values(
    acc, alpha, p, k_columns, v_source, v_scales, pages, first, seqlen_k,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return acc * alpha + P V of a tile of keys, scales included; `acc` is (even, odd) columns. V is `k_columns` of a
    latent.
    """
    acc_even, acc_odd = acc
    if T.LATENT:
        even, odd = k_columns
    else:
        even, odd = load_columns_of_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    PER_KEY: tl.constexpr = (T.PAGE_SIZE if T.PAGED and T.V_SHARED_ROWS == 0 else T.V_SHARED_ROWS) % BLOCK_N != 0
    if not T.HALF:
        weights = p * v_scales
        unit = 1.0
    elif PER_KEY:
        # Factor out the tile's largest scale, so that probabilities times the remaining ratios fit fp16.
        scales, tops = v_scales
        tops = tl.maximum(tops, SMALLEST)[:, None]
        weights = (p * (scales * (1.0 / tops * HEADROOM))).to(tl.float16)
        unit = tops * (1.0 / HEADROOM)
    else:
        weights = (p * HEADROOM).to(tl.float16)
        unit = v_scales * (1.0 / HEADROOM)
    acc_even = acc_even * alpha[:, None] + dot(weights, even, T) * unit
    acc_odd = acc_odd * alpha[:, None] + dot(weights, odd, T) * unit
    return Columns(acc_even, acc_odd)
