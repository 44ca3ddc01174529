"""Before and after the main backward kernel, in plain Triton: row statistics and zeros, then dQ out of its accumulator.

The accumulator holds, for every query tile of BLOCK_M rows, two 64 x 64 blocks in the order in which the wgmma
registers of a warpgroup leave (backward.add_query_gradient): column halves at D=128, row halves at D=64.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, RET505

import triton
import triton.language as tl

__all__ = ["finish_queries_kernel", "prepare_rows_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)
# Strides come in units of 16 bytes, so that the compiler knows rows to be aligned without specialising on them.
UNIT = tl.constexpr(8)


@triton.jit
def row_span(cu_seqlens, batch_idx, seqlen_q, PACKED: tl.constexpr):
    """(first packed row, length) of a sequence."""
    if PACKED:
        first = tl.load(cu_seqlens + batch_idx)
        return first, tl.load(cu_seqlens + batch_idx + 1) - first
    else:
        return batch_idx * 0, seqlen_q + batch_idx * 0


@triton.jit
def load_rows(ptr, strides, batch_idx, head, rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head in fp32, zero outside."""
    cols = tl.arange(0, BLOCK_D)
    at = ptr + (batch_idx * strides[0] + head * strides[1]) * UNIT + rows[:, None] * (strides[2] * UNIT) + cols[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    else:
        return tl.load(at, mask=inside[:, None] & (cols < HEAD_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["out_strides", "dout_strides", "num_heads", "seqlen_q", "total_q"],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "cu_seqlens"],
)
def prepare_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, stats_ptr, dq_acc_ptr, cu_seqlens, out_strides, dout_strides, num_heads,
    seqlen_q, total_q, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """[lse * log2(e) | delta - dlse] of one query tile, packed for one TMA load; its tile of the accumulator zeroed.

    dlse enters here: dS = P (dP - delta + dlse).
    """
    item = tl.program_id(0)
    m_block = tl.program_id(1)
    batch_idx = (item // num_heads).to(tl.int64)
    head = (item % num_heads).to(tl.int64)
    first, length = row_span(cu_seqlens, batch_idx, seqlen_q, PACKED)
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < length
    memory_rows = (first + rows).to(tl.int64)
    memory_batch = batch_idx * 0 if PACKED else batch_idx
    out = load_rows(out_ptr, out_strides, memory_batch, head, memory_rows, inside, HEAD_DIM, BLOCK_D)
    dout = load_rows(dout_ptr, dout_strides, memory_batch, head, memory_rows, inside, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out * dout, 1)
    at = (head * total_q if PACKED else item.to(tl.int64) * seqlen_q) + memory_rows
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tile = (item * tl.num_programs(1) + m_block).to(tl.int64)
    stats = stats_ptr + tile * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(stats, lse * LOG2E)
    tl.store(stats + BLOCK_M, delta)
    if dq_acc_ptr is not None:
        zeros = dq_acc_ptr + tile * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
        tl.store(zeros, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))


@triton.jit(
    do_not_specialize=["scale", "dq_strides", "num_heads", "seqlen_q"], do_not_specialize_on_alignment=["cu_seqlens"]
)
def finish_queries_kernel(
    dq_acc_ptr, dq_ptr, cu_seqlens, scale, dq_strides, num_heads, seqlen_q,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One 64 x 64 block of dQ: scaled, rounded, in rows again."""
    item = tl.program_id(0)
    block = tl.program_id(1)
    half = block % 2
    batch_idx = (item // num_heads).to(tl.int64)
    head = (item % num_heads).to(tl.int64)
    first, length = row_span(cu_seqlens, batch_idx, seqlen_q, PACKED)
    at = (item * tl.num_programs(1) + block).to(tl.int64) * 4096
    x = tl.load(dq_acc_ptr + at + tl.arange(0, 4096)) * scale
    x = tl.reshape(tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5)), [64, 64])
    rows = block // 2 * BLOCK_M + (half * 64 if BLOCK_D == 64 else 0) + tl.arange(0, 64)
    cols = (0 if BLOCK_D == 64 else half * 64) + tl.arange(0, 64)
    memory_batch = batch_idx * 0 if PACKED else batch_idx
    base = dq_ptr + (memory_batch * dq_strides[0] + head * dq_strides[1]) * UNIT
    memory_rows = (first + rows).to(tl.int64)
    target = base + memory_rows[:, None] * (dq_strides[2] * UNIT) + cols[None, :]
    keep = (rows < length)[:, None]
    if HEAD_DIM != BLOCK_D:
        keep = keep & (cols < HEAD_DIM)[None, :]
    tl.store(target, x.to(dq_ptr.dtype.element_ty), mask=keep)
