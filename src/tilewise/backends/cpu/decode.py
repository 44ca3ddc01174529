"""Decode: few query rows against many keys. One work item is (sequence, K/V heads, chunk of keys).

All rows of a GQA group share each load of K and V. An item takes several K/V heads, whose rows share the lanes of one
softmax. Where heads are adjacent within a row (pages, layout "bshd"), a few rows at a time are read in address order: a
single head would touch another page of memory with every row.

Chunks have a fixed number of keys, and the last chunk to finish merges them in order, so the result does not depend on
the number of threads. Pages and dense rows differ only in where a run of keys ends.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as t
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.emit import FP32
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_i64, scalar_bits
from tilewise.backends.cpu.merging import MINUS_INF, finish_rows, merge_chunks
from tilewise.backends.cpu.microkernels import row_max, softmax
from tilewise.backends.cpu.packing import fill, pack_rows, scale_rows
from tilewise.backends.cpu.scoring import (
    change_scores,
    drop_panel,
    e4m3_factor,
    k_length,
    kv_address,
    prepare_rows,
    q_length,
    q_start,
    run_length,
)
from tilewise.backends.cpu.stopping import leave, stops, stops_at
from tilewise.backends.cpu.streaming import stream_scores, stream_values

# Keys of one head that are read before the next head's, where heads are adjacent in a row: keeps reads in address
# order.
ROWS_AT_ONCE = 32


@driver
def gather_queries(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """The rows as scaled fp32 rows. The last row of a head is followed by the next head's first."""
    width, q_len = field(p, f.DIM_LANES), q_length(p, batch)
    base = field(p, f.Q) + batch * field(p, f.Q_BATCH) + q_start(p, batch) * field(p, f.Q_ROW)
    row = first_row
    for r in range(count):
        if row == q_len:
            row = 0
            head += 1
        source = base + head * field(p, f.Q_HEAD) + row * field(p, f.Q_ROW)
        place = ws + field(p, f.WS_Q) + 4 * r * width
        factor = e4m3_factor(p, f.Q, batch, head, row)
        pack_rows(source, 0, 1, field(p, f.Q_DTYPE), field(p, f.HEAD_DIM), place, 0, width, factor)
        row += 1
    scale_rows(ws + field(p, f.WS_Q), count * width, scalar_bits(field(p, f.Q_SCALE)))


@driver
def part_length(p: int, tensor: int, row: int, end: int) -> int:
    """Keys to read from one head before the next: a run, or a few of its rows if heads are adjacent in a row."""
    run = run_length(p, tensor, row, end)
    return min(run, ROWS_AT_ONCE) if field(p, f.K_HEAD) < field(p, f.K_ROW) else run


@driver
def score_run(p: int, ws: int, k: int, v: int, size: int, first: int, count: int, s: int, factor: float) -> None:
    """Scores of a run of keys of one head with rows [first, first + count). Odd head dims go through a packed copy,
    because vectors may not read past a row.
    """
    width, k_row, v_row, dtype = field(p, f.DIM_LANES), field(p, f.K_ROW), field(p, f.V_ROW), field(p, f.KV_DTYPE)
    q = ws + field(p, f.WS_Q) + 4 * first * width
    if field(p, f.HEAD_DIM) != width:
        packed = ws + field(p, f.WS_K)
        pack_rows(k, k_row, size, dtype, field(p, f.HEAD_DIM), packed, 4 * width, width, factor)
        stream_scores(packed, 4 * width, size, width, FP32, q, 4 * width, count, s, v, v_row, 1.0)
    else:
        stream_scores(k, k_row, size, width, dtype, q, 4 * width, count, s, v, v_row, factor)


