"""Backward pass: P is recomputed tile by tile from q, k and lse, and turned into dq, dk, dv and dbias.

A work item owns rows, keys and heads: everything of a K/V head (5 products per tile), or the dq of a block of rows (3),
or the dk and dv of a block of keys (4). The schedule chooses among them. Each sum has the same order in all of them, so
the choice and the number of threads change no bit. Products per panel: S = K Q, dP = V dO, then dV += P dO, dK += dS Q,
dQ += dS K.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.emit import FP32
from tilewise.backends.cpu.features import multiply_panel
from tilewise.backends.cpu.intrinsics import field, fma, load_f32, load_i64, scalar_bits, store_f32, store_i64
from tilewise.backends.cpu.merging import MINUS_INF
from tilewise.backends.cpu.microkernels import accumulate_keys, softmax_gradient, weigh_values
from tilewise.backends.cpu.packing import (
    add_row,
    fill,
    pack_rows,
    pack_values,
    row_dots,
    store_row,
    transpose_panel,
    untranspose_panel,
)
from tilewise.backends.cpu.scoring import (
    bounds_of,
    change_scores,
    clip_panel,
    drop_panel,
    is_cut,
    is_listed,
    k_length,
    mask_tiles,
    pack_tile,
    prepare_rows,
    q_length,
    q_start,
    score_keys,
)
from tilewise.backends.cpu.stopping import stops, stops_at, taking_items

INFINITY = float("inf")
SCORE_BYTES = 4 * sz.BLOCK_N * sz.PANEL


@driver
def pack_panel(
    p: int,
    ws: int,
    tensor: int,
    source: int,
    num_rows: int,
    dim: int,
    width: int,
    panel: int,
    panels: int,
    columns: int,
    scale: float,
) -> None:
    """Rows of q or dout (or of q's tangent): staged as fp32, then transposed for scores (in the buffer `panels`) and in
    `columns` for products.

    Columns of value_step keep the product's rows on different cache sets: at head_dim 128 rows 512 bytes apart would
    share eight of them.
    """
    stage = ws + field(p, f.WS_STAGE)
    pack_rows(source, field(p, tensor + 3), num_rows, field(p, f.DTYPE), dim, stage, 4 * width, width, 1.0)
    fill(stage + 4 * num_rows * width, (sz.PANEL - num_rows) * width, 0.0)
    transpose_panel(stage, 4 * width, width, panels + 4 * panel * sz.PANEL * width, scale)
    columns += 4 * panel * sz.PANEL * sz.VALUE_STEP
    column_bytes = 4 * field(p, f.BLOCK_M) * sz.VALUE_STEP
    pack_values(stage, 4 * width, sz.PANEL, FP32, width, columns, column_bytes, width, 1.0)


@driver
def row_address(p: int, tensor: int, batch: int, head: int, row: int) -> int:
    """Address of one row of a q-like tensor (`tensor` is the position of its fields)."""
    place = batch * field(p, tensor + 1) + head * field(p, tensor + 2) + row * field(p, tensor + 3)
    return field(p, tensor) + place


@driver
def pack_block(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Pack q and dout of a block, and the statistics of its rows."""
    row = q_start(p, batch) + first_row
    q, dout = row_address(p, f.Q, batch, head, row), row_address(p, f.DOUT, batch, head, row)
    out, scale = row_address(p, f.OUT, batch, head, row), scalar_bits(field(p, f.Q_SCALE))
    q_panels, q_columns = ws + field(p, f.WS_Q), ws + field(p, f.WS_Q_ROWS)
    dout_panels, dout_columns = ws + field(p, f.WS_DOUT), ws + field(p, f.WS_DOUT_ROWS)
    dim, dim_v, width = field(p, f.HEAD_DIM), field(p, f.HEAD_DIM_V), field(p, f.DIM_WIDE)
    statistics = batch * field(p, f.LSE_BATCH) + head * field(p, f.LSE_HEAD) + 4 * row
    for panel in range((count + sz.PANEL - 1) // sz.PANEL):
        first, rows = panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
        q_source, dout_source = q + first * field(p, f.Q_ROW), dout + first * field(p, f.DOUT_ROW)
        pack_panel(p, ws, f.Q, q_source, rows, dim, width, panel, q_panels, q_columns, scale)
        pack_panel(
            p, ws, f.DOUT, dout_source, rows, dim_v, field(p, f.DIM_V_WIDE), panel, dout_panels, dout_columns, 1.0
        )
        pack_statistics(p, ws, out + first * field(p, f.OUT_ROW), statistics + 4 * first, rows, panel)


@driver
def pack_statistics(p: int, ws: int, out: int, at: int, num_rows: int, panel: int) -> None:
    """Lse in log2 units, and delta = rowsum(dout * out) - dlse, of a panel whose dout is staged.

    A row without keys, or beyond the last one, has lse +inf, so its P is 0. Lse is kept in two parts, because rounding
    it again would show in every P of its row.
    """
    width_v, row = field(p, f.DIM_V_WIDE), ws + field(p, f.WS_EXTRA)
    to_log2 = scalar_bits(field(p, f.LSE_TO_LOG2))
    for r in range(sz.PANEL):
        high, low, delta = INFINITY, 0.0, 0.0
        if r < num_rows:
            lse = load_f32(field(p, f.LSE) + at + 4 * r)
            if lse != MINUS_INF:
                high = lse * to_log2
            if MINUS_INF < lse < INFINITY:
                low = fma(lse, to_log2, -high) + lse * scalar_bits(field(p, f.LSE_TO_LOG2_LOW))
            source = out + r * field(p, f.OUT_ROW)
            pack_rows(source, 0, 1, field(p, f.DTYPE), field(p, f.HEAD_DIM_V), row, 0, width_v, 1.0)
            delta = row_dots(row, ws + field(p, f.WS_STAGE) + 4 * r * width_v, width_v)
            if field(p, f.DLSE) != 0:
                delta -= load_f32(field(p, f.DLSE) + at + 4 * r)
            if field(p, f.DELTA) != 0:
                store_f32(field(p, f.DELTA) + at + 4 * r, delta)
        store_f32(ws + field(p, f.WS_LSE) + 4 * (panel * sz.PANEL + r), high)
        store_f32(ws + field(p, f.WS_LSE_LOW) + 4 * (panel * sz.PANEL + r), low)
        store_f32(ws + field(p, f.WS_DELTA) + 4 * (panel * sz.PANEL + r), delta)


@driver
def panel_gradient(
    p: int, ws: int, batch: int, head: int, row: int, panel: int, num_rows: int, k0: int, k: int, v: int
) -> None:
    """P and dS of one panel against the keys it sees of the tile at k0, whose rows are k and v. They are left in the
    score buffers at TILE_BEGIN.
    """
    table, bounds = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, bounds_of(p, ws, panel)
    width, width_v, scratch = field(p, f.DIM_WIDE), field(p, f.DIM_V_WIDE), ws + field(p, f.WS_MAX)
    begin = load_i64(bounds + f.TILE_BEGIN)
    size, first_key, at = load_i64(bounds + f.TILE_END) - begin, k0 + begin, panel * SCORE_BYTES + 4 * begin * sz.PANEL
    s, ds, rows = ws + field(p, f.WS_SCORES) + at, ws + field(p, f.WS_DSCORES) + at, 4 * panel * sz.PANEL
    q, dout = ws + field(p, f.WS_Q) + rows * width, ws + field(p, f.WS_DOUT) + rows * width_v
    k += 4 * begin * width
    v += 4 * begin * width_v
    for j in range(0, size, sz.SCORE_KEYS):
        score_keys(k + 4 * j * width, width, field(p, f.DIM_PADDED), q, s + 4 * j * sz.PANEL, scratch)
    for j in range(0, size, sz.SCORE_KEYS):
        score_keys(v + 4 * j * width_v, width_v, field(p, f.DIM_V_PADDED), dout, ds + 4 * j * sz.PANEL, scratch)
    features, vectors = field(p, f.FEATURES), sz.PANEL // sz.LANES
    edge = first_key < load_i64(bounds + f.MAX_FIRST) or first_key + size - 1 > load_i64(bounds + f.MIN_LAST)
    cut = is_cut(p, batch, head, row, first_key, size)
    if edge or cut or (features & f.CHANGES_SCORES) != 0:
        valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
        change_scores(p, ws, s, size, valid, first_key, table, num_rows, ws + field(p, f.WS_CAP))
    if cut:
        mask_tiles(p, s, batch, head, row, first_key, size, vectors)
    if features & f.HAS_DROPOUT:
        drop_panel(p, ds, size, first_key, table, batch, vectors)
    lse, low, delta = ws + field(p, f.WS_LSE), ws + field(p, f.WS_LSE_LOW), ws + field(p, f.WS_DELTA)
    softmax_gradient(s, ds, size, lse + rows, low + rows, delta + rows, scalar_bits(field(p, f.TO_LOG2)))
    if features & f.HAS_DROPOUT:
        drop_panel(p, s, size, first_key, table, batch, vectors)
    if field(p, f.WORK) & f.MAKES_DBIAS:
        valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
        untranspose_panel(ds, size, ws + field(p, f.WS_STAGE), 4 * sz.BLOCK_N)
        add_bias_gradient(p, ws, batch, panel, num_rows, first_key, valid)
    if features & f.HAS_SLOPE:
        multiply_panel(ds, size, ws + field(p, f.WS_CAP), (num_rows + sz.LANES - 1) // sz.LANES)


@driver
def add_bias_gradient(p: int, ws: int, batch: int, panel: int, num_rows: int, first_key: int, valid: int) -> None:
    """Add the staged dS rows of a panel to dbias. Rows that share a bias row are added one after another."""
    head, row = field(p, f.WS_HEAD_ROW) + ws, 0
    base = field(p, f.DBIAS) + batch * field(p, f.DBIAS_BATCH) + load_i64(head) * field(p, f.DBIAS_HEAD)
    row = load_i64(head + 8) + panel * sz.PANEL
    for r in range(num_rows):
        target = base + (row + r) * field(p, f.DBIAS_ROW) + first_key * field(p, f.DBIAS_KEY)
        add_row(target, field(p, f.DBIAS_KEY), ws + field(p, f.WS_STAGE) + 4 * sz.BLOCK_N * r, valid)


@driver
def sees_keys(p: int, ws: int, panel: int, j: int) -> int:
    """Whether a panel has scores for the keys at j of the present tile."""
    bounds = bounds_of(p, ws, panel)
    return load_i64(bounds + f.TILE_BEGIN) <= j < load_i64(bounds + f.TILE_END)


@driver
def accumulate_tile(p: int, ws: int, panels: int, size: int, weights: int, x: int, width: int, acc: int) -> None:
    """acc[size keys][width] += weights . x over the panels that see each group of keys; x is in columns."""
    for d in range(0, width, sz.VALUE_STEP):
        column = x + 4 * d * field(p, f.BLOCK_M)
        for j in range(0, size, sz.VALUE_ROWS):
            first, panel = 0, 0
            while first < panels:
                # Runs of panels that see these keys: one under a band, several where a tile mask leaves gaps.
                panel = first
                while panel < panels:
                    if sees_keys(p, ws, panel, j) == 0:
                        break
                    panel += 1
                if panel > first:
                    seen, place = weights + first * SCORE_BYTES + 4 * j * sz.PANEL, acc + 4 * (j * width + d)
                    source = column + 4 * first * sz.PANEL * sz.VALUE_STEP
                    accumulate_keys(seen, SCORE_BYTES, panel - first, source, 4 * sz.VALUE_STEP, place, 4 * width)
                first = panel + 1


@driver
def accumulate_dq(p: int, ws: int, weights: int, columns: int, panel: int, num_rows: int) -> None:
    """dq[num_rows] += dS K for one panel and the keys it sees; `weights` are the panels of dS, `columns` hold K."""
    width, ones, bounds = field(p, f.DIM_WIDE), ws + field(p, f.WS_ONES), bounds_of(p, ws, panel)
    begin, end = load_i64(bounds + f.TILE_BEGIN), load_i64(bounds + f.TILE_END)
    ds = weights + panel * SCORE_BYTES + 4 * begin * sz.PANEL
    k = columns + 4 * begin * sz.VALUE_STEP
    dq = ws + field(p, f.WS_DQ) + 4 * panel * sz.PANEL * width
    for i in range(0, num_rows, sz.VALUE_ROWS):
        for d in range(0, width, sz.VALUE_STEP):
            place = dq + 4 * (i * width + d)
            weigh_values(ds + 4 * i, k + 4 * d * sz.BLOCK_N, 4 * sz.VALUE_STEP, end - begin, place, 4 * width, ones)


@driver
def key_columns(rows: int, width: int, size: int, columns: int) -> None:
    """Rows of K, or of its tangent, in columns."""
    padded = (size + sz.KEY_STEP - 1) // sz.KEY_STEP * sz.KEY_STEP
    pack_values(rows, 4 * width, padded, FP32, width, columns, 4 * sz.BLOCK_N * sz.VALUE_STEP, width, 1.0)


@driver
def tile_gradient(
    p: int, ws: int, batch: int, head: int, first_row: int, count: int, k0: int, size: int, key_begin: int
) -> None:
    """All panels of a block against the tile of `size` keys at k0."""
    kv_head = head // field(p, f.GROUP_SIZE)
    width, width_v, work = field(p, f.DIM_WIDE), field(p, f.DIM_V_WIDE), field(p, f.WORK)
    k = pack_tile(p, f.K, field(p, f.HEAD_DIM), width, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_K))
    v = pack_tile(p, f.V, field(p, f.HEAD_DIM_V), width_v, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_V))
    s, ds, columns = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_DSCORES), ws + field(p, f.WS_K_COLUMNS)
    if work & f.MAKES_DQ:
        key_columns(k, width, size, columns)
    panels = (count + sz.PANEL - 1) // sz.PANEL
    for panel in range(panels):
        if clip_panel(p, ws, batch, head, first_row, panel, k0, size, sz.KEY_STEP):
            row, num_rows = first_row + panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
            panel_gradient(p, ws, batch, head, row, panel, num_rows, k0, k, v)
            if work & f.MAKES_DQ:
                accumulate_dq(p, ws, ds, columns, panel, num_rows)
    if work & f.MAKES_DKV:
        dk = ws + field(p, f.WS_DK) + 4 * (k0 - key_begin) * width
        dv = ws + field(p, f.WS_DV) + 4 * (k0 - key_begin) * width_v
        accumulate_tile(p, ws, panels, size, s, ws + field(p, f.WS_DOUT_ROWS), width_v, dv)
        accumulate_tile(p, ws, panels, size, ds, ws + field(p, f.WS_Q_ROWS), width, dk)


