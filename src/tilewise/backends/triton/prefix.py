"""Shared prefixes: attends the rows of a group of sequences to the pages that all of them start with, split over
programs, then merges with each row's result over its own keys.

Grid of the first kernel: (tile of rows, split, K/V head, group), tiles fastest, so that concurrent programs read the
same keys. A row is a (token, head of a K/V head's group) pair: all query heads of a K/V head share its tiles. Few
splits are merged with the rows' own results by the program that finishes a tile's last split; many are merged by a
separate kernel with more programs. Both merge split by split in the order of the keys, so results are repeatable.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.forward import attend, empty_accumulator, finish, initial_state
from tilewise.backends.triton.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    key_span,
    page_base,
    query_span,
    score_terms,
)
from tilewise.backends.triton.quantised import load_query_columns, scaling

__all__ = ["merge_prefix_kernel", "prefix_kernel"]

# What the last program of a tile merges at a time, bounded by registers.
SPLITS_AT_ONCE, MERGED_ROWS = tl.constexpr(4), tl.constexpr(16)


@triton.jit(do_not_specialize=["page_rows", "sizes", "band", "scalars", "num_rows", "num_blocks", "num_splits"])
def prefix_kernel(
    q, k, v, k_scale, v_scale, k_desc, v_desc, page_rows, rows, out, lse, out_parts, lse_parts, counters, lengths,
    sizes, band, scalars, num_rows, num_blocks, num_splits,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial (out, lse) of a tile of a group's rows over one split of its prefix, as (split, row, head). `rows`
    indexes rows of q, group after group; None means its first rows. A page takes page_rows (of K, of V) rows of the
    descriptors' matrices, if there are any. With `counters`, which are zero before and after, the program that finishes
    the last split of a tile merges all its splits into `out` and `lse`.
    """
    num_kv_heads = sizes.num_heads // T.GROUP_SIZE
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(0) // num_blocks % num_splits
    kv_head = tl.program_id(0) // num_blocks // num_splits % num_kv_heads
    group = tl.program_id(0) // num_blocks // num_splits // num_kv_heads
    start, count = query_span(lengths, sizes, group, T)
    if block * BLOCK_M >= count * T.GROUP_SIZE:
        return
    _, seqlen_k = key_span(lengths, sizes, group, T)
    place_in_group = block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_idx = place_in_group // T.GROUP_SIZE
    head = kv_head * T.GROUP_SIZE + place_in_group % T.GROUP_SIZE
    row_ok = m_idx < count
    token = start + m_idx
    row = token
    if rows is not None:
        row = tl.load(rows + token, mask=row_ok, other=0)
    q_rows = q.ptr + head.to(tl.int64) * q.stride_head + row.to(tl.int64) * q.stride_row
    table = lengths.block_table + tl.cast(group, tl.int64) * lengths.table_stride
    k_col = kv_head * k.stride_head
    v_col = kv_head * v.stride_head
    k_source = (k, page_base(k, kv_head), table, k_desc, page_rows[0], k_col, scaling(k_scale, group, kv_head, T))
    v_source = (v, page_base(v, kv_head), table, v_desc, page_rows[1], v_col, scaling(v_scale, group, kv_head, T))
    if T.FP8:
        q_tile = load_query_columns(None, q_rows, group, head, m_idx, row_ok, T)
    else:
        d_idx = tl.arange(0, T.BLOCK_D)[None, :]
        q_tile = tl.load(q_rows[:, None] + d_idx, mask=row_ok[:, None] & (d_idx < T.HEAD_DIM), other=0.0)
    terms = score_terms(None, None, None, None, group, head[:, None], m_idx[:, None], count, T)
    row_max, row_sum = initial_state(None, head, False, scalars, BLOCK_M, T)
    tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    share = (tiles + num_splits - 1) // num_splits * BLOCK_N
    begin = tl.minimum(split * share, seqlen_k)
    end = tl.minimum(begin + share, seqlen_k)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = attend(
        empty_accumulator(BLOCK_M, T), row_max, row_sum, q_tile, k_source, v_source, (m_idx, head, group), terms,
        scalars, band, count, seqlen_k, begin, whole, whole, whole, False, BLOCK_N, T
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, k_source, v_source, (m_idx, head, group), terms, scalars, band, count, seqlen_k,
        whole, whole, whole, end, True, BLOCK_N, T
    )  # fmt: skip
    result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
    dv_idx = tl.arange(0, T.BLOCK_DV)[None, :]
    part = (split * num_rows + token).to(tl.int64) * sizes.num_heads + head
    tl.store(out_parts + part[:, None] * T.HEAD_DIM_V + dv_idx, result, mask=row_ok[:, None] & (dv_idx < T.HEAD_DIM_V))
    tl.store(lse_parts + part, lse_rows, mask=row_ok)
    if counters is not None:
        counter = counters + (group * num_kv_heads + kv_head) * num_blocks + block
        tl.debug_barrier()  # all threads' parts are written before one of them signals it
        if tl.atomic_add(counter, 1) == num_splits - 1:
            tl.store(counter, 0)
            # Fewer rows at a time than were attended, to limit registers.
            for place in tl.range(block * BLOCK_M, (block + 1) * BLOCK_M, MERGED_ROWS):
                merge_pairs(
                    rows, out, lse, out_parts, lse_parts, start, count, place + tl.arange(0, MERGED_ROWS), kv_head,
                    sizes.num_heads, num_rows, num_splits, T, MAX_SPLITS
                )  # fmt: skip


