"""The FP8 forward kernel: both products by e4m3 wgmma, for sm_90. forward.py explains grid, roles and order of tiles.

What differs from 16 bits:
  scales   S = (q k) * q_scale * k_scale, so the running maximum is of scaled scores. v's scale enters the final factor
           or, where blocks have scales of their own, each tile's product.
  P        is rounded to e4m3 as exp2(s - max + 8), so it reaches from 2^8 down to 2^-9. Row sums of the unrounded P
           carry the same factor 2^8, which cancels.
  V        comes transposed, with keys in operand order (transpose_values_kernel)
  sums     tensor cores keep about 14 bits of an FP8 sum and truncate the rest, so long sums come out too small. Each
           tile's P V therefore has an accumulator of its own, over 128 keys, and is added to O in fp32:
           o = o * alpha + pv. That is one FFMA where rescaling o would be one FMUL.

V^T: tiles of it are made first, because 8-bit operands must be contiguous along the summed dimension.

Within every 16 keys, V^T is stored in operand order. Of the scores, thread t of a row's four holds keys 8b + 2t + c; as
a left operand it must hold positions 4t + 2b + c. With V's keys permuted accordingly, P goes from the softmax into P V
without moving between threads.

Figures: bench/results/hopper-fp8-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Rows
from tilewise.backends.gpu.releases import aggregate, async_load, async_store
from tilewise.backends.hopper.channels import Mailbox, Ring, make_ring, start
from tilewise.backends.hopper.layouts import accumulator_layout, slots_shape, tile_at
from tilewise.backends.hopper.primitives import NEG_INF, barrier_arrive, barrier_sync, exp2, pin, rebuilt
from tilewise.backends.hopper.schedule import (
    announce,
    first_tile,
    first_turn,
    following_tile,
    key_tiles,
    make_tiles,
    next_tile,
    place_at,
    spans_at,
    take_tile,
    whole_tiles,
)
from tilewise.backends.hopper.scores import finish_rows, mask_scores, sum_rows

# 2^8 P is rounded instead of P: e4m3 reaches from 448 down to 2^-9.
P_SHIFT = gl.constexpr(8.0)
# Rows of q that share a scale.
Q_BLOCK = gl.constexpr(128)
# The first of the named barriers by which warpgroups take turns, and the threads that meet there: two warpgroups.
TURN, TURN_THREADS = gl.constexpr(8), gl.constexpr(256)


@gluon.constexpr_function
def fp8_accumulator_layout(columns):
    """accumulator_layout for 8-bit operands: the same registers, but a wgmma sums over 32 elements."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def fp8_operand_layout(columns):
    """Registers of an e4m3 left operand of a product with so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=fp8_accumulator_layout(columns), k_width=4)


@aggregate
class Fp8Pipeline:
    """The shared memory of a CTA: tiles and the channels that guard them."""

    q_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    out_smem: gl.shared_memory_descriptor
    q_ring: Ring
    k_ring: Ring
    v_ring: Ring
    tiles: Mailbox


@gluon.jit
def value_slot(span, kv_head, tiles_per_head, sizes, C: gl.constexpr):
    """The slot of a sequence's first tile of transposed values.

    Packed sequence b starts at slot cu_seqlens[b] // BLOCK_N + b, which leaves space for all of its tiles.
    """
    if C.IS_VARLEN:
        return kv_head * tiles_per_head + span.start // C.BLOCK_N + span.sequence
    else:
        return (span.sequence * (sizes.num_heads // sizes.group_size) + kv_head) * tiles_per_head


@gluon.jit
def scale_at(scale, batch_idx, head):
    """The scales of a head's blocks."""
    ptr = scale.ptr + batch_idx * scale.stride_batch + head * scale.stride_head
    return Rows(ptr, scale.stride_batch, scale.stride_head, scale.stride_row)