@driver
def store_key_gradients(p: int, ws: int, batch: int, kv_head: int, key_begin: int, key_end: int) -> None:
    """Write dk and dv of a range of keys."""
    width, width_v, table = field(p, f.DIM_WIDE), field(p, f.DIM_V_WIDE), field(p, f.CU_GRADS_K)
    row = key_begin + (load_i64(table + 8 * batch) if table != 0 else 0)
    dk = field(p, f.DK) + batch * field(p, f.DK_BATCH) + kv_head * field(p, f.DK_HEAD) + row * field(p, f.DK_ROW)
    dv = field(p, f.DV) + batch * field(p, f.DV_BATCH) + kv_head * field(p, f.DV_HEAD) + row * field(p, f.DV_ROW)
    dtype, scale = field(p, f.KV_GRAD_DTYPE), scalar_bits(field(p, f.SCALE))
    for r in range(key_end - key_begin):
        if field(p, f.DK) != 0:
            source, target = ws + field(p, f.WS_DK) + 4 * r * width, dk + r * field(p, f.DK_ROW)
            store_row(source, field(p, f.HEAD_DIM), target, dtype, scale)
        if field(p, f.DV) != 0:
            source, target = ws + field(p, f.WS_DV) + 4 * r * width_v, dv + r * field(p, f.DV_ROW)
            store_row(source, field(p, f.HEAD_DIM_V), target, dtype, 1.0)


