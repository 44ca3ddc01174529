"""The inner loops of tangents and second derivatives, on panels S[key][query] (see microkernels.py).

P is never multiplied where it is 0: beyond the last key or row, the other panels hold undefined numbers.
"""

from __future__ import annotations

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import EXP2_EXACT, Emitter, Value
from tilewise.backends.cpu.features import each_score
from tilewise.backends.cpu.microkernels import store_block, value_products


@kernel("iiiiii")
def add_values(e: Emitter, p: Value, v: Value, v_stride: Value, num_keys: Value, acc: Value, acc_stride: Value) -> None:
    """acc[value_rows][value_step] += p[num_keys][panel]^T v[num_keys][value_step]."""
    rows = e.rows(acc, acc_stride, e.isa.value_rows)
    start = [old for row in rows for old in e.load_vectors(row, e.isa.value_vectors)]
    store_block(e, acc, acc_stride, value_products(e, p, v, v_stride, num_keys, start))


@kernel("iiif")
def scale_panel(e: Emitter, s: Value, num_keys: Value, vectors: Value, factor: Value) -> None:
    """S *= factor."""
    times = e.splat(factor)

    def prepare(_at: Value) -> object:
        def body(_n: Value, offset: Value) -> None:
            place = e.b.add(s, offset)
            e.store(place, e.b.fmul(e.load(place), times))

        return body

    each_score(e, vectors, num_keys, prepare)  # type: ignore[arg-type]


@kernel("iiii")
def tanh_panel(e: Emitter, s: Value, num_keys: Value, target: Value, vectors: Value) -> None:
    """Target = tanh(s)."""

    def prepare(_at: Value) -> object:
        return lambda _n, offset: e.store(e.b.add(target, offset), e.tanh(e.load(e.b.add(s, offset))))

    each_score(e, vectors, num_keys, prepare)  # type: ignore[arg-type]


@kernel("iiiifii")
def tangent_weights(
    e: Emitter, p: Value, t: Value, num_keys: Value, vectors: Value, factor: Value, alpha: Value, row_sum: Value
) -> None:
    """T = P * factor * t in place of t, and row_sum = alpha * row_sum + sum(T); num_keys is a multiple of 4."""
    b, unroll = e.b, 4
    times, none = e.splat(factor), e.f32s(0.0)

    def column(v: Value) -> None:
        at = b.mul(v, e.i64(4 * e.lanes))

        def step(n: Value, *sums: Value) -> list[Value]:
            offset = b.add(at, b.mul(n, e.i64(4 * e.isa.panel)))
            found = []
            for u, total in enumerate(sums):
                p_at, t_at = (e.at(b.add(base, offset), u * e.isa.panel) for base in (p, t))
                weight = e.load(p_at)
                product = b.fmul(b.fmul(e.load(t_at), times), weight)
                product = b.select(b.fcmp_ordered("==", weight, none), none, product)
                e.store(t_at, product)
                found.append(b.fadd(total, product))
            return found

        parts = e.loop(num_keys, unroll, [none] * unroll, step)
        total = b.fadd(b.fadd(parts[0], parts[1]), b.fadd(parts[2], parts[3]))
        place = b.add(row_sum, at)
        e.store(place, e.fma(e.load(place), e.load(b.add(alpha, at)), total))

    e.loop(vectors, 1, (), column)


@kernel("iiif")
def subtract_row(e: Emitter, target: Value, source: Value, count: Value, factor: Value) -> None:
    """target[count] -= factor * source[count]; count is a multiple of lanes."""
    times = e.splat(factor)

    def step(i: Value) -> None:
        place = e.at(target, i)
        e.store(place, e.b.fsub(e.load(place), e.b.fmul(times, e.load(e.at(source, i)))))

    e.positive(count, e.lanes, step)


@kernel("iiiiiiff")
def second_gradient(
    e: Emitter, s: Value, t: Value, x: Value, y: Value, num_keys: Value, rows: Value, to_log2: Value, factor: Value
) -> None:
    """On a whole panel, with P = 2^(s * to_log2 - lse), a = factor * t - m and g = x - delta: P a in place of s,
    H = P (g a + y - r) in place of x, and dS = P g in place of y. `rows` holds lse in two parts, delta, m and r.
    """
    _emit_second(e, (s, t, x, y), num_keys, rows, to_log2, factor, None)


