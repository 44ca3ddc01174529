"""Decode: few query rows against many keys. One work item is (sequence, K/V heads, chunk of keys).

Vectors run along the head dim, and K and V are read once, directly from the tensors. Decoding is bound by memory, so
loads must be in flight at all times: while scores are computed from K, the same rows of V are prefetched, and while V
is weighted, the next rows of K are.

All rows of a GQA group share each load of K and V. An item takes several K/V heads, whose rows share the lanes of one
softmax. Where heads are adjacent within a row (pages, layout "bshd"), a few rows at a time are read in address order: a
single head would touch another page of memory with every row.

Chunks have a fixed number of keys, and the last chunk to finish merges them in order, so the result does not depend on
the number of threads. Pages and dense rows differ only in where a run of keys ends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from llvmlite import ir

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver, kernel
from tilewise.backends.cpu.decode_matrix import (
    HEIGHTS,
    ONE,
    PAIR,
    REST,
    REST_BITS,
    restore_tiles,
    save_tiles,
    set_tiles,
    tile_scores,
)
from tilewise.backends.cpu.emit import BF16, E4M3, E4M3_UNIT, F32, FP32, I32, INT8, ITEM_BYTES, Emitter, Value, void
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_i32, load_i64, scalar_bits, store_i32
from tilewise.backends.cpu.merging import MINUS_INF, finish_rows, merge_chunks
from tilewise.backends.cpu.microkernels import row_max, softmax
from tilewise.backends.cpu.packing import SOURCES, by_dtype, fill, pack_rows, scale_rows
from tilewise.backends.cpu.scoring import (
    change_scores,
    code_factor,
    drop_panel,
    k_length,
    kv_address,
    prepare_rows,
    q_length,
    q_start,
    rows_of_item,
    run_length,
    scale_address,
    scale_step,
    scaled_by,
    stride_run,
)
from tilewise.backends.cpu.stopping import POLL_KEYS, leave, stops, stops_at

# Rows that share a loaded vector of K or V, and keys whose loads are in flight together: 16 accumulators, or 8.
ROWS, KEYS, KEYS_FOR_ONE = 4, 4, 8
# Vectors of V per row that are accumulated in registers.
STRIP_FOR_ROWS, STRIP_FOR_ONE = 4, 8
CACHE_LINE = 64
# Maximum vectors of a row of K per loop iteration, and how many of each key are in registers at once.
MOST_VECTORS, TOGETHER = 4, 2


def _in_groups(e: Emitter, count: Value, sizes: Sequence[int], body: Callable[[Value, int], None]) -> None:
    """`body(index, group)` over whole groups of the first size, then of the next, then one by one."""
    b, done = e.b, e.i64(0)
    for size in (*sizes, 1):
        whole = b.mul(b.udiv(b.sub(count, done), e.i64(size)), e.i64(size))
        e.positive(whole, size, functools.partial(lambda done, size, i: body(b.add(done, i), size), done, size))
        done = b.add(done, whole)


def _sums_of_lanes(e: Emitter, vectors: list[Value]) -> Value:
    """A vector that starts with the sum of each vector's lanes. Their number is a power of two, at most `lanes`.

    Lanes i and i + width / 2 are added until one is left, which is the same order for any number of vectors. Two
    half-used vectors are merged into one, so 16 vectors take 15 steps instead of 64.
    """
    b, width = e.b, e.lanes
    current = vectors
    while width > 1:
        half = width // 2
        # The first half of each block of `width` lanes of the first vector, then of the second.
        low = [start + i for start in range(0, 2 * e.lanes, width) for i in range(half)]
        pairs = zip(current[::2], current[1::2] or current, strict=True)
        picks = [ir.Constant(e.int_vector, [lane + shift for lane in low]) for shift in (0, half)]
        current = [b.fadd(*(b.shuffle_vector(x, y, pick) for pick in picks)) for x, y in pairs]
        width = half
    return current[0]


def _shared_scale(e: Emitter, code: int, scale: Value) -> Value | None:
    """The factor of e4m3 numbers, which share a scale: applied as they are loaded, it gives the bits of dequantised
    rows. None for other dtypes.
    """
    return e.b.fmul(e.load(scale, F32), ir.Constant(F32, E4M3_UNIT)) if code == E4M3 else None


def _own_scale(e: Emitter, code: int, scale: Value, lanes: int | None = None) -> Value | None:
    """A vector of the scale of one row of int8, which is applied to sums and weights. None for other dtypes."""
    return e.splat(e.load(scale, F32), lanes) if code == INT8 else None


def _splits(e: Emitter, code: int, vectors: int) -> bool:
    """Whether sums of these vectors of V are kept by even and odd columns, until `order_columns`."""
    return code == BF16 and e.isa.splits_pairs and vectors > 1


def _store_sums(e: Emitter, sums: list[Value], out: Value, first_key: int, rows: int, scales: list[Value]) -> None:
    """Stores the lane sums of [keys][rows] vectors as the scores of these keys and rows, times the keys' scales."""
    total = _sums_of_lanes(e, sums)
    for n in range(len(sums) // rows):
        pick = ir.Constant(ir.VectorType(I32, rows), [n * rows + r for r in range(rows)])
        part = e.b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), pick)
        if scales[first_key + n] is not None:
            part = e.b.fmul(part, scales[first_key + n])
        e.store(e.at(out, (first_key + n) * e.isa.panel), part)


