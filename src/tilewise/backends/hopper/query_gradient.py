"""dQ of heads over 128 columns, in a fixed order: one CTA per 128 queries of a head, K and V streamed past them.

Roles as in the forward: one producer warp, two consumer warpgroups of 64 queries. S and dP are recomputed (with
backward_wide.py 7 products instead of backward.py's 5), but one warpgroup sums every row of dQ, from right to left, and
no sums travel through L2. Head dims come in two column parts as in the forward.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Parts
from tilewise.backends.gpu.releases import aggregate, async_store
from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.forward import make_parts
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, tile_at
from tilewise.backends.hopper.primitives import exp2, rebuilt
from tilewise.backends.hopper.products import issue_product, load_tile
from tilewise.backends.hopper.schedule import key_tiles, own_tile, row_tile_of, whole_tiles
from tilewise.backends.hopper.scores import capped, mask_scores, through_cap


@aggregate
class Pipeline:
    """The shared memory of a CTA: Q and dO of its queries, rings of K and V tiles (pairs of column parts)."""

    q_smem: gl.tuple
    dout_smem: gl.tuple
    k_smem: gl.tuple
    v_smem: gl.tuple
    query_ring: Ring
    k_ring: Ring
    v_ring: Ring


@gluon.jit
def producer(q_desc, dout_desc, k_desc, v_desc, work_ptr, sizes, pipe, C: gl.constexpr):
    """Load Q and dO once, then the key tiles that they see."""
    QUERY_BYTES: gl.constexpr = 2 * 64 * (C.D + C.D_REST + C.DV + C.DV_REST)
    K_BYTES: gl.constexpr = 2 * C.BLOCK_N * (C.D + C.D_REST)
    V_BYTES: gl.constexpr = 2 * C.BLOCK_N * (C.DV + C.DV_REST)
    block, _, head, q_span, kv_span = own_tile(work_ptr, sizes, C.HAS_RIGHT, C)
    kv_head = head // sizes.group_size
    last, count = key_tiles(block, q_span.length, kv_span.length, sizes, C)
    for w in gl.static_range(2):
        ready = pipe.query_ring.acquire(start(1).lane(w, 2), QUERY_BYTES)
        row = block * 128 + w * 64
        load_tile(q_desc, pipe.q_smem, w, ready, q_span, head, row, C.D, C.D_REST, C)
        load_tile(dout_desc, pipe.dout_smem, w, ready, q_span, head, row, C.DV, C.DV_REST, C)
    k_at = start(C.NUM_STAGES)
    v_at = start(C.V_STAGES)
    for i in range(count):
        row = (last - i) * C.BLOCK_N
        ready = pipe.k_ring.acquire(k_at, K_BYTES)
        load_tile(k_desc, pipe.k_smem, k_at.slot, ready, kv_span, kv_head, row, C.D, C.D_REST, C)
        k_at = k_at.next()
        ready = pipe.v_ring.acquire(v_at, V_BYTES)
        load_tile(v_desc, pipe.v_smem, v_at.slot, ready, kv_span, kv_head, row, C.DV, C.DV_REST, C)
        v_at = v_at.next()


@gluon.jit
def add_product(ds, k_smem, slot, dq, dq_rest, C: gl.constexpr):
    """Compute dQ += dS K and wait for it."""
    D: gl.constexpr = C.D
    D_REST: gl.constexpr = C.D_REST
    operand = gl.convert_layout(ds, left_operand_layout(accumulator_layout(D)))
    dq = warpgroup_mma(operand, k_smem.first.index(slot).reshape([C.BLOCK_N, D]), dq, is_async=True)
    if D_REST:
        rest = gl.convert_layout(ds, left_operand_layout(accumulator_layout(D_REST)))
        dq_rest = warpgroup_mma(rest, k_smem.rest.index(slot).reshape([C.BLOCK_N, D_REST]), dq_rest, is_async=True)
        dq, dq_rest, operand = warpgroup_mma_wait(0, deps=[dq, dq_rest, operand])
    else:
        dq, operand = warpgroup_mma_wait(0, deps=[dq, operand])
    return dq, dq_rest


@gluon.jit
def step(
    n_block, row, lse, delta, dq, dq_rest, k_at, v_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes, pipe,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile: dQ += dS K."""
    IN_FLIGHT: gl.constexpr = 2 if C.DV_REST else 1
    pipe.k_ring.wait(k_at)
    half = rebuilt(WARPGROUP, k_at.slot, True)
    s = issue_product(pipe.q_smem, pipe.k_smem, half, k_at.slot, C.D, C.D_REST, C)
    pipe.v_ring.wait(v_at)
    dp = issue_product(pipe.dout_smem, pipe.v_smem, half, v_at.slot, C.DV, C.DV_REST, C)
    s = capped(warpgroup_mma_wait(IN_FLIGHT, deps=[s]), cap_scale, C)
    seen = s
    if MASKED:
        seen = mask_scores(s, row, n_block, seqlen_q, seqlen_k, sizes, C)
    p = through_cap(exp2(seen * scale_log2 - lse[:, None]), s, C)
    dp = warpgroup_mma_wait(0, deps=[dp])
    pipe.v_ring.release(v_at)
    ds = (p * (dp - delta[:, None])).to(pipe.k_smem.first.dtype)
    dq, dq_rest = add_product(ds, pipe.k_smem, k_at.slot, dq, dq_rest, C)
    pipe.k_ring.release(k_at)
    return dq, dq_rest, k_at.next(), v_at.next()


