"""Copies between tensors and packed buffers: rows of any dtype to padded fp32 rows, row blocks to transposes, and back.

Packing absorbs strides, pages, dtypes and odd head dims, so that the micro-kernels see one layout.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import BF16, E4M3, F32, FP16, FP32, INT8, ITEM_BYTES, Emitter, Value, void


def by_dtype(e: Emitter, dtype: Value, dtypes: tuple[int, ...], body: Callable[[int], None]) -> None:
    """Emit `body` for each element code and branch to the right one at run time."""
    done = e.b.append_basic_block("dtype_done")
    blocks = [e.b.append_basic_block(f"dtype_{code}") for code in dtypes]
    switch = e.b.switch(dtype, blocks[0])
    for code, block in zip(dtypes[1:], blocks[1:], strict=True):
        switch.add_case(e.i64(code), block)
    for code, block in zip(dtypes, blocks, strict=True):
        e.b.position_at_end(block)
        body(code)
        e.b.branch(done)
    e.b.position_at_end(done)


# Dtypes that rows are read from.
SOURCES = (FP32, BF16, FP16, E4M3, INT8)
# Vectors moved per loop iteration.
MOVED_AT_ONCE = 4


def elements(e: Emitter, count: Value, body: Callable[[Value, int], None]) -> None:
    """`body(index, lanes)` over `count` elements: several vectors at a time, single ones, then elements."""
    b, several = e.b, MOVED_AT_ONCE * e.lanes

    def round_of(i: Value) -> None:
        for n in range(MOVED_AT_ONCE):
            body(b.add(i, e.i64(n * e.lanes)), e.lanes)

    many, whole = b.and_(count, e.i64(-several)), b.and_(count, e.i64(-e.lanes))
    e.positive(many, several, round_of)
    e.positive(b.sub(whole, many), e.lanes, lambda i: body(b.add(many, i), e.lanes))
    e.positive(b.sub(count, whole), 1, lambda i: body(b.add(whole, i), 1))


def _each_row(
    e: Emitter, source: Value, stride: Value, num_rows: Value, dtype: Value, body: Callable[[Value, Value, int], None]
) -> None:
    """`body(row, its address, element code)` over rows of a dtype known at run time."""

    def of_dtype(code: int) -> None:
        e.positive(num_rows, 1, lambda n: body(n, e.b.add(source, e.b.mul(n, stride)), code))

    by_dtype(e, dtype, SOURCES, of_dtype)


@kernel("iiiiiiiif")
def pack_rows(
    e: Emitter,
    source: Value,
    source_stride: Value,
    num_rows: Value,
    dtype: Value,
    dim: Value,
    target: Value,
    target_stride: Value,
    padded: Value,
    factor: Value,
) -> None:
    """target[num_rows][padded] = source[num_rows][dim] as fp32, zero beyond dim; `factor` as in load_as_f32."""
    b, zero = e.b, ir.Constant(F32, 0.0)

    def row(n: Value, read: Value, code: int) -> None:
        write = b.add(target, b.mul(n, target_stride))

        def element(i: Value, lanes: int) -> None:
            value = e.load_as_f32(b.add(read, b.mul(i, e.i64(ITEM_BYTES[code]))), code, lanes, factor)
            e.store(e.at(write, i), value)

        elements(e, dim, element)
        e.positive(b.sub(padded, dim), 1, lambda i: e.store(e.at(e.at(write, dim), i), zero))

    _each_row(e, source, source_stride, num_rows, dtype, row)


@kernel("iiiiiiiif")
def pack_values(
    e: Emitter,
    source: Value,
    source_stride: Value,
    num_rows: Value,
    dtype: Value,
    dim: Value,
    target: Value,
    column_bytes: Value,
    padded: Value,
    factor: Value,
) -> None:
    """As `pack_rows`, in columns for the value kernel: target[column][row][value_step]."""
    b, width = e.b, e.isa.value_step

    def row(n: Value, read: Value, code: int) -> None:
        write = b.add(target, b.mul(n, e.i64(4 * width)))

        def place(i: Value) -> Value:
            column = b.udiv(i, e.i64(width))
            return b.add(write, b.add(b.mul(column, column_bytes), b.mul(b.urem(i, e.i64(width)), e.i64(4))))

        def element(i: Value, lanes: int) -> None:
            e.store(place(i), e.load_as_f32(b.add(read, b.mul(i, e.i64(ITEM_BYTES[code]))), code, lanes, factor))

        def whole_column(i: Value, to: Value) -> list[Value]:
            for j in range(e.isa.value_vectors):
                at = b.mul(b.add(i, e.i64(j * e.lanes)), e.i64(ITEM_BYTES[code]))
                e.store(e.at(to, j * e.lanes), e.load_as_f32(b.add(read, at), code, factor=factor))
            return [b.add(to, column_bytes)]

        columns = b.mul(b.udiv(dim, e.i64(width)), e.i64(width))
        e.when(b.icmp_signed(">", columns, e.i64(0)), lambda: void(e.loop(columns, width, [write], whole_column)))
        elements(e, b.sub(dim, columns), lambda i, lanes: element(b.add(columns, i), lanes))
        zero = ir.Constant(F32, 0.0)
        e.positive(b.sub(padded, dim), 1, lambda i: e.store(place(b.add(dim, i)), zero))

    _each_row(e, source, source_stride, num_rows, dtype, row)


@kernel("iiiif")
def transpose_panel(
    e: Emitter, source: Value, source_stride: Value, padded: Value, target: Value, scale: Value
) -> None:
    """target[padded][panel] = scale * source[panel][padded]^T, padded a multiple of lanes; source_stride in bytes."""
    b, isa = e.b, e.isa
    factor = e.splat(scale)

    def block(d: Value) -> None:
        for j in range(isa.query_vectors):
            first = b.add(e.at(source, d), b.mul(source_stride, e.i64(j * isa.lanes)))
            columns = e.transpose([e.load(row) for row in e.rows(first, source_stride, isa.lanes)])
            out = b.add(target, b.mul(d, e.i64(4 * isa.panel)))
            for n, column in enumerate(columns):
                e.store(e.at(out, n * isa.panel + j * isa.lanes), b.fmul(column, factor))

    e.loop(padded, isa.lanes, (), block)


@kernel("iiii")
def untranspose_panel(e: Emitter, source: Value, num_keys: Value, target: Value, target_stride: Value) -> None:
    """target[panel][num_keys] = source[num_keys][panel]^T, num_keys rounded up to lanes; target_stride in bytes."""
    b, isa = e.b, e.isa

    def block(n: Value) -> None:
        for j in range(isa.query_vectors):
            first = e.at(b.add(source, b.mul(n, e.i64(4 * isa.panel))), j * isa.lanes)
            rows = e.transpose([e.load(e.at(first, u * isa.panel)) for u in range(isa.lanes)])
            out = b.add(e.at(target, n), b.mul(target_stride, e.i64(j * isa.lanes)))
            for place, row in zip(e.rows(out, target_stride, isa.lanes), rows, strict=True):
                e.store(place, row)

    e.loop(num_keys, isa.lanes, (), block)


@kernel("iiii")
def add_row(e: Emitter, target: Value, target_stride: Value, source: Value, count: Value) -> None:
    """target[count] += source[count], 4 bytes apart. With a stride of 0 all are added to the one target."""
    b = e.b

    def adjacent() -> None:
        def element(i: Value, lanes: int) -> None:
            kind, place = ir.VectorType(F32, lanes), e.at(target, i)
            e.store(place, b.fadd(e.load(place, kind), e.load(e.at(source, i), kind)))

        elements(e, count, element)

    def single() -> None:
        total = e.loop(count, 1, [e.load(target, F32)], lambda i, acc: [b.fadd(acc, e.load(e.at(source, i), F32))])[0]
        e.store(target, total)

    is_single = b.icmp_signed("==", target_stride, e.i64(0))
    e.when(is_single, single)
    e.when(b.not_(is_single), adjacent)


@kernel("iiiif")
def store_row(e: Emitter, source: Value, dim: Value, target: Value, dtype: Value, factor: Value) -> None:
    """target[dim] = factor * source[dim], rounded to the target's dtype."""

    def convert(code: int) -> None:
        def element(i: Value, lanes: int) -> None:
            value = e.load(e.at(source, i), ir.VectorType(F32, lanes))
            scaled = e.b.fmul(value, e.splat(factor, lanes))
            e.store_from_f32(e.b.add(target, e.b.mul(i, e.i64(ITEM_BYTES[code]))), scaled, code)

        elements(e, dim, element)

    by_dtype(e, dtype, (FP32, BF16, FP16), convert)


