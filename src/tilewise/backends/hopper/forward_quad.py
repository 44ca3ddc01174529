"""The forward for 64 columns and short sequences, for sm_90: four warpgroups on an SM, none of which overlaps itself.

A query block of a short sequence is mostly prologue and epilogue. Its first softmax and last product overlap nothing of
its own, and with two warpgroups on an SM (forward.py) little else. Here an SM runs two CTAs of two warpgroups, and
while one warpgroup waits, three others work. A thread has 104 registers: S of 64 keys and O of 64 columns fit, a second
P does not. So a warpgroup computes S = Q K_i^T, softmax and O += P V_i in turn.

K_i and V_i share a ring slot and one barrier. The producer stores the next tile's number (packed: its words) in the
mailbox before it loads the last pair of a tile. A consumer that has waited for that pair can read the mailbox without
another barrier. A warpgroup releases tiles unread that only the other one's rows see.

Under a tile mask (listed.py), the two halves of a tile of the mask are two key tiles.

Figures: bench/results/hopper-forward-choices.csv, D64_QUAD.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Parts
from tilewise.backends.hopper.channels import make_mailbox, make_ring, start
from tilewise.backends.hopper.forward import Pipeline, load_keys, load_values, make_parts, store_lse, store_output
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout
from tilewise.backends.hopper.listed import HALVES, WORD, half_at, hide_scores, list_at, load_words, place_words
from tilewise.backends.hopper.products import issue_output, issue_scores, load_tile, rescale_output, scale_output
from tilewise.backends.hopper.schedule import (
    LIST_SLOTS,
    LIST_WORDS,
    announce,
    first_tile,
    key_tiles,
    listed_words,
    place_at,
    seen_tiles,
    spans_at,
    take_tile,
)
from tilewise.backends.hopper.scores import capped, finish_rows, mask_scores, no_rows, raise_max, soften, whole_rows


@gluon.jit
def load_pair(k_desc, v_desc, pipe, at, paging, span, head, row, C: gl.constexpr):
    """Wait for a slot and start the copies of K_i and V_i into it."""
    PAIR_BYTES: gl.constexpr = C.BLOCK_N * (C.D + C.DV) * 2
    ready = pipe.k_ring.acquire(at, PAIR_BYTES)
    load_keys(k_desc, pipe.k_smem, at.slot, ready, paging, span, head, row, C)
    load_values(v_desc, pipe.v_smem, at.slot, ready, paging, span, head, row, C)


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, work_ptr, paging, lists, sizes, pipe, C: gl.constexpr):
    """Feed the rings."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * C.NUM_WARPGROUPS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    Q_BYTES: gl.constexpr = 64 * C.D * 2
    at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    turn = start(LIST_SLOTS)
    tile = gl.program_id(0)
    if C.IS_VARLEN:
        num_entries = gl.load(work_ptr)
        tile = announce(tile, num_entries, work_ptr, pipe.tiles, turn, sizes)
    if C.IS_LISTED:
        tile, words = place_words(lists, tile, sizes)
        pipe.tiles.send(turn, words)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, turn, sizes, C.HAS_RIGHT, 1, C)
        head, q_span, kv_span = spans_at(item, pipe.tiles, turn, sizes, 1, C)
        kv_head = head // sizes.group_size
        if C.IS_LISTED:
            entries = list_at(lists, q_span.sequence, head, tile)
            count = pipe.tiles.word(turn, 4, 1) * HALVES
            row = pipe.tiles.word(turn, 6, 1) * (HALVES * BLOCK_N)
        else:
            last, count = key_tiles(block, q_span.length, kv_span.length, sizes, C)
            row = last * BLOCK_N
        for w in gl.static_range(NUM_WARPGROUPS):
            lane = q_at.lane(w, NUM_WARPGROUPS)
            ready = pipe.q_ring.acquire(lane, Q_BYTES)
            load_tile(q_desc, pipe.q_smem, lane.slot, ready, q_span, head, block * BLOCK_M + w * 64, C.D, 0, C)
        q_at = q_at.next()
        for i in range(1, count):
            if C.IS_LISTED:
                following, _ = half_at(entries, i)
            else:
                following = last - i
            load_pair(k_desc, v_desc, pipe, at, paging, kv_span, kv_head, row, C)
            at = at.next()
            row = following * BLOCK_N
        # Both warpgroups have released the Q of two tiles ago, so they have read the words that these overwrite.
        turn = turn.next()
        if C.IS_VARLEN:
            tile = take_tile(counter_ptr, num_entries * sizes.num_items, True)
            tile, words = listed_words(tile, num_entries, work_ptr, sizes)
            pipe.tiles.leave(turn, words)
        else:
            tile = take_tile(counter_ptr, sizes.num_tiles, True)
            if C.IS_LISTED:
                tile, words = place_words(lists, tile, sizes)
                pipe.tiles.leave(turn, words)
            else:
                pipe.tiles.leave(turn, tile)
        load_pair(k_desc, v_desc, pipe, at, paging, kv_span, kv_head, row, C)
        at = at.next()


