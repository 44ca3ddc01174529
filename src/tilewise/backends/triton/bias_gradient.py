"""dbias: the score gradient summed over the dimensions in which the bias is broadcast. Writes nothing larger than
partial sums of the bias.

Grid: (share of the repetitions, key tile, query tile, bias head, bias sequence). Each program recomputes S and dP of
the tiles that map to its bias tile and sums dS in registers. Where there are few bias tiles, the repetitions are
divided among programs, whose partial sums are added in a fixed order afterwards. No atomics.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.backward import load_stats, probabilities, score_gradient
from tilewise.backends.triton.primitives import (
    dot,
    dropout_keep,
    head_base,
    key_pages,
    key_span,
    load_keys,
    load_rows,
    page_base,
    query_span,
    score_terms,
)


@triton.jit
def tile_is_seen(
    m_first, n_first, seqlen_q, seqlen_k, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):
    """Whether some query of the tile sees some of its keys."""
    m_last = tl.minimum(m_first + BLOCK_M, seqlen_q) - 1
    n_last = tl.minimum(n_first + BLOCK_N, seqlen_k) - 1
    seen = (m_first <= m_last) & (n_first <= n_last)
    if T.HAS_RIGHT:
        seen = seen & (n_first <= m_last + seqlen_k - seqlen_q + band.right)
    if T.HAS_LEFT:
        seen = seen & (n_last >= m_first + seqlen_k - seqlen_q - band.left)
    return seen


@triton.jit
def tile_score_gradient(
    q, k, v, dout, lse_unit, delta, bias, mask, alibi_slopes, seed_ptr, lengths, band, scalars, batch_idx, head,
    m_first, n_first, q_start, seqlen_q, k_start, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradient of the biased scores of one (BLOCK_M, BLOCK_N) tile; 0 outside the sequence and the band."""
    m_idx = m_first + tl.arange(0, BLOCK_M)
    n_idx = (n_first + tl.arange(0, BLOCK_N))[None, :]
    kv_head = head // T.GROUP_SIZE
    table = 0
    if T.PAGED:
        k_base = page_base(k, kv_head)
        v_base = page_base(v, kv_head)
        table = lengths.block_table + tl.cast(batch_idx, tl.int64) * lengths.table_stride
    else:
        k_base = head_base(k, batch_idx, kv_head, k_start, T.PACKED_K)
        v_base = head_base(v, batch_idx, kv_head, k_start, T.PACKED_K)
    q_base = head_base(q, batch_idx, head, q_start, T.PACKED_Q)
    dout_base = head_base(dout, batch_idx, head, q_start, T.PACKED_Q)
    q_tile = load_rows(q_base, q.stride_row, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D)
    dout_tile = load_rows(dout_base, dout.stride_row, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    k_source = (k, k_base, table, None, 0, 0, 0)
    v_source = (v, v_base, table, None, 0, 0, 0)
    pages = key_pages(k_source, n_first, seqlen_k, BLOCK_N, T)
    k_tile = load_keys(k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    lse_tile, delta_tile = load_stats(lse_unit, delta, m_first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T)
    terms = score_terms(alibi_slopes, bias, mask, seed_ptr, batch_idx, head, m_idx[:, None], seqlen_q, T)
    keep = True
    if T.HAS_DROPOUT:
        keep = dropout_keep(terms[5], m_idx, n_first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
    dots = dot(q_tile, tl.trans(k_tile), T)
    dp = dot(dout_tile, tl.trans(v_tile), T)
    p, capped = probabilities(
        dots, lse_tile[:, None], m_idx[:, None], n_idx, terms, scalars, band, seqlen_q, seqlen_k, True, T
    )
    ds_bias, _ = score_gradient(p, dp, capped, delta_tile[:, None], keep, scalars, T)
    return ds_bias


@triton.jit(do_not_specialize=["sizes", "band", "scalars", "shape", "num_shares"])
def bias_gradient_kernel(
    q, k, v, dout, lse_unit, delta, dbias, bias, mask, alibi_slopes, seed_ptr, lengths, sizes, band, scalars, shape,
    num_shares,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One share of one dbias tile. `shape` is the bias's own 4-D shape; dbias is (num_shares, *shape), contiguous."""
    m_blocks = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
    n_blocks = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
    bias_batch, bias_heads, bias_rows, bias_cols = shape
    own_m = (bias_rows + BLOCK_M - 1) // BLOCK_M
    own_n = (bias_cols + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    share = pid % num_shares
    own_n_block = pid // num_shares % own_n
    own_m_block = pid // num_shares // own_n % own_m
    own_head = pid // num_shares // own_n // own_m % bias_heads
    own_batch = pid // num_shares // own_n // own_m // bias_heads
    # A broadcast dimension is walked from end to end; any other is visited at the program's own index.
    m_reps = tl.where(bias_rows == 1, m_blocks, 1)
    n_reps = tl.where(bias_cols == 1, n_blocks, 1)
    head_reps = sizes.num_heads // bias_heads
    reps = m_reps * n_reps * head_reps * (sizes.batch // bias_batch)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    per_share = (reps + num_shares - 1) // num_shares
    for rep in range(share * per_share, tl.minimum((share + 1) * per_share, reps)):
        m_block = own_m_block + rep % m_reps
        n_block = own_n_block + rep // m_reps % n_reps
        head = own_head + rep // m_reps // n_reps % head_reps
        batch_idx = own_batch + rep // m_reps // n_reps // head_reps
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
        if tile_is_seen(m_block * BLOCK_M, n_block * BLOCK_N, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T):
            acc += tile_score_gradient(
                q, k, v, dout, lse_unit, delta, bias, mask, alibi_slopes, seed_ptr, lengths, band, scalars, batch_idx,
                head, m_block * BLOCK_M, n_block * BLOCK_N, q_start, seqlen_q, k_start, seqlen_k, BLOCK_M, BLOCK_N, T
            )  # fmt: skip
    rows = own_m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = own_n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    plane = ((share * bias_batch + own_batch).to(tl.int64) * bias_heads + own_head) * bias_rows * bias_cols
    store_reduced(acc, dbias + plane, rows, cols, bias_rows, bias_cols)


@triton.jit
def store_reduced(acc, plane, rows, cols, num_rows, num_cols):
    """Write a tile, first summed over rows or columns where the bias has only one."""
    if num_rows == 1:
        acc = tl.where(rows[:, None] == 0, tl.sum(acc, 0)[None, :], 0.0)
    if num_cols == 1:
        acc = tl.where(cols[None, :] == 0, tl.sum(acc, 1)[:, None], 0.0)
    at = plane + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    tl.store(at, acc.to(plane.dtype.element_ty), mask=(rows[:, None] < num_rows) & (cols[None, :] < num_cols))
