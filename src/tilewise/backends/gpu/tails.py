"""Clear the rows of packed tensors that belong to no sequence: in a small kernel, or as part of another one."""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"

import triton
import triton.language as tl

__all__ = ["clear_rows", "clear_tail_kernel"]

BLOCK = tl.constexpr(1024)


@triton.jit
def clear_rows(rows_ptr, lse_ptr, begin, total, num_heads, row_width):
    """Zeros in rows begin .. total-1 of (total, row_width), -inf in lse (num_heads, total); programs share the rows."""
    for row in range(begin + tl.program_id(0), total, tl.num_programs(0)):
        for first in range(0, row_width, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            at = rows_ptr + tl.cast(row, tl.int64) * row_width + cols
            tl.store(at, tl.zeros([BLOCK], rows_ptr.dtype.element_ty), mask=cols < row_width)
        if lse_ptr is not None:
            for first in range(0, num_heads, BLOCK):
                heads = first + tl.arange(0, BLOCK)
                at = lse_ptr + heads.to(tl.int64) * total + row
                tl.store(at, tl.zeros([BLOCK], tl.float32) - float("inf"), mask=heads < num_heads)


@triton.jit(
    do_not_specialize=["batch", "total", "num_heads", "row_width"],
    do_not_specialize_on_alignment=["rows_ptr", "lse_ptr", "cu_seqlens"],
)
def clear_tail_kernel(rows_ptr, lse_ptr, cu_seqlens, batch, total, num_heads, row_width):
    """Zeros in rows cu_seqlens[batch] .. total-1 of (total, row_width), -inf in lse (num_heads, total)."""
    clear_rows(rows_ptr, lse_ptr, tl.load(cu_seqlens + batch), total, num_heads, row_width)
