"""Launch plans of the forward: from canonical operands to kernel calls.

A plan (`ForwardPass`) holds tensor maps, sizes, grid and workspace: everything except addresses. It is made once per
problem and strides, and cached. Figures: bench/results/hopper-forward-choices.csv.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from tilewise import device as devices
from tilewise.backends.gpu.launching import (
    HEADS_FIRST,
    MAX_PASSES,
    Allocation,
    Pass,
    RawViews,
    View,
    Wish,
    named_views,
    pass_of,
    raw_views,
)
from tilewise.backends.gpu.listing import heads_per_wave, list_allocation, list_call, most_blocks, rows_together
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, Multiple, Tile
from tilewise.backends.gpu.tails import clear_tail_kernel
from tilewise.backends.hopper.again import ROWS, again_kernel
from tilewise.backends.hopper.configs import PANEL, ForwardConfig, forward_config, registers
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.forward_quad import forward_quad_kernel
from tilewise.backends.hopper.fp8_configs import Fp8Config
from tilewise.backends.hopper.layouts import smem_layout, tile_box
from tilewise.backends.hopper.schedule import Sizes
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = [
    "ForwardPass", "addressable", "bind_forward", "bind_pass", "clear_tail_call", "contiguous", "describe",
    "describe_flat", "forward_calls", "forward_pass", "index_address", "listing_call", "packed_rows", "page_rows",
    "prepared", "result_allocations", "rows_allocation", "run_forward", "run_pass", "shapes_of", "sizes_of",
    "unaddressable", "work_allocation",
]  # fmt: skip

GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
# TMA needs addresses and strides that are multiples of this.
TMA_BYTES = 16
# The extra dimensions of a packed descriptor (layouts.tile_at): every coordinate is in bounds, and 2^30 steps of 2^34
# elements are a multiple of 2^64 bytes, so they do not change the address.
PACKED_EXTENT, PACKED_ROWS, PACKED_STRIDE = 0x7FFF0000, 1 << 30, 1 << 34
# A wave of heads under a mask: their K and V fit into this much of the 50 MiB of L2, and there are at most so many.
L2_BYTES, MAX_WAVE_ITEMS = 48 << 20, 64
# Programs per SM that recompute overflowed rows. More would cost calls without overflow.
AGAIN_PROGRAMS = 2
# Programs that clear packed rows past the last sequence.
TAIL_PROGRAMS = 132


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    return run_pass(forward_pass, problem, operands)


def bind_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Binding."""
    return bind_pass(forward_pass, problem, operands, want_lse=want_lse)


@functools.lru_cache(maxsize=MAX_PASSES)
def forward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wish: Wish = HEADS_FIRST
) -> ForwardPass:
    """The launch plan of a problem with these strides, cached."""
    views, made = named_views(Operands._fields, raw), result_allocations(problem)
    copies = unaddressable(problem, views, ("q", "k", "v"))
    calls = [] if copies else forward_calls(problem, device, views | {name: a.view for name, a in made.items()})
    work = work_allocation(problem, forward_config(problem), problem.dtype.itemsize)
    return prepared(copies, problem, made | {"work": work}, calls, device, index, wish)


def unaddressable(problem: AttentionProblem, views: dict[str, View], names: Sequence[str]) -> list[str]:
    """The operands that must be copied: those that TMA cannot address, and a block table without contiguous rows."""
    shapes = shapes_of(problem)
    rows = {name: packed_rows(problem, name, views[name]) for name in names}
    found = [name for name in names if not addressable(rows[name], shapes[name], shared=True)]
    if "block_table" in views and views["block_table"].strides[1] != 1:
        found.append("block_table")
    return found


def work_allocation(problem: AttentionProblem, config: ForwardConfig | Fp8Config, itemsize: int) -> Allocation | None:
    """The workspace for the list of packed blocks; None for dense problems."""
    return list_allocation(sizes_of(problem, config, itemsize).num_blocks) if config.IS_VARLEN else None


