"""dQ in a fixed order, for the deterministic backward: one CTA per 128 queries of a head, K and V streamed past them.

Roles as in the forward: one producer warp, two consumer warpgroups of 64 queries. S and dP are computed once more (7
products instead of the fused kernel's 5), but every row of dQ is summed by one warpgroup from right to left.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.primitives import exp2
from tilewise.backends.hopper.schedule import key_span, key_tiles, lengths_of, place_of, query_span, whole_tiles
from tilewise.backends.hopper.scores import capped, mask_scores, through_cap

__all__ = ["query_gradient_kernel"]


@aggregate
class Pipeline:
    """The shared memory of a CTA: Q and dO of its queries, a ring of (K, V) tiles."""

    q_smem: gl.shared_memory_descriptor
    dout_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    query_ring: Ring
    key_ring: Ring

    @gluon.constexpr_function
    def __init__(self, q_smem, dout_smem, k_smem, v_smem, query_ring, key_ring):
        self.q_smem = q_smem
        self.dout_smem = dout_smem
        self.k_smem = k_smem
        self.v_smem = v_smem
        self.query_ring = query_ring
        self.key_ring = key_ring


@gluon.jit
def producer(q_desc, dout_desc, k_desc, v_desc, cu_seqlens, sizes, pipe, C: gl.constexpr):
    """Load the queries once, then the key tiles they see."""
    QUERY_BYTES: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes
    KEY_BYTES: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    block, item = place_of(gl.program_id(0), sizes, C.HAS_RIGHT)
    batch_idx = item // sizes.num_heads
    head = item - batch_idx * sizes.num_heads
    kv_head = head // sizes.group_size
    q_span = query_span(cu_seqlens, batch_idx, sizes, C)
    kv_span = key_span(cu_seqlens, batch_idx, sizes, C)
    last, count = key_tiles(block, q_span[2], kv_span[2], sizes, C)
    turn = start(1)
    for w in gl.static_range(2):
        at = turn.lane(w, 2)
        ready = pipe.query_ring.acquire(at, QUERY_BYTES)
        place = tile_at(q_span, head, block * 128 + w * 64, 0, C.IS_VARLEN)
        tma.async_copy_global_to_shared(q_desc, place, ready, pipe.q_smem.index(w))
        tma.async_copy_global_to_shared(dout_desc, place, ready, pipe.dout_smem.index(w))
    at = start(2)
    for i in range(count):
        ready = pipe.key_ring.acquire(at, KEY_BYTES)
        place = tile_at(kv_span, kv_head, (last - i) * 128, 0, C.IS_VARLEN)
        tma.async_copy_global_to_shared(k_desc, place, ready, pipe.k_smem.index(at.slot))
        tma.async_copy_global_to_shared(v_desc, place, ready, pipe.v_smem.index(at.slot))
        at = at.next()


@gluon.jit
def step(
    n_block, row, q, dout, lse, delta, dq, at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes, pipe,
    MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One key tile: dQ += dS K."""
    D: gl.constexpr = C.D
    OPERAND: gl.constexpr = left_operand_layout(accumulator_layout(D))
    zeros = gl.zeros([64, 128], gl.float32, accumulator_layout(128))
    k = pipe.k_smem.index(at.slot).reshape([128, D])
    v = pipe.v_smem.index(at.slot).reshape([128, D])
    pipe.key_ring.wait(at)
    s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(dout, v.permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    s = capped(s, cap_scale, C)
    seen = s
    if MASKED:
        seen = mask_scores(s, row, n_block, seqlen_q, seqlen_k, sizes, C)
    p = through_cap(exp2(seen * scale_log2 - lse[:, None]), s, C)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(pipe.k_smem.dtype), OPERAND)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    pipe.key_ring.release(at)
    return dq, at.next()


