"""The first kernel of the backward: lse and delta of every row and, for packed sequences, the lists of tiles that the
other kernels walk (gpu/work_list.py). The lists are made here to save their launches.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.tails import clear_rows
from tilewise.backends.gpu.work_list import list_blocks
from tilewise.backends.triton.primitives import NEG_INF, STAT_TILE, head_base, load_rows, lse_in_log2, sequence_of


@triton.jit
def list_tiles(
    listed, cu_seqlens_q, seqlens_k, batch, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr
):
    """List the tiles of BLOCK queries (keys), with all programs together. Does nothing if `listed` is None."""
    if listed is not None:
        for item in tl.range(tl.program_id(0), batch * listed.parts, tl.num_programs(0)):
            list_blocks(
                item // listed.parts, item % listed.parts, listed.parts, listed.work, cu_seqlens_q, seqlens_k, batch,
                listed.rows_together, BLOCK, OF_KEYS, IS_PAGED,
            )  # fmt: skip


@triton.jit
def clear_tail(rows, cu_seqlens, batch):
    """Zero the rows past the last sequence of a packed gradient, with all programs together. Does nothing for None."""
    if rows is not None:
        clear_rows(rows.ptr, None, tl.load(cu_seqlens + batch), rows.total, 1, rows.width)


@triton.jit(
    do_not_specialize=["seqlens_k", "queries", "keys", "dq", "dk", "dv", "num_rows", "num_stored", "num_heads", "batch"]
)
def row_stats_kernel(
    out, dout, lse, dlse, lse_unit, delta, cu_seqlens_q, seqlens_k, queries, keys, dq, dk, dv, num_rows, num_stored,
    num_heads, batch,
    T: tl.constexpr, BLOCK_M: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """lse_unit and delta of BLOCK_M rows; +inf and 0 for rows that are stored but do not exist. Grid: row tile
    (fastest), head, batch; packed sequences use the slots of one long sequence.

    In addition, all programs together list the tiles of `queries` and `keys` and clear the tails of dq, dk and dv.
    """
    list_tiles(queries, cu_seqlens_q, seqlens_k, batch, TILE_Q, False, IS_PAGED)
    list_tiles(keys, cu_seqlens_q, seqlens_k, batch, TILE_K, True, IS_PAGED)
    clear_tail(dq, cu_seqlens_q, batch)
    clear_tail(dk, seqlens_k, batch)
    clear_tail(dv, seqlens_k, batch)
    num_blocks = (num_stored + BLOCK_M - 1) // BLOCK_M
    stored = tl.program_id(0) % num_blocks * BLOCK_M
    head = tl.program_id(0) // num_blocks % num_heads
    batch_idx = tl.program_id(0) // num_blocks // num_heads
    first = stored
    start = 0
    if T.PACKED_Q:
        sequence, first_slot = sequence_of(stored // STAT_TILE, cu_seqlens_q, batch, STAT_TILE)
        start = tl.load(cu_seqlens_q + sequence)
        num_rows = tl.load(cu_seqlens_q + sequence + 1) - start
        first = stored - first_slot * STAT_TILE
    rows = first + tl.arange(0, BLOCK_M)
    row_ok = rows < num_rows
    out_base = head_base(out, batch_idx, head, start, T.PACKED_Q)
    dout_base = head_base(dout, batch_idx, head, start, T.PACKED_Q)
    out_tile = load_rows(out_base, out.stride_row, first, num_rows, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    dout_tile = load_rows(dout_base, dout.stride_row, first, num_rows, True, BLOCK_M, T.HEAD_DIM_V, T.BLOCK_DV)
    sums = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    at = head_base(lse, batch_idx, head, start, T.PACKED_Q) + rows * lse.stride_row
    value = tl.load(at, mask=row_ok, other=NEG_INF)
    if dlse is not None:
        at = head_base(dlse, batch_idx, head, start, T.PACKED_Q) + rows * dlse.stride_row
        sums -= tl.load(at, mask=row_ok, other=0.0).to(tl.float32)
    empty = value == NEG_INF
    if not T.TRANSFORMED:
        value = lse_in_log2(value)
    places = stored + tl.arange(0, BLOCK_M)
    lse_at = head_base(lse_unit, batch_idx, head, start, False) + places * lse_unit.stride_row
    delta_at = head_base(delta, batch_idx, head, start, False) + places * delta.stride_row
    tl.store(lse_at, tl.where(empty, float("inf"), value), mask=places < num_stored)
    tl.store(delta_at, tl.where(empty, 0.0, sums), mask=places < num_stored)