@kernel("iiiiiiffiif")
def second_gradient_capped(
    e: Emitter,
    s: Value,
    t: Value,
    x: Value,
    y: Value,
    num_keys: Value,
    rows: Value,
    to_log2: Value,
    factor: Value,
    tanh: Value,
    bias: Value,
    twice_per_cap: Value,
) -> None:
    """`second_gradient` with softcap's tanh and the tangent of a bias (panels; addresses of 0 if there are none): W
    instead of H in place of x, U instead of dS in place of y, and H in place of t.
    """
    _emit_second(e, (s, t, x, y), num_keys, rows, to_log2, factor, (tanh, bias, twice_per_cap))


# Numbers of a row, each in an array of its own: ROW_STRIDE rows apart.
ROW_NUMBERS = 5
ROW_STRIDE = 256


def _emit_second(
    e: Emitter,
    panels: tuple[Value, Value, Value, Value],
    num_keys: Value,
    rows: Value,
    to_log2: Value,
    factor: Value,
    capped: tuple[Value, Value, Value] | None,
) -> None:
    b = e.b
    times, scale, none = e.splat(to_log2), e.splat(factor), e.f32s(0.0)

    def column(v: Value) -> None:
        at = b.mul(v, e.i64(4 * e.lanes))
        high, low, delta, m, r = (e.load(b.add(e.at(rows, i * ROW_STRIDE), at)) for i in range(ROW_NUMBERS))
        lse = b.fneg(high)

        def step(n: Value) -> None:
            offset = b.add(at, b.mul(n, e.i64(4 * e.isa.panel)))
            for u in range(2):
                place = b.add(offset, e.i64(4 * u * e.isa.panel))
                s_at, t_at, x_at, y_at = (b.add(base, place) for base in panels)
                exponent = b.fsub(e.fma(e.load(s_at), times, lse), low)
                p = e.exp2(b.select(b.fcmp_ordered(">", exponent, none), none, exponent), EXP2_EXACT)
                hidden = b.fcmp_ordered("==", p, none)

                def seen(value: Value, hidden: Value = hidden) -> Value:
                    return b.select(hidden, none, value)

                tangent = b.fmul(e.load(t_at), scale)
                slope = cap = None
                if capped is not None:
                    cap = _or_zero(e, capped[0], place)
                    slope = e.fma(b.fneg(cap), cap, e.f32s(1.0))
                    tangent = b.fmul(tangent, slope)
                raw = tangent
                if capped is not None:
                    tangent = b.fadd(tangent, _or_zero(e, capped[1], place))
                centred = b.fsub(tangent, m)
                pull = b.fsub(e.load(x_at), delta)
                ds = seen(b.fmul(p, pull))
                h = seen(b.fmul(p, e.fma(pull, centred, b.fsub(e.load(y_at), r))))
                e.store(s_at, seen(b.fmul(p, centred)))
                if capped is None:
                    e.store(x_at, h)
                    e.store(y_at, ds)
                else:
                    bend = b.fmul(b.fmul(ds, seen(raw)), b.fmul(cap, e.splat(capped[2])))
                    e.store(x_at, b.fsub(b.fmul(h, slope), bend))
                    e.store(y_at, b.fmul(ds, slope))
                    e.store(t_at, h)

        e.loop(num_keys, 2, (), step)

    e.loop(e.i64(e.isa.query_vectors), 1, (), column)


def _or_zero(e: Emitter, panel: Value, place: Value) -> Value:
    """A vector of a panel, or zeros if its address is 0."""
    b = e.b
    before, there, after = b.block, b.append_basic_block("there"), b.append_basic_block("joined")
    b.cbranch(b.icmp_signed("!=", panel, e.i64(0)), there, after)
    b.position_at_end(there)
    loaded = e.load(b.add(panel, place))
    b.branch(after)
    b.position_at_end(after)
    joined = b.phi(e.vector)
    joined.add_incoming(e.f32s(0.0), before)
    joined.add_incoming(loaded, there)
    return joined
