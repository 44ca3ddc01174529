"""Order between CTAs through global memory, where no mbarrier reaches."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.releases import barrier

__all__ = ["await_writes", "let_next_start", "load_acquire", "order_copies", "publish"]


@gluon.jit
def load_acquire(at):
    """A 32-bit integer at an address; what was published before it was written is seen afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _with_result(instructions):
    return f"{instructions} mov.u32 $0, $1;"


@gluon.jit
def _issue(INSTRUCTIONS: gl.constexpr):
    """Instructions for what they do; assembly has a result, which nobody reads."""
    ASM: gl.constexpr = _with_result(INSTRUCTIONS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def publish():
    """Order what this role has stored in global memory, also for TMA of other CTAs, before what it does next."""
    _issue("fence.proxy.async; fence.acq_rel.gpu;")
    barrier()  # what one thread says next is said for all


@gluon.constexpr_function
def _waiting(pending):
    return f"cp.async.bulk.wait_group {pending};"


@gluon.jit
def await_writes(PENDING: gl.constexpr):
    """Wait until all but the last PENDING of this role's TMA stores and additions are there for all who hear of it."""
    INSTRUCTIONS: gl.constexpr = _waiting(PENDING)
    _issue(INSTRUCTIONS)


@gluon.jit
def order_copies():
    """Order what was heard of before what this role's TMA reads next."""
    _issue("fence.proxy.async;")


@gluon.jit
def let_next_start():
    """The kernel after this one may start, if it waits for the end of this one itself, once all CTAs have said so."""
    _issue("griddepcontrol.launch_dependents;")
