"""Backward of short dense sequences with plain scores: dQ, with the row statistics on its way, then dK and dV.

Grid: (tile, head, sequence). What is streamed comes by TMA in boxes (boxes.py), which know where rows end: one loop,
in which no pointer lives. What a program owns comes and goes in boxes as well where it has descriptors of it. The first
kernel walks over the heads from the last to the first, so that the second one finds the first ones in L2. Each owns
what it writes, dQ's also the statistics: no atomics, always repeatable.
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.backward import described_stats, group_step, group_steps, load_stats, mask_outside
from tilewise.backends.triton.boxes import in_registers, load_box, store_box
from tilewise.backends.triton.primitives import (
    LOG2E,
    NEG_INF,
    dot,
    dot_add,
    head_base,
    keep_in_band,
    key_range,
    load_rows,
    lse_in_log2,
    query_range,
    store_rows,
    zeros,
)


@triton.jit
def load_own(
    rows, desc, batch_idx, head, first, num_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows `first` to `first + BLOCK` of a (sequence, head), in a box where there is a descriptor; 0 past the end."""
    if desc is not None:
        return load_box(desc, (batch_idx, head, 0), first, BLOCK, DIM)
    else:
        base = head_base(rows, batch_idx, head, 0, False)
        return load_rows(base, rows.stride_row, first, num_rows, True, BLOCK, DIM, BLOCK_D)


@triton.jit
def store_own(tile, rows, desc, batch_idx, head, first, num_rows, DIM: tl.constexpr):
    """Write rows `first` on of a (sequence, head), as `load_own` reads them; those past the end are left out."""
    if desc is not None:
        store_box(desc, (batch_idx, head, 0), first, tile)
    else:
        base = head_base(rows, batch_idx, head, 0, False)
        store_rows(tile, base, rows.stride_row, first, num_rows, DIM)


