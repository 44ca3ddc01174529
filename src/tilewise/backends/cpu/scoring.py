"""Drivers shared by the forward, decode and backward passes: sequences, rows and their key ranges, tiles of K and V,
score features.

`p` is the address of the parameter block (see params.py), `ws` that of the calling thread's workspace.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.emit import BOOL, E4M3, E4M3_UNIT, FP32
from tilewise.backends.cpu.features import add_alibi, add_panel, apply_softcap, drop, gather_row, mask_band, mask_bits
from tilewise.backends.cpu.intrinsics import (
    field,
    load_f32,
    load_i32,
    load_i64,
    scalar_bits,
    store_f32,
    store_i32,
    store_i64,
)
from tilewise.backends.cpu.microkernels import add_scores, scores
from tilewise.backends.cpu.packing import fill, pack_rows, pack_values, transpose_panel
from tilewise.tiles import EMPTY, FULL, TILE, WORD, WORDS

# Row tables hold keys as int32: the last key of a row without keys, and the first key of a row that starts after all.
NO_KEY, PAST_KEYS = -1, (1 << 31) - 1
MINUS_INF = -float("inf")
# Bytes of a tile's bits, and of those of its queries that share words.
TILE_BYTES, WORD_BYTES = 4 * WORDS * TILE, 4 * TILE
# The bits of one panel, which lie in one word.
PANEL_BITS = (1 << sz.PANEL) - 1
# Up to so many products are added one by one. More are added in parts, as a long sum loses digits.
WHOLE_SUM, PART = 256, 128


@driver
def q_start(p: int, batch: int) -> int:
    """First row of a sequence in the packed tensors; 0 for dense ones."""
    table = field(p, f.CU_SEQLENS_Q)
    return load_i32(table + 4 * batch) if table != 0 else 0


@driver
def q_length(p: int, batch: int) -> int:
    """Query rows of a sequence."""
    table = field(p, f.CU_SEQLENS_Q)
    return load_i32(table + 4 * batch + 4) - load_i32(table + 4 * batch) if table != 0 else field(p, f.SEQLEN_Q)


@driver
def rows_of_item(p: int, batch: int, first_row: int) -> int:
    """Query rows of a work item of the forward: a block, or what is left of the unit's heads."""
    return min(field(p, f.BLOCK_M), q_length(p, batch) * field(p, f.HEADS_PER_UNIT) - first_row)


@driver
def k_length(p: int, batch: int) -> int:
    """Keys of a sequence."""
    table = field(p, f.SEQLENS_K)
    if table != 0:
        return load_i32(table + 4 * batch)
    table = field(p, f.CU_SEQLENS_K)
    return load_i32(table + 4 * batch + 4) - load_i32(table + 4 * batch) if table != 0 else field(p, f.SEQLEN_K)


@driver
def kv_row(p: int, batch: int, row: int) -> int:
    """The page that holds `row` for paged tensors, the sequence's first row for packed ones, 0 for dense ones."""
    if field(p, f.PAGE_SIZE) != 0:
        page = row // field(p, f.PAGE_SIZE)
        return load_i32(field(p, f.BLOCK_TABLE) + batch * field(p, f.BLOCK_TABLE_ROW) + 4 * page)
    table = field(p, f.CU_SEQLENS_K)
    return load_i32(table + 4 * batch) if table != 0 else 0


@driver
def kv_address(p: int, tensor: int, batch: int, kv_head: int, row: int) -> int:
    """Address of one row of K or V (`tensor` is the position of its fields: K, V, DK or DV)."""
    base = field(p, tensor) + kv_head * field(p, tensor + 2)
    found = kv_row(p, batch, row)
    if field(p, f.PAGE_SIZE) != 0:
        return base + found * field(p, tensor + 1) + row % field(p, f.PAGE_SIZE) * field(p, tensor + 3)
    return base + batch * field(p, tensor + 1) + (found + row) * field(p, tensor + 3)


@driver
def scales_of(tensor: int) -> int:
    """The position of the scale fields of Q, K or V; tangents have none."""
    return f.Q_SCALES + (tensor - f.Q) // 4 * 5 if tensor <= f.V else f.NO_SCALES