# ---- producer


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, work_ptr, tiles_per_head, sizes, pipe, C: gl.constexpr):
    """Feed the rings."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * C.NUM_WARPGROUPS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    Q_BYTES: gl.constexpr = 64 * C.D
    KV_BYTES: gl.constexpr = C.BLOCK_N * C.D
    kv_at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    tile_turn = first_turn(C)
    tile = gl.program_id(0)
    if C.IS_VARLEN:
        num_entries = gl.load(work_ptr)
        tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 1, C)
        head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 1, C)
        kv_head = head // sizes.group_size
        last, count = key_tiles(block, q_span.length, kv_span.length, sizes, C)
        v_slot = value_slot(kv_span, kv_head, tiles_per_head, sizes, C)
        for w in gl.static_range(NUM_WARPGROUPS):
            at = q_at.lane(w, NUM_WARPGROUPS)
            ready = pipe.q_ring.acquire(at, Q_BYTES)
            place = tile_at(q_span, head, block * BLOCK_M + w * 64, 0, C.IS_VARLEN)
            async_load(q_desc, place, ready, pipe.q_smem.index(at.slot))
        q_at = q_at.next()
        # Taken early, so that the atomic's latency is hidden behind this tile.
        if C.IS_VARLEN:
            tile = take_tile(counter_ptr, num_entries * sizes.num_items)
        else:
            tile = next_tile(counter_ptr, sizes)
            pipe.tiles.send(tile_turn, tile)
        tile_turn = tile_turn.next()
        for i in range(count):
            ready = pipe.k_ring.acquire(kv_at, KV_BYTES)
            place = tile_at(kv_span, kv_head, (last - i) * BLOCK_N, 0, C.IS_VARLEN)
            async_load(k_desc, place, ready, pipe.k_smem.index(kv_at.slot))
            ready = pipe.v_ring.acquire(kv_at, KV_BYTES)
            async_load(v_desc, [v_slot + last - i, 0, 0], ready, pipe.v_smem.index(kv_at.slot))
            kv_at = kv_at.next()
        if C.IS_VARLEN:
            tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)


# ---- consumer: the two products and what surrounds them


@gluon.jit
def issue_scores(q_slot, k_slot, pipe, C: gl.constexpr):
    """Start S = Q K^T."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    D: gl.constexpr = C.D
    zeros = gl.zeros([64, BLOCK_N], gl.float32, fp8_accumulator_layout(BLOCK_N))
    q = pipe.q_smem.index(rebuilt(q_slot, k_slot, C.D == 256)).reshape([64, D])
    k = pipe.k_smem.index(k_slot).reshape([BLOCK_N, D])
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_values(p, slot, pipe, INDEX: gl.constexpr, C: gl.constexpr):
    """Start P V for the PART columns from INDEX * PART on, in an accumulator of its own."""
    PART: gl.constexpr = C.PART
    zeros = gl.zeros([64, PART], gl.float32, fp8_accumulator_layout(PART))
    v = pipe.v_smem.index(slot).reshape([C.D, C.BLOCK_N])
    if C.D > PART:
        v = v.slice(INDEX * PART, PART, dim=0)
    return warpgroup_mma(p, v.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def left_operand(p, C: gl.constexpr):
    """P in e4m3 as the left operand of P V; no element moves between threads."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    grouped = gl.reshape(p.to(gl.float8e4nv), [64, BLOCK_N // 16, 2, 4, 2])
    ordered = gl.reshape(gl.permute(grouped, [0, 1, 3, 2, 4]), [64, BLOCK_N])
    return gl.convert_layout(ordered, fp8_operand_layout(C.PART))


@gluon.jit
def add_values(acc, product, alpha, v_scale, C: gl.constexpr):
    """O * alpha + product, in fp32; where blocks of V have scales, the product is scaled first."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, fp8_accumulator_layout(C.PART)))[:, None]
    if C.HAS_V_BLOCKS:
        return acc * factor + product * v_scale
    else:
        return acc * factor + product


@gluon.jit
def add_tile(acc, acc_rest, p, alpha, v_scale, at, pipe, C: gl.constexpr):
    """Add P V of one more tile to O, once its V has arrived in slot `at`."""
    pipe.v_ring.wait(at)
    return add_product(acc, acc_rest, left_operand(p, C), alpha, v_scale, at, pipe, C)


@gluon.jit
def add_product(acc, acc_rest, operand, alpha, v_scale, at, pipe, C: gl.constexpr):
    """O * alpha + P V for a V that has arrived: one column part after the other, each waited for."""
    product = warpgroup_mma_wait(0, deps=[issue_values(operand, at.slot, pipe, 0, C)])
    acc = add_values(acc, product, alpha, v_scale, C)
    if C.D > C.PART:
        product = warpgroup_mma_wait(0, deps=[issue_values(operand, at.slot, pipe, 1, C)])
        acc_rest = add_values(acc_rest, product, alpha, v_scale, C)
    pipe.v_ring.release(at)
    return acc, acc_rest


@gluon.jit
def max_rows(scores, C: gl.constexpr):
    """Row maxima. Without CARRY, a thread computes them in 8 chains a row: a single chain of 32 waits for its own
    latency at each element, and only there can the chains of one row overlap the exponentials of the other.
    """
    if C.CARRY:
        return gl.max(scores, axis=1)
    else:
        parts = gl.max(gl.reshape(scores, [64, C.BLOCK_N // 32, 4, 4, 2]), axis=2)
        row_max = gl.max(gl.max(gl.max(parts, axis=1), axis=2), axis=1)
        return gl.convert_layout(row_max, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))


@gluon.jit
def soften(scores, row_max, row_sum, score_scale, row, n_block, seqlen_q, seqlen_k, sizes,
           MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(P, alpha, row_max, row_sum) after one more tile of scores."""
    scores = gl.convert_layout(scores, accumulator_layout(C.BLOCK_N))
    if MASKED:
        scores = mask_scores(scores, row, n_block, seqlen_q, seqlen_k, sizes, C)
    new_max = gl.maximum(row_max, max_rows(scores, C) * score_scale)
    # Only a masked tile can leave a row without any key so far.
    shift = gl.where(new_max == NEG_INF, 0.0, new_max) if MASKED else new_max
    alpha = exp2(row_max - shift)
    p = exp2(scores * score_scale - (shift - P_SHIFT)[:, None])
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None] + sum_rows(p, C)
    return p, alpha, new_max, row_sum


@gluon.jit
def attend(
    n_block, row, q_slot, at, acc, acc_rest, p, alpha, row_max, row_sum, row_scale, k_scales, v_scales,
    seqlen_q, seqlen_k, sizes, pipe, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile with CARRY: add the last tile's P V to O, then compute the new P from S = Q K_i^T.

    `p` and `alpha` are the last tile's probabilities and rescaling, `at` is the slot of its V.
    """
    NEXT: gl.constexpr = (WARPGROUP + 1) % C.NUM_WARPGROUPS
    v_at = at
    at = at.next()
    score_scale = row_scale * gl.load(k_scales.ptr + n_block * k_scales.stride_row)
    v_scale = 1.0
    if C.HAS_V_BLOCKS:
        v_scale = gl.load(v_scales.ptr + (n_block + 1) * v_scales.stride_row)
    if C.OVERLAP:
        operand = left_operand(p, C)
        if C.PING_PONG:
            barrier_sync(TURN + WARPGROUP, TURN_THREADS)
        pipe.k_ring.wait(at)
        issued = issue_scores(q_slot, at.slot, pipe, C)
        pipe.v_ring.wait(v_at)
        product = issue_values(operand, v_at.slot, pipe, 0, C)
        if C.PING_PONG:
            barrier_arrive(TURN + NEXT, TURN_THREADS)
        if MASKED:  # masked tiles are few: give up the overlap to save registers
            scores, product = warpgroup_mma_wait(0, deps=[issued, product])
        else:
            scores = warpgroup_mma_wait(1, deps=[issued])
        pipe.k_ring.release(at)
        p, new_alpha, row_max, row_sum = soften(
            scores, row_max, row_sum, score_scale, row, n_block, seqlen_q, seqlen_k, sizes, MASKED, C)  # fmt: skip
        if not MASKED:
            if C.PIN_EXP:
                row_sum = pin(row_sum)
            product = warpgroup_mma_wait(0, deps=[product])
        pipe.v_ring.release(v_at)
        acc = add_values(acc, product, alpha, v_scale, C)
        alpha = new_alpha
    else:
        if C.PING_PONG:
            barrier_sync(TURN + WARPGROUP, TURN_THREADS)
        acc, acc_rest = add_tile(acc, acc_rest, p, alpha, v_scale, v_at, pipe, C)
        pipe.k_ring.wait(at)
        issued = issue_scores(q_slot, at.slot, pipe, C)
        if C.PING_PONG:
            barrier_arrive(TURN + NEXT, TURN_THREADS)
        scores = warpgroup_mma_wait(0, deps=[issued])
        pipe.k_ring.release(at)
        p, alpha, row_max, row_sum = soften(
            scores, row_max, row_sum, score_scale, row, n_block, seqlen_q, seqlen_k, sizes, MASKED, C)  # fmt: skip
    return acc, acc_rest, p, alpha, row_max, row_sum, at


@gluon.jit
def attend_at_once(
    n_block, row, q_slot, at, acc, acc_rest, row_max, row_sum, row_scale, k_scales, v_scales,
    seqlen_q, seqlen_k, sizes, pipe, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile without CARRY, from S = Q K^T to O += P V, so that rounding P overlaps its exponentials."""
    pipe.k_ring.wait(at)
    issued = issue_scores(q_slot, at.slot, pipe, C)
    score_scale = row_scale * gl.load(k_scales.ptr + n_block * k_scales.stride_row)
    v_scale = 1.0
    if C.HAS_V_BLOCKS:
        v_scale = gl.load(v_scales.ptr + n_block * v_scales.stride_row)
    scores = warpgroup_mma_wait(0, deps=[issued])
    pipe.k_ring.release(at)
    p, alpha, row_max, row_sum = soften(
        scores, row_max, row_sum, score_scale, row, n_block, seqlen_q, seqlen_k, sizes, MASKED, C)  # fmt: skip
    operand = left_operand(p, C)
    pipe.v_ring.wait(at)
    acc, acc_rest = add_product(acc, acc_rest, operand, alpha, v_scale, at, pipe, C)
    return acc, acc_rest, row_max, row_sum, at.next()


@gluon.jit
def store_rows(acc, acc_rest, lse, out_desc, lse_ptr, item, head, span, row, sizes, pipe,
               WARPGROUP: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Write one warpgroup's lse and, through shared memory, its rows of O; TMA drops rows past the end."""
    PART: gl.constexpr = C.PART
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))
    first = item.to(gl.int64) * (sizes.total_q if C.IS_VARLEN else sizes.seqlen_q) + span.start
    gl.store(lse_ptr + first + rows, lse, mask=rows < span.length)
    tma.store_wait(0)  # the last tile's store has read this buffer
    out = pipe.out_smem.index(WARPGROUP)
    whole = out.reshape([64, C.D])
    if C.D > PART:
        whole.slice(0, PART, dim=1).store(acc.to(pipe.out_smem.dtype))
        whole.slice(PART, PART, dim=1).store(acc_rest.to(pipe.out_smem.dtype))
    else:
        whole.store(acc.to(pipe.out_smem.dtype))
    fence_async_shared()  # orders the stores above before TMA's reads below
    async_store(out_desc, tile_at(span, head, row, 0, C.IS_VARLEN), out)


@gluon.jit
def consumer(
    out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe,
    WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Softmax(Q K^T) V for 64 of the CTA's query rows, tile after tile."""
    NUM_WARPGROUPS: gl.constexpr = C.NUM_WARPGROUPS
    BLOCK_M: gl.constexpr = 64 * NUM_WARPGROUPS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    PART: gl.constexpr = C.PART
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_N))
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, fp8_accumulator_layout(C.PART))
    at = start(C.NUM_STAGES)
    q_at = start(C.Q_STAGES)
    tile_turn = first_turn(C)
    tile = first_tile(pipe.tiles, tile_turn, C)
    if C.PING_PONG and WARPGROUP == NUM_WARPGROUPS - 1:
        barrier_arrive(TURN, TURN_THREADS)  # the first warpgroup has the first turn
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, C.HAS_RIGHT, 4, C)
        row = block * BLOCK_M + WARPGROUP * 64
        head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        batch_idx = q_span.sequence
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)
        # Rows past the end use the scale of the last block.
        q_block = min(row, max(seqlen_q - 1, 0)) // Q_BLOCK
        row_scale = scale_log2 * gl.load(scale_at(scales.q, batch_idx, head).ptr + q_block * scales.q.stride_row)
        k_scales = scale_at(scales.k, batch_idx, head // sizes.group_size)
        v_scales = scale_at(scales.v, batch_idx, head // sizes.group_size)
        q_lane = q_at.lane(WARPGROUP, NUM_WARPGROUPS)

        # The rightmost tile, always masked, then the rest of the right edge, whole tiles, the left edge.
        pipe.q_ring.wait(q_lane)
        if C.CARRY:
            pipe.k_ring.wait(at)
            scores = warpgroup_mma_wait(0, deps=[issue_scores(q_lane.slot, at.slot, pipe, C)])
            pipe.k_ring.release(at)
        acc = gl.zeros([64, PART], gl.float32, fp8_accumulator_layout(PART))
        acc_rest = acc
        row_max = gl.full([64], NEG_INF, gl.float32, ROW_LAYOUT)
        row_sum = sum_rows(gl.zeros([64, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N)), C)
        if C.CARRY:
            score_scale = row_scale * gl.load(k_scales.ptr + last * k_scales.stride_row)
            p, alpha, row_max, row_sum = soften(
                scores, row_max, row_sum, score_scale, row, last, seqlen_q, seqlen_k, sizes, True, C
            )
        begin, end = whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C)
        if C.CARRY:
            if C.HAS_RIGHT:
                for i in range(1, begin):
                    acc, acc_rest, p, alpha, row_max, row_sum, at = attend(
                        last - i, row, q_lane.slot, at, acc, acc_rest, p, alpha, row_max, row_sum, row_scale, k_scales,
                        v_scales, seqlen_q, seqlen_k, sizes, pipe, True, WARPGROUP, C)  # fmt: skip
            for i in range(begin, end):
                acc, acc_rest, p, alpha, row_max, row_sum, at = attend(
                    last - i, row, q_lane.slot, at, acc, acc_rest, p, alpha, row_max, row_sum, row_scale, k_scales,
                    v_scales, seqlen_q, seqlen_k, sizes, pipe, False, WARPGROUP, C)  # fmt: skip
            if C.HAS_LEFT:
                for i in range(end, count):
                    acc, acc_rest, p, alpha, row_max, row_sum, at = attend(
                        last - i, row, q_lane.slot, at, acc, acc_rest, p, alpha, row_max, row_sum, row_scale, k_scales,
                        v_scales, seqlen_q, seqlen_k, sizes, pipe, True, WARPGROUP, C)  # fmt: skip
        else:
            for i in range(begin):
                acc, acc_rest, row_max, row_sum, at = attend_at_once(
                    last - i, row, q_lane.slot, at, acc, acc_rest, row_max, row_sum, row_scale, k_scales, v_scales,
                    seqlen_q, seqlen_k, sizes, pipe, True, C)  # fmt: skip
            for i in range(begin, end):
                acc, acc_rest, row_max, row_sum, at = attend_at_once(
                    last - i, row, q_lane.slot, at, acc, acc_rest, row_max, row_sum, row_scale, k_scales, v_scales,
                    seqlen_q, seqlen_k, sizes, pipe, False, C)  # fmt: skip

        # The last P V and the end of the rows. Packed: read the span before the mailbox slot is released. Dense:
        # compute it late, to save registers.
        if C.IS_VARLEN:
            head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        pipe.q_ring.release(q_lane)
        q_at = q_at.next()
        tile_v_scale = gl.load(v_scales.ptr + (last + 1 - count) * v_scales.stride_row)
        if C.CARRY:
            acc, acc_rest = add_tile(acc, acc_rest, p, alpha, tile_v_scale, at, pipe, C)
            at = at.next()
        row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), ROW_LAYOUT)
        factor, lse = finish_rows(row_max - P_SHIFT, row_sum, sinks_ptr, item, sizes, C)
        if not C.HAS_V_BLOCKS:
            factor = factor * tile_v_scale
        factor = gl.convert_layout(factor, OUT_ROWS)[:, None]
        if not C.IS_VARLEN:
            head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        store_rows(acc * factor, acc_rest * factor, lse, out_desc, lse_ptr, item, head, q_span, row, sizes, pipe,
                   WARPGROUP, C)  # fmt: skip
    tma.store_wait(0)
    if C.PING_PONG and WARPGROUP == 0:
        barrier_sync(TURN, TURN_THREADS)  # consume the last arrival, so that the barrier ends empty


