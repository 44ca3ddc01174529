"""Steps between the raw product and the softmax: softcap, ALiBi, bias, mask, band edges; and dropout after it.

Every kernel works on a panel of transposed scores S[key][query]. What differs between rows is read from the panel's row
table, so that rows of different heads (a GQA group decoded together) may share a panel. Steps that a problem does not
need are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import BF16, BOOL, FP16, FP32, I32, I64, ITEM_BYTES, Emitter, Value
from tilewise.backends.cpu.packing import by_dtype
from tilewise.numerics import PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1

# A row table and fields of it.
Rows = tuple[Value, tuple[int, ...]]


def row_vectors(e: Emitter, table: Value, at: Value, *fields: int) -> list[Value]:
    """One vector of each of these fields of a row table; slopes are fp32, the others integers."""
    places = [e.b.add(e.b.add(table, e.i64(field * 4 * e.isa.panel)), at) for field in fields]
    kinds = [e.vector if field == f.ROW_SLOPE else e.int_vector for field in fields]
    return [e.load(place, kind) for place, kind in zip(places, kinds, strict=True)]


def each_score(
    e: Emitter, vectors: Value, num_keys: Value, prepare: Callable[[Value], Callable[[Value, Value], None]]
) -> None:
    """Visit a panel: `prepare(byte offset of the vector)` returns the body, called with (key index, byte offset)."""
    b = e.b

    def column(v: Value) -> None:
        at = b.mul(v, e.i64(4 * e.lanes))
        body = prepare(at)
        e.loop(num_keys, 1, (), lambda n: body(n, b.add(at, b.mul(n, e.i64(4 * e.isa.panel)))))

    e.loop(vectors, 1, (), column)


def change_each(
    e: Emitter, s: Value, num_keys: Value, vectors: Value, change: Callable[..., Value], rows: Rows = (None, ())
) -> None:
    """S = change(S, key index, byte offset into the panel, *vectors of row table fields), vector by vector."""

    def prepare(at: Value) -> Callable[[Value, Value], None]:
        found = row_vectors(e, rows[0], at, *rows[1])

        def body(n: Value, offset: Value) -> None:
            place = e.b.add(s, offset)
            e.store(place, change(e.load(place), n, offset, *found))

        return body

    each_score(e, vectors, num_keys, prepare)


@kernel("iiiii")
def mask_band(e: Emitter, s: Value, num_keys: Value, first_key: Value, table: Value, vectors: Value) -> None:
    """S = -inf where the key is outside the row's [first, last]."""
    b = e.b

    def change(score: Value, n: Value, _offset: Value, last: Value, first: Value) -> Value:
        key = e.splat(b.trunc(b.add(first_key, n), I32))
        inside = b.and_(b.icmp_signed("<=", key, last), b.icmp_signed(">=", key, first))
        return b.select(inside, score, e.f32s(-float("inf")))

    change_each(e, s, num_keys, vectors, change, (table, (f.ROW_LAST, f.ROW_FIRST)))


@kernel("iiiii")
def mask_bits(e: Emitter, s: Value, num_keys: Value, words: Value, first_row: Value, vectors: Value) -> None:
    """S = -inf where the bit of the key's word is 0. The panel's first query has bit `first_row`."""
    b, hidden = e.b, e.f32s(-float("inf"))
    zero, one = e.i32s(0), e.i32s(1)
    lanes = ir.Constant(e.int_vector, list(range(e.lanes)))

    def prepare(at: Value) -> Callable[[Value, Value], None]:
        first = b.add(first_row, b.lshr(at, e.i64(2)))
        own = b.shl(one, b.add(e.splat(b.trunc(first, I32)), lanes))

        def body(n: Value, offset: Value) -> None:
            word = e.load(b.add(words, b.mul(n, e.i64(4))), I32)
            place = b.add(s, offset)
            seen = b.icmp_signed("!=", b.and_(e.splat(word), own), zero)
            e.store(place, b.select(seen, e.load(place), hidden))

        return body

    each_score(e, vectors, num_keys, prepare)


@kernel("iiifi")
def apply_softcap(e: Emitter, s: Value, num_keys: Value, vectors: Value, cap: Value, slope: Value) -> None:
    """S (already divided by the cap) = cap * tanh(s). If `slope` is an address, 1 - tanh^2 is stored there."""
    b, factor, has_slope = e.b, e.splat(cap), e.b.icmp_signed("!=", slope, e.i64(0))

    def change(score: Value, _n: Value, offset: Value) -> Value:
        t = e.tanh(score)
        e.when(has_slope, lambda: e.store(b.add(slope, offset), e.fma(b.fneg(t), t, e.f32s(1.0))))
        return b.fmul(t, factor)

    change_each(e, s, num_keys, vectors, change)


