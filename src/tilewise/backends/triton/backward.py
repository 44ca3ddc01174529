"""Backward: dK/dV and dQ in two kernels that each own what they write. No atomics, so results are repeatable.

P is recomputed as exp(S - lse). `delta` is rowsum(dout * out) - dlse, so dS = P * (dP - delta). Both come from
row_stats.py, with lse in the unit of the scores (log2 for plain ones) and +inf for rows without keys: their P is
exactly 0 and needs no mask.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.work_list import listed_item
from tilewise.backends.triton.primitives import (
    LOG2E,
    STAT_TILE,
    around_gap,
    box_origin,
    dot,
    dot_add,
    dropout_keep,
    head_base,
    keep_in_band,
    key_pages,
    key_range,
    key_span,
    load_keys,
    load_queries,
    load_rows,
    natural_scores,
    page_base,
    query_range,
    query_span,
    score_terms,
    stat_base,
    store_rows,
    work_item,
    zeros,
)


@triton.jit
def probabilities(
    dots, lse_rows, m_idx, n_idx, terms, scalars, band, seqlen_q, seqlen_k, EDGE: tl.constexpr, T: tl.constexpr
):
    """(p, capped) of a tile in either orientation: probabilities before dropout, and the scores right after the
    softcap.

    `lse_rows` broadcasts against the tile like `m_idx`.
    """
    if T.TRANSFORMED:
        scores, capped = natural_scores(dots, m_idx, n_idx, terms, scalars, seqlen_q, seqlen_k, EDGE, T)
        p = tl.exp2((scores - lse_rows) * LOG2E)
    else:
        capped = dots
        p = tl.exp2(dots * (scalars.scale * LOG2E) - lse_rows)
    if EDGE:
        p = tl.where(keep_in_band(m_idx, n_idx, seqlen_q, seqlen_k, band, T), p, 0.0)
    return p, capped


@triton.jit
def mask_outside(p, first, full_begin, full_end, m_idx, n_idx, band, seqlen_q, seqlen_k, T: tl.constexpr):
    """P of a tile in a loop whose part from full_begin to full_end needs no mask: one branch per tile."""
    if T.HAS_LEFT or T.HAS_RIGHT:
        if (first < full_begin) | (first >= full_end):
            p = tl.where(keep_in_band(m_idx, n_idx, seqlen_q, seqlen_k, band, T), p, 0.0)
    return p


@triton.jit
def loop_bounds(begin, full_begin, full_end, end, whole, JOINED: tl.constexpr):
    """((begin, end), (begin, gap_begin, gap_end, end)) of a kernel's two loops. JOINED: tiles below `whole`, where all
    rows and keys exist, then the rest. Otherwise: tiles that need no mask, then those on either side of them.
    """
    if JOINED:
        return (begin, tl.minimum(end, whole)), (tl.maximum(begin, whole), end, end, end)
    return (full_begin, full_end), (begin, full_begin, full_end, end)


@triton.jit
def loop_end(gap_begin, gap_end, end, EDGE: tl.constexpr, JOINED: tl.constexpr):
    """Where a loop over positions ends: a loop that skips a gap is shorter by it."""
    if EDGE and not JOINED:
        return gap_begin + tl.maximum(end - gap_end, 0)
    return end


@triton.jit
def score_gradient(p, dp, capped, delta_rows, keep, scalars, T: tl.constexpr):
    """(ds_bias, ds): the gradients of the biased score and of scale * q.k. `keep` holds the dropout bits, if any."""
    if T.HAS_DROPOUT:
        dp = tl.where(keep, dp * scalars.keep_scale, 0.0)
    ds_bias = p * (dp - delta_rows)
    ds = ds_bias
    if T.HAS_SOFTCAP:
        ratio = capped / scalars.softcap
        ds = ds_bias * (1.0 - ratio * ratio)
    return ds_bias, ds


@triton.jit
def group_steps(begin, stop, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """(lower, upper) of the loop over all query tiles of all heads of a group; see `group_step`."""
    if T.GROUP_SIZE == 1:
        return begin, stop
    return begin * 0, (stop - begin + BLOCK_M - 1) // BLOCK_M * T.GROUP_SIZE


@triton.jit
def group_step(step, begin, upper, kv_head, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """(head, position) of a step: the steps of one head are positions, those of a group count tiles, head by head."""
    if T.GROUP_SIZE == 1:
        return kv_head, step
    per_head = upper // T.GROUP_SIZE
    return kv_head * T.GROUP_SIZE + step // per_head, begin + step % per_head * BLOCK_M


@triton.jit
def described_stats(lse_desc, delta_desc, lse_unit, batch_idx, head, q_start, first, T: tl.constexpr):
    """(lse, delta) of a tile of queries by TMA. By pointers each thread would copy what it needs, 32 times as much."""
    at = head * lse_unit.stride_head + first
    if T.PACKED_Q:
        at += (q_start // STAT_TILE + batch_idx) * STAT_TILE
    else:
        at += batch_idx * lse_unit.stride_batch
    return lse_desc.load([at.to(tl.int32)]), delta_desc.load([at.to(tl.int32)])


@triton.jit
def load_stats(
    lse_unit, delta, first, batch_idx, head, q_start, seqlen_q,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(lse, delta) of a tile of queries. Rows past the end are stored as +inf and 0 in whole tiles (except for single
    tokens), which makes their P 0: a mask that depends on the length would prevent vector loads.
    """
    m_row = first + tl.arange(0, BLOCK_M)
    lse_at = stat_base(lse_unit, batch_idx, head, q_start, T) + m_row * lse_unit.stride_row
    delta_at = stat_base(delta, batch_idx, head, q_start, T) + m_row * delta.stride_row
    if EDGE and T.PAGED and not T.PACKED_Q:
        ok = m_row < seqlen_q
        return tl.load(lse_at, mask=ok, other=float("inf")), tl.load(delta_at, mask=ok, other=0.0)
    return tl.load(lse_at), tl.load(delta_at)


