"""Tangents: out, lse, out' and lse' of a query tile in one pass over its keys (docs/derivatives.md).

The loop is the forward's. Next to the scores it computes S' = scale (q'.k + q.k'), with softcap's slope and the tangent
of a bias, and keeps two more sums: P S' of a row, and P ((S' - mean) v + v'). `mean` is P S' / P over the keys so far,
which ends as lse'. Without it the part of S' that all keys of a row share would be rounded in products of 16 bits, and
cancel only afterwards. When `mean` moves, the sum is corrected by that much of P v.

KNOWN: out and lse are given, as in a second derivative. Then P needs no running maximum, and P v is not summed again.
So `mean` cannot move: it is that of the first tile of which a row sees anything, which takes away what all keys share,
and the difference from lse' times out is subtracted at the end.

A tangent that is None is zero, and its products are not computed. Programs, tiles and lists of packed sequences are
those of the forward.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import QueryTile, RowTerms, Source, Sources, Stretch, TangentState
from tilewise.backends.gpu.work_list import clear_rows, listed_item
from tilewise.backends.triton.backward import probability
from tilewise.backends.triton.forward import finish, initial_state, plain_step, with_endless_sinks
from tilewise.backends.triton.listed import EMPTY, hide_scores, kind_at
from tilewise.backends.triton.primitives import (
    LOG2E,
    NEG_INF,
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
    load_columns,
    load_keys,
    load_queries,
    lse_in_log2,
    natural_scores,
    page_table,
    query_span,
    row_pointers,
    score_terms,
    softmax_step,
    store_box,
    store_rows,
    work_item,
    zeros,
)

# Elements of lse' that a program clears at a time.
CLEARED = tl.constexpr(1024)


@triton.jit
def query_item(work, lengths, sizes, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """(first query, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k) of the program of a query tile."""
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
    return block * BLOCK_M, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k


@triton.jit
def product_tangents(a, b, dot_a, dot_b, HAS_A: tl.constexpr, HAS_B: tl.constexpr, T: tl.constexpr):
    """The tangent of a b^T: a' b^T + a b'^T, without the products of absent tangents."""
    if HAS_A and HAS_B:
        return dot_add(dot_a, tl.trans(b), dot(a, tl.trans(dot_b), T), T)
    elif HAS_A:
        return dot(dot_a, tl.trans(b), T)
    elif HAS_B:
        return dot(a, tl.trans(dot_b), T)
    else:
        return zeros(a.shape[0], b.shape[0])


@triton.jit
def bias_tangent_rows(dot_bias, batch_idx, head, m_idx, seqlen_q):
    """The tangent of a bias in the form of the bias of RowTerms; zeros without one."""
    if dot_bias is None:
        return RowTerms(0.0, 0, 0, 0, 0, 0)
    else:
        rows = row_pointers(dot_bias, batch_idx, head, m_idx, seqlen_q)
        return RowTerms(0.0, rows, dot_bias.stride_col, 0, 0, 0)


@triton.jit
def score_tangents(
    products, p, capped, dot_bias, n_idx, seqlen_k, scalars, CHECK: tl.constexpr, A: tl.constexpr, T: tl.constexpr
):
    """(raw', S') of a tile: the tangents of scale q.k and of the score. 0 where P is: scores that no row sees may have
    overflowed.
    """
    raw = tl.where(p > 0.0, products * scalars.scale, 0.0)
    score = raw
    if T.HAS_SOFTCAP:
        ratio = capped / scalars.softcap
        score = raw * (1.0 - ratio * ratio)
    if A.BIAS:
        score += load_columns(dot_bias.bias_rows, dot_bias.bias_stride, n_idx, seqlen_k, CHECK).to(tl.float32)
    return raw, score


@triton.jit
def row_mean(sums, row_sum):
    """Sums over P divided by the sum of P; 0 for rows without keys."""
    return sums / tl.where(row_sum == 0.0, 1.0, row_sum)


@triton.jit
def sink_share(sinks, head, lse, T: tl.constexpr):
    """The probability of a row's sink. Of a sink of +inf, lse is +inf too."""
    if T.HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        share = tl.exp2((sink - tl.where(lse == sink, 0.0, lse)) * LOG2E)
        return tl.where(lse == sink, tl.where(sink == NEG_INF, 0.0, 1.0), share)
    else:
        return 0.0


