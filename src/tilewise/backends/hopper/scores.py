"""Between the two products: softcap, mask, row sums, and the end of a row."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import LN2, LOG2E, NEG_INF, exp2, tanh
from tilewise.backends.hopper.schedule import right_of

__all__ = ["capped", "finish_rows", "mask_scores", "sum_rows", "through_cap"]


@gluon.jit
def capped(scores, cap_scale, C: gl.constexpr):
    """tanh(S * scale / softcap); the softmax scale is softcap then."""
    if C.HAS_SOFTCAP:
        return tanh(scores * cap_scale)
    else:
        return scores


@gluon.jit
def through_cap(p, capped_scores, C: gl.constexpr):
    """P times the softcap's derivative 1 - tanh^2: what dS = P (dP - delta) needs in P's place, in P's registers."""
    if C.HAS_SOFTCAP:
        return p * (1.0 - capped_scores * capped_scores)
    else:
        return p


@gluon.jit
def mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """-inf for keys past the end, right of the band or left of it; row is the warpgroup's first query."""
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
        first = rows + (row + seqlen_k - seqlen_q - sizes.window_left - col)
        scores = gl.where(cols[None, :] >= first[:, None], scores, NEG_INF)
    return scores


@gluon.jit
def sum_rows(p, C: gl.constexpr):
    """Row sums; SPLIT_SUM leaves the four threads that share a row apart ([64, 4]) and so needs no shuffle."""
    if C.SPLIT_SUM:
        return gl.sum(gl.sum(gl.reshape(p, [64, C.BLOCK_N // 8, 4, 2]), axis=3), axis=1)
    else:
        return gl.sum(p, axis=1)


@gluon.jit
def finish_rows(row_max, row_sum, sinks_ptr, item, scale_log2, sizes, C: gl.constexpr):
    """(factor that normalises O, lse) of finished rows; a row that saw nothing gets 0 and -inf."""
    if C.HAS_SINKS:
        sink = gl.load(sinks_ptr + item % sizes.num_heads).to(gl.float32) * LOG2E
        top = gl.maximum(row_max * scale_log2, sink)
        shift = gl.where(top == NEG_INF, 0.0, top)
        weight = exp2(row_max * scale_log2 - shift)
        total = row_sum * weight + exp2(sink - shift)
    else:
        shift = row_max * scale_log2
        weight = 1.0
        total = row_sum
    empty = total == 0.0
    factor = gl.where(empty, 0.0, weight / total)
    lse = gl.where(empty, NEG_INF, (shift + gl.log2(total)) * LN2)
    return factor, lse
