"""The backward kernel up to 128 columns: dK and dV of 128 keys at a time, and what these keys add to dQ.

Grid: one CTA per SM, persistent, key tiles from the counter. Roles:
  producer   one warp: K and V of the tile, then a ring of (Q, dO, row statistics) tiles of all the group's query heads
  preparer   two warps, if AHEAD: row statistics and zeros for later tiles (preparing.py)
  consumers  two warpgroups of 64 keys. Per query tile
               S^T = K Q^T, dP^T = V dO^T           from shared memory
               P^T = exp2(S^T - lse), dS^T = P^T (dP^T - delta)
               dV += P^T dO, dK += dS^T Q           P^T, dS^T as register operands
               dQ = dS K                            dS of both warpgroups through shared memory
             TMA adds dQ to its accumulator in global memory (dq_tiles.py), in floating point or, to be repeatable, in
             integers.

Under a tile mask, query tiles come from lists instead, those that need a mask first (listed.py).

GQA: the CTA walks all query heads of a group, so dK and dV need no atomics. The row statistics come from
backward_rows.py: rows past the end and rows without keys have lse = +inf, so P is 0 without a mask.

Figures: bench/results/hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.releases import aggregate, async_load, async_store, reinterpreted
from tilewise.backends.hopper.channels import Mailbox, Ring, make_ring, start
from tilewise.backends.hopper.dq_tiles import add_block, in_units, load_units
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.listed import hide_transposed, list_at, load_query_words, query_steps, query_tile_at
from tilewise.backends.hopper.preparing import await_listed, await_prepared, make_row_tiles, preparer
from tilewise.backends.hopper.primitives import barrier_sync, exp2, rebuilt, uniform
from tilewise.backends.hopper.schedule import (
    announce,
    first_seeing_tile,
    first_tile,
    first_turn,
    following_tile,
    make_tiles,
    next_tile,
    place_at,
    query_tiles,
    right_of,
    row_tile_of,
    spans_at,
    take_any,
    take_tile,
    whole_query_tiles,
)
from tilewise.backends.hopper.scores import capped, through_cap


@aggregate
class Pipeline:
    """The shared memory of a CTA: K and V (a half per warpgroup), the ring of query tiles, staging of dS and dQ."""

    q_smem: gl.shared_memory_descriptor
    dout_smem: gl.shared_memory_descriptor
    stats_smem: gl.shared_memory_descriptor
    units_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    ds_smem: gl.shared_memory_descriptor
    dq_smem: gl.shared_memory_descriptor
    query_ring: Ring
    key_ring: Ring
    tiles: Mailbox


# ---- producer


@gluon.jit
def load_queries(q_desc, dout_desc, stats_desc, units_desc, pipe, at, span, head, row_tile, m_block, C: gl.constexpr):
    """Start the copies of one query tile (Q, dO, row statistics, units); returns the cursor of the next slot."""
    UNITS_BYTES: gl.constexpr = (4096 if C.D == 64 else 256) if C.FIXED_POINT else 0
    BYTES: gl.constexpr = 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes + UNITS_BYTES
    row = m_block * C.BLOCK_M
    ready = pipe.query_ring.acquire(at, BYTES)
    async_load(q_desc, tile_at(span, head, row, 0, C.IS_VARLEN), ready, pipe.q_smem.index(at.slot))
    async_load(stats_desc, [(row_tile + m_block) * (2 * C.BLOCK_M)], ready, pipe.stats_smem.index(at.slot))
    if C.FIXED_POINT and C.D == 64:
        for i in gl.static_range(2):
            place = [((row_tile + m_block) * 2 + i) * 16, 0]
            async_load(units_desc, place, ready, pipe.units_smem.index(at.slot * 2 + i))
    elif C.FIXED_POINT:
        place = [(row_tile + m_block) * C.BLOCK_M]
        async_load(units_desc, place, ready, pipe.units_smem.index(at.slot))
    async_load(dout_desc, tile_at(span, head, row, 0, C.IS_VARLEN), ready, pipe.dout_smem.index(at.slot))
    return at.next()


@gluon.jit
def producer(
    q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, counts_ptr, counter_ptr, work_ptr, ahead, lists, sizes,
    pipe, C: gl.constexpr,
):  # fmt: skip
    """Feed the rings."""
    KEY_BYTES: gl.constexpr = 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes
    at = start(C.NUM_STAGES)
    key_turn = start(1)
    tile_turn = first_turn(C)
    tile = gl.program_id(0)
    if C.IS_VARLEN:
        num_entries = gl.load(work_ptr)
        if C.AHEAD:
            tile = take_any(counter_ptr, num_entries)
        tile = announce(tile, num_entries, work_ptr, pipe.tiles, tile_turn, sizes, True)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, False, 1, C, C.ENDING)
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 1, C)
        group = sizes.group_size
        if C.IS_LISTED:
            block = gl.load(list_at(lists, q_span.sequence, kv_head * group, block))
        first = block * 128
        row_tile = row_tile_of(item * group, q_span, sizes, C)
        lo, hi = query_tiles(first, q_span.length, kv_span.length, sizes, C)
        first_queries = lo
        if C.IS_LISTED:
            entries = list_at(lists, q_span.sequence, kv_head * group, block)
            lo = 0
            _, hi = query_steps(entries, first, kv_span.length, C)
            first_queries, _ = query_tile_at(entries, 0, C)
        if C.AHEAD:
            if C.IS_VARLEN:
                await_listed(item, q_span, kv_span, counts_ptr, sizes, C)
            else:
                await_prepared(item, counts_ptr, ahead, sizes)
        if lo < hi:  # the first query tile before K and V, because its ring slot becomes free before theirs
            at = load_queries(
                q_desc, dout_desc, stats_desc, units_desc, pipe, at, q_span, kv_head * group, row_tile, first_queries, C
            )
        ready = pipe.key_ring.acquire(key_turn, KEY_BYTES)
        key_turn = key_turn.next()
        for w in gl.static_range(2):
            place = tile_at(kv_span, kv_head, first + w * 64, 0, C.IS_VARLEN)
            async_load(k_desc, place, ready, pipe.k_smem.index(w))
        for w in gl.static_range(2):
            place = tile_at(kv_span, kv_head, first + w * 64, 0, C.IS_VARLEN)
            async_load(v_desc, place, ready, pipe.v_smem.index(w))
        for g in range(group):
            begin = gl.where(g == 0, lo + 1, lo)
            if C.IS_LISTED:
                entries = list_at(lists, q_span.sequence, kv_head * group + g, block)
                _, hi = query_steps(entries, first, kv_span.length, C)
            for step in range(begin, hi):
                m_block = step
                if C.IS_LISTED:
                    m_block, _ = query_tile_at(entries, step, C)
                at = load_queries(
                    q_desc, dout_desc, stats_desc, units_desc, pipe, at, q_span, kv_head * group + g,
                    row_tile + g * sizes.row_tiles, m_block, C)  # fmt: skip
        if C.IS_VARLEN:
            # Take the next tile now, not at the start of this one: a CTA with a heavy tile would hold the next one
            # while other CTAs are idle.
            taken = take_any(counter_ptr, num_entries) if C.AHEAD else take_tile(counter_ptr, num_entries)
            tile_turn = tile_turn.next()
            tile = announce(taken, num_entries, work_ptr, pipe.tiles, tile_turn, sizes, True)
        else:
            tile = next_tile(counter_ptr, sizes)
            pipe.tiles.send(tile_turn, tile)
            tile_turn = tile_turn.next()


# ---- consumer


@gluon.jit
def mask_transposed(p, m_block, first_key, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """P with zeros where a query (column) does not see a key (row; 64 keys from first_key on)."""
    LAYOUT: gl.constexpr = accumulator_layout(C.BLOCK_M)
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    queries = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))
    begin = gl.zeros([64], gl.int32, gl.SliceLayout(1, LAYOUT))
    if C.HAS_RIGHT:
        begin = keys - (m_block * C.BLOCK_M + (seqlen_k - seqlen_q) + right_of(sizes, C))
    if not C.EVEN_K:
        begin = gl.where(keys < seqlen_k, begin, C.BLOCK_M)
    p = gl.where(queries[None, :] >= begin[:, None], p, 0.0)
    if C.HAS_LEFT:
        last = keys - (m_block * C.BLOCK_M + (seqlen_k - seqlen_q) - sizes.window.left)
        p = gl.where(queries[None, :] <= last[:, None], p, 0.0)
    return p


@gluon.jit
def issue_query_gradient(at, pipe, WARPGROUP: gl.constexpr, BLIND: gl.constexpr, C: gl.constexpr):
    """Start dQ = dS K, 64 queries x 64 columns, once both warpgroups have stored their dS.

    At head_dim 128 each warpgroup computes half of the columns, at 64 half of the 128 queries. BLIND: the second
    warpgroup's dS is 0. Two dS buffers are enough: a warpgroup writes to one again only after the next barrier, which
    the other warpgroup reaches with its dQ product finished.
    """
    D: gl.constexpr = C.D
    FIRST_QUERY: gl.constexpr = WARPGROUP * 64 if C.D == 64 else 0
    FIRST_COLUMN: gl.constexpr = 0 if C.D == 64 else WARPGROUP * 64
    fence_async_shared()  # orders the stores of dS before the products that read it
    # Wait until the last dQ tile has left shared memory. Here, because Triton adds a barrier after this wait, and the
    # products below need one anyway.
    tma.store_wait(0)
    barrier_sync(8, 256)
    ds0 = pipe.ds_smem.index(at.slot * 2).slice(FIRST_QUERY, 64, dim=1).permute([1, 0])
    k0 = pipe.k_smem.index(rebuilt(0, at.slot, C.REBUILD_DQ)).reshape([64, D]).slice(FIRST_COLUMN, 64, dim=1)
    zeros = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    dq = warpgroup_mma(ds0, k0, zeros, use_acc=False, is_async=True)
    if not BLIND:
        ds1 = pipe.ds_smem.index(at.slot * 2 + 1).slice(FIRST_QUERY, 64, dim=1).permute([1, 0])
        k1 = pipe.k_smem.index(rebuilt(1, at.slot, C.REBUILD_DQ)).reshape([64, D]).slice(FIRST_COLUMN, 64, dim=1)
        dq = warpgroup_mma(ds1, k1, dq, is_async=True)
    return dq


@gluon.jit
def add_query_gradient(dq, units, dq_desc, units_ptr, dq_row, pipe, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Start adding this warpgroup's block of dQ to the accumulator."""
    stored = in_units(dq, units, units_ptr, dq_row, WARPGROUP, C)
    add_block(stored, dq_desc, dq_row * 2 + WARPGROUP, pipe.dq_smem.index(WARPGROUP))


