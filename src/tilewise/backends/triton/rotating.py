"""One kernel between a layer's projections and its attention: RMSNorm and rotation of q and k, k and v into pages.

    grid (blocks of rows, groups of heads)   groups of q, then of k, then of v. A program keeps the cosines and sines
                                             of its rows in registers and walks through the heads of its group

A head is held as its pairs, left and right, and the channels that are not rotated. In NeoX order left and right are
two contiguous parts; in GPT-J order they are loaded together and split in registers, so that both loads are vectors.

Where scales grow, a program of k or v does one head, and of it the pages whose first new row is among its rows (see
serving.py, which has the same for rows that need no rotation).

tilewise/kv/rotated.py has the definition.
"""

# Triton types the arguments, and constexprs are CAPS.
# mypy: disable-error-code="no-any-return, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import RawViews, described
from tilewise.backends.gpu.symbols import Address, KernelCall
from tilewise.backends.triton.quantising import LARGEST
from tilewise.backends.triton.serving import (
    append_to_page,
    encoded,
    int8_codes,
    int8_scales,
    raise_scale,
    row_top,
    strides_of,
)

# The order of the tensors: the fields of tilewise.kv.rotated_arguments.Step.
NAMES = (
    "q", "k", "v", "out", "k_pages", "v_pages", "slots", "positions", "cos_sin", "q_weight", "k_weight", "k_scale",
    "v_scale",
)  # fmt: skip
# From this number of rows on, programs take more rows and several heads. Fewer rows need many small programs.
MANY_ROWS = 1024
# Elements of a program's tile, and heads that it walks through: with many rows, and with few.
MANY, FEW = (2048, 4), (512, 1)