# ---- kernel


@gluon.jit
def make_pipeline(q_desc, k_desc, v_desc, out_desc, C: gl.constexpr):
    """Allocate everything the roles share."""
    NUM_Q: gl.constexpr = C.Q_STAGES * C.NUM_WARPGROUPS
    q_smem = gl.allocate_shared_memory(q_desc.dtype, slots_shape(NUM_Q, 64, C.D, C.IS_VARLEN), q_desc.layout)
    k_smem = gl.allocate_shared_memory(
        k_desc.dtype, slots_shape(C.NUM_STAGES, C.BLOCK_N, C.D, C.IS_VARLEN), k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [C.NUM_STAGES, 1, C.D, C.BLOCK_N], v_desc.layout)
    out_smem = gl.allocate_shared_memory(
        out_desc.dtype, slots_shape(C.NUM_WARPGROUPS, 64, C.D, C.IS_VARLEN), out_desc.layout
    )
    tiles = make_tiles(C.NUM_WARPGROUPS, C)
    q_ring = make_ring(NUM_Q, 1)
    k_ring = make_ring(C.NUM_STAGES, C.NUM_WARPGROUPS)
    v_ring = make_ring(C.NUM_STAGES, C.NUM_WARPGROUPS)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Fp8Pipeline(q_smem, k_smem, v_smem, out_smem, q_ring, k_ring, v_ring, tiles)