@driver
def scale_address(p: int, tensor: int, batch: int, head: int, row: int) -> int:
    """Address of the scale of a row of Q, K or V; 0 without scales."""
    scales = scales_of(tensor)
    if field(p, scales) == 0:
        return 0
    entry, place = batch, row
    if tensor != f.Q and field(p, f.PAGE_SIZE) != 0:
        entry, place = kv_row(p, batch, row), row % field(p, f.PAGE_SIZE)
    block = place // field(p, scales + 4) if field(p, scales + 4) != 0 else 0
    offset = entry * field(p, scales + 1) + head * field(p, scales + 2) + block * field(p, scales + 3)
    return field(p, scales) + offset


@driver
def scaled_by(p: int, address: int) -> float:
    """The factor for loads of codes whose scale is at an address; 1 for address 0.

    That of e4m3 is finite for scales below 2^120; those of fp32 numbers are at most 2^128 / 448.
    """
    if address == 0:
        return 1.0
    # q is in 8 bits only if K and V are, in the same dtype.
    return E4M3_UNIT * load_f32(address) if field(p, f.KV_DTYPE) == E4M3 else load_f32(address)


@driver
def code_factor(p: int, tensor: int, batch: int, head: int, row: int) -> float:
    """The factor for loads of a row of Q, K or V in 8 bits. Other dtypes ignore it."""
    return scaled_by(p, scale_address(p, tensor, batch, head, row))


@driver
def scale_step(p: int, tensor: int) -> int:
    """Bytes between the scales of neighbouring rows, 0 if rows share one."""
    scales = scales_of(tensor)
    return field(p, scales + 3) if field(p, scales + 4) == 1 else 0


@driver
def rows_of_scale(p: int, tensor: int, row: int, count: int) -> int:
    """How many of `count` rows of Q, K or V from `row` on share a scale."""
    block = field(p, scales_of(tensor) + 4)
    return min(count, block - row % block) if block != 0 else count


@driver
def stride_run(p: int, row: int, end: int) -> int:
    """How many rows of K or V in [row, end) have one stride: up to the end of a page."""
    page_size = field(p, f.PAGE_SIZE)
    return min(end - row, page_size - row % page_size) if page_size != 0 else end - row


@driver
def run_length(p: int, tensor: int, row: int, end: int) -> int:
    """How many rows of K or V in [row, end) have one stride and one scale: up to the end of a page or block."""
    return rows_of_scale(p, tensor, row, stride_run(p, row, end))


