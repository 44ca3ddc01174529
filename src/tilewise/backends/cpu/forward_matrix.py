"""Forward pass of bf16 on a matrix unit (AMX): the tile loop of forward.py with both products on tiles of 16 x 16.

The rows of an item, their panels, the clipping of keys, the softmax and all features are the same. Scores and row sums
are fp32; P is rounded to bf16 for the product with V, as V is. The running result is transposed, [dim][query], until
the item is finished.

Tiles are 16 rows of 64 bytes. A product C[16][16] += A[16][32] B[32][16] reads A by rows and B by pairs: row i of the
tile holds elements 2i and 2i + 1 of every column next to each other. Scores stay transposed, so A is K by rows and B is
Q in pairs; for the values A is V^T and B is P^T in pairs.
"""

from __future__ import annotations

from llvmlite import ir

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver, kernel
from tilewise.backends.cpu.emit import BFLOAT, I8, I16, I32, Emitter, Value, void
from tilewise.backends.cpu.features import mask_band
from tilewise.backends.cpu.forward import acc_state
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_i64, scalar_bits
from tilewise.backends.cpu.isa import AMX, MatrixUnit
from tilewise.backends.cpu.merging import (
    FOLD_KEYS,
    MINUS_INF,
    begin_rows,
    begin_totals,
    finish_rows,
    fold_rows,
    merge_chunks,
)
from tilewise.backends.cpu.microkernels import Statistics, emit_softmax, row_max, softmax
from tilewise.backends.cpu.packing import fill, scale_rows, untranspose_panel
from tilewise.backends.cpu.scoring import (
    bounds_of,
    change_scores,
    clip_panel,
    drop_panel,
    is_cut,
    is_listed,
    k_length,
    kv_address,
    mask_tiles,
    prepare_rows,
    q_length,
    q_start,
    rows_of_item,
    run_length,
)
from tilewise.backends.cpu.stopping import answer_signals, has_stopped, is_due, leave

# Tile registers: four sums, two tiles of A, two of B. A block of 32 x 32 results needs one load per product.
SUMS, LEFT, RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
HALF_BYTES = 2


def unit_of(e: Emitter) -> MatrixUnit:
    """The matrix unit of the emitter's instruction set."""
    assert e.isa.matrix is not None
    return e.isa.matrix


def instruct(e: Emitter, name: str, *operands: Value) -> None:
    """Emit a tile instruction."""
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    e.b.call(e.declared(f"llvm.x86.{name}", kind), operands)


def tile(number: int) -> Value:
    """A tile register."""
    return ir.Constant(I8, number)


def pointer(e: Emitter, address: Value) -> Value:
    """An address as tile instructions take it."""
    return e.b.inttoptr(address, I8.as_pointer())


def _multiply_block(e: Emitter, left: Value, left_stride: Value, right: Value, right_stride: Value) -> None:
    """Sums[2][2] += left[2 tiles] . right[2 tiles]."""
    unit = unit_of(e)
    below = e.b.mul(left_stride, e.i64(unit.rows))
    for i in range(2):
        rows, columns = e.b.add(left, e.b.mul(below, e.i64(i))), e.b.add(right, e.i64(i * unit.row_bytes))
        instruct(e, "tileloadd64", tile(LEFT[i]), pointer(e, rows), left_stride)
        instruct(e, "tileloadd64", tile(RIGHT[i]), pointer(e, columns), right_stride)
    for i in range(2):
        for j in range(2):
            instruct(e, "tdpbf16ps", tile(SUMS[i][j]), tile(LEFT[i]), tile(RIGHT[j]))


def _store_block(e: Emitter, target: Value) -> None:
    """target[2 tiles of rows][panel] = sums."""
    unit, stride = unit_of(e), 4 * e.isa.panel
    for i in range(2):
        for j in range(2):
            place = e.b.add(target, e.i64(i * unit.rows * stride + j * unit.row_bytes))
            instruct(e, "tilestored64", tile(SUMS[i][j]), pointer(e, place), e.i64(stride))