@kernel("iiiiff")
def mix_sums(e: Emitter, out: Value, sums: Value, dim: Value, dtype: Value, keep: Value, share: Value) -> None:
    """out[dim] = keep * out + share * sums[dim], which are fp32. A side with weight 0 is ignored, even NaN."""
    b = e.b

    def weighted(values: Value, weight: Value, lanes: int) -> Value:
        weights = e.splat(weight, lanes)
        none = b.fcmp_ordered("==", weights, e.f32s(0.0, lanes))
        return b.fmul(b.select(none, e.f32s(0.0, lanes), values), weights)

    def convert(code: int) -> None:
        def mix(i: Value, lanes: int) -> None:
            place = b.add(out, b.mul(i, e.i64(ITEM_BYTES[code])))
            kept = weighted(e.load_as_f32(place, code, lanes), keep, lanes)
            other = e.load_as_f32(b.add(sums, b.mul(i, e.i64(4))), FP32, lanes)
            e.store_from_f32(place, b.fadd(kept, weighted(other, share, lanes)), code)

        elements(e, dim, mix)

    by_dtype(e, dtype, (FP32, BF16, FP16), convert)


@kernel("iif")
def fill(e: Emitter, target: Value, count: Value, value: Value) -> None:
    """target[count] = value; count is a multiple of lanes."""
    e.positive(count, e.lanes, lambda i: e.store(e.at(target, i), e.splat(value)))


