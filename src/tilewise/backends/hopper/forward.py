"""The forward kernel: out and lse of 128 or 192 query rows at a time, for sm_90.

Grid: one CTA per SM, persistent. Roles, one function each:
  producer   one warp: takes tiles from the counter, feeds the Q, K and V rings by TMA
  consumers  two or three warpgroups of 64 query rows. Per key tile S_i = Q K_i^T and O += P_{i-1} V_{i-1} are issued
             together, and the softmax of S_i runs while the second product does

Key tiles are walked from right to left: the right edge comes first, a left window edge last, and the loop over whole
tiles between them has no mask. Producer and consumers each compute the number of key tiles; they must agree. P stays
in fp32 between iterations, or in integers of two columns (CARRY_PAIRS), because a loop-carried 16-bit tensor costs 64
byte permutations an iteration.

Head dims that are no power of two come in two column parts, (128, 64) for 192: descriptors, buffers and accumulators
are pairs, whose second half is unused when the second part has no columns.

Under a tile mask, key tiles come from a list instead, those that need a mask first (listed.py).

Paged keys change the producer alone: it looks up the pages of a key tile and fetches the tile in boxes.

Figures: bench/results/hopper-forward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Parts, Span
from tilewise.backends.gpu.releases import aggregate, async_load, async_store
from tilewise.backends.hopper.channels import Mailbox, Ring, make_ring, start
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.listed import entry_at, hide_scores, list_at, load_words, send_place
from tilewise.backends.hopper.primitives import from_pairs, in_pairs, pin, uniform
from tilewise.backends.hopper.products import (
    issue_output,
    issue_scores,
    load_tile,
    rescale_output,
    scale_output,
    wait_output,
)
from tilewise.backends.hopper.schedule import (
    announce,
    first_tile,
    first_turn,
    following_tile,
    hidden_tiles,
    key_tiles,
    make_tiles,
    place_at,
    spans_at,
    take_tile,
    whole_tiles,
)
from tilewise.backends.hopper.scores import capped, finish_rows, mask_scores, no_rows, raise_max, soften, whole_rows


@aggregate
class Pipeline:
    """The shared memory of a CTA: tiles (pairs of column parts) and the channels that guard them."""

    q_smem: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    out_smem: gl.tuple
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    tiles: Mailbox


# ---- producer


@gluon.jit
def load_pages(
    desc, smem, slot, ready, pages, page_rows, length, head, row, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr
):
    """Start the copies of a paged key tile, in boxes of CHUNK rows of one page and 64 columns.

    64 columns of 16 bits are one panel of the swizzled tile, in which the rows of a box are contiguous. Rows past the
    sequence's end, in the last page or in pages that are not looked up, arrive as zeros (see tile_at).
    """
    CHUNK: gl.constexpr = C.CHUNK
    PAGE_SIZE: gl.constexpr = C.PAGE_SIZE
    for c in gl.static_range(C.BLOCK_N // C.CHUNK):
        first = row + c * CHUNK
        number = first // PAGE_SIZE
        page = gl.load(pages + number, mask=first < length, other=0)
        span = Span(0, page * page_rows, max(min(length - number * PAGE_SIZE, PAGE_SIZE), 0))
        for panel in gl.static_range(D // 64):
            box = smem.first.index(slot).slice(c * CHUNK, CHUNK, dim=3).slice(panel * 64, 64, dim=4)
            place = tile_at(span, head, first - number * PAGE_SIZE, panel * 64, True)
            async_load(desc.first, place, ready, box)
        for panel in gl.static_range(D_REST // 64):
            box = smem.rest.index(slot).slice(c * CHUNK, CHUNK, dim=3).slice(panel * 64, 64, dim=4)
            place = tile_at(span, head, first - number * PAGE_SIZE, D + panel * 64, True)
            async_load(desc.rest, place, ready, box)


@gluon.jit
def load_keys(desc, smem, slot, ready, paging, span, head, row, C: gl.constexpr):
    """Start the copy of a tile of K."""
    if C.IS_PAGED:
        pages = paging.table + span.sequence * paging.stride
        load_pages(desc, smem, slot, ready, pages, paging.k_rows, span.length, head, row, C.D, C.D_REST, C)
    else:
        load_tile(desc, smem, slot, ready, span, head, row, C.D, C.D_REST, C)


@gluon.jit
def load_values(desc, smem, slot, ready, paging, span, head, row, C: gl.constexpr):
    """Start the copy of a tile of V."""
    if C.IS_PAGED:
        pages = paging.table + span.sequence * paging.stride
        load_pages(desc, smem, slot, ready, pages, paging.v_rows, span.length, head, row, C.DV, C.DV_REST, C)
    else:
        load_tile(desc, smem, slot, ready, span, head, row, C.DV, C.DV_REST, C)


@gluon.jit
def take_next(counter_ptr, num_entries, pipe, tile_turn, sizes, C: gl.constexpr):
    """Take the CTA's next tile from the counter. Unless places are sent, send its number to the consumers.

    Called before the key loop, the atomic's latency is hidden, but the tile taken waits until this one is done. With
    TAKES_LATE it is called after the loop.
    """
    if C.IS_VARLEN:
        tile = take_tile(counter_ptr, num_entries * sizes.num_items, True)
    else:
        tile = take_tile(counter_ptr, sizes.num_tiles, True)
        if not C.IS_LISTED:
            pipe.tiles.send(tile_turn, tile)
    return tile


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, work_ptr, paging, lists, sizes, pipe, C: gl.constexpr):
    """Feed the rings. With MERGE_KV, K_i and V_{i-1}, which are used together, share a slot and its barriers."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * C.NUM_WARPGROUPS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    Q_BYTES: gl.constexpr = 64 * (C.D + C.D_REST) * 2
    K_BYTES: gl.constexpr = C.BLOCK_N * (C.D + C.D_REST) * 2
    V_BYTES: gl.constexpr = C.BLOCK_N * (C.DV + C.DV_REST) * 2
    kv_at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    tile_turn = first_turn(C)
    tile = gl.program_id(0)
    num_entries = 0
    if C.IS_VARLEN:
        num_entries = gl.load(work_ptr)
        tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)
    if C.IS_LISTED:
        tile = send_place(lists, tile, pipe.tiles, tile_turn, sizes)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 1, C)
        head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 1, C)
        kv_head = head // sizes.group_size
        if C.IS_LISTED:
            entries = list_at(lists, q_span.sequence, head, tile)
            count = pipe.tiles.word(tile_turn, 4, 1)
            last = pipe.tiles.word(tile_turn, 6, 1)
            row = last * BLOCK_N
            following, _ = entry_at(entries, min(1, count - 1))
        else:
            last, count = key_tiles(block, q_span.length, kv_span.length, sizes, C)
        # Load the first K right after the first warpgroup's Q, so that this warpgroup can start.
        for w in gl.static_range(NUM_WARPGROUPS):
            at = q_at.lane(w, NUM_WARPGROUPS)
            ready = pipe.q_ring.acquire(at, Q_BYTES)
            load_tile(q_desc, pipe.q_smem, at.slot, ready, q_span, head, block * BLOCK_M + w * 64, C.D, C.D_REST, C)
            if w == 0:
                ready = pipe.k_ring.acquire(kv_at, K_BYTES)
                load_keys(k_desc, pipe.k_smem, kv_at.slot, ready, paging, kv_span, kv_head, last * BLOCK_N, C)
        q_at = q_at.next()
        if not C.TAKES_LATE:
            tile = take_next(counter_ptr, num_entries, pipe, tile_turn, sizes, C)
        for i in range(1, count):
            if C.IS_LISTED:
                v_row = row
                row = following * BLOCK_N
                following, _ = entry_at(entries, min(i + 1, count - 1))
            else:
                row = (last - i) * BLOCK_N
                v_row = row + BLOCK_N
            v_at = kv_at
            kv_at = kv_at.next()
            if C.MERGE_KV:
                ready = pipe.k_ring.acquire(kv_at, K_BYTES + V_BYTES)
                load_keys(k_desc, pipe.k_smem, kv_at.slot, ready, paging, kv_span, kv_head, row, C)
                load_values(v_desc, pipe.v_smem, kv_at.slot, ready, paging, kv_span, kv_head, v_row, C)
            else:
                ready = pipe.k_ring.acquire(kv_at, K_BYTES)
                load_keys(k_desc, pipe.k_smem, kv_at.slot, ready, paging, kv_span, kv_head, row, C)
                ready = pipe.v_ring.acquire(v_at, V_BYTES)
                load_values(v_desc, pipe.v_smem, v_at.slot, ready, paging, kv_span, kv_head, v_row, C)
        if C.TAKES_LATE:
            tile = take_next(counter_ptr, num_entries, pipe, tile_turn, sizes, C)
        tile_turn = tile_turn.next()
        if not C.IS_LISTED:
            row = (last + 1 - count) * BLOCK_N
        if C.MERGE_KV:
            kv_at = kv_at.next()
            ready = pipe.k_ring.acquire(kv_at, V_BYTES)
        else:
            ready = pipe.v_ring.acquire(kv_at, V_BYTES)
        load_values(v_desc, pipe.v_smem, kv_at.slot, ready, paging, kv_span, kv_head, row, C)
        kv_at = kv_at.next()
        if C.IS_VARLEN:
            tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)
        if C.IS_LISTED:
            tile = send_place(lists, tile, pipe.tiles, tile_turn, sizes)


