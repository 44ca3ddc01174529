"""Forward pass with tangents: out, lse and their derivatives along tangents of the operands, in one pass over the keys.

A work item owns a block of rows of one head. It is the forward's loop with three more products: a panel's scores S
are joined by their tangents S' = K Q' + K' Q, and beside P V it sums (P S') V + P V'. With m = sum(P S') / sum(P), the
tangent of a row is out' = ((P S') V + P V') / sum(P) - m out, and that of its lse is m. See docs/derivatives.md.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.backward import row_address
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.features import add_panel, multiply_panel
from tilewise.backends.cpu.forward import acc_state, pack_queries, panel_scores
from tilewise.backends.cpu.higher import add_values, scale_panel, subtract_row, tangent_weights
from tilewise.backends.cpu.intrinsics import exp2, field, load_f32, load_i64, scalar_bits, store_f32
from tilewise.backends.cpu.merging import LOG2E_F32, MINUS_INF, begin_rows, finish_rows
from tilewise.backends.cpu.microkernels import softmax, weigh_values
from tilewise.backends.cpu.packing import fill, store_row
from tilewise.backends.cpu.scoring import (
    add_columns,
    bounds_of,
    clip_panel,
    drop_panel,
    gather_panel,
    is_listed,
    k_length,
    pack_tile,
    pack_values_tile,
    prepare_rows,
    q_length,
    q_start,
    score_keys,
)
from tilewise.backends.cpu.stopping import stops_at, taking_items


@driver
def score_tangents(p: int, t: int, size: int, k: int, tk: int, q: int, tq: int, width: int, scratch: int) -> None:
    """t[size][panel] = K Q' + K' Q, without what has no tangent (an address of 0 in the parameters).

    One product after the other: the panels of Q and Q' together would not fit the first level of the cache.
    """
    has_q, has_k, padded = field(p, f.TQ) != 0, field(p, f.TK) != 0, field(p, f.DIM_PADDED)
    if has_q or has_k:
        rows, panel = k if has_q else tk, tq if has_q else q
        for j in range(0, size, sz.SCORE_KEYS):
            score_keys(rows + 4 * j * width, width, padded, panel, t + 4 * j * sz.PANEL, scratch)
        if has_q and has_k:
            for j in range(0, size, sz.SCORE_KEYS):
                add_columns(tk + 4 * j * width, width, 0, padded, q, t + 4 * j * sz.PANEL)
    else:
        fill(t, size * sz.PANEL, 0.0)


@driver
def bias_tangents(p: int, ws: int, size: int, first_key: int, panel: int, num_rows: int) -> int:
    """A panel of the bias's tangent."""
    rows = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES + f.ROW_BIAS * sz.FIELD_BYTES
    valid = min(size, load_i64(bounds_of(p, ws, panel) + f.MAX_LAST) + 1 - first_key)
    behind, stride, dtype = field(p, f.TBIAS_BEHIND), field(p, f.BIAS_KEY), field(p, f.BIAS_DTYPE)
    return gather_panel(p, ws, size, valid, first_key, rows, behind, num_rows, stride, dtype)


@driver
def weigh_panel(p: int, weights: int, v: int, size: int, acc: int, alpha: int, num_rows: int) -> None:
    """acc[num_rows] = alpha * acc + weights^T v."""
    width_v = field(p, f.DIM_V_PADDED)
    # Columns outermost: those of a strip of v stay in the first level of the cache for all rows.
    for d in range(0, width_v, sz.VALUE_STEP):
        for i in range(0, num_rows, sz.VALUE_ROWS):
            place = acc + 4 * (i * width_v + d)
            weigh_values(
                weights + 4 * i, v + 4 * sz.BLOCK_N * d, 4 * sz.VALUE_STEP, size, place, 4 * width_v, alpha + 4 * i
            )


@driver
def add_panel_values(p: int, weights: int, v: int, size: int, acc: int, num_rows: int) -> None:
    """acc[num_rows] += weights^T v."""
    width_v = field(p, f.DIM_V_PADDED)
    for d in range(0, width_v, sz.VALUE_STEP):
        for i in range(0, num_rows, sz.VALUE_ROWS):
            place = acc + 4 * (i * width_v + d)
            add_values(weights + 4 * i, v + 4 * sz.BLOCK_N * d, 4 * sz.VALUE_STEP, size, place, 4 * width_v)