@triton.jit
def merge_pairs(
    rows, out, lse, out_parts, lse_parts, start, count, place, kv_head, num_heads, num_rows, num_splits,
    T: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of these (row, head) pairs of a group into their results over their own keys. Like
    `merge_prefix_kernel`, which takes one pair per program and several splits at a time.
    """
    m_idx = place // T.GROUP_SIZE
    head = kv_head * T.GROUP_SIZE + place % T.GROUP_SIZE
    row_ok = m_idx < count
    row = start + m_idx
    first = row.to(tl.int64) * num_heads + head
    step = tl.cast(num_rows, tl.int64) * num_heads
    if rows is not None:
        row = tl.load(rows + row, mask=row_ok, other=0)
    every = tl.arange(0, MAX_SPLITS)[:, None]
    there = (every < num_splits) & row_ok[None, :]
    # Other programs wrote these: load them from L2, like all parts.
    logs = tl.load(lse_parts + every * step + first[None, :], mask=there, other=NEG_INF, cache_modifier=".cg")
    lse_rows = lse.ptr + head * lse.stride_head + row.to(tl.int64) * lse.stride_row
    own_log = tl.load(lse_rows, mask=row_ok, other=NEG_INF)
    top = tl.maximum(tl.max(logs, 0), own_log)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    own_weight = tl.exp2((own_log - anchor) * LOG2E)
    total = own_weight + tl.sum(tl.exp2((logs - anchor[None, :]) * LOG2E), 0)
    d_idx = tl.arange(0, T.BLOCK_DV)[None, :]
    ok = row_ok[:, None] & (d_idx < T.HEAD_DIM_V)
    here = out.ptr + (head * out.stride_head + row.to(tl.int64) * out.stride_row)[:, None] + d_idx
    own = tl.load(here, mask=ok, other=0.0).to(tl.float32)
    acc = tl.where((own_weight != 0.0)[:, None], own, 0.0) * own_weight[:, None]
    for begin in tl.range(0, num_splits, SPLITS_AT_ONCE):
        for i in tl.static_range(SPLITS_AT_ONCE):
            here_ok = row_ok & (begin + i < num_splits)
            part = (begin + i) * step + first
            log = tl.load(lse_parts + part, mask=here_ok, other=NEG_INF, cache_modifier=".cg")
            weight = tl.exp2((log - anchor) * LOG2E)[:, None]
            places = out_parts + part[:, None] * T.HEAD_DIM_V + d_idx
            # Loaded unconditionally: a load that depended on the weights would wait twice.
            values = tl.load(places, mask=here_ok[:, None] & ok, other=0.0, cache_modifier=".cg")
            acc += tl.where(weight != 0.0, values, 0.0) * weight
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(here, result.to(out.ptr.dtype.element_ty), mask=ok)
    tl.store(lse_rows, tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2), mask=row_ok)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_splits"])
def merge_prefix_kernel(
    out, lse, out_parts, lse_parts, rows, num_rows, num_heads, num_splits,
    T: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a (row, head) pair into its result over its own keys. Grid: row * num_heads.

    Parts without weight are selected away, because 0 * NaN is NaN.
    """
    pair = tl.program_id(0).to(tl.int64)
    head = pair % num_heads
    row = pair // num_heads
    if rows is not None:
        row = tl.load(rows + row)
    pairs = tl.cast(num_rows, tl.int64) * num_heads
    every = tl.arange(0, MAX_SPLITS)
    logs = tl.load(lse_parts + every * pairs + pair, mask=every < num_splits, other=NEG_INF)
    lse_row = lse.ptr + head * lse.stride_head + row * lse.stride_row
    own_log = tl.load(lse_row)
    top = tl.maximum(tl.max(logs, 0), own_log)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    own_weight = tl.exp2((own_log - anchor) * LOG2E)
    total = own_weight + tl.sum(tl.exp2((logs - anchor) * LOG2E), 0)
    d_idx = tl.arange(0, T.BLOCK_DV)
    column_ok = d_idx < T.HEAD_DIM_V
    here = out.ptr + head * out.stride_head + row * out.stride_row + d_idx
    own = tl.load(here, mask=column_ok, other=0.0).to(tl.float32)
    acc = tl.where(own_weight != 0.0, own, 0.0) * own_weight
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        part = split * pairs + pair
        logs_here = tl.load(lse_parts + part, mask=split < num_splits, other=NEG_INF)
        weights = tl.exp2((logs_here - anchor) * LOG2E)
        places = out_parts + part[:, None] * T.HEAD_DIM_V + d_idx[None, :]
        values = tl.load(places, mask=(weights != 0.0)[:, None] & column_ok[None, :], other=0.0)
        acc += tl.sum(values * weights[:, None], 0)
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)
    tl.store(here, result.to(out.ptr.dtype.element_ty), mask=column_ok)
    tl.store(lse_row, tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2))