# ---- consumer


@gluon.jit
def pass_over(at, pipe, C: gl.constexpr):
    """Wait for a tile of K and its V, release them unread, and return the cursor of the next tile."""
    pipe.k_ring.wait(at)
    pipe.k_ring.release(at)
    if not C.MERGE_KV:
        pipe.v_ring.wait(at)
        pipe.v_ring.release(at)
    return at.next()


@gluon.jit
def carried(p, DTYPE: gl.constexpr, C: gl.constexpr):
    """P as it is kept until the next tile."""
    if C.CARRY_PAIRS:
        return in_pairs(p, DTYPE)
    else:
        return p


@gluon.jit
def left_operand(p, DTYPE: gl.constexpr, C: gl.constexpr):
    """A `carried` P as the left operand of P V."""
    P_LAYOUT: gl.constexpr = left_operand_layout(accumulator_layout(C.DV))
    if C.CARRY_PAIRS:
        return gl.convert_layout(from_pairs(p, DTYPE), P_LAYOUT)
    else:
        return gl.convert_layout(p.to(DTYPE), P_LAYOUT)


@gluon.jit
def attend_first(
    n_block, row, q_slot, at, scale_log2, cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe, C: gl.constexpr,
):  # fmt: skip
    """The rightmost key tile that these rows see. It is always masked, and its softmax starts the running state."""
    DV: gl.constexpr = C.DV
    DV_REST: gl.constexpr = C.DV_REST
    if C.IS_LISTED:
        words = load_words(lists.bits, kind, row, 0, C)
    pipe.k_ring.wait(at)
    scores = warpgroup_mma_wait(0, deps=[issue_scores(pipe.q_smem, q_slot, pipe.k_smem, at.slot, C)])
    pipe.k_ring.release(at)
    scores = capped(scores, cap_scale, C)
    if C.IS_LISTED:
        scores = hide_scores(scores, words, seqlen_k - n_block * C.BLOCK_N, C)
    else:
        scores = mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C)
    row_ref, row_sum = no_rows(C)
    p, factor, row_ref, row_sum, row_top = soften(scores, row_ref, row_sum, scale_log2, True, C)
    if not C.KEEPS_TOP:
        row_top = 0
    acc = gl.zeros([64, DV], gl.float32, accumulator_layout(DV))
    acc_rest = 0
    if DV_REST:
        acc_rest = gl.zeros([64, DV_REST], gl.float32, accumulator_layout(DV_REST))
    return acc, acc_rest, carried(p, pipe.v_smem.first.dtype, C), factor, row_ref, row_sum, row_top


