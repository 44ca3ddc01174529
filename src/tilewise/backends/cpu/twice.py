"""Second derivatives: the gradients of <dout, out'> + <dlse, lse'>, tile by tile, from q, k, v, their tangents and lse.

The work items and sums are those of backward.py. Per panel: S = K Q, S' = K Q' + K' Q, X = V dO, Y = V' dO; from them
P (S' - m), W and U (higher.py); then dV += P (S' - m) dO, dK += W Q + U Q' and dQ += W K + U K'.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.backward import (
    SCORE_BYTES,
    accumulate_dq,
    accumulate_tile,
    add_bias_gradient,
    gradient_program,
    key_columns,
    pack_block,
    pack_panel,
    row_address,
)
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.higher import second_gradient, second_gradient_capped, tanh_panel
from tilewise.backends.cpu.intrinsics import field, load_f32, load_i64, scalar_bits, store_f32
from tilewise.backends.cpu.packing import fill, pack_rows, row_dots, untranspose_panel
from tilewise.backends.cpu.scoring import (
    bounds_of,
    change_scores,
    clip_panel,
    drop_panel,
    is_cut,
    mask_tiles,
    pack_tile,
    q_start,
    score_keys,
)
from tilewise.backends.cpu.tangent import bias_tangents, score_tangents


@driver
def pack_twice(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Pack q, q' and dout of a block, and with the statistics of its rows also m = lse' and r = dout . out'."""
    pack_block(p, ws, batch, head, first_row, count)
    row, dim, width = q_start(p, batch) + first_row, field(p, f.HEAD_DIM), field(p, f.DIM_WIDE)
    dim_v, width_v, dtype = field(p, f.HEAD_DIM_V), field(p, f.DIM_V_WIDE), field(p, f.DTYPE)
    statistics = batch * field(p, f.LSE_BATCH) + head * field(p, f.LSE_HEAD) + 4 * row
    one, other = ws + field(p, f.WS_EXTRA), ws + field(p, f.WS_STAGE)
    for panel in range((count + sz.PANEL - 1) // sz.PANEL):
        rows = min(sz.PANEL, count - panel * sz.PANEL)
        if field(p, f.TQ) != 0:
            source = row_address(p, f.TQ, batch, head, row + panel * sz.PANEL)
            panels, columns = ws + field(p, f.WS_TQ), ws + field(p, f.WS_TQ_ROWS)
            scale = scalar_bits(field(p, f.Q_SCALE))
            pack_panel(p, ws, f.TQ, source, rows, dim, width, panel, panels, columns, scale)
        for r in range(sz.PANEL):
            at, m, rate = panel * sz.PANEL + r, 0.0, 0.0
            if r < rows:
                m = load_f32(field(p, f.TLSE) + statistics + 4 * at)
                pack_rows(row_address(p, f.DOUT, batch, head, row + at), 0, 1, dtype, dim_v, one, 0, width_v, 1.0)
                pack_rows(row_address(p, f.TOUT, batch, head, row + at), 0, 1, dtype, dim_v, other, 0, width_v, 1.0)
                rate = row_dots(one, other, width_v)
                if field(p, f.RATE) != 0:
                    store_f32(field(p, f.RATE) + statistics + 4 * at, rate)
            store_f32(ws + field(p, f.WS_TLSE) + 4 * at, m)
            store_f32(ws + field(p, f.WS_RATE) + 4 * at, rate)


@driver
def panel_twice(
    p: int, ws: int, batch: int, head: int, row: int, panel: int, count: int, k0: int, k: int, tk: int, v: int, tv: int
) -> None:
    """P (S' - m), W and U of one panel against the keys it sees of the tile at k0, whose rows are k, tk, v and tv. They
    are left in the score buffers at TILE_BEGIN.
    """
    table, bounds = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, bounds_of(p, ws, panel)
    begin, end, rows = load_i64(bounds + f.TILE_BEGIN), load_i64(bounds + f.TILE_END), 4 * panel * sz.PANEL
    size, first_key = end - begin, k0 + begin
    width, width_v, features = field(p, f.DIM_WIDE), field(p, f.DIM_V_WIDE), field(p, f.FEATURES)
    k += 4 * begin * width
    v += 4 * begin * width_v
    tk = tk + 4 * begin * width if tk != 0 else 0
    tv = tv + 4 * begin * width_v if tv != 0 else 0
    at = panel * SCORE_BYTES + 4 * begin * sz.PANEL
    s, x, y = ws + field(p, f.WS_SCORES) + at, ws + field(p, f.WS_DSCORES) + at, ws + field(p, f.WS_USCORES) + at
    t, scratch = ws + field(p, f.WS_TSCORES), ws + field(p, f.WS_MAX)
    q, tq = ws + field(p, f.WS_Q) + rows * width, ws + field(p, f.WS_TQ) + rows * width
    dout = ws + field(p, f.WS_DOUT) + rows * width_v
    for j in range(0, size, sz.SCORE_KEYS):
        score_keys(k + 4 * j * width, width, field(p, f.DIM_PADDED), q, s + 4 * j * sz.PANEL, scratch)
    score_tangents(p, t, size, k, tk, q, tq, width, scratch)
    for j in range(0, size, sz.SCORE_KEYS):
        score_keys(v + 4 * j * width_v, width_v, field(p, f.DIM_V_PADDED), dout, x + 4 * j * sz.PANEL, scratch)
    if tv != 0:
        for j in range(0, size, sz.SCORE_KEYS):
            score_keys(tv + 4 * j * width_v, width_v, field(p, f.DIM_V_PADDED), dout, y + 4 * j * sz.PANEL, scratch)
    else:
        fill(y, size * sz.PANEL, 0.0)
    tanh, bias, vectors = 0, 0, sz.PANEL // sz.LANES
    if features & f.HAS_SOFTCAP:
        tanh = ws + field(p, f.WS_TANH)
        tanh_panel(s, size, tanh, vectors)
    edge = first_key < load_i64(bounds + f.MAX_FIRST) or first_key + size - 1 > load_i64(bounds + f.MIN_LAST)
    valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
    cut = is_cut(p, batch, head, row, first_key, size)
    if edge or cut or (features & f.CHANGES_SCORES) != 0:
        change_scores(p, ws, s, size, valid, first_key, table, count, 0)
    if cut:
        mask_tiles(p, s, batch, head, row, first_key, size, vectors)
    if features & f.HAS_DROPOUT:
        drop_panel(p, x, size, first_key, table, batch, vectors)
        drop_panel(p, y, size, first_key, table, batch, vectors)
    if field(p, f.HAS_TBIAS):
        bias = bias_tangents(p, ws, size, first_key, panel, count)
    numbers, to_log2 = ws + field(p, f.WS_LSE) + rows, scalar_bits(field(p, f.TO_LOG2))
    factor, h = scalar_bits(field(p, f.TANGENT_SCALE)), x
    if tanh != 0 or bias != 0:
        bend = scalar_bits(field(p, f.TWICE_PER_CAP))
        second_gradient_capped(s, t, x, y, size, numbers, to_log2, factor, tanh, bias, bend)
        h = t
    else:
        second_gradient(s, t, x, y, size, numbers, to_log2, factor)
    if features & f.HAS_DROPOUT:
        drop_panel(p, s, size, first_key, table, batch, vectors)
    if field(p, f.WORK) & f.MAKES_DBIAS:
        untranspose_panel(h, size, ws + field(p, f.WS_STAGE), 4 * sz.BLOCK_N)
        add_bias_gradient(p, ws, batch, panel, count, first_key, valid)


@driver
def tile_twice(
    p: int, ws: int, batch: int, head: int, first_row: int, count: int, k0: int, size: int, key_begin: int
) -> None:
    """All panels of a block against the tile of `size` keys at k0."""
    kv_head = head // field(p, f.GROUP_SIZE)
    width, width_v, work = field(p, f.DIM_WIDE), field(p, f.DIM_V_WIDE), field(p, f.WORK)
    dim, dim_v, k1, tk, tv = field(p, f.HEAD_DIM), field(p, f.HEAD_DIM_V), k0 + size, 0, 0
    k = pack_tile(p, f.K, dim, width, batch, kv_head, k0, k1, ws + field(p, f.WS_K))
    v = pack_tile(p, f.V, dim_v, width_v, batch, kv_head, k0, k1, ws + field(p, f.WS_V))
    if field(p, f.TK) != 0:
        tk = pack_tile(p, f.TK, dim, width, batch, kv_head, k0, k1, ws + field(p, f.WS_TK))
    if field(p, f.TV) != 0:
        tv = pack_tile(p, f.TV, dim_v, width_v, batch, kv_head, k0, k1, ws + field(p, f.WS_TV))
    k_columns, tk_columns = ws + field(p, f.WS_K_COLUMNS), ws + field(p, f.WS_TK_COLUMNS)
    if work & f.MAKES_DQ:
        key_columns(k, width, size, k_columns)
        if tk != 0:
            key_columns(tk, width, size, tk_columns)
    panels = (count + sz.PANEL - 1) // sz.PANEL
    weights, others = ws + field(p, f.WS_DSCORES), ws + field(p, f.WS_USCORES)
    for panel in range(panels):
        if clip_panel(p, ws, batch, head, first_row, panel, k0, size, sz.KEY_STEP):
            row, num_rows = first_row + panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
            panel_twice(p, ws, batch, head, row, panel, num_rows, k0, k, tk, v, tv)
            if work & f.MAKES_DQ:
                accumulate_dq(p, ws, weights, k_columns, panel, num_rows)
                if tk != 0:
                    accumulate_dq(p, ws, others, tk_columns, panel, num_rows)
    if work & f.MAKES_DKV:
        dk = ws + field(p, f.WS_DK) + 4 * (k0 - key_begin) * width
        dv = ws + field(p, f.WS_DV) + 4 * (k0 - key_begin) * width_v
        dout = ws + field(p, f.WS_DOUT_ROWS)
        accumulate_tile(p, ws, panels, size, ws + field(p, f.WS_SCORES), dout, width_v, dv)
        accumulate_tile(p, ws, panels, size, weights, ws + field(p, f.WS_Q_ROWS), width, dk)
        if field(p, f.TQ) != 0:
            accumulate_tile(p, ws, panels, size, others, ws + field(p, f.WS_TQ_ROWS), width, dk)


twice = gradient_program("twice", pack_twice, tile_twice)
