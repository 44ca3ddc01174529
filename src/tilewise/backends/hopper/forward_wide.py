"""The forward for more than 256 columns, for sm_90: two warpgroups share 64 query rows.

O of 64 rows and 512 columns does not fit the registers of one warpgroup. So each of two has one column part of O, and
one of them computes the scores for both. Roles, one function each:
  producer   that of forward.py
  left       one warpgroup: S = Q K^T and the softmax; hands P and the rescaling factors to the other warpgroup through
             shared memory; the first column part of O += P V
  right      one warpgroup: the second column part of O += P V

Q, a tile of K and a tile of V take 64 KiB each, so K and V have one slot. Their loads overlap each other's products:
K_{i+1} arrives during P V, V_i during Q K^T. `left` therefore releases K_i before it waits for V_{i-1}. The softmax of
S_i runs while both warpgroups multiply P_{i-1}. P has two slots, and is read from shared memory by both.

O is staged in the slot of the last V, whose column parts belong to one warpgroup each. So Q is free for the next tile
when the last scores are there.

A CTA reads K and V for 64 rows, 64 FLOP a byte, from L2. Other designs: docs/log/hopper-forward.md.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Parts
from tilewise.backends.gpu.releases import aggregate, async_store
from tilewise.backends.hopper.channels import Mailbox, Ring, make_ring, start
from tilewise.backends.hopper.forward import make_parts, producer, store_lse
from tilewise.backends.hopper.layouts import accumulator_layout, tile_at
from tilewise.backends.hopper.primitives import rebuilt
from tilewise.backends.hopper.products import issue_scores
from tilewise.backends.hopper.schedule import (
    first_tile,
    first_turn,
    following_tile,
    key_tiles,
    make_tiles,
    place_at,
    spans_at,
    whole_tiles,
)
from tilewise.backends.hopper.scores import (
    capped,
    finish_rows,
    mask_scores,
    no_rows,
    raise_max,
    rescale,
    soften,
    whole_rows,
)

# Slots for P and for one number a row, which `left` hands to `right`.
P_SLOTS = gl.constexpr(2)


@aggregate
class Pipeline:
    """The shared memory of a CTA. Tiles are pairs of column parts; O is staged in V's."""

    q_smem: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    p_smem: gl.shared_memory_descriptor
    rows_smem: gl.shared_memory_descriptor
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    p_ring: Ring
    tiles: Mailbox


# ---- both warpgroups


@gluon.jit
def issue_part(acc, at, turn, pipe, PART: gl.constexpr, C: gl.constexpr):
    """Start O += P V for one column part."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    COLUMNS: gl.constexpr = C.DV_REST if PART else C.DV
    v = pipe.v_smem[PART].index(at.slot).reshape([BLOCK_N, COLUMNS])
    return warpgroup_mma(pipe.p_smem.index(turn.slot), v, acc, is_async=True)


@gluon.jit
def store_part(acc, factor, out_desc, at, span, head, row, pipe, PART: gl.constexpr, C: gl.constexpr):
    """Normalise one column part of O and write it by TMA, which drops rows past the end; then release the slot of V."""
    COLUMNS: gl.constexpr = C.DV_REST if PART else C.DV
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, accumulator_layout(COLUMNS)))[:, None]
    staged = pipe.v_smem[PART].index(at.slot)
    staged.reshape([64, COLUMNS]).store(acc.to(pipe.v_smem[PART].dtype))
    fence_async_shared()  # orders the stores above before TMA's reads below
    async_store(out_desc[PART], tile_at(span, head, row, PART * C.DV, C.IS_VARLEN), staged)
    tma.store_wait(0)  # the slot is free once TMA has read O from it
    pipe.v_ring.release(at)


# ---- left


@gluon.jit
def compute_scores(q_at, at, pipe, C: gl.constexpr):
    """S = Q K^T of the tile at `at`, which is released."""
    pipe.k_ring.wait(at)
    # Q and K stay in their slots: without `rebuilt`, the loops would keep 64 descriptors.
    q_slot = rebuilt(q_at.slot, at.parity, True)
    k_slot = rebuilt(at.slot, at.parity, True)
    scores = warpgroup_mma_wait(0, deps=[issue_scores(pipe.q_smem, q_slot, pipe.k_smem, k_slot, C)])
    pipe.k_ring.release(at)
    return scores


@gluon.jit
def hand_over(p, factor, turn, pipe):
    """Store P and the factors of O's rows for both warpgroups."""
    narrow = p.to(pipe.p_smem.dtype)
    pipe.p_ring.await_free(turn)
    pipe.p_smem.index(turn.slot).store(narrow)
    pipe.rows_smem.index(turn.slot).store(gl.max(factor, axis=1))
    fence_async_shared()  # orders the stores above before wgmma's reads of both warpgroups
    pipe.p_ring.signal(turn)


