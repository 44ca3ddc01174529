"""Writes rows of K and V into pages: copies, or quantised to e4m3 or int8 (tilewise/kv/quantised.py defines the bits).

A work item is a few rows. Where a page shares a scale, the thread with the first row that goes to a page does all
heads of the page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from tilewise.backends.cpu import launch_pages as f
from tilewise.backends.cpu.compiler import driver, kernel
from tilewise.backends.cpu.emit import BF16, F32, FP16, FP32, I8, I32, I64, ITEM_BYTES, Emitter, Value
from tilewise.backends.cpu.intrinsics import atomic_add, field, load_f32, load_i64, store_f32
from tilewise.backends.cpu.packing import by_dtype

SOURCES = (FP32, BF16, FP16)
AMAX_FLOOR = 2.0**-96
E4M3_MAX, INT8_MAX = 448.0, 127.0
# 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
ROUND_TO_INTEGER = 12582912.0
LARGEST, NAN = float(np.finfo(np.float32).max), float("nan")
INFINITE, NAN_CODE, LARGEST_BITS = 0x7F800000, 0x7F, 0x43E00000
# Below 2^-6, codes count steps of 2^-9.
NORMAL_BITS = 0x3C800000


@kernel("iii")
def copy_bytes(e: Emitter, source: Value, target: Value, count: Value) -> None:
    """target[count] = source[count], bytes that do not overlap."""
    pointer, flag = I8.as_pointer(), ir.IntType(1)
    copy = e.declared("llvm.memcpy.p0.p0.i64", ir.FunctionType(ir.VoidType(), [pointer, pointer, I64, flag]))
    e.b.call(copy, [e.b.inttoptr(target, pointer), e.b.inttoptr(source, pointer), count, ir.Constant(flag, 0)])


@driver
def write_row(p: int, tensor: int, row: int, slot: int) -> None:
    """Copy one row of K (or V) into its slot: at once if its heads are adjacent on both sides, else head by head."""
    size, page_size = field(p, tensor + f.SIZE), field(p, f.PAGE_SIZE)
    source = field(p, tensor + f.SOURCE) + row * field(p, tensor + f.SOURCE_ROW)
    target = field(p, tensor + f.PAGES) + slot // page_size * field(p, tensor + f.PAGES_PAGE)
    target += slot % page_size * field(p, tensor + f.PAGES_SLOT)
    if field(p, tensor + f.SOURCE_HEAD) == size and field(p, tensor + f.PAGES_HEAD) == size:
        copy_bytes(source, target, size * field(p, f.NUM_HEADS))
    else:
        for head in range(field(p, f.NUM_HEADS)):
            place = source + head * field(p, tensor + f.SOURCE_HEAD)
            copy_bytes(place, target + head * field(p, tensor + f.PAGES_HEAD), size)


@driver
def write_rows(p: int) -> None:
    """The entry point of each thread: take items until none is left."""
    rows = field(p, f.NUM_ROWS)
    while True:
        first = atomic_add(p + 8 * f.BLOCK_FIELDS + f.NEXT_ITEM, f.ROWS_PER_ITEM)
        if first >= rows:
            break
        for row in range(first, min(rows, first + f.ROWS_PER_ITEM)):
            slot = load_i64(field(p, f.SLOTS) + 8 * row)
            if slot >= 0:
                write_row(p, f.K, row, slot)
                write_row(p, f.V, row, slot)


def _vectors(e: Emitter, count: Value, body: Callable[[Value, int], None]) -> None:
    """`body(index, lanes)` over `count` elements: whole vectors, then single elements."""
    whole = e.b.and_(count, e.i64(-e.lanes))
    e.positive(whole, e.lanes, lambda i: body(i, e.lanes))
    e.positive(e.b.sub(count, whole), 1, lambda i: body(e.b.add(whole, i), 1))


def _words(e: Emitter, value: Value) -> Value:
    return e.b.bitcast(value, ir.VectorType(I32, value.type.count))


def _codes(e: Emitter, magnitude: Value) -> Value:
    """e4m3 codes, in 32-bit lanes, of the bits of finite numbers without sign: saturated, to nearest even."""
    b, lanes = e.b, magnitude.type.count
    top = e.i32s(LARGEST_BITS, lanes)
    magnitude = b.select(b.icmp_signed("<", magnitude, top), magnitude, top)
    odd = b.and_(b.lshr(magnitude, e.i32s(20, lanes)), e.i32s(1, lanes))
    rounded = b.lshr(b.add(b.add(magnitude, e.i32s(0x7FFFF, lanes)), odd), e.i32s(20, lanes))
    normal = b.sub(rounded, e.i32s(120 << 3, lanes))
    # 2^-9 is the last bit of numbers around 2^14: adding 2^14 rounds.
    added = b.fadd(b.bitcast(magnitude, ir.VectorType(F32, lanes)), e.f32s(16384.0, lanes))
    small = b.and_(_words(e, added), e.i32s(0xF, lanes))
    return b.select(b.icmp_signed("<", magnitude, e.i32s(NORMAL_BITS, lanes)), small, normal)


def _scaled(e: Emitter, magnitude: Value, factor: Value) -> Value:
    """The bits of numbers without sign, times a scalar."""
    lanes = magnitude.type.count
    one = e.b.insert_element(ir.Constant(ir.VectorType(F32, lanes), ir.Undefined), factor, ir.Constant(I32, 0))
    factors = e.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))
    return _words(e, e.b.fmul(e.b.bitcast(magnitude, ir.VectorType(F32, lanes)), factors))


def _store_codes(e: Emitter, address: Value, codes: Value, sign: Value, nan: Value) -> None:
    lanes = codes.type.count
    signed = e.b.or_(codes, e.b.and_(sign, e.i32s(0x80, lanes)))
    kept = e.b.select(nan, e.i32s(NAN_CODE, lanes), signed)
    e.store(address, e.b.trunc(kept, ir.VectorType(I8, lanes)), align=1)


def _source_words(
    e: Emitter, source: Value, dtype: Value, dim: Value, body: Callable[[Value, Value, Value], None]
) -> None:
    """`body(index, bits, bits without sign)` of the fp32 values of `dim` elements."""

    def of_dtype(code: int) -> None:
        def part(i: Value, lanes: int) -> None:
            value = _words(e, e.load_as_f32(e.b.add(source, e.b.mul(i, e.i64(ITEM_BYTES[code]))), code, lanes))
            body(i, value, e.b.and_(value, e.i32s(0x7FFFFFFF, lanes)))

        _vectors(e, dim, part)

    by_dtype(e, dtype, SOURCES, of_dtype)


def _largest(e: Emitter, source: Value, dtype: Value, dim: Value, *, finite: bool) -> Value:
    """The largest magnitude of `dim` elements, or of the finite ones among them."""
    b, found = e.b, e.b.alloca(I32)
    b.store(ir.Constant(I32, 0), found)

    def part(_i: Value, _value: Value, size: Value) -> None:
        lanes = size.type.count
        if finite:
            size = b.select(b.icmp_signed("<", size, e.i32s(INFINITE, lanes)), size, e.i32s(0, lanes))
        # Magnitudes are ordered like their bits.
        kind = ir.FunctionType(I32, [size.type])
        top = b.call(e.declared(f"llvm.vector.reduce.smax.v{lanes}i32", kind), [size])
        before = b.load(found)
        b.store(b.select(b.icmp_signed(">", top, before), top, before), found)

    _source_words(e, source, dtype, dim, part)
    return b.bitcast(b.load(found), F32)


@kernel("iii", "f")
def row_amax(e: Emitter, source: Value, dtype: Value, dim: Value) -> Value:
    """The largest finite magnitude of `dim` elements."""
    return _largest(e, source, dtype, dim, finite=True)


@kernel("iii", "f")
def row_top(e: Emitter, source: Value, dtype: Value, dim: Value) -> Value:
    """The largest magnitude of `dim` elements; infinite or NaN if one is."""
    return _largest(e, source, dtype, dim, finite=False)


@kernel("iiiif")
def encode_row(e: Emitter, source: Value, dtype: Value, dim: Value, target: Value, factor: Value) -> None:
    """target[dim] = e4m3(source[dim] * factor). NaN if the source is not finite."""
    b = e.b

    def part(i: Value, value: Value, size: Value) -> None:
        lanes = value.type.count
        nan = b.icmp_signed(">=", size, e.i32s(INFINITE, lanes))
        sign = b.lshr(value, e.i32s(24, lanes))
        _store_codes(e, b.add(target, i), _codes(e, _scaled(e, size, factor)), sign, nan)

    _source_words(e, source, dtype, dim, part)


@kernel("iiiif")
def encode_int8_row(e: Emitter, source: Value, dtype: Value, dim: Value, target: Value, factor: Value) -> None:
    """target[dim] = round(source[dim] * factor), whose magnitude is at most 127.5; 0 for a factor of 0."""
    b = e.b

    def part(i: Value, value: Value, _size: Value) -> None:
        lanes = value.type.count
        scaled = b.bitcast(_scaled(e, value, factor), ir.VectorType(F32, lanes))
        nearest = b.fadd(scaled, e.f32s(ROUND_TO_INTEGER, lanes))
        # A product of 0 and a number that is not finite is NaN.
        none = b.fcmp_unordered("==", scaled, e.f32s(0.0, lanes))
        codes = b.select(none, e.i32s(0, lanes), _words(e, nearest))
        e.store(b.add(target, i), b.trunc(codes, ir.VectorType(I8, lanes)), align=1)

    _source_words(e, source, dtype, dim, part)


@kernel("iif")
def move_row(e: Emitter, codes: Value, dim: Value, ratio: Value) -> None:
    """codes[dim] times a ratio, rounded to e4m3 again. NaN stays NaN."""
    b = e.b

    def part(i: Value, lanes: int) -> None:
        word = b.zext(e.load(b.add(codes, i), ir.VectorType(I8, lanes), align=1), ir.VectorType(I32, lanes))
        size = b.and_(word, e.i32s(0x7F, lanes))
        normal = b.add(b.shl(size, e.i32s(20, lanes)), e.i32s(120 << 23, lanes))
        steps = b.fmul(b.sitofp(size, ir.VectorType(F32, lanes)), e.f32s(2.0**-9, lanes))
        magnitude = b.select(b.icmp_signed("<", size, e.i32s(8, lanes)), _words(e, steps), normal)
        nan = b.icmp_signed("==", size, e.i32s(NAN_CODE, lanes))
        _store_codes(e, b.add(codes, i), _codes(e, _scaled(e, magnitude, ratio)), word, nan)

    _vectors(e, dim, part)


@kernel("f", "f")
def power_of_two(e: Emitter, number: Value) -> Value:
    """The smallest power of two that is not below a normal number."""
    b = e.b
    up = b.add(b.bitcast(number, I32), ir.Constant(I32, 0x7FFFFF))
    return b.bitcast(b.and_(up, ir.Constant(I32, INFINITE)), F32)


@driver
def append_head(p: int, tensor: int, row: int, count: int, page: int, place: int, head: int) -> None:
    """Write `count` rows of K (or V) into slots `place` .. of one (page, head)."""
    dim, dtype, stride = field(p, tensor + f.SIZE), field(p, tensor + f.DTYPE), field(p, tensor + f.SOURCE_ROW)
    source = field(p, tensor + f.SOURCE) + row * stride + head * field(p, tensor + f.SOURCE_HEAD)
    codes = field(p, tensor + f.PAGES) + page * field(p, tensor + f.PAGES_PAGE) + head * field(p, tensor + f.PAGES_HEAD)
    step, scale_at = field(p, tensor + f.PAGES_SLOT), field(p, tensor + f.SCALES)
    scale_at += 4 * (page * field(p, f.NUM_HEADS) + head)
    largest = 0.0
    for n in range(count):
        largest = max(largest, row_amax(source + n * stride, dtype, dim))
    held = AMAX_FLOOR if place == 0 else load_f32(scale_at)
    scale = max(held, power_of_two(max(largest / E4M3_MAX, AMAX_FLOOR)))
    store_f32(scale_at, scale)
    if place > 0 and scale > held:
        for n in range(field(p, f.PAGE_SIZE)):
            if n < place or n >= place + count:
                move_row(codes + n * step, dim, held / scale)
    for n in range(count):
        encode_row(source + n * stride, dtype, dim, codes + (place + n) * step, 1.0 / scale)


@driver
def append_row(p: int, tensor: int, row: int, slot: int) -> None:
    """Write one row of K (or V) into its slot of an int8 page, each head with a scale of its own."""
    dim, dtype, page_size = field(p, tensor + f.SIZE), field(p, tensor + f.DTYPE), field(p, f.PAGE_SIZE)
    page, place, heads = slot // page_size, slot % page_size, field(p, f.NUM_HEADS)
    source = field(p, tensor + f.SOURCE) + row * field(p, tensor + f.SOURCE_ROW)
    target = field(p, tensor + f.PAGES) + page * field(p, tensor + f.PAGES_PAGE)
    target += place * field(p, tensor + f.PAGES_SLOT)
    scale_at = field(p, tensor + f.SCALES) + 4 * (page * heads * page_size + place)
    for head in range(heads):
        values = source + head * field(p, tensor + f.SOURCE_HEAD)
        top = row_top(values, dtype, dim)
        factor, scale = 0.0, NAN
        if top <= LARGEST:
            scale, factor = max(top, AMAX_FLOOR) / INT8_MAX, INT8_MAX / max(top, AMAX_FLOOR)
        encode_int8_row(values, dtype, dim, target + head * field(p, tensor + f.PAGES_HEAD), factor)
        store_f32(scale_at + 4 * head * page_size, scale)


@driver
def append_int8(p: int) -> None:
    """The entry point of each thread: take items until none is left."""
    rows = field(p, f.NUM_ROWS)
    while True:
        first = atomic_add(p + 8 * f.BLOCK_FIELDS + f.NEXT_ITEM, f.ROWS_PER_ITEM)
        if first >= rows:
            break
        for row in range(first, min(rows, first + f.ROWS_PER_ITEM)):
            slot = load_i64(field(p, f.SLOTS) + 8 * row)
            if slot >= 0:
                append_row(p, f.K, row, slot)
                append_row(p, f.V, row, slot)


@driver
def rows_of_page(p: int, first: int, page: int) -> int:
    """How many consecutive rows from `first` on go to a page."""
    rows, page_size, end = field(p, f.NUM_ROWS), field(p, f.PAGE_SIZE), first
    while end < rows:
        slot = load_i64(field(p, f.SLOTS) + 8 * end)
        if slot < 0 or slot // page_size != page:
            break
        end += 1
    return end - first


@driver
def append_quantised(p: int) -> None:
    """The entry point of each thread: take items until none is left."""
    rows, page_size = field(p, f.NUM_ROWS), field(p, f.PAGE_SIZE)
    while True:
        first = atomic_add(p + 8 * f.BLOCK_FIELDS + f.NEXT_ITEM, f.ROWS_PER_ITEM)
        if first >= rows:
            break
        for row in range(first, min(rows, first + f.ROWS_PER_ITEM)):
            slot = load_i64(field(p, f.SLOTS) + 8 * row)
            before = load_i64(field(p, f.SLOTS) + 8 * row - 8) if row > 0 else -1
            if slot >= 0 and (before < 0 or before // page_size != slot // page_size):
                page, count = slot // page_size, rows_of_page(p, row, slot // page_size)
                for head in range(field(p, f.NUM_HEADS)):
                    append_head(p, f.K, row, count, page, slot % page_size, head)
                    if field(p, f.V + f.SIZE) > 0:
                        append_head(p, f.V, row, count, page, slot % page_size, head)