@triton.jit
def turns_of(
    table, positions, rows, inside, num_positions, table_stride, PAIRS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Cosines and sines of rows; NaN where the position is not in the table."""
    position = tl.load(positions + rows, mask=inside, other=0).to(tl.int64)
    cols = tl.arange(0, COLUMNS)
    known = (inside & (position >= 0) & (position < num_positions))[:, None] & (cols < PAIRS)[None, :]
    at = table + position[:, None] * table_stride + cols[None, :]
    cos = tl.load(at, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(at + PAIRS, mask=known, other=float("nan")).to(tl.float32)
    return cos, sin


@triton.jit
def load_pairs(at, inside, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels of each pair, in fp32, of rows that begin at pointers `at`."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * COLUMNS)
        ok = inside[:, None] & (cols < 2 * PAIRS)[None, :]
        both = tl.load(at[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        left, right = tl.split(tl.reshape(both, [at.shape[0], COLUMNS, 2]))
        return left, right
    else:
        cols = tl.arange(0, COLUMNS)
        ok = inside[:, None] & (cols < PAIRS)[None, :]
        left = tl.load(at[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        right = tl.load(at[:, None] + (PAIRS + cols)[None, :], mask=ok, other=0.0).to(tl.float32)
        return left, right


@triton.jit
def load_weights(weight, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The weights of both channels of each pair."""
    cols = tl.arange(0, COLUMNS)
    left = weight + (2 * cols if INTERLEAVED else cols)
    right = left + (1 if INTERLEAVED else PAIRS)
    ok = cols < PAIRS
    return tl.load(left, mask=ok, other=0.0).to(tl.float32), tl.load(right, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def load_head(
    at, inside, cos, sin, weight, eps, DIM: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows of one head, normalised and rotated: left and right of each pair, and the rest (left again if none)."""
    left, right = load_pairs(at, inside, PAIRS, COLUMNS, INTERLEAVED)
    rest = left
    if DIM > 2 * PAIRS:
        cols = 2 * PAIRS + tl.arange(0, REST)
        rest = tl.load(at[:, None] + cols[None, :], mask=inside[:, None] & (cols < DIM)[None, :], other=0.0)
        rest = rest.to(tl.float32)
    if NORM:
        total = tl.sum(left * left + right * right, axis=1)
        if DIM > 2 * PAIRS:
            total += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(total / DIM + eps)[:, None]
        left, right, rest = left * factor, right * factor, rest * factor
        if weight is not None:
            w_left, w_right = load_weights(weight, PAIRS, COLUMNS, INTERLEAVED)
            left, right = left * w_left[None, :], right * w_right[None, :]
            if DIM > 2 * PAIRS:
                rest *= tl.load(weight + cols, mask=cols < DIM, other=0.0).to(tl.float32)[None, :]
    return left * cos - right * sin, right * cos + left * sin, rest


@triton.jit
def converted(x, inverse, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """What is stored of x: e4m3 codes of x * inverse, int8 codes if rows have a factor each, or x rounded."""
    if inverse is None:
        return x.to(dtype)
    elif len(inverse.shape) == 2:
        return int8_codes(x, inverse)
    else:
        return encoded(x, inverse, HARDWARE)


@triton.jit
def head_top(left, right, rest, DIM: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr):
    """The largest magnitude in each row of what load_head returned, see row_top."""
    # Padded columns were turned by NaN.
    known = (tl.arange(0, COLUMNS) < PAIRS)[None, :]
    top = tl.maximum(row_top(left, known), row_top(right, known))
    if DIM > 2 * PAIRS:
        top = tl.maximum(top, row_top(rest, (2 * PAIRS + tl.arange(0, REST) < DIM)[None, :]))
    return top


@triton.jit
def store_head(
    at, inside, left, right, rest, inverse, DIM: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Store what load_head returned into rows that begin at pointers `at`."""
    dtype: tl.constexpr = at.dtype.element_ty
    if INTERLEAVED:
        cols = tl.arange(0, 2 * COLUMNS)
        both = tl.reshape(tl.join(left, right), [at.shape[0], 2 * COLUMNS])
        ok = inside[:, None] & (cols < 2 * PAIRS)[None, :]
        tl.store(at[:, None] + cols[None, :], converted(both, inverse, dtype, HARDWARE), mask=ok)
    else:
        cols = tl.arange(0, COLUMNS)
        ok = inside[:, None] & (cols < PAIRS)[None, :]
        tl.store(at[:, None] + cols[None, :], converted(left, inverse, dtype, HARDWARE), mask=ok)
        tl.store(at[:, None] + (PAIRS + cols)[None, :], converted(right, inverse, dtype, HARDWARE), mask=ok)
    if DIM > 2 * PAIRS:
        cols = 2 * PAIRS + tl.arange(0, REST)
        ok = inside[:, None] & (cols < DIM)[None, :]
        tl.store(at[:, None] + cols[None, :], converted(rest, inverse, dtype, HARDWARE), mask=ok)


@triton.jit
def finite_max(x):
    """The largest finite magnitude."""
    size = tl.abs(x)
    return tl.max(tl.where(size <= LARGEST, size, 0.0))


@triton.jit
def append_rotated_to_page(
    k, codes, scale_ptr, row, place, count, k_stride, slot_stride, table, positions, num_positions, table_stride,
    weight, eps, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write `count` rows of k from `row` on into slots `place` .. of one (page, head), whose scale grows. The rows are
    rotated twice, for their magnitude and for their codes.
    """
    within = tl.arange(0, ROWS)
    largest = 0.0
    for first in tl.range(0, count, ROWS):
        inside = first + within < count
        rows = row + first + within
        cos, sin = turns_of(table, positions, rows, inside, num_positions, table_stride, PAIRS, COLUMNS)
        left, right, rest = load_head(
            k + rows * k_stride, inside, cos, sin, weight, eps, DIM, PAIRS, COLUMNS, REST, NORM, INTERLEAVED
        )  # fmt: skip
        # Rows that are not inside, and padded columns, were loaded as 0 or NaN.
        largest = tl.maximum(largest, tl.maximum(finite_max(left), finite_max(right)))
        if DIM > 2 * PAIRS:
            largest = tl.maximum(largest, finite_max(rest))
    inverse = raise_scale(
        codes, scale_ptr, largest, place, count, slot_stride, PAGE_SIZE, DIM, WIDTH, ROWS, HARDWARE)  # fmt: skip
    for first in tl.range(0, count, ROWS):
        inside = first + within < count
        rows = row + first + within
        cos, sin = turns_of(table, positions, rows, inside, num_positions, table_stride, PAIRS, COLUMNS)
        left, right, rest = load_head(
            k + rows * k_stride, inside, cos, sin, weight, eps, DIM, PAIRS, COLUMNS, REST, NORM, INTERLEAVED
        )  # fmt: skip
        at = codes + (place + first + within) * slot_stride
        store_head(at, inside, left, right, rest, inverse, DIM, PAIRS, COLUMNS, REST, INTERLEAVED, HARDWARE)


@triton.jit
def rotate_kernel(
    q, k, v, out, k_pages, v_pages, slots, positions, cos_sin, q_weight, k_weight, k_scale, v_scale,
    num_rows, num_slots, num_heads, num_kv_heads, num_positions, eps,
    q_strides, k_strides, v_strides, out_strides, k_page_strides, v_page_strides, table_stride,
    k_scale_stride, v_scale_stride,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, PAGE_ROWS: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr, GROWING: tl.constexpr, INT8: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Strides are of (row, head), of (page, slot, head), and of a scale's head."""
    group = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    q_groups, kv_groups = tl.cdiv(num_heads, GROUP), tl.cdiv(num_kv_heads, GROUP)
    if group < q_groups:
        cos, sin = turns_of(cos_sin, positions, rows, inside, num_positions, table_stride, PAIRS, COLUMNS)
        for n in tl.range(0, min(GROUP, num_heads - group * GROUP)):
            head = group.to(tl.int64) * GROUP + n
            left, right, rest = load_head(
                q + head * q_strides[1] + rows * q_strides[0], inside, cos, sin, q_weight, eps,
                DIM, PAIRS, COLUMNS, REST, NORM, INTERLEAVED,
            )  # fmt: skip
            if IN_PLACE:
                # Several threads may hold one element: all of them read it before one of them writes it.
                tl.debug_barrier()
            store_head(
                out + head * out_strides[1] + rows * out_strides[0], inside, left, right, rest, None,
                DIM, PAIRS, COLUMNS, REST, INTERLEAVED, HARDWARE,
            )  # fmt: skip
        return
    group -= q_groups
    if GROWING:
        head = (group % num_kv_heads).to(tl.int64)
        for n in tl.range(0, ROWS):
            row = tl.program_id(0).to(tl.int64) * ROWS + n
            slot = tl.load(slots + row, mask=row < num_slots, other=-1)
            before = tl.load(slots + row - 1, mask=(row > 0) & (row < num_slots), other=-1)
            page = slot // PAGE_SIZE
            if (slot >= 0) & ((before < 0) | (before // PAGE_SIZE != page)):
                ahead = row + tl.arange(0, WINDOW)
                theirs = tl.load(slots + ahead, mask=ahead < num_slots, other=-1)
                count = tl.sum(((theirs >= 0) & (theirs // PAGE_SIZE == page)).to(tl.int32))
                place, scale_at = (slot % PAGE_SIZE).to(tl.int32), page * num_kv_heads + head
                if group < kv_groups:
                    append_rotated_to_page(
                        k + head * k_strides[1], k_pages + page * k_page_strides[0] + head * k_page_strides[2],
                        k_scale + scale_at, row, place, count, k_strides[0], k_page_strides[1],
                        cos_sin, positions, num_positions, table_stride, k_weight, eps,
                        PAGE_SIZE, DIM, WIDTH, PAIRS, COLUMNS, REST, PAGE_ROWS, NORM, INTERLEAVED, HARDWARE,
                    )  # fmt: skip
                else:
                    append_to_page(
                        v + row * v_strides[0] + head * v_strides[1],
                        v_pages + page * v_page_strides[0] + head * v_page_strides[2], v_scale + scale_at,
                        place, count, v_strides[0], v_page_strides[1], PAGE_SIZE, DIM_V, WIDTH_V, PAGE_ROWS, HARDWARE,
                    )  # fmt: skip
        return
    slot = tl.load(slots + rows, mask=rows < num_slots, other=-1)
    inside = slot >= 0
    page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
    if group < kv_groups:
        cos, sin = turns_of(cos_sin, positions, rows, inside, num_positions, table_stride, PAIRS, COLUMNS)
        target = k_pages + page * k_page_strides[0] + place * k_page_strides[1]
        for n in tl.range(0, min(GROUP, num_kv_heads - group * GROUP)):
            head = group.to(tl.int64) * GROUP + n
            left, right, rest = load_head(
                k + head * k_strides[1] + rows * k_strides[0], inside, cos, sin, k_weight, eps,
                DIM, PAIRS, COLUMNS, REST, NORM, INTERLEAVED,
            )  # fmt: skip
            inverse = None
            if INT8:
                scale, inverse = int8_scales(head_top(left, right, rest, DIM, PAIRS, COLUMNS, REST))
                tl.store(k_scale + (page * num_kv_heads + head) * PAGE_SIZE + place, scale, mask=inside)
            elif k_scale is not None:
                inverse = tl.div_rn(1.0, tl.load(k_scale + head * k_scale_stride))
            store_head(
                target + head * k_page_strides[2], inside, left, right, rest, inverse,
                DIM, PAIRS, COLUMNS, REST, INTERLEAVED, HARDWARE,
            )  # fmt: skip
        return
    group -= kv_groups
    target = v_pages + page * v_page_strides[0] + place * v_page_strides[1]
    cols = tl.arange(0, WIDTH_V)
    ok = inside[:, None] & (cols < DIM_V)[None, :]
    for n in tl.range(0, min(GROUP, num_kv_heads - group * GROUP)):
        head = group.to(tl.int64) * GROUP + n
        at = v + head * v_strides[1] + rows * v_strides[0]
        values = tl.load(at[:, None] + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        inverse = None
        if INT8:
            scale, inverse = int8_scales(row_top(values, ok))
            tl.store(v_scale + (page * num_kv_heads + head) * PAGE_SIZE + place, scale, mask=inside)
        elif v_scale is not None:
            inverse = tl.div_rn(1.0, tl.load(v_scale + head * v_scale_stride))
        there = target + head * v_page_strides[2]
        tl.store(there[:, None] + cols[None, :],
                 converted(values, inverse, v_pages.dtype.element_ty, HARDWARE), mask=ok)  # fmt: skip


class Job(NamedTuple):
    """A call without its tensors."""

    num_rows: int
    num_slots: int
    num_heads: int
    num_kv_heads: int
    num_positions: int
    page_size: int
    dim: int
    dim_v: int
    rotary_dim: int
    norm_eps: float | None
    interleaved: bool
    in_place: bool
    growing: bool
    int8: bool
    hardware: bool  # whether the device converts to e4m3


def bind_rotated(
    tensors: Sequence[Tensor | None], *, interleaved: bool, norm_eps: float | None, in_place: bool
) -> Callable[[Sequence[Tensor | None]], object]:
    """See tilewise.kv.rotated. The last dimension of every tensor is contiguous."""
    q, k, v, _, k_pages, _, slots, _, cos_sin, _, _, k_scale, _ = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert k_pages is not None
    assert slots is not None
    assert cos_sin is not None
    job = Job(
        len(q), len(slots), q.shape[1], k.shape[1], len(cos_sin), k_pages.shape[1], q.shape[2], v.shape[2],
        cos_sin.shape[1], norm_eps, interleaved, in_place, k_scale is not None and k_scale.dim() == 2,
        k_pages.dtype == torch.int8, devices.of(q.device).has_fp8,
    )  # fmt: skip
    return described(rotate_calls, NAMES, job, tensors).run


def rotate_calls(job: Job, views: RawViews) -> list[KernelCall]:
    """The kernel of a job; codes are moved as bytes."""
    named = dict(zip(NAMES, views, strict=True))
    addresses = {
        name: None if view is None else Address(name, torch.uint8 if view[1].itemsize == 1 else view[1], view[2])
        for name, view in named.items()
    }
    pairs, next_power = job.rotary_dim // 2, triton.next_power_of_2
    widest = max(next_power(job.dim), next_power(job.dim_v))
    is_large = job.num_rows > MANY_ROWS
    elements, group = MANY if is_large else FEW
    page_rows = max(1, min(2 * elements // widest, next_power(job.page_size), 16))
    rows = max(1, elements // widest)
    if job.growing:
        # A program does one page after another: with few rows, most of them in pages of their own, each has one.
        rows, group = rows if is_large else 1, 1
    table, k_scale, v_scale = named["cos_sin"], named["k_scale"], named["v_scale"]
    assert table is not None
    arguments = addresses | {
        "num_rows": job.num_rows,
        "num_slots": job.num_slots,
        "num_heads": job.num_heads,
        "num_kv_heads": job.num_kv_heads,
        "num_positions": job.num_positions,
        "eps": job.norm_eps or 0.0,
        "q_strides": strides_of(named["q"], 2),
        "k_strides": strides_of(named["k"], 2),
        "v_strides": strides_of(named["v"], 2),
        "out_strides": strides_of(named["out"], 2),
        "k_page_strides": strides_of(named["k_pages"], 3),
        "v_page_strides": strides_of(named["v_pages"], 3),
        "table_stride": strides_of(table, 1)[0],
        "k_scale_stride": 0 if k_scale is None else k_scale[0][0],
        "v_scale_stride": 0 if v_scale is None else v_scale[0][0],
        "PAGE_SIZE": job.page_size,
        "DIM": job.dim,
        "DIM_V": job.dim_v,
        "PAIRS": pairs,
        "COLUMNS": next_power(pairs),
        "REST": next_power(max(1, job.dim - job.rotary_dim)),
        "WIDTH": next_power(job.dim),
        "WIDTH_V": next_power(job.dim_v),
        "ROWS": rows,
        "GROUP": group,
        "WINDOW": next_power(job.page_size),
        "PAGE_ROWS": page_rows,
        "NORM": job.norm_eps is not None,
        "INTERLEAVED": job.interleaved,
        "IN_PLACE": job.in_place,
        "GROWING": job.growing,
        "INT8": job.int8,
        "HARDWARE": job.hardware,
    }
    groups = -(-job.num_heads // group) + 2 * -(-job.num_kv_heads // group)
    grid = (-(-job.num_rows // rows), groups, 1)
    return [KernelCall(rotate_kernel, grid, arguments, num_warps=4 if is_large else 1)]
