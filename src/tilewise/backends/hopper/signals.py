"""Memory order between CTAs, through global memory: mbarriers work only within a CTA."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.releases import barrier

__all__ = ["await_writes", "let_next_start", "load_acquire", "order_copies", "publish"]


@gluon.jit
def load_acquire(at):
    """Load a 32-bit integer with acquire order: what was published before it was written is visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _with_result(instructions):
    return f"{instructions} mov.u32 $0, $1;"


@gluon.jit
def _issue(INSTRUCTIONS: gl.constexpr):
    """Run instructions for their side effects; inline assembly must have a result, which is not used."""
    ASM: gl.constexpr = _with_result(INSTRUCTIONS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish():
    """Make this role's stores to global memory visible to other CTAs and their TMA before what it does next."""
    _issue("fence.proxy.async; fence.acq_rel.gpu;")
    barrier()  # one thread may now signal for all


@gluon.constexpr_function
def _waiting(pending):
    return f"cp.async.bulk.wait_group {pending};"


@gluon.jit
def await_writes(PENDING: gl.constexpr):
    """Wait until all but the last PENDING of this role's TMA stores and additions have arrived in global memory."""
    INSTRUCTIONS: gl.constexpr = _waiting(PENDING)
    _issue(INSTRUCTIONS)


@gluon.jit
def order_copies():
    """Order what this role has acquired before what its TMA reads next."""
    _issue("fence.proxy.async;")


@gluon.jit
def let_next_start():
    """Allow the next kernel to start once all CTAs have called this; it must wait for this kernel's end itself."""
    _issue("griddepcontrol.launch_dependents;")