def gradient_program(
    program: str,
    pack: Callable[[int, int, int, int, int, int], None],
    visit: Callable[[int, int, int, int, int, int, int, int, int], None],
) -> Callable[[int], None]:
    """The entry point of a program that makes gradients: `pack` prepares a block of rows, `visit` takes it against a
    tile of keys.
    """

    @driver
    def block_gradient(
        p: int, ws: int, batch: int, head: int, first_row: int, count: int, key_begin: int, key_end: int
    ) -> None:
        """One block of query rows of one head against a range of keys."""
        width, panels = field(p, f.DIM_WIDE), (count + sz.PANEL - 1) // sz.PANEL
        prepare_rows(p, ws, batch, head, first_row, count, key_begin, key_end)
        first, last = f.UNBOUNDED, -1
        for panel in range(panels):
            first = min(first, load_i64(bounds_of(p, ws, panel) + f.MIN_FIRST))
            last = max(last, load_i64(bounds_of(p, ws, panel) + f.MAX_LAST))
        makes_dq = field(p, f.WORK) & f.MAKES_DQ
        if (first > last and makes_dq == 0) or stops(p):
            return
        if makes_dq == 0 and is_listed(p, batch, head, first_row, first_row + count, max(0, first), last + 1) == 0:
            return
        store_i64(ws + field(p, f.WS_HEAD_ROW), head)
        store_i64(ws + field(p, f.WS_HEAD_ROW) + 8, first_row)
        pack(p, ws, batch, head, first_row, count)
        fill(ws + field(p, f.WS_DQ), panels * sz.PANEL * width, 0.0)
        k0 = max(0, first) // sz.BLOCK_N * sz.BLOCK_N
        while k0 <= last:
            if stops_at(p, k0):
                break
            size = min(sz.BLOCK_N, last + 1 - k0)
            if is_listed(p, batch, head, first_row, first_row + count, k0, k0 + size):
                visit(p, ws, batch, head, first_row, count, k0, size, key_begin)
            k0 += sz.BLOCK_N
        if makes_dq:
            dq = row_address(p, f.DQ, batch, head, q_start(p, batch) + first_row)
            for r in range(count):
                source, target = ws + field(p, f.WS_DQ) + 4 * r * width, dq + r * field(p, f.DQ_ROW)
                store_row(source, field(p, f.HEAD_DIM), target, field(p, f.DTYPE), scalar_bits(field(p, f.SCALE)))

    @driver
    def gradient_item(p: int, ws: int, item: int) -> None:
        """One work item: a schedule entry for one unit of heads."""
        head = item % field(p, f.UNITS) * field(p, f.HEADS_PER_UNIT)
        place = field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.BACKWARD_ENTRY_BYTES
        batch, end_batch, first_row = load_i64(place), load_i64(place + 8), load_i64(place + 16)
        end_row, key_begin, end_key = load_i64(place + 24), load_i64(place + 32), load_i64(place + 40)
        makes_dkv, block_m = field(p, f.WORK) & f.MAKES_DKV, field(p, f.BLOCK_M)
        fill(ws + field(p, f.WS_ONES), sz.PANEL, 1.0)
        if makes_dkv:
            keys = (min(end_key, k_length(p, batch)) - key_begin + sz.BLOCK_N - 1) // sz.BLOCK_N * sz.BLOCK_N
            fill(ws + field(p, f.WS_DK), keys * field(p, f.DIM_WIDE), 0.0)
            fill(ws + field(p, f.WS_DV), keys * field(p, f.DIM_V_WIDE), 0.0)
        while batch < end_batch:
            key_end, rows = min(end_key, k_length(p, batch)), min(end_row, q_length(p, batch))
            for h in range(head, head + field(p, f.HEADS_PER_UNIT)):
                for row in range(first_row, rows, block_m):
                    block_gradient(p, ws, batch, h, row, min(block_m, rows - row), key_begin, key_end)
            if makes_dkv:
                store_key_gradients(p, ws, batch, head // field(p, f.GROUP_SIZE), key_begin, key_end)
            batch += 1

    return taking_items(program, gradient_item)


backward = gradient_program("backward", pack_block, tile_gradient)