@driver
def tangent_step(
    p: int, ws: int, batch: int, head: int, first_row: int, count: int, panel: int, k0: int, k: int, tk: int
) -> None:
    """One panel against the keys it sees of the tiles k and tk at k0."""
    row, num_rows = first_row + panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
    begin, end = load_i64(bounds_of(p, ws, panel) + f.TILE_BEGIN), load_i64(bounds_of(p, ws, panel) + f.TILE_END)
    s, t, size, first_key = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_TSCORES), end - begin, k0 + begin
    alpha, scratch = ws + field(p, f.WS_ALPHA), ws + field(p, f.WS_STAGE)
    width, features, vectors = field(p, f.DIM_PADDED), field(p, f.FEATURES), (num_rows + sz.LANES - 1) // sz.LANES
    running = acc_state(p, ws) + 4 * panel * sz.PANEL
    row_sum, factor = running + 4 * field(p, f.BLOCK_M), scalar_bits(field(p, f.TANGENT_SCALE))
    panel_scores(p, ws, batch, head, row, panel, num_rows, first_key, size, k + 4 * begin * width)
    softmax(s, size, running, row_sum, ws + field(p, f.WS_MAX), alpha, vectors, scalar_bits(field(p, f.TO_LOG2)))
    table = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES
    rows, at = 4 * panel * sz.PANEL * field(p, f.DIM_V_PADDED), 4 * begin * sz.VALUE_STEP
    acc, tacc = ws + field(p, f.WS_ACC) + rows, ws + field(p, f.WS_TACC) + rows
    v, tv = ws + field(p, f.WS_V) + at, ws + field(p, f.WS_TV) + at
    moves = field(p, f.TQ) != 0 or field(p, f.TK) != 0 or field(p, f.HAS_TBIAS) != 0
    if moves:
        q_bytes = 4 * panel * sz.PANEL * field(p, f.DIM_LANES)
        q, tq = ws + field(p, f.WS_Q) + q_bytes, ws + field(p, f.WS_TQ) + q_bytes
        score_tangents(p, t, size, k + 4 * begin * width, tk + 4 * begin * width, q, tq, width, scratch)
        if features & f.HAS_SLOPE:
            multiply_panel(t, size, ws + field(p, f.WS_CAP), vectors)
        if field(p, f.HAS_TBIAS):
            scale_panel(t, size, vectors, factor)
            factor = 1.0
            add_panel(t, size, bias_tangents(p, ws, size, first_key, panel, num_rows), vectors)
        tangent_weights(s, t, size, vectors, factor, alpha, ws + field(p, f.WS_TSUM) + 4 * panel * sz.PANEL)
        if features & f.HAS_DROPOUT:
            drop_panel(p, t, size, first_key, table, batch, vectors)
    if features & f.HAS_DROPOUT:
        drop_panel(p, s, size, first_key, table, batch, vectors)
    weigh_panel(p, s, v, size, acc, alpha, num_rows)
    if moves:
        weigh_panel(p, t, v, size, tacc, alpha, num_rows)
        if field(p, f.TV) != 0:
            add_panel_values(p, s, tv, size, tacc, num_rows)
    elif field(p, f.TV) != 0:
        weigh_panel(p, s, tv, size, tacc, alpha, num_rows)