@kernel("ii")
def start_tiles(e: Emitter, config: Value, saved: Value) -> None:
    """Make all tiles 16 rows of 64 bytes. The thread's previous configuration (torch's kernels have theirs) goes to
    `saved`.

    Both are 64 bytes: palette, start row, 14 unused, then bytes per row (16 bits each) and rows (8 bits) of 16 tiles.
    """
    unit = unit_of(e)
    instruct(e, "sttilecfg", pointer(e, saved))
    tiles = range(len(SUMS[0]) * 2 + len(LEFT) + len(RIGHT))
    content = bytearray(64)
    content[0] = 1
    for number in tiles:
        content[16 + 2 * number], content[48 + number] = unit.row_bytes, unit.rows
    for at in range(0, 64, 8):
        e.store(e.b.add(config, e.i64(at)), e.i64(int.from_bytes(content[at : at + 8], "little")), align=8)
    instruct(e, "ldtilecfg", pointer(e, config))


@kernel("i")
def stop_tiles(e: Emitter, saved: Value) -> None:
    """Restore the thread's previous tile configuration; in most cases none."""
    instruct(e, "ldtilecfg", pointer(e, saved))


def _multiply(e: Emitter, left: Value, left_stride: Value, inner: Value, right: Value, target: Value) -> None:
    """target[32][panel] = left[32][inner] . right[inner in pairs][panel]; inner is a multiple of 32."""
    b, pair_bytes = e.b, e.i64(4 * e.isa.panel)
    for number in (*SUMS[0], *SUMS[1]):
        instruct(e, "tilezero", tile(number))

    def step(n: Value) -> None:
        pairs = b.add(right, b.mul(b.lshr(n, e.i64(1)), pair_bytes))
        _multiply_block(e, b.add(left, b.mul(n, e.i64(HALF_BYTES))), left_stride, pairs, pair_bytes)

    e.loop(inner, unit_of(e).depth, (), step)
    _store_block(e, target)


@kernel("iiiii")
def matrix_scores(e: Emitter, k: Value, k_stride: Value, head_dim: Value, q: Value, s: Value) -> None:
    """s[32 keys][panel] = k[32][head_dim] . q[head_dim in pairs][panel]; head_dim is a multiple of 32."""
    _multiply(e, k, k_stride, head_dim, q, s)


@kernel("iiiii")
def matrix_values(e: Emitter, v: Value, v_stride: Value, weights: Value, num_keys: Value, product: Value) -> None:
    """product[32 dims][panel] = v[32 dims][num_keys] . weights[num_keys in pairs][panel]; num_keys % 32 is 0."""
    _multiply(e, v, v_stride, num_keys, weights, product)


@kernel("iiii")
def add_product(e: Emitter, acc: Value, product: Value, alpha: Value, dim: Value) -> None:
    """acc[dim][panel] = alpha[panel] * acc + product; dim is a multiple of 4.

    A separate pass after all blocks, because reading back what a tile has just stored stalls.
    """
    b, isa = e.b, e.isa
    factors = e.load_vectors(alpha, isa.query_vectors)

    def step(row: Value) -> None:
        at = b.mul(row, e.i64(4 * isa.panel))
        for u in range(4):
            for j, factor in enumerate(factors):
                place, extra = (e.at(b.add(base, at), u * isa.panel + j * isa.lanes) for base in (acc, product))
                e.store(place, e.fma(e.load(place), factor, e.load(extra)))

    e.loop(dim, 4, (), step)


def _store_pairs(e: Emitter, even: Value, odd: Value, target: Value) -> None:
    """Two vectors rounded to bf16 and interleaved lane by lane."""
    b, lanes = e.b, e.lanes
    halves, shorts = ir.VectorType(BFLOAT, 2 * lanes), ir.VectorType(I16, 2 * lanes)
    convert = e.declared(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}", ir.FunctionType(halves, [e.vector] * 2))
    interleave = ir.Constant(ir.VectorType(I32, 2 * lanes), [n for i in range(lanes) for n in (i, lanes + i)])
    # The instruction puts its second operand first.
    both = b.bitcast(b.call(convert, [odd, even]), shorts)
    e.store(target, b.shuffle_vector(both, ir.Constant(shorts, ir.Undefined), interleave))


@kernel("iii")
def pack_weights(e: Emitter, p: Value, num_keys: Value, weights: Value) -> None:
    """weights[num_keys in pairs][panel] = p[num_keys][panel], rounded to bf16; num_keys is even."""
    b, isa, stride = e.b, e.isa, e.i64(4 * e.isa.panel)

    def step(n: Value) -> None:
        row, out = b.add(p, b.mul(n, stride)), b.add(weights, b.mul(b.lshr(n, e.i64(1)), stride))
        for j in range(isa.query_vectors):
            even, odd = (e.load(e.at(row, u * isa.panel + j * isa.lanes)) for u in range(2))
            _store_pairs(e, even, odd, e.at(out, j * isa.lanes))

    e.loop(num_keys, 2, (), step)