@gluon.jit
def attend(
    n_block, row, q_at, k_at, v_at, turn, acc, factor, row_ref, row_sum, row_top, scale_log2, cap_scale, seqlen_q,
    seqlen_k, sizes, pipe, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile: S_i, then O += P_{i-1} V_{i-1}, which the softmax of S_i overlaps.

    `factor` is the last tile's rescaling, `turn` the slot of its P, `v_at` that of its V.
    """
    scores = compute_scores(q_at, k_at, pipe, C)
    pipe.v_ring.wait(v_at)
    acc = issue_part(rescale(acc, factor, C.DV, C), v_at, turn, pipe, 0, C)
    if MASKED:  # masked tiles are few: give up the overlap to save registers
        acc = warpgroup_mma_wait(0, deps=[acc])
    scores = capped(scores, cap_scale, C)
    if MASKED:
        scores = mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C)
    p, factor, row_ref, row_sum, top = soften(scores, row_ref, row_sum, scale_log2, MASKED, C)
    if C.KEEPS_TOP:
        row_top = gl.maximum(row_top, top)
    turn = turn.next()
    hand_over(p, factor, turn, pipe)
    if not MASKED:
        acc = warpgroup_mma_wait(0, deps=[acc])
    pipe.v_ring.release(v_at)
    return acc, factor, row_ref, row_sum, row_top, k_at.next(), v_at.next(), turn


@gluon.jit
def left(out_desc, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, sizes, pipe, C: gl.constexpr):
    """Scores, softmax and the first column part of O, tile after tile."""
    DV: gl.constexpr = C.DV
    q_at = start(C.Q_STAGES)
    k_at = start(C.NUM_STAGES)
    v_at = start(C.NUM_STAGES)
    turn = start(P_SLOTS)
    tile_turn = first_turn(C)
    tile = first_tile(pipe.tiles, tile_turn, C)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 4, C)
        row = block * 64
        _, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)

        # The rightmost tile, then the rest of the right edge, whole tiles, the left edge.
        pipe.q_ring.wait(q_at)
        scores = capped(compute_scores(q_at, k_at, pipe, C), cap_scale, C)
        k_at = k_at.next()
        scores = mask_scores(scores, row, last, seqlen_q, seqlen_k, sizes, C)
        row_ref, row_sum = no_rows(C)
        p, factor, row_ref, row_sum, row_top = soften(scores, row_ref, row_sum, scale_log2, True, C)
        if not C.KEEPS_TOP:
            row_top = 0
        hand_over(p, factor, turn, pipe)
        acc = gl.zeros([64, DV], gl.float32, accumulator_layout(DV))
        begin, end = whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C, C.IS_LAZY)
        if C.HAS_RIGHT:
            for i in range(1, begin):
                acc, factor, row_ref, row_sum, row_top, k_at, v_at, turn = attend(
                    last - i, row, q_at, k_at, v_at, turn, acc, factor, row_ref, row_sum, row_top, scale_log2,
                    cap_scale, seqlen_q, seqlen_k, sizes, pipe, True, C)  # fmt: skip
        for i in range(begin, end):
            acc, factor, row_ref, row_sum, row_top, k_at, v_at, turn = attend(
                last - i, row, q_at, k_at, v_at, turn, acc, factor, row_ref, row_sum, row_top, scale_log2,
                cap_scale, seqlen_q, seqlen_k, sizes, pipe, False, C)  # fmt: skip
        if C.HAS_LEFT:
            for i in range(end, count):
                acc, factor, row_ref, row_sum, row_top, k_at, v_at, turn = attend(
                    last - i, row, q_at, k_at, v_at, turn, acc, factor, row_ref, row_sum, row_top, scale_log2,
                    cap_scale, seqlen_q, seqlen_k, sizes, pipe, True, C)  # fmt: skip

        # The last P V overlaps everything that does not depend on it.
        pipe.q_ring.release(q_at)
        q_at = q_at.next()
        pipe.v_ring.wait(v_at)
        acc = issue_part(rescale(acc, factor, C.DV, C), v_at, turn, pipe, 0, C)
        head, q_span, _ = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        if max_ptr is not None:
            raise_max(row_top if C.KEEPS_TOP else row_ref, max_ptr, item, row, seqlen_q, scale_log2, sizes, C)
        row_ref, row_sum = whole_rows(row_ref, row_sum, scale_log2, C)
        normaliser, lse = finish_rows(row_ref, row_sum, sinks_ptr, item, sizes, C)
        turn = turn.next()
        pipe.p_ring.await_free(turn)
        pipe.rows_smem.index(turn.slot).store(normaliser)
        pipe.p_ring.signal(turn)
        turn = turn.next()
        store_lse(lse, lse_ptr, item, row, q_span.start, seqlen_q, sizes, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        store_part(acc, normaliser, out_desc, v_at, q_span, head, row, pipe, 0, C)
        v_at = v_at.next()


# ---- right


@gluon.jit
def receive(acc, at, turn, pipe, C: gl.constexpr):
    """O * factor + P V for the second column part, of what `left` hands over next."""
    _, zeros = no_rows(C)
    pipe.p_ring.wait(turn)
    factor = pipe.rows_smem.index(turn.slot).load(gl.SliceLayout(1, zeros.type.layout))[:, None] + zeros
    acc = rescale(acc, factor, C.DV_REST, C)
    pipe.v_ring.wait(at)
    acc = warpgroup_mma_wait(0, deps=[issue_part(acc, at, turn, pipe, 1, C)])
    pipe.p_ring.release(turn)
    return acc


@gluon.jit
def right(out_desc, sizes, pipe, C: gl.constexpr):
    """The second column part of O, tile after tile."""
    DV_REST: gl.constexpr = C.DV_REST
    at = start(C.NUM_STAGES)
    turn = start(P_SLOTS)
    tile_turn = first_turn(C)
    tile = first_tile(pipe.tiles, tile_turn, C)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 4, C)
        head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        _, count = key_tiles(block, q_span.length, kv_span.length, sizes, C)
        acc = gl.zeros([64, DV_REST], gl.float32, accumulator_layout(DV_REST))
        for _ in range(count - 1):
            acc = receive(acc, at, turn, pipe, C)
            pipe.v_ring.release(at)
            at = at.next()
            turn = turn.next()
        acc = receive(acc, at, turn, pipe, C)
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        turn = turn.next()
        pipe.p_ring.wait(turn)
        normaliser = pipe.rows_smem.index(turn.slot).load(gl.SliceLayout(1, accumulator_layout(DV_REST)))
        pipe.p_ring.release(turn)
        turn = turn.next()
        store_part(acc, normaliser, out_desc, at, q_span, head, block * 64, pipe, 1, C)
        at = at.next()


# ---- kernel


@gluon.jit
def make_pipeline(q_desc, k_desc, v_desc, C: gl.constexpr):
    """Allocate everything the roles share. K is read by one warpgroup, V by both."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DTYPE: gl.constexpr = v_desc.first.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], DTYPE)
    q_smem = make_parts(q_desc, C.Q_STAGES, 64, C.D, C.D_REST, C)
    k_smem = make_parts(k_desc, C.NUM_STAGES, C.BLOCK_N, C.D, C.D_REST, C)
    v_smem = make_parts(v_desc, C.NUM_STAGES, C.BLOCK_N, C.DV, C.DV_REST, C)
    p_smem = gl.allocate_shared_memory(DTYPE, [P_SLOTS, 64, BLOCK_N], P_LAYOUT)
    rows_smem = gl.allocate_shared_memory(gl.float32, [P_SLOTS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = make_tiles(2, C)
    q_ring = make_ring(C.Q_STAGES, 1)
    k_ring = make_ring(C.NUM_STAGES, 1)
    v_ring = make_ring(C.NUM_STAGES, 2)
    p_ring = make_ring(P_SLOTS, 1)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, k_smem, v_smem, p_smem, rows_smem, q_ring, k_ring, v_ring, p_ring, tiles)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "paging", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "max_ptr", "counter_ptr"],
)
def forward_wide_kernel(
    q_desc, k_desc, v_desc, out_desc, q_rest, k_rest, v_rest, out_rest, lse_ptr, sinks_ptr, max_ptr, counter_ptr,
    work_ptr, paging, scale_log2, cap_scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Out and lse of all tiles. Arguments as forward_kernel's; there are always two column parts."""
    queries, keys = Parts(q_desc, q_rest), Parts(k_desc, k_rest)
    values, outputs = Parts(v_desc, v_rest), Parts(out_desc, out_rest)
    pipe = make_pipeline(queries, keys, values, C)
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    gl.warp_specialize([
        (left, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, sizes, pipe, C)),
        (right, (outputs, sizes, pipe, C)),
        (producer, (queries, keys, values, counter_ptr, work_ptr, paging, None, sizes, pipe, C)),
    ], [4, 1], [C.CONSUMER_REGS, 24])  # fmt: skip
