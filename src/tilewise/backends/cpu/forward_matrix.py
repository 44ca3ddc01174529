"""Forward pass of bf16 on a matrix unit: the tile loop of forward.py with both products on tiles of 16 x 16.

The rows of an item, their panels, the clipping of keys, the softmax and all features are the same. Scores and row sums
are fp32; P is rounded to bf16 for the product with V, as V is. The running result is transposed, [dim][query], until
the item is finished.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as t
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.features import mask_band
from tilewise.backends.cpu.forward import acc_state
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_i64, scalar_bits
from tilewise.backends.cpu.isa import AMX
from tilewise.backends.cpu.matrix import (
    add_product,
    matrix_scores,
    matrix_values,
    pack_halves,
    pack_weights,
    softmax_to_weights,
    start_tiles,
    stop_tiles,
    transpose_queries,
    transpose_values,
)
from tilewise.backends.cpu.merging import (
    FOLD_KEYS,
    MINUS_INF,
    begin_rows,
    begin_totals,
    finish_rows,
    fold_rows,
    merge_chunks,
)
from tilewise.backends.cpu.microkernels import row_max, softmax
from tilewise.backends.cpu.packing import fill, scale_rows, untranspose_panel
from tilewise.backends.cpu.scoring import (
    change_scores,
    drop_panel,
    k_length,
    kv_address,
    prepare_rows,
    q_length,
    q_start,
    run_length,
)
from tilewise.backends.cpu.stopping import answer_signals, has_stopped, is_due, leave

KEYS, STEP = AMX.keys, AMX.depth
VALUE_BYTES = 2 * KEYS


@driver
def pack_queries(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Rows of q into panels of pairs. They are not scaled, because they must stay bf16."""
    width, q_len, stage = field(p, f.DIM_PADDED), q_length(p, batch), ws + field(p, f.WS_STAGE)
    base = field(p, f.Q) + batch * field(p, f.Q_BATCH) + q_start(p, batch) * field(p, f.Q_ROW)
    row = first_row
    for panel in range((count + t.PANEL - 1) // t.PANEL):
        lane = 0
        rows = min(t.PANEL, count - panel * t.PANEL)
        while lane < rows:
            if row == q_len:
                row = 0
                head += 1
            run = min(rows - lane, q_len - row)
            source = base + head * field(p, f.Q_HEAD) + row * field(p, f.Q_ROW)
            place = stage + 2 * lane * width
            pack_halves(source, field(p, f.Q_ROW), run, field(p, f.HEAD_DIM), place, 2 * width, width)
            lane += run
            row += run
        fill(stage + 2 * rows * width, (t.PANEL - rows) * width // 2, 0.0)
        transpose_queries(stage, 2 * width, width, ws + field(p, f.WS_Q) + 2 * panel * t.PANEL * width)


@driver
def rows_tile(
    p: int, tensor: int, dim: int, width: int, batch: int, kv_head: int, begin: int, end: int, target: int
) -> int:
    """Address of rows [begin, end) of K or V, `width` elements apart, with zero rows up to a whole step: in the tensor
    itself, or in `target`, into which they are packed.
    """
    adjacent = dim == width and field(p, tensor + 3) == 2 * width
    if adjacent and (end - begin) % STEP == 0 and run_length(p, tensor, begin, end) == end - begin:
        return kv_address(p, tensor, batch, kv_head, begin)
    row = begin
    while row < end:
        count = run_length(p, tensor, row, end)
        source, place = kv_address(p, tensor, batch, kv_head, row), target + 2 * (row - begin) * width
        pack_halves(source, field(p, tensor + 3), count, dim, place, 2 * width, width)
        row += count
    padded = (end - begin + STEP - 1) // STEP * STEP
    fill(target + 2 * (end - begin) * width, (padded - end + begin) * width // 2, 0.0)
    return target


@driver
def panel_scores(p: int, ws: int, panel: int, num_rows: int, first_key: int, size: int, k: int) -> None:
    """Scores of a panel with `size` keys from `first_key` on, all features applied, and their maxima."""
    s, tile_max = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_MAX)
    width, vectors = field(p, f.DIM_PADDED), (num_rows + t.LANES - 1) // t.LANES
    table, bounds = ws + field(p, f.WS_ROWS) + panel * t.TABLE_BYTES, ws + field(p, f.WS_PANELS) + panel * f.PANEL_BYTES
    q = ws + field(p, f.WS_Q) + 2 * panel * t.PANEL * width
    for j in range(0, size, STEP):
        matrix_scores(k + 2 * j * width, 2 * width, width, q, s + 4 * j * t.PANEL)
    if scalar_bits(field(p, f.Q_SCALE)) != 1.0:
        scale_rows(s, size * t.PANEL, scalar_bits(field(p, f.Q_SCALE)))
    if (field(p, f.FEATURES) & f.CHANGES_SCORES) != 0:
        valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
        for j in range(0, size, t.BLOCK_N):
            part, place = min(t.BLOCK_N, size - j), s + 4 * j * t.PANEL
            change_scores(p, ws, place, part, min(part, valid - j), first_key + j, table, num_rows, 0)
    else:
        # Keys in [inner, outer) are seen by every row.
        inner = min(size, max(0, load_i64(bounds + f.MAX_FIRST) - first_key))
        outer = max(inner, min(size, load_i64(bounds + f.MIN_LAST) + 1 - first_key))
        if inner > 0:
            mask_band(s, inner, first_key, table, vectors)
        if outer < size:
            mask_band(s + 4 * outer * t.PANEL, size - outer, first_key + outer, table, vectors)
    fill(tile_max, t.PANEL, MINUS_INF)
    row_max(s, size, tile_max, vectors)


@driver
def panel_step(p: int, ws: int, batch: int, panel: int, num_rows: int, k0: int, begin: int, end: int, k: int) -> None:
    """One panel against keys [begin, end) of the tile k at k0: scores, softmax, and values into the accumulator."""
    s, size, first_key = ws + field(p, f.WS_SCORES), end - begin, k0 + begin
    tile_max, alpha = ws + field(p, f.WS_MAX), ws + field(p, f.WS_ALPHA)
    width_v, vectors = field(p, f.DIM_V_PADDED), (num_rows + t.LANES - 1) // t.LANES
    panel_scores(p, ws, panel, num_rows, first_key, size, k + 2 * begin * field(p, f.DIM_PADDED))
    running, weights = acc_state(p, ws) + 4 * panel * t.PANEL, ws + field(p, f.WS_WEIGHTS)
    row_sum, to_log2 = running + 4 * field(p, f.BLOCK_M), scalar_bits(field(p, f.TO_LOG2))
    if field(p, f.FEATURES) & f.HAS_DROPOUT:
        softmax(s, size, running, row_sum, tile_max, alpha, vectors, to_log2)
        drop_panel(p, s, size, first_key, ws + field(p, f.WS_ROWS) + panel * t.TABLE_BYTES, batch, vectors)
        pack_weights(s, size, weights)
    else:
        softmax_to_weights(s, size, running, row_sum, tile_max, alpha, vectors, to_log2, weights)
    v, product = ws + field(p, f.WS_V) + 2 * begin, ws + field(p, f.WS_PRODUCT)
    for d in range(0, width_v, STEP):
        matrix_values(v + d * VALUE_BYTES, VALUE_BYTES, weights, size, product + 4 * d * t.PANEL)
    add_product(ws + field(p, f.WS_ACC_T) + 4 * panel * t.PANEL * width_v, product, alpha, width_v)


@driver
def stops_with_tiles(p: int, ws: int) -> int:
    """`stops` for a thread whose tile registers are configured: signal handlers may use them too."""
    if is_due(p):
        tiles = ws + field(p, f.WS_TILES)
        stop_tiles(tiles + 64)
        answer_signals(p)
        start_tiles(tiles, tiles + 64)
    return has_stopped(p)


@driver
def rows_of_sums(p: int, ws: int, padded: int) -> None:
    """The running results as rows, where finished rows are expected."""
    width_v, block, acc = field(p, f.DIM_V_PADDED), ws + field(p, f.WS_ACC), ws + field(p, f.WS_ACC_T)
    for row in range(0, padded, t.PANEL):
        untranspose_panel(acc + 4 * row * width_v, width_v, block + 4 * row * width_v, 4 * width_v)


@driver
def tile_loop(p: int, ws: int, batch: int, kv_head: int, count: int) -> None:
    """Stream the keys that any row of the block sees, tile by tile, panel by panel."""
    panels, bounds = (count + t.PANEL - 1) // t.PANEL, ws + field(p, f.WS_PANELS)
    width, width_v = field(p, f.DIM_PADDED), field(p, f.DIM_V_PADDED)
    v = ws + field(p, f.WS_V)
    first, last = f.UNBOUNDED, -1
    for panel in range(panels):
        first = min(first, load_i64(bounds + panel * f.PANEL_BYTES + f.MIN_FIRST))
        last = max(last, load_i64(bounds + panel * f.PANEL_BYTES + f.MAX_LAST))
    k0 = max(0, first) // KEYS * KEYS
    while k0 <= last:
        if stops_with_tiles(p, ws):
            break
        if field(p, f.WS_TOTAL) != 0 and k0 % FOLD_KEYS == 0:
            rows_of_sums(p, ws, panels * t.PANEL)
            fold_rows(p, ws, count)
            begin_rows(p, ws + field(p, f.WS_ACC), ws + field(p, f.WS_ACC_T), panels * t.PANEL)
        size = min(KEYS, last + 1 - k0)
        end_key = k0 + size
        k = rows_tile(p, f.K, field(p, f.HEAD_DIM), width, batch, kv_head, k0, end_key, ws + field(p, f.WS_K))
        rows_v = rows_tile(
            p, f.V, field(p, f.HEAD_DIM_V), width_v, batch, kv_head, k0, end_key, ws + field(p, f.WS_V_ROWS)
        )
        transpose_values(rows_v, 2 * width_v, (size + STEP - 1) // STEP * STEP, width_v, v, VALUE_BYTES)
        for panel in range(panels):
            low = max(0, load_i64(bounds + panel * f.PANEL_BYTES + f.MIN_FIRST) - k0)
            high = min(size, load_i64(bounds + panel * f.PANEL_BYTES + f.MAX_LAST) + 1 - k0)
            if low < high:
                begin, stop = low // STEP * STEP, (high + STEP - 1) // STEP * STEP
                panel_step(p, ws, batch, panel, min(t.PANEL, count - panel * t.PANEL), k0, begin, stop, k)
        k0 += KEYS


@driver
def matrix_item(p: int, ws: int, item: int) -> None:
    """One work item: the rows of a schedule entry for one head (or the heads of a group), against one chunk of keys."""
    unit = item % field(p, f.UNITS)
    place = field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.ENTRY_BYTES
    batch, first_row, count = load_i64(place), load_i64(place + 8), load_i64(place + 16)
    chunk, num_chunks = load_i64(place + 24), load_i64(place + 32)
    # The rows of a unit continue from head to head.
    head = unit * field(p, f.HEADS_PER_UNIT) + first_row // q_length(p, batch)
    first_row = first_row % q_length(p, batch)
    k_len, k_begin = k_length(p, batch), chunk * field(p, f.CHUNK)
    k_end = k_len if chunk == num_chunks - 1 else min(k_len, k_begin + field(p, f.CHUNK))
    prepare_rows(p, ws, batch, head, first_row, count, k_begin, k_end)
    pack_queries(p, ws, batch, head, first_row, count)
    padded = (count + t.PANEL - 1) // t.PANEL * t.PANEL
    block = ws + field(p, f.WS_ACC)
    begin_rows(p, block, ws + field(p, f.WS_ACC_T), padded)
    begin_totals(p, ws, padded)
    tile_loop(p, ws, batch, head // field(p, f.GROUP_SIZE), count)
    rows_of_sums(p, ws, padded)
    if field(p, f.WS_TOTAL) != 0:
        fold_rows(p, ws, count)
        block = ws + field(p, f.WS_TOTAL)
    if num_chunks == 1:
        finish_rows(p, batch, head, first_row, count, block)
    else:
        merge_chunks(p, ws, block, item, batch, head, first_row, count, chunk, num_chunks)


@driver
def forward_matrix(p: int) -> None:
    """The entry point of each thread: take work items until none is left."""
    counters = p + 8 * f.BLOCK_FIELDS
    ws = field(p, f.WORKSPACE) + atomic_add(counters, 1) * field(p, f.WORKSPACE_BYTES)
    tiles = ws + field(p, f.WS_TILES)
    start_tiles(tiles, tiles + 64)
    while True:
        item = atomic_add(counters + 64, 1)
        if item >= field(p, f.NUM_ITEMS) or has_stopped(p):
            break
        matrix_item(p, ws, item)
    stop_tiles(tiles + 64)
    leave(p)
