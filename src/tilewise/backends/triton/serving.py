"""Small kernels of serving: new rows of K and V into pages, and a shared prefix's result into each row's own.

Both are one launch with no host work to wait for, so a step can be captured in a CUDA graph.
"""

# Kernel arguments are typed by Triton, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.numerics import LN2 as LN2_FLOAT
from tilewise.numerics import LOG2E as LOG2E_FLOAT

__all__ = ["merge_rows", "write_rows"]

LOG2E = tl.constexpr(LOG2E_FLOAT)
LN2 = tl.constexpr(LN2_FLOAT)
NEG_INF = tl.constexpr(float("-inf"))
# Elements of a row that a program moves at once: 16 bytes a thread of four warps in bf16.
MOST_ELEMENTS = 1024


@triton.jit
def copy_row(new, pages, row, page, slot, num_heads, new_strides, page_strides, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One row, all its heads, into a slot."""
    source = new + row * new_strides[0]
    target = pages + page * page_strides[0] + slot * page_strides[1]
    for first in tl.range(0, num_heads * DIM, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < num_heads * DIM
        head, at = place // DIM, place % DIM
        values = tl.load(source + head * new_strides[1] + at, mask=ok)
        tl.store(target + head * page_strides[2] + at, values, mask=ok)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_rows_kernel(
    k, v, k_pages, v_pages, slots, page_size, num_heads, k_strides, v_strides, k_page_strides, v_page_strides,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Scatter K and V. Grid: a program for each row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    page = slot // page_size
    slot = slot % page_size
    copy_row(k, k_pages, row, page, slot, num_heads, k_strides, k_page_strides, DIM, BLOCK)
    copy_row(v, v_pages, row, page, slot, num_heads, v_strides, v_page_strides, DIM_V, BLOCK_V)


@triton.jit(do_not_specialize=["num_heads", "lse_stride", "part_lse_stride"])
def merge_rows_kernel(
    out, lse, part, part_lse, rows, num_heads, lse_stride, part_lse_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Work row `i` of a partial result into row `rows[i]` (or i) of another. Grid: row * num_heads."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    index = (tl.program_id(0) // num_heads).to(tl.int64)
    row = index
    if rows is not None:
        row = tl.load(rows + index)
    mine, theirs = tl.load(lse + head * lse_stride + row), tl.load(part_lse + head * part_lse_stride + index)
    top = tl.maximum(mine, theirs)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    mine, theirs = tl.exp2((mine - anchor) * LOG2E), tl.exp2((theirs - anchor) * LOG2E)
    total = mine + theirs
    empty = total == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, total)
    at = tl.arange(0, BLOCK)
    here = out + (row * num_heads + head) * DIM + at
    there = part + (index * num_heads + head) * DIM + at
    # A side without weight is not read: what is in it must not come through as 0 * NaN.
    a = tl.load(here, mask=(at < DIM) & (mine > 0.0), other=0.0).to(tl.float32)
    b = tl.load(there, mask=(at < DIM) & (theirs > 0.0), other=0.0).to(tl.float32)
    tl.store(here, (a * (mine * inverse) + b * (theirs * inverse)).to(out.dtype.element_ty), mask=at < DIM)
    merged = tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    tl.store(lse + head * lse_stride + row, merged)


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See tilewise.kv.writing; the last dimension of every tensor is contiguous."""
    rows, heads, dim = k.shape
    dim_v = v.shape[2]
    if rows == 0:
        return
    with _on_device_of(k):
        write_rows_kernel[(rows,)](
            k, v, k_pages, v_pages, slots, k_pages.shape[1], heads, k.stride()[:2], v.stride()[:2],
            k_pages.stride()[:3], v_pages.stride()[:3], DIM=dim, DIM_V=dim_v, BLOCK=_elements(heads * dim),
            BLOCK_V=_elements(heads * dim_v), num_warps=4,
        )  # fmt: skip


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """`out` (total, heads, dim), `lse` (heads, total) with rows of a partial result over other keys worked in."""
    count, heads, dim = part.shape
    if count == 0:
        return
    with _on_device_of(out):
        merge_rows_kernel[(count * heads,)](
            out, lse, part, part_lse, rows, heads, lse.stride(0), part_lse.stride(0), DIM=dim,
            BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip


def _elements(count: int) -> int:
    return min(MOST_ELEMENTS, int(triton.next_power_of_2(count)))


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels start on the current device."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
