"""Kernels for few query rows: vectors run along the head dim, and K and V are read once, directly from the tensors.

Decoding is bound by memory, so loads must be in flight at all times: while scores are computed from K, the same rows of
V are prefetched, and while V is weighted, the next rows of K are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from llvmlite import ir

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import I32, ITEM_BYTES, Emitter, Value
from tilewise.backends.cpu.packing import SOURCES, by_dtype

# Rows that share a loaded vector of K or V, and keys whose loads are in flight together: 16 accumulators, or 8.
ROWS, KEYS, KEYS_FOR_ONE = 4, 4, 8
# Vectors of V per row that are accumulated in registers.
STRIP_FOR_ROWS, STRIP_FOR_ONE = 4, 8
CACHE_LINE = 64
# Maximum vectors of a row of K per loop iteration, and how many of each key are in registers at once.
MOST_VECTORS, TOGETHER = 4, 2


def _in_groups(e: Emitter, count: Value, size: int, body: Callable[[Value, int], None]) -> None:
    """`body(index, group)` over whole groups of `size`, then one by one."""
    whole = e.b.mul(e.b.udiv(count, e.i64(size)), e.i64(size))
    e.positive(whole, size, lambda i: body(i, size))
    e.positive(e.b.sub(count, whole), 1, lambda i: body(e.b.add(whole, i), 1))


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


def _store_sums(e: Emitter, sums: list[Value], out: Value, first_key: int, rows: int) -> None:
    """Stores the lane sums of [keys][rows] vectors as the scores of these keys and rows."""
    total = _sums_of_lanes(e, sums)
    for n in range(len(sums) // rows):
        pick = ir.Constant(ir.VectorType(I32, rows), [n * rows + r for r in range(rows)])
        part = e.b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), pick)
        e.store(e.at(out, (first_key + n) * e.isa.panel), part)


@kernel("iiiiiiiiiiif")
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
    factor: Value,
) -> None:
    """s[num_keys][num_rows of panel] = k[num_keys][dim] . q[num_rows][dim]; dim is a multiple of lanes, rows at `ahead`
    are prefetched.
    """
    b = e.b

    def block(code: int, row: Value, rows: int, key: Value, keys: int) -> None:
        item = ITEM_BYTES[code]
        k_rows = e.rows(b.add(k, b.mul(key, k_stride)), k_stride, keys)
        q_rows = e.rows(b.add(q, b.mul(row, q_stride)), q_stride, rows)
        ahead_rows = e.rows(b.add(ahead, b.mul(key, ahead_stride)), ahead_stride, keys)

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
        for first in range(0, keys * rows, e.lanes):
            _store_sums(e, sums[first : first + e.lanes], out, first // rows, rows)

    def convert(code: int) -> None:
        def over_keys(row: Value, rows: int) -> None:
            group = KEYS if rows > 1 else KEYS_FOR_ONE
            _in_groups(e, num_keys, group, lambda key, keys: block(code, row, rows, key, keys))

        _in_groups(e, num_rows, ROWS, over_keys)

    by_dtype(e, dtype, SOURCES, convert)


@kernel("iiiiiiiiiiiif")
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
    factor: Value,
) -> None:
    """acc[num_rows][dim] = alpha * acc + p[num_keys][rows of panel]^T v[num_keys][dim]; dim % lanes is 0."""
    b = e.b

    def block(code: int, row: Value, rows: int, strip: Value, vectors: int) -> None:
        item = ITEM_BYTES[code]
        first = b.mul(strip, e.i64(e.lanes))
        offset = b.mul(first, e.i64(item))
        acc_rows = e.rows(e.at(b.add(acc, b.mul(row, acc_stride)), first), acc_stride, rows)
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
            values = e.load_many_as_f32(v_row, code, vectors, factor)
            weights = e.at(b.add(p, b.mul(n, e.i64(4 * e.isa.panel))), row)
            for r in range(rows):
                weight = e.broadcast(e.at(weights, r))
                for j in range(vectors):
                    current[r * vectors + j] = e.fma(values[j], weight, current[r * vectors + j])
            return current

        sums = e.loop(num_keys, 1, start, step)
        for r, place in enumerate(acc_rows):
            e.store_vectors(place, sums[r * vectors : (r + 1) * vectors])

    def convert(code: int) -> None:
        def over_strips(row: Value, rows: int) -> None:
            width = STRIP_FOR_ONE if rows == 1 else STRIP_FOR_ROWS
            strips = b.udiv(dim, e.i64(e.lanes))
            _in_groups(e, strips, width, lambda strip, vectors: block(code, row, rows, strip, vectors))

        _in_groups(e, num_rows, ROWS, over_strips)

    by_dtype(e, dtype, SOURCES, convert)
