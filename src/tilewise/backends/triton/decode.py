"""Decode: few query tokens against many keys (split-KV). A second kernel merges the partial results.

Grid: (tile of rows, split, K/V head, sequence), tiles fastest, so that concurrent programs read the same keys. A row is
a (token, head of a K/V head's group) pair, so each K/V tile is read once for all heads of a group. Of a latent, whose
first columns are the values, a tile is also read once for K and V. The number of splits depends on shapes and device
only, so results are repeatable.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import Parts, QueryTile, Source, Stretch
from tilewise.backends.triton.forward import (
    add_sink,
    attend,
    empty_accumulator,
    finish,
    initial_state,
    load_query_rows,
    natural_max,
    with_endless_sinks,
)
from tilewise.backends.triton.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    box_place,
    head_base,
    key_base,
    key_range,
    key_span,
    page_table,
    query_span,
    score_terms,
)
from tilewise.backends.triton.quantised import load_query_columns, scaling


@triton.jit(do_not_specialize=["sizes", "window", "scalars", "num_splits", "num_blocks"])
def decode_kernel(
    q, k, v, k_desc, tail_desc, scales, out, lse, max_logits, out_parts, lse_parts, terms, sinks, lengths, paging,
    sizes, window, scalars, num_splits, num_blocks,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one split of the keys for a tile of rows of a (group of heads, sequence); final unless SPLIT.
    `num_blocks` tiles hold the rows of the longest sequence; None: one does. `k_desc` and `tail_desc` are boxes of
    both parts of K in pages, or None.
    """
    num_kv_heads = sizes.num_heads // T.GROUP_SIZE
    program = tl.program_id(0)
    first_row = program * 0
    if num_blocks is not None:
        first_row = program % num_blocks * BLOCK_M
        program = program // num_blocks
    split = program % num_splits
    kv_head = program // num_splits % num_kv_heads
    batch_idx = program // num_splits // num_kv_heads
    q_start, seqlen_q = query_span(lengths, sizes, batch_idx, T)
    k_start, seqlen_k = key_span(lengths, sizes, batch_idx, T)
    if num_blocks is not None:
        if first_row >= seqlen_q * T.GROUP_SIZE:
            return
    rows = first_row + tl.arange(0, BLOCK_M)
    m_idx = rows // T.GROUP_SIZE
    head = kv_head * T.GROUP_SIZE + rows % T.GROUP_SIZE
    row_ok = m_idx < seqlen_q
    q_rows = head_base(q, batch_idx, head, q_start, T.PACKED_Q) + m_idx.to(tl.int64) * q.stride_row
    table = page_table(paging, batch_idx, T)
    k_base, v_base = key_base(k, batch_idx, kv_head, k_start, T), key_base(v, batch_idx, kv_head, k_start, T)
    k_scaling, v_scaling = scaling(scales.k, batch_idx, kv_head, T), scaling(scales.v, batch_idx, kv_head, T)
    if k_desc is None:
        k_source = Source(k, k_base, table, None, None, k_scaling)
    else:
        key_place = box_place(batch_idx, kv_head, k_start, seqlen_k, False)
        k_source = Source(k, k_base, table, Parts(k_desc, tail_desc), key_place, k_scaling)
    v_source = Source(v, v_base, table, None, None, v_scaling)
    if T.FP8:
        q_tile = load_query_columns(scales.q, q_rows, batch_idx, head, m_idx, row_ok, T)
    else:
        q_tile = load_query_rows(q_rows, row_ok, T)
    # A sequence without queries reads the first row of bias and mask, not the one before it.
    last = tl.maximum(seqlen_q, 1)
    row_terms = score_terms(terms, batch_idx, head[:, None], m_idx[:, None], last, T)
    place = QueryTile(first_row, m_idx, head, batch_idx)
    acc = empty_accumulator(BLOCK_M, T)
    if max_logits is not None:
        row_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max, row_sum = initial_state(sinks, head, split == 0, scalars, BLOCK_M, T)
    if BLOCK_M <= 32:
        # The warps share the keys of so small a tile. Per-column sums save two barriers per tile.
        row_sum = tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, row_sum[:, None], 0.0)

    # The most tokens that a tile has rows of; one more where tiles may start between two heads of a token.
    BETWEEN: tl.constexpr = BLOCK_M % T.GROUP_SIZE != 0 and T.GROUP_SIZE % BLOCK_M != 0
    TOKENS: tl.constexpr = (BLOCK_M + T.GROUP_SIZE - 1) // T.GROUP_SIZE + (1 if BETWEEN else 0)
    begin, full_begin, full_end, end = key_range(
        first_row // T.GROUP_SIZE, seqlen_q, seqlen_k, window, TOKENS, BLOCK_N, T
    )
    tiles = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
    share = (tiles + num_splits - 1) // num_splits * BLOCK_N
    if SPLIT_KEYS > 0:
        share = SPLIT_KEYS
    lo = begin + split * share
    hi = tl.minimum(lo + share, end)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k,
        Stretch(tl.maximum(lo, full_begin), tl.minimum(hi, full_end), hi, hi), False, BLOCK_N, T
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, k_source, v_source, place, row_terms, scalars, window, seqlen_q, seqlen_k,
        Stretch(lo, tl.maximum(lo, tl.minimum(hi, full_begin)), tl.maximum(lo, full_end), hi), True, BLOCK_N, T
    )  # fmt: skip

    if max_logits is not None:
        tl.atomic_max(max_logits + head, natural_max(row_max, scalars, T), mask=row_ok, sem="relaxed")
        if T.HAS_SINKS:
            acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sinks, head, split == 0, scalars, BLOCK_M, T)
    result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
    dv_idx = tl.arange(0, T.BLOCK_DV)
    tile_ok = row_ok[:, None] & (dv_idx[None, :] < T.HEAD_DIM_V)
    if SPLIT:
        # Row of the (split, token, head) partials; tokens are numbered through all sequences.
        token = q_start + m_idx
        if not T.PACKED_Q:
            token = batch_idx * sizes.seqlen_q + m_idx
        part = ((split * sizes.total_q + token).to(tl.int64)) * sizes.num_heads + head
        if SPLIT_KEYS > 0:  # most splits of a short sequence are empty: their results are not read
            tile_ok = tile_ok & (lse_rows != NEG_INF)[:, None]
        tl.store(out_parts + part[:, None] * T.HEAD_DIM_V + dv_idx[None, :], result, mask=tile_ok)
        tl.store(lse_parts + part, lse_rows, mask=row_ok)
    else:
        out_rows = head_base(out, batch_idx, head, q_start, T.PACKED_Q) + m_idx.to(tl.int64) * out.stride_row
        tl.store(out_rows[:, None] + dv_idx[None, :], result.to(out.ptr.dtype.element_ty), mask=tile_ok)
        lse_at = head_base(lse, batch_idx, head, q_start, T.PACKED_Q) + m_idx * lse.stride_row
        tl.store(lse_at, with_endless_sinks(lse_rows, T), mask=row_ok)


