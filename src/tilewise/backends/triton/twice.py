"""Second derivatives: the gradients of <dout, out'> + <dlse, lse'> (docs/derivatives.md), in the form of backward.py.

Two kernels each own what they write, so results are repeatable: one the rows of dK and dV, one the rows of dQ. Both
recompute P from lse, S' from operands and tangents, X = dout.v and Y = dout.v', and with `delta`, `mean` = lse' and
`rate` = dout.out' of a row (row_stats_kernel) get

    dS = P (X - delta)      H = dS (S' - mean) + P (Y - rate)      W, U = H, dS through softcap
    dV = P (S' - mean) dout      dK = W q + U q'      dQ = W k + U k'

second_bias_kernel sums H over the dimensions in which the bias is broadcast.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import KeyTile, QueryTile, Source, Sources, Statistics, Stretch
from tilewise.backends.gpu.work_list import listed_item
from tilewise.backends.triton.backward import (
    bias_tile,
    described_stat,
    group_step,
    group_steps,
    load_stat,
    probabilities,
    repetition,
    store_bias_tile,
    tile_is_seen,
)
from tilewise.backends.triton.listed import EMPTY, hide_pairs, kind_at
from tilewise.backends.triton.primitives import (
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
    page_table,
    query_range,
    query_span,
    score_terms,
    store_rows,
    work_item,
    zeros,
)
from tilewise.backends.triton.tangent import bias_tangent_rows, product_tangents, query_item, score_tangents


@triton.jit
def stat_tile(
    stats, desc, beyond, first, batch_idx, head, q_start, seqlen_q,
    EDGE: tl.constexpr, BLOCK_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A statistic of a tile of queries, by TMA if there is a descriptor."""
    if desc is not None:
        return described_stat(desc, stats, batch_idx, head, q_start, first, T)
    return load_stat(stats, beyond, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)


