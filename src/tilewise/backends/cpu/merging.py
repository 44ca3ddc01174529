"""The end of a work item: normalise its rows and write them, or store a partial result that the last chunk merges.

A block of results is `acc[BLOCK_M][DIM_V_PADDED]`, then `row_max[BLOCK_M]` (log2 units), then `row_sum[BLOCK_M]`, all
fp32.
"""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.compiler import driver
from tilewise.backends.cpu.intrinsics import (
    atomic_add,
    exp2,
    field,
    fma,
    load_f32,
    load_i64,
    log2,
    scalar_bits,
    store_f32,
)
from tilewise.backends.cpu.packing import add_compensated, copy_rows, fill, mix_sums, store_row
from tilewise.backends.cpu.schedule import fold_keys
from tilewise.backends.cpu.scoring import q_length, q_start
from tilewise.numerics import LOG2E

MINUS_INF = float("-inf")
# Sums over keys are fp32. After this many keys they are folded into totals with compensated summation.
FOLD_KEYS = fold_keys()
LOG2E_F32, LN2 = float(LOG2E), float(1.0 / LOG2E)


@driver
def natural(p: int, top: float, rest: float) -> float:
    """(top + rest) from log2 units to natural ones, with a factor of twice the precision of fp32."""
    high, low = scalar_bits(field(p, f.LSE_HIGH)), scalar_bits(field(p, f.LSE_LOW))
    return fma(top, high, fma(rest, high, top * low))


@driver
def work_in(p: int, head: int, row: int, source: int, inverse: float, lse: float) -> None:
    """Merge a row of packed results into the stored result over other keys. A side without keys has lse -inf."""
    target = load_i64(field(p, f.MERGED_ROWS) + 8 * row) if field(p, f.MERGED_ROWS) != 0 else row
    lse_at = field(p, f.LSE) + head * field(p, f.LSE_HEAD) + 4 * target
    mine = load_f32(lse_at)
    # A NaN row stays NaN.
    if lse == MINUS_INF or not mine >= MINUS_INF:
        return
    top, keep, share = max(mine, lse), lse, lse
    if lse > MINUS_INF:
        # The larger side has weight 1, even if it is infinite.
        keep = 1.0 if mine == top else exp2((mine - top) * LOG2E_F32)
        share = 1.0 if lse == top else exp2((lse - top) * LOG2E_F32)
    total = keep + share
    store_f32(lse_at, top + log2(total) * LN2 if lse > MINUS_INF else lse)
    out = field(p, f.OUT) + target * field(p, f.OUT_ROW) + head * field(p, f.OUT_HEAD)
    mix_sums(out, source, field(p, f.HEAD_DIM_V), field(p, f.DTYPE), keep / total, share / total * inverse)


@driver
def finish_rows(p: int, batch: int, head: int, first_row: int, count: int, block: int) -> None:
    """Fold the sinks in, divide by the row sums, and write out and lse, or merge them into existing results. A row
    without keys or sink gives 0 and -inf.
    """
    width, q_len, start = field(p, f.DIM_V_PADDED), q_length(p, batch), q_start(p, batch)
    maxima = block + 4 * field(p, f.BLOCK_M) * width
    sums = maxima + 4 * field(p, f.BLOCK_M)
    out_base = field(p, f.OUT) + batch * field(p, f.OUT_BATCH) + start * field(p, f.OUT_ROW)
    lse_base = field(p, f.LSE) + batch * field(p, f.LSE_BATCH) + 4 * start
    row = first_row
    for r in range(count):
        if row == q_len:
            row = 0
            head += 1
        top, total, factor = load_f32(maxima + 4 * r), load_f32(sums + 4 * r), 1.0
        # A NaN sum stays NaN: -inf would mean that there are no keys, and a merge would ignore the row.
        lse = natural(p, top, log2(total)) if total > 0.0 else (MINUS_INF if total == 0.0 else total)
        if field(p, f.LARGEST) != 0:
            largest = natural(p, top, 0.0) if top > MINUS_INF else (MINUS_INF if total == 0.0 else total)
            at = field(p, f.LARGEST) + batch * field(p, f.LSE_BATCH) + 4 * start
            store_f32(at + head * field(p, f.LSE_HEAD) + 4 * row, largest)
        if field(p, f.SINKS) != 0:
            sink = load_f32(field(p, f.SINKS) + 4 * head)
            new_top = max(top, sink * LOG2E_F32)
            if new_top > MINUS_INF:
                factor = exp2(top - new_top)
                # The largest logit has weight 1, even if it is infinite.
                total = total * factor + (1.0 if new_top > top else exp2(sink * LOG2E_F32 - new_top))
                # If the sink is the largest logit, lse is the sink plus a small term: do not convert through log2
                # units.
                rest = log2(total)
                lse = natural(p, top, rest) if new_top == top else fma(rest, scalar_bits(field(p, f.LSE_HIGH)), sink)
            if not sink >= MINUS_INF:  # NaN, which max() and exp2() ignore
                total, lse = sink, sink
        inverse = factor / total if total > 0.0 else (0.0 if total == 0.0 else total)
        if field(p, f.IS_MERGED) != 0:
            work_in(p, head, start + row, block + 4 * r * width, inverse, lse)
        else:
            out = out_base + head * field(p, f.OUT_HEAD) + row * field(p, f.OUT_ROW)
            store_row(block + 4 * r * width, field(p, f.HEAD_DIM_V), out, field(p, f.DTYPE), inverse)
            store_f32(lse_base + head * field(p, f.LSE_HEAD) + 4 * row, lse)
        row += 1