@gluon.jit
def attend(
    n_block, row, q_slot, at, acc, acc_rest, p, factor, row_ref, row_sum, row_top, scale_log2, cap_scale,
    seqlen_q, seqlen_k, lists, kind, sizes, pipe, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile: issue S = Q K_i^T and O += P_{i-1} V_{i-1} together; the softmax of tile i overlaps the second one.

    `p` and `factor` are the last tile's probabilities and rescaling, `at` is the slot of its V. `kind` is that of a
    tile mask's tile, where there is a mask.
    """
    IN_FLIGHT: gl.constexpr = 2 if C.DV_REST else 1
    p_operand = left_operand(p, pipe.v_smem.first.dtype, C)
    v_at = at
    at = at.next()
    if MASKED and C.IS_LISTED:
        words = load_words(lists.bits, kind, row, 0, C)
    pipe.k_ring.wait(at)
    issued_scores = issue_scores(pipe.q_smem, q_slot, pipe.k_smem, at.slot, C)
    if C.MERGE_KV:
        v_at = at
    else:
        pipe.v_ring.wait(v_at)
    if C.RESCALE_EARLY:
        acc, acc_rest = rescale_output(acc, acc_rest, factor, C)
    acc, acc_rest = issue_output(p_operand, pipe.v_smem, v_at.slot, acc, acc_rest, C)
    if MASKED:  # masked tiles are few: give up the overlap to save registers
        scores = warpgroup_mma_wait(0, deps=[issued_scores])
        acc, acc_rest = wait_output(acc, acc_rest, p_operand, C)
    else:
        scores = warpgroup_mma_wait(IN_FLIGHT, deps=[issued_scores])
    if not C.MERGE_KV:
        pipe.k_ring.release(at)
    scores = capped(scores, cap_scale, C)
    if MASKED:
        if C.IS_LISTED:
            scores = hide_scores(scores, words, seqlen_k - n_block * C.BLOCK_N, C)
        else:
            scores = mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C)
    p, factor, row_ref, row_sum, top = soften(scores, row_ref, row_sum, scale_log2, MASKED, C)
    if C.KEEPS_TOP:
        row_top = gl.maximum(row_top, top)
    p = carried(p, pipe.v_smem.first.dtype, C)
    if not MASKED:
        if C.PIN_EXP:
            row_sum = pin(row_sum)
        acc, acc_rest = wait_output(acc, acc_rest, p_operand, C)
    if C.MERGE_KV:
        pipe.k_ring.release(at)
    else:
        pipe.v_ring.release(v_at)
    if not C.RESCALE_EARLY:
        acc, acc_rest = rescale_output(acc, acc_rest, factor, C)
    return acc, acc_rest, p, factor, row_ref, row_sum, row_top, at


@gluon.jit
def store_lse(lse, lse_ptr, item, row, q_first, seqlen_q, sizes, C: gl.constexpr):
    """Write one warpgroup's lse: a row per (batch, head) or, packed, per head of (head, total_q)."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))
    first = item.to(gl.int64) * (sizes.total_q if C.IS_VARLEN else seqlen_q) + q_first
    gl.store(lse_ptr + first + rows, lse, mask=rows < seqlen_q)


@gluon.jit
def store_output(acc, acc_rest, out_desc, slot, span, head, row, pipe, C: gl.constexpr):
    """Write one warpgroup's rows of O through shared memory by TMA, which drops rows past the end."""
    DV: gl.constexpr = C.DV
    DV_REST: gl.constexpr = C.DV_REST
    DTYPE: gl.constexpr = pipe.out_smem.first.dtype
    if not C.OUT_IN_Q:
        tma.store_wait(0)  # the last tile's store has read this buffer
    pipe.out_smem.first.index(slot).reshape([64, DV]).store(acc.to(DTYPE))
    if DV_REST:
        pipe.out_smem.rest.index(slot).reshape([64, DV_REST]).store(acc_rest.to(DTYPE))
    fence_async_shared()  # orders the stores above before TMA's reads below
    async_store(out_desc.first, tile_at(span, head, row, 0, C.IS_VARLEN), pipe.out_smem.first.index(slot))
    if DV_REST:
        async_store(out_desc.rest, tile_at(span, head, row, DV, C.IS_VARLEN), pipe.out_smem.rest.index(slot))


@gluon.jit
def consumer(
    out_desc, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, WARPGROUP: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Softmax(Q K^T) V for 64 of the CTA's query rows, tile after tile."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * NUM_WARPGROUPS
    # When to compute the span of the output. Packed: before the mailbox slot with its words is released. Dense wide
    # heads: as late as possible, because the values that its division needs would spill.
    DIVIDES_LATE: gl.constexpr = C.OUT_IN_Q and not C.IS_VARLEN
    at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    tile_turn = first_turn(C)
    tile = first_tile(pipe.tiles, tile_turn, C)
    kind = 0
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 4, C)
        row = block * BLOCK_M + WARPGROUP * 64
        head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        q_lane = q_at.lane(WARPGROUP, NUM_WARPGROUPS)
        hidden = 0
        if C.IS_LISTED:
            count = uniform(pipe.tiles.word(tile_turn, 4, 4))
            masked = uniform(pipe.tiles.word(tile_turn, 5, 4))
            last = pipe.tiles.word(tile_turn, 6, 4)
            kind = pipe.tiles.word(tile_turn, 7, 4)
            entries = list_at(lists, q_span.sequence, head, tile)
            n_next, kind_next = entry_at(entries, min(1, count - 1))
        else:
            # The rightmost tile, then the rest of the right edge, whole tiles, the left edge.
            # Tiles right of all that these rows see are needed by other rows of the CTA: they are released unread.
            last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)
            hidden = hidden_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C)
            for _ in range(hidden):
                at = pass_over(at, pipe, C)
        pipe.q_ring.wait(q_lane)
        acc, acc_rest, p, factor, row_ref, row_sum, row_top = attend_first(
            last - hidden, row, q_lane.slot, at, scale_log2, cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe,
            C)  # fmt: skip
        if C.IS_LISTED:
            begin = max(masked, 1)
            end = count
            for i in range(1, masked):
                n_block = n_next
                kind = kind_next
                n_next, kind_next = entry_at(entries, min(i + 1, count - 1))
                acc, acc_rest, p, factor, row_ref, row_sum, row_top, at = attend(
                    n_block, row, q_lane.slot, at, acc, acc_rest, p, factor, row_ref, row_sum, row_top, scale_log2,
                    cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe, True, C)  # fmt: skip
        else:
            begin, end = whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C, C.IS_LAZY)
        if C.HAS_RIGHT:
            for i in range(hidden + 1, begin):
                acc, acc_rest, p, factor, row_ref, row_sum, row_top, at = attend(
                    last - i, row, q_lane.slot, at, acc, acc_rest, p, factor, row_ref, row_sum, row_top, scale_log2,
                    cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe, True, C)  # fmt: skip
        for i in range(begin, end):
            acc, acc_rest, p, factor, row_ref, row_sum, row_top, at = attend(
                last - i, row, q_lane.slot, at, acc, acc_rest, p, factor, row_ref, row_sum, row_top, scale_log2,
                cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe, False, C)  # fmt: skip
        if C.HAS_LEFT:
            for i in range(end, count):
                acc, acc_rest, p, factor, row_ref, row_sum, row_top, at = attend(
                    last - i, row, q_lane.slot, at, acc, acc_rest, p, factor, row_ref, row_sum, row_top, scale_log2,
                    cap_scale, seqlen_q, seqlen_k, lists, kind, sizes, pipe, True, C)  # fmt: skip

        # The last P V overlaps everything that does not depend on it.
        if not DIVIDES_LATE:
            head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        if not C.OUT_IN_Q:
            pipe.q_ring.release(q_lane)
        q_at = q_at.next()
        p_operand = left_operand(p, pipe.v_smem.first.dtype, C)
        if C.MERGE_KV:
            at = at.next()
            pipe.k_ring.wait(at)
        else:
            pipe.v_ring.wait(at)
        if C.RESCALE_EARLY:
            acc, acc_rest = rescale_output(acc, acc_rest, factor, C)
        acc, acc_rest = issue_output(p_operand, pipe.v_smem, at.slot, acc, acc_rest, C)
        if max_ptr is not None:
            raise_max(row_top if C.KEEPS_TOP else row_ref, max_ptr, item, row, seqlen_q, scale_log2, sizes, C)
        row_ref, row_sum = whole_rows(row_ref, row_sum, scale_log2, C)
        factor, lse = finish_rows(row_ref, row_sum, sinks_ptr, item, sizes, C)
        if DIVIDES_LATE:
            head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        store_lse(lse, lse_ptr, item, row, q_span.start, seqlen_q, sizes, C)
        acc, acc_rest = wait_output(acc, acc_rest, p_operand, C)
        if C.MERGE_KV:
            pipe.k_ring.release(at)
        else:
            pipe.v_ring.release(at)
        at = at.next()
        acc, acc_rest = scale_output(acc, acc_rest, factor, C)
        store_output(acc, acc_rest, out_desc, WARPGROUP, q_span, head, row, pipe, C)
        if C.OUT_IN_Q:
            tma.store_wait(0)  # Q's slot is free once TMA has read O from it
            pipe.q_ring.release(q_lane)
    tma.store_wait(0)