@gluon.jit
def fp8_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sinks_ptr, scales, counter_ptr, work_ptr,
    tiles_per_head, scale_log2, sizes, C: gl.constexpr,
):  # fmt: skip
    """Out and lse; v_desc maps the tiles of V^T.

    Packed queries: work_ptr is the list of their blocks (gpu/work_list.py).
    """
    pipe = make_pipeline(q_desc, k_desc, v_desc, out_desc, C)
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    if C.NUM_WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe, 0, C)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe, 1, C)),
            (producer, (q_desc, k_desc, v_desc, counter_ptr, work_ptr, tiles_per_head, sizes, pipe, C)),
        ], [4, 1], [C.CONSUMER_REGS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe, 0, C)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe, 1, C)),
            (consumer, (out_desc, lse_ptr, sinks_ptr, scales, scale_log2, sizes, pipe, 2, C)),
            (producer, (q_desc, k_desc, v_desc, counter_ptr, work_ptr, tiles_per_head, sizes, pipe, C)),
        ], [4, 4, 1], [C.CONSUMER_REGS, C.CONSUMER_REGS, 24])  # fmt: skip


@triton.jit
def byte_columns(rows):
    """A 4 x 4 transposition of bytes: word i of the result holds byte i of every row, in the order of the rows."""
    first, second, third, fourth = rows
    even, odd = interleaved(first, second)
    even_below, odd_below = interleaved(third, fourth)
    return (
        (even & 0xFFFF) | (even_below << 16),
        (odd & 0xFFFF) | (odd_below << 16),
        ((even >> 16) & 0xFFFF) | (even_below & ~0xFFFF),
        ((odd >> 16) & 0xFFFF) | (odd_below & ~0xFFFF),
    )


