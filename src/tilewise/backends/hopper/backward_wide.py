"""The backward of wide heads (over 128 columns in K or V): dK and dV of 64 keys at a time.

dK and dV of 64 keys x 256 columns take 128 registers of a thread each, so no warpgroup can hold both, and the two
consumers have different jobs. Grid: one CTA per SM, persistent, key tiles from the counter. Roles:
  producer   one warp: K and V of 64 keys, then rings of Q (with row statistics) and dO tiles of all the group's heads
  values     S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO
  keys       dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q
P^T goes in fp32 through shared memory; each thread reads what its counterpart wrote. Two buffers let the values role
run one query tile ahead. While one warpgroup computes exponentials, the other one's products keep the tensor cores
busy. query_gradient.py computes dQ, so everything is summed in a fixed order.

Head dims come in two column parts as in the forward, (128, 64) for 192; accumulators are pairs, too.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Parts
from tilewise.backends.gpu.releases import aggregate, async_load, async_store
from tilewise.backends.hopper.backward import mask_transposed
from tilewise.backends.hopper.channels import Mailbox, Ring, make_ring, start
from tilewise.backends.hopper.dq_tiles import from_register_order, in_register_order
from tilewise.backends.hopper.forward import make_parts
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, tile_at
from tilewise.backends.hopper.primitives import barrier_at, barrier_sync, exp2, uniform
from tilewise.backends.hopper.products import load_tile
from tilewise.backends.hopper.schedule import (
    announce,
    first_tile,
    first_turn,
    following_tile,
    make_tiles,
    next_tile,
    place_at,
    query_tiles,
    row_tile_of,
    spans_at,
    take_tile,
    whole_query_tiles,
)
from tilewise.backends.hopper.scores import capped, through_cap

# The roles of the consumer warpgroups.
VALUES = gl.constexpr(0)
KEYS = gl.constexpr(1)
# Named barriers of both warpgroups: P^T has been written (8 and 9, one for each of two buffers), all products of a key
# tile are done.
P_READY = gl.constexpr(8)
ALL_DONE = gl.constexpr(10)


@aggregate
class Pipeline:
    """The shared memory of a CTA: K, V, the rings of Q and dO (pairs of column parts), the buffers of P^T."""

    q_smem: gl.tuple
    dout_smem: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    stats_smem: gl.shared_memory_descriptor
    p_smem: gl.shared_memory_descriptor
    q_ring: Ring
    dout_ring: Ring
    key_ring: Ring
    tiles: Mailbox


# ---- producer


@gluon.jit
def load_queries(q_desc, dout_desc, stats_desc, pipe, q_at, dout_at, span, head, row_tile, m_block, C: gl.constexpr):
    """Start the copies of one query tile: Q and row statistics into one ring, dO into the other; returns the next
    cursors.
    """
    BLOCK_M: gl.constexpr = C.BLOCK_M
    Q_BYTES: gl.constexpr = 2 * C.BLOCK_M * (C.D + C.D_REST) + stats_desc.block_type.nbytes
    DOUT_BYTES: gl.constexpr = 2 * C.BLOCK_M * (C.DV + C.DV_REST)
    tile = row_tile + m_block
    ready = pipe.q_ring.acquire(q_at, Q_BYTES)
    load_tile(q_desc, pipe.q_smem, q_at.slot, ready, span, head, m_block * BLOCK_M, C.D, C.D_REST, C)
    async_load(stats_desc, [tile * (2 * BLOCK_M)], ready, pipe.stats_smem.index(q_at.slot))
    ready = pipe.dout_ring.acquire(dout_at, DOUT_BYTES)
    load_tile(dout_desc, pipe.dout_smem, dout_at.slot, ready, span, head, m_block * BLOCK_M, C.DV, C.DV_REST, C)
    return q_at.next(), dout_at.next()


@gluon.jit
def producer(q_desc, dout_desc, k_desc, v_desc, stats_desc, counter_ptr, work_ptr, sizes, pipe, C: gl.constexpr):
    """Feed the rings."""
    KEY_BYTES: gl.constexpr = 2 * C.BLOCK_N * (C.D + C.D_REST + C.DV + C.DV_REST)
    q_at = start(C.NUM_STAGES)
    dout_at = start(C.NUM_STAGES)
    key_turn = start(1)
    tile_turn = first_turn(C)
    tile = gl.program_id(0)
    if C.IS_VARLEN:
        num_entries = gl.load(work_ptr)
        tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, False, 1, C)
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 1, C)
        group = sizes.group_size
        first = block * C.BLOCK_N
        row_tile = row_tile_of(item * group, q_span, sizes, C)
        lo, hi = query_tiles(first, q_span.length, kv_span.length, sizes, C)
        if lo < hi:  # the first query tile before K and V, because its ring slots become free before theirs
            q_at, dout_at = load_queries(
                q_desc, dout_desc, stats_desc, pipe, q_at, dout_at, q_span, kv_head * group, row_tile, lo, C
            )
        ready = pipe.key_ring.acquire(key_turn, KEY_BYTES)
        key_turn = key_turn.next()
        load_tile(k_desc, pipe.k_smem, 0, ready, kv_span, kv_head, first, C.D, C.D_REST, C)
        load_tile(v_desc, pipe.v_smem, 0, ready, kv_span, kv_head, first, C.DV, C.DV_REST, C)
        if C.IS_VARLEN:  # early, so that the atomic's latency is hidden behind this tile
            taken = take_tile(counter_ptr, num_entries * sizes.num_items)
        for g in range(group):
            begin = gl.where(g == 0, lo + 1, lo)
            for m_block in range(begin, hi):
                q_at, dout_at = load_queries(
                    q_desc, dout_desc, stats_desc, pipe, q_at, dout_at, q_span, kv_head * group + g,
                    row_tile + g * sizes.row_tiles, m_block, C)  # fmt: skip
        if C.IS_VARLEN:
            tile_turn = tile_turn.next()
            tile = announce(taken, num_entries, work_ptr, pipe.tiles, tile_turn, sizes)
        else:
            tile = next_tile(counter_ptr, sizes)
            pipe.tiles.send(tile_turn, tile)
            tile_turn = tile_turn.next()


# ---- consumers: the products


@gluon.jit
def issue_transposed(a_smem, b_smem, b_slot, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr):
    """Start A B^T of the CTA's 64 keys and a query tile: S^T = K Q^T or dP^T = V dO^T."""
    BLOCK_M: gl.constexpr = C.BLOCK_M
    zeros = gl.zeros([64, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    a = a_smem.first.index(0).reshape([64, D])
    b = b_smem.first.index(b_slot).reshape([BLOCK_M, D])
    product = warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if D_REST:
        a = a_smem.rest.index(0).reshape([64, D_REST])
        b = b_smem.rest.index(b_slot).reshape([BLOCK_M, D_REST])
        product = warpgroup_mma(a, b.permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def issue_sum(weights, smem, slot, acc, acc_rest, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr):
    """Start acc += weights @ tile: dV += P^T dO or dK += dS^T Q. The operand is returned so that wait_sum keeps its
    registers alive.
    """
    BLOCK_M: gl.constexpr = C.BLOCK_M
    operand = gl.convert_layout(weights, left_operand_layout(accumulator_layout(D)))
    acc = warpgroup_mma(operand, smem.first.index(slot).reshape([BLOCK_M, D]), acc, is_async=True)
    if D_REST:
        rest = gl.convert_layout(weights, left_operand_layout(accumulator_layout(D_REST)))
        acc_rest = warpgroup_mma(rest, smem.rest.index(slot).reshape([BLOCK_M, D_REST]), acc_rest, is_async=True)
    return acc, acc_rest, operand


@gluon.jit
def wait_sum(acc, acc_rest, operand, D_REST: gl.constexpr):
    """Wait for the sum."""
    if D_REST:
        acc, acc_rest, operand = warpgroup_mma_wait(0, deps=[acc, acc_rest, operand])
    else:
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    return acc, acc_rest


# ---- consumers: one query tile


@gluon.jit
def hand_over(p, slot, pipe):
    """Values role: hand P^T to the keys role, without waiting for it.

    The buffer is free: it is reused with the same slot of Q's ring, and the keys role releases that slot only after it
    has read P^T.
    """
    pipe.p_smem.index(slot).store(in_register_order(p))
    barrier_at("arrive", P_READY + slot, 256)


@gluon.jit
def take_over(like, slot, pipe):
    """Keys role: wait for P^T and read it."""
    barrier_at("sync", P_READY + slot, 256)
    return from_register_order(pipe.p_smem.index(slot), like)


@gluon.jit
def values_step(
    m_block, first, dv, dv_rest, q_at, dout_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes, pipe,
    MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """P^T and dV += P^T dO."""
    QUERIES: gl.constexpr = gl.SliceLayout(0, accumulator_layout(C.BLOCK_M))
    DTYPE: gl.constexpr = pipe.k_smem.first.dtype
    pipe.q_ring.wait(q_at)
    s = warpgroup_mma_wait(0, deps=[issue_transposed(pipe.k_smem, pipe.q_smem, q_at.slot, C.D, C.D_REST, C)])
    lse = pipe.stats_smem.index(q_at.slot).slice(0, C.BLOCK_M).load(QUERIES)
    s = capped(s, cap_scale, C)
    p = exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        p = mask_transposed(p, m_block, first, seqlen_q, seqlen_k, sizes, C)
    weights = p.to(DTYPE)
    hand_over(through_cap(p, s, C), q_at.slot, pipe)
    pipe.dout_ring.wait(dout_at)
    dv, dv_rest, operand = issue_sum(weights, pipe.dout_smem, dout_at.slot, dv, dv_rest, C.DV, C.DV_REST, C)
    dv, dv_rest = wait_sum(dv, dv_rest, operand, C.DV_REST)
    pipe.dout_ring.release(dout_at)
    pipe.q_ring.release(q_at)
    return dv, dv_rest, q_at.next(), dout_at.next()


@gluon.jit
def keys_step(dk, dk_rest, q_at, dout_at, pipe, C: gl.constexpr):
    """dS^T and dK += dS^T Q."""
    QUERIES: gl.constexpr = gl.SliceLayout(0, accumulator_layout(C.BLOCK_M))
    DTYPE: gl.constexpr = pipe.k_smem.first.dtype
    pipe.dout_ring.wait(dout_at)
    dp = warpgroup_mma_wait(0, deps=[issue_transposed(pipe.v_smem, pipe.dout_smem, dout_at.slot, C.DV, C.DV_REST, C)])
    pipe.dout_ring.release(dout_at)
    pipe.q_ring.wait(q_at)
    delta = pipe.stats_smem.index(q_at.slot).slice(C.BLOCK_M, C.BLOCK_M).load(QUERIES)
    dp = dp - delta[None, :]
    weights = (take_over(dp, q_at.slot, pipe) * dp).to(DTYPE)
    dk, dk_rest, operand = issue_sum(weights, pipe.q_smem, q_at.slot, dk, dk_rest, C.D, C.D_REST, C)
    dk, dk_rest = wait_sum(dk, dk_rest, operand, C.D_REST)
    pipe.q_ring.release(q_at)
    return dk, dk_rest, q_at.next(), dout_at.next()


# ---- consumers: one key tile


@gluon.jit
def make_sum(D: gl.constexpr, D_REST: gl.constexpr):
    """Zeros for 64 keys."""
    acc = gl.zeros([64, D], gl.float32, accumulator_layout(D))
    acc_rest = 0
    if D_REST:
        acc_rest = gl.zeros([64, D_REST], gl.float32, accumulator_layout(D_REST))
    return acc, acc_rest


@gluon.jit
def store_sum(
    acc, acc_rest, factor, desc, smem, span, head, row, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr
):
    """Write dK or dV of 64 keys, through the buffer that held K or V."""
    DTYPE: gl.constexpr = desc.first.dtype
    smem.first.index(0).reshape([64, D]).store((acc * factor).to(DTYPE))
    if D_REST:
        smem.rest.index(0).reshape([64, D_REST]).store((acc_rest * factor).to(DTYPE))
    fence_async_shared()  # orders the stores above before TMA's reads below
    async_store(desc.first, tile_at(span, head, row, 0, C.IS_VARLEN), smem.first.index(0))
    if D_REST:
        async_store(desc.rest, tile_at(span, head, row, D, C.IS_VARLEN), smem.rest.index(0))
    tma.store_wait(0)


@gluon.jit
def consumer(dk_desc, dv_desc, scale_log2, cap_scale, scale, sizes, pipe, ROLE: gl.constexpr, C: gl.constexpr):
    """Sum dV (VALUES) or dK (KEYS) of the tile's keys, over all query tiles of all query heads of the group."""
    WIDTH: gl.constexpr = C.DV if ROLE == VALUES else C.D
    WIDTH_REST: gl.constexpr = C.DV_REST if ROLE == VALUES else C.D_REST
    q_at = start(C.NUM_STAGES)
    dout_at = start(C.NUM_STAGES)
    key_turn = start(1)
    tile_turn = first_turn(C)
    tile = uniform(first_tile(pipe.tiles, tile_turn, C))
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, False, 4, C)
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        first = block * C.BLOCK_N
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        lo, hi = query_tiles(first, seqlen_q, seqlen_k, sizes, C)
        begin, end = whole_query_tiles(first, lo, hi, seqlen_q, seqlen_k, sizes, C)
        acc, acc_rest = make_sum(WIDTH, WIDTH_REST)
        pipe.key_ring.wait(key_turn)
        for _ in range(sizes.group_size):
            if ROLE == KEYS:  # needs no mask: P from the values role is already masked
                for _m_block in range(lo, hi):
                    acc, acc_rest, q_at, dout_at = keys_step(acc, acc_rest, q_at, dout_at, pipe, C)
            else:
                if C.HAS_RIGHT or not C.EVEN_K:
                    for m_block in range(lo, begin):
                        acc, acc_rest, q_at, dout_at = values_step(
                            m_block, first, acc, acc_rest, q_at, dout_at, scale_log2, cap_scale, seqlen_q, seqlen_k,
                            sizes, pipe, True, C)  # fmt: skip
                for m_block in range(begin, end):
                    acc, acc_rest, q_at, dout_at = values_step(
                        m_block, first, acc, acc_rest, q_at, dout_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
                        pipe, False, C)  # fmt: skip
                if C.HAS_LEFT:
                    for m_block in range(end, hi):
                        acc, acc_rest, q_at, dout_at = values_step(
                            m_block, first, acc, acc_rest, q_at, dout_at, scale_log2, cap_scale, seqlen_q, seqlen_k,
                            sizes, pipe, True, C)  # fmt: skip
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        barrier_sync(ALL_DONE, 256)  # both warpgroups have read K and V for the last time
        if ROLE == VALUES:
            store_sum(acc, acc_rest, 1.0, dv_desc, pipe.v_smem, kv_span, kv_head, first, C.DV, C.DV_REST, C)
        else:
            store_sum(acc, acc_rest, scale, dk_desc, pipe.k_smem, kv_span, kv_head, first, C.D, C.D_REST, C)
        pipe.key_ring.release(key_turn)
        key_turn = key_turn.next()
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        tile = uniform(tile)


# ---- kernel


@gluon.jit
def make_pipeline(q_desc, dout_desc, k_desc, v_desc, stats_desc, C: gl.constexpr):
    """Allocate everything the roles share."""
    BLOCK_M: gl.constexpr = C.BLOCK_M
    q_smem = make_parts(q_desc, C.NUM_STAGES, BLOCK_M, C.D, C.D_REST, C)
    dout_smem = make_parts(dout_desc, C.NUM_STAGES, BLOCK_M, C.DV, C.DV_REST, C)
    k_smem = make_parts(k_desc, 1, 64, C.D, C.D_REST, C)
    v_smem = make_parts(v_desc, 1, 64, C.DV, C.DV_REST, C)
    stats_smem = gl.allocate_shared_memory(gl.float32, [C.NUM_STAGES, 2 * BLOCK_M], stats_desc.layout)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 32], gl.float32)
    p_smem = gl.allocate_shared_memory(gl.float32, [C.NUM_STAGES, 128, 32], P_LAYOUT)
    key_ring = make_ring(1, 2)
    q_ring = make_ring(C.NUM_STAGES, 2)
    dout_ring = make_ring(C.NUM_STAGES, 2)
    tiles = make_tiles(2, C)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, dout_smem, k_smem, v_smem, stats_smem, p_smem, q_ring, dout_ring, key_ring, tiles)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "scale", "sizes"], do_not_specialize_on_alignment=["counter_ptr"]
)
def backward_wide_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, q_rest, dout_rest, k_rest, v_rest, dk_rest, dv_rest,
    stats_desc, counter_ptr, work_ptr, scale_log2, cap_scale, scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Write dK and dV; items are (batch, kv head) pairs, blocks 64 keys."""
    queries, douts = Parts(q_desc, q_rest), Parts(dout_desc, dout_rest)
    keys, values = Parts(k_desc, k_rest), Parts(v_desc, v_rest)
    key_sums, value_sums = Parts(dk_desc, dk_rest), Parts(dv_desc, dv_rest)
    pipe = make_pipeline(queries, douts, keys, values, stats_desc, C)
    gl.warp_specialize([
        (consumer, (key_sums, value_sums, scale_log2, cap_scale, scale, sizes, pipe, 0, C)),
        (consumer, (key_sums, value_sums, scale_log2, cap_scale, scale, sizes, pipe, 1, C)),
        (producer, (queries, douts, keys, values, stats_desc, counter_ptr, work_ptr, sizes, pipe, C)),
    ], [4, 1], [240, 24])  # fmt: skip