@kernel("iiiiiiiiiiiii")
def stream_scores(
    e: Emitter,
    k: Value,
    k_stride: Value,
    num_keys: Value,
    dim: Value,
    dtype: Value,
    q: Value,
    q_stride: Value,
    num_rows: Value,
    s: Value,
    ahead: Value,
    ahead_stride: Value,
    scale: Value,
    scale_stride: Value,
) -> None:
    """s[num_keys][num_rows of panel] = k[num_keys][dim] . q[num_rows][dim]; dim is a multiple of lanes, rows at `ahead`
    are prefetched. `scale` is the address of the scale of e4m3 keys, or of those of int8, `scale_stride` bytes apart.
    """
    b = e.b

    def block(code: int, row: Value, rows: int, key: Value, keys: int) -> None:
        item = ITEM_BYTES[code]
        k_rows = e.rows(b.add(k, b.mul(key, k_stride)), k_stride, keys)
        q_rows = e.rows(b.add(q, b.mul(row, q_stride)), q_stride, rows)
        ahead_rows = e.rows(b.add(ahead, b.mul(key, ahead_stride)), ahead_stride, keys)
        factor = _shared_scale(e, code, scale)

        def step(vectors: int, first: Value, *acc: Value) -> list[Value]:
            sums = list(acc)
            offset = b.mul(first, e.i64(item))
            for place in ahead_rows:
                e.prefetch(b.add(place, offset))
            for u in range(0, vectors, TOGETHER):
                at, count = e.i64(u * e.lanes * item), min(TOGETHER, vectors - u)
                loaded = [e.load_many_as_f32(b.add(b.add(row, offset), at), code, count, factor) for row in k_rows]
                for w, (r, place) in itertools.product(range(count), enumerate(q_rows)):
                    query = e.load(e.at(e.at(place, first), (u + w) * e.lanes))
                    for n in range(keys):
                        sums[n * rows + r] = e.fma(query, loaded[n][w], sums[n * rows + r])
            return sums

        # One cache line of K at a time, so that none is prefetched twice; then the rest.
        most = min(MOST_VECTORS, max(1, CACHE_LINE // (e.lanes * item)))
        whole = b.and_(dim, e.i64(-most * e.lanes))
        sums = e.positive(whole, most * e.lanes, functools.partial(step, most), [e.f32s(0.0)] * (rows * keys))
        rest = b.sub(dim, whole)
        if most > 1:
            sums = e.positive(rest, e.lanes, lambda d, *acc: step(1, b.add(whole, d), *acc), sums)
        out = e.at(b.add(s, b.mul(key, e.i64(4 * e.isa.panel))), row)
        scale_places = e.rows(b.add(scale, b.mul(key, scale_stride)), scale_stride, keys)
        scales = [_own_scale(e, code, place, rows) for place in scale_places]
        for first in range(0, keys * rows, e.lanes):
            _store_sums(e, sums[first : first + e.lanes], out, first // rows, rows, scales)

    def convert(code: int) -> None:
        def over_keys(row: Value, rows: int) -> None:
            group = KEYS if rows > 1 else KEYS_FOR_ONE
            _in_groups(e, num_keys, (group,), lambda key, keys: block(code, row, rows, key, keys))

        _in_groups(e, num_rows, (ROWS,), over_keys)

    by_dtype(e, dtype, SOURCES, convert)


@kernel("iiiiiiiiiiiiii")
def stream_values(
    e: Emitter,
    v: Value,
    v_stride: Value,
    num_keys: Value,
    dim: Value,
    dtype: Value,
    p: Value,
    num_rows: Value,
    acc: Value,
    acc_stride: Value,
    alpha: Value,
    ahead: Value,
    ahead_stride: Value,
    scale: Value,
    scale_stride: Value,
) -> None:
    """acc[num_rows][dim] = alpha * acc + p[num_keys][rows of panel]^T v[num_keys][dim]; dim % lanes is 0. Scales are
    those of stream_scores. Columns of acc may be in the order that order_columns undoes.
    """
    b = e.b

    def block(code: int, row: Value, rows: int, strip: Value, vectors: int) -> None:
        item = ITEM_BYTES[code]
        first = b.mul(strip, e.i64(e.lanes))
        offset = b.mul(first, e.i64(item))
        acc_rows = e.rows(e.at(b.add(acc, b.mul(row, acc_stride)), first), acc_stride, rows)
        factor = _shared_scale(e, code, scale)
        start = []
        for r, place in enumerate(acc_rows):
            decay = e.broadcast(e.at(e.at(alpha, row), r))
            start += [b.fmul(old, decay) for old in e.load_vectors(place, vectors)]

        def step(n: Value, *sums: Value) -> list[Value]:
            current = list(sums)
            v_row = b.add(b.add(v, b.mul(n, v_stride)), offset)
            ahead_row = b.add(b.add(ahead, b.mul(n, ahead_stride)), offset)
            for line in range(0, vectors * e.lanes * item, CACHE_LINE):
                e.prefetch(b.add(ahead_row, e.i64(line)))
            if _splits(e, code, vectors):
                lines = range(0, vectors * e.lanes * item, 2 * e.lanes * item)
                values = [half for line in lines for half in e.load_split(b.add(v_row, e.i64(line)))]
            else:
                values = e.load_many_as_f32(v_row, code, vectors, factor)
            own = _own_scale(e, code, b.add(scale, b.mul(n, scale_stride)))
            weights = e.at(b.add(p, b.mul(n, e.i64(4 * e.isa.panel))), row)
            for r in range(rows):
                weight = e.broadcast(e.at(weights, r))
                weight = weight if own is None else b.fmul(weight, own)
                for j in range(vectors):
                    current[r * vectors + j] = e.fma(values[j], weight, current[r * vectors + j])
            return current

        sums = e.loop(num_keys, 1, start, step)
        for r, place in enumerate(acc_rows):
            e.store_vectors(place, sums[r * vectors : (r + 1) * vectors])

    def convert(code: int) -> None:
        def over_strips(row: Value, rows: int) -> None:
            widths = (STRIP_FOR_ONE, STRIP_FOR_ROWS) if rows == 1 else (STRIP_FOR_ROWS,)
            strips = b.udiv(dim, e.i64(e.lanes))
            _in_groups(e, strips, widths, lambda strip, vectors: block(code, row, rows, strip, vectors))

        _in_groups(e, num_rows, (ROWS,), over_strips)

    by_dtype(e, dtype, SOURCES, convert)


@kernel("iiii")
def order_columns(e: Emitter, acc: Value, acc_stride: Value, num_rows: Value, dim: Value) -> None:
    """Puts the columns of acc[num_rows][dim] in order, of which stream_values kept even and odd ones apart."""
    b, size = e.b, STRIP_FOR_ROWS * e.lanes
    whole = b.and_(dim, e.i64(-size))

    def strip(row: Value, column: Value) -> None:
        place = e.at(b.add(acc, b.mul(row, acc_stride)), column)
        parts = e.load_vectors(place, STRIP_FOR_ROWS)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        e.store_vectors(place, [part for even, odd in pairs for part in e.join_split(even, odd)])

    e.positive(num_rows, 1, lambda row: void(e.positive(whole, size, lambda column: strip(row, column))))


# Keys of one head that are read before the next head's, where heads are adjacent in a row: keeps reads in address
# order.
ROWS_AT_ONCE = 32


@driver
def in_tiles(p: int) -> int:
    """Whether a matrix unit makes the scores. Then q stays bf16 and is not scaled, but scores are."""
    return sz.TILE_DEPTH != 0 and field(p, f.KV_DTYPE) == BF16 and field(p, f.HEAD_DIM) % max(1, sz.TILE_DEPTH) == 0


@driver
def gather_queries(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """The rows as scaled fp32 rows; for tiles, not scaled, as pairs of all rows of a K/V head. The last row of a head
    is followed by the next head's first.
    """
    width, q_len = field(p, f.DIM_LANES), q_length(p, batch)
    base = field(p, f.Q) + batch * field(p, f.Q_BATCH) + q_start(p, batch) * field(p, f.Q_ROW)
    rows, pairs, lane = q_len * field(p, f.GROUP_SIZE), ws + field(p, f.WS_Q), 0
    row = first_row
    for r in range(count):
        if row == q_len:
            row = 0
            head += 1
        source = base + head * field(p, f.Q_HEAD) + row * field(p, f.Q_ROW)
        place = ws + field(p, f.WS_Q) + 4 * r * width
        factor = code_factor(p, f.Q, batch, head, row)
        if in_tiles(p):
            for d in range(width // 2):
                store_i32(pairs + 4 * (d * rows + lane), load_i32(source + 4 * d))
            lane += 1
            if lane == rows:
                lane = 0
                pairs += 2 * width * rows
        else:
            pack_rows(source, 0, 1, field(p, f.Q_DTYPE), field(p, f.HEAD_DIM), place, 0, width, factor)
        row += 1
    if not in_tiles(p):
        scale_rows(ws + field(p, f.WS_Q), count * width, scalar_bits(field(p, f.Q_SCALE)))


@driver
def part_length(p: int, tensor: int, row: int, end: int) -> int:
    """Keys to read from one head before the next: a run, or a few of its rows if heads are adjacent in a row. Rows of a
    run share a scale, those of int8 have one each.
    """
    run = stride_run(p, row, end) if field(p, f.KV_DTYPE) == INT8 else run_length(p, tensor, row, end)
    return min(run, ROWS_AT_ONCE) if field(p, f.K_HEAD) < field(p, f.K_ROW) else run


@driver
def pack_run(p: int, tensor: int, source: int, size: int, dim: int, target: int, width: int, scale: int) -> None:
    """A run of keys as fp32 rows, whose scales are at an address."""
    dtype, stride, step = field(p, f.KV_DTYPE), field(p, tensor + 3), scale_step(p, tensor)
    at_once = size if step == 0 else 1
    for n in range(0, size, at_once):
        factor, place = scaled_by(p, scale + n * step), target + 4 * n * width
        pack_rows(source + n * stride, stride, at_once, dtype, dim, place, 4 * width, width, factor)


@driver
def rest_of(config: int) -> int:
    """The keys that the tiles of the rest of a run hold."""
    return (load_i64(config + HEIGHTS) >> REST_BITS) % 256


@driver
def score_run(p: int, ws: int, k: int, v: int, size: int, first: int, count: int, s: int, scale: int) -> None:
    """Scores of a run of keys of one head with rows [first, first + count). Odd head dims go through a packed copy,
    because vectors may not read past a row.
    """
    width, k_row, v_row, dtype = field(p, f.DIM_LANES), field(p, f.K_ROW), field(p, f.V_ROW), field(p, f.KV_DTYPE)
    q = ws + field(p, f.WS_Q) + 4 * first * width
    if field(p, f.HEAD_DIM) != width:
        packed = ws + field(p, f.WS_K)
        pack_run(p, f.K, k, size, field(p, f.HEAD_DIM), packed, width, scale)
        stream_scores(packed, 4 * width, size, width, FP32, q, 4 * width, count, s, v, v_row, 0, 0)
    else:
        step = scale_step(p, f.K)
        stream_scores(k, k_row, size, width, dtype, q, 4 * width, count, s, v, v_row, scale, step)


@driver
def score_in_tiles(p: int, ws: int, k: int, v: int, size: int, num_rows: int, count: int, s: int) -> None:
    """Scores of a run of keys of all heads. Two heads or two tiles of keys at a time."""
    width, k_row, v_row, tall = field(p, f.DIM_LANES), field(p, f.K_ROW), field(p, f.V_ROW), sz.TILE_ROWS
    config, q, whole = ws + field(p, f.WS_TILES), ws + field(p, f.WS_Q), size // tall * tall
    rest, heads, first = size - whole, num_rows // count, 0
    if rest != 0 and rest != rest_of(config):
        set_tiles(config, count, rest)
    while first < heads:
        by_head = first + 1 < heads
        k_next, q_next, s_next = field(p, f.K_HEAD), 2 * count * width, 4 * count
        v_next = field(p, f.V_HEAD)
        if by_head == 0:
            k_next, q_next, s_next, v_next = tall * k_row, 0, 4 * tall * sz.PANEL, tall * v_row
        key = 0
        while key < whole:
            kind = PAIR if by_head or key + tall < whole else ONE
            k_at, v_at, s_at = k + key * k_row, v + key * v_row, s + 4 * key * sz.PANEL
            tile_scores(kind, tall, k_at, k_row, k_next, width, q, 4 * count, q_next, s_at, s_next, v_at, v_row, v_next)
            key += 2 * tall if by_head == 0 else tall
        for other in range(1 + by_head):
            if rest != 0:
                k_at, v_at = k + whole * k_row + other * k_next, v + whole * v_row + other * v_next
                s_at = s + 4 * whole * sz.PANEL + other * s_next
                tile_scores(
                    REST, rest, k_at, k_row, 0, width, q + other * q_next, 4 * count, 0, s_at, 0, v_at, v_row, 0
                )
        k += (1 + by_head) * field(p, f.K_HEAD)
        v += (1 + by_head) * field(p, f.V_HEAD)
        q += (1 + by_head) * 2 * count * width
        s += (1 + by_head) * 4 * count
        first += 1 + by_head


@driver
def score_tile(p: int, ws: int, batch: int, kv_head: int, num_rows: int, count: int, k0: int, end: int) -> None:
    """Scores of keys [k0, end), `count` rows per K/V head. The rows of V that are needed next are prefetched."""
    row = k0
    while row < end:
        size = part_length(p, f.K, row, end)
        k, v = kv_address(p, f.K, batch, kv_head, row), kv_address(p, f.V, batch, kv_head, row)
        s = ws + field(p, f.WS_SCORES) + 4 * sz.PANEL * (row - k0)
        if in_tiles(p):
            score_in_tiles(p, ws, k, v, size, num_rows, count, s)
            row += size
            continue
        for first in range(0, num_rows, count):
            scale = scale_address(p, f.K, batch, kv_head + first // count, row)
            score_run(p, ws, k, v, size, first, count, s + 4 * first, scale)
            k += field(p, f.K_HEAD)
            v += field(p, f.V_HEAD)
        row += size
    if in_tiles(p) and scalar_bits(field(p, f.Q_SCALE)) != 1.0:
        scale_rows(ws + field(p, f.WS_SCORES), (end - k0) * sz.PANEL, scalar_bits(field(p, f.Q_SCALE)))


@driver
def weigh_run(p: int, ws: int, v: int, ahead: int, size: int, first: int, count: int, s: int, scale: int) -> None:
    """Values of a run of keys of one head into rows [first, first + count). Rows at `ahead` are prefetched."""
    width, v_row, dtype = field(p, f.DIM_V_LANES), field(p, f.V_ROW), field(p, f.KV_DTYPE)
    acc_row, k_row, alpha = 4 * field(p, f.DIM_V_PADDED), field(p, f.K_ROW), ws + field(p, f.WS_ALPHA) + 4 * first
    acc = ws + field(p, f.WS_ACC) + first * acc_row
    if field(p, f.HEAD_DIM_V) != width:
        packed = ws + field(p, f.WS_V)
        pack_run(p, f.V, v, size, field(p, f.HEAD_DIM_V), packed, width, scale)
        stream_values(packed, 4 * width, size, width, FP32, s, count, acc, acc_row, alpha, ahead, k_row, 0, 0)
    else:
        step = scale_step(p, f.V)
        stream_values(v, v_row, size, width, dtype, s, count, acc, acc_row, alpha, ahead, k_row, scale, step)


@driver
def entry_of(p: int, item: int) -> int:
    """Address of an item's schedule entry."""
    return field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.ENTRY_BYTES


@driver
def key_ahead(p: int, batch: int, kv_head: int, row: int, last: int, following: int) -> int:
    """Address of the key that is scored one tile after `row`, in this item or in `following` (-1: unknown)."""
    other = batch if following < 0 else load_i64(entry_of(p, following))
    length = k_length(p, other)
    if row + sz.BLOCK_N <= last or following < 0 or length == 0:
        return kv_address(p, f.K, batch, kv_head, min(row + sz.BLOCK_N, last))
    first = load_i64(entry_of(p, following) + 16) * field(p, f.CHUNK) + row % sz.BLOCK_N
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
        s = ws + field(p, f.WS_SCORES) + 4 * sz.PANEL * (row - k0)
        for first in range(0, num_rows, count):
            scale = scale_address(p, f.V, batch, kv_head + first // count, row)
            weigh_run(p, ws, v, ahead, size, first, count, s + 4 * first, scale)
            v += field(p, f.V_HEAD)
            ahead += field(p, f.K_HEAD)
        # The first run has already rescaled the running results.
        fill(ws + field(p, f.WS_ALPHA), sz.PANEL, 1.0)
        row += size


@driver
def softmax_tile(p: int, ws: int, batch: int, count: int, k0: int, size: int) -> None:
    """Turns the scores of all rows with keys [k0, k0 + size) into weights."""
    s, state = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_ACC) + 4 * field(p, f.BLOCK_M) * field(p, f.DIM_V_PADDED)
    tile_max, alpha = ws + field(p, f.WS_MAX), ws + field(p, f.WS_ALPHA)
    table, bounds = ws + field(p, f.WS_ROWS), ws + field(p, f.WS_PANELS)
    vectors, padded = (count + sz.LANES - 1) // sz.LANES, (size + 3) // 4 * 4
    fill(s + 4 * sz.PANEL * size, sz.PANEL * (padded - size), MINUS_INF)
    edge = k0 < load_i64(bounds + f.MAX_FIRST) or k0 + size - 1 > load_i64(bounds + f.MIN_LAST)
    if edge or (field(p, f.FEATURES) & f.CHANGES_SCORES) != 0:
        change_scores(p, ws, s, padded, size, k0, table, count, 0)
    fill(tile_max, vectors * sz.LANES, MINUS_INF)
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
    batch, first_row = load_i64(place), load_i64(place + 8)
    chunk, num_chunks = load_i64(place + 16), load_i64(place + 24)
    count = rows_of_item(p, batch, first_row)
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
    k0 = max(0, load_i64(ws + field(p, f.WS_PANELS) + f.MIN_FIRST)) // sz.BLOCK_N * sz.BLOCK_N
    start = k0
    while k0 <= last:
        if stops_at(p, k0):
            break
        # A signal handler may have used the tiles.
        if in_tiles(p) and (k0 == start or k0 % POLL_KEYS == 0):
            set_tiles(ws + field(p, f.WS_TILES), rows, 1)
        size = min(sz.BLOCK_N, last + 1 - k0)
        score_tile(p, ws, batch, kv_head, count, rows, k0, k0 + size)
        softmax_tile(p, ws, batch, count, k0, size)
        weigh_tile(p, ws, batch, kv_head, count, rows, k0, k0 + size, last, following)
        k0 += sz.BLOCK_N
    width = field(p, f.DIM_V_LANES)
    if sz.SPLITS_PAIRS != 0 and field(p, f.KV_DTYPE) == BF16 and field(p, f.HEAD_DIM_V) == width:
        order_columns(acc, 4 * field(p, f.DIM_V_PADDED), count, width)
    if num_chunks == 1:
        finish_rows(p, batch, head, first_row, count, acc)
    else:
        merge_chunks(p, ws, acc, item, batch, head, first_row, count, chunk, num_chunks)


@driver
def decode(p: int) -> None:
    """The entry point of each thread: take work items, several at a time, until none is left."""
    counters, some, num_items = p + 8 * f.BLOCK_FIELDS, field(p, f.ITEMS_AT_ONCE), field(p, f.NUM_ITEMS)
    ws = field(p, f.WORKSPACE) + atomic_add(counters, 1) * field(p, f.WORKSPACE_BYTES)
    if in_tiles(p):
        save_tiles(ws + field(p, f.WS_TILES) + 64)
    while True:
        first = atomic_add(counters + 64, some)
        if first >= num_items or stops(p):
            break
        end = min(first + some, num_items)
        for item in range(first, end):
            decode_item(p, ws, item, item + 1 if item + 1 < end else -1)
    if in_tiles(p):
        restore_tiles(ws + field(p, f.WS_TILES) + 64)
    leave(p)