def result_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The tensors that the forward allocates: out and lse."""
    out = rows_allocation(problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim_v)
    return {"out": out, "lse": Allocation.contiguous(problem.lse_shape, torch.float32)}


def shapes_of(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """The canonical shapes of q, k and v."""
    heads = {"q": problem.num_heads, "k": problem.num_kv_heads, "v": problem.num_kv_heads}
    widths = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    if problem.kind != "dense":
        totals = {"q": problem.total_q, "k": problem.total_k, "v": problem.total_k}
        return {name: (totals[name], heads[name], widths[name]) for name in heads}
    lengths = {"q": problem.seqlen_q, "k": problem.seqlen_k, "v": problem.seqlen_k}
    return {name: (problem.batch, heads[name], lengths[name], widths[name]) for name in heads}


def forward_calls(problem: AttentionProblem, device: DeviceSpec, views: dict[str, View]) -> list[KernelCall]:
    """All kernels in order: list the packed blocks, compute, recompute overflowed rows (AT_ONCE)."""
    config = forward_config(problem)
    sizes = sizes_of(problem, config, problem.dtype.itemsize)
    work = Address("work", torch.int32) if config.IS_VARLEN else None
    arguments = _descriptors(problem, config, views) | {
        "lse_ptr": Address("lse", torch.float32),
        "sinks_ptr": Address("sinks", views["sinks"].dtype, aligned=False) if "sinks" in views else None,
        "counter_ptr": Address("counter", torch.int32, aligned=False),
        "work_ptr": work,
        "block_table": index_address(views, "block_table"),
        "table_stride": views["block_table"].strides[0] if config.IS_PAGED else None,
        "k_page_rows": page_rows(problem, views["k"]) if config.IS_PAGED else None,
        "v_page_rows": page_rows(problem, views["v"]) if config.IS_PAGED else None,
        "scale_log2": (problem.scale if problem.softcap is None else problem.softcap) * LOG2E,
        "cap_scale": 0.0 if problem.softcap is None else problem.scale / problem.softcap,
        "sizes": sizes,
        "C": config,
    }
    ctas = config.CTAS_PER_SM
    call = KernelCall(
        forward_kernel if ctas == 1 else forward_quad_kernel,
        (min(ctas * device.num_sms, sizes.num_tiles), 1, 1),
        arguments,
        max_registers=None if ctas == 1 else registers(config.NUM_WARPGROUPS, ctas)[0],
    )
    listing = [] if work is None else [listing_call(problem, config, sizes, problem.dtype.itemsize)]
    return [*listing, call, *([_again_call(problem, config, sizes, device, views)] if config.AT_ONCE else [])]


def _again_call(
    problem: AttentionProblem, config: ForwardConfig, sizes: Sizes, device: DeviceSpec, views: dict[str, View]
) -> KernelCall:
    """Recompute the rows that the forward has marked in lse as overflowed."""
    names = ("q", "k", "v", "out")
    lse_rows = math.prod(problem.lse_shape)
    widths = (problem.head_dim, problem.head_dim_v)
    columns = [1 << (width - 1).bit_length() for width in widths]
    arguments = {
        **{f"{name}_ptr": Address(name, views[name].dtype) for name in names},
        "lse_ptr": Address("lse", torch.float32),
        "marks_ptr": Address("lse", torch.int32),
        "sinks_ptr": Address("sinks", views["sinks"].dtype, aligned=False) if "sinks" in views else None,
        "cu_seqlens_q": index_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": index_address(views, "cu_seqlens_k"),
        **{f"{name}_strides": _row_strides(problem, views[name]) for name in names},
        "widths": tuple(Multiple(width, 8) for width in widths),
        "batch": problem.batch,
        "num_rows": problem.lse_shape[-1],
        "lse_rows": lse_rows,
        "scale_log2": problem.scale * LOG2E,
        "sizes": sizes,
        "COLUMNS": columns[0],
        "COLUMNS_V": columns[1],
        "IS_VARLEN": config.IS_VARLEN,
        "HAS_LEFT": config.HAS_LEFT,
        "HAS_RIGHT": config.HAS_RIGHT,
    }
    programs = min(-(-lse_rows // int(ROWS)), AGAIN_PROGRAMS * device.num_sms)
    return KernelCall(again_kernel, (programs, 1, 1), arguments, num_stages=2, overlaps=True)


def _row_strides(problem: AttentionProblem, view: View) -> tuple[Multiple, ...]:
    """(batch, head, row) strides. All are multiples of 16 bytes, because TMA addresses the same rows."""
    batch, head, row = view.strides[:3] if problem.kind == "dense" else (0, view.strides[1], view.strides[0])
    step = ALIGNMENT // view.dtype.itemsize
    # The stride of a dimension of size 1 may be anything; it is multiplied by 0.
    return tuple(Multiple(stride // step * step, step, wide=True) for stride in (batch, head, row))


def listing_call(
    problem: AttentionProblem, config: ForwardConfig | Fp8Config, sizes: Sizes, itemsize: int
) -> KernelCall:
    """List the blocks of packed queries in the workspace "work"; clear the rows that belong to no sequence."""
    row_bytes, banded = _row_bytes(problem, itemsize), config.HAS_RIGHT or config.HAS_LEFT
    return list_call(
        problem,
        Address("work", torch.int32),
        64 * config.NUM_WARPGROUPS,
        together=rows_together(row_bytes, sizes.items_per_wave, banded=banded),
        cleared=("out", "lse", None, None),
    )


def sizes_of(problem: AttentionProblem, config: ForwardConfig | Fp8Config, itemsize: int) -> Sizes:
    """The sizes of a launch. For packed sequences, blocks and tiles are upper bounds of what the device lists.

    `itemsize`: bytes of an element of K and V.
    """
    sizes = _grid_sizes(problem, config, itemsize)
    if not config.IS_VARLEN:
        return sizes
    blocks = most_blocks(problem.total_q, 64 * config.NUM_WARPGROUPS, problem.batch)
    head_bytes = problem.seqlen_k * _row_bytes(problem, itemsize)
    wave = heads_per_wave(problem.num_heads, sizes.num_blocks, head_bytes)
    return sizes._replace(
        num_items=problem.num_heads,
        num_blocks=blocks,
        num_tiles=blocks * problem.num_heads,
        items_per_wave=wave,
    )


def _row_bytes(problem: AttentionProblem, itemsize: int) -> int:
    """Bytes of a row of K and a row of V together."""
    return (problem.head_dim + problem.head_dim_v) * itemsize


def _grid_sizes(problem: AttentionProblem, config: ForwardConfig | Fp8Config, itemsize: int) -> Sizes:
    """Sizes of a grid in which every sequence is as long as the longest."""
    num_blocks = -(-problem.seqlen_q // (64 * config.NUM_WARPGROUPS))
    num_items = problem.batch * problem.num_heads
    head_bytes = problem.seqlen_k * _row_bytes(problem, itemsize)
    banded = config.HAS_RIGHT or config.HAS_LEFT
    left, right = problem.band
    return Sizes(
        num_heads=problem.num_heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_blocks * num_items,
        items_per_wave=_wave_items(head_bytes, num_items) if banded else 1,
        row_tiles=0,
        window_left=(left or 0) if config.HAS_LEFT else 0,
        window_right=(right or 0) if config.HAS_RIGHT else 0,
    )


def _wave_items(head_bytes: int, num_items: int) -> int:
    """Heads of a wave: a power of two, because that mostly makes all waves equal.

    >>> _wave_items(16 << 20, 8), _wave_items(2 << 20, 64), _wave_items(1 << 30, 8)
    (2, 16, 1)
    """
    most = max(1, min(num_items, MAX_WAVE_ITEMS, L2_BYTES // max(head_bytes, 1)))
    return 1 << (most.bit_length() - 1)


def _descriptors(problem: AttentionProblem, config: ForwardConfig, views: dict[str, View]) -> dict[str, Any]:
    """Tensor maps of q, k, v and out for both column parts; None where there is no second part."""
    shapes = shapes_of(problem)
    shapes["out"] = (*shapes["q"][:-1], problem.head_dim_v)
    tiles = {
        "q": (64, config.D, config.D_REST),
        "k": (config.BLOCK_N, config.D, config.D_REST),
        "v": (config.BLOCK_N, config.DV, config.DV_REST),
        "out": (64, config.DV, config.DV_REST),
    }
    if config.IS_PAGED:
        tiles |= {"k": (config.CHUNK, PANEL, config.D_REST), "v": (config.CHUNK, PANEL, config.DV_REST)}
    found: dict[str, Any] = {}
    for name, (rows, columns, rest) in tiles.items():
        view = packed_rows(problem, name, views[name])
        found[f"{name}_desc"] = describe(name, view, shapes[name], rows, columns)
        found[f"{name}_rest"] = describe(name, view, shapes[name], rows, rest) if rest else None
    return found


def index_address(views: dict[str, View], name: str) -> Address | None:
    """The address of an int32 operand (sequence lengths, block table); None if the problem has none."""
    return Address(name, torch.int32, aligned=False) if name in views else None


def clear_tail_call(
    name: str, shape: tuple[int, int, int], problem: AttentionProblem, cu_seqlens: str, *, with_lse: bool
) -> KernelCall:
    """Zero the packed rows of tensor `name` past the last sequence and set their lse, because no tile covers them."""
    total, heads, width = shape
    arguments = {
        "rows_ptr": Address(name, problem.dtype, aligned=False),
        "lse_ptr": Address("lse", torch.float32, aligned=False) if with_lse else None,
        "cu_seqlens": Address(cu_seqlens, torch.int32, aligned=False),
        "batch": problem.batch,
        "total": total,
        "num_heads": heads,
        "row_width": heads * width,
    }
    return KernelCall(clear_tail_kernel, (TAIL_PROGRAMS, 1, 1), arguments)


class ForwardPass(NamedTuple):
    """A launch plan without addresses. If TMA cannot address some operands, `copies` names them, and there is none."""

    copies: tuple[str, ...]
    kernels: Pass | None


Prepare = Callable[[AttentionProblem, DeviceSpec, int, RawViews, Wish], ForwardPass]


def prepared(
    copies: Sequence[str],
    problem: AttentionProblem,
    made: Mapping[str, Allocation | None],
    calls: Sequence[KernelCall],
    device: DeviceSpec,
    index: int,
    wish: Wish,
    num_counters: int = 1,
) -> ForwardPass:
    """The plan of these calls. `made` are the results and the workspace; the calls' tile counter is "counter"."""
    if copies:
        return ForwardPass(tuple(copies), None)
    kernels = pass_of(
        problem.layout, calls, Operands._fields, made, device, index, wish, num_counters=num_counters
    )  # fmt: skip
    return ForwardPass((), kernels)


