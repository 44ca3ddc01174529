"""Forward with warps of their own for loading: dense problems with plain scores, on sm_90.

Triton takes the loop over query tiles apart (`warp_specialize`): four warps bring q, K and V into shared memory by TMA,
and two warpgroups, each with half the rows of a tile, multiply. So the tiles of the next (query tile, head, sequence)
arrive while this one is computed and written, and one warpgroup multiplies while the other takes exponentials.

Grid: one program a multiprocessor, each with every num_programs-th query tile; it owns BLOCK_M rows of `out` and `lse`
at a time and writes them once.
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.boxes import box_place, load_box
from tilewise.backends.triton.forward import finish
from tilewise.backends.triton.primitives import (
    LOG2E,
    NEG_INF,
    box_origin,
    dot,
    dot_add,
    head_base,
    key_range,
    store_rows,
    zeros,
)

END_STRAYS = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.inval.shared::cta.b64 [global_smem];
    @first mbarrier.inval.shared::cta.b64 [global_smem+8];
    fence.proxy.async.shared::cta;
    mov.b32 $0, 0;
}""")


@triton.jit
def last_keys(m_idx, seqlen_q, seqlen_k, band, T: tl.constexpr):
    """The last key that each row sees."""
    last = m_idx * 0 + (seqlen_k - 1)
    if T.HAS_RIGHT:
        last = tl.minimum(m_idx + (seqlen_k - seqlen_q + band.right), last)
    return last


@triton.jit
def without_strays(T: tl.constexpr):
    """0, once the barriers that lie where the first tile of K comes are no barriers any more.

    Triton 3.6 initialises a barrier a stage that nobody waits for at the start of shared memory and then gives that
    memory to K. A multiprocessor keeps barriers in a cache of their own and writes them back when it needs the room:
    over the tile. So the thread that made them ends them. Only coordinates of loads may depend on this 0: then only the
    warps that load compute it, before their first load.
    """
    if T.INTERPRETED:
        return 0
    return tl.inline_asm_elementwise(END_STRAYS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["sizes", "band", "scalars", "num_items"])
def specialised_forward_kernel(
    q_desc, q_box, k_desc, v_desc, out, lse, sizes, band, scalars, num_items,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out, lse of all query tiles. Unless MASKED every key tile is whole and seen by all rows.

    The compiler takes one loop within the other apart, not two: masked tiles are not in a loop of their own.
    """
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    num_blocks = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    scale_log2 = scalars.scale * LOG2E
    zero = without_strays(T)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=NUM_STAGES, warp_specialize=True):
        # The blocks of a head run side by side: its K and V come from L2 for all but one.
        m_first = item % num_blocks * BLOCK_M
        if T.HAS_RIGHT:
            m_first = (num_blocks - 1) * BLOCK_M - m_first  # the longest first
        head, batch_idx = item // num_blocks % sizes.num_heads, item // num_blocks // sizes.num_heads
        key_place = box_place(batch_idx, head // T.GROUP_SIZE, 0, seqlen_k, False)
        m_idx = m_first + tl.arange(0, BLOCK_M)
        row, col = box_origin(q_desc, q_box, batch_idx, head, 0, False)
        q_tile = q_desc.load([row + m_first + zero, col])
        acc = zeros(BLOCK_M, T.BLOCK_DV)
        row_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        _, _, _, end = key_range(m_first, seqlen_q, seqlen_k, band, BLOCK_M, BLOCK_N, T)
        last = last_keys(m_idx, seqlen_q, seqlen_k, band, T)
        for first in tl.range(0, end, BLOCK_N, num_stages=NUM_STAGES):
            dots = dot(q_tile, tl.trans(load_box(k_desc, key_place, first + zero, BLOCK_N, T.HEAD_DIM)), T)
            if MASKED:
                # Columns are constants of a thread: nothing is added up for each score.
                dots = tl.where(tl.arange(0, BLOCK_N)[None, :] <= (last - first)[:, None], dots, NEG_INF)
            new_max = tl.maximum(row_max, tl.max(dots, 1) * scale_log2)
            # A row that has seen no key takes its exponentials against 0, so they are 0 and not NaN.
            anchor = tl.where(new_max == NEG_INF, 0.0, new_max)
            alpha = tl.exp2(row_max - anchor)
            p = tl.exp2(dots * scale_log2 - anchor[:, None])
            acc = acc * alpha[:, None]
            v_tile = load_box(v_desc, key_place, first + zero, BLOCK_N, T.HEAD_DIM_V)
            acc = dot_add(p.to(v_tile.dtype), v_tile, acc, T)
            # Summed up while the product is under way: D=128, N=512 full 132 us, before the product 144.
            row_sum = row_sum * alpha + tl.sum(p, 1)
            row_max = new_max
        result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
        out_base = head_base(out, batch_idx, head, 0, False)
        store_rows(result, out_base, out.stride_row, m_first, seqlen_q, T.HEAD_DIM_V)
        lse_base = head_base(lse, batch_idx, head, 0, False)
        tl.store(lse_base + m_idx * lse.stride_row, lse_rows, mask=m_idx < seqlen_q)
