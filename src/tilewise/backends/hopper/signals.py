"""Order between CTAs through global memory, where no mbarrier reaches."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["await_writes", "load_acquire", "order_copies", "publish"]


@gluon.jit
def load_acquire(at):
    """A 32-bit integer at an address; what was published before it was written is seen afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def publish():
    """Order what this role has stored in global memory, also for TMA of other CTAs, before what it does next."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; fence.acq_rel.gpu; mov.u32 $0, $1;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()  # what one thread says next is said for all


@gluon.jit
def await_writes():
    """Wait until what this role's TMA has written or added is there for all who hear of it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def order_copies():
    """Order what was heard of before what this role's TMA reads next."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