@triton.jit
def tangent_step(
    state, q_tile, dot_q_tile, sources, pages, first, place, row_terms, dot_bias, scalars, window, seqlen_q, seqlen_k,
    full_begin, full_end, tile_bits, kind,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_N: tl.constexpr, KNOWN: tl.constexpr, A: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Advance the state of a query tile (see tangent_loop) by the keys first..first+BLOCK_N. `kind` is that of the tile
    in a tile mask.
    """
    acc, dot_acc, row_max, row_sum, dot_sum, mean = state
    k_source, v_source, dot_k_source, dot_v_source = sources
    _m_first, m_idx, head, batch_idx = place
    n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
    k_tile = load_keys(k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    dot_k_tile = k_tile
    if A.K:
        dot_k_tile = load_keys(dot_k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    dots = dot(q_tile, tl.trans(k_tile), T)
    products = product_tangents(q_tile, k_tile, dot_q_tile, dot_k_tile, A.Q, A.K, T)
    scores, capped = dots, dots
    if T.TRANSFORMED:
        # The last tile of boxed keys may be incomplete, so a bias is read with its bound checked.
        scores, capped = natural_scores(
            dots, m_idx[:, None], n_idx, row_terms, scalars, seqlen_q, seqlen_k, EDGE or BOXED, T
        )
    if BOXED:
        if (first < full_begin) | (first >= full_end):
            scores = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), scores, NEG_INF)
    elif EDGE:
        scores = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), scores, NEG_INF)
    if tile_bits is not None:
        scores = hide_scores(scores, tile_bits, kind, m_idx[:, None], n_idx)
    if KNOWN:
        p = probability(scores, row_max[:, None], scalars, T)
    else:
        tops = tl.max(scores, 1)
        if T.TRANSFORMED:
            p, row_max, row_sum, alpha = softmax_step(scores, tops, row_max, row_sum, LOG2E)
        else:
            p, row_max, row_sum, alpha = plain_step(scores, tops, row_max, row_sum, scalars.scale * LOG2E, T)
        dot_sum = dot_sum * alpha
    score = products
    tile_sum = tl.zeros_like(dot_sum)
    if A.Q or A.K or A.BIAS:
        _, score = score_tangents(products, p, capped, dot_bias, n_idx, seqlen_k, scalars, EDGE or BOXED, A, T)
        tile_sum = tl.sum(p * score, 1)
    dot_sum += tile_sum
    if KNOWN:
        seen = tl.sum(p, 1)
        mean = tl.where(row_sum == 0.0, row_mean(tile_sum, seen), mean)
        row_sum += seen
    else:
        new_mean = row_mean(dot_sum, row_sum)
        dot_acc = (dot_acc + (mean - new_mean)[:, None] * acc) * alpha[:, None]
        acc = acc * alpha[:, None]
        mean = new_mean
    v_tile = load_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    kept = p
    if T.HAS_DROPOUT:
        keep = dropout_keep(row_terms.seed, m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
        kept = tl.where(keep, p, 0.0)
    weights = kept.to(v_tile.dtype)
    if not KNOWN:
        acc = dot_add(weights, v_tile, acc, T)
    if A.Q or A.K or A.BIAS or (A.SINKS and not KNOWN):
        dot_acc = dot_add((kept * (score - mean[:, None])).to(v_tile.dtype), v_tile, dot_acc, T)
    if A.V:
        dot_v_tile = load_keys(dot_v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
        dot_acc = dot_add(weights, dot_v_tile, dot_acc, T)
    return TangentState(acc, dot_acc, row_max, row_sum, dot_sum, mean)


@triton.jit
def tangent_loop(
    state, q_tile, dot_q_tile, sources, place, row_terms, dot_bias, scalars, window, seqlen_q, seqlen_k, stretch,
    full_begin, full_end, tile_map, tile_bits,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_N: tl.constexpr, KNOWN: tl.constexpr, A: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Advance a query tile over the keys begin..gap_begin and gap_end..end. EDGE tiles are masked. BOXED: so are those
    that are not between full_begin and full_end. Tiles that a tile mask hides are skipped. The state: sums of P v and
    P ((S' - mean) v + v'), row_max, row_sum, sum of P S', mean. If KNOWN, the first is 0 and row_max is lse.
    """
    begin, gap_begin, gap_end, end = stretch
    acc, dot_acc, row_max, row_sum, dot_sum, mean = state
    m_first, _m_idx, head, batch_idx = place
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    stop = gap_begin + tl.maximum(end - gap_end, 0)
    if begin < stop:
        tl.assume(begin < stop)
        pages = key_pages(sources.k, around_gap(begin, gap_begin, gap_end, EDGE), seqlen_k, BLOCK_N, T)
        for position in tl.range(begin, stop, BLOCK_N):
            first = around_gap(position, gap_begin, gap_end, EDGE)
            now = TangentState(acc, dot_acc, row_max, row_sum, dot_sum, mean)
            if tile_map is not None:
                kind = kind_at(tile_map, batch_idx, head, m_first, first)
                if kind != EMPTY:
                    acc, dot_acc, row_max, row_sum, dot_sum, mean = tangent_step(
                        now, q_tile, dot_q_tile, sources, pages, first, place, row_terms, dot_bias, scalars, window,
                        seqlen_q, seqlen_k, full_begin, full_end, tile_bits, kind, EDGE, BOXED, BLOCK_N, KNOWN, A, T
                    )  # fmt: skip
            else:
                acc, dot_acc, row_max, row_sum, dot_sum, mean = tangent_step(
                    now, q_tile, dot_q_tile, sources, pages, first, place, row_terms, dot_bias, scalars, window,
                    seqlen_q, seqlen_k, full_begin, full_end, None, 0, EDGE, BOXED, BLOCK_N, KNOWN, A, T
                )  # fmt: skip
            if T.PAGED:
                following = around_gap(position + BLOCK_N, gap_begin, gap_end, EDGE)
                pages = key_pages(sources.k, following, seqlen_k, BLOCK_N, T)
    return TangentState(acc, dot_acc, row_max, row_sum, dot_sum, mean)


@triton.jit
def clear_tails(out, lse, dot_out, dot_lse, lengths, sizes, KNOWN: tl.constexpr, T: tl.constexpr):
    """Rows of packed results that belong to no sequence, with all programs together: -inf in lse, 0 in the others."""
    begin = tl.load(lengths.cu_seqlens_q + sizes.batch)
    width = sizes.num_heads * T.HEAD_DIM_V
    if not KNOWN:
        clear_rows(out.ptr, lse.ptr, begin, sizes.total_q, sizes.num_heads, width)
    clear_rows(dot_out.ptr, None, begin, sizes.total_q, sizes.num_heads, width)
    for row in range(begin + tl.program_id(0), sizes.total_q, tl.num_programs(0)):
        for first in range(0, sizes.num_heads, CLEARED):
            heads = first + tl.arange(0, CLEARED)
            at = dot_lse.ptr + heads.to(tl.int64) * dot_lse.stride_head + row * dot_lse.stride_row
            tl.store(at, tl.zeros([CLEARED], tl.float32), mask=heads < sizes.num_heads)


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def tangent_kernel(
    q, k, v, dot_q, dot_k, dot_v, q_desc, k_desc, v_desc, dot_q_desc, dot_k_desc, dot_v_desc, out_desc, dot_out_desc,
    out, lse, dot_out, dot_lse, terms, dot_bias, tile_map, tile_bits, sinks, dot_sinks,
    lengths, paging, work, sizes, window, scalars,
    T: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Compute out, lse and their tangents of one (query tile, head, sequence); if KNOWN, only the tangents."""
    BOXED: tl.constexpr = q_desc is not None
    if T.PACKED_Q:
        clear_tails(out, lse, dot_out, dot_lse, lengths, sizes, KNOWN, T)
    m_first, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = query_item(work, lengths, sizes, BLOCK_M, T)
    if m_first >= seqlen_q:
        return
    m_idx = m_first + tl.arange(0, BLOCK_M)
    kv_head = head // T.GROUP_SIZE
    table = page_table(paging, batch_idx, T)
    key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, T.PACKED_K)
    k_source = Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, k_desc, key_place, 0)
    v_source = Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, v_desc, key_place, 0)
    dot_k_source = Source(dot_k, key_base(dot_k, batch_idx, kv_head, k_start, T), table, dot_k_desc, key_place, 0)
    dot_v_source = Source(dot_v, key_base(dot_v, batch_idx, kv_head, k_start, T), table, dot_v_desc, key_place, 0)
    sources = Sources(k_source, v_source, dot_k_source, dot_v_source)
    q_tile = load_queries(
        q, q_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
    )
    dot_q_tile = q_tile
    if A.Q:
        dot_q_tile = load_queries(
            dot_q, dot_q_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
        )
    row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
    dot_bias_rows = bias_tangent_rows(dot_bias, batch_idx, head, m_idx[:, None], seqlen_q)
    lse_at = head_base(lse, batch_idx, head, q_start, T.PACKED_Q) + m_idx * lse.stride_row
    row_max, row_sum = initial_state(sinks, head, True, scalars, BLOCK_M, T)
    dot_sum = tl.zeros([BLOCK_M], tl.float32)
    if A.SINKS:
        dot_sum = tl.where(row_sum > 0.0, tl.load(dot_sinks + head).to(tl.float32), dot_sum)
    if KNOWN:
        known_lse = tl.load(lse_at, mask=m_idx < seqlen_q, other=float("inf"))
        dot_sum = dot_sum * sink_share(sinks, head, known_lse, T)
        row_max = tl.where(known_lse == NEG_INF, float("inf"), known_lse if T.TRANSFORMED else lse_in_log2(known_lse))
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        state = TangentState(0.0, zeros(BLOCK_M, T.BLOCK_DV), row_max, row_sum, dot_sum, row_sum)
    else:
        mean = row_mean(dot_sum, row_sum)
        nothing = zeros(BLOCK_M, T.BLOCK_DV)
        state = TangentState(nothing, nothing, row_max, row_sum, dot_sum, mean)
    place = QueryTile(m_first, m_idx, head, batch_idx)

    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    if BOXED:
        state = tangent_loop(
            state, q_tile, dot_q_tile, sources, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(begin, end, end, end), full_begin, full_end, tile_map, tile_bits, False, True, BLOCK_N, KNOWN, A, T
        )  # fmt: skip
    else:
        state = tangent_loop(
            state, q_tile, dot_q_tile, sources, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(full_begin, full_end, full_end, full_end), full_begin, full_end, tile_map, tile_bits, False, False,
            BLOCK_N, KNOWN, A, T
        )  # fmt: skip
        state = tangent_loop(
            state, q_tile, dot_q_tile, sources, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(begin, full_begin, full_end, end), full_begin, full_end, tile_map, tile_bits, True, False, BLOCK_N,
            KNOWN, A, T
        )  # fmt: skip

    acc, dot_acc, row_max, row_sum, dot_sum, mean = state
    dot_lse_rows = dot_sum
    if KNOWN:
        if T.HAS_DROPOUT:
            dot_acc = dot_acc * scalars.keep_scale
        out_tile = load_queries(
            out, out_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, T
        )
        dot_result = dot_acc + (mean - dot_sum)[:, None] * out_tile.to(tl.float32)
    else:
        result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
        dot_lse_rows = row_mean(dot_sum, row_sum)
        dot_result = row_mean(dot_acc, row_sum[:, None])
        if T.HAS_DROPOUT:
            dot_result = dot_result * scalars.keep_scale
        if out_desc is not None:
            store_box(out_desc, box_place(batch_idx, head, q_start, seqlen_q, T.PACKED_Q), m_first, result)
        else:
            out_base = head_base(out, batch_idx, head, q_start, T.PACKED_Q)
            store_rows(result, out_base, out.stride_row, m_first, seqlen_q, T.HEAD_DIM_V)
        tl.store(lse_at, with_endless_sinks(lse_rows, T), mask=m_idx < seqlen_q)
    if dot_out_desc is not None:
        store_box(dot_out_desc, box_place(batch_idx, head, q_start, seqlen_q, T.PACKED_Q), m_first, dot_result)
    else:
        dot_out_base = head_base(dot_out, batch_idx, head, q_start, T.PACKED_Q)
        store_rows(dot_result, dot_out_base, dot_out.stride_row, m_first, seqlen_q, T.HEAD_DIM_V)
    dot_lse_base = head_base(dot_lse, batch_idx, head, q_start, T.PACKED_Q)
    tl.store(dot_lse_base + m_idx * dot_lse.stride_row, dot_lse_rows, mask=m_idx < seqlen_q)
