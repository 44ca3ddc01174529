"""Small serving kernels: new rows of K and V into pages, and a shared prefix's result into each row's own.

Each is one launch without synchronisation, so a step can be captured in a CUDA graph.

append_kernel quantises new rows of K and V on their way into e4m3 pages, without sorting:

    grid (a few rows, heads, K or V)   where one of them is the first that goes to a page, its program does the whole
                                       (page, head); most programs of a prompt's rows end at once. Latents have no V

    amax of the page's new rows -> its scale, a power of two that never shrinks
    if it grew: what the page holds moves down by whole exponents
    the new rows                   e4m3(x / scale)

In one step a page belongs to one sequence, whose rows are consecutive, so no two programs write the same element.

append_int8_kernel does the same for int8 pages, where each row has its own scale. Grid (rows, heads, K or V).

tilewise/kv/quantised.py defines the bits, and tests compare with it.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-any-return, no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import QuantisedRows
from tilewise.backends.gpu.launching import Pass, RawView, RawViews, described
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, Multiple
from tilewise.backends.triton.quantising import AMAX_FLOOR, E4M3_MAX, LARGEST, e4m3_bits
from tilewise.numerics import LN2 as LN2_FLOAT
from tilewise.numerics import LOG2E as LOG2E_FLOAT

LOG2E = tl.constexpr(LOG2E_FLOAT)
LN2 = tl.constexpr(LN2_FLOAT)
NEG_INF = tl.constexpr(float("-inf"))
INT8_MAX = tl.constexpr(127.0)
# 1.5 * 2^23: adding and subtracting it rounds to the nearest integer.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)
# Elements of a row that a program moves at once: 16 bytes per thread of four warps in bf16.
MOST_ELEMENTS = 1024
# From this size on, a batch is mostly prompts, whose rows share pages. A program then scans more rows with more threads
# and holds more of them at a time, because starting and ending a program per row would dominate.
MANY_ROWS = 2048


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
def raise_scale(
    codes, scale_ptr, largest, place, count, slot_stride, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Raise the scale of one (page, head) for `count` new rows from slot `place` on, of magnitudes up to `largest`, and
    rescale the other rows. Returns 1 / scale.
    """
    cols, within = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    held = tl.load(scale_ptr)
    # The first row of a page resets its scale: the old contents belong to no sequence.
    held = tl.where(place == 0, AMAX_FLOOR, held)
    scale = tl.maximum(held, power_of_two(largest))
    # Every warp has read the old scale before one of them writes the new one.
    tl.debug_barrier()
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
    return tl.div_rn(1.0, scale)


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
    inverse = raise_scale(
        codes, scale_ptr, largest, place, count, slot_stride, PAGE_SIZE, DIM, COLUMNS, ROWS, HARDWARE)  # fmt: skip
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
            elif v is not None:
                append_to_page(
                    v + row * v_strides[0] + head * v_strides[1],
                    v_pages + page * v_page_strides[0] + head * v_page_strides[2], v_scale + scale_at,
                    place, count, v_strides[0], v_page_strides[1], PAGE_SIZE, DIM_V, COLUMNS_V, ROWS, HARDWARE,
                )  # fmt: skip


@triton.jit
def row_top(x, inside):
    """The largest magnitude of each row, +inf if a number is not finite. Columns that are not `inside` are ignored."""
    size = tl.where(inside, tl.abs(x), 0.0)
    return tl.max(tl.where(size <= LARGEST, size, float("inf")), 1)


@triton.jit
def int8_scales(top):
    """(scales of rows, factors before rounding (rows, 1)), see tilewise.fp8.rounding.encode_rows; (NaN, 0) for +inf."""
    amax = tl.maximum(tl.where(top <= LARGEST, top, 0.0), AMAX_FLOOR)
    scale = tl.where(top <= LARGEST, tl.div_rn(amax, INT8_MAX), float("nan"))
    return scale, tl.where(top <= LARGEST, tl.div_rn(INT8_MAX, amax), 0.0)[:, None]


@triton.jit
def int8_codes(x, factor):
    """Bytes of round(x * factor); 0 for a factor of 0, whatever x is."""
    y = tl.where(factor > 0.0, x * factor, 0.0)
    return ((y + ROUND_TO_INTEGER) - ROUND_TO_INTEGER).to(tl.int32).to(tl.uint8)