@kernel("iif")
def scale_rows(e: Emitter, target: Value, count: Value, factor: Value) -> None:
    """target[count] *= factor; count is a multiple of lanes."""
    e.positive(count, e.lanes, lambda i: e.store(e.at(target, i), e.b.fmul(e.load(e.at(target, i)), e.splat(factor))))


@kernel("iiiiff")
def add_compensated(
    e: Emitter, total: Value, carry: Value, source: Value, count: Value, keep: Value, share: Value
) -> None:
    """total[count] = keep * total + share * source[count], where carry[count] is the rounding error so far (Kahan
    summation); count is a multiple of lanes.
    """
    b = e.b

    def step(i: Value) -> None:
        old, lost = (b.fmul(e.load(e.at(place, i)), e.splat(keep)) for place in (total, carry))
        added = e.fma(e.load(e.at(source, i)), e.splat(share), b.fneg(lost))
        new = b.fadd(old, added)
        # inf - inf would be NaN.
        finite = b.fcmp_ordered("<", e.call("fabs", new), e.f32s(float("inf")))
        e.store(e.at(total, i), new)
        e.store(e.at(carry, i), b.select(finite, b.fsub(b.fsub(new, old), added), e.f32s(0.0)))

    e.positive(count, e.lanes, step)


@kernel("iii", "f")
def row_dots(e: Emitter, x: Value, y: Value, count: Value) -> Value:
    """sum(x[count] * y[count]) of fp32 rows, summed in fp64 and rounded once; count is a multiple of lanes."""
    b, doubles = e.b, ir.VectorType(ir.DoubleType(), e.lanes)

    def step(i: Value, acc: Value) -> list[Value]:
        return [b.fadd(acc, b.fmul(*(b.fpext(e.load(e.at(row, i)), doubles) for row in (x, y))))]

    (total,) = e.loop(count, e.lanes, [ir.Constant(doubles, [0.0] * e.lanes)], step)
    width = e.lanes
    while width > 1:
        width //= 2
        upper = ir.Constant(e.int_vector, [(i + width) % e.lanes for i in range(e.lanes)])
        total = b.fadd(total, b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), upper))
    return b.fptrunc(b.extract_element(total, ir.Constant(ir.IntType(32), 0)), ir.FloatType())


@kernel("iii")
def copy_rows(e: Emitter, source: Value, target: Value, count: Value) -> None:
    """target[count] = source[count]; count is a multiple of lanes."""
    e.positive(count, e.lanes, lambda i: e.store(e.at(target, i), e.load(e.at(source, i))))
