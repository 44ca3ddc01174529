"""The end of an item in decoding: store its rows, or store a part; the CTA that arrives last merges the parts."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.decode_fp8 import value_column
from tilewise.backends.hopper.layouts import accumulator_layout
from tilewise.backends.hopper.primitives import LN2, LOG2E, NEG_INF, exp2
from tilewise.backends.hopper.scores import sink_weight

__all__ = ["merge_parts", "place_rows", "store_item", "store_part"]


@gluon.jit
def place_rows(rows, batch_idx, q_start, token, head, C: gl.constexpr):
    """Offsets of the rows of (token, head) in a tensor given as (pointer, stride of a sequence, head, token)."""
    at = head.to(gl.int64) * rows[2] + token * rows[3]
    if C.PACKED_ROWS:
        return at + q_start.to(gl.int64) * rows[3]
    else:
        return at + batch_idx.to(gl.int64) * rows[1]


@gluon.jit
def finish(top, total, heads, sinks_ptr, C: gl.constexpr):
    """(factor that normalises O, lse) of rows from their maximum (log2 units) and sum; rows without keys: 0, -inf."""
    weight = 1.0
    if C.HAS_SINKS:
        sink = gl.load(sinks_ptr + heads).to(gl.float32) * LOG2E
        new_top = gl.maximum(top, sink)
        shift = gl.where(new_top == NEG_INF, 0.0, new_top)
        weight = exp2(top - shift)
        total = total * weight + sink_weight(sink, shift)
        top = new_top
    empty = total == 0.0
    factor = gl.where(empty, 0.0, weight / gl.where(empty, 1.0, total))
    lse = gl.where(empty, NEG_INF, (top + gl.log2(gl.where(empty, 1.0, total))) * LN2)
    return factor, lse


@gluon.jit
def store_item(acc, top, total, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q, head, C: gl.constexpr):
    """Write the rows of an item that is finished in this share."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT))
    cols = value_column(gl.arange(0, C.DV, gl.SliceLayout(1, LAYOUT)), C)
    token = rows // C.GROUP_SIZE
    heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
    ok = token < seqlen_q
    factor, lse_rows = finish(top, total, heads, sinks_ptr, C)
    offsets = place_rows(out, batch_idx, q_start, token, heads, C)
    values = (acc * factor[None, :]).to(out[0].dtype.element_ty)
    gl.store(out[0] + offsets[None, :] + cols[:, None], values, mask=ok[None, :] & (cols < C.HEAD_DIM_V)[:, None])
    gl.store(lse[0] + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)


@gluon.jit
def store_part(acc, top, total, parts_ptr, stats_ptr, part, C: gl.constexpr):
    """Store this share's part of an item in the workspace: O row by row, and [maxima | sums]."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT))
    cols = value_column(gl.arange(0, C.DV, gl.SliceLayout(1, LAYOUT)), C)
    gl.store(parts_ptr + part * (C.ROWS * C.DV) + (rows * C.DV)[None, :] + cols[:, None], acc)
    gl.store(stats_ptr + part * (2 * C.ROWS) + rows, top)
    gl.store(stats_ptr + part * (2 * C.ROWS) + C.ROWS + rows, total)


@gluon.jit
def merge_parts(
    parts_ptr, stats_ptr, first, count, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q, head, C: gl.constexpr
):
    """Merge an item's parts and write its rows. The parts come from `count` programs from `first` on: the second part
    of that program (its share ends inside this item), then the first part of each other one.
    """
    ROWS: gl.constexpr = C.MERGED_ROWS
    DV: gl.constexpr = C.DV
    PARTS: gl.constexpr = C.MERGED_PARTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([PARTS, 1, C.DV // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    rows = gl.arange(0, ROWS, ROW)
    cols = gl.arange(0, DV, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    ok = rows // C.GROUP_SIZE < seqlen_q
    acc = gl.zeros([ROWS, DV], gl.float32, FLAT)
    top = gl.full([ROWS], NEG_INF, gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    for begin in range(0, count, PARTS):
        number = begin + gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        part = 2 * (first + number) + gl.where(number == 0, 1, 0)
        there = (number < count)[:, None] & ok[None, :]
        stats = stats_ptr + (part * (2 * C.ROWS))[:, None] + rows[None, :]
        tops = gl.load(stats, mask=there, other=NEG_INF, cache_modifier=".cg")
        totals = gl.load(stats + C.ROWS, mask=there, other=0.0, cache_modifier=".cg")
        places = (part * (C.ROWS * DV))[:, None] + (rows * DV)[None, :]
        values = gl.load(
            parts_ptr + places[:, :, None] + cols[None, None, :], mask=there[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = gl.maximum(top, gl.max(tops, axis=0))
        shift = gl.where(new_top == NEG_INF, 0.0, new_top)
        weights = exp2(tops - shift[None, :])
        alpha = exp2(top - shift)
        total = total * alpha + gl.sum(totals * weights, axis=0)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, FLAT))[:, None]
        acc = acc + gl.sum(values * weights[:, :, None], axis=0)
        top = new_top
    # The same rows and columns, in the layout of `acc`.
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    cols = gl.arange(0, DV, gl.SliceLayout(0, FLAT))
    top = gl.convert_layout(top, gl.SliceLayout(1, FLAT))
    total = gl.convert_layout(total, gl.SliceLayout(1, FLAT))
    token = rows // C.GROUP_SIZE
    ok = token < seqlen_q
    heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
    factor, lse_rows = finish(top, total, heads, sinks_ptr, C)
    offsets = place_rows(out, batch_idx, q_start, token, heads, C)
    values = (acc * factor[:, None]).to(out[0].dtype.element_ty)
    gl.store(out[0] + offsets[:, None] + cols[None, :], values, mask=ok[:, None] & (cols < C.HEAD_DIM_V)[None, :])
    gl.store(lse[0] + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)