# ---- kernel


@gluon.jit
def make_parts(
    desc, NUM_SLOTS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr
):
    """Buffers for tiles of ROWS rows: a pair of column parts; without a second part, the first one twice."""
    first = gl.allocate_shared_memory(desc.first.dtype, slots_shape(NUM_SLOTS, ROWS, D, C.IS_VARLEN), desc.first.layout)
    rest = first
    if D_REST:
        rest = gl.allocate_shared_memory(
            desc.rest.dtype, slots_shape(NUM_SLOTS, ROWS, D_REST, C.IS_VARLEN), desc.rest.layout
        )
    return Parts(first, rest)


@gluon.jit
def make_pipeline(q_desc, k_desc, v_desc, out_desc, C: gl.constexpr):
    """Allocate everything the roles share."""
    NUM_Q: gl.constexpr = C.Q_STAGES * C.NUM_WARPGROUPS
    q_smem = make_parts(q_desc, NUM_Q, 64, C.D, C.D_REST, C)
    k_smem = make_parts(k_desc, C.NUM_STAGES, C.BLOCK_N, C.D, C.D_REST, C)
    v_smem = make_parts(v_desc, C.NUM_STAGES, C.BLOCK_N, C.DV, C.DV_REST, C)
    out_smem = q_smem
    if not C.OUT_IN_Q:
        out_smem = make_parts(out_desc, C.NUM_WARPGROUPS, 64, C.DV, C.DV_REST, C)
    tiles = make_tiles(C.NUM_WARPGROUPS, C)
    q_ring = make_ring(NUM_Q, 1)
    k_ring = make_ring(C.NUM_STAGES, C.NUM_WARPGROUPS)
    v_ring = k_ring
    if not C.MERGE_KV:
        v_ring = make_ring(C.NUM_STAGES, C.NUM_WARPGROUPS)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, k_smem, v_smem, out_smem, q_ring, k_ring, v_ring, tiles)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "paging", "lists", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "max_ptr", "counter_ptr"],
)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, q_rest, k_rest, v_rest, out_rest, lse_ptr, sinks_ptr, max_ptr, counter_ptr,
    work_ptr, paging, lists, scale_log2, cap_scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Out and lse of all tiles.

    Descriptors come in pairs for the two column parts; *_rest is None without a second part. Packed queries: work_ptr
    is the list of their blocks (gpu/work_list.py). Tile mask: `lists` are those of listed.Lists. What a problem does
    not have is None.
    """
    queries, keys = Parts(q_desc, q_rest), Parts(k_desc, k_rest)
    values, outputs = Parts(v_desc, v_rest), Parts(out_desc, out_rest)
    pipe = make_pipeline(queries, keys, values, outputs, C)
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    if C.NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 0, C)),
            (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 1, C)),
            (producer, (queries, keys, values, counter_ptr, work_ptr, paging, lists, sizes, pipe, C)),
        ], [4, 1], [C.CONSUMER_REGS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 0, C)),
            (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 1, C)),
            (consumer, (outputs, lse_ptr, sinks_ptr, max_ptr, scale_log2, cap_scale, lists, sizes, pipe, 2, C)),
            (producer, (queries, keys, values, counter_ptr, work_ptr, paging, lists, sizes, pipe, C)),
        ], [4, 4, 1], [C.CONSUMER_REGS, C.CONSUMER_REGS, 24])  # fmt: skip