@gluon.jit
def load_statistics(stats_ptr, row_tile, row, seqlen_q, C: gl.constexpr):
    """(lse, delta) of 64 queries; row_tile is the index of their sequence's first tile of statistics."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(C.BLOCK_N)))
    at = stats_ptr + (row_tile + rows // C.BLOCK_M).to(gl.int64) * (2 * C.BLOCK_M) + rows % C.BLOCK_M
    lse = gl.load(at, mask=rows < seqlen_q, other=float("inf"))
    delta = gl.load(at + C.BLOCK_M, mask=rows < seqlen_q, other=0.0)
    return lse, delta


@gluon.jit
def store_gradient(dq, dq_rest, dq_desc, span, head, row, scale, pipe, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Write dQ of 64 queries through the buffer that held Q."""
    D: gl.constexpr = C.D
    D_REST: gl.constexpr = C.D_REST
    DTYPE: gl.constexpr = pipe.q_smem.first.dtype
    pipe.q_smem.first.index(WARPGROUP).reshape([64, D]).store((dq * scale).to(DTYPE))
    if D_REST:
        pipe.q_smem.rest.index(WARPGROUP).reshape([64, D_REST]).store((dq_rest * scale).to(DTYPE))
    fence_async_shared()  # orders the stores above before TMA's reads below
    place = tile_at(span, head, row, 0, C.IS_VARLEN)
    async_store(dq_desc.first, place, pipe.q_smem.first.index(WARPGROUP))
    if D_REST:
        place = tile_at(span, head, row, D, C.IS_VARLEN)
        async_store(dq_desc.rest, place, pipe.q_smem.rest.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit
def consumer(
    dq_desc, stats_ptr, work_ptr, scale_log2, cap_scale, scale, sizes, pipe,
    WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Sum dQ of 64 queries."""
    D: gl.constexpr = C.D
    D_REST: gl.constexpr = C.D_REST
    block, item, head, q_span, kv_span = own_tile(work_ptr, sizes, C.HAS_RIGHT, C)
    row = block * 128 + WARPGROUP * 64
    seqlen_q = q_span.length
    seqlen_k = kv_span.length
    last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)
    begin, end = whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C)
    lse, delta = load_statistics(stats_ptr, row_tile_of(item, q_span, sizes, C), row, seqlen_q, C)
    dq = gl.zeros([64, D], gl.float32, accumulator_layout(D))
    dq_rest = 0
    if D_REST:
        dq_rest = gl.zeros([64, D_REST], gl.float32, accumulator_layout(D_REST))
    k_at = start(C.NUM_STAGES)
    v_at = start(C.V_STAGES)
    pipe.query_ring.wait(start(1).lane(WARPGROUP, 2))
    if C.HAS_RIGHT or C.HAS_LEFT or not C.EVEN_K:
        for i in range(begin):
            dq, dq_rest, k_at, v_at = step(
                last - i, row, lse, delta, dq, dq_rest, k_at, v_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
                pipe, WARPGROUP, True, C)  # fmt: skip
    else:
        begin = 0
    for i in range(begin, end):
        dq, dq_rest, k_at, v_at = step(
            last - i, row, lse, delta, dq, dq_rest, k_at, v_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
            pipe, WARPGROUP, False, C)  # fmt: skip
    if C.HAS_LEFT:
        for i in range(end, count):
            dq, dq_rest, k_at, v_at = step(
                last - i, row, lse, delta, dq, dq_rest, k_at, v_at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
                pipe, WARPGROUP, True, C)  # fmt: skip
    store_gradient(dq, dq_rest, dq_desc, q_span, head, row, scale, pipe, WARPGROUP, C)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "scale", "sizes"],
    do_not_specialize_on_alignment=["stats_ptr", "work_ptr"],
)
def query_gradient_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, q_rest, dout_rest, k_rest, v_rest, dq_rest, stats_ptr, work_ptr,
    scale_log2, cap_scale, scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Write dQ of one (block of 128 queries, head); items are (batch, head) pairs."""
    queries, douts = Parts(q_desc, q_rest), Parts(dout_desc, dout_rest)
    keys, values = Parts(k_desc, k_rest), Parts(v_desc, v_rest)
    gradients = Parts(dq_desc, dq_rest)
    q_smem = make_parts(queries, 2, 64, C.D, C.D_REST, C)
    dout_smem = make_parts(douts, 2, 64, C.DV, C.DV_REST, C)
    k_smem = make_parts(keys, C.NUM_STAGES, C.BLOCK_N, C.D, C.D_REST, C)
    v_smem = make_parts(values, C.V_STAGES, C.BLOCK_N, C.DV, C.DV_REST, C)
    query_ring = make_ring(2, 1)
    k_ring = make_ring(C.NUM_STAGES, 2)
    v_ring = make_ring(C.V_STAGES, 2)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    pipe = Pipeline(q_smem, dout_smem, k_smem, v_smem, query_ring, k_ring, v_ring)
    gl.warp_specialize([
        (consumer, (gradients, stats_ptr, work_ptr, scale_log2, cap_scale, scale, sizes, pipe, 0, C)),
        (consumer, (gradients, stats_ptr, work_ptr, scale_log2, cap_scale, scale, sizes, pipe, 1, C)),
        (producer, (queries, douts, keys, values, work_ptr, sizes, pipe, C)),
    ], [4, 1], [240, 24])  # fmt: skip