@triton.jit
def key_gradient_loop(
    dk, dv, k_tile, v_tile, q, dout, q_desc, dout_desc, q_box, dout_box, lse_desc, delta_desc, lse_unit, delta,
    alibi_slopes, bias, mask, seed_ptr, place, scalars, band, seqlen_q, seqlen_k, begin, gap_begin, gap_end, end,
    full_begin, full_end,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_DP: tl.constexpr, JOINED: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries begin..gap_begin and gap_end..end of a group's heads to dK and dV. Queries
    from full_begin to full_end need no mask. EDGE: rows may not exist (JOINED), or scores may be masked.

    Works on transposed scores (keys are rows). One loop runs over heads and tiles, because ptxas serialises wgmma in
    nested loops.
    """
    STAGES: tl.constexpr = 1 if EDGE and JOINED else None
    n_first, kv_head, batch_idx, q_start = place
    n_idx = (n_first + tl.arange(0, BLOCK_N))[:, None]
    lower, upper = group_steps(begin, loop_end(gap_begin, gap_end, end, EDGE, JOINED), BLOCK_M, T)
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    if lower < upper:
        tl.assume(lower < upper)
        for step in tl.range(lower, upper, BLOCK_M if T.GROUP_SIZE == 1 else 1, num_stages=STAGES):
            head, position = group_step(step, begin, upper, kv_head, BLOCK_M, T)
            first = around_gap(position, gap_begin, gap_end, EDGE and not JOINED)
            m_row = first + tl.arange(0, BLOCK_M)
            q_row, q_col = box_origin(q_desc, q_box, batch_idx, head, q_start, T.PACKED_Q)
            dout_row, dout_col = box_origin(dout_desc, dout_box, batch_idx, head, q_start, T.PACKED_Q)
            q_source = (q, head_base(q, batch_idx, head, q_start, T.PACKED_Q), q_desc, q_row, q_col)
            dout_source = (dout, head_base(dout, batch_idx, head, q_start, T.PACKED_Q), dout_desc, dout_row, dout_col)
            q_tile = load_queries(q_source, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM, T.BLOCK_D)
            dout_tile = load_queries(dout_source, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
            if lse_desc is not None:
                lse_tile, delta_tile = described_stats(
                    lse_desc, delta_desc, lse_unit, batch_idx, head, q_start, first, T
                )
            else:
                lse_tile, delta_tile = load_stats(
                    lse_unit, delta, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T
                )
            terms = score_terms(alibi_slopes, bias, mask, seed_ptr, batch_idx, head, m_row[None, :], seqlen_q, T)
            dots = dot(k_tile, tl.trans(q_tile), T)
            if EARLY_DP:
                dp = dot(v_tile, tl.trans(dout_tile), T)
            # A bias is read with its key bound checked: the last key tile may be incomplete even where no score is
            # masked.
            p, capped = probabilities(
                dots, lse_tile[None, :], m_row[None, :], n_idx, terms, scalars, band, seqlen_q, seqlen_k, EDGE or
                T.HAS_BIAS or T.HAS_MASK, T
            )  # fmt: skip
            if JOINED and not EDGE:
                p = mask_outside(p, first, full_begin, full_end, m_row[None, :], n_idx, band, seqlen_q, seqlen_k, T)
            keep = True
            kept = p
            if T.HAS_DROPOUT:
                keep = tl.trans(dropout_keep(terms[5], m_row, n_first, head, batch_idx, scalars.drop_below, BLOCK_N, T))
                kept = tl.where(keep, p * scalars.keep_scale, 0.0)
            dv = dot_add(kept.to(dout_tile.dtype), dout_tile, dv, T)
            if not EARLY_DP:
                dp = dot(v_tile, tl.trans(dout_tile), T)
            _, ds = score_gradient(p, dp, capped, delta_tile[None, :], keep, scalars, T)
            dk = dot_add(ds.to(q_tile.dtype), q_tile, dk, T)
    return dk, dv


@triton.jit(do_not_specialize=["sizes", "band", "scalars"])
def key_gradient_kernel(
    q, k, v, dout, q_desc, dout_desc, q_box, dout_box, lse_desc, delta_desc, lse_unit, delta, dk, dv, bias, mask,
    alibi_slopes, seed_ptr, lengths, work, sizes, band, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_DP: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of one (key tile, K/V head, sequence), summed over the query heads of the group inside the
    program. `work` lists the tiles of packed keys.
    """
    if work is not None:
        num_blocks = sizes.total_k // BLOCK_N + sizes.batch
        block, kv_head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = listed_item(
            work, num_blocks, sizes.num_heads // T.GROUP_SIZE, sizes.heads_per_wave
        )
    else:
        num_blocks = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
        block, kv_head, batch_idx = work_item(
            num_blocks, sizes.num_heads // T.GROUP_SIZE, sizes, T.HAS_LEFT and not T.HAS_RIGHT
        )
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    n_first = block * BLOCK_N
    if n_first >= seqlen_k:
        return
    table = 0
    if T.PAGED:
        k_base = page_base(k, kv_head)
        v_base = page_base(v, kv_head)
        table = lengths.block_table + tl.cast(batch_idx, tl.int64) * lengths.table_stride
    else:
        k_base = head_base(k, batch_idx, kv_head, k_start, T.PACKED_K)
        v_base = head_base(v, batch_idx, kv_head, k_start, T.PACKED_K)
    k_source = (k, k_base, table, None, 0, 0, 0)
    v_source = (v, v_base, table, None, 0, 0, 0)
    pages = key_pages(k_source, n_first, seqlen_k, BLOCK_N, T)
    k_tile = load_keys(k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    dk_acc = zeros(BLOCK_N, T.BLOCK_D)
    dv_acc = zeros(BLOCK_N, T.BLOCK_DV)
    begin, full_begin, full_end, end = query_range(n_first, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    place = (n_first, kv_head, batch_idx, q_start)
    whole = seqlen_q // BLOCK_M * BLOCK_M
    inner, outer = loop_bounds(begin, full_begin, full_end, end, whole, JOINED)
    dk_acc, dv_acc = key_gradient_loop(
        dk_acc, dv_acc, k_tile, v_tile, q, dout, q_desc, dout_desc, q_box, dout_box, lse_desc, delta_desc, lse_unit,
        delta, alibi_slopes, bias, mask, seed_ptr, place, scalars, band, seqlen_q, seqlen_k, inner[0], inner[1],
        inner[1], inner[1], full_begin, full_end, False, BLOCK_M, BLOCK_N, EARLY_DP, JOINED, T
    )  # fmt: skip
    dk_acc, dv_acc = key_gradient_loop(
        dk_acc, dv_acc, k_tile, v_tile, q, dout, q_desc, dout_desc, q_box, dout_box, lse_desc, delta_desc, lse_unit,
        delta, alibi_slopes, bias, mask, seed_ptr, place, scalars, band, seqlen_q, seqlen_k, outer[0], outer[1],
        outer[2], outer[3], full_begin, full_end, True, BLOCK_M, BLOCK_N, EARLY_DP, JOINED, T
    )  # fmt: skip
    dk_base = head_base(dk, batch_idx, kv_head, k_start, T.PACKED_K)
    dv_base = head_base(dv, batch_idx, kv_head, k_start, T.PACKED_K)
    store_rows(dk_acc * scalars.scale, dk_base, dk.stride_row, n_first, seqlen_k, T.HEAD_DIM)
    store_rows(dv_acc, dv_base, dv.stride_row, n_first, seqlen_k, T.HEAD_DIM_V)


@triton.jit
def query_gradient_loop(
    dq, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, terms, scalars, band, seqlen_q, seqlen_k,
    begin, gap_begin, gap_end, end, full_begin, full_end,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, JOINED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys begin..gap_begin and gap_end..end to dQ; see key_gradient_loop."""
    STAGES: tl.constexpr = 1 if EDGE and JOINED else None
    m_idx, head, batch_idx = place
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    stop = loop_end(gap_begin, gap_end, end, EDGE, JOINED)
    if begin < stop:
        tl.assume(begin < stop)
        pages = key_pages(k_source, around_gap(begin, gap_begin, gap_end, EDGE and not JOINED), seqlen_k, BLOCK_N, T)
        for position in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            first = around_gap(position, gap_begin, gap_end, EDGE and not JOINED)
            n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            k_tile = load_keys(k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
            v_tile = load_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
            dots = dot(q_tile, tl.trans(k_tile), T)
            dp = dot(dout_tile, tl.trans(v_tile), T)
            p, capped = probabilities(
                dots, lse_tile[:, None], m_idx[:, None], n_idx, terms, scalars, band, seqlen_q, seqlen_k, EDGE, T
            )
            if JOINED and not EDGE:
                p = mask_outside(p, first, full_begin, full_end, m_idx[:, None], n_idx, band, seqlen_q, seqlen_k, T)
            keep = True
            if T.HAS_DROPOUT:
                keep = dropout_keep(terms[5], m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
            _, ds = score_gradient(p, dp, capped, delta_tile[:, None], keep, scalars, T)
            dq = dot_add(ds.to(k_tile.dtype), k_tile, dq, T)
            if T.PAGED:
                following = around_gap(position + BLOCK_N, gap_begin, gap_end, EDGE and not JOINED)
                pages = key_pages(k_source, following, seqlen_k, BLOCK_N, T)
    return dq


@triton.jit(do_not_specialize=["sizes", "band", "scalars"])
def query_gradient_kernel(
    q, k, v, dout, k_desc, v_desc, k_box, v_box, lse_unit, delta, dq, bias, mask, alibi_slopes, seed_ptr, lengths,
    work, sizes, band, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Write dQ of one (query tile, head, sequence). `work` lists the tiles of packed queries."""
    if work is not None:
        num_blocks = sizes.total_q // BLOCK_M + sizes.batch
        block, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = listed_item(
            work, num_blocks, sizes.num_heads, sizes.heads_per_wave
        )
    else:
        num_blocks = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
        block, head, batch_idx = work_item(num_blocks, sizes.num_heads, sizes, T.HAS_RIGHT)
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    m_first = block * BLOCK_M
    if m_first >= seqlen_q:
        return
    m_idx = m_first + tl.arange(0, BLOCK_M)
    kv_head = head // T.GROUP_SIZE
    table = 0
    if T.PAGED:
        k_base = page_base(k, kv_head)
        v_base = page_base(v, kv_head)
        table = lengths.block_table + tl.cast(batch_idx, tl.int64) * lengths.table_stride
    else:
        k_base = head_base(k, batch_idx, kv_head, k_start, T.PACKED_K)
        v_base = head_base(v, batch_idx, kv_head, k_start, T.PACKED_K)
    k_row, k_col = box_origin(k_desc, k_box, batch_idx, kv_head, k_start, T.PACKED_K)
    v_row, v_col = box_origin(v_desc, v_box, batch_idx, kv_head, k_start, T.PACKED_K)
    k_source = (k, k_base, table, k_desc, k_row, k_col, 0)
    v_source = (v, v_base, table, v_desc, v_row, v_col, 0)
    q_base = head_base(q, batch_idx, head, q_start, T.PACKED_Q)
    dout_base = head_base(dout, batch_idx, head, q_start, T.PACKED_Q)
    q_tile = load_rows(q_base, q.stride_row, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D)
    dout_tile = load_rows(dout_base, dout.stride_row, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    lse_tile, delta_tile = load_stats(lse_unit, delta, m_first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T)
    terms = score_terms(alibi_slopes, bias, mask, seed_ptr, batch_idx, head, m_idx[:, None], seqlen_q, T)
    place = (m_idx, head, batch_idx)
    acc = zeros(BLOCK_M, T.BLOCK_D)

    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
    whole = seqlen_k // BLOCK_N * BLOCK_N
    inner, outer = loop_bounds(begin, full_begin, full_end, end, whole, JOINED)
    acc = query_gradient_loop(
        acc, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, terms, scalars, band, seqlen_q,
        seqlen_k, inner[0], inner[1], inner[1], inner[1], full_begin, full_end, False, BLOCK_N, JOINED, T
    )  # fmt: skip
    acc = query_gradient_loop(
        acc, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, terms, scalars, band, seqlen_q,
        seqlen_k, outer[0], outer[1], outer[2], outer[3], full_begin, full_end, True, BLOCK_N, JOINED, T
    )  # fmt: skip
    store_rows(
        acc * scalars.scale,
        head_base(dq, batch_idx, head, q_start, T.PACKED_Q),
        dq.stride_row,
        m_first,
        seqlen_q,
        T.HEAD_DIM,
    )