@kernel("iiiiiiifi")
def softmax_to_weights(
    e: Emitter,
    s: Value,
    num_keys: Value,
    row_max: Value,
    row_sum: Value,
    tile_max: Value,
    alpha: Value,
    vectors: Value,
    to_log2: Value,
    weights: Value,
) -> None:
    """`softmax` and `pack_weights` in one, without storing P in fp32."""
    b = e.b

    def keep(at: Value, n: Value, powers: list[Value]) -> None:
        base = b.add(b.add(weights, at), b.mul(b.lshr(n, e.i64(1)), e.i64(4 * e.isa.panel)))
        for u in range(0, len(powers), 2):
            _store_pairs(e, powers[u], powers[u + 1], e.at(base, u // 2 * e.isa.panel))

    emit_softmax(e, s, num_keys, Statistics(row_max, row_sum, tile_max, alpha), vectors, to_log2, keep)


@kernel("iiiiiii")
def pack_halves(
    e: Emitter,
    source: Value,
    source_stride: Value,
    num_rows: Value,
    dim: Value,
    target: Value,
    target_stride: Value,
    padded: Value,
) -> None:
    """target[num_rows][padded] = 16-bit source[num_rows][dim] as it is, zero beyond dim; strides in bytes."""
    b, width = e.b, 2 * e.lanes
    vector = ir.VectorType(I16, width)
    whole = b.and_(dim, e.i64(-width))

    def row(n: Value) -> None:
        read, write = b.add(source, b.mul(n, source_stride)), b.add(target, b.mul(n, target_stride))

        def move(i: Value, kind: ir.Type) -> None:
            at = b.mul(i, e.i64(HALF_BYTES))
            e.store(b.add(write, at), e.load(b.add(read, at), kind, align=2), align=2)

        def clear(i: Value) -> None:
            e.store(b.add(write, b.mul(b.add(dim, i), e.i64(HALF_BYTES))), ir.Constant(I16, 0), align=2)

        e.positive(whole, width, lambda i: move(i, vector))
        e.positive(b.sub(dim, whole), 1, lambda i: move(b.add(whole, i), I16))
        e.positive(b.sub(padded, dim), 1, clear)

    e.positive(num_rows, 1, row)


@kernel("iiii")
def transpose_queries(e: Emitter, source: Value, source_stride: Value, padded: Value, target: Value) -> None:
    """target[padded / 2][panel] = pairs of source[panel][padded]; padded is a multiple of 32, the stride in bytes."""
    b, isa = e.b, e.isa

    def block(pair: Value) -> None:
        for j in range(isa.query_vectors):
            first = b.add(e.at(source, pair), b.mul(source_stride, e.i64(j * isa.lanes)))
            columns = e.transpose([e.load(row, e.int_vector) for row in e.rows(first, source_stride, isa.lanes)])
            out = b.add(target, b.mul(pair, e.i64(4 * isa.panel)))
            for n, column in enumerate(columns):
                e.store(e.at(out, n * isa.panel + j * isa.lanes), column)

    e.loop(b.lshr(padded, e.i64(1)), isa.lanes, (), block)


@kernel("iiiiii")
def transpose_values(
    e: Emitter, source: Value, source_stride: Value, num_keys: Value, dim: Value, target: Value, target_stride: Value
) -> None:
    """target[dim][num_keys] = source[num_keys][dim]^T; num_keys is a multiple of 32, dim of 16, strides in bytes."""
    b, lanes = e.b, e.lanes
    halves = ir.VectorType(I16, lanes)

    def block(key: Value, d: Value) -> None:
        first = b.add(b.add(source, b.mul(key, source_stride)), b.mul(d, e.i64(HALF_BYTES)))
        rows = [b.zext(e.load(row, halves, align=2), e.int_vector) for row in e.rows(first, source_stride, 2 * lanes)]
        pairs = [b.or_(even, b.shl(odd, e.i32s(16))) for even, odd in zip(rows[::2], rows[1::2], strict=True)]
        out = b.add(b.add(target, b.mul(d, target_stride)), b.mul(key, e.i64(HALF_BYTES)))
        for place, column in zip(e.rows(out, target_stride, lanes), e.transpose(pairs), strict=True):
            e.store(place, column)

    e.loop(num_keys, 2 * lanes, (), lambda key: void(e.loop(dim, lanes, (), lambda d: block(key, d))))


KEYS, STEP = AMX.keys, AMX.depth
VALUE_BYTES = 2 * KEYS


@driver
def pack_queries(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Rows of q into panels of pairs. They are not scaled, because they must stay bf16."""
    width, q_len, stage = field(p, f.DIM_PADDED), q_length(p, batch), ws + field(p, f.WS_STAGE)
    base = field(p, f.Q) + batch * field(p, f.Q_BATCH) + q_start(p, batch) * field(p, f.Q_ROW)
    row = first_row
    for panel in range((count + sz.PANEL - 1) // sz.PANEL):
        lane = 0
        rows = min(sz.PANEL, count - panel * sz.PANEL)
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
        fill(stage + 2 * rows * width, (sz.PANEL - rows) * width // 2, 0.0)
        transpose_queries(stage, 2 * width, width, ws + field(p, f.WS_Q) + 2 * panel * sz.PANEL * width)


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
def panel_scores(
    p: int, ws: int, batch: int, head: int, row: int, panel: int, num_rows: int, first_key: int, size: int, k: int
) -> None:
    """Scores of a panel, whose first row is `row`, with `size` keys from `first_key` on, all features applied, and
    their maxima.
    """
    s, tile_max = ws + field(p, f.WS_SCORES), ws + field(p, f.WS_MAX)
    width, vectors = field(p, f.DIM_PADDED), (num_rows + sz.LANES - 1) // sz.LANES
    table, bounds = ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, bounds_of(p, ws, panel)
    q = ws + field(p, f.WS_Q) + 2 * panel * sz.PANEL * width
    for j in range(0, size, STEP):
        matrix_scores(k + 2 * j * width, 2 * width, width, q, s + 4 * j * sz.PANEL)
    if scalar_bits(field(p, f.Q_SCALE)) != 1.0:
        scale_rows(s, size * sz.PANEL, scalar_bits(field(p, f.Q_SCALE)))
    if (field(p, f.FEATURES) & f.CHANGES_SCORES) != 0:
        valid = min(size, load_i64(bounds + f.MAX_LAST) + 1 - first_key)
        for j in range(0, size, sz.BLOCK_N):
            part, place = min(sz.BLOCK_N, size - j), s + 4 * j * sz.PANEL
            change_scores(p, ws, place, part, min(part, valid - j), first_key + j, table, num_rows, 0)
    else:
        # Keys in [inner, outer) are seen by every row.
        inner = min(size, max(0, load_i64(bounds + f.MAX_FIRST) - first_key))
        outer = max(inner, min(size, load_i64(bounds + f.MIN_LAST) + 1 - first_key))
        if inner > 0:
            mask_band(s, inner, first_key, table, vectors)
        if outer < size:
            mask_band(s + 4 * outer * sz.PANEL, size - outer, first_key + outer, table, vectors)
    if is_cut(p, batch, head, row, first_key, size):
        mask_tiles(p, s, batch, head, row, first_key, size, vectors)
    fill(tile_max, sz.PANEL, MINUS_INF)
    row_max(s, size, tile_max, vectors)


@driver
def panel_step(p: int, ws: int, batch: int, head: int, first_row: int, count: int, panel: int, k0: int, k: int) -> None:
    """One panel against the keys it sees of the tile k at k0: scores, softmax, and values into the accumulator."""
    row, num_rows = first_row + panel * sz.PANEL, min(sz.PANEL, count - panel * sz.PANEL)
    begin, end = load_i64(bounds_of(p, ws, panel) + f.TILE_BEGIN), load_i64(bounds_of(p, ws, panel) + f.TILE_END)
    s, size, first_key = ws + field(p, f.WS_SCORES), end - begin, k0 + begin
    tile_max, alpha = ws + field(p, f.WS_MAX), ws + field(p, f.WS_ALPHA)
    width_v, vectors = field(p, f.DIM_V_PADDED), (num_rows + sz.LANES - 1) // sz.LANES
    panel_scores(p, ws, batch, head, row, panel, num_rows, first_key, size, k + 2 * begin * field(p, f.DIM_PADDED))
    running, weights = acc_state(p, ws) + 4 * panel * sz.PANEL, ws + field(p, f.WS_WEIGHTS)
    row_sum, to_log2 = running + 4 * field(p, f.BLOCK_M), scalar_bits(field(p, f.TO_LOG2))
    if field(p, f.FEATURES) & f.HAS_DROPOUT:
        softmax(s, size, running, row_sum, tile_max, alpha, vectors, to_log2)
        drop_panel(p, s, size, first_key, ws + field(p, f.WS_ROWS) + panel * sz.TABLE_BYTES, batch, vectors)
        pack_weights(s, size, weights)
    else:
        softmax_to_weights(s, size, running, row_sum, tile_max, alpha, vectors, to_log2, weights)
    v, product = ws + field(p, f.WS_V) + 2 * begin, ws + field(p, f.WS_PRODUCT)
    for d in range(0, width_v, STEP):
        matrix_values(v + d * VALUE_BYTES, VALUE_BYTES, weights, size, product + 4 * d * sz.PANEL)
    add_product(ws + field(p, f.WS_ACC_T) + 4 * panel * sz.PANEL * width_v, product, alpha, width_v)


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
    for row in range(0, padded, sz.PANEL):
        untranspose_panel(acc + 4 * row * width_v, width_v, block + 4 * row * width_v, 4 * width_v)


@driver
def tile_loop(p: int, ws: int, batch: int, head: int, first_row: int, count: int) -> None:
    """Stream the keys that any row of the block sees, tile by tile, panel by panel."""
    kv_head = head // field(p, f.GROUP_SIZE)
    width, width_v, v = field(p, f.DIM_PADDED), field(p, f.DIM_V_PADDED), ws + field(p, f.WS_V)
    panels, first, last = (count + sz.PANEL - 1) // sz.PANEL, f.UNBOUNDED, -1
    for panel in range(panels):
        first = min(first, load_i64(bounds_of(p, ws, panel) + f.MIN_FIRST))
        last = max(last, load_i64(bounds_of(p, ws, panel) + f.MAX_LAST))
    k0 = max(0, first) // KEYS * KEYS
    while k0 <= last:
        if stops_with_tiles(p, ws):
            break
        if field(p, f.WS_TOTAL) != 0 and k0 % FOLD_KEYS == 0:
            rows_of_sums(p, ws, panels * sz.PANEL)
            fold_rows(p, ws, count)
            begin_rows(p, ws + field(p, f.WS_ACC), ws + field(p, f.WS_ACC_T), panels * sz.PANEL)
        size = min(KEYS, last + 1 - k0)
        if is_listed(p, batch, head, first_row, first_row + count, k0, k0 + size) == 0:
            k0 += KEYS
            continue
        end_key = k0 + size
        k = rows_tile(p, f.K, field(p, f.HEAD_DIM), width, batch, kv_head, k0, end_key, ws + field(p, f.WS_K))
        rows_v = rows_tile(
            p, f.V, field(p, f.HEAD_DIM_V), width_v, batch, kv_head, k0, end_key, ws + field(p, f.WS_V_ROWS)
        )
        transpose_values(rows_v, 2 * width_v, (size + STEP - 1) // STEP * STEP, width_v, v, VALUE_BYTES)
        for panel in range(panels):
            if clip_panel(p, ws, batch, head, first_row, panel, k0, size, STEP):
                panel_step(p, ws, batch, head, first_row, count, panel, k0, k)
        k0 += KEYS


@driver
def matrix_item(p: int, ws: int, item: int) -> None:
    """One work item: the rows of a schedule entry for one head (or the heads of a group), against one chunk of keys."""
    unit = item % field(p, f.UNITS)
    place = field(p, f.SCHEDULE) + item // field(p, f.UNITS) * f.ENTRY_BYTES
    batch, first_row = load_i64(place), load_i64(place + 8)
    chunk, num_chunks = load_i64(place + 16), load_i64(place + 24)
    count = rows_of_item(p, batch, first_row)
    # The rows of a unit continue from head to head.
    head = unit * field(p, f.HEADS_PER_UNIT) + first_row // q_length(p, batch)
    first_row = first_row % q_length(p, batch)
    k_len, k_begin = k_length(p, batch), chunk * field(p, f.CHUNK)
    k_end = k_len if chunk == num_chunks - 1 else min(k_len, k_begin + field(p, f.CHUNK))
    prepare_rows(p, ws, batch, head, first_row, count, k_begin, k_end)
    pack_queries(p, ws, batch, head, first_row, count)
    padded = (count + sz.PANEL - 1) // sz.PANEL * sz.PANEL
    block = ws + field(p, f.WS_ACC)
    begin_rows(p, block, ws + field(p, f.WS_ACC_T), padded)
    begin_totals(p, ws, padded)
    tile_loop(p, ws, batch, head, first_row, count)
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