def run_pass(prepare: Prepare, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands; `prepare` caches its plans."""
    if operands.sinks is not None:
        operands = operands._replace(sinks=operands.sinks.contiguous())
    copies, kernels = _prepared_for(prepare, problem, operands, HEADS_FIRST)
    if kernels is None:
        operands = operands._replace(**{name: contiguous(getattr(operands, name)) for name in copies})
        _, kernels = _prepared_for(prepare, problem, operands, HEADS_FIRST)
    assert kernels is not None
    made = kernels.run(operands)
    return made["out"], made["lse"]


def bind_pass(prepare: Prepare, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """The plan for operands with these strides and alignment; None if some must be copied in every call."""
    if operands.sinks is not None and not operands.sinks.is_contiguous():
        return None
    return _prepared_for(prepare, problem, operands, Wish(in_layout=True, also=("lse",) if want_lse else ())).kernels


def _prepared_for(prepare: Prepare, problem: AttentionProblem, operands: Operands, wish: Wish) -> ForwardPass:
    q = operands.q
    return prepare(problem, devices.of(q.device), q.get_device(), raw_views(operands), wish)


def addressable(view: View, shape: tuple[int, ...], *, shared: bool = False) -> bool:
    """Whether TMA can address a tensor: its base and strides are multiples of 16 bytes. Others are copied.

    `shared`: strides of heads and sequences may be 0 (broadcast).
    """
    step, rows = TMA_BYTES // view.dtype.itemsize, 2 if len(shape) == 4 else 0
    sides = enumerate(zip(shape[:-1], view.strides, strict=False))
    return view.aligned and all(
        size == 1 or (stride % step == 0 and (stride > 0 or (shared and at != rows))) for at, (size, stride) in sides
    )


def packed_rows(problem: AttentionProblem, name: str, view: View) -> View:
    """The view of q, k or v. Pages become one view of all their rows, marked unaligned if a page does not start a
    whole number of rows after the one before.
    """
    if problem.page_size is None or name not in ("k", "v"):
        return view
    _, row, head, column = view.strides
    steps = page_rows(problem, view)
    whole = 0 < steps * (problem.total_k // problem.page_size) < PACKED_EXTENT
    return View((row, head, column), view.dtype, view.aligned and whole)


def page_rows(problem: AttentionProblem, view: View) -> int:
    """Rows from the start of a page to the start of the next; 0 if that is no whole number."""
    assert problem.page_size is not None
    page, row = view.strides[:2]
    if problem.total_k == problem.page_size:  # one page
        return problem.page_size
    return page // row if row > 0 and page % row == 0 else 0


def describe(name: str, view: View, shape: tuple[int, ...], rows: int, columns: int) -> Tile:
    """A tensor map for tiles of a (batch, head, row, column) tensor, or of packed (row, head, column) rows."""
    packed = len(shape) == 3
    strides = view.strides
    if packed:
        (_, heads, width), (row, head, _) = shape, strides
        shape = (PACKED_EXTENT, PACKED_EXTENT, heads, PACKED_ROWS, width)
        strides = (PACKED_STRIDE - row, row, head, row, 1)
    # The stride of a dimension of size 1 is never used, but the driver checks it.
    strides = (*(TMA_BYTES if n == 1 else s for n, s in zip(shape[:-1], strides, strict=False)), 1)
    box, layout = _box(rows, columns, packed, view.dtype)
    return Tile(Address(name, view.dtype), shape, strides, box, layout)


@functools.cache
def _box(rows: int, columns: int, packed: bool, dtype: torch.dtype) -> tuple[tuple[int, ...], Any]:
    box = tile_box(rows, columns, packed=packed)
    return tuple(box), smem_layout(box, GLUON_DTYPES[dtype])


def describe_flat(address: Address, shape: tuple[int, ...], box: list[int]) -> Tile:
    """A tensor map for blocks of contiguous workspace."""
    strides = tuple(Allocation.contiguous(shape, address.dtype).strides)
    return Tile(address, shape, strides, tuple(box), smem_layout(box, GLUON_DTYPES[address.dtype]))


def rows_allocation(problem: AttentionProblem, heads: int, seqlen: int, total: int, head_dim: int) -> Allocation:
    """A tensor of token rows: canonical shape, memory order of the problem's layout."""
    if problem.kind != "dense":
        return Allocation.contiguous((total, heads, head_dim), problem.dtype)
    if problem.layout == "bshd":
        shape = (problem.batch, heads, seqlen, head_dim)
        return Allocation(shape, (seqlen * heads * head_dim, head_dim, heads * head_dim, 1), problem.dtype)
    return Allocation.contiguous((problem.batch, heads, seqlen, head_dim), problem.dtype)


def contiguous(tensor: Tensor) -> Tensor:
    """A copy that TMA can address."""
    return tensor.clone(memory_format=torch.contiguous_format)