@driver
def begin_rows(p: int, block: int, acc: int, padded: int) -> None:
    """Initial state of a block of `padded` rows whose sums are at `acc`: no key seen."""
    maxima = block + 4 * field(p, f.BLOCK_M) * field(p, f.DIM_V_PADDED)
    fill(acc, padded * field(p, f.DIM_V_PADDED), 0.0)
    fill(maxima, padded, MINUS_INF)
    fill(maxima + 4 * field(p, f.BLOCK_M), padded, 0.0)


@driver
def begin_totals(p: int, ws: int, padded: int) -> None:
    """Initial totals of a block of `padded` rows, if it has any."""
    if field(p, f.WS_TOTAL) != 0:
        total, carry = ws + field(p, f.WS_TOTAL), ws + field(p, f.WS_CARRY)
        begin_rows(p, total, total, padded)
        fill(carry, padded * field(p, f.DIM_V_PADDED), 0.0)
        fill(carry + 4 * field(p, f.BLOCK_M) * field(p, f.DIM_V_PADDED), padded, 0.0)


@driver
def fold_rows(p: int, ws: int, count: int) -> None:
    """Fold the block's sums over its last keys into its totals."""
    width, block_m = field(p, f.DIM_V_PADDED), field(p, f.BLOCK_M)
    block, total, carry = ws + field(p, f.WS_ACC), ws + field(p, f.WS_TOTAL), ws + field(p, f.WS_CARRY)
    maxima = 4 * block_m * width
    sums = maxima + 4 * block_m
    for r in range(count):
        at, mine, theirs = 4 * r * width, load_f32(block + maxima + 4 * r), load_f32(total + maxima + 4 * r)
        top, mine_sum, old = max(mine, theirs), load_f32(block + sums + 4 * r), load_f32(total + sums + 4 * r)
        if top > MINUS_INF:
            share = 1.0 if mine == top else exp2(mine - top)
            keep = 1.0 if theirs == top else exp2(theirs - top)
            add_compensated(total + at, carry + at, block + at, width, keep, share)
            old = old * keep
            added = fma(mine_sum, share, -load_f32(carry + maxima + 4 * r) * keep)
            store_f32(carry + maxima + 4 * r, old + added - old - added)
            store_f32(total + sums + 4 * r, old + added)
            store_f32(total + maxima + 4 * r, top)
        else:
            # No keys, so both sums are 0; or NaN in one of them, which the row keeps.
            store_f32(total + sums + 4 * r, old + mine_sum)
            fill(total + at, width, old + mine_sum)


@driver
def merge_chunks(
    p: int, ws: int, block: int, item: int, batch: int, head: int, first_row: int, count: int, chunk: int, chunks: int
) -> None:
    """Store this chunk's block among the partial results. The last chunk to arrive adds them up in order."""
    width, block_m, units = field(p, f.DIM_V_PADDED), field(p, f.BLOCK_M), field(p, f.UNITS)
    first_slot = field(p, f.PARTIALS) + (item - chunk * units) * field(p, f.PARTIAL_BYTES)
    step = units * field(p, f.PARTIAL_BYTES)
    maxima = 4 * block_m * width
    sums = maxima + 4 * block_m
    copy_rows(block, first_slot + chunk * step, count * width)
    copy_rows(block + maxima, first_slot + chunk * step + maxima, 2 * block_m)
    if atomic_add(field(p, f.DONE) + 8 * (item - chunk * units), 1) + 1 < chunks:
        return
    fill(block, count * width, 0.0)
    carry = ws + field(p, f.WS_STAGE)
    for r in range(count):
        fill(carry, width, 0.0)
        lost, top = 0.0, MINUS_INF
        for c in range(chunks):
            top = max(top, load_f32(first_slot + c * step + maxima + 4 * r))
        total = 0.0
        if top > MINUS_INF:
            for c in range(chunks):
                part = first_slot + c * step
                weight = exp2(load_f32(part + maxima + 4 * r) - top)
                added = fma(weight, load_f32(part + sums + 4 * r), -lost)
                lost = total + added - total - added
                total = total + added
                add_compensated(block + 4 * r * width, carry, part + 4 * r * width, width, 1.0, weight)
        else:
            # No keys, so every sum is 0; or NaN in all of them, which the row keeps.
            for c in range(chunks):
                total += load_f32(first_slot + c * step + sums + 4 * r)
            fill(block + 4 * r * width, width, total)
        store_f32(block + maxima + 4 * r, top)
        store_f32(block + sums + 4 * r, total)
    finish_rows(p, batch, head, first_row, count, block)
