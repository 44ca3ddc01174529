"""Forward over keys that fit into one tile, of dense rows with plain scores: no running maximum, no rescaling.

Grid: (query tile, share of the heads, sequence). A program walks over the heads of its share; K, Q and V of a head are
asked for together and share a barrier, and two programs a multiprocessor take turns at loading and computing. A program
owns BLOCK_M rows of `out` and `lse` of each of its heads and writes them once.
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.boxes import load_box, store_box
from tilewise.backends.triton.forward import finish
from tilewise.backends.triton.primitives import LOG2E, NEG_INF, dot, head_base, keep_in_band


@triton.jit(do_not_specialize=["sizes", "band", "scalars", "num_shares"])
def one_tile_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, sizes, band, scalars, num_shares,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """out, lse of a query tile of every `num_shares`-th head of a sequence. WHOLE: no score is masked; a branch that
    finds out costs 8 us of 73.
    """
    m_first = tl.program_id(0) * BLOCK_M
    batch_idx = tl.program_id(2)
    m_idx = m_first + tl.arange(0, BLOCK_M)
    n_idx = tl.arange(0, BLOCK_N)[None, :]
    scale_log2 = scalars.scale * LOG2E
    for head in tl.range(tl.program_id(1), sizes.num_heads, num_shares):
        key_place = (batch_idx, head // T.GROUP_SIZE, 0)
        k_tile = load_box(k_desc, key_place, 0, BLOCK_N, T.HEAD_DIM)
        q_tile = load_box(q_desc, (batch_idx, head, 0), m_first, BLOCK_M, T.HEAD_DIM)
        v_tile = load_box(v_desc, key_place, 0, BLOCK_N, T.HEAD_DIM_V)
        dots = dot(q_tile, tl.trans(k_tile), T)
        if not WHOLE:
            keep = keep_in_band(m_idx[:, None], n_idx, sizes.seqlen_q, sizes.seqlen_k, band, T)
            dots = tl.where(keep, dots, NEG_INF)
        row_max = tl.max(dots, 1) * scale_log2
        anchor = tl.where(row_max == NEG_INF, 0.0, row_max)
        p = tl.exp2(dots * scale_log2 - anchor[:, None])
        row_sum = tl.sum(p, 1)
        acc = dot(p.to(v_tile.dtype), v_tile, T)
        result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
        store_box(out_desc, (batch_idx, head, 0), m_first, result)
        lse_base = head_base(lse, batch_idx, head, 0, False)
        tl.store(lse_base + m_idx * lse.stride_row, lse_rows, mask=m_idx < sizes.seqlen_q)
