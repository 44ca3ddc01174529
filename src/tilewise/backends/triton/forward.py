"""Forward: one kernel for dense, packed and paged problems.

Grid: one program for each (query tile, head, sequence), in the order of `work_item`. A program owns BLOCK_M rows of
`out` and `lse` and writes them once; K and V are streamed through it. Tiles that no row sees are not visited; only
tiles at an edge of the band or at the end of the keys are masked. A preceding kernel (gpu/work_list.py) lists the tiles
of packed sequences and clears rows past the last one. Packed queries of paged keys use the grid of the longest
sequence, and the programs of the last sequence clear.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import Columns, Parts, Place, QueryTile, Source, Stretch
from tilewise.backends.gpu.work_list import listed_item
from tilewise.backends.triton.listed import (
    are_seen,
    list_of,
    listed_block,
    listed_steps,
    num_listed_blocks,
    ranked_block,
)
from tilewise.backends.triton.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    around_gap,
    box_place,
    clear_rows,
    dot,
    dot_add,
    dropout_keep,
    head_base,
    in_registers,
    keep_in_band,
    key_base,
    key_pages,
    key_range,
    key_span,
    load_box,
    load_keys,
    load_queries,
    natural_scores,
    page_table,
    query_span,
    score_terms,
    softmax_step,
    softmax_step_scaled,
    store_box,
    store_rows,
    work_item,
    zeros,
)
from tilewise.backends.triton.quantised import (
    add_quantised_values,
    load_query_columns,
    quantised_products,
    row_tops,
    scaling,
    value_scales,
)


@triton.jit
def load_query_rows(q_rows, row_ok, T: tl.constexpr):
    """The queries at these row pointers: a tile, or (with BLOCK_TAIL) those of the first and of the other columns."""
    d_idx = tl.arange(0, T.BLOCK_D)[None, :]
    first = tl.load(q_rows[:, None] + d_idx, mask=row_ok[:, None] & (d_idx < T.FIRST_DIM), other=0.0)
    if T.BLOCK_TAIL == 0:
        return first
    else:
        tail_idx = T.FIRST_DIM + tl.arange(0, T.BLOCK_TAIL)[None, :]
        tail = tl.load(q_rows[:, None] + tail_idx, mask=row_ok[:, None] & (tail_idx < T.HEAD_DIM), other=0.0)
        return Parts(first, tail)


@triton.jit
def tail_of(place, T: tl.constexpr):
    """The place of the columns of K that are a tile of their own."""
    return Place(place.batch, place.end, place.head, place.row, place.column + T.FIRST_DIM)


@triton.jit
def key_products(q, keys, pages, first, seqlen_k, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """(q.k of a tile of keys, the tile). Keys with a tail are two tiles, with a box each; of a latent, the first one is
    also V.
    """
    if T.FP8:
        return quantised_products(q, keys, pages, first, seqlen_k, EDGE, BLOCK_N, T)
    elif T.BLOCK_TAIL > 0:
        base = keys.base + T.FIRST_DIM
        if keys.box is None:
            source = keys
            tail_source = Source(keys.rows, base, keys.table, None, None, keys.scales)
        else:
            source = Source(keys.rows, keys.base, keys.table, keys.box.first, keys.place, keys.scales)
            tail_source = Source(keys.rows, base, keys.table, keys.box.rest, tail_of(keys.place, T), keys.scales)
        tail_dim: tl.constexpr = T.HEAD_DIM - T.FIRST_DIM
        k_tile = load_keys(source, pages, first, seqlen_k, EDGE, BLOCK_N, T.FIRST_DIM, T.BLOCK_D, T)
        tail = load_keys(tail_source, pages, first, seqlen_k, EDGE, BLOCK_N, tail_dim, T.BLOCK_TAIL, T)
        return dot_add(q.rest, tl.trans(tail), dot(q.first, tl.trans(k_tile), T), T), k_tile
    else:
        k_tile = load_keys(keys, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM, T.BLOCK_D, T)
        return dot(q, tl.trans(k_tile), T), k_tile


@triton.jit
def add_values(
    acc, alpha, p, k_tile, values, v_scales, pages, first, seqlen_k,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return acc * alpha + P V of a tile of keys. V is `k_tile` of a latent."""
    if T.FP8:
        return add_quantised_values(acc, alpha, p, k_tile, values, v_scales, pages, first, seqlen_k, EDGE, BLOCK_N, T)
    else:
        acc = acc * alpha[:, None]
        if T.LATENT:
            v_tile = k_tile
        else:
            v_tile = load_keys(values, pages, first, seqlen_k, EDGE, BLOCK_N, T.HEAD_DIM_V, T.BLOCK_DV, T)
        return dot_add(p.to(v_tile.dtype), v_tile, acc, T)


