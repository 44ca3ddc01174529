"""Forward pass: one tile loop for dense, packed and paged K/V; work items are (batch, rows, key chunk) x head.

A work item keeps its query rows packed and resident, streams tiles of K and V through the cache, and takes one panel of
queries at a time through scores, softmax and values. Keys are clipped per panel, so a causal or windowed item touches
little more than its band. An item is computed the same way on any thread, so results do not depend on the number of
threads.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.features import mask_band
from tilewise.backends.cpu.intrinsics import field, load_i64, scalar_bits
from tilewise.backends.cpu.merging import (
    FOLD_KEYS,
    MINUS_INF,
    begin_rows,
    begin_totals,
    finish_rows,
    fold_rows,
    merge_chunks,
)
from tilewise.backends.cpu.microkernels import row_max, softmax, weigh_values
from tilewise.backends.cpu.packing import fill, pack_rows, transpose_panel
from tilewise.backends.cpu.scoring import (
    WHOLE_SUM,
    bounds_of,
    change_scores,
    clip_panel,
    code_factor,
    drop_panel,
    is_cut,
    is_listed,
    k_length,
    mask_tiles,
    pack_tile,
    pack_values_tile,
    prepare_rows,
    q_length,
    q_start,
    rows_of_item,
    rows_of_scale,
    score_keys,
)
from tilewise.backends.cpu.stopping import stops_at, taking_items


@driver
def pack_queries(
    p: int, tensor: int, batch: int, head: int, first_row: int, count: int, stage: int, target: int
) -> None:
    """Rows of q or its tangent into transposed, scaled panels; stage holds one panel of rows."""
    width, q_len, dtype = field(p, f.DIM_LANES), q_length(p, batch), field(p, f.Q_DTYPE)
    row_bytes = field(p, tensor + 3)
    base = field(p, tensor) + batch * field(p, tensor + 1) + q_start(p, batch) * row_bytes
    row = first_row
    for panel in range((count + sz.PANEL - 1) // sz.PANEL):
        lane = 0
        rows = min(sz.PANEL, count - panel * sz.PANEL)
        while lane < rows:
            if row == q_len:
                row = 0
                head += 1
            run = rows_of_scale(p, tensor, row, min(rows - lane, q_len - row))
            source, place = base + head * field(p, tensor + 2) + row * row_bytes, stage + 4 * lane * width
            factor = code_factor(p, tensor, batch, head, row)
            pack_rows(source, row_bytes, run, dtype, field(p, f.HEAD_DIM), place, 4 * width, width, factor)
            lane += run
            row += run
        fill(stage + 4 * rows * width, (sz.PANEL - rows) * width, 0.0)
        transpose_panel(
            stage, 4 * width, width, target + 4 * panel * sz.PANEL * width, scalar_bits(field(p, f.Q_SCALE))
        )


@driver
def acc_state(p: int, ws: int) -> int:
    """Address of the running maxima of a block; the running sums follow them."""
    return ws + field(p, f.WS_ACC) + 4 * field(p, f.BLOCK_M) * field(p, f.DIM_V_PADDED)


@driver
def mask_keys(s: int, begin: int, end: int, first_key: int, table: int, tile_max: int, vectors: int) -> None:
    """Mask keys [begin, end) of a panel that starts at `first_key`, and include the rest in the maximum."""
    if begin < end:
        place = s + 4 * begin * sz.PANEL
        mask_band(place, end - begin, first_key + begin, table, vectors)
        row_max(place, end - begin, tile_max, vectors)


@driver
def panel_scores(
    p: int, ws: int, batch: int, head: int, row: int, panel: int, num_rows: int, first_key: int, size: int, k: int
) -> None:
    """Scores of a panel, whose first row is `row`, with `size` keys from `first_key` on, and their maxima. Only keys at
    an edge, and in tiles that a tile mask hides in part, are masked.
    """
    s, tile_max = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_MAX)
    width, vectors = field(p, f.DIM_PADDED), (num_rows + sz.LANES - 1) // sz.LANES
    table, bounds = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, bounds_of(p, ws, panel)
    q = ws + field(p, f.WS_Q) + 4 * panel * sz.PANEL * field(p, f.DIM_LANES)
    # Keys in [inner, outer) are seen by every row.
    inner = (max(0, load_i64(bounds + f.MAX_FIRST) - first_key) + sz.SCORE_KEYS - 1) // sz.SCORE_KEYS * sz.SCORE_KEYS
    outer = max(0, min(size, load_i64(bounds + f.MIN_LAST) + 1 - first_key)) // sz.SCORE_KEYS * sz.SCORE_KEYS
    changed = (field(p, f.FEATURES) & f.CHANGES_SCORES) != 0
    cut = is_cut(p, batch, head, row, first_key, size)
    if inner >= outer or changed or cut:
        inner, outer = size, size
    fill(tile_max, sz.PANEL, MINUS_INF)
    for j in range(0, size, sz.SCORE_KEYS):
        # The maximum of keys that are not masked yet, or of parts of sums, goes to an unused buffer.
        top = tile_max if inner <= j < outer and width <= WHOLE_SUM else ws + field(p, f.WS_ALPHA)
        score_keys(k + 4 * j * width, width, width, q, s + 4 * j * sz.PANEL, top)
    if changed:
        valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
        slope = ws + field(p, f.WS_CAP) if field(p, f.WS_CAP) != 0 else 0
        change_scores(p, ws, s, size, valid, first_key, table, num_rows, slope)
        if cut:
            mask_tiles(p, s, batch, head, row, first_key, size, vectors)
        row_max(s, size, tile_max, vectors)
    elif cut:
        mask_band(s, size, first_key, table, vectors)
        mask_tiles(p, s, batch, head, row, first_key, size, vectors)
        row_max(s, size, tile_max, vectors)
    else:
        mask_keys(s, 0, inner, first_key, table, tile_max, vectors)
        mask_keys(s, outer, size, first_key, table, tile_max, vectors)
        if inner < outer and width > WHOLE_SUM:
            row_max(s + 4 * inner * sz.PANEL, outer - inner, tile_max, vectors)


@driver
def panel_step(p: int, ws: int, batch: int, head: int, first_row: int, count: int, panel: int, k0: int, k: int) -> None:
    """One panel against the keys it sees of the tile k at k0: scores, softmax, and values into the accumulator."""
    row, num_rows = first_row + panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
    begin, end = load_i64(bounds_of(p, ws, panel) + f.TILE_BEGIN), load_i64(bounds_of(p, ws, panel) + f.TILE_END)
    s, size, first_key = ws + field(p, f.WS_SCORES), end - begin, k0 + begin
    tile_max, alpha = ws + field(p, f.WS_MAX), ws + field(p, f.WS_ALPHA)
    width_v, vectors = field(p, f.DIM_V_PADDED), (num_rows + sz.LANES - 1) // sz.LANES
    acc = ws + field(p, f.WS_ACC) + 4 * panel * sz.PANEL * width_v
    running = acc_state(p, ws) + 4 * panel * sz.PANEL
    panel_scores(p, ws, batch, head, row, panel, num_rows, first_key, size, k + 4 * begin * field(p, f.DIM_PADDED))
    row_sum, to_log2 = running + 4 * field(p, f.BLOCK_M), scalar_bits(field(p, f.TO_LOG2))
    softmax(s, size, running, row_sum, tile_max, alpha, vectors, to_log2)
    if field(p, f.FEATURES) & f.HAS_DROPOUT:
        drop_panel(p, s, size, first_key, ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, batch, vectors)
    v = ws + field(p, f.WS_V) + 4 * begin * sz.VALUE_STEP
    for i in range(0, num_rows, sz.VALUE_ROWS):
        for d in range(0, width_v, sz.VALUE_STEP):
            place = acc + 4 * (i * width_v + d)
            weigh_values(s + 4 * i, v + 4 * sz.BLOCK_N * d, 4 * sz.VALUE_STEP, size, place, 4 * width_v, alpha + 4 * i)


@driver
def tile_loop(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Stream the keys that any row of the block sees, tile by tile, panel by panel."""
    kv_head = head // field(p, f.GROUP_SIZE)
    panels, first, last = (count + sz.PANEL - 1) // sz.PANEL, f.UNBOUNDED, -1
    for panel in range(panels):
        first = min(first, load_i64(bounds_of(p, ws, panel) + f.MIN_FIRST))
        last = max(last, load_i64(bounds_of(p, ws, panel) + f.MAX_LAST))
    k0 = max(0, first) // sz.BLOCK_N * sz.BLOCK_N
    while k0 <= last:
        if stops_at(p, k0):
            break
        if field(p, f.WS_TOTAL) != 0 and k0 % FOLD_KEYS == 0:
            fold_rows(p, ws, count)
            begin_rows(p, ws + field(p, f.WS_ACC), ws + field(p, f.WS_ACC), panels * sz.PANEL)
        size = min(sz.BLOCK_N, last + 1 - k0)
        if is_listed(p, batch, head, first_row, first_row + count, k0, k0 + size) == 0:
            k0 += sz.BLOCK_N
            continue
        k = pack_tile(
            p, f.K, field(p, f.HEAD_DIM), field(p, f.DIM_PADDED), batch, kv_head, k0, k0 + size, ws + field(p, f.WS_K)
        )
        pack_values_tile(p, f.V, batch, kv_head, k0, k0 + size, ws + field(p, f.WS_V))
        for panel in range(panels):
            if clip_panel(p, ws, batch, head, first_row, panel, k0, size, sz.KEY_STEP):
                panel_step(p, ws, batch, head, first_row, count, panel, k0, k)
        k0 += sz.BLOCK_N