@gluon.jit
def backward_step(
    m_block, dq_row, first, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale, seqlen_q, seqlen_k, bits, kind,
    sizes, pipe, WARPGROUP: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One query tile against 64 keys. `bits` and `kind` are those of a tile mask, where there is one."""
    BLOCK_M: gl.constexpr = C.BLOCK_M
    D: gl.constexpr = C.D
    S_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    OPERAND: gl.constexpr = left_operand_layout(accumulator_layout(D))
    QUERIES: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    DTYPE: gl.constexpr = pipe.q_smem.dtype
    zeros = gl.zeros([64, BLOCK_M], gl.float32, S_LAYOUT)
    q = pipe.q_smem.index(at.slot).reshape([BLOCK_M, D])
    dout = pipe.dout_smem.index(at.slot).reshape([BLOCK_M, D])
    own = rebuilt(WARPGROUP, at.slot, C.REBUILD_KV)
    k = pipe.k_smem.index(own).reshape([64, D])
    v = pipe.v_smem.index(own).reshape([64, D])
    if MASKED and C.IS_LISTED:
        words = load_query_words(bits, kind, m_block, first + WARPGROUP * 64, C)
    pipe.query_ring.wait(at)
    s = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, dout.permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    # Read after the wait, not before it: fewer spills.
    lse = pipe.stats_smem.index(at.slot).slice(0, BLOCK_M).load(QUERIES)
    s = capped(s, cap_scale, C)
    p = exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        if C.IS_LISTED:
            p = hide_transposed(p, words, first + WARPGROUP * 64, seqlen_k, C)
        else:
            p = mask_transposed(p, m_block, first + WARPGROUP * 64, seqlen_q, seqlen_k, sizes, C)
    pa = gl.convert_layout(p.to(DTYPE), OPERAND)
    p = through_cap(p, s, C)
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = pipe.stats_smem.index(at.slot).slice(BLOCK_M, BLOCK_M).load(QUERIES)
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    dsa = gl.convert_layout(ds, OPERAND)
    pipe.ds_smem.index(at.slot * 2 + WARPGROUP).store(ds)
    dv_issued = warpgroup_mma(pa, dout, dv, is_async=True)
    dq = issue_query_gradient(at, pipe, WARPGROUP, False, C)
    dv, pa = warpgroup_mma_wait(2, deps=[dv_issued, pa])  # frees the registers of P^T
    dk_issued = warpgroup_mma(dsa, q, dk, is_async=True)
    units = None
    if C.FIXED_POINT:  # read while dQ is still being computed
        units = load_units(pipe.units_smem, at.slot, WARPGROUP, C)
    dq = warpgroup_mma_wait(1, deps=[dq])
    add_query_gradient(dq, units, dq_desc, units_ptr, dq_row, pipe, WARPGROUP, C)
    dk, dsa = warpgroup_mma_wait(0, deps=[dk_issued, dsa])
    pipe.query_ring.release(at)
    return dk, dv, at.next()


@gluon.jit
def blind_step(dq_row, at, dq_desc, units_ptr, pipe, C: gl.constexpr):
    """The second warpgroup's work for a query tile that sees none of its keys: store dS = 0, compute its part of dQ."""
    BLOCK_M: gl.constexpr = C.BLOCK_M
    pipe.query_ring.wait(at)
    nothing = gl.zeros([64, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    pipe.ds_smem.index(at.slot * 2 + 1).store(nothing.to(pipe.q_smem.dtype))
    dq = issue_query_gradient(at, pipe, 1, True, C)
    units = None
    if C.FIXED_POINT:
        units = load_units(pipe.units_smem, at.slot, 1, C)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_query_gradient(dq, units, dq_desc, units_ptr, dq_row, pipe, 1, C)
    pipe.query_ring.release(at)
    return at.next()


@gluon.jit
def store_key_gradients(
    dk, dv, dk_desc, dv_desc, span, kv_head, row, scale, key_turn, pipe, WARPGROUP: gl.constexpr, C: gl.constexpr
):
    """Write dK and dV of 64 keys by TMA through the dQ and dS buffers, so that the next K and V can load meanwhile."""
    D: gl.constexpr = C.D
    DTYPE: gl.constexpr = pipe.k_smem.dtype
    place = tile_at(span, kv_head, row, 0, C.IS_VARLEN)
    pipe.key_ring.release(key_turn)
    DV_SLOTS: gl.constexpr = 16384 // (64 * C.D)
    DK_SLOTS: gl.constexpr = 2 * C.NUM_STAGES * C.BLOCK_M // C.D
    dv_slots = reinterpreted(pipe.dq_smem, DTYPE, slots_shape(DV_SLOTS, 64, D, C.IS_VARLEN), dv_desc.layout)
    dk_slots = reinterpreted(pipe.ds_smem, DTYPE, slots_shape(DK_SLOTS, 64, D, C.IS_VARLEN), dk_desc.layout)
    tma.store_wait(0)  # this warpgroup's last dQ tile has left its buffer
    dv_smem = dv_slots.index(WARPGROUP * (128 // D))
    dv_smem.reshape([64, D]).store(dv.to(DTYPE))
    fence_async_shared()
    async_store(dv_desc, place, dv_smem)
    barrier_sync(8, 256)  # the other warpgroup has finished its dQ product, which reads dS
    dk_smem = dk_slots.index(WARPGROUP)
    dk_smem.reshape([64, D]).store((dk * scale).to(DTYPE))
    fence_async_shared()
    async_store(dk_desc, place, dk_smem)


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, units_ptr, scale_log2, cap_scale, scale, lists, sizes, pipe, WARPGROUP: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Sum dK and dV of 64 of the tile's keys, over all query tiles of all query heads of the group."""
    D: gl.constexpr = C.D
    at = start(C.NUM_STAGES)
    key_turn = start(1)
    tile_turn = first_turn(C)
    tile = first_tile(pipe.tiles, tile_turn, C)
    tile = uniform(tile)
    while tile < sizes.num_tiles:
        block, item = place_at(tile, pipe.tiles, tile_turn, sizes, False, 4, C, C.ENDING)
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        if C.IS_LISTED:
            block = uniform(gl.load(list_at(lists, q_span.sequence, kv_head * sizes.group_size, block)))
        first = block * 128
        seqlen_q = q_span.length
        seqlen_k = kv_span.length
        lo, hi = query_tiles(first, seqlen_q, seqlen_k, sizes, C)
        begin, end = whole_query_tiles(first, lo, hi, seqlen_q, seqlen_k, sizes, C)
        dk = gl.zeros([64, D], gl.float32, accumulator_layout(D))
        dv = gl.zeros([64, D], gl.float32, accumulator_layout(D))
        tma.store_wait(0)  # the last tile's dK and dV have left the dS and dQ buffers
        barrier_sync(8, 256)
        pipe.key_ring.wait(key_turn)
        for g in range(sizes.group_size):
            row = row_tile_of(item * sizes.group_size + g, q_span, sizes, C)
            seeing = lo
            if C.SKIP_HIDDEN and WARPGROUP == 1:
                seeing = first_seeing_tile(first + 64, lo, hi, seqlen_q, seqlen_k, sizes, C)
                for m_block in range(lo, seeing):
                    at = blind_step(row + m_block, at, dq_desc, units_ptr, pipe, C)
            if C.IS_LISTED:
                entries = list_at(lists, q_span.sequence, kv_head * sizes.group_size + g, block)
                begin, end = query_steps(entries, first, seqlen_k, C)
                for step in range(begin):
                    m_block, kind = query_tile_at(entries, step, C)
                    dk, dv, at = backward_step(
                        m_block, row + m_block, first, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale, seqlen_q,
                        seqlen_k, lists.bits, kind, sizes, pipe, WARPGROUP, True, C)  # fmt: skip
            elif C.HAS_RIGHT or not C.EVEN_K:
                for m_block in range(seeing, begin):
                    dk, dv, at = backward_step(
                        m_block, row + m_block, first, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale, seqlen_q,
                        seqlen_k, None, None, sizes, pipe, WARPGROUP, True, C)  # fmt: skip
            for step in range(begin, end):
                m_block = step
                if C.IS_LISTED:
                    m_block, _ = query_tile_at(entries, step, C)
                dk, dv, at = backward_step(
                    m_block, row + m_block, first, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale, seqlen_q,
                    seqlen_k, None, None, sizes, pipe, WARPGROUP, False, C)  # fmt: skip
            if C.HAS_LEFT:
                for m_block in range(end, hi):
                    dk, dv, at = backward_step(
                        m_block, row + m_block, first, dk, dv, at, dq_desc, units_ptr, scale_log2, cap_scale, seqlen_q,
                        seqlen_k, None, None, sizes, pipe, WARPGROUP, True, C)  # fmt: skip
        kv_head, q_span, kv_span = spans_at(item, pipe.tiles, tile_turn, sizes, 4, C)
        store_key_gradients(
            dk, dv, dk_desc, dv_desc, kv_span, kv_head, first + WARPGROUP * 64, scale, key_turn, pipe, WARPGROUP, C
        )
        key_turn = key_turn.next()
        tile, tile_turn = following_tile(pipe.tiles, tile_turn, C)
        tile = uniform(tile)
    tma.store_wait(0)


# ---- kernel


@gluon.jit
def make_pipeline(
    q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, dq_desc, NUM_TILE_READERS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Allocate everything the roles share."""
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = C.D
    BLOCK_M: gl.constexpr = C.BLOCK_M
    NUM_STAGES: gl.constexpr = C.NUM_STAGES
    q_smem = gl.allocate_shared_memory(DTYPE, slots_shape(NUM_STAGES, BLOCK_M, D, C.IS_VARLEN), q_desc.layout)
    dout_smem = gl.allocate_shared_memory(DTYPE, slots_shape(NUM_STAGES, BLOCK_M, D, C.IS_VARLEN), dout_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 64, D, C.IS_VARLEN), k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 64, D, C.IS_VARLEN), v_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 2 * BLOCK_M], stats_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    ds_smem = gl.allocate_shared_memory(DTYPE, [2 * NUM_STAGES, 64, BLOCK_M], DS_LAYOUT)
    dq_smem = gl.allocate_shared_memory(dq_desc.dtype, [2, 128, 32], dq_desc.layout)
    units_smem = stats_smem
    if C.FIXED_POINT:
        UNITS_SHAPE: gl.constexpr = [2 * NUM_STAGES, 16, 32] if D == 64 else [NUM_STAGES, BLOCK_M]
        units_smem = gl.allocate_shared_memory(gl.float32, UNITS_SHAPE, units_desc.layout)
    key_ring = make_ring(1, 2)
    query_ring = make_ring(NUM_STAGES, 2)
    tiles = make_tiles(NUM_TILE_READERS, C)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(
        q_smem, dout_smem, stats_smem, units_smem, k_smem, v_smem, ds_smem, dq_smem, query_ring, key_ring, tiles
    )


@gluon.jit(
    do_not_specialize=["ahead", "lists", "scale_log2", "cap_scale", "scale", "sizes"],
    do_not_specialize_on_alignment=["counter_ptr", "lse_ptr", "dlse_ptr"],
)
def backward_kernel(
    q_desc, out_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, dq_desc, dk_desc, dv_desc, lse_ptr, dlse_ptr,
    stats_ptr, sums_ptr, units_ptr, counts_ptr, counter_ptr, work_ptr, ahead, lists, scale_log2, cap_scale, scale,
    sizes, C: gl.constexpr,
):  # fmt: skip
    """dK, dV and the dQ accumulator; items are (batch, kv head) pairs, blocks 128 keys. Tile mask: `lists` are those of
    listed.Lists.
    """
    TILE_READERS: gl.constexpr = 3 if C.AHEAD else 2
    pipe = make_pipeline(q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, dq_desc, TILE_READERS, C)
    if C.AHEAD:
        row_tiles = pipe  # not read without STATS_AHEAD
        if C.STATS_AHEAD:
            row_tiles = make_row_tiles(dout_desc, C)
            fence_async_shared()  # also its barriers are initialised before TMA reports to them
        gl.warp_specialize([
            (consumer, (dq_desc, dk_desc, dv_desc, units_ptr, scale_log2, cap_scale, scale, lists, sizes, pipe, 0, C)),
            (consumer, (dq_desc, dk_desc, dv_desc, units_ptr, scale_log2, cap_scale, scale, lists, sizes, pipe, 1, C)),
            (producer, (
                q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, counts_ptr, counter_ptr, work_ptr, ahead,
                lists, sizes, pipe, C)),
            (preparer, (
                out_desc, dout_desc, lse_ptr, dlse_ptr, stats_ptr, sums_ptr, row_tiles, counts_ptr, work_ptr, ahead,
                pipe.tiles, sizes, C)),
        ], [4, 1, 2], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (dq_desc, dk_desc, dv_desc, units_ptr, scale_log2, cap_scale, scale, lists, sizes, pipe, 0, C)),
            (consumer, (dq_desc, dk_desc, dv_desc, units_ptr, scale_log2, cap_scale, scale, lists, sizes, pipe, 1, C)),
            (producer, (
                q_desc, dout_desc, k_desc, v_desc, stats_desc, units_desc, None, counter_ptr, work_ptr, None, lists,
                sizes, pipe, C)),
        ], [4, 1], [240, 24])  # fmt: skip