@gluon.jit
def consumer(
    dq_desc, stats_ptr, cu_seqlens, scale_log2, cap_scale, scale, sizes, pipe,
    WARPGROUP: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Sum dQ of 64 queries."""
    D: gl.constexpr = C.D
    block, item = place_of(gl.program_id(0), sizes, C.HAS_RIGHT)
    row = block * 128 + WARPGROUP * 64
    seqlen_q, seqlen_k = lengths_of(cu_seqlens, item, sizes, C)
    last, count = key_tiles(block, seqlen_q, seqlen_k, sizes, C)
    begin, end = whole_tiles(row, last, count, seqlen_q, seqlen_k, sizes, C)
    num_m = gl.cdiv(sizes.seqlen_q, C.BLOCK_M)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, accumulator_layout(128)))
    at_stats = stats_ptr + (item * num_m + rows // C.BLOCK_M).to(gl.int64) * (2 * C.BLOCK_M) + rows % C.BLOCK_M
    lse = gl.load(at_stats, mask=rows < num_m * C.BLOCK_M, other=float("inf"))
    delta = gl.load(at_stats + C.BLOCK_M, mask=rows < num_m * C.BLOCK_M, other=0.0)
    dq = gl.zeros([64, D], gl.float32, accumulator_layout(D))
    q = pipe.q_smem.index(WARPGROUP).reshape([64, D])
    dout = pipe.dout_smem.index(WARPGROUP).reshape([64, D])
    pipe.query_ring.wait(start(1).lane(WARPGROUP, 2))
    at = start(2)
    if C.HAS_RIGHT or C.HAS_LEFT or not C.EVEN_K:
        for i in range(begin):
            dq, at = step(
                last - i, row, q, dout, lse, delta, dq, at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
                pipe, True, C)  # fmt: skip
    else:
        begin = 0
    for i in range(begin, end):
        dq, at = step(
            last - i, row, q, dout, lse, delta, dq, at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
            pipe, False, C)  # fmt: skip
    if C.HAS_LEFT:
        for i in range(end, count):
            dq, at = step(
                last - i, row, q, dout, lse, delta, dq, at, scale_log2, cap_scale, seqlen_q, seqlen_k, sizes,
                pipe, True, C)  # fmt: skip
    q.store((dq * scale).to(pipe.q_smem.dtype))
    fence_async_shared()  # orders the store above before TMA reads it
    batch_idx = item // sizes.num_heads
    span = query_span(cu_seqlens, batch_idx, sizes, C)
    place = tile_at(span, item - batch_idx * sizes.num_heads, row, 0, C.IS_VARLEN)
    tma.async_copy_shared_to_global(dq_desc, place, pipe.q_smem.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["scale_log2", "cap_scale", "scale", "sizes"],
    do_not_specialize_on_alignment=["stats_ptr", "cu_seqlens_q", "cu_seqlens_k"],
)
def query_gradient_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, stats_ptr, cu_seqlens_q, cu_seqlens_k, scale_log2, cap_scale, scale,
    sizes, C: gl.constexpr,
):  # fmt: skip
    """Write dQ of one (block of 128 queries, head); items are (batch, head) pairs."""
    DTYPE: gl.constexpr = q_desc.dtype
    D: gl.constexpr = C.D
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    q_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 64, D, C.IS_VARLEN), q_desc.layout)
    dout_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 64, D, C.IS_VARLEN), dout_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 128, D, C.IS_VARLEN), k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, 128, D, C.IS_VARLEN), v_desc.layout)
    query_ring = make_ring(2, 1)
    key_ring = make_ring(2, 2)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    pipe = Pipeline(q_smem, dout_smem, k_smem, v_smem, query_ring, key_ring)
    gl.warp_specialize([
        (consumer, (dq_desc, stats_ptr, cu_seqlens, scale_log2, cap_scale, scale, sizes, pipe, 0, C)),
        (consumer, (dq_desc, stats_ptr, cu_seqlens, scale_log2, cap_scale, scale, sizes, pipe, 1, C)),
        (producer, (q_desc, dout_desc, k_desc, v_desc, cu_seqlens, sizes, pipe, C)),
    ], [4, 1], [240, 24])  # fmt: skip