@triton.jit
def row_stats(statistics, first, batch_idx, head, q_start, seqlen_q, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """The Statistics of a tile of queries."""
    lse_unit, delta, mean, rate = statistics
    return Statistics(
        load_stat(lse_unit, float("inf"), first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T),
        load_stat(delta, 0.0, first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T),
        load_stat(mean, 0.0, first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T),
        load_stat(rate, 0.0, first, batch_idx, head, q_start, seqlen_q, True, BLOCK_M, T),
    )


@triton.jit
def dropped(x, keep, scalars, T: tl.constexpr):
    """The tile times the factors of dropout."""
    if T.HAS_DROPOUT:
        x = tl.where(keep, x * scalars.keep_scale, 0.0)
    return x


@triton.jit
def bent(pull, p, centred, raw, capped, rate_rows, scalars, T: tl.constexpr):
    """(H / P but for Y, U, slope of the softcap, what its bend takes from H) of a tile. `pull` is X - delta, `centred`
    S' - mean, `raw` the tangent of scale * q.k. Without a softcap, the slope is 1 and the bend 0.
    """
    rest = pull * centred - rate_rows
    ds = p * pull
    if T.HAS_SOFTCAP:
        ratio = capped / scalars.softcap
        slope = 1.0 - ratio * ratio
        return rest, slope * ds, slope, (2.0 / scalars.softcap) * ratio * ds * raw
    else:
        return rest, ds, 1.0, 0.0


@triton.jit
def add_tangent_values(rest, a, b, keep, scalars, T: tl.constexpr):
    """Rest + Y, where Y is a b^T through dropout."""
    if T.HAS_DROPOUT:
        return rest + dropped(dot(a, tl.trans(b), T), keep, scalars, T)
    else:
        return dot_add(a, tl.trans(b), rest, T)


@triton.jit
def through_softcap(h, slope, bend, T: tl.constexpr):
    """W of H."""
    if T.HAS_SOFTCAP:
        h = slope * (h - bend)
    return h


@triton.jit
def key_step(
    dk, dv, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms, dot_bias, place, head,
    first, scalars, window, seqlen_q, seqlen_k, full_begin, full_end, tile_bits, kind,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, A: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries first..first+BLOCK_M of a head to dK and dV, on transposed scores. `kind` is
    that of the tile in a tile mask.
    """
    k_tile, v_tile, dot_k_tile, dot_v_tile = tiles
    lse_unit, delta, mean, rate = statistics
    lse_desc, delta_desc, mean_desc, rate_desc = stat_boxes
    n_first, _kv_head, batch_idx, q_start = place
    n_idx = (n_first + tl.arange(0, BLOCK_N))[:, None]
    m_row = first + tl.arange(0, BLOCK_M)
    q_tile = load_queries(q, q_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T)
    dot_q_tile = q_tile
    if A.Q:
        dot_q_tile = load_queries(
            dot_q, dot_q_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM, T.BLOCK_D,
            T
        )  # fmt: skip
    dout_tile = load_queries(
        dout, dout_desc, batch_idx, head, q_start, first, seqlen_q, EDGE, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, T
    )
    # Every statistic takes a register for each column of a thread, so each is loaded where it is used.
    lse_tile = stat_tile(lse_unit, lse_desc, float("inf"), first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)
    row_terms = score_terms(terms, batch_idx, head, m_row[None, :], seqlen_q, T)
    dot_bias_rows = bias_tangent_rows(dot_bias, batch_idx, head, m_row[None, :], seqlen_q)
    dots = dot(k_tile, tl.trans(q_tile), T)
    products = product_tangents(k_tile, q_tile, dot_k_tile, dot_q_tile, A.K, A.Q, T)
    # A bias is read with its key bound checked: the last key tile may be incomplete even where no score is
    # masked.
    CHECK: tl.constexpr = EDGE or T.HAS_BIAS or T.HAS_MASK
    p, capped = probabilities(
        dots, lse_tile[None, :], m_row[None, :], n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, CHECK, T
    )
    if BOXED:
        if (first < full_begin) | (first >= full_end):
            p = tl.where(keep_in_band(m_row[None, :], n_idx, seqlen_q, seqlen_k, window, T), p, 0.0)
    if tile_bits is not None:
        p = hide_pairs(p, tile_bits, kind, m_row[None, :], n_idx)
    raw, score = score_tangents(products, p, capped, dot_bias_rows, n_idx, seqlen_k, scalars, CHECK, A, T)
    keep = True
    if T.HAS_DROPOUT:
        keep = tl.trans(dropout_keep(row_terms.seed, m_row, n_first, head, batch_idx, scalars.drop_below, BLOCK_N, T))
    mean_tile = stat_tile(mean, mean_desc, 0.0, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)
    centred = score - mean_tile[None, :]
    dv = dot_add(dropped(p * centred, keep, scalars, T).to(dout_tile.dtype), dout_tile, dv, T)
    x = dot(v_tile, tl.trans(dout_tile), T)
    delta_tile = stat_tile(delta, delta_desc, 0.0, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)
    pull = dropped(x, keep, scalars, T) - delta_tile[None, :]
    rate_tile = stat_tile(rate, rate_desc, 0.0, first, batch_idx, head, q_start, seqlen_q, EDGE, BLOCK_M, T)
    rest, u, slope, bend = bent(pull, p, centred, raw, capped, rate_tile[None, :], scalars, T)
    # U is used before Y is computed, so that fewer tiles are in registers at a time.
    if A.Q:
        dk = dot_add(u.to(q_tile.dtype), dot_q_tile, dk, T)
    if A.V:
        rest = add_tangent_values(rest, dot_v_tile, dout_tile, keep, scalars, T)
    w = through_softcap(p * rest, slope, bend, T)
    dk = dot_add(w.to(q_tile.dtype), q_tile, dk, T)
    return dk, dv


@triton.jit
def key_loop(
    dk, dv, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms, dot_bias, place,
    scalars, window, seqlen_q, seqlen_k, stretch, full_begin, full_end, tile_map, tile_bits,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, A: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries begin..gap_begin and gap_end..end of a group's heads to dK and dV. EDGE
    tiles are masked. BOXED: so are those that are not between full_begin and full_end. Tiles that a tile mask hides are
    skipped.
    """
    begin, gap_begin, gap_end, end = stretch
    n_first, kv_head, batch_idx, _q_start = place
    lower, upper = group_steps(begin, gap_begin + tl.maximum(end - gap_end, 0), T.GROUP_SIZE, BLOCK_M)
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    if lower < upper:
        tl.assume(lower < upper)
        for step in tl.range(lower, upper, BLOCK_M if T.GROUP_SIZE == 1 else 1):
            head, position = group_step(step, begin, upper, kv_head * T.GROUP_SIZE, T.GROUP_SIZE, BLOCK_M)
            first = around_gap(position, gap_begin, gap_end, EDGE)
            if tile_map is not None:
                kind = kind_at(tile_map, batch_idx, head, first, n_first)
                if kind != EMPTY:
                    dk, dv = key_step(
                        dk, dv, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms,
                        dot_bias, place, head, first, scalars, window, seqlen_q, seqlen_k, full_begin, full_end,
                        tile_bits, kind, EDGE, BOXED, BLOCK_M, BLOCK_N, A, T
                    )  # fmt: skip
            else:
                dk, dv = key_step(
                    dk, dv, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms,
                    dot_bias, place, head, first, scalars, window, seqlen_q, seqlen_k, full_begin, full_end, None, 0,
                    EDGE, BOXED, BLOCK_M, BLOCK_N, A, T
                )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def second_key_kernel(
    q, k, v, dout, dot_q, dot_k, dot_v, q_desc, k_desc, v_desc, dout_desc, dot_q_desc, dot_k_desc, dot_v_desc, lse_desc,
    delta_desc, mean_desc, rate_desc, lse_unit, delta, mean, rate, dk, dv, terms, dot_bias, tile_map, tile_bits,
    lengths, paging, work, sizes, window, scalars,
    T: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of one (key tile, K/V head, sequence), summed over the query heads of the group."""
    BOXED: tl.constexpr = q_desc is not None
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
    table = page_table(paging, batch_idx, T)
    key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, T.PACKED_K)
    k_source = Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, k_desc, key_place, 0)
    v_source = Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, v_desc, key_place, 0)
    pages = key_pages(k_source, n_first, seqlen_k, BLOCK_N, T)
    k_tile = load_keys(k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    dot_k_tile = k_tile
    if A.K:
        base = key_base(dot_k, batch_idx, kv_head, k_start, T)
        dot_k_source = Source(dot_k, base, table, dot_k_desc, key_place, 0)
        dot_k_tile = load_keys(dot_k_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    dot_v_tile = v_tile
    if A.V:
        base = key_base(dot_v, batch_idx, kv_head, k_start, T)
        dot_v_source = Source(dot_v, base, table, dot_v_desc, key_place, 0)
        dot_v_tile = load_keys(dot_v_source, pages, n_first, seqlen_k, True, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    dk_acc = zeros(BLOCK_N, T.BLOCK_D)
    dv_acc = zeros(BLOCK_N, T.BLOCK_DV)
    begin, full_begin, full_end, end = query_range(n_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    place = KeyTile(n_first, kv_head, batch_idx, q_start)
    statistics = Statistics(lse_unit, delta, mean, rate)
    stat_boxes = Statistics(lse_desc, delta_desc, mean_desc, rate_desc)
    tiles = (k_tile, v_tile, dot_k_tile, dot_v_tile)
    if BOXED:
        dk_acc, dv_acc = key_loop(
            dk_acc, dv_acc, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms,
            dot_bias, place, scalars, window, seqlen_q, seqlen_k, Stretch(begin, end, end, end), full_begin, full_end,
            tile_map, tile_bits, False, True, BLOCK_M, BLOCK_N, A, T
        )  # fmt: skip
    else:
        dk_acc, dv_acc = key_loop(
            dk_acc, dv_acc, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms,
            dot_bias, place, scalars, window, seqlen_q, seqlen_k, Stretch(full_begin, full_end, full_end, full_end),
            full_begin, full_end, tile_map, tile_bits, False, False, BLOCK_M, BLOCK_N, A, T
        )  # fmt: skip
        dk_acc, dv_acc = key_loop(
            dk_acc, dv_acc, tiles, q, dout, dot_q, q_desc, dout_desc, dot_q_desc, statistics, stat_boxes, terms,
            dot_bias, place, scalars, window, seqlen_q, seqlen_k, Stretch(begin, full_begin, full_end, end), full_begin,
            full_end, tile_map, tile_bits, True, False, BLOCK_M, BLOCK_N, A, T
        )  # fmt: skip
    dk_base = head_base(dk, batch_idx, kv_head, k_start, T.PACKED_K)
    dv_base = head_base(dv, batch_idx, kv_head, k_start, T.PACKED_K)
    store_rows(dk_acc * scalars.scale, dk_base, dk.stride_row, n_first, seqlen_k, T.HEAD_DIM)
    store_rows(dv_acc, dv_base, dv.stride_row, n_first, seqlen_k, T.HEAD_DIM_V)


@triton.jit
def query_tile_gradients(
    tiles, sources, stats, pages, first, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
    full_begin, full_end, tile_bits, kind,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_N: tl.constexpr, A: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(H, W, U) of a query tile against the keys first..first+BLOCK_N, and the tiles of k and k'. `kind` is that of the
    tile in a tile mask.
    """
    q_tile, dot_q_tile, dout_tile = tiles
    k_source, v_source, dot_k_source, dot_v_source = sources
    lse_tile, delta_tile, mean_tile, rate_tile = stats
    _m_first, m_idx, head, batch_idx = place
    n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
    k_tile = load_keys(k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    dot_k_tile = k_tile
    if A.K:
        dot_k_tile = load_keys(dot_k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
    v_tile = load_keys(v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
    dots = dot(q_tile, tl.trans(k_tile), T)
    products = product_tangents(q_tile, k_tile, dot_q_tile, dot_k_tile, A.Q, A.K, T)
    x = dot(dout_tile, tl.trans(v_tile), T)
    CHECK: tl.constexpr = EDGE or (BOXED and (T.HAS_BIAS or T.HAS_MASK))
    p, capped = probabilities(
        dots, lse_tile[:, None], m_idx[:, None], n_idx, row_terms, scalars, window, seqlen_q, seqlen_k, CHECK, T
    )
    if BOXED:
        # The last tile of keys may be incomplete: keys past the end are zeros, but their P is not 0.
        if (first < full_begin) | (first >= full_end):
            p = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), p, 0.0)
    if tile_bits is not None:
        p = hide_pairs(p, tile_bits, kind, m_idx[:, None], n_idx)
    raw, score = score_tangents(products, p, capped, dot_bias_rows, n_idx, seqlen_k, scalars, CHECK, A, T)
    keep = True
    if T.HAS_DROPOUT:
        keep = dropout_keep(row_terms.seed, m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
    pull = dropped(x, keep, scalars, T) - delta_tile[:, None]
    rest, u, slope, bend = bent(
        pull, p, score - mean_tile[:, None], raw, capped, rate_tile[:, None], scalars, T
    )  # fmt: skip
    if A.V:
        dot_v_tile = load_keys(dot_v_source, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
        rest = add_tangent_values(rest, dout_tile, dot_v_tile, keep, scalars, T)
    h = p * rest
    w = through_softcap(h, slope, bend, T)
    return h, w, u, k_tile, dot_k_tile


@triton.jit
def query_step(
    dq, tiles, sources, stats, pages, first, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
    full_begin, full_end, tile_bits, kind,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_N: tl.constexpr, A: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys first..first+BLOCK_N to dQ."""
    _, w, u, k_tile, dot_k_tile = query_tile_gradients(
        tiles, sources, stats, pages, first, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
        full_begin, full_end, tile_bits, kind, EDGE, BOXED, BLOCK_N, A, T
    )  # fmt: skip
    dq = dot_add(w.to(k_tile.dtype), k_tile, dq, T)
    if A.K:
        dq = dot_add(u.to(k_tile.dtype), dot_k_tile, dq, T)
    return dq


@triton.jit
def query_loop(
    dq, tiles, sources, stats, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k, stretch,
    full_begin, full_end, tile_map, tile_bits,
    EDGE: tl.constexpr, BOXED: tl.constexpr, BLOCK_N: tl.constexpr, A: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the keys begin..gap_begin and gap_end..end to dQ; see key_loop."""
    begin, gap_begin, gap_end, end = stretch
    k_source = sources.k
    m_first, _m_idx, head, batch_idx = place
    stop = gap_begin + tl.maximum(end - gap_end, 0)
    if begin < stop:
        tl.assume(begin < stop)
        pages = key_pages(k_source, around_gap(begin, gap_begin, gap_end, EDGE), seqlen_k, BLOCK_N, T)
        for position in tl.range(begin, stop, BLOCK_N):
            first = around_gap(position, gap_begin, gap_end, EDGE)
            if tile_map is not None:
                kind = kind_at(tile_map, batch_idx, head, m_first, first)
                if kind != EMPTY:
                    dq = query_step(
                        dq, tiles, sources, stats, pages, first, place, row_terms, dot_bias_rows, scalars, window,
                        seqlen_q, seqlen_k, full_begin, full_end, tile_bits, kind, EDGE, BOXED, BLOCK_N, A, T
                    )  # fmt: skip
            else:
                dq = query_step(
                    dq, tiles, sources, stats, pages, first, place, row_terms, dot_bias_rows, scalars, window, seqlen_q,
                    seqlen_k, full_begin, full_end, None, 0, EDGE, BOXED, BLOCK_N, A, T
                )  # fmt: skip
            if T.PAGED:
                following = around_gap(position + BLOCK_N, gap_begin, gap_end, EDGE)
                pages = key_pages(k_source, following, seqlen_k, BLOCK_N, T)
    return dq


@triton.jit
def query_tiles(
    q, dot_q, dout, q_desc, dot_q_desc, dout_desc, batch_idx, head, q_start, m_first, seqlen_q,
    BLOCK_M: tl.constexpr, A: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Tiles of (q, q', dout)."""
    q_tile = load_queries(
        q, q_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
    )
    dot_q_tile = q_tile
    if A.Q:
        dot_q_tile = load_queries(
            dot_q, dot_q_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
        )
    dout_tile = load_queries(
        dout, dout_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV, T
    )
    return q_tile, dot_q_tile, dout_tile


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def second_query_kernel(
    q, k, v, dout, dot_q, dot_k, dot_v, q_desc, k_desc, v_desc, dout_desc, dot_q_desc, dot_k_desc, dot_v_desc,
    lse_unit, delta, mean, rate, dq, terms, dot_bias, tile_map, tile_bits, lengths, paging, work,
    sizes, window, scalars,
    T: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dQ of one (query tile, head, sequence)."""
    BOXED: tl.constexpr = q_desc is not None
    m_first, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = query_item(work, lengths, sizes, BLOCK_M, T)
    if m_first >= seqlen_q:
        return
    m_idx = m_first + tl.arange(0, BLOCK_M)
    kv_head = head // T.GROUP_SIZE
    table = page_table(paging, batch_idx, T)
    key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, T.PACKED_K)
    sources = Sources(
        Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, k_desc, key_place, 0),
        Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, v_desc, key_place, 0),
        Source(dot_k, key_base(dot_k, batch_idx, kv_head, k_start, T), table, dot_k_desc, key_place, 0),
        Source(dot_v, key_base(dot_v, batch_idx, kv_head, k_start, T), table, dot_v_desc, key_place, 0),
    )
    tiles = query_tiles(
        q, dot_q, dout, q_desc, dot_q_desc, dout_desc, batch_idx, head, q_start, m_first, seqlen_q, BLOCK_M, A, T
    )
    statistics = Statistics(lse_unit, delta, mean, rate)
    stats = row_stats(statistics, m_first, batch_idx, head, q_start, seqlen_q, BLOCK_M, T)
    row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
    dot_bias_rows = bias_tangent_rows(dot_bias, batch_idx, head, m_idx[:, None], seqlen_q)
    place = QueryTile(m_first, m_idx, head, batch_idx)
    acc = zeros(BLOCK_M, T.BLOCK_D)

    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    if BOXED:
        acc = query_loop(
            acc, tiles, sources, stats, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(begin, end, end, end), full_begin, full_end, tile_map, tile_bits, False, True, BLOCK_N, A, T
        )  # fmt: skip
    else:
        acc = query_loop(
            acc, tiles, sources, stats, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(full_begin, full_end, full_end, full_end), full_begin, full_end, tile_map, tile_bits, False, False,
            BLOCK_N, A, T
        )  # fmt: skip
        acc = query_loop(
            acc, tiles, sources, stats, place, row_terms, dot_bias_rows, scalars, window, seqlen_q, seqlen_k,
            Stretch(begin, full_begin, full_end, end), full_begin, full_end, tile_map, tile_bits, True, False, BLOCK_N,
            A, T
        )  # fmt: skip
    dq_base = head_base(dq, batch_idx, head, q_start, T.PACKED_Q)
    store_rows(acc * scalars.scale, dq_base, dq.stride_row, m_first, seqlen_q, T.HEAD_DIM)


@triton.jit(do_not_specialize=["sizes", "window", "scalars", "shape", "num_shares"])
def second_bias_kernel(
    q, k, v, dout, dot_q, dot_k, dot_v, lse_unit, delta, mean, rate, dbias, terms, dot_bias, tile_map, tile_bits,
    lengths, paging, sizes, window, scalars, shape, num_shares,
    T: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One share of one dbias tile: the sum of H, see backward.bias_gradient_kernel."""
    own, reps = bias_tile(shape, num_shares, sizes, BLOCK_M, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    statistics = Statistics(lse_unit, delta, mean, rate)
    for rep in range(reps.first, reps.end):
        m_block, n_block, head, batch_idx = repetition(rep, own, reps)
        m_first = m_block * BLOCK_M
        n_first = n_block * BLOCK_N
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
        if tile_is_seen(m_first, n_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T):
            m_idx = m_first + tl.arange(0, BLOCK_M)
            kv_head = head // T.GROUP_SIZE
            table = page_table(paging, batch_idx, T)
            sources = Sources(
                Source(k, key_base(k, batch_idx, kv_head, k_start, T), table, None, None, 0),
                Source(v, key_base(v, batch_idx, kv_head, k_start, T), table, None, None, 0),
                Source(dot_k, key_base(dot_k, batch_idx, kv_head, k_start, T), table, None, None, 0),
                Source(dot_v, key_base(dot_v, batch_idx, kv_head, k_start, T), table, None, None, 0),
            )
            tiles = query_tiles(
                q, dot_q, dout, None, None, None, batch_idx, head, q_start, m_first, seqlen_q, BLOCK_M, A, T
            )
            stats = row_stats(statistics, m_first, batch_idx, head, q_start, seqlen_q, BLOCK_M, T)
            row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
            dot_bias_rows = bias_tangent_rows(dot_bias, batch_idx, head, m_idx[:, None], seqlen_q)
            pages = key_pages(sources.k, n_first, seqlen_k, BLOCK_N, T)
            kind = 0
            if tile_map is not None:
                kind = kind_at(tile_map, batch_idx, head, m_first, n_first)
            h, _, _, _, _ = query_tile_gradients(
                tiles, sources, stats, pages, n_first, QueryTile(m_first, m_idx, head, batch_idx), row_terms,
                dot_bias_rows, scalars, window, seqlen_q, seqlen_k, 0, 0, tile_bits, kind, True, False, BLOCK_N, A, T
            )  # fmt: skip
            acc += h
    store_bias_tile(acc, dbias, own, shape, BLOCK_M, BLOCK_N)