@gluon.jit
def attend(
    n_block, row, q_slot, at, acc, row_ref, row_sum, scale_log2, cap_scale, seqlen_q, seqlen_k, lists, kind, sizes,
    pipe, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile, from its scores to its part of O. `kind` is that of a tile mask's tile, where there is a mask."""
    P_LAYOUT: gl.constexpr = left_operand_layout(accumulator_layout(C.DV))
    if MASKED and C.IS_LISTED:
        words = load_words(lists.bits, kind, row, n_block % HALVES * (C.BLOCK_N // WORD), C)
    pipe.k_ring.wait(at)
    scores = warpgroup_mma_wait(0, deps=[issue_scores(pipe.q_smem, q_slot, pipe.k_smem, at.slot, C)])
    scores = capped(scores, cap_scale, C)
    if MASKED:
        if C.IS_LISTED:
            scores = hide_scores(scores, words, seqlen_k - n_block * C.BLOCK_N, C)
        else:
            scores = mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C)
    p, factor, row_ref, row_sum, _ = soften(scores, row_ref, row_sum, scale_log2, MASKED, C)
    acc, _ = rescale_output(acc, 0, factor, C)
    p_operand = gl.convert_layout(p.to(pipe.v_smem.first.dtype), P_LAYOUT)
    acc, _ = issue_output(p_operand, pipe.v_smem, at.slot, acc, 0, C)
    acc, p_operand = warpgroup_mma_wait(0, deps=[acc, p_operand])
    pipe.k_ring.release(at)
    return acc, row_ref, row_sum, at.next()


@gluon.jit
def consumer(
    out_desc, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, WARPGROUP: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Softmax(Q K^T) V for 64 of the CTA's query rows, tile after tile."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * NUM_WARPGROUPS
    DV: gl.constexpr = C.DV
    at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    turn = start(LIST_SLOTS)
    tile = first_tile(pipe.tiles, turn, C)
    kind = 0
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, turn, sizes, C.HAS_RIGHT, 4, C)
        row = block * BLOCK_M + WARPGROUP * 64
        head, q_span, kv_span = spans_at(item, pipe.tiles, turn, sizes, 4, C)
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        if C.IS_LISTED:
            hidden = 0
            end = pipe.tiles.word(turn, 4, 4) * HALVES
            begin = pipe.tiles.word(turn, 5, 4) * HALVES
            last = pipe.tiles.word(turn, 6, 4) * HALVES
            kind = pipe.tiles.word(turn, 7, 4)
            entries = list_at(lists, q_span.sequence, head, tile)
        else:
            last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)
            hidden, begin, end = seen_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C)
        q_lane = q_at.lane(WARPGROUP, NUM_WARPGROUPS)
        acc = gl.zeros([64, DV], gl.float32, accumulator_layout(DV))
        row_ref, row_sum = no_rows(C)
        if C.HAS_RIGHT:  # tiles right of all that these rows see; other rows of the CTA need them
            for _ in range(hidden):
                pipe.k_ring.wait(at)
                pipe.k_ring.release(at)
                at = at.next()
        pipe.q_ring.wait(q_lane)
        for i in range(hidden, begin):
            if C.IS_LISTED:
                n_block = last
                kind_now = kind
                last, kind = half_at(entries, min(i + 1, end - 1))
            else:
                n_block = last - i
                kind_now = kind
            acc, row_ref, row_sum, at = attend(
                n_block, row, q_lane.slot, at, acc, row_ref, row_sum, scale_log2, cap_scale, seqlen_q, seqlen_k, lists,
                kind_now, sizes, pipe, True, C)  # fmt: skip
        for i in range(begin, end):
            acc, row_ref, row_sum, at = attend(
                last - i, row, q_lane.slot, at, acc, row_ref, row_sum, scale_log2, cap_scale, seqlen_q, seqlen_k,
                lists, kind, sizes, pipe, False, C)  # fmt: skip
        if C.HAS_LEFT:
            for i in range(end, count):
                acc, row_ref, row_sum, at = attend(
                    last - i, row, q_lane.slot, at, acc, row_ref, row_sum, scale_log2, cap_scale, seqlen_q, seqlen_k,
                    lists, kind, sizes, pipe, True, C)  # fmt: skip

        head, q_span, kv_span = spans_at(item, pipe.tiles, turn, sizes, 4, C)
        turn = turn.next()
        tile = pipe.tiles.word(turn, 0, 4)
        if max_ptr is not None:
            raise_max(row_ref, max_ptr, item, row, seqlen_q, scale_log2, sizes, C)
        row_ref, row_sum = whole_rows(row_ref, row_sum, scale_log2, C)
        pipe.q_ring.release(q_lane)
        q_at = q_at.next()
        factor, lse = finish_rows(row_ref, row_sum, sinks_ptr, item, sizes, C)
        store_lse(lse, lse_ptr, item, row, q_span.start, seqlen_q, sizes, C)
        acc, _ = scale_output(acc, 0, factor, C)
        store_output(acc, 0, out_desc, WARPGROUP, q_span, head, row, pipe, C)
    tma.store_wait(0)