@driver
def score_tile(p: int, ws: int, batch: int, kv_head: int, num_rows: int, count: int, k0: int, end: int) -> None:
    """Scores of keys [k0, end), `count` rows per K/V head. The rows of V that are needed next are prefetched."""
    row = k0
    while row < end:
        size = part_length(p, f.K, row, end)
        k, v = kv_address(p, f.K, batch, kv_head, row), kv_address(p, f.V, batch, kv_head, row)
        s = ws + field(p, f.WS_SCORES) + 4 * t.PANEL * (row - k0)
        for first in range(0, num_rows, count):
            factor = e4m3_factor(p, f.K, batch, kv_head + first // count, row)
            score_run(p, ws, k, v, size, first, count, s + 4 * first, factor)
            k += field(p, f.K_HEAD)
            v += field(p, f.V_HEAD)
        row += size


@driver
def weigh_run(p: int, ws: int, v: int, ahead: int, size: int, first: int, count: int, s: int, factor: float) -> None:
    """Values of a run of keys of one head into rows [first, first + count). Rows at `ahead` are prefetched."""
    width, v_row, dtype = field(p, f.DIM_V_LANES), field(p, f.V_ROW), field(p, f.KV_DTYPE)
    acc_row, k_row, alpha = 4 * field(p, f.DIM_V_PADDED), field(p, f.K_ROW), ws + field(p, f.WS_ALPHA) + 4 * first
    acc = ws + field(p, f.WS_ACC) + first * acc_row
    if field(p, f.HEAD_DIM_V) != width:
        packed = ws + field(p, f.WS_V)
        pack_rows(v, v_row, size, dtype, field(p, f.HEAD_DIM_V), packed, 4 * width, width, factor)
        stream_values(packed, 4 * width, size, width, FP32, s, count, acc, acc_row, alpha, ahead, k_row, 1.0)
    else:
        stream_values(v, v_row, size, width, dtype, s, count, acc, acc_row, alpha, ahead, k_row, factor)


@driver
def entry_of(p: int, item: int) -> int:
    """Address of an item's schedule entry."""
    return field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.ENTRY_BYTES


@driver
def key_ahead(p: int, batch: int, kv_head: int, row: int, last: int, following: int) -> int:
    """Address of the key that is scored one tile after `row`, in this item or in `following` (-1: unknown)."""
    other = batch if following < 0 else load_i64(entry_of(p, following))
    length = k_length(p, other)
    if row + t.BLOCK_N <= last or following < 0 or length == 0:
        return kv_address(p, f.K, batch, kv_head, min(row + t.BLOCK_N, last))
    first = load_i64(entry_of(p, following) + 24) * field(p, f.CHUNK) + row % t.BLOCK_N
    other_head = following % field(p, f.UNITS) * field(p, f.HEADS_PER_UNIT) // field(p, f.GROUP_SIZE)
    return kv_address(p, f.K, other, other_head, min(first, length - 1))


@driver
def weigh_tile(
    p: int, ws: int, batch: int, kv_head: int, num_rows: int, count: int, k0: int, end: int, last: int, following: int
) -> None:
    """Values of keys [k0, end) into the running results. The rows of K that are needed next are prefetched."""
    row = k0
    while row < end:
        size = part_length(p, f.V, row, end)
        v = kv_address(p, f.V, batch, kv_head, row)
        ahead = key_ahead(p, batch, kv_head, row, last, following)
        s = ws + field(p, f.WS_SCORES) + 4 * t.PANEL * (row - k0)
        for first in range(0, num_rows, count):
            factor = e4m3_factor(p, f.V, batch, kv_head + first // count, row)
            weigh_run(p, ws, v, ahead, size, first, count, s + 4 * first, factor)
            v += field(p, f.V_HEAD)
            ahead += field(p, f.K_HEAD)
        # The first run has already rescaled the running results.
        fill(ws + field(p, f.WS_ALPHA), t.PANEL, 1.0)
        row += size


@driver
def softmax_tile(p: int, ws: int, batch: int, count: int, k0: int, size: int) -> None:
    """Turns the scores of all rows with keys [k0, k0 + size) into weights."""
    s, state = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_ACC) + 4 * field(p, f.BLOCK_M) * field(p, f.DIM_V_PADDED)
    tile_max, alpha = ws + field(p, f.WS_MAX), ws + field(p, f.WS_ALPHA)
    table, bounds = ws + field(p, f.WS_ROWS), ws + field(p, f.WS_PANELS)
    vectors, padded = (count + t.LANES - 1) // t.LANES, (size + 3) // 4 * 4
    fill(s + 4 * t.PANEL * size, t.PANEL * (padded - size), MINUS_INF)
    edge = k0 < load_i64(bounds + f.MAX_FIRST) or k0 + size - 1 > load_i64(bounds + f.MIN_LAST)
    if edge or (field(p, f.FEATURES) & f.CHANGES_SCORES) != 0:
        change_scores(p, ws, s, padded, size, k0, table, count, 0)
    fill(tile_max, vectors * t.LANES, MINUS_INF)
    row_max(s, padded, tile_max, vectors)
    softmax(
        s, padded, state, state + 4 * field(p, f.BLOCK_M), tile_max, alpha, vectors, scalar_bits(field(p, f.TO_LOG2))
    )
    if field(p, f.FEATURES) & f.HAS_DROPOUT:
        drop_panel(p, s, padded, k0, table, batch, vectors)


@driver
def decode_item(p: int, ws: int, item: int, following: int) -> None:
    """One work item. The thread takes `following` next, -1 if unknown."""
    unit, place = item % field(p, f.UNITS), entry_of(p, item)
    batch, first_row, count = load_i64(place), load_i64(place + 8), load_i64(place + 16)
    chunk, num_chunks = load_i64(place + 24), load_i64(place + 32)
    head, block_m = unit * field(p, f.HEADS_PER_UNIT), field(p, f.BLOCK_M)
    kv_head, rows = head // field(p, f.GROUP_SIZE), q_length(p, batch) * field(p, f.GROUP_SIZE)
    k_len, k_begin = k_length(p, batch), chunk * field(p, f.CHUNK)
    k_end = min(k_len, k_begin + field(p, f.CHUNK)) if chunk < num_chunks - 1 else k_len
    prepare_rows(p, ws, batch, head, first_row, count, k_begin, k_end)
    gather_queries(p, ws, batch, head, first_row, count)
    acc = ws + field(p, f.WS_ACC)
    state = acc + 4 * block_m * field(p, f.DIM_V_PADDED)
    fill(acc, block_m * field(p, f.DIM_V_PADDED), 0.0)
    fill(state, block_m, MINUS_INF)
    fill(state + 4 * block_m, block_m, 0.0)
    last = load_i64(ws + field(p, f.WS_PANELS) + f.MAX_LAST)
    k0 = max(0, load_i64(ws + field(p, f.WS_PANELS) + f.MIN_FIRST)) // t.BLOCK_N * t.BLOCK_N
    while k0 <= last:
        if stops_at(p, k0):
            break
        size = min(t.BLOCK_N, last + 1 - k0)
        score_tile(p, ws, batch, kv_head, count, rows, k0, k0 + size)
        softmax_tile(p, ws, batch, count, k0, size)
        weigh_tile(p, ws, batch, kv_head, count, rows, k0, k0 + size, last, following)
        k0 += t.BLOCK_N
    if num_chunks == 1:
        finish_rows(p, batch, head, first_row, count, acc)
    else:
        merge_chunks(p, ws, acc, item, batch, head, first_row, count, chunk, num_chunks)


@driver
def decode(p: int) -> None:
    """The entry point of each thread: take work items, several at a time, until none is left."""
    counters, some, num_items = p + 8 * f.BLOCK_FIELDS, field(p, f.ITEMS_AT_ONCE), field(p, f.NUM_ITEMS)
    ws = field(p, f.WORKSPACE) + atomic_add(counters, 1) * field(p, f.WORKSPACE_BYTES)
    while True:
        first = atomic_add(counters + 64, some)
        if first >= num_items or stops(p):
            break
        end = min(first + some, num_items)
        for item in range(first, end):
            decode_item(p, ws, item, item + 1 if item + 1 < end else -1)
    leave(p)