@kernel("iiiii")
def add_alibi(e: Emitter, s: Value, num_keys: Value, first_key: Value, table: Value, vectors: Value) -> None:
    """S -= slope * |position - key|. The distance is an exact integer, even past 2^24, where fp32 positions are not."""
    b = e.b

    def change(score: Value, n: Value, _offset: Value, position: Value, slope: Value) -> Value:
        key = e.splat(b.trunc(b.add(first_key, n), I32))
        return e.fma(b.fneg(slope), e.call("fabs", b.sitofp(b.sub(position, key), e.vector)), score)

    change_each(e, s, num_keys, vectors, change, (table, (f.ROW_POSITION, f.ROW_SLOPE)))


@kernel("iiii")
def add_panel(e: Emitter, s: Value, num_keys: Value, addend: Value, vectors: Value) -> None:
    """S += addend, a panel. -inf in the addend wins over everything, NaN included."""
    b, never = e.b, e.f32s(-float("inf"))

    def change(score: Value, _n: Value, offset: Value) -> Value:
        extra = e.load(b.add(addend, offset))
        return b.select(b.fcmp_ordered("==", extra, never), never, b.fadd(score, extra))

    change_each(e, s, num_keys, vectors, change)


@kernel("iiii")
def multiply_panel(e: Emitter, s: Value, num_keys: Value, factor: Value, vectors: Value) -> None:
    """S *= factor, a panel."""
    change_each(e, s, num_keys, vectors, lambda x, _, offset: e.b.fmul(x, e.load(e.b.add(factor, offset))))


@kernel("iiiii")
def gather_row(e: Emitter, source: Value, element_stride: Value, count: Value, dtype: Value, target: Value) -> None:
    """target[count] = elements `element_stride` bytes apart, as fp32; count >= 1."""
    b = e.b

    def convert(code: int) -> None:
        item = ITEM_BYTES[code]
        adjacent = b.icmp_signed("==", element_stride, e.i64(item))
        whole = b.select(adjacent, b.and_(count, e.i64(-e.lanes)), e.i64(0))

        def vector(i: Value) -> None:
            e.store(e.at(target, i), e.load_as_f32(b.add(source, b.mul(i, e.i64(item))), code))

        def single(i: Value) -> None:
            n = b.add(whole, i)
            e.store(e.at(target, n), e.load_as_f32(b.add(source, b.mul(n, element_stride)), code, lanes=1))

        e.positive(whole, e.lanes, vector)
        e.positive(b.sub(count, whole), 1, single)

    by_dtype(e, dtype, (FP32, BF16, FP16, BOOL), convert)


@kernel("iiiiiiiifi")
def drop(
    e: Emitter,
    p: Value,
    num_keys: Value,
    first_key: Value,
    table: Value,
    batch: Value,
    seed_low: Value,
    seed_high: Value,
    threshold: Value,
    keep_scale: Value,
    vectors: Value,
) -> None:
    """P = keep_scale * p where the random word is at least the threshold, else 0; keys are multiples of 4."""
    b = e.b
    key0, key1, bound = (e.splat(b.trunc(x, I32)) for x in (seed_low, seed_high, threshold))
    batch_word = e.splat(b.trunc(batch, I32))
    factor = e.splat(keep_scale)

    def column(v: Value) -> None:
        at = b.mul(v, e.i64(4 * e.lanes))
        row, head = row_vectors(e, table, at, f.ROW_INDEX, f.ROW_HEAD)

        def step(n: Value) -> None:
            draw = e.splat(b.trunc(b.lshr(b.add(first_key, n), e.i64(2)), I32))
            words = philox(e, [draw, row, head, batch_word], key0, key1)
            base = b.add(b.add(p, at), b.mul(n, e.i64(4 * e.isa.panel)))
            for u, word in enumerate(words):
                place = e.at(base, u * e.isa.panel)
                kept = b.fmul(e.load(place), factor)
                e.store(place, b.select(b.icmp_unsigned(">=", word, bound), kept, e.f32s(0.0)))

        e.loop(num_keys, 4, (), step)

    e.loop(vectors, 1, (), column)


def philox(e: Emitter, counter: list[Value], key0: Value, key1: Value) -> list[Value]:
    """Philox 4x32-10 on lanes of counters: the four words of tilewise.numerics.philox_4x32."""
    b = e.b
    wide = ir.VectorType(I64, e.lanes)

    def multiply(x: Value, factor: int) -> tuple[Value, Value]:
        product = b.mul(b.zext(x, wide), ir.Constant(wide, [factor] * e.lanes))
        high = b.trunc(b.lshr(product, ir.Constant(wide, [32] * e.lanes)), e.int_vector)
        return high, b.trunc(product, e.int_vector)

    c0, c1, c2, c3 = counter
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = multiply(c0, PHILOX_M0), multiply(c2, PHILOX_M1)
        c0, c1, c2, c3 = b.xor(b.xor(high1, c1), key0), low1, b.xor(b.xor(high0, c3), key1), low0
        key0, key1 = b.add(key0, e.i32s(PHILOX_W0)), b.add(key1, e.i32s(PHILOX_W1))
    return [c0, c1, c2, c3]
