"""Between the two products: softcap, mask, softmax, and the end of a row.

The softmax of a row is relative to a reference `row_ref` (a log2): P = 2^(score - row_ref) and lse = row_ref +
log2(row_sum) hold for any reference. There are two policies for choosing it:

eager    row_ref is the row's largest score so far, whose P is exactly 1. Each new maximum rescales O.
IS_LAZY  row_ref moves only when a score exceeds it by more than 8, so P reaches 2^8 instead of 1. A warp none of whose
         rows moves leaves O as it is. A score that exceeds all others by far still has P = 1. Masked tiles are eager.
         Callers who need the largest score keep the maxima of all tiles next to it.

Neither can overflow, and neither depends on what the scores are: skipping the maximum is faster on N(0, 1) data alone
(docs/log).

Scores of 2^27 and more (HUGE) come out wrong where a multiply-add subtracts a rounded reference. They are right with
EXACT, which large scales select. Otherwise rows with such scores become NaN.

row_ref and row_sum are [64, 4]: four threads share a row. row_ref is the same in all of them; row_sum is the
part of each thread, which holds a quarter of the keys.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import LN2, LOG2E, NEG_INF, exp2, first, largest, power_over, tanh, unless_one
from tilewise.backends.hopper.schedule import right_of

# From here on fp32 holds scores (log2) as multiples of 16, and rounds their products with the scale by as much: see
# row_scale. Below, P is at most 2^4 larger than it should be, which fp16 holds.
HUGE = gl.constexpr(2.0**27)


@gluon.jit
def row_scale(row_ref, scale_log2, C: gl.constexpr):
    """What the scores of rows are multiplied by: the scale or, with EXACT and a HUGE reference, a power of two.

    The reference is a rounded product, but a multiply-add does not round score * scale before it subtracts. From 2^28
    on, the difference may be 8 for the largest score of a row, from 2^31 on 128: its P passes the end of fp16, then of
    fp32, or becomes 0. A power of two rounds nothing: equal scores have equal P. Scores that differ at all differ by 8
    or more here, which is also how far fp32 is off, so that the larger factor does not matter.
    """
    if C.EXACT:
        return gl.where(gl.abs(row_ref) < HUGE, scale_log2, power_over(scale_log2))
    else:
        return gl.where(row_ref < HUGE, scale_log2, scale_log2)  # only broadcasts


@gluon.jit
def capped(scores, cap_scale, C: gl.constexpr):
    """tanh(S * scale / softcap); the softmax then scales by softcap."""
    if C.HAS_SOFTCAP:
        return tanh(scores * cap_scale)
    else:
        return scores


@gluon.jit
def through_cap(p, capped_scores, C: gl.constexpr):
    """P times the softcap's derivative 1 - tanh^2: dS = P (dP - delta) uses it instead of P, in P's registers."""
    if C.HAS_SOFTCAP:
        return p * (1.0 - capped_scores * capped_scores)
    else:
        return p


@gluon.jit
def mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """Scores with -inf for keys past the end, right of the band or left of it; row is the warpgroup's first query."""
    LAYOUT: gl.constexpr = accumulator_layout(C.BLOCK_N)
    col = n_block * C.BLOCK_N
    cols = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if C.HAS_RIGHT:
        stop = gl.minimum(rows + (row + seqlen_k - seqlen_q + right_of(sizes, C) + 1 - col), seqlen_k - col)
        scores = gl.where(cols[None, :] < stop[:, None], scores, NEG_INF)
    else:
        scores = gl.where((cols < seqlen_k - col)[None, :], scores, NEG_INF)
    if C.HAS_LEFT:
        first = rows + (row + seqlen_k - seqlen_q - sizes.window.left - col)
        scores = gl.where(cols[None, :] >= first[:, None], scores, NEG_INF)
    return scores


