"""Query rows that AT_ONCE has lost (scores.py), computed once more by the warpgroup that finds them, with maxima.

The producer is far ahead by then, so the warpgroup fetches its keys itself, 64 at a time, into the only shared memory
that is its own: where its rows of O go afterwards. Slow, 64 keys a step and nothing ahead, and rare: it takes a score
55 to 69 above all that its row has seen before (2^100, of which the reference may lag 2^20) in the row's last tile, and
2^127 in one before, after which sums move into the reference. Infinities and NaN in V take this way, too, a whole block
of 64 rows for one of them.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from tilewise.backends.hopper.channels import start
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, tile_at
from tilewise.backends.hopper.products import issue_output, issue_scores, rescale_output
from tilewise.backends.hopper.scores import capped, mask_scores, no_rows, soften, whole_rows

__all__ = ["attend_again"]


@gluon.jit
def fetch(desc, span, head, row, at, ring, pipe, C: gl.constexpr):
    """Fetch 64 rows of K or V and wait for them."""
    BYTES: gl.constexpr = 64 * C.D * 2
    ready = ring.acquire(at, BYTES)
    place = tile_at(span, head, row, 0, C.IS_VARLEN)
    tma.async_copy_global_to_shared(desc, place, ready, pipe.out_smem[0].index(at.slot))
    ring.wait(at)


@gluon.jit
def attend_again(
    kv_desc, q_slot, last, count, row, q_span, kv_span, head, scale_log2, cap_scale, sizes, pipe,
    WARPGROUP: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """(O, row_ref, row_sum) of the 64 rows from `row` on, after the key tiles last, last - 1, ... (count of them).

    K_i and V_i take turns in their slot, so that the parities of its barriers are the same before and after.
    """
    C: gl.constexpr = CONFIG.in_tiles_of_64
    DV: gl.constexpr = C.DV
    PARTS: gl.constexpr = CONFIG.BLOCK_N // 64
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator_layout(CONFIG.BLOCK_N))
    kv_head = head // sizes.group_size
    acc = gl.zeros([64, DV], gl.float32, accumulator_layout(DV))
    row_ref, row_sum = no_rows(C)
    tma.store_wait(0)  # the last tile's O has left the slot
    for i in range(count * PARTS):
        n_block = (last + 1) * PARTS - 1 - i
        at = start(1).lane(WARPGROUP, C.NUM_WARPGROUPS)
        fetch(kv_desc[0], kv_span, kv_head, n_block * 64, at, pipe.again_ring, pipe, C)
        scores = warpgroup_mma_wait(0, deps=[issue_scores(pipe.q_smem, q_slot, pipe.out_smem, at.slot, C)])
        pipe.again_ring.release(at)
        scores = mask_scores(capped(scores, cap_scale, C), row, n_block, q_span[2], kv_span[2], sizes, C)
        p, factor, row_ref, row_sum = soften(scores, row_ref, row_sum, scale_log2, True, C)
        acc, _ = rescale_output(acc, 0, factor, C)
        p = gl.convert_layout(p.to(pipe.v_smem[0].dtype), left_operand_layout(accumulator_layout(DV)))
        at = at.next()
        fetch(kv_desc[1], kv_span, kv_head, n_block * 64, at, pipe.again_ring, pipe, C)
        acc, _ = issue_output(p, pipe.out_smem, at.slot, acc, 0, C)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        pipe.again_ring.release(at)
    row_ref, row_sum = whole_rows(row_ref, row_sum, C)
    return acc, gl.convert_layout(row_ref, ROWS), gl.convert_layout(row_sum, ROWS)