@driver
def tangent_tiles(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Stream the keys that any row of the block sees, tile by tile, panel by panel."""
    kv_head = head // field(p, f.GROUP_SIZE)
    width, dim = field(p, f.DIM_PADDED), field(p, f.HEAD_DIM)
    panels, first, last = (count + sz.PANEL - 1) // sz.PANEL, f.UNBOUNDED, -1
    for panel in range(panels):
        first = min(first, load_i64(bounds_of(p, ws, panel) + f.MIN_FIRST))
        last = max(last, load_i64(bounds_of(p, ws, panel) + f.MAX_LAST))
    k0 = max(0, first) // sz.BLOCK_N * sz.BLOCK_N
    while k0 <= last:
        if stops_at(p, k0):
            break
        size, tk = min(sz.BLOCK_N, last + 1 - k0), 0
        if is_listed(p, batch, head, first_row, first_row + count, k0, k0 + size) == 0:
            k0 += sz.BLOCK_N
            continue
        k = pack_tile(p, f.K, dim, width, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_K))
        if field(p, f.TK) != 0:
            tk = pack_tile(p, f.TK, dim, width, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_TK))
        pack_values_tile(p, f.V, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_V))
        if field(p, f.TV) != 0:
            pack_values_tile(p, f.TV, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_TV))
        for panel in range(panels):
            if clip_panel(p, ws, batch, head, first_row, panel, k0, size, sz.KEY_STEP):
                tangent_step(p, ws, batch, head, first_row, count, panel, k0, k, tk)
        k0 += sz.BLOCK_N


@driver
def finish_tangents(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Write out' and lse'. A row without keys has 0, or the tangent of its sink."""
    width, start = field(p, f.DIM_V_PADDED), q_start(p, batch) + first_row
    maxima, acc, tacc = acc_state(p, ws), ws + field(p, f.WS_ACC), ws + field(p, f.WS_TACC)
    sums = maxima + 4 * field(p, f.BLOCK_M)
    target = row_address(p, f.TOUT, batch, head, start)
    lse = field(p, f.TLSE) + batch * field(p, f.LSE_BATCH) + head * field(p, f.LSE_HEAD) + 4 * start
    for r in range(count):
        top, total, factor, share = load_f32(maxima + 4 * r), load_f32(sums + 4 * r), 1.0, 0.0
        if field(p, f.SINKS) != 0:
            sink = load_f32(field(p, f.SINKS) + 4 * head)
            new_top = max(top, sink * LOG2E_F32)
            if new_top > MINUS_INF:
                factor = exp2(top - new_top)
                share = 1.0 if new_top > top else exp2(sink * LOG2E_F32 - new_top)
                total = total * factor + share
            if not sink >= MINUS_INF:
                total = sink
        inverse = factor / total if total > 0.0 else (0.0 if total == 0.0 else total)
        m = load_f32(ws + field(p, f.WS_TSUM) + 4 * r) * inverse
        if field(p, f.TSINKS) != 0 and share > 0.0:
            m += share / total * load_f32(field(p, f.TSINKS) + 4 * head)
        subtract_row(tacc + 4 * r * width, acc + 4 * r * width, width, m)
        place = target + r * field(p, f.TOUT_ROW)
        store_row(tacc + 4 * r * width, field(p, f.HEAD_DIM_V), place, field(p, f.DTYPE), inverse)
        store_f32(lse + 4 * r, m)


@driver
def tangent_item(p: int, ws: int, item: int) -> None:
    """One work item (see backward.py): a block of query rows of one head."""
    place, head = field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.BACKWARD_ENTRY_BYTES, item % field(p, f.UNITS)
    batch, first_row = load_i64(place), load_i64(place + 16)
    count = min(load_i64(place + 24), q_length(p, batch)) - first_row
    block, padded = ws + field(p, f.WS_ACC), (count + sz.PANEL - 1) // sz.PANEL * sz.PANEL
    stage = ws + field(p, f.WS_STAGE)
    prepare_rows(p, ws, batch, head, first_row, count, 0, k_length(p, batch))
    pack_queries(p, f.Q, batch, head, first_row, count, stage, ws + field(p, f.WS_Q))
    if field(p, f.TQ) != 0:
        pack_queries(p, f.TQ, batch, head, first_row, count, stage, ws + field(p, f.WS_TQ))
    begin_rows(p, block, block, padded)
    fill(ws + field(p, f.WS_TACC), padded * field(p, f.DIM_V_PADDED), 0.0)
    fill(ws + field(p, f.WS_TSUM), padded, 0.0)
    tangent_tiles(p, ws, batch, head, first_row, count)
    finish_rows(p, batch, head, first_row, count, block)
    finish_tangents(p, ws, batch, head, first_row, count)


tangent = taking_items("tangent", tangent_item)
