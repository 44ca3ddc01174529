"""wgmma products of the forward and of query_gradient.py: Q K^T, P V, dO V^T; rescaling of O, and loading of a tile."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.releases import async_load
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, tile_at
from tilewise.backends.hopper.scores import rescale


@gluon.jit
def load_tile(desc, smem, slot, ready, span, head, row, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr):
    """Start the copy of a tile, both column parts, into a slot."""
    async_load(desc.first, tile_at(span, head, row, 0, C.IS_VARLEN), ready, smem.first.index(slot))
    if D_REST:
        async_load(desc.rest, tile_at(span, head, row, D, C.IS_VARLEN), ready, smem.rest.index(slot))


@gluon.jit
def issue_product(a_smem, b_smem, a_slot, b_slot, D: gl.constexpr, D_REST: gl.constexpr, C: gl.constexpr):
    """Start A B^T of 64 queries and a key tile: S = Q K^T or dP = dO V^T."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    zeros = gl.zeros([64, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    a = a_smem.first.index(a_slot).reshape([64, D])
    b = b_smem.first.index(b_slot).reshape([BLOCK_N, D])
    product = warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if D_REST:
        a = a_smem.rest.index(a_slot).reshape([64, D_REST])
        b = b_smem.rest.index(b_slot).reshape([BLOCK_N, D_REST])
        product = warpgroup_mma(a, b.permute([1, 0]), product, is_async=True)
    return product


@gluon.jit
def issue_scores(q_smem, q_slot, k_smem, k_slot, C: gl.constexpr):
    """Start S = Q K^T."""
    return issue_product(q_smem, k_smem, q_slot, k_slot, C.D, C.D_REST, C)


@gluon.jit
def issue_output(p, v_smem, slot, acc, acc_rest, C: gl.constexpr):
    """Start O += P V."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    DV_REST: gl.constexpr = C.DV_REST
    acc = warpgroup_mma(p, v_smem.first.index(slot).reshape([BLOCK_N, DV]), acc, is_async=True)
    if DV_REST:
        p_rest = gl.convert_layout(p, left_operand_layout(accumulator_layout(DV_REST)))
        acc_rest = warpgroup_mma(p_rest, v_smem.rest.index(slot).reshape([BLOCK_N, DV_REST]), acc_rest, is_async=True)
    return acc, acc_rest


@gluon.jit
def wait_output(acc, acc_rest, p, C: gl.constexpr):
    """Wait for all products issued so far; p is a dependency so that its registers stay alive until then."""
    if C.DV_REST:
        acc, acc_rest, p = warpgroup_mma_wait(0, deps=[acc, acc_rest, p])
    else:
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    return acc, acc_rest


@gluon.jit
def scale_output(acc, acc_rest, factor, C: gl.constexpr):
    """Multiply the rows of O by a factor [64]."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, accumulator_layout(C.DV)))[:, None]
    if C.DV_REST:
        acc_rest = acc_rest * gl.convert_layout(factor, gl.SliceLayout(1, accumulator_layout(C.DV_REST)))[:, None]
    return acc, acc_rest


@gluon.jit
def rescale_output(acc, acc_rest, factor, C: gl.constexpr):
    """Multiply the rows of O by the factor [64, 4] of scores.soften."""
    acc = rescale(acc, factor, C.DV, C)
    if C.DV_REST:
        acc_rest = rescale(acc_rest, factor, C.DV_REST, C)
    return acc, acc_rest
