"""Small serving kernels: new rows of K and V into pages, and a shared prefix's result into each row's own.

Both are one launch without synchronisation, so a step can be captured in a CUDA graph.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import Pass, RawView, raw_views
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, Multiple
from tilewise.numerics import LN2 as LN2_FLOAT
from tilewise.numerics import LOG2E as LOG2E_FLOAT

__all__ = ["merge_rows", "strides_of", "write_rows"]

LOG2E = tl.constexpr(LOG2E_FLOAT)
LN2 = tl.constexpr(LN2_FLOAT)
NEG_INF = tl.constexpr(float("-inf"))
# Elements of a row that a program moves at once: 16 bytes per thread of four warps in bf16.
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


@triton.jit
def write_rows_kernel(
    k, v, k_pages, v_pages, slots, page_size, num_heads, k_strides, v_strides, k_page_strides, v_page_strides,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Scatter K and V. Grid: one program per row. A row without a slot (-1) is skipped."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    page = slot // page_size
    slot = slot % page_size
    copy_row(k, k_pages, row, page, slot, num_heads, k_strides, k_page_strides, DIM, BLOCK)
    copy_row(v, v_pages, row, page, slot, num_heads, v_strides, v_page_strides, DIM_V, BLOCK_V)


@triton.jit
def merge_rows_kernel(
    out, lse, part, part_lse, rows, num_heads, lse_stride, part_lse_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge row `i` of a partial result into row `rows[i]` (or i) of another. Grid: row * num_heads."""
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
    a = tl.load(here, mask=at < DIM, other=0.0).to(tl.float32)
    b = tl.load(there, mask=at < DIM, other=0.0).to(tl.float32)
    # Select, because 0 * NaN is NaN: a side without weight must not contribute.
    result = tl.where(mine > 0.0, a, 0.0) * (mine * inverse) + tl.where(theirs > 0.0, b, 0.0) * (theirs * inverse)
    tl.store(here, result.to(out.dtype.element_ty), mask=at < DIM)
    merged = tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2)
    tl.store(lse + head * lse_stride + row, merged)


WRITTEN = ("k", "v", "k_pages", "v_pages", "slots")
MERGED = ("out", "lse", "part", "part_lse", "rows")
Views = tuple[RawView | None, ...]
Describe = Callable[[tuple[int, ...], Views], KernelCall]


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See tilewise.kv.writing. The last dimension of every tensor is contiguous."""
    tensors = (k, v, k_pages, v_pages, slots)
    _run(write_call, (*k.shape, v.shape[2], k_pages.shape[1]), tensors)


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """Merge rows of a partial result over other keys into `out` (total, heads, dim) and `lse` (heads, total)."""
    _run(merge_call, tuple(part.shape), (out, lse, part, part_lse, rows))


def _run(describe: Describe, sizes: tuple[int, ...], tensors: tuple[Tensor | None, ...]) -> None:
    first = tensors[0]
    assert first is not None
    _prepared(describe, sizes, raw_views(tensors), first.device).run(tensors)


@functools.lru_cache(maxsize=512)
def _prepared(describe: Describe, sizes: tuple[int, ...], views: Views, device: torch.device) -> Pass:
    names = WRITTEN if describe is write_call else MERGED
    index = -1 if device.type != "cuda" else device.index
    return Pass([describe(sizes, views)], names, {}, devices.of(device), index)


def write_call(sizes: tuple[int, ...], views: Views) -> KernelCall:
    """The kernel that scatters K and V: sizes are (rows, num_heads, dim, dim_v, page_size)."""
    rows, heads, dim, dim_v, page_size = sizes
    arguments = dict(zip(WRITTEN, map(_address, WRITTEN, views), strict=True)) | {
        "page_size": page_size,
        "num_heads": heads,
        "k_strides": strides_of(views[0], 2),
        "v_strides": strides_of(views[1], 2),
        "k_page_strides": strides_of(views[2], 3),
        "v_page_strides": strides_of(views[3], 3),
        "DIM": dim,
        "DIM_V": dim_v,
        "BLOCK": min(MOST_ELEMENTS, triton.next_power_of_2(heads * dim)),
        "BLOCK_V": min(MOST_ELEMENTS, triton.next_power_of_2(heads * dim_v)),
    }
    return KernelCall(write_rows_kernel, (rows, 1, 1), arguments)


def merge_call(sizes: tuple[int, ...], views: Views) -> KernelCall:
    """The kernel that merges (rows, num_heads, dim) of a partial result into another; both `out` are contiguous."""
    rows, heads, dim = sizes
    arguments = dict(zip(MERGED, map(_address, MERGED, views), strict=True)) | {
        "num_heads": heads,
        "lse_stride": _stride(views[1]),
        "part_lse_stride": _stride(views[3]),
        "DIM": dim,
        "BLOCK": triton.next_power_of_2(dim),
    }
    return KernelCall(merge_rows_kernel, (rows * heads, 1, 1), arguments, num_warps=1)


def _address(name: str, view: RawView | None) -> Address | None:
    return None if view is None else Address(name, view[1], view[2])


def _stride(view: RawView | None) -> int:
    assert view is not None
    return view[0][0]


def strides_of(view: RawView | None, count: int) -> tuple[int | Multiple, ...]:
    """The first strides. Multiples of 16 bytes are marked, so that a thread loads that many at once."""
    assert view is not None
    strides, dtype, _ = view
    whole = ALIGNMENT // dtype.itemsize
    return tuple(Multiple(stride, whole) if stride % whole == 0 else stride for stride in strides[:count])
