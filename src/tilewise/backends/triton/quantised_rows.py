"""Writes new rows of K and V into e4m3 pages, quantised on the way: one launch, no synchronisation, no sorting.

    grid (a few rows, heads, K or V)   where one of them is the first that goes to a page, its program does the whole
                                       (page, head); most programs of a prompt's rows end at once

    amax of the page's new rows -> its scale, a power of two that never shrinks
    if it grew: what the page holds moves down by whole exponents
    the new rows                   e4m3(x / scale)

In one step a page belongs to one sequence, whose rows are consecutive, so no two programs write the same element.
tilewise/kv/quantised.py defines the bits, and tests compare with it.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# ruff: noqa: N803

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import Pass, RawView, raw_views
from tilewise.backends.gpu.symbols import Address, KernelCall
from tilewise.backends.triton.quantising import AMAX_FLOOR, E4M3_MAX, LARGEST, e4m3_bits
from tilewise.backends.triton.serving import strides_of

__all__ = ["append_call", "append_quantised"]

# From this size on, a batch is mostly prompts, whose rows share pages. A program then scans more rows with more threads
# and holds more of them at a time, because starting and ending a program per row would dominate.
MANY_ROWS = 2048


@triton.jit
def e4m3_values(code, HARDWARE: tl.constexpr):
    """fp32 of e4m3 codes."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    magnitude = (code & 0x7F).to(tl.int32)
    # Three fraction bits become 23, the exponent bias becomes 127. Codes below 8 count steps of 2^-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    bits = tl.where(magnitude == 0x7F, float("nan"), value).to(tl.int32, bitcast=True)
    # Negate by the sign bit: Triton subtracts from 0, which drops the sign of a zero.
    return (bits | ((code & 0x80).to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(amax):
    """The smallest power of two by which `amax` fits into e4m3, at least AMAX_FLOOR."""
    bits = tl.maximum(tl.div_rn(amax, E4M3_MAX), AMAX_FLOOR).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def encoded(x, factor, HARDWARE: tl.constexpr):
    """e4m3 of x * factor; NaN where x is not finite."""
    y = tl.minimum(tl.maximum(x * factor, -E4M3_MAX), E4M3_MAX)
    return e4m3_bits(tl.where(tl.abs(x) <= LARGEST, y, float("nan")), HARDWARE)


@triton.jit
def append_to_page(
    new, codes, scale_ptr, place, count, new_stride, slot_stride, PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write `count` rows from `new` on into slots `place` .. of one (page, head)."""
    cols, within = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    largest = 0.0
    for first in tl.range(0, count, ROWS):
        at = first + within
        inside = (at < count)[:, None] & (cols < DIM)[None, :]
        x = tl.load(new + at[:, None] * new_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        size = tl.abs(x)
        largest = tl.maximum(largest, tl.max(tl.where(size <= LARGEST, size, 0.0)))
    held = tl.load(scale_ptr)
    # The first row of a page resets its scale: the old contents belong to no sequence.
    held = tl.where(place == 0, AMAX_FLOOR, held)
    scale = tl.maximum(held, power_of_two(largest))
    tl.store(scale_ptr, scale)
    if (scale > held) & (place > 0):
        ratio = tl.div_rn(held, scale)
        for first in tl.range(0, PAGE_SIZE, ROWS):
            at = first + within
            old = (at < PAGE_SIZE) & ((at < place) | (at >= place + count))
            there = codes + at[:, None] * slot_stride + cols[None, :]
            inside = old[:, None] & (cols < DIM)[None, :]
            values = e4m3_values(tl.load(there, mask=inside, other=0), HARDWARE)
            tl.store(there, encoded(values, ratio, HARDWARE), mask=inside)
    inverse = tl.div_rn(1.0, scale)
    for first in tl.range(0, count, ROWS):
        at = first + within
        inside = (at < count)[:, None] & (cols < DIM)[None, :]
        x = tl.load(new + at[:, None] * new_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        there = codes + (place + at)[:, None] * slot_stride + cols[None, :]
        tl.store(there, encoded(x, inverse, HARDWARE), mask=inside)


@triton.jit
def append_kernel(
    k, v, k_pages, v_pages, k_scale, v_scale, slots, num_rows, num_heads,
    k_strides, v_strides, k_page_strides, v_page_strides,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr,
    ROWS: tl.constexpr, ROWS_SEEN: tl.constexpr, WINDOW: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Strides are of (row, head) and of (page, slot, head); scales are contiguous (pages, heads)."""
    head = tl.program_id(1).to(tl.int64)
    for n in tl.range(0, ROWS_SEEN):
        row = tl.program_id(0).to(tl.int64) * ROWS_SEEN + n
        slot = tl.load(slots + row, mask=row < num_rows, other=-1)
        before = tl.load(slots + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
        page = slot // PAGE_SIZE
        if (slot >= 0) & ((before < 0) | (before // PAGE_SIZE != page)):
            ahead = row + tl.arange(0, WINDOW)
            theirs = tl.load(slots + ahead, mask=ahead < num_rows, other=-1)
            count = tl.sum(((theirs >= 0) & (theirs // PAGE_SIZE == page)).to(tl.int32))
            place, scale_at = (slot % PAGE_SIZE).to(tl.int32), page * num_heads + head
            if tl.program_id(2) == 0:
                append_to_page(
                    k + row * k_strides[0] + head * k_strides[1],
                    k_pages + page * k_page_strides[0] + head * k_page_strides[2], k_scale + scale_at,
                    place, count, k_strides[0], k_page_strides[1], PAGE_SIZE, DIM, COLUMNS, ROWS, HARDWARE,
                )  # fmt: skip
            else:
                append_to_page(
                    v + row * v_strides[0] + head * v_strides[1],
                    v_pages + page * v_page_strides[0] + head * v_page_strides[2], v_scale + scale_at,
                    place, count, v_strides[0], v_page_strides[1], PAGE_SIZE, DIM_V, COLUMNS_V, ROWS, HARDWARE,
                )  # fmt: skip


NAMES = ("k", "v", "k_pages", "v_pages", "k_scale", "v_scale", "slots")
Views = tuple[RawView | None, ...]


def append_quantised(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, slots: Tensor
) -> None:
    """See tilewise.kv.quantised. The last dimension of every tensor is contiguous, scales are fully contiguous."""
    tensors = (k, v, k_pages, v_pages, k_scale, v_scale, slots)
    _run((*k.shape, v.shape[2], k_pages.shape[1]), tensors)


def _run(sizes: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
    _prepared(sizes, raw_views(tensors), tensors[0].device).run(tensors)


@functools.lru_cache(maxsize=512)
def _prepared(sizes: tuple[int, ...], views: Views, device: torch.device) -> Pass:
    spec = devices.of(device)
    index = -1 if device.type != "cuda" else device.index
    return Pass([append_call(sizes, views, hardware=spec.has_fp8)], NAMES, {}, spec, index)


def append_call(sizes: tuple[int, ...], views: Views, *, hardware: bool) -> KernelCall:
    """The kernel for (rows, num_heads, dim, dim_v, page_size); codes are moved as bytes."""
    rows, heads, dim, dim_v, page_size = sizes
    known = [view for view in views if view is not None]
    addresses = {
        name: Address(name, torch.uint8 if dtype.itemsize == 1 else dtype, aligned)
        for name, (_, dtype, aligned) in zip(NAMES, known, strict=True)
    }
    window = triton.next_power_of_2(page_size)
    held, seen, num_warps = (16, 16, 4) if rows > MANY_ROWS else (8, 1, 1)
    return KernelCall(
        append_kernel,
        (-(-rows // seen), heads, 2),
        addresses
        | {
            "num_rows": rows,
            "num_heads": heads,
            "k_strides": strides_of(views[0], 2),
            "v_strides": strides_of(views[1], 2),
            "k_page_strides": strides_of(views[2], 3),
            "v_page_strides": strides_of(views[3], 3),
            "PAGE_SIZE": page_size,
            "DIM": dim,
            "DIM_V": dim_v,
            "COLUMNS": triton.next_power_of_2(dim),
            "COLUMNS_V": triton.next_power_of_2(dim_v),
            "ROWS": min(held, window),
            "ROWS_SEEN": seen,
            "WINDOW": window,
            "HARDWARE": hardware,
        },
        num_warps=num_warps,
    )