@triton.jit
def empty_accumulator(BLOCK_M: tl.constexpr, T: tl.constexpr):
    """A zero accumulator: (BLOCK_M, BLOCK_DV), or its even and odd columns."""
    if T.FP8:
        return Columns(zeros(BLOCK_M, T.BLOCK_DV // 2), zeros(BLOCK_M, T.BLOCK_DV // 2))
    else:
        return zeros(BLOCK_M, T.BLOCK_DV)


@triton.jit
def plain_step(dots, tops, row_max, row_sum, scale_log2, T: tl.constexpr):
    """One online-softmax step of plain scores. Maxima are in log2 units or, if EXACT, unscaled."""
    if T.EXACT:
        return softmax_step(dots, tops, row_max, row_sum, scale_log2)
    else:
        return softmax_step_scaled(dots, tops, row_max, row_sum, scale_log2)


@triton.jit
def attend(
    acc, row_max, row_sum, q, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k, stretch,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Advance the softmax state of a query tile over the keys begin..gap_begin and gap_end..end.

    EDGE tiles are masked. Other tiles are complete, and have no gap.
    """
    begin, gap_begin, gap_end, end = stretch
    _m_first, m_idx, head, batch_idx = place
    scale_log2 = scalars.scale * LOG2E
    # tl.assume tells ptxas that the loop runs. With a path around the loop it waits after every wgmma (C7515).
    stop = gap_begin + tl.maximum(end - gap_end, 0)
    if begin < stop:
        tl.assume(begin < stop)
        pages = key_pages(k_source, around_gap(begin, gap_begin, gap_end, EDGE), seqlen_k, BLOCK_N, T)
        for position in tl.range(begin, stop, BLOCK_N):
            first = around_gap(position, gap_begin, gap_end, EDGE)
            n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            dots, k_tile = key_products(q, k_source, pages, first, seqlen_k, EDGE, BLOCK_N, T)
            v_scales = value_scales(v_source, pages, first, seqlen_k, BLOCK_N, T)
            if T.TRANSFORMED:
                scores, _ = natural_scores(dots, m_idx[:, None], n_idx, row_terms, scalars, seqlen_q, seqlen_k, EDGE, T)
                if EDGE:
                    scores = tl.where(
                        keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), scores, NEG_INF
                    )
                tops, v_scales = row_tops(scores, v_scales, T)
                p, row_max, row_sum, alpha = softmax_step(scores, tops, row_max, row_sum, LOG2E)
            elif EDGE:
                dots = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), dots, NEG_INF)
                tops, v_scales = row_tops(dots, v_scales, T)
                p, row_max, row_sum, alpha = plain_step(dots, tops, row_max, row_sum, scale_log2, T)
            else:
                tops, v_scales = row_tops(dots, v_scales, T)
                p, row_max, row_sum, alpha = plain_step(dots, tops, row_max, row_sum, scale_log2, T)
            if T.HAS_DROPOUT:
                kept = dropout_keep(row_terms.seed, m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
                p = tl.where(kept, p, 0.0)
            acc = add_values(acc, alpha, p, k_tile, v_source, v_scales, pages, first, seqlen_k, EDGE, BLOCK_N, T)
            if T.PAGED:
                following = around_gap(position + BLOCK_N, gap_begin, gap_end, EDGE)
                pages = key_pages(k_source, following, seqlen_k, BLOCK_N, T)
    return acc, row_max, row_sum


@triton.jit
def attend_joined(
    acc, row_max, row_sum, q, k_source, v_source, m_idx, scalars, window, seqlen_q, seqlen_k, begin, full_begin,
    full_end, end,
    BLOCK_N: tl.constexpr, PAIRED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """`attend` over all keys begin..end in one loop, for plain scores of rows in boxes. A branch masks the tiles that
    are not between full_begin and full_end. PAIRED: K and V of a tile share a barrier.

    A second loop would wait for memory once more.
    """
    scale_log2 = scalars.scale * LOG2E
    if begin < end:
        tl.assume(begin < end)
        for first in tl.range(begin, end, BLOCK_N):
            k_tile = load_box(k_source.box, k_source.place, first, BLOCK_N, T.HEAD_DIM)
            if PAIRED:
                v_tile = load_box(v_source.box, v_source.place, first, BLOCK_N, T.HEAD_DIM_V)
            dots = dot(q, tl.trans(k_tile), T)
            if (first < full_begin) | (first >= full_end):
                n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
                dots = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), dots, NEG_INF)
            tops = tl.max(dots, 1)
            p, row_max, row_sum, alpha = softmax_step_scaled(dots, tops, row_max, row_sum, scale_log2)
            acc = acc * alpha[:, None]
            if not PAIRED:
                v_tile = load_box(v_source.box, v_source.place, first, BLOCK_N, T.HEAD_DIM_V)
            acc = dot_add(p.to(v_tile.dtype), v_tile, acc, T)
    return acc, row_max, row_sum


@triton.jit
def attend_listed(
    acc, row_max, row_sum, q, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k, begin,
    full_begin, full_end, end, entries, bits,
    BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """`attend` over the keys begin..end in the tiles that a tile mask lists, in one loop. Branches mask the blocks that
    are not between full_begin and full_end, and those of tiles with bits.
    """
    _m_first, m_idx, head, batch_idx = place
    scale_log2 = scalars.scale * LOG2E
    lower, upper = listed_steps(entries, begin, end, BLOCK_N, T.HAS_LEFT or T.HAS_RIGHT)
    if lower < upper:
        tl.assume(lower < upper)
        first, kind = listed_block(entries, lower, BLOCK_N)
        pages = key_pages(k_source, first, seqlen_k, BLOCK_N, T)
        for step in tl.range(lower, upper):
            n_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            scores, k_tile = key_products(q, k_source, pages, first, seqlen_k, True, BLOCK_N, T)
            v_scales = value_scales(v_source, pages, first, seqlen_k, BLOCK_N, T)
            if T.TRANSFORMED:
                scores, _ = natural_scores(
                    scores, m_idx[:, None], n_idx, row_terms, scalars, seqlen_q, seqlen_k, True, T
                )
            if (first < full_begin) | (first >= full_end):
                scores = tl.where(keep_in_band(m_idx[:, None], n_idx, seqlen_q, seqlen_k, window, T), scores, NEG_INF)
            if kind >= 0:
                scores = tl.where(are_seen(bits, kind, m_idx[:, None], first, BLOCK_N), scores, NEG_INF)
            tops, v_scales = row_tops(scores, v_scales, T)
            if T.TRANSFORMED:
                p, row_max, row_sum, alpha = softmax_step(scores, tops, row_max, row_sum, LOG2E)
            else:
                p, row_max, row_sum, alpha = plain_step(scores, tops, row_max, row_sum, scale_log2, T)
            if T.HAS_DROPOUT:
                kept = dropout_keep(row_terms.seed, m_idx, first, head, batch_idx, scalars.drop_below, BLOCK_N, T)
                p = tl.where(kept, p, 0.0)
            acc = add_values(acc, alpha, p, k_tile, v_source, v_scales, pages, first, seqlen_k, True, BLOCK_N, T)
            first, kind = listed_block(entries, tl.minimum(step + 1, upper - 1), BLOCK_N)
            pages = key_pages(k_source, first, seqlen_k, BLOCK_N, T)
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, scalars, T: tl.constexpr):
    """(out, lse) of a finished state: divide once. A row without keys gives 0 and -inf."""
    if len(row_sum.shape) == 2:
        row_sum = tl.sum(row_sum, 1)
    empty = row_sum == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, row_sum)
    if T.HAS_DROPOUT:
        inverse = inverse * scalars.keep_scale
    log_sum = tl.log2(tl.where(empty, 1.0, row_sum))
    if T.TRANSFORMED:
        lse = row_max + log_sum * LN2
    elif T.EXACT:
        lse = row_max * scalars.scale + log_sum * LN2
    else:
        lse = (row_max + log_sum) * LN2
    if T.FP8:
        acc = tl.reshape(tl.join(acc.even, acc.odd), [row_sum.shape[0], T.BLOCK_DV])
    return acc * inverse[:, None], tl.where(empty, NEG_INF, lse)


# Replaces a sink of +inf, in either unit: large enough to outweigh all scores, and finite times log2 e or ln 2.
ENDLESS = tl.constexpr(2.0**127)


@triton.jit
def initial_state(sinks, head, counts, scalars, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """(row_max, row_sum) before any key: a sink is a key without a value. `counts` is false where another split counts
    it. +inf is replaced by a number that outweighs every score, because inf - inf is NaN.
    """
    row_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if T.HAS_SINKS:
        logit = tl.load(sinks + head).to(tl.float32)
        if T.EXACT:
            logit = logit / scalars.scale
        elif not T.TRANSFORMED:
            logit = logit * LOG2E
        logit = tl.where(logit == -NEG_INF, ENDLESS, logit)
        row_max = tl.where(counts, logit + row_sum, row_max)
        row_sum = tl.where(counts & (row_max > NEG_INF), 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def add_sink(acc, row_max, row_sum, sinks, head, counts, scalars, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """The state of rows whose keys were all seen, with the sink: for a kernel whose `row_max` must be that of the keys
    alone. Others start with the sink.
    """
    if len(row_sum.shape) == 2:
        row_sum = tl.sum(row_sum, 1)
    logit, weight = initial_state(sinks, head, counts, scalars, BLOCK_M, T)
    unit = 1.0
    if T.TRANSFORMED:
        unit = LOG2E
    elif T.EXACT:
        unit = scalars.scale * LOG2E
    top = tl.maximum(row_max, logit)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    keep = tl.exp2((row_max - anchor) * unit)
    row_sum = row_sum * keep + weight * tl.exp2((logit - anchor) * unit)
    if T.FP8:
        return Columns(acc.even * keep[:, None], acc.odd * keep[:, None]), top, row_sum
    else:
        return acc * keep[:, None], top, row_sum


@triton.jit
def natural_max(row_max, scalars, T: tl.constexpr):
    """The largest scores of rows in natural units."""
    if T.TRANSFORMED:
        return row_max
    elif T.EXACT:
        return row_max * scalars.scale
    else:
        return row_max * LN2


@triton.jit
def with_endless_sinks(lse, T: tl.constexpr):
    """The lse of complete rows, with +inf where `initial_state` replaced it."""
    if T.HAS_SINKS:
        return tl.where(lse >= ENDLESS / 2, -NEG_INF, lse)
    else:
        return lse


@triton.jit
def clear_lse(lse, head, block, num_blocks, lengths, sizes, BLOCK_M: tl.constexpr):
    """Write -inf for packed rows that belong to no sequence."""
    begin = tl.load(lengths.cu_seqlens_q + sizes.batch)
    for first in tl.range(begin + block * BLOCK_M, sizes.total_q, num_blocks * BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        at = lse.ptr + tl.cast(head, tl.int64) * lse.stride_head + rows * lse.stride_row
        tl.store(at, tl.full([BLOCK_M], NEG_INF, tl.float32), mask=rows < sizes.total_q)


@triton.jit(do_not_specialize=["sizes", "window", "scalars"])
def forward_kernel(
    q, k, v, scales, q_desc, k_desc, v_desc, out_desc, out, lse, max_logits,
    terms, tile_rows, tile_bits, sinks, lengths, paging, work, sizes, window, scalars,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD_QUERIES: tl.constexpr,
    DIRECT: tl.constexpr, JOINED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of one (query tile, head, sequence), and raise its head's `max_logits`.

    `work` lists the tiles of packed sequences; the kernel that makes the list also clears rows of no sequence.
    """
    if work is not None:
        num_blocks = sizes.total_q // BLOCK_M + sizes.batch
        block, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k = listed_item(
            work, num_blocks, sizes.num_heads, sizes.heads_per_wave, DIRECT
        )
    else:
        num_blocks = (sizes.seqlen_q + BLOCK_M - 1) // BLOCK_M
        if tile_rows is not None:
            num_blocks = num_listed_blocks(sizes.seqlen_q, BLOCK_M)
        if DIRECT:
            block, head, batch_idx = tl.program_id(0), tl.program_id(1), tl.program_id(2)
            if T.HAS_RIGHT and tile_rows is None:
                block = num_blocks - 1 - block
        else:
            block, head, batch_idx = work_item(num_blocks, sizes.num_heads, sizes, T.HAS_RIGHT and tile_rows is None)
        if tile_rows is not None:
            block = ranked_block(tile_rows, batch_idx, head, block, BLOCK_M)
        q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
        k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    if T.PACKED_Q and work is None:
        if batch_idx == sizes.batch - 1:
            clear_rows(
                out,
                head,
                block,
                num_blocks,
                lengths.cu_seqlens_q,
                sizes.batch,
                sizes.total_q,
                BLOCK_M,
                T.HEAD_DIM_V,
                T.BLOCK_DV,
            )
            clear_lse(lse, head, block, num_blocks, lengths, sizes, BLOCK_M)
    m_first = block * BLOCK_M
    if m_first >= seqlen_q:
        return
    m_idx = m_first + tl.arange(0, BLOCK_M)
    kv_head = head // T.GROUP_SIZE
    table = page_table(paging, batch_idx, T)
    key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, T.PACKED_K)
    k_base, v_base = key_base(k, batch_idx, kv_head, k_start, T), key_base(v, batch_idx, kv_head, k_start, T)
    k_source = Source(k, k_base, table, k_desc, key_place, scaling(scales.k, batch_idx, kv_head, T))
    v_source = Source(v, v_base, table, v_desc, key_place, scaling(scales.v, batch_idx, kv_head, T))
    row_terms = score_terms(terms, batch_idx, head, m_idx[:, None], seqlen_q, T)
    if T.FP8:
        q_rows = head_base(q, batch_idx, head, q_start, T.PACKED_Q) + m_idx.to(tl.int64) * q.stride_row
        q_tile = load_query_columns(scales.q, q_rows, batch_idx, head, m_idx, m_idx < seqlen_q, T)
    else:
        q_tile = load_queries(
            q, q_desc, batch_idx, head, q_start, m_first, seqlen_q, True, BLOCK_M, T.HEAD_DIM, T.BLOCK_D, T
        )
    if HOLD_QUERIES:
        q_tile = in_registers(q_tile, T)
    acc = empty_accumulator(BLOCK_M, T)
    if max_logits is not None:
        row_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max, row_sum = initial_state(sinks, head, True, scalars, BLOCK_M, T)
    place = QueryTile(m_first, m_idx, head, batch_idx)

    begin, full_begin, full_end, end = key_range(m_first, seqlen_q, seqlen_k, window, BLOCK_M, BLOCK_N, T)
    if tile_rows is not None:
        acc, row_max, row_sum = attend_listed(
            acc, row_max, row_sum, q_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k,
            begin, full_begin, full_end, end, list_of(tile_rows, batch_idx, head, m_first), tile_bits, BLOCK_N, T
        )  # fmt: skip
    elif JOINED:
        acc, row_max, row_sum = attend_joined(
            acc, row_max, row_sum, q_tile, k_source, v_source, m_idx, scalars, window, seqlen_q, seqlen_k, begin,
            full_begin, full_end, end, BLOCK_N, PAIRED, T
        )  # fmt: skip
    else:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k,
            Stretch(full_begin, full_end, full_end, full_end), False, BLOCK_N, T
        )  # fmt: skip
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k,
            Stretch(begin, full_begin, full_end, end), True, BLOCK_N, T
        )  # fmt: skip

    if max_logits is not None:
        largest = tl.max(tl.where(m_idx < seqlen_q, row_max, NEG_INF), 0)
        tl.atomic_max(max_logits + head, natural_max(largest, scalars, T), sem="relaxed")
        if T.HAS_SINKS:
            acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sinks, head, True, scalars, BLOCK_M, T)
    result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
    if out_desc is not None:
        store_box(out_desc, box_place(batch_idx, head, q_start, seqlen_q, T.PACKED_Q), m_first, result)
    else:
        out_base = head_base(out, batch_idx, head, q_start, T.PACKED_Q)
        store_rows(result, out_base, out.stride_row, m_first, seqlen_q, T.HEAD_DIM_V)
    lse_base = head_base(lse, batch_idx, head, q_start, T.PACKED_Q)
    tl.store(lse_base + m_idx * lse.stride_row, with_endless_sinks(lse_rows, T), mask=m_idx < seqlen_q)