@triton.jit
def interleaved(above, below):
    """Two words: bytes 0 and 2 of both arguments interleaved, and bytes 1 and 3 interleaved."""
    even = (above & 0x00FF00FF) | ((below & 0x00FF00FF) << 8)
    return even, ((above >> 8) & 0x00FF00FF) | (below & ~0x00FF00FF)


@triton.jit(do_not_specialize=["seqlen", "num_heads", "tiles_per_head"])
def transpose_values_kernel(
    v_ptr, out_ptr, cu_seqlens, seqlen, num_heads, tiles_per_head, v_strides,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Transpose V (strides of batch, head, row), or packed rows with cu_seqlens, into tiles (slot, D, BLOCK_N).

    Memory is accessed as words of four bytes, and strides count words: four channels of a key are read, four keys of a
    channel are written. One program per (tile, head, sequence), all in the first dimension of the grid, because the
    others end at 65535. Keys past the sequence's end and channels past HEAD_DIM are 0. Slots are numbered as by
    `value_slot` in fp8_forward.py.
    """
    tiles = tl.cdiv(seqlen, BLOCK_N)
    tile, item = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    head, batch_idx = item % num_heads, item // num_heads
    slot = (batch_idx * num_heads + head) * tiles_per_head + tile
    first = batch_idx.to(tl.int64) * v_strides.batch
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + batch_idx)
        length = tl.load(cu_seqlens + batch_idx + 1) - start
        first = start.to(tl.int64) * v_strides.row
        slot = head * tiles_per_head + start // BLOCK_N + batch_idx + tile
    # A sequence without keys has one tile of zeros, which the forward multiplies by P = 0.
    if tile * BLOCK_N < max(length, 1):
        WIDTH: tl.constexpr = BLOCK_N // 4
        place, channel = tl.arange(0, WIDTH), tl.arange(0, D // 4)
        # The first key of each word; the others are key + 1, + 8 and + 9 (operand order, see above).
        key = tile * BLOCK_N + place // 4 * 16 + place % 4 * 2
        v_ptr += first + head.to(tl.int64) * v_strides.head
        rows = (
            load_words(v_ptr, key, length, channel, v_strides.row, HEAD_DIM),
            load_words(v_ptr, key + 1, length, channel, v_strides.row, HEAD_DIM),
            load_words(v_ptr, key + 8, length, channel, v_strides.row, HEAD_DIM),
            load_words(v_ptr, key + 9, length, channel, v_strides.row, HEAD_DIM),
        )
        columns = byte_columns(rows)
        out = out_ptr + slot.to(tl.int64) * (D * WIDTH) + channel[:, None] * (4 * WIDTH) + place[None, :]
        for i in tl.static_range(4):
            tl.store(out + i * WIDTH, tl.trans(columns[i]))


@triton.jit
def load_words(v_ptr, key, length, channel, stride, HEAD_DIM: tl.constexpr):
    """Words of four channels of each key, 0 past the end."""
    inside = (key < length)[:, None] & (channel < HEAD_DIM // 4)[None, :]
    at = v_ptr + key[:, None].to(tl.int64) * stride + channel[None, :]
    return tl.load(at, mask=inside, other=0)
