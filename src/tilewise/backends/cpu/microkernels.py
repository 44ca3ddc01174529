"""The inner loops: scores, softmax, values, and their counterparts in the backward pass.

Scores are held transposed, S[key][query] with vector lanes = queries: row maximum and sum are lane-wise and need no
shuffles, and P is already in the order in which the value product reads it. All addresses are of packed fp32 buffers,
padded so that no kernel has a tail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import EXP2_EXACT, Emitter, Value

# The running maximum of a row that saw no key: -inf minus it is not NaN.
NO_KEY = -3.4e38
# Finite scores, such as torch.finfo(torch.float32).min, are not below this in log2 units; only -inf is.
LOWEST = -3.3e38
# From here on (log2 units), the rounding error of score times factor exceeds 16: with a rounded maximum, the largest P
# could be anything from 0 to inf.
COARSE_SCORE = float(2**28)


@kernel("iiiiii")
def scores(e: Emitter, k: Value, k_stride: Value, head_dim: Value, q: Value, s: Value, running_max: Value) -> None:
    """s[score_keys][panel] = k[score_keys][head_dim] . q[head_dim][panel]; running_max = max(running_max, s)."""
    keys, vectors, panel = e.isa.score_keys, e.isa.query_vectors, e.isa.panel
    acc = score_products(e, k, k_stride, head_dim, q)
    top = e.load_vectors(running_max, vectors)
    for i in range(keys):
        e.store_vectors(e.at(s, i * panel), acc[i * vectors : (i + 1) * vectors])
        top = [e.maximum(top[j], acc[i * vectors + j]) for j in range(vectors)]
    e.store_vectors(running_max, top)


@kernel("iiiii")
def add_scores(e: Emitter, k: Value, k_stride: Value, head_dim: Value, q: Value, s: Value) -> None:
    """s[score_keys][panel] += k[score_keys][head_dim] . q[head_dim][panel]. The products are a sum of their own."""
    keys, vectors, panel = e.isa.score_keys, e.isa.query_vectors, e.isa.panel
    acc = score_products(e, k, k_stride, head_dim, q)
    for i in range(keys):
        old = e.load_vectors(e.at(s, i * panel), vectors)
        e.store_vectors(e.at(s, i * panel), [e.b.fadd(old[j], acc[i * vectors + j]) for j in range(vectors)])


def score_products(e: Emitter, k: Value, k_stride: Value, head_dim: Value, q: Value) -> list[Value]:
    """The vectors of k[score_keys][head_dim] . q[head_dim][panel]."""
    isa, b = e.isa, e.b
    keys, vectors, panel = isa.score_keys, isa.query_vectors, isa.panel
    k_rows = e.rows(k, k_stride, keys)

    def step(d: Value, *acc: Value) -> list[Value]:
        sums = list(acc)
        offset = b.mul(d, e.i64(4))
        q_row = b.add(q, b.mul(d, e.i64(4 * panel)))
        for u in range(isa.score_unroll):
            weights = _multipliers(e, [b.add(row, offset) for row in k_rows], u)
            for w in range(len(weights[0])):
                queries = e.load_vectors(e.at(q_row, (u * len(weights[0]) + w) * panel), vectors)
                for i in range(keys):
                    for j in range(vectors):
                        sums[i * vectors + j] = e.fma(queries[j], weights[i][w], sums[i * vectors + j])
        return sums

    return e.loop(head_dim, isa.dim_step, [e.f32s(0.0)] * (keys * vectors), step)


def _multipliers(e: Emitter, rows: list[Value], u: int) -> list[list[Value]]:
    """The splats of step u for each row: lanes of one loaded register (by element), or broadcast loads."""
    if not e.isa.by_lane:
        return [[e.broadcast(e.at(row, u))] for row in rows]
    loaded = [e.load(e.at(row, u * e.lanes)) for row in rows]
    return [[e.lane(register, n) for n in range(e.lanes)] for register in loaded]


@kernel("iiiiiii")
def weigh_values(
    e: Emitter, p: Value, v: Value, v_stride: Value, num_keys: Value, acc: Value, acc_stride: Value, alpha: Value
) -> None:
    """acc[value_rows][value_step] = alpha[value_rows] * acc + p[num_keys][panel]^T v[num_keys][value_step]."""
    start = decayed(e, acc, acc_stride, alpha)
    store_block(e, acc, acc_stride, value_products(e, p, v, v_stride, num_keys, start))


def decayed(e: Emitter, acc: Value, acc_stride: Value, alpha: Value) -> list[Value]:
    """The vectors of alpha[value_rows] * acc[value_rows][value_step]."""
    found = []
    for i, row in enumerate(e.rows(acc, acc_stride, e.isa.value_rows)):
        factor = e.broadcast(e.at(alpha, i))
        found += [e.b.fmul(old, factor) for old in e.load_vectors(row, e.isa.value_vectors)]
    return found


def store_block(e: Emitter, acc: Value, acc_stride: Value, sums: Sequence[Value]) -> None:
    """acc[value_rows][value_step] = sums."""
    vectors = e.isa.value_vectors
    for i, row in enumerate(e.rows(acc, acc_stride, e.isa.value_rows)):
        e.store_vectors(row, sums[i * vectors : (i + 1) * vectors])


def value_products(
    e: Emitter, p: Value, v: Value, v_stride: Value, num_keys: Value, start: Sequence[Value]
) -> list[Value]:
    """The vectors of p[num_keys][panel]^T v[num_keys][value_step], added to `start`."""
    isa, b = e.isa, e.b
    rows, vectors = isa.value_rows, isa.value_vectors

    def step(n: Value, *sums: Value) -> list[Value]:
        current = list(sums)
        p_row = b.add(p, b.mul(n, e.i64(4 * isa.panel)))
        v_row = b.add(v, b.mul(n, v_stride))
        for u in range(isa.value_unroll):
            values = e.load_vectors(v_row, vectors)
            for i, weight in enumerate(_adjacent_splats(e, e.at(p_row, u * isa.panel), rows)):
                for j in range(vectors):
                    current[i * vectors + j] = e.fma(values[j], weight, current[i * vectors + j])
            v_row = b.add(v_row, v_stride)
        return current

    return e.loop(num_keys, isa.value_unroll, start, step)


def _adjacent_splats(e: Emitter, address: Value, count: int) -> list[Value]:
    """Splats of `count` adjacent numbers."""
    if not e.isa.by_lane:
        return [e.broadcast(e.at(address, i)) for i in range(count)]
    registers = e.load_vectors(address, count // e.lanes)
    return [e.lane(registers[i // e.lanes], i % e.lanes) for i in range(count)]


@kernel("iiiiiii")
def accumulate_keys(
    e: Emitter,
    weights: Value,
    panel_bytes: Value,
    num_panels: Value,
    x: Value,
    x_stride: Value,
    acc: Value,
    acc_stride: Value,
) -> None:
    """acc[value_rows keys][value_step] += weights[num_panels][value_rows][panel] . x[num_panels * panel][value_step].

    This is dV += P dO and dK += dS Q. The weights of consecutive panels are `panel_bytes` apart; x is contiguous.
    """
    isa, b = e.isa, e.b
    keys, vectors = isa.value_rows, isa.value_vectors
    acc_rows = e.rows(acc, acc_stride, keys)
    start = [old for row in acc_rows for old in e.load_vectors(row, vectors)]
    unroll = isa.lanes if isa.by_lane else 4

    def over_panels(panel: Value, *sums: Value) -> list[Value]:
        weight_rows = e.rows(b.add(weights, b.mul(panel, panel_bytes)), e.i64(4 * isa.panel), keys)
        x_panel = b.add(x, b.mul(panel, b.mul(x_stride, e.i64(isa.panel))))

        def step(n: Value, *carried: Value) -> list[Value]:
            current = list(carried)
            offset = b.mul(n, e.i64(4))
            x_row = b.add(x_panel, b.mul(n, x_stride))
            splats = [_adjacent_splats(e, b.add(row, offset), unroll) for row in weight_rows]
            for u in range(unroll):
                values = e.load_vectors(x_row, vectors)
                for i in range(keys):
                    for j in range(vectors):
                        current[i * vectors + j] = e.fma(values[j], splats[i][u], current[i * vectors + j])
                x_row = b.add(x_row, x_stride)
            return current

        return e.loop(e.i64(isa.panel), unroll, sums, step)

    sums = e.loop(num_panels, 1, start, over_panels)
    for i, row in enumerate(acc_rows):
        e.store_vectors(row, sums[i * vectors : (i + 1) * vectors])


@kernel("iiii")
def row_max(e: Emitter, s: Value, num_keys: Value, running_max: Value, vectors: Value) -> None:
    """running_max = max(running_max, s[num_keys]) for the first `vectors` vectors of a panel; num_keys is a multiple of
    score_keys or of 4.
    """
    # Several independent chains, because a maximum has a latency of four cycles.
    chains = math.gcd(e.isa.score_keys, 4)

    def column(offset: Value, top_at: Value) -> None:
        def step(n: Value, *tops: Value) -> list[Value]:
            place = e.b.add(offset, e.b.mul(n, e.i64(4 * e.isa.panel)))
            return [e.maximum(top, e.load(e.at(place, u * e.isa.panel))) for u, top in enumerate(tops)]

        tops = e.loop(num_keys, chains, [e.load(top_at)] * chains, step)
        e.store(top_at, functools.reduce(e.maximum, tops))

    _per_vector(e, vectors, lambda at: column(e.b.add(s, at), e.b.add(running_max, at)))


def _per_vector(e: Emitter, vectors: Value, body: object) -> None:
    """Run `body(byte offset)` for each vector of a panel."""
    assert callable(body)
    e.loop(vectors, 1, (), lambda v: body(e.b.mul(v, e.i64(4 * e.lanes))))


SOFTMAX_UNROLL = 4


@kernel("iiiiiiif")
def softmax(
    e: Emitter,
    s: Value,
    num_keys: Value,
    row_max: Value,
    row_sum: Value,
    tile_max: Value,
    alpha: Value,
    vectors: Value,
    to_log2: Value,
) -> None:
    """One step of the online softmax on a panel: P = 2^(s * to_log2 - m) in place, where m is the new row_max, in log2
    units.

    m = max(row_max, tile_max * to_log2), alpha = 2^(row_max - m), row_sum = alpha * row_sum + sum(P). Scaling here is
    free, because it makes the subtraction a fused multiply-add, and it is more exact than scaling q. Past COARSE_SCORE
    the product is rounded like m, so that the largest score has P = 1. num_keys is a multiple of 4. A row without a key
    keeps row_max -inf and row_sum 0.
    """

    def keep(at: Value, n: Value, powers: list[Value]) -> None:
        base = e.b.add(e.b.add(s, at), e.b.mul(n, e.i64(4 * e.isa.panel)))
        for u, power in enumerate(powers):
            e.store(e.at(base, u * e.isa.panel), power)

    emit_softmax(e, s, num_keys, Statistics(row_max, row_sum, tile_max, alpha), vectors, to_log2, keep)


class Statistics(NamedTuple):
    """Addresses of the softmax state of a panel."""

    row_max: Value
    row_sum: Value
    tile_max: Value
    alpha: Value


def emit_softmax(
    e: Emitter,
    s: Value,
    num_keys: Value,
    state: Statistics,
    vectors: Value,
    to_log2: Value,
    keep: Callable[[Value, Value, list[Value]], None],
) -> None:
    """The body of `softmax`; `keep(byte offset of the vector, key, P of four keys)` stores the result."""
    b = e.b
    factor = e.splat(to_log2)

    def log2_of(score: Value) -> Value:
        product = b.fmul(score, factor)
        return b.select(b.fcmp_ordered(">", score, e.f32s(-math.inf)), e.maximum(product, e.f32s(LOWEST)), product)

    def column(at: Value) -> None:
        old = e.load(b.add(state.row_max, at))
        tile = e.load(b.add(state.tile_max, at))
        top = e.maximum(old, log2_of(tile))
        safe = e.maximum(top, e.f32s(NO_KEY))
        shift = b.fneg(safe)

        def step(n: Value, sums: Sequence[Value], exponent: Callable[[Value], Value]) -> list[Value]:
            base = b.add(b.add(s, at), b.mul(n, e.i64(4 * e.isa.panel)))
            places = [e.at(base, u * e.isa.panel) for u in range(SOFTMAX_UNROLL)]
            powers = [e.exp2(exponent(e.load(place))) for place in places]
            keep(at, n, powers)
            return [b.fadd(total, power) for total, power in zip(sums, powers, strict=True)]

        large = b.fcmp_ordered(">", e.call("fabs", top), e.f32s(COARSE_SCORE))
        coarse = b.and_(large, b.fcmp_ordered(">", top, e.f32s(NO_KEY)))

        def fused(n: Value, *sums: Value) -> list[Value]:
            return step(n, sums, lambda score: e.fma(score, factor, shift))

        def rounded(n: Value, *sums: Value) -> list[Value]:
            # Chosen per row, so that the bits of a row do not depend on its neighbours.
            return step(
                n, sums, lambda score: b.select(coarse, b.fadd(log2_of(score), shift), e.fma(score, factor, shift))
            )

        fine_keys = b.select(e.any(coarse), e.i64(0), num_keys)
        parts = e.positive(fine_keys, SOFTMAX_UNROLL, fused, [e.f32s(0.0)] * SOFTMAX_UNROLL)
        parts = e.positive(b.sub(num_keys, fine_keys), SOFTMAX_UNROLL, rounded, parts)
        total = b.fadd(b.fadd(parts[0], parts[1]), b.fadd(parts[2], parts[3]))
        decay = e.exp2(b.fsub(old, safe))
        e.store(b.add(state.alpha, at), decay)
        e.store(b.add(state.row_max, at), top)
        e.store(b.add(state.row_sum, at), e.fma(e.load(b.add(state.row_sum, at)), decay, total))

    _per_vector(e, vectors, column)


@kernel("iiiiiif")
def softmax_gradient(
    e: Emitter, s: Value, dp: Value, num_keys: Value, lse_log2: Value, lse_low: Value, delta: Value, to_log2: Value
) -> None:
    """P = 2^(s * to_log2 - lse) in place of s and dS = P * (dp - delta) in place of dp, on a whole panel; num_keys is
    even, lse in two parts.

    P is clamped to 1: fp32 around 1e12 has a spacing of 65536, and an lse rounded down would make P inf.
    """
    b = e.b
    factor, none = e.splat(to_log2), e.f32s(0.0)

    def column(v: Value) -> None:
        at = b.mul(v, e.i64(4 * e.lanes))
        lse, low = b.fneg(e.load(b.add(lse_log2, at))), e.load(b.add(lse_low, at))
        shift = e.load(b.add(delta, at))

        def step(n: Value) -> None:
            offset = b.add(at, b.mul(n, e.i64(4 * e.isa.panel)))
            for u in range(2):
                s_at, dp_at = (e.at(b.add(base, offset), u * e.isa.panel) for base in (s, dp))
                exponent = b.fsub(e.fma(e.load(s_at), factor, lse), low)
                p = e.exp2(b.select(b.fcmp_ordered(">", exponent, none), none, exponent), EXP2_EXACT)
                e.store(s_at, p)
                e.store(dp_at, b.fmul(p, b.fsub(e.load(dp_at), shift)))

        e.loop(num_keys, 2, (), step)

    e.loop(e.i64(e.isa.query_vectors), 1, (), column)