@driver
def forward_item(p: int, ws: int, item: int) -> None:
    """One work item: the rows of a schedule entry for one head (or the heads of a group), against one chunk of keys."""
    unit = item % field(p, f.UNITS)
    place = field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.ENTRY_BYTES
    batch, first_row = load_i64(place), load_i64(place + 8)
    chunk, num_chunks = load_i64(place + 16), load_i64(place + 24)
    count = rows_of_item(p, batch, first_row)
    # The rows of a unit continue from head to head.
    head = unit * field(p, f.HEADS_PER_UNIT) + first_row // q_length(p, batch)
    first_row = first_row % q_length(p, batch)
    k_len = k_length(p, batch)
    k_begin = chunk * field(p, f.CHUNK)
    k_end = k_len if chunk == num_chunks - 1 else min(k_len, k_begin + field(p, f.CHUNK))
    prepare_rows(p, ws, batch, head, first_row, count, k_begin, k_end)
    pack_queries(p, f.Q, batch, head, first_row, count, ws + field(p, f.WS_STAGE), ws + field(p, f.WS_Q))
    padded = (count + sz.PANEL - 1) // sz.PANEL * sz.PANEL
    block = ws + field(p, f.WS_ACC)
    begin_rows(p, block, block, padded)
    begin_totals(p, ws, padded)
    tile_loop(p, ws, batch, head, first_row, count)
    if field(p, f.WS_TOTAL) != 0:
        fold_rows(p, ws, count)
        block = ws + field(p, f.WS_TOTAL)
    if num_chunks == 1:
        finish_rows(p, batch, head, first_row, count, block)
    else:
        merge_chunks(p, ws, block, item, batch, head, first_row, count, chunk, num_chunks)


forward = taking_items("forward", forward_item)
