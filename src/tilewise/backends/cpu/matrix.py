"""Kernels for a matrix unit (AMX): products of bf16 tiles with fp32 sums, and the layouts it reads.

Tiles are 16 rows of 64 bytes. A product C[16][16] += A[16][32] B[32][16] reads A by rows and B by pairs: row i of the
tile holds elements 2i and 2i + 1 of every column next to each other. Scores stay transposed, so A is K by rows and B is
Q in pairs; for the values A is V^T and B is P^T in pairs, and the running result is transposed too.
"""

from __future__ import annotations

from llvmlite import ir

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import I8, I16, I32, Emitter, Value, void
from tilewise.backends.cpu.isa import MatrixUnit
from tilewise.backends.cpu.microkernels import Statistics, emit_softmax

# Tile registers: four sums, two tiles of A, two of B. A block of 32 x 32 results needs one load per product.
SUMS, LEFT, RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
HALF_BYTES = 2


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


def unit_of(e: Emitter) -> MatrixUnit:
    """The matrix unit of the emitter's instruction set."""
    assert e.isa.matrix is not None
    return e.isa.matrix


def _instruct(e: Emitter, name: str, *operands: Value) -> None:
    """Emit a tile instruction."""
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    e.b.call(e.declared(f"llvm.x86.{name}", kind), operands)


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)


def _pointer(e: Emitter, address: Value) -> Value:
    return e.b.inttoptr(address, I8.as_pointer())


def _multiply_block(e: Emitter, left: Value, left_stride: Value, right: Value, right_stride: Value) -> None:
    """Sums[2][2] += left[2 tiles] . right[2 tiles]."""
    unit = unit_of(e)
    below = e.b.mul(left_stride, e.i64(unit.rows))
    for i in range(2):
        rows, columns = e.b.add(left, e.b.mul(below, e.i64(i))), e.b.add(right, e.i64(i * unit.row_bytes))
        _instruct(e, "tileloadd64", _tile(LEFT[i]), _pointer(e, rows), left_stride)
        _instruct(e, "tileloadd64", _tile(RIGHT[i]), _pointer(e, columns), right_stride)
    for i in range(2):
        for j in range(2):
            _instruct(e, "tdpbf16ps", _tile(SUMS[i][j]), _tile(LEFT[i]), _tile(RIGHT[j]))


def _store_block(e: Emitter, target: Value) -> None:
    """target[2 tiles of rows][panel] = sums."""
    unit, stride = unit_of(e), 4 * e.isa.panel
    for i in range(2):
        for j in range(2):
            place = e.b.add(target, e.i64(i * unit.rows * stride + j * unit.row_bytes))
            _instruct(e, "tilestored64", _tile(SUMS[i][j]), _pointer(e, place), e.i64(stride))


@kernel("ii")
def start_tiles(e: Emitter, config: Value, saved: Value) -> None:
    """Make all tiles 16 rows of 64 bytes. The thread's previous configuration (torch's kernels have theirs) goes to
    `saved`.

    Both are 64 bytes: palette, start row, 14 unused, then bytes per row (16 bits each) and rows (8 bits) of 16 tiles.
    """
    unit = unit_of(e)
    _instruct(e, "sttilecfg", _pointer(e, saved))
    tiles = range(len(SUMS[0]) * 2 + len(LEFT) + len(RIGHT))
    content = bytearray(64)
    content[0] = 1
    for tile in tiles:
        content[16 + 2 * tile], content[48 + tile] = unit.row_bytes, unit.rows
    for at in range(0, 64, 8):
        e.store(e.b.add(config, e.i64(at)), e.i64(int.from_bytes(content[at : at + 8], "little")), align=8)
    _instruct(e, "ldtilecfg", _pointer(e, config))


@kernel("i")
def stop_tiles(e: Emitter, saved: Value) -> None:
    """Restore the thread's previous tile configuration; in most cases none."""
    _instruct(e, "ldtilecfg", _pointer(e, saved))


def _multiply(e: Emitter, left: Value, left_stride: Value, inner: Value, right: Value, target: Value) -> None:
    """target[32][panel] = left[32][inner] . right[inner in pairs][panel]; inner is a multiple of 32."""
    b, pair_bytes = e.b, e.i64(4 * e.isa.panel)
    for tile in (*SUMS[0], *SUMS[1]):
        _instruct(e, "tilezero", _tile(tile))

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
    halves, shorts = ir.VectorType(BFloatType(), 2 * lanes), ir.VectorType(I16, 2 * lanes)
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