@driver
def pack_tile(
    p: int, tensor: int, dim: int, width: int, batch: int, kv_head: int, begin: int, end: int, target: int
) -> int:
    """Address of rows [begin, end) of K or V as fp32 rows of `width`, zero beyond dim, with zero rows up to a whole key
    step: in the tensor itself if it has that layout, else in `target`, into which they are packed.
    """
    fits = field(p, f.KV_DTYPE) == FP32 and dim == width and field(p, tensor + 3) == 4 * width
    if fits and (end - begin) % sz.KEY_STEP == 0 and run_length(p, tensor, begin, end) == end - begin:
        return kv_address(p, tensor, batch, kv_head, begin)
    row = begin
    while row < end:
        count = run_length(p, tensor, row, end)
        source, place = kv_address(p, tensor, batch, kv_head, row), target + 4 * (row - begin) * width
        factor = code_factor(p, tensor, batch, kv_head, row)
        pack_rows(source, field(p, tensor + 3), count, field(p, f.KV_DTYPE), dim, place, 4 * width, width, factor)
        row += count
    for pad in range(end - begin, (end - begin + sz.KEY_STEP - 1) // sz.KEY_STEP * sz.KEY_STEP):
        for d in range(width):
            store_f32(target + 4 * (pad * width + d), 0.0)
    return target


@driver
def pack_values_tile(p: int, tensor: int, batch: int, kv_head: int, begin: int, end: int, target: int) -> None:
    """Rows [begin, end) of V or its tangent in columns of value_step (see pack_values), zero rows up to a whole key
    step.
    """
    width = field(p, f.DIM_V_PADDED)
    column_bytes = 4 * sz.BLOCK_N * sz.VALUE_STEP
    row = begin
    while row < end:
        count = run_length(p, tensor, row, end)
        source = kv_address(p, tensor, batch, kv_head, row)
        place, dim = target + 4 * (row - begin) * sz.VALUE_STEP, field(p, f.HEAD_DIM_V)
        factor = code_factor(p, tensor, batch, kv_head, row)
        pack_values(source, field(p, tensor + 3), count, field(p, f.KV_DTYPE), dim, place, column_bytes, width, factor)
        row += count
    padded = (end - begin + sz.KEY_STEP - 1) // sz.KEY_STEP * sz.KEY_STEP
    for column in range(width // sz.VALUE_STEP):
        fill(
            target + column * column_bytes + 4 * (end - begin) * sz.VALUE_STEP,
            (padded - end + begin) * sz.VALUE_STEP,
            0.0,
        )


@driver
def describe_row(p: int, table: int, lane: int, batch: int, head: int, row: int, offset: int) -> None:
    """The part of a row table that only score features read."""
    slopes = field(p, f.ALIBI)
    slope = 0.0
    if slopes != 0:
        slope = load_f32(slopes + batch * field(p, f.ALIBI_BATCH) + head * field(p, f.ALIBI_HEAD))
    store_i32(table + f.ROW_POSITION * sz.FIELD_BYTES + 4 * lane, row + offset)
    store_f32(table + f.ROW_SLOPE * sz.FIELD_BYTES + 4 * lane, slope)
    store_i32(table + f.ROW_INDEX * sz.FIELD_BYTES + 4 * lane, row + field(p, f.ORIGIN_ROW))
    store_i32(table + f.ROW_HEAD * sz.FIELD_BYTES + 4 * lane, head + field(p, f.ORIGIN_HEAD))
    bias = field(p, f.BIAS) + batch * field(p, f.BIAS_BATCH) + head * field(p, f.BIAS_HEAD) + row * field(p, f.BIAS_ROW)
    mask = field(p, f.MASK) + batch * field(p, f.MASK_BATCH) + head * field(p, f.MASK_HEAD) + row * field(p, f.MASK_ROW)
    store_i64(table + f.ROW_BIAS * sz.FIELD_BYTES + 8 * lane, bias)
    store_i64(table + f.ROW_MASK * sz.FIELD_BYTES + 8 * lane, mask)


@driver
def drop_panel(p: int, s: int, size: int, first_key: int, table: int, batch: int, vectors: int) -> None:
    """Dropout on a panel, counted from the origin of the whole problem, whose first key is a multiple of 4."""
    low, high = field(p, f.SEED_LOW), field(p, f.SEED_HIGH)
    threshold, keep = field(p, f.DROPOUT_THRESHOLD), scalar_bits(field(p, f.KEEP_SCALE))
    key, sequence = first_key + field(p, f.ORIGIN_KEY), batch + field(p, f.ORIGIN_BATCH)
    drop(s, size, key, table, sequence, low, high, threshold, keep, vectors)


@driver
def prepare_rows(p: int, ws: int, batch: int, head: int, first_row: int, count: int, k_begin: int, k_end: int) -> None:
    """Fill the row tables and panel bounds of `count` rows, which continue from head to head."""
    q_len = q_length(p, batch)
    offset = k_length(p, batch) - q_len
    left, right = field(p, f.WINDOW_LEFT), field(p, f.WINDOW_RIGHT)
    tables = (field(p, f.FEATURES) & f.NEEDS_ROW_TABLE) != 0
    row = first_row
    for panel in range((count + sz.PANEL - 1) // sz.PANEL):
        table = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES
        bounds = bounds_of(p, ws, panel)
        min_first, max_first, min_last, max_last = f.UNBOUNDED, -f.UNBOUNDED, f.UNBOUNDED, -f.UNBOUNDED
        for lane in range(sz.PANEL):
            if panel * sz.PANEL + lane >= count:
                store_i32(table + f.ROW_LAST * sz.FIELD_BYTES + 4 * lane, NO_KEY)
                store_i32(table + f.ROW_FIRST * sz.FIELD_BYTES + 4 * lane, 0)
                continue
            if row == q_len:
                row = 0
                head += 1
            first = max(k_begin, row + offset - left)
            last = min(k_end - 1, row + offset + right)
            min_first, max_first = min(min_first, first), max(max_first, first)
            min_last, max_last = min(min_last, last), max(max_last, last)
            store_i32(table + f.ROW_LAST * sz.FIELD_BYTES + 4 * lane, max(last, NO_KEY))
            store_i32(table + f.ROW_FIRST * sz.FIELD_BYTES + 4 * lane, min(first, PAST_KEYS))
            if tables:
                describe_row(p, table, lane, batch, head, row, offset)
            row += 1
        store_i64(bounds + f.MIN_FIRST, min_first)
        store_i64(bounds + f.MAX_FIRST, max_first)
        store_i64(bounds + f.MIN_LAST, min_last)
        store_i64(bounds + f.MAX_LAST, max_last)


@driver
def gather_panel(
    p: int, ws: int, size: int, valid: int, first_key: int, rows: int, behind: int, count: int, stride: int, dtype: int
) -> int:
    """A panel of bias, mask or what lies `behind` bytes behind it, for `count` rows at the addresses in `rows`, read
    row by row and transposed. `valid` keys exist; the rest up to `size` is undefined.
    """
    stage = ws + field(p, f.WS_STAGE)
    for lane in range(count):
        source = load_i64(rows + 8 * lane) + behind + first_key * stride
        gather_row(source, stride, valid, dtype, stage + 4 * sz.BLOCK_N * lane)
    extra = ws + field(p, f.WS_EXTRA)
    transpose_panel(stage, 4 * sz.BLOCK_N, (size + sz.LANES - 1) // sz.LANES * sz.LANES, extra, 1.0)
    return extra


@driver
def score_keys(rows: int, width: int, dim: int, panel: int, s: int, top: int) -> None:
    """s[score_keys][panel] = rows[score_keys][dim] . panel[dim][panel]; rows are `width` apart. `top` becomes the
    maximum of itself and s, unless `dim` is over `WHOLE_SUM`.
    """
    part = dim if dim <= WHOLE_SUM else PART
    scores(rows, 4 * width, part, panel, s, top)
    add_columns(rows, width, part, dim, panel, s)


@driver
def add_columns(rows: int, width: int, first: int, dim: int, panel: int, s: int) -> None:
    """Add the products of columns [first, dim) to s, in parts."""
    for column in range(first, dim, PART):
        add_scores(rows + 4 * column, 4 * width, min(PART, dim - column), panel + 4 * column * sz.PANEL, s)


@driver
def change_scores(
    p: int, ws: int, s: int, num_keys: int, valid: int, first_key: int, table: int, num_rows: int, cap_slope: int
) -> None:
    """Softcap, ALiBi, bias, mask and the band, in the contract's order, on a panel of keys from `first_key` on."""
    features = field(p, f.FEATURES)
    vectors = (num_rows + sz.LANES - 1) // sz.LANES
    if features & f.HAS_SOFTCAP:
        apply_softcap(s, num_keys, vectors, scalar_bits(field(p, f.SOFTCAP)), cap_slope)
    if features & f.HAS_ALIBI:
        add_alibi(s, num_keys, first_key, table, vectors)
    if features & f.HAS_BIAS:
        rows = table + f.ROW_BIAS * sz.FIELD_BYTES
        stride, dtype = field(p, f.BIAS_KEY), field(p, f.BIAS_DTYPE)
        extra = gather_panel(p, ws, num_keys, valid, first_key, rows, 0, num_rows, stride, dtype)
        add_panel(s, num_keys, extra, vectors)
    if features & f.HAS_MASK:
        rows = table + f.ROW_MASK * sz.FIELD_BYTES
        extra = gather_panel(p, ws, num_keys, valid, first_key, rows, 0, num_rows, field(p, f.MASK_KEY), BOOL)
        add_panel(s, num_keys, extra, vectors)
    mask_band(s, num_keys, first_key, table, vectors)


@driver
def tile_kind(p: int, batch: int, head: int, row: int, key: int) -> int:
    """What a tile mask says of the tile that holds this row and key. Past the map, lengths hide every key.

    A tile whose number names no bits is empty: somebody may have written into the map.
    """
    if key >= field(p, f.TILES_KEYS):
        return FULL
    place = batch * field(p, f.TILES_BATCH) + head * field(p, f.TILES_HEAD) + row // TILE * field(p, f.TILES_ROW)
    kind = load_i32(field(p, f.TILES) + place + 4 * (key // TILE))
    if kind < FULL:
        return EMPTY
    if kind >= field(p, f.NUM_TILE_BITS):
        return EMPTY
    return kind


@driver
def is_listed(p: int, batch: int, head: int, first_row: int, end_row: int, begin: int, end: int) -> int:
    """Whether any of these rows may see any of the keys [begin, end) by the tile mask."""
    if field(p, f.TILES) == 0:
        return 1
    for row in range(first_row // TILE * TILE, end_row, TILE):
        for key in range(begin // TILE * TILE, end, TILE):
            if tile_kind(p, batch, head, row, key) != EMPTY:
                return 1
    return 0


@driver
def words_of(p: int, kind: int, row: int, key: int) -> int:
    """Address of the word that holds a key's bits for the panel that starts at `row`."""
    return field(p, f.TILE_BITS) + kind * TILE_BYTES + row % TILE // WORD * WORD_BYTES + 4 * (key % TILE)


@driver
def is_seen(p: int, kind: int, row: int, key: int) -> int:
    """Whether any query of the panel that starts at `row` sees the key, in a tile with bits."""
    return (load_i32(words_of(p, kind, row, key)) >> (row % WORD)) & PANEL_BITS


@driver
def first_seen(p: int, batch: int, head: int, row: int, begin: int, end: int) -> int:
    """The first key in [begin, end) that the tile mask shows to the panel at `row`; `end` if there is none."""
    if field(p, f.TILES) == 0:
        return begin
    while begin < end:
        kind = tile_kind(p, batch, head, row, begin)
        if kind == FULL:
            return begin
        stop = min(end, (begin // TILE + 1) * TILE)
        if kind != EMPTY:
            while begin < stop:
                if is_seen(p, kind, row, begin):
                    return begin
                begin += 1
        begin = stop
    return end


@driver
def end_seen(p: int, batch: int, head: int, row: int, begin: int, end: int) -> int:
    """Behind the last key in [begin, end) that the tile mask shows to the panel; `begin` if there is none."""
    if field(p, f.TILES) == 0:
        return end
    while begin < end:
        kind = tile_kind(p, batch, head, row, end - 1)
        if kind == FULL:
            return end
        start = max(begin, (end - 1) // TILE * TILE)
        if kind != EMPTY:
            while start < end:
                if is_seen(p, kind, row, end - 1):
                    return end
                end -= 1
        end = start
    return begin


@driver
def bounds_of(p: int, ws: int, panel: int) -> int:
    """Address of a panel's bounds (see params.py)."""
    return ws + field(p, f.WS_PANELS) + panel * f.PANEL_BYTES


@driver
def clip_panel(
    p: int, ws: int, batch: int, head: int, first_row: int, panel: int, k0: int, size: int, step: int
) -> int:
    """Whether a panel of the block at `first_row` sees any of the `size` keys at k0. Those it sees, in whole steps and
    counted from k0, are left in TILE_BEGIN and TILE_END.
    """
    bounds, row = bounds_of(p, ws, panel), first_row + panel * sz.PANEL
    low = max(0, load_i64(bounds + f.MIN_FIRST) - k0)
    high = min(size, load_i64(bounds + f.MAX_LAST) + 1 - k0)
    low = first_seen(p, batch, head, row, k0 + low, k0 + high) - k0
    high = end_seen(p, batch, head, row, k0 + low, k0 + high) - k0
    begin, end = 0, 0
    if low < high:
        begin, end = low // step * step, (high + step - 1) // step * step
    store_i64(bounds + f.TILE_BEGIN, begin)
    store_i64(bounds + f.TILE_END, end)
    return begin < end


@driver
def is_cut(p: int, batch: int, head: int, row: int, first_key: int, size: int) -> int:
    """Whether the tile mask hides any pair of the row's panel and these keys."""
    if field(p, f.TILES) == 0:
        return 0
    for key in range(first_key // TILE * TILE, first_key + size, TILE):
        if tile_kind(p, batch, head, row, key) != FULL:
            return 1
    return 0


@driver
def mask_tiles(p: int, s: int, batch: int, head: int, row: int, first_key: int, size: int, vectors: int) -> None:
    """S = -inf where the tile mask hides a pair; a panel of rows from `row` on, which lie in one tile."""
    key = first_key
    while key < first_key + size:
        end = min((key // TILE + 1) * TILE, first_key + size)
        kind, place = tile_kind(p, batch, head, row, key), s + 4 * (key - first_key) * sz.PANEL
        if kind == EMPTY:
            fill(place, (end - key) * sz.PANEL, MINUS_INF)
        elif kind != FULL:
            mask_bits(place, end - key, words_of(p, kind, row, key), row % WORD, vectors)
        key = end