@triton.jit
def load_results(out, lse, m_first, head, batch_idx, seqlen_q, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """(out, lse) of a tile of rows, by pointers: nothing waits for them before they are used."""
    m_idx = m_first + tl.arange(0, BLOCK_M)
    out_base = head_base(out, batch_idx, head, 0, False)
    out_tile = load_rows(out_base, out.stride_row, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    at = head_base(lse, batch_idx, head, 0, False) + m_idx * lse.stride_row
    return out_tile, tl.load(at, mask=m_idx < seqlen_q, other=NEG_INF)


@triton.jit
def make_stats(out_tile, dout_tile, lse_rows, lse_unit, delta, m_first, head, batch_idx, BLOCK_M: tl.constexpr):
    """(lse in log2, delta) of a tile of rows, +inf and 0 of those that have no key or do not exist; also stored, whole
    tiles of them.
    """
    m_idx = m_first + tl.arange(0, BLOCK_M)
    sums = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    empty = lse_rows == NEG_INF
    lse_tile = lse_in_log2(lse_rows)
    delta_tile = tl.where(empty, 0.0, sums)
    tl.store(head_base(lse_unit, batch_idx, head, 0, False) + m_idx * lse_unit.stride_row, lse_tile)
    tl.store(head_base(delta, batch_idx, head, 0, False) + m_idx * delta.stride_row, delta_tile)
    return lse_tile, delta_tile


@triton.jit(do_not_specialize=["sizes", "band", "scalars"])
def short_query_gradient_kernel(
    q, dout, q_desc, dout_desc, k_desc, v_desc, out, lse, lse_unit, delta, dq, dq_desc, sizes, band, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write dQ, lse_unit and delta of one (query tile, head, sequence), the last ones first: under a causal mask they
    are the longest. HOLD: queries in registers. MASKED: there is a band, or keys do not fill their last tile.
    """
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    m_first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = sizes.num_heads - 1 - tl.program_id(1)
    batch_idx = sizes.batch - 1 - tl.program_id(2)
    m_idx = m_first + tl.arange(0, BLOCK_M)
    # Out is asked for first: each box is waited for (N = 512, full: 214 us, last 234).
    out_tile, lse_rows = load_results(out, lse, m_first, head, batch_idx, seqlen_q, BLOCK_M, T)
    dout_tile = load_own(dout, dout_desc, batch_idx, head, m_first, seqlen_q, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    q_tile = load_own(q, q_desc, batch_idx, head, m_first, seqlen_q, BLOCK_M, T.HEAD_DIM, T.BLOCK_D)
    lse_tile, delta_tile = make_stats(out_tile, dout_tile, lse_rows, lse_unit, delta, m_first, head, batch_idx, BLOCK_M)
    if HOLD:
        q_tile = in_registers(q_tile, T)
    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    acc = zeros(BLOCK_M, T.BLOCK_D)
    place = (batch_idx, head // T.GROUP_SIZE, 0)
    # Told that the loop runs, ptxas keeps wgmma asynchronous (C7515).
    if begin < end:
        tl.assume(begin < end)
        for first in tl.range(begin, end, BLOCK_N):
            k_tile = load_box(k_desc, place, first, BLOCK_N, T.HEAD_DIM)
            v_tile = load_box(v_desc, place, first, BLOCK_N, T.HEAD_DIM_V)
            dots = dot(q_tile, tl.trans(k_tile), T)
            dp = dot(dout_tile, tl.trans(v_tile), T)
            p = tl.exp2(dots * (scalars.scale * LOG2E) - lse_tile[:, None])
            if MASKED:
                # Also past the last key, where K is 0 and P may be anything.
                if (first < full_begin) | (first >= full_end):
                    n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
                    p = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, band, T), p, 0.0)
            ds = p * (dp - delta_tile[:, None])
            acc = dot_add(ds.to(k_tile.dtype), k_tile, acc, T)
    store_own(acc * scalars.scale, dq, dq_desc, batch_idx, head, m_first, seqlen_q, T.HEAD_DIM)


@triton.jit(do_not_specialize=["sizes", "band", "scalars"])
def short_key_gradient_kernel(
    q_desc, k, v, k_desc, v_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta, dk, dv, dk_desc, dv_desc,
    sizes, band, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of one (key tile, K/V head, sequence), summed over the query heads of the group. HOLD: keys in
    registers.

    Rows of q and dout past the end are 0, and their lse is +inf: P is 0, and nothing has to be masked but a band.
    """
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    n_first = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    batch_idx = tl.program_id(2)
    k_tile = load_own(k, k_desc, batch_idx, kv_head, n_first, seqlen_k, BLOCK_N, T.HEAD_DIM, T.BLOCK_D)
    v_tile = load_own(v, v_desc, batch_idx, kv_head, n_first, seqlen_k, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV)
    if HOLD:
        k_tile = in_registers(k_tile, T)
    dk_acc = zeros(BLOCK_N, T.BLOCK_D)
    dv_acc = zeros(BLOCK_N, T.BLOCK_DV)
    begin, full_begin, full_end, end = query_range(n_first, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    n_idx = (n_first + tl.arange(0, BLOCK_N))[:, None]
    lower, upper = group_steps(begin, end, BLOCK_M, T)
    # Told that the loop runs, ptxas keeps wgmma asynchronous (C7515).
    if lower < upper:
        tl.assume(lower < upper)
        for step in tl.range(lower, upper, BLOCK_M if T.GROUP_SIZE == 1 else 1):
            head, first = group_step(step, begin, upper, kv_head, BLOCK_M, T)
            q_tile = load_box(q_desc, (batch_idx, head, 0), first, BLOCK_M, T.HEAD_DIM)
            dout_tile = load_box(dout_desc, (batch_idx, head, 0), first, BLOCK_M, T.HEAD_DIM_V)
            if lse_desc is not None:
                lse_tile, delta_tile = described_stats(lse_desc, delta_desc, lse_unit, batch_idx, head, 0, first, T)
            else:
                lse_tile, delta_tile = load_stats(
                    lse_unit, delta, first, batch_idx, head, 0, seqlen_q, False, BLOCK_M, T
                )
            dots = dot(k_tile, tl.trans(q_tile), T)
            dp = dot(v_tile, tl.trans(dout_tile), T)
            p = tl.exp2(dots * (scalars.scale * LOG2E) - lse_tile[None, :])
            m_row = (first + tl.arange(0, BLOCK_M))[None, :]
            p = mask_outside(p, first, full_begin, full_end, m_row, n_idx, band, seqlen_q, seqlen_k, T)
            dv_acc = dot_add(p.to(dout_tile.dtype), dout_tile, dv_acc, T)
            ds = p * (dp - delta_tile[None, :])
            dk_acc = dot_add(ds.to(q_tile.dtype), q_tile, dk_acc, T)
    store_own(dk_acc * scalars.scale, dk, dk_desc, batch_idx, kv_head, n_first, seqlen_k, T.HEAD_DIM)
    store_own(dv_acc, dv, dv_desc, batch_idx, kv_head, n_first, seqlen_k, T.HEAD_DIM_V)