@triton.jit
def merged_at_once(
    out_parts, lse_parts, token, head, count, total_q, num_heads,
    MAX_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """(sum of the parts, the largest lse, sum of the weights) of a (token, head); all lse are read first."""
    every = part_logs(lse_parts, 0, count, token, head, total_q, num_heads, MAX_SPLITS)
    top = tl.max(every, 0)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    total = tl.sum(tl.exp2((every - anchor) * LOG2E), 0)
    BLOCK_DV: tl.constexpr = T.BLOCK_DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    d_idx = tl.arange(0, BLOCK_DV)
    for first in tl.range(0, count, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        logs = part_logs(lse_parts, first, count, token, head, total_q, num_heads, BLOCK_SPLITS)
        weights = tl.exp2((logs - anchor) * LOG2E)
        part = (splits.to(tl.int64) * total_q + token) * num_heads + head
        parts = tl.load(
            out_parts + part[:, None] * T.HEAD_DIM_V + d_idx[None, :],
            mask=(splits < count)[:, None] & (d_idx[None, :] < T.HEAD_DIM_V),
            other=0.0,
        )
        acc += tl.sum(parts * weights[:, None], 0)
    return acc, anchor, total


@triton.jit
def merged_in_order(
    out_parts, lse_parts, token, head, count, total_q, num_heads, BLOCK_SPLITS: tl.constexpr, T: tl.constexpr
):
    """`merged_at_once` block by block. An empty block multiplies by 1 and adds 0."""
    BLOCK_DV: tl.constexpr = T.BLOCK_DV
    acc = tl.zeros([BLOCK_DV], tl.float32)
    d_idx = tl.arange(0, BLOCK_DV)
    top = tl.full([], NEG_INF, tl.float32)
    total = tl.zeros([], tl.float32)
    for first in tl.range(0, count, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        logs = part_logs(lse_parts, first, count, token, head, total_q, num_heads, BLOCK_SPLITS)
        new_top = tl.maximum(top, tl.max(logs, 0))
        anchor = tl.where(new_top == NEG_INF, 0.0, new_top)
        alpha = tl.exp2((top - anchor) * LOG2E)
        weights = tl.exp2((logs - anchor) * LOG2E)
        part = (splits.to(tl.int64) * total_q + token) * num_heads + head
        there = (splits < count) & (logs != NEG_INF)
        parts = tl.load(
            out_parts + part[:, None] * T.HEAD_DIM_V + d_idx[None, :],
            mask=there[:, None] & (d_idx[None, :] < T.HEAD_DIM_V),
            other=0.0,
        )
        total = total * alpha + tl.sum(weights, 0)
        acc = acc * alpha + tl.sum(parts * weights[:, None], 0)
        top = new_top
    return acc, tl.where(top == NEG_INF, 0.0, top), total


@triton.jit(do_not_specialize=["total_q", "seqlen_q", "num_heads", "num_splits", "batch"])
def combine_kernel(
    out_parts, lse_parts, out, lse, cu_seqlens_q, total_q, seqlen_q, num_heads, num_splits, batch,
    T: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one (token, head). Grid: token * num_heads. Splits without keys have weight 0.

    BLOCK_SPLITS results are read at a time; the same kernel serves any number of splits up to MAX_SPLITS. MAX_SPLITS 0:
    empty splits at the end change no bit, so that results do not depend on the number of splits.
    """
    head = tl.program_id(0) % num_heads
    token = tl.program_id(0) // num_heads
    count = num_splits
    if T.PACKED_Q:
        count = tl.where(token < tl.load(cu_seqlens_q + batch), num_splits, 0)
    if MAX_SPLITS == 0:
        acc, anchor, total = merged_in_order(
            out_parts, lse_parts, token, head, count, total_q, num_heads, BLOCK_SPLITS, T
        )
    else:
        acc, anchor, total = merged_at_once(
            out_parts, lse_parts, token, head, count, total_q, num_heads, MAX_SPLITS, BLOCK_SPLITS, T
        )
    d_idx = tl.arange(0, T.BLOCK_DV)
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)
    seq = token // seqlen_q
    row = token % seqlen_q
    at = (
        tl.cast(seq, tl.int64) * out.stride_batch
        + tl.cast(head, tl.int64) * out.stride_head
        + tl.cast(row, tl.int64) * out.stride_row
    )
    tl.store(out.ptr + at + d_idx, result.to(out.ptr.dtype.element_ty), mask=d_idx < T.HEAD_DIM_V)
    lse_at = lse.ptr + (
        tl.cast(seq, tl.int64) * lse.stride_batch + tl.cast(head, tl.int64) * lse.stride_head + row * lse.stride_row
    )
    merged = tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    tl.store(lse_at, with_endless_sinks(merged, T))


@triton.jit
def part_logs(lse_parts, first, count, token, head, total_q, num_heads, BLOCK: tl.constexpr):
    """The lse of splits first..first+BLOCK of a (token, head); -inf from `count` on."""
    splits = first + tl.arange(0, BLOCK)
    part = (splits.to(tl.int64) * total_q + token) * num_heads + head
    return tl.load(lse_parts + part, mask=splits < count, other=NEG_INF)