@triton.jit
def append_int8_rows(
    new, pages, scales, rows, slot, head, new_strides, page_strides, scale_strides, PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows of one head of K or V into their slots; negative slots are skipped."""
    cols = tl.arange(0, COLUMNS)
    inside = (slot >= 0)[:, None] & (cols < DIM)[None, :]
    source = new + head * new_strides[1] + rows * new_strides[0]
    x = tl.load(source[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, factor = int8_scales(row_top(x, inside))
    page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
    target = pages + head * page_strides[2] + page * page_strides[0] + place * page_strides[1]
    tl.store(target[:, None] + cols[None, :], int8_codes(x, factor), mask=inside)
    own = scales + page * scale_strides[0] + head * scale_strides[1] + place * scale_strides[2]
    tl.store(own, scale, mask=slot >= 0)


@triton.jit
def append_int8_kernel(
    k, v, k_pages, v_pages, k_scale, v_scale, slots, num_rows,
    k_strides, v_strides, k_page_strides, v_page_strides, k_scale_strides, v_scale_strides,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Strides are of (row, head), of (page, slot, head) and, of scales, of (page, head, slot)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
    if tl.program_id(2) == 0:
        append_int8_rows(k, k_pages, k_scale, rows, slot, head, k_strides, k_page_strides, k_scale_strides,
                         PAGE_SIZE, DIM, COLUMNS)  # fmt: skip
    else:
        append_int8_rows(v, v_pages, v_scale, rows, slot, head, v_strides, v_page_strides, v_scale_strides,
                         PAGE_SIZE, DIM_V, COLUMNS_V)  # fmt: skip


WRITTEN = ("k", "v", "k_pages", "v_pages", "slots")
SCALE_STRIDES = ("k_scale_strides", "v_scale_strides")
APPENDED = QuantisedRows._fields
MERGED = ("out", "lse", "part", "part_lse", "rows")


def write_rows(*tensors: Tensor) -> None:
    """See tilewise.kv.writing. The last dimension of every tensor is contiguous."""
    bind_write(*tensors).run(tensors)


def bind_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Pass:
    """The pass of `write_rows` for tensors like these."""
    sizes = (*k.shape, v.shape[2], k_pages.shape[1])
    return described(write_calls, WRITTEN, sizes, (k, v, k_pages, v_pages, slots))


def append_quantised(rows: QuantisedRows) -> None:
    """See tilewise.kv.quantised. The last dimension of every tensor is contiguous; so are scales of e4m3 as a whole."""
    k, v, k_pages, *_ = rows
    sizes = (*k.shape, 0 if v is None else v.shape[2], k_pages.shape[1], devices.of(k.device).has_fp8)
    describe = append_int8_calls if k_pages.dtype == torch.int8 else append_calls
    described(describe, APPENDED, sizes, rows).run(rows)


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """Merge rows of a partial result over other keys into `out` (total, heads, dim) and `lse` (heads, total)."""
    tensors = (out, lse, part, part_lse, rows)
    described(merge_calls, MERGED, tuple(part.shape), tensors).run(tensors)


def write_calls(sizes: tuple[int, ...], views: RawViews) -> list[KernelCall]:
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
    return [KernelCall(write_rows_kernel, (rows, 1, 1), arguments)]


def merge_calls(sizes: tuple[int, ...], views: RawViews) -> list[KernelCall]:
    """The kernel that merges (rows, num_heads, dim) of a partial result into another; both `out` are contiguous."""
    rows, heads, dim = sizes
    arguments = dict(zip(MERGED, map(_address, MERGED, views), strict=True)) | {
        "num_heads": heads,
        "lse_stride": _stride(views[1]),
        "part_lse_stride": _stride(views[3]),
        "DIM": dim,
        "BLOCK": triton.next_power_of_2(dim),
    }
    return [KernelCall(merge_rows_kernel, (rows * heads, 1, 1), arguments, num_warps=1)]


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


def append_calls(sizes: tuple[int, ...], views: RawViews) -> list[KernelCall]:
    """The kernel for (rows, num_heads, dim, dim_v, page_size, whether the device has FP8); codes are moved as bytes.
    Latents have no v, and a dim_v of 0.
    """
    rows, heads, _, _, page_size, hardware = sizes
    window = triton.next_power_of_2(page_size)
    held, seen, num_warps, most = (16, 16, 4, 8192) if rows > MANY_ROWS else (8, 1, 1, 4096)
    arguments = _append_arguments(sizes, views)
    widest = max(arguments["COLUMNS"], arguments["COLUMNS_V"])
    arguments |= {
        "ROWS": min(held, window, most // widest),
        "ROWS_SEEN": seen,
        "WINDOW": window,
        "HARDWARE": bool(hardware),
    }
    return [KernelCall(append_kernel, (-(-rows // seen), heads, 1 if views[1] is None else 2), arguments, num_warps)]


def append_int8_calls(sizes: tuple[int, ...], views: RawViews) -> list[KernelCall]:
    """The kernel for int8 pages, of the sizes of append_calls."""
    rows, heads, *_ = sizes
    held, num_warps = (16, 4) if rows > MANY_ROWS else (1, 1)
    arguments = _append_arguments(sizes, views) | {"ROWS": held}
    arguments |= {name: strides_of(view, 3) for name, view in zip(SCALE_STRIDES, views[4:6], strict=True)}
    # Not fused, so that the bits are those of tilewise.fp8.rounding.
    return [KernelCall(append_int8_kernel, (-(-rows // held), heads, 2), arguments, num_warps, fused=False)]


def _append_arguments(sizes: tuple[int, ...], views: RawViews) -> dict[str, Any]:
    rows, heads, dim, dim_v, page_size, _ = sizes
    addresses = {
        name: None if view is None else Address(name, torch.uint8 if view[1].itemsize == 1 else view[1], view[2])
        for name, view in zip(APPENDED, views, strict=True)
    }
    return addresses | {
        "num_rows": rows,
        "num_heads": heads,
        "k_strides": strides_of(views[0], 2),
        "v_strides": strides_of(views[1] or views[0], 2),
        "k_page_strides": strides_of(views[2], 3),
        "v_page_strides": strides_of(views[3] or views[2], 3),
        "PAGE_SIZE": page_size,
        "DIM": dim,
        "DIM_V": dim_v,
        "COLUMNS": triton.next_power_of_2(dim),
        "COLUMNS_V": triton.next_power_of_2(max(1, dim_v)),
    }
