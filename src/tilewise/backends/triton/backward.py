"""Backward: dK/dV and dQ in two kernels that each own what they write. No atomics, so results are repeatable.

row_stats_kernel runs first. It computes lse, in the unit of the scores (log2 for plain ones), and `delta`, which is
rowsum(dout * out) - dlse. The others recompute P as exp(S - lse), and dS = P * (dP - delta). Rows without keys get an
lse of +inf: their P is exactly 0 and needs no mask. For packed sequences row_stats_kernel also makes the lists of tiles
that the others walk (gpu/work_list.py), which saves launches.

bias_gradient_kernel sums the score gradient over the dimensions in which the bias is broadcast. Its grid is (share of
the repetitions, key tile, query tile, bias head, bias sequence). Each program recomputes S and dP of the tiles that map
to its bias tile and sums dS in registers. Where there are few bias tiles, the repetitions are divided among programs,
whose partial sums are added in a fixed order afterwards.

gather_pages_kernel sums the gradients of paged K and V, one row per (sequence, key), into pages, which several
sequences may share. Table entries are sorted by page, so the program of a (page, head) adds the contributions of all
sequences that read it in a fixed order. Pages that no sequence reads become 0.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gpu.records import BiasTile, KeyTile, QueryTile, Repetitions, Source, Stretch
from tilewise.backends.gpu.work_list import clear_rows, list_blocks, listed_item
from tilewise.backends.triton.listed import (
    are_seen,
    are_seen_at,
    blocks_before,
    hide_listed,
    kind_at,
    list_of,
    listed_block,
    listed_steps,
    num_listed_blocks,
    ranked_block,
)
from tilewise.backends.triton.primitives import (
    LOG2E,
    NEG_INF,
    STAT_TILE,
    around_gap,
    box_place,
    dot,
    dot_add,
    dropout_keep,
    head_base,
    keep_in_band,
    key_base,
    key_pages,
    key_range,
    key_span,
    load_keys,
    load_queries,
    load_rows,
    lse_in_log2,
    natural_scores,
    page_table,
    query_range,
    query_span,
    score_terms,
    sequence_of,
    stat_base,
    store_rows,
    work_item,
    zeros,
)


@triton.jit
def probability(scores, lse_rows, scalars, T: tl.constexpr):
    """P of scores, in the unit of which `lse_rows` are."""
    if T.TRANSFORMED:
        return tl.exp2((scores - lse_rows) * LOG2E)
    return tl.exp2(scores * (scalars.scale * LOG2E) - lse_rows)


@triton.jit
def probabilities(
    dots, lse_rows, m_idx, n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, EDGE: tl.constexpr, T: tl.constexpr
):
    """(p, capped) of a tile in either orientation: probabilities before dropout, and the scores right after the
    softcap.

    `lse_rows` broadcasts against the tile like `m_idx`.
    """
    scores, capped = dots, dots
    if T.TRANSFORMED:
        scores, capped = natural_scores(dots, m_idx, n_idx, row_terms, scalars, seqlen_q, seqlen_k, EDGE, T)
    p = probability(scores, lse_rows, scalars, T)
    if EDGE:
        p = tl.where(keep_in_band(m_idx, n_idx, seqlen_q, seqlen_k, window, T), p, 0.0)
    return p, capped


@triton.jit
def mask_outside(
    p, first, full_begin, full_end, m_idx, n_idx, window, seqlen_q, seqlen_k, RAGGED: tl.constexpr, T: tl.constexpr
):
    """P of a tile in a loop whose part from full_begin to full_end needs no mask: one branch per tile. RAGGED: the last
    tile may lack keys.
    """
    if T.HAS_LEFT or T.HAS_RIGHT or RAGGED:
        if (first < full_begin) | (first >= full_end):
            p = tl.where(keep_in_band(m_idx, n_idx, seqlen_q, seqlen_k, window, T), p, 0.0)
    return p


@triton.jit
def loop_bounds(begin, full_begin, full_end, end, whole, JOINED: tl.constexpr):
    """The Stretches of a kernel's two loops. JOINED: tiles below `whole`, where all rows and keys exist, then the rest.
    Otherwise: tiles that need no mask, then those on either side of them.
    """
    if JOINED:
        stop = tl.minimum(end, whole)
        return Stretch(begin, stop, stop, stop), Stretch(tl.maximum(begin, whole), end, end, end)
    return Stretch(full_begin, full_end, full_end, full_end), Stretch(begin, full_begin, full_end, end)


@triton.jit
def listed_bounds(entries, begin, end, length, BLOCK: tl.constexpr, BANDED: tl.constexpr):
    """The same, in blocks of a list: those below the last whole block of `length` rows, then the rest."""
    lower, upper = listed_steps(entries, begin, end, BLOCK, BANDED)
    whole = upper
    if length % BLOCK != 0:
        whole = tl.minimum(blocks_before(entries, length // BLOCK * BLOCK, BLOCK), upper)
    whole = tl.maximum(whole, lower)
    return Stretch(lower, whole, whole, whole), Stretch(whole, upper, upper, upper)


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
def as_operand(tile, always, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """A tile of P or dS for the next product. SPLIT: behind a branch that is always taken, where Triton does not find
    that product. Otherwise it gives every warpgroup all columns of the scores, and two of them the same work.
    """
    if not SPLIT:
        return tile.to(DTYPE)
    narrow = tl.zeros(tile.shape, DTYPE)
    if always:
        narrow = tile.to(DTYPE)
    return narrow


@triton.jit
def group_steps(begin, stop, HEADS: tl.constexpr, STEP: tl.constexpr):
    """(lower, upper) of the loop over all query tiles of some heads; see `group_step`."""
    if HEADS == 1:
        return begin, stop
    return begin * 0, (stop - begin + STEP - 1) // STEP * HEADS


@triton.jit
def group_step(step, begin, upper, first_head, HEADS: tl.constexpr, STEP: tl.constexpr):
    """(head, position) of a step: the steps of one head are positions, those of several count tiles, head by head."""
    if HEADS == 1:
        return first_head, step
    per_head = upper // HEADS
    return first_head + step // per_head, begin + step % per_head * STEP


@triton.jit
def described_stat(desc, stats, batch_idx, head, q_start, first, T: tl.constexpr):
    """A statistic of a tile of queries by TMA; `stats` are its rows. By pointers each thread would copy what it needs,
    32 times as much.
    """
    at = head * stats.stride_head + first
    if T.PACKED_Q:
        at += (q_start // STAT_TILE + batch_idx) * STAT_TILE
    else:
        at += batch_idx * stats.stride_batch
    return desc.load([at.to(tl.int32)])


@triton.jit
def load_stat(
    stats, beyond, first, batch_idx, head, q_start, seqlen_q,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A statistic of a tile of queries. Rows past the end are stored in whole tiles (except for single tokens, where
    they are `beyond`): a mask that depends on the length would prevent vector loads.
    """
    m_row = first + tl.arange(0, BLOCK_M)
    at = stat_base(stats, batch_idx, head, q_start, T) + m_row * stats.stride_row
    if EDGE and T.PAGED and not T.PACKED_Q:
        return tl.load(at, mask=m_row < seqlen_q, other=beyond)
    return tl.load(at)


