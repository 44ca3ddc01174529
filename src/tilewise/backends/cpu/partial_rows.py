"""Merge rows of a partial result over other keys into a result, in place. A work item is a few rows."""

from __future__ import annotations

from tilewise.backends.cpu import launch_partial_rows as f
from tilewise.backends.cpu.compiler import driver, kernel
from tilewise.backends.cpu.emit import Emitter, Value
from tilewise.backends.cpu.intrinsics import atomic_add, exp2, field, load_f32, load_i64, log2, store_f32
from tilewise.backends.cpu.packing import emit_mix
from tilewise.numerics import LOG2E

__all__ = ["merge_rows"]

MINUS_INF = float("-inf")
LOG2E_F32, LN2 = float(LOG2E), float(1.0 / LOG2E)


@kernel("iiiiff")
def mix_row(e: Emitter, out: Value, part: Value, dim: Value, dtype: Value, keep: Value, share: Value) -> None:
    """out[dim] = keep * out + share * part[dim], both of a dtype: see `emit_mix`."""
    emit_mix(e, out, part, dim, dtype, keep, share, None)


@driver
def merge_row(p: int, row: int, target: int) -> None:
    """All heads of one row. A side without keys has lse -inf; its row counts as 0, even if it holds NaN."""
    for head in range(field(p, f.NUM_HEADS)):
        lse_at = field(p, f.LSE) + head * field(p, f.LSE_HEAD) + 4 * target
        mine, other = load_f32(lse_at), load_f32(field(p, f.PART_LSE) + head * field(p, f.PART_LSE_HEAD) + 4 * row)
        out = field(p, f.OUT) + target * field(p, f.OUT_ROW) + head * field(p, f.OUT_HEAD)
        part = field(p, f.PART) + row * field(p, f.PART_ROW) + head * field(p, f.PART_HEAD)
        if other == MINUS_INF:
            if mine == MINUS_INF:
                mix_row(out, part, field(p, f.DIM), field(p, f.DTYPE), 0.0, 0.0)
            continue
        top = max(mine, other)
        keep, share = exp2((mine - top) * LOG2E_F32), exp2((other - top) * LOG2E_F32)
        total = keep + share
        store_f32(lse_at, top + log2(total) * LN2)
        mix_row(out, part, field(p, f.DIM), field(p, f.DTYPE), keep / total, share / total)


@driver
def merge_rows(p: int) -> None:
    """The entry point of each thread: take items until none is left."""
    rows, names = field(p, f.NUM_ROWS), field(p, f.ROWS)
    while True:
        first = atomic_add(p + 8 * f.BLOCK_FIELDS + f.NEXT_ITEM, f.ROWS_PER_ITEM)
        if first >= rows:
            break
        for row in range(first, min(rows, first + f.ROWS_PER_ITEM)):
            merge_row(p, row, load_i64(names + 8 * row) if names != 0 else row)
