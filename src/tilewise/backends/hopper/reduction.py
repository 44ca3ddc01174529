"""The one TMA operation Triton 3.6 compiles but Gluon does not export."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin

__all__ = ["reduce_add"]


@builtin
def reduce_add(desc, coord, source, _semantic=None):
    """global[coord] += shared tile, asynchronously, like a TMA store; fp32 additions in no fixed order."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)