@triton.jit
def load_stats(
    lse_unit, delta, first, batch_idx, head, q_start, seqlen_q,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(lse, delta) of a tile of queries: +inf and 0 past the end, which makes P 0."""
    lse_tile = load_stat(lse_unit, float("inf"), first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)
    return lse_tile, load_stat(delta, 0.0, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)


@triton.jit
def key_gradient_loop(
    dk, dv, k_tile, v_tile, q, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta,
    terms, place, scalars, window, seqlen_q, seqlen_k, stretch,
    full_begin, full_end, entries, bits,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, EARLY_DP: tl.constexpr,
    DP_FIRST: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries begin..gap_begin and gap_end..end of HEADS heads to dK (OF_K) and dV (OF_V).
    Queries from full_begin to full_end need no mask. EDGE: rows may not exist (JOINED), or scores may be masked. With a
    tile mask (JOINED), begin..end count the blocks that its list `entries` has.

    Works on transposed scores (keys are rows). One loop runs over heads and tiles, because ptxas serialises wgmma in
    nested loops.
    """
    begin, gap_begin, gap_end, end = stretch
    STAGES: tl.constexpr = 1 if EDGE and JOINED else None
    STEP: tl.constexpr = BLOCK_M if entries is None else 1
    n_first, first_head, batch_idx, q_start = place
    n_idx = (n_first + tl.arange(0, BLOCK_N))[:, None]
    lower, upper = group_steps(begin, loop_end(gap_begin, gap_end, end, EDGE, JOINED), HEADS, STEP)
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    if lower < upper:
        tl.assume(lower < upper)
        if entries is not None:
            first, kind = listed_block(entries, begin, BLOCK_M)
        for step in tl.range(lower, upper, STEP if HEADS == 1 else 1, num_stages=STAGES):
            head, position = group_step(step, begin, upper, first_head, HEADS, STEP)
            if entries is None:
                first = around_gap(position, gap_begin, gap_end, EDGE and not JOINED)
            m_row = first + tl.arange(0, BLOCK_M)
            if OF_K and DP_FIRST:
                dout_tile = load_queries(
                    dout, dout_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV,
                    T
                )  # fmt: skip
                dp = dot(v_tile, tl.trans(dout_tile), T)
            q_tile = load_queries(
                q, q_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
            )
            if not (OF_K and DP_FIRST):
                dout_tile = load_queries(
                    dout, dout_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV,
                    T
                )  # fmt: skip
            if lse_desc is not None:
                lse_tile = described_stat(lse_desc, lse_unit, batch_idx, head, q_start, first, T)
                delta_tile = described_stat(delta_desc, delta, batch_idx, head, q_start, first, T)
            else:
                lse_tile, delta_tile = load_stats(
                    lse_unit, delta, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T
                )
            row_terms = score_terms(terms, batch_idx, head, m_row[None, :], seqlen_q, T)
            dots = dot(k_tile, tl.trans(q_tile), T)
            if OF_K and EARLY_DP and not DP_FIRST:
                dp = dot(v_tile, tl.trans(dout_tile), T)
            # A bias is read with its key bound checked: the last key tile may be incomplete even where no score is
            # masked.
            p, capped = probabilities(
                dots, lse_tile[None, :], m_row[None, :], n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, EDGE or
                T.HAS_BIAS or T.HAS_MASK, T
            )  # fmt: skip
            if JOINED and not EDGE:
                p = mask_outside(
                    p, first, full_begin, full_end, m_row[None, :], n_idx, window, seqlen_q, seqlen_k, False, T
                )
            if entries is not None:
                if kind >= 0:
                    p = tl.where(are_seen_at(bits, kind, m_row[None, :], n_idx), p, 0.0)
            keep = True
            kept = p
            if T.HAS_DROPOUT:
                keep = tl.trans(
                    dropout_keep(row_terms.seed, m_row, n_first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
                )
                kept = tl.where(keep, p * scalars.keep_scale, 0.0)
            if OF_V:
                dv = dot_add(as_operand(kept, step < upper, dout_tile.dtype, SPLIT), dout_tile, dv, T)
            if OF_K:
                if not (EARLY_DP or DP_FIRST):
                    dp = dot(v_tile, tl.trans(dout_tile), T)
                _, ds = score_gradient(p, dp, capped, delta_tile[None, :], keep, scalars, T)
                dk = dot_add(as_operand(ds, step < upper, q_tile.dtype, SPLIT), q_tile, dk, T)
            if entries is not None:
                _, following = group_step(tl.minimum(step + 1, upper - 1), begin, upper, first_head, HEADS, STEP)
                first, kind = listed_block(entries, following, BLOCK_M)
    return dk, dv


@triton.jit
def key_gradient_loops(
    dk, dv, k_tile, v_tile, q, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta,
    terms, place, scalars, window, seqlen_q, seqlen_k, lists, bits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, EARLY_DP: tl.constexpr, DP_FIRST: tl.constexpr,
    SPLIT: tl.constexpr, JOINED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of all queries of HEADS heads to dK and dV."""
    n_first, first_head, batch_idx, _ = place
    begin, full_begin, full_end, end = query_range(n_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    entries = None
    if lists is None:
        whole = seqlen_q // BLOCK_M * BLOCK_M
        inner, outer = loop_bounds(begin, full_begin, full_end, end, whole, JOINED)
    else:
        entries = list_of(lists, batch_idx, first_head, n_first)
        inner, outer = listed_bounds(entries, begin, end, seqlen_q, BLOCK_M, T.HAS_LEFT or T.HAS_RIGHT)
    BOXED: tl.constexpr = q_desc is not None
    if BOXED:  # missing rows are zeros with an lse of +inf: one loop takes all tiles
        inner = Stretch(inner.begin, outer.end, outer.end, outer.end)
    dk, dv = key_gradient_loop(
        dk, dv, k_tile, v_tile, q, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta, terms, place,
        scalars, window, seqlen_q, seqlen_k, inner, full_begin, full_end, entries, bits, False, BLOCK_M, BLOCK_N, HEADS,
        EARLY_DP, DP_FIRST, SPLIT, JOINED, OF_K, OF_V, T
    )  # fmt: skip
    if not BOXED:
        dk, dv = key_gradient_loop(
            dk, dv, k_tile, v_tile, q, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta, terms, place,
            scalars, window, seqlen_q, seqlen_k, outer, full_begin, full_end, entries, bits, True, BLOCK_M, BLOCK_N,
            HEADS, EARLY_DP, DP_FIRST, SPLIT, JOINED, OF_K, OF_V, T
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def key_gradient_kernel(
    q, k, v, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit, delta, dk, dv, terms, tile_columns, tile_bits,
    lengths, paging, work, sizes, window, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_DP: tl.constexpr, DP_FIRST: tl.constexpr,
    SPLIT: tl.constexpr, JOINED: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr,
):  # fmt: skip
    """Write dK (OF_K) and dV (OF_V) of one (key tile, K/V head, sequence), summed over the query heads of the group
    inside the program. `work` lists the tiles of packed keys. A sum of wide heads takes half of the registers of an SM,
    so there each of the two has its own programs.
    """
    if work is not None:
        num_blocks = sizes.total_k // BLOCK_N + sizes.batch
        block, kv_head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = listed_item(
            work, num_blocks, sizes.num_heads // T.GROUP_SIZE, sizes.heads_per_wave
        )
    else:
        num_blocks = (sizes.seqlen_k + BLOCK_N - 1) // BLOCK_N
        if tile_columns is not None:
            num_blocks = num_listed_blocks(sizes.seqlen_k, BLOCK_N)
        block, kv_head, batch_idx = work_item(
            num_blocks, sizes.num_heads // T.GROUP_SIZE, sizes,
            T.HAS_LEFT and not T.HAS_RIGHT and tile_columns is None,
        )  # fmt: skip
        if tile_columns is not None:
            block = ranked_block(tile_columns, batch_idx, kv_head * T.GROUP_SIZE, block, BLOCK_N)
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    n_first = block * BLOCK_N
    if n_first >= seqlen_k:
        return
    table = page_table(paging, batch_idx, T)
    k_source = Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, None, None, 0)
    v_source = Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, None, None, 0)
    pages = key_pages(k_source, n_first, seqlen_k, BLOCK_N, T)
    k_tile = load_keys(k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    dk_acc = zeros(BLOCK_N, T.BLOCK_D)
    dv_acc = zeros(BLOCK_N, T.BLOCK_DV)
    # One loop takes all heads of a group, unless each has its own tiles.
    HEADS: tl.constexpr = 1 if T.OWN_LISTS else T.GROUP_SIZE
    for member in tl.range(0, T.GROUP_SIZE // HEADS):
        place = KeyTile(n_first, kv_head * T.GROUP_SIZE + member, batch_idx, q_start)
        dk_acc, dv_acc = key_gradient_loops(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, q_desc, dout_desc, lse_desc, delta_desc, lse_unit,
            delta, terms, place, scalars, window, seqlen_q, seqlen_k, tile_columns,
            tile_bits, BLOCK_M, BLOCK_N, HEADS, EARLY_DP, DP_FIRST, SPLIT, JOINED, OF_K, OF_V, T
        )  # fmt: skip
    dk_base = head_base(dk, batch_idx, kv_head, k_start, T.PACKED_K)
    dv_base = head_base(dv, batch_idx, kv_head, k_start, T.PACKED_K)
    if OF_K:
        store_rows(dk_acc * scalars.scale, dk_base, dk.stride_row, n_first, seqlen_k, T.HEAD_DIM)
    if OF_V:
        store_rows(dv_acc, dv_base, dv.stride_row, n_first, seqlen_k, T.HEAD_DIM_V)


@triton.jit
def query_gradient_loop(
    dq, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q,
    seqlen_k, stretch, full_begin, full_end, entries, bits,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, DP_FIRST: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys begin..gap_begin and gap_end..end to dQ; see key_gradient_loop."""
    begin, gap_begin, gap_end, end = stretch
    STEP: tl.constexpr = BLOCK_N if entries is None else 1
    STAGES: tl.constexpr = 1 if EDGE and JOINED else None
    BOXED: tl.constexpr = k_source.box is not None
    _m_first, m_idx, head, batch_idx = place
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    stop = loop_end(gap_begin, gap_end, end, EDGE, JOINED)
    if begin < stop:
        tl.assume(begin < stop)
        if entries is None:
            first = around_gap(begin, gap_begin, gap_end, EDGE and not JOINED)
        else:
            first, kind = listed_block(entries, begin, BLOCK_N)
        pages = key_pages(k_source, first, seqlen_k, BLOCK_N, T)
        for position in tl.range(begin, stop, STEP, num_stages=STAGES):
            if entries is None:
                first = around_gap(position, gap_begin, gap_end, EDGE and not JOINED)
            n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            if DP_FIRST:
                v_tile = load_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
                dp = dot(dout_tile, tl.trans(v_tile), T)
            k_tile = load_keys(k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
            if not DP_FIRST:
                v_tile = load_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
            dots = dot(q_tile, tl.trans(k_tile), T)
            if not DP_FIRST:
                dp = dot(dout_tile, tl.trans(v_tile), T)
            p, capped = probabilities(
                dots, lse_tile[:, None], m_idx[:, None], n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, EDGE or
                (BOXED and (T.HAS_BIAS or T.HAS_MASK)), T
            )  # fmt: skip
            if JOINED and not EDGE:
                p = mask_outside(
                    p, first, full_begin, full_end, m_idx[:, None], n_idx, window, seqlen_q, seqlen_k, BOXED, T
                )
            if entries is not None:
                if kind >= 0:
                    p = tl.where(are_seen(bits, kind, m_idx[:, None], first, BLOCK_N), p, 0.0)
            keep = True
            if T.HAS_DROPOUT:
                keep = dropout_keep(row_terms.seed, m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
            _, ds = score_gradient(p, dp, capped, delta_tile[:, None], keep, scalars, T)
            dq = dot_add(as_operand(ds, position < stop, k_tile.dtype, SPLIT), k_tile, dq, T)
            if entries is not None:
                first, kind = listed_block(entries, tl.minimum(position + 1, stop - 1), BLOCK_N)
                pages = key_pages(k_source, first, seqlen_k, BLOCK_N, T)
            elif T.PAGED:
                following = around_gap(position + BLOCK_N, gap_begin, gap_end, EDGE and not JOINED)
                pages = key_pages(k_source, following, seqlen_k, BLOCK_N, T)
    return dq


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def query_gradient_kernel(
    q, k, v, dout, k_desc, v_desc, lse_unit, delta, dq, terms, tile_rows, tile_bits, lengths, paging, work, sizes,
    window, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DP_FIRST: tl.constexpr, SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Write dQ of one (query tile, head, sequence). `work` lists the tiles of packed queries."""
    if work is not None:
        num_blocks = sizes.total_q // BLOCK_M + sizes.batch
        block, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = listed_item(
            work, num_blocks, sizes.num_heads, sizes.heads_per_wave
        )
    else:
        num_blocks = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
        if tile_rows is not None:
            num_blocks = num_listed_blocks(sizes.seqlen_q, BLOCK_M)
        block, head, batch_idx = work_item(num_blocks, sizes.num_heads, sizes, T.HAS_RIGHT and tile_rows is None)
        if tile_rows is not None:
            block = ranked_block(tile_rows, batch_idx, head, block, BLOCK_M)
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    m_first = block * BLOCK_M
    if m_first >= seqlen_q:
        return
    m_idx = m_first + tl.arange(0, BLOCK_M)
    kv_head = head // T.GROUP_SIZE
    table = page_table(paging, batch_idx, T)
    key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, T.PACKED_K)
    k_source = Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, k_desc, key_place, 0)
    v_source = Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, v_desc, key_place, 0)
    q_tile = load_queries(q, None, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T)
    dout_tile = load_queries(
        dout, None, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, T
    )
    lse_tile, delta_tile = load_stats(lse_unit, delta, m_first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T)
    row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
    place = QueryTile(m_first, m_idx, head, batch_idx)
    acc = zeros(BLOCK_M, T.BLOCK_D)

    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    entries = None
    if tile_rows is None:
        whole = seqlen_k // BLOCK_N * BLOCK_N
        inner, outer = loop_bounds(begin, full_begin, full_end, end, whole, JOINED)
    else:
        entries = list_of(tile_rows, batch_idx, head, m_first)
        inner, outer = listed_bounds(entries, begin, end, seqlen_k, BLOCK_N, T.HAS_LEFT or T.HAS_RIGHT)
    BOXED: tl.constexpr = k_desc is not None
    if BOXED:  # one loop takes all tiles, and masks missing keys
        inner = Stretch(inner.begin, outer.end, outer.end, outer.end)
    acc = query_gradient_loop(
        acc, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q,
        seqlen_k, inner, full_begin, full_end, entries, tile_bits, False, BLOCK_N,
        DP_FIRST, SPLIT, JOINED, T
    )  # fmt: skip
    if not BOXED:
        acc = query_gradient_loop(
            acc, q_tile, dout_tile, lse_tile, delta_tile, k_source, v_source, place, row_terms, scalars, window,
            seqlen_q, seqlen_k, outer, full_begin, full_end, entries, tile_bits, True,
            BLOCK_N, DP_FIRST, SPLIT, JOINED, T
        )  # fmt: skip
    store_rows(
        acc * scalars.scale,
        head_base(dq, batch_idx, head, q_start, T.PACKED_Q),
        dq.stride_row,
        m_first,
        seqlen_q,
        T.HEAD_DIM,
    )


@triton.jit
def list_tiles(
    listed, cu_seqlens_q, seqlens_k, batch, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr
):
    """List the tiles of BLOCK queries (keys), with all programs together. Does nothing if `listed` is None."""
    if listed is not None:
        for item in tl.range(tl.program_id(0), batch * listed.parts, tl.num_programs(0)):
            list_blocks(
                item // listed.parts, item % listed.parts, listed.parts, listed.work, cu_seqlens_q, seqlens_k, batch,
                listed.rows_together, BLOCK, OF_KEYS, IS_PAGED,
            )  # fmt: skip


@triton.jit
def clear_tail(rows, cu_seqlens, batch):
    """Zero the rows past the last sequence of a packed gradient, with all programs together. Does nothing for None."""
    if rows is not None:
        clear_rows(rows.ptr, None, tl.load(cu_seqlens + batch), rows.total, 1, rows.width)


@triton.jit(
    do_not_specialize=["seqlens_k", "queries", "keys", "dq", "dk", "dv", "num_rows", "num_stored", "num_heads", "batch"]
)
def row_stats_kernel(
    out, dout, lse, dlse, dot_out, dot_lse, lse_unit, delta, mean, rate, cu_seqlens_q, seqlens_k, queries, keys, dq,
    dk, dv, num_rows, num_stored, num_heads, batch,
    T: tl.constexpr, BLOCK_M: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """lse_unit and delta of BLOCK_M rows; +inf and 0 for rows that are stored but do not exist. Grid: row tile
    (fastest), head, batch; packed sequences use the slots of one long sequence. For second derivatives also lse' and
    `rate` = rowsum(dout * out'): dot_out is None in a backward.

    In addition, all programs together list the tiles of `queries` and `keys` and clear the tails of dq, dk and dv.
    """
    list_tiles(queries, cu_seqlens_q, seqlens_k, batch, TILE_Q, False, IS_PAGED)
    list_tiles(keys, cu_seqlens_q, seqlens_k, batch, TILE_K, True, IS_PAGED)
    clear_tail(dq, cu_seqlens_q, batch)
    clear_tail(dk, seqlens_k, batch)
    clear_tail(dv, seqlens_k, batch)
    num_blocks = (num_stored + BLOCK_M - 1) // BLOCK_M
    stored = tl.program_id(0) % num_blocks * BLOCK_M
    head = tl.program_id(0) // num_blocks % num_heads
    batch_idx = tl.program_id(0) // num_blocks // num_heads
    first = stored
    start = 0
    if T.PACKED_Q:
        sequence, first_slot = sequence_of(stored // STAT_TILE, cu_seqlens_q, batch, STAT_TILE)
        start = tl.load(cu_seqlens_q + sequence)
        num_rows = tl.load(cu_seqlens_q + sequence + 1) - start
        first = stored - first_slot * STAT_TILE
    rows = first + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    out_base = head_base(out, batch_idx, head, start, T.PACKED_Q)
    dout_base = head_base(dout, batch_idx, head, start, T.PACKED_Q)
    out_tile = load_rows(out_base, out.stride_row, first, num_rows, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    dout_tile = load_rows(dout_base, dout.stride_row, first, num_rows, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    sums = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    at = head_base(lse, batch_idx, head, start, T.PACKED_Q) + rows * lse.stride_row
    value = tl.load(at, mask=row_ok, other=NEG_INF)
    if dlse is not None:
        at = head_base(dlse, batch_idx, head, start, T.PACKED_Q) + rows * dlse.stride_row
        sums -= tl.load(at, mask=row_ok, other=0.0).to(tl.float32)
    empty = value == NEG_INF
    if not T.TRANSFORMED:
        value = lse_in_log2(value)
    places = stored + tl.arange(0, BLOCK_M)
    lse_at = head_base(lse_unit, batch_idx, head, start, False) + places * lse_unit.stride_row
    delta_at = head_base(delta, batch_idx, head, start, False) + places * delta.stride_row
    tl.store(lse_at, tl.where(empty, float("inf"), value), mask=places < num_stored)
    tl.store(delta_at, tl.where(empty, 0.0, sums), mask=places < num_stored)
    if dot_out is not None:
        base = head_base(dot_out, batch_idx, head, start, T.PACKED_Q)
        dot_tile = load_rows(base, dot_out.stride_row, first, num_rows, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
        rates = tl.sum(dot_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
        at = head_base(dot_lse, batch_idx, head, start, T.PACKED_Q) + rows * dot_lse.stride_row
        means = tl.load(at, mask=row_ok, other=0.0)
        mean_at = head_base(mean, batch_idx, head, start, False) + places * mean.stride_row
        rate_at = head_base(rate, batch_idx, head, start, False) + places * rate.stride_row
        tl.store(mean_at, tl.where(empty, 0.0, means), mask=places < num_stored)
        tl.store(rate_at, tl.where(empty, 0.0, rates), mask=places < num_stored)


@triton.jit
def tile_is_seen(
    m_first, n_first, seqlen_q, seqlen_k, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):
    """Whether some query of the tile sees some of its keys."""
    m_last = tl.minimum(m_first + BLOCK_M, seqlen_q) - 1
    n_last = tl.minimum(n_first + BLOCK_N, seqlen_k) - 1
    seen = (m_first <= m_last) & (n_first <= n_last)
    if T.HAS_RIGHT:
        seen = seen & (n_first <= m_last + seqlen_k - seqlen_q + window.right)
    if T.HAS_LEFT:
        seen = seen & (n_last >= m_first + seqlen_k - seqlen_q - window.left)
    return seen


@triton.jit
def tile_score_gradient(
    q, k, v, dout, lse_unit, delta, terms, tile_map, tile_bits, paging, window, scalars,
    batch_idx, head,
    m_first, n_first, q_start, seqlen_q, k_start, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradient of the biased scores of one (BLOCK_M, BLOCK_N) tile; 0 outside the sequence and the band."""
    m_idx = m_first + tl.arange(0, BLOCK_M)
    n_idx = (n_first + tl.arange(0, BLOCK_N))[None, :]
    kv_head = head // T.GROUP_SIZE
    table = page_table(paging, batch_idx, T)
    q_tile = load_queries(q, None, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T)
    dout_tile = load_queries(
        dout, None, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, T
    )
    k_source = Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, None, None, 0)
    v_source = Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, None, None, 0)
    pages = key_pages(k_source, n_first, seqlen_k, BLOCK_N, T)
    k_tile = load_keys(k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    lse_tile, delta_tile = load_stats(lse_unit, delta, m_first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T)
    row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
    keep = True
    if T.HAS_DROPOUT:
        keep = dropout_keep(row_terms.seed, m_idx, n_first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
    dots = dot(q_tile, tl.trans(k_tile), T)
    dp = dot(dout_tile, tl.trans(v_tile), T)
    p, capped = probabilities(
        dots, lse_tile[:, None], m_idx[:, None], n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, True, T
    )
    if tile_map is not None:
        kind = kind_at(tile_map, batch_idx, head, m_first, n_first)
        p = hide_listed(p, tile_bits, kind, m_idx[:, None], n_first, BLOCK_N)
    ds_bias, _ = score_gradient(p, dp, capped, delta_tile[:, None], keep, scalars, T)
    return ds_bias


@triton.jit
def bias_tile(shape, num_shares, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The BiasTile of a program and its Repetitions; `shape` is the bias's own."""
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
    per_share = (reps + num_shares - 1) // num_shares
    first, end = share * per_share, tl.minimum((share + 1) * per_share, reps)
    own = BiasTile(share, own_n_block, own_m_block, own_head, own_batch)
    return own, Repetitions(m_reps, n_reps, head_reps, first, end)


@triton.jit
def repetition(rep, own, reps):
    """(query tile, key tile, head, sequence) of a repetition of a bias tile."""
    _share, own_n_block, own_m_block, own_head, own_batch = own
    m_reps, n_reps, head_reps, _first, _end = reps
    m_block = own_m_block + rep % m_reps
    n_block = own_n_block + rep // m_reps % n_reps
    head = own_head + rep // m_reps // n_reps % head_reps
    batch_idx = own_batch + rep // m_reps // n_reps // head_reps
    return m_block, n_block, head, batch_idx


@triton.jit
def store_bias_tile(acc, dbias, own, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write a share of a tile; dbias is (num_shares, *shape), contiguous."""
    share, own_n_block, own_m_block, own_head, own_batch = own
    bias_batch, bias_heads, bias_rows, bias_cols = shape
    rows = own_m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = own_n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    plane = ((share * bias_batch + own_batch).to(tl.int64) * bias_heads + own_head) * bias_rows * bias_cols
    store_reduced(acc, dbias + plane, rows, cols, bias_rows, bias_cols)


@triton.jit(do_not_specialize=["sizes", "window", "scalars", "shape", "num_shares"])
def bias_gradient_kernel(
    q, k, v, dout, lse_unit, delta, dbias, terms, tile_map, tile_bits, lengths, paging, sizes,
    window, scalars, shape, num_shares,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One share of one dbias tile."""
    own, reps = bias_tile(shape, num_shares, sizes, BLOCK_M, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for rep in range(reps.first, reps.end):
        m_block, n_block, head, batch_idx = repetition(rep, own, reps)
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
        if tile_is_seen(m_block * BLOCK_M, n_block * BLOCK_N, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T):
            acc += tile_score_gradient(
                q, k, v, dout, lse_unit, delta, terms, tile_map, tile_bits, paging, window,
                scalars, batch_idx, head, m_block * BLOCK_M, n_block * BLOCK_N, q_start, seqlen_q, k_start, seqlen_k,
                BLOCK_M, BLOCK_N, T
            )  # fmt: skip
    store_bias_tile(acc, dbias, own, shape, BLOCK_M, BLOCK_N)


@triton.jit
def store_reduced(acc, plane, rows, cols, num_rows, num_cols):
    """Write a tile, first summed over rows or columns where the bias has only one."""
    if num_rows == 1:
        acc = tl.where(rows[:, None] == 0, tl.sum(acc, 0)[None, :], 0.0)
    if num_cols == 1:
        acc = tl.where(cols[None, :] == 0, tl.sum(acc, 1)[:, None], 0.0)
    at = plane + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    tl.store(at, acc.to(plane.dtype.element_ty), mask=(rows[:, None] < num_rows) & (cols[None, :] < num_cols))


@triton.jit(do_not_specialize=["num_kv_heads", "max_pages"])
def gather_pages_kernel(
    rows, pages, order, page_ends, seqlens_k, num_kv_heads, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the rows of every table entry that names this page. Grid: page * num_kv_heads. `rows` is fp32 (batch, head,
    key, dim).
    """
    head = tl.program_id(0) % num_kv_heads
    page = tl.program_id(0) // num_kv_heads
    begin = tl.load(page_ends + page - 1, mask=page > 0, other=0)
    end = tl.load(page_ends + page)
    d_idx = tl.arange(0, BLOCK_D)[None, :]
    for slot in tl.range(0, PAGE_SIZE, BLOCK_S):
        slots = slot + tl.arange(0, BLOCK_S)[:, None]
        acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        for i in tl.range(begin, end):
            entry = tl.load(order + i)
            batch_idx = entry // max_pages
            n_idx = entry % max_pages * PAGE_SIZE + slots
            base = rows.ptr + batch_idx * rows.stride_batch + tl.cast(head, tl.int64) * rows.stride_head
            ok = (slots < PAGE_SIZE) & (n_idx < tl.load(seqlens_k + batch_idx)) & (d_idx < DIM)
            acc += tl.load(base + n_idx * rows.stride_row + d_idx, mask=ok, other=0.0)
        base = pages.ptr + tl.cast(page, tl.int64) * pages.stride_batch + tl.cast(head, tl.int64) * pages.stride_head
        at = base + slots * pages.stride_row + d_idx
        tl.store(at, acc.to(pages.ptr.dtype.element_ty), mask=(slots < PAGE_SIZE) & (d_idx < DIM))


def entries_by_page(block_table: Tensor, seqlens_k: Tensor, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(order, page_ends): flat table entries in use, sorted by page, and where each page's entries end. Does not
    synchronise.
    """
    max_pages = block_table.shape[1]
    first_key = torch.arange(max_pages, device=block_table.device) * page_size
    used = first_key[None, :] < seqlens_k[:, None]
    pages, order = torch.where(used, block_table, num_pages).flatten().sort(stable=True)
    ends = torch.searchsorted(pages, torch.arange(num_pages, device=pages.device, dtype=pages.dtype), right=True)
    return order, ends