@gluon.jit
def make_pipeline(q_desc, k_desc, v_desc, out_desc, C: gl.constexpr):
    """Allocate everything the roles share; k_ring guards the slots of both K_i and V_i."""
    NUM_Q: gl.constexpr = C.Q_STAGES * C.NUM_WARPGROUPS
    NUM_WORDS: gl.constexpr = LIST_WORDS if C.SENDS_PLACES else 1
    NUM_WAITING: gl.constexpr = C.NUM_WARPGROUPS if C.SENDS_PLACES else 0  # for the first tile
    q_smem = make_parts(q_desc, NUM_Q, 64, C.D, 0, C)
    k_smem = make_parts(k_desc, C.NUM_STAGES, C.BLOCK_N, C.D, 0, C)
    v_smem = make_parts(v_desc, C.NUM_STAGES, C.BLOCK_N, C.DV, 0, C)
    out_smem = make_parts(out_desc, C.NUM_WARPGROUPS, 64, C.DV, 0, C)
    tiles = make_mailbox(NUM_WAITING, LIST_SLOTS, NUM_WORDS)
    q_ring = make_ring(NUM_Q, 1)
    ring = make_ring(C.NUM_STAGES, C.NUM_WARPGROUPS)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, k_smem, v_smem, out_smem, q_ring, ring, ring, tiles)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "paging", "lists", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "max_ptr", "counter_ptr"],
)
def forward_quad_kernel(
    q_desc, k_desc, v_desc, out_desc, q_rest, k_rest, v_rest, out_rest, lse_ptr, sinks_ptr, max_ptr, counter_ptr,
    work_ptr, paging, lists, scale_log2, cap_scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Out and lse of all tiles. Arguments as forward_kernel's; there are no second column parts."""
    queries, keys = Parts(q_desc, q_rest), Parts(k_desc, k_rest)
    values, outputs = Parts(v_desc, v_rest), Parts(out_desc, out_rest)
    pipe = make_pipeline(queries, keys, values, outputs, C)
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    gl.warp_specialize([
        (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 0, C)),
        (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 1, C)),
        (producer, (queries, keys, values, counter_ptr, work_ptr, paging, lists, sizes, pipe, C)),
    ], [4, 1], [C.CONSUMER_REGS, 24])  # fmt: skip