@gluon.jit
def quads(x, COLUMNS: gl.constexpr):
    """A tile [64, COLUMNS] as [64, groups of 8 columns, threads of a row, pairs], in the same registers."""
    return gl.reshape(x, [64, COLUMNS // 8, 4, 2])


@gluon.jit
def over(x, like):
    """Broadcast a value [64, 4], one for each thread of a row, over the elements of `like`, which are in quads."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, like.type.layout))
    return gl.convert_layout(x, LAYOUT)[:, None, :][:, :, :, None]


@gluon.jit
def beside(x, like):
    """Broadcast a value [64], one for each row, over its four threads as in `like` [64, 4]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def sum_rows(p, C: gl.constexpr):
    """Row sums [64, 4]: one for each of the four threads that share a row, so that none needs a shuffle."""
    return gl.sum(gl.sum(quads(p, C.BLOCK_N), axis=3), axis=1)


@gluon.jit
def no_rows(C: gl.constexpr):
    """(row_ref, row_sum) before the first key."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    row_sum = sum_rows(gl.zeros([64, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N)), C)
    return row_sum + NEG_INF, row_sum


@gluon.jit
def largest_scores(scores, row_ref, MASKED: gl.constexpr, C: gl.constexpr):
    """The largest score [64] of each row; with INTEGER_MAX, where it is not above row_ref, it may be a smaller one."""
    if C.INTEGER_MAX and not MASKED:
        x = quads(scores, C.BLOCK_N)
        x = largest(x, over(row_ref, x), C.BLOCK_N // 2)
        return gl.max(gl.reduce(gl.reduce(x, 3, first), 1, first), axis=1)
    else:
        return gl.max(scores, axis=1)


@gluon.jit
def soften(scores, row_ref, row_sum, scale_log2, MASKED: gl.constexpr, C: gl.constexpr):
    """One tile of the online softmax: (P, factor that rescales O so far, row_ref, row_sum, the tile's maxima)."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    top = largest_scores(scores, row_ref, MASKED, C)
    top = beside(top * row_scale(top * scale_log2, scale_log2, C), row_sum)
    if C.IS_LAZY and not MASKED:
        grows = top > row_ref + 8.0
        new_ref = gl.where(grows, top, row_ref)
    else:
        new_ref = gl.maximum(row_ref, top)
    shift = gl.where(new_ref == NEG_INF, 0.0, new_ref)  # no key so far, or only scores of -inf
    factor = exp2(row_ref - shift)
    if C.IS_LAZY and not MASKED:
        factor = gl.where(grows, factor, 1.0)
    x = quads(scores, BLOCK_N)
    x = x * over(row_scale(new_ref, scale_log2, C), x) - over(shift, x)
    p = gl.convert_layout(gl.reshape(exp2(x), [64, BLOCK_N]), accumulator_layout(BLOCK_N))
    return p, factor, new_ref, row_sum * factor + sum_rows(p, C), top


@gluon.jit
def rescale(acc, factor, COLUMNS: gl.constexpr, C: gl.constexpr):
    """The rows of O times the factor of `soften`; IS_LAZY: a warp whose factors are all 1 multiplies nothing."""
    x = quads(acc, COLUMNS)
    rows = over(factor, x)
    x = unless_one(x, rows, COLUMNS // 2) if C.IS_LAZY else x * rows
    return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), accumulator_layout(COLUMNS))


@gluon.jit
def load_sink(sinks_ptr, item, sizes):
    """The sink of a tile's head, as log2."""
    return gl.load(sinks_ptr + item % sizes.num_heads).to(gl.float32) * LOG2E


@gluon.jit
def whole_rows(row_ref, row_sum, scale_log2, C: gl.constexpr):
    """(row_ref, row_sum) of whole rows, [64], from those of their four threads; row_ref in log2 also if EXACT.

    The sum of a row with HUGE scores is NaN unless EXACT.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_N))
    total = gl.sum(row_sum, axis=1)
    ref = in_log2(gl.max(row_ref, axis=1), scale_log2, C)
    if not C.EXACT:
        is_huge = (gl.abs(ref) >= HUGE) & (ref > NEG_INF)
        total += gl.where(is_huge, NEG_INF, 0.0) * 0.0  # NaN, or 0
    return gl.convert_layout(ref, LAYOUT), gl.convert_layout(total, LAYOUT)


@gluon.jit
def in_log2(top, scale_log2, C: gl.constexpr):
    """Maxima as `soften` scales them, in log2 also if EXACT."""
    if C.EXACT:
        return top * (scale_log2 / row_scale(top, scale_log2, C))
    else:
        return top


@gluon.jit
def raise_max(row_top, max_ptr, item, row, seqlen_q, scale_log2, sizes, C: gl.constexpr):
    """Raise the largest score of a tile's head to the maxima [64, 4] of its rows, each warp with those of its 16."""
    top = in_log2(gl.max(row_top, axis=1), scale_log2, C)
    rows = row + gl.arange(0, 64, top.type.layout)
    top = gl.max(gl.reshape(gl.where(rows < seqlen_q, top, NEG_INF), [4, 16]), axis=1)
    heads = gl.full([4], item % sizes.num_heads, gl.int32, top.type.layout)
    gl.atomic_max(max_ptr + heads, top * LN2, sem="relaxed")


@gluon.jit
def sink_weight(sink, shift):
    """2^(sink - shift); 1 if they are equal, also if both are +inf."""
    return gl.where(sink == shift, 1.0, exp2(sink - shift))


@gluon.jit
def finish_rows(row_ref, row_sum, sinks_ptr, item, sizes, C: gl.constexpr):
    """(factor that normalises O, lse) of finished rows; a row without keys gets 0 and -inf."""
    if C.HAS_SINKS:
        sink = load_sink(sinks_ptr, item, sizes)
        top = gl.maximum(row_ref, sink)
        shift = gl.where(top == NEG_INF, 0.0, top)
        weight = exp2(row_ref - shift)
        total = row_sum * weight + sink_weight(sink, shift)
    else:
        shift = row_ref
        weight = 1.0
        total = row_sum
    empty = total == 0.0
    factor = gl.where(empty, 0.0, weight / total)
    lse = gl.where(empty, NEG_INF, (shift + gl.log2(total)) * LN2)
    return factor, lse
