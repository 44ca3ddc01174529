"""From canonical operands to kernel calls: the launch plans of the forward, FP8 forward, decoding and backward.

A plan is a `Pass`: tensor maps, sizes, grids and workspace, everything except addresses. The `*_pass` functions make
it once per problem and strides, and cache it. Figures: bench/results/hopper-forward-choices.csv and
hopper-backward-choices.csv.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from tilewise import device as devices
from tilewise.backends.gpu import launching, tile_lists
from tilewise.backends.gpu.arguments import (
    lengths_of,
    paging_of,
    result_allocations,
    scales_of,
    single_address,
    window_of,
)
from tilewise.backends.gpu.launching import BACKWARD_GIVEN, Allocation, Pass, RawViews, View, named_views
from tilewise.backends.gpu.offline import operand_views
from tilewise.backends.gpu.records import Paging, Rows, Strides
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple, Tile
from tilewise.backends.gpu.work_list import (
    clear_tail_kernel,
    heads_per_wave,
    list_allocation,
    list_call,
    most_blocks,
    rows_together,
)
from tilewise.backends.hopper import FEW_LATENT_ROWS, backward_rows, computes_gradients, decodes, reads_latents
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_pieces import JOINED_ROWS, Line, backward_pieces_kernel, join_pieces_kernel
from tilewise.backends.hopper.backward_plan import QUERY_BLOCK, BackwardPlan, backward_plan
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.configs import PANEL, BackwardConfig, ForwardConfig, dq_blocks, forward_config, registers
from tilewise.backends.hopper.decode import decode_kernel
from tilewise.backends.hopper.decode_configs import (
    LATENT_EARLY,
    DecodeConfig,
    LatentConfig,
    decode_config,
    latent_config,
    latent_grid,
    latent_merge_grid,
    num_programs,
    tokens_of,
)
from tilewise.backends.hopper.decode_schedule import DecodeSizes
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.forward_quad import forward_quad_kernel
from tilewise.backends.hopper.forward_wide import forward_wide_kernel
from tilewise.backends.hopper.fp8_configs import Fp8Config, Fp8Tile, fp8_config
from tilewise.backends.hopper.fp8_forward import fp8_forward_kernel, transpose_values_kernel
from tilewise.backends.hopper.latent import latent_kernel, merge_latent_kernel
from tilewise.backends.hopper.layouts import smem_layout, tile_box
from tilewise.backends.hopper.listed import Lists
from tilewise.backends.hopper.preparing import Ahead
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.backends.hopper.schedule import Sizes
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.symbolic import largest, smallest
from tilewise.tiles import sections

GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}
# The tile counter of a persistent kernel, or the arrival counters of decoding.
COUNTER = Address("counter", torch.int32, aligned=False)
LISTS = BACKWARD_GIVEN.index("tile_lists")
# TMA needs addresses and strides that are multiples of this.
TMA_BYTES = 16
# The extra dimensions of a packed descriptor (layouts.tile_at): every coordinate is in bounds, and 2^30 steps of 2^34
# elements are a multiple of 2^64 bytes, so they do not change the address.
PACKED_EXTENT, PACKED_ROWS, PACKED_STRIDE = 0x7FFF0000, 1 << 30, 1 << 34
# A wave of heads under a mask: their K and V fit into this much of the 50 MiB of L2, and there are at most so many.
L2_BYTES, MAX_WAVE_ITEMS = 48 << 20, 64
# Programs that clear packed rows past the last sequence.
TAIL_PROGRAMS = 132
# Contiguous bytes of a row in a swizzled tile: the width of the boxes that decoding fetches from a page.
PANEL_BYTES = 128
# Bytes that the transposition of V in the FP8 forward moves at a time.
E4M3, FP8_WORD = torch.float8_e4m3fn, 4
# The kernels of backward_rows take strides in units of 16 bytes, 8 elements.
STRIDE_UNIT = 8
# Keys that a program of bound_keys_kernel reads at a time: fastest for short sequences, where its time weighs most.
BOUND_BLOCK_N = 16


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    operands = tile_lists.with_lists(problem, operands)
    made = _bound_forward(problem, operands, True).run(operands)
    out = launching.heads_first(problem, made["out"]) if operands.out is None else operands.out
    return out, made["lse"]


def writes_into(problem: AttentionProblem, out: Tensor) -> bool:
    """Whether the kernels write straight into a given `out`: decoding by pointers, the others by TMA."""
    if not launching.are_adjacent(problem, out):
        return False
    view = View(out.stride(), out.dtype, out.data_ptr() % TMA_BYTES == 0)
    return decodes(problem) or reads_latents(problem) or addressable(view, tuple(out.shape))


def bind_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Backend."""
    if tile_lists.are_missing(problem, operands.tile_lists):
        return None
    return _bound_forward(problem, operands, want_lse)


def _bound_forward(problem: AttentionProblem, operands: Operands, want_lse: bool) -> Pass:
    prepare = decode_pass if decodes(problem) else fp8_pass if problem.fp8 else forward_pass
    if reads_latents(problem):
        prepare = latent_pass
    return launching.bound_to(prepare, problem, operands, operands.q, want_lse)


def run_backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The wanted gradients of canonical operands."""
    operands = tile_lists.with_lists(problem, operands)
    given = (dout, dlse, out, lse, *operands[: len(launching.INPUTS)])
    made = _bound_backward(problem, given, operands.q, wanted).run(given)
    dq, dk, dv = (launching.heads_first(problem, made[name]) if name in made else None for name in ("dq", "dk", "dv"))
    dsinks = None
    if wanted.dsinks and operands.sinks is not None:
        plan = backward_plan(problem, devices.of(operands.q.device))
        dsinks = _sink_gradient(plan, operands.sinks, made["workspace"])
    return Gradients(dq, dk if wanted.dk else None, dv if wanted.dv else None, None, dsinks)


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> Pass | None:
    """See Backend; `given` in the order of BACKWARD_GIVEN."""
    if tile_lists.are_missing(problem, given[LISTS]):
        return None
    return _bound_backward(problem, given, q, wanted)


def _bound_backward(problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted) -> Pass:
    """With `wanted.dsinks` the pass makes the workspace too, from which `run_backward` computes that gradient."""
    return launching.bound_to(backward_pass, problem, given, q, wanted.dq, wanted.dsinks)


def forward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_lse: bool = True
) -> Pass:
    """The launch plan of a forward with these strides."""
    views, copied = _addressed(problem, raw, ("q", "k", "v"))
    made = _unless_given(result_allocations(problem), views)
    work = work_allocation(problem, forward_config(problem), problem.dtype.itemsize)
    calls = forward_calls(problem, device, views | _views(made))
    return _pass(problem, calls, made | {"work": work}, device, index, want_lse, copied)


def fp8_pass(
    problem: AttentionProblem,
    device: DeviceSpec,
    index: int,
    raw: RawViews,
    want_lse: bool = True,
    tile: Fp8Tile | None = None,
) -> Pass:
    """The launch plan of a forward in e4m3 with these strides; `tile` replaces the table's choice."""
    views, copied = _addressed(problem, raw, ("q", "k", "v"))
    made = _unless_given(fp8_allocations(problem), views)
    work = work_allocation(problem, fp8_config(problem, tile), itemsize=1)
    calls = fp8_calls(problem, device, views | _views(made), tile)
    return _pass(problem, calls, made | {"work": work}, device, index, want_lse, copied)


def decode_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_lse: bool = True
) -> Pass:
    """The launch plan of decoding with these strides."""
    views, copied = _addressed(problem, raw, ("k", "v"))
    made = _unless_given(result_allocations(problem), views)
    config = decode_config(problem, packed_queries="cu_seqlens_q" in views)
    programs = num_programs(problem, config, device)
    parts = sum(part_sizes(config, programs))
    calls = decode_calls(problem, config, programs, views | _views(made))
    room = made | {"workspace": Allocation.contiguous((parts,), torch.float32)}
    return _pass(problem, calls, room, device, index, want_lse, copied, problem.batch * problem.num_kv_heads)


def latent_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_lse: bool = True
) -> Pass:
    """The launch plan of reading latents with these strides."""
    views, copied = _addressed(problem, raw, ("k",))
    made = _unless_given(result_allocations(problem), views)
    words = sum(latent_sizes(problem, *latent_reader(problem, device, packed_queries="cu_seqlens_q" in views)))
    calls = latent_calls(problem, device, views | _views(made))
    room = made | {"workspace": Allocation.contiguous((words,), torch.float32)}
    return _pass(problem, calls, room, device, index, want_lse, copied)


def backward_pass(
    problem: AttentionProblem,
    device: DeviceSpec,
    index: int,
    raw: RawViews,
    want_dq: bool,
    want_workspace: bool = False,
) -> Pass:
    """The launch plan of a backward with these strides."""
    views, shapes = named_views(BACKWARD_GIVEN, raw), shapes_of(problem)
    shapes["out"] = shapes["dout"] = (*shapes["q"][:-1], problem.head_dim_v)
    copied = {name: problem.dtype for name, shape in shapes.items() if not addressable(views[name], shape)}
    views |= {name: Allocation.contiguous(shapes[name], problem.dtype).view for name in copied}
    rows = Allocation.contiguous(problem.lse_shape, torch.float32)
    for name in ("lse", "dlse"):
        if name in views and not _is_plain(views[name], rows):
            copied[name] = torch.float32
    made = gradient_allocations(problem)
    if not want_dq:
        del made["dq"]
    plan = backward_plan(problem, device)
    calls = list(backward_calls(plan, views | _views(made)))
    read = (*made, *(["workspace"] if want_workspace else []))
    room = launching.in_layout(problem, made) | {"workspace": plan.workspace}
    return Pass(calls, BACKWARD_GIVEN, room, device, index, read=read, copied=copied, num_counters=1)


def _pass(
    problem: AttentionProblem,
    calls: Sequence[KernelCall],
    made: Mapping[str, Allocation | None],
    device: DeviceSpec,
    index: int,
    want_lse: bool,
    copied: Mapping[str, torch.dtype],
    num_counters: int = 1,
) -> Pass:
    read, made = ("out", "lse") if want_lse else ("out",), launching.in_layout(problem, made)
    fields = Operands._fields
    return Pass(calls, fields, made, device, index, read=read, copied=copied, num_counters=num_counters)


def _unless_given(made: dict[str, Allocation], views: Mapping[str, View]) -> dict[str, Allocation]:
    """Without an `out` that the caller gives."""
    return {name: allocation for name, allocation in made.items() if name != "out" or name not in views}


def _views(made: Mapping[str, Allocation]) -> dict[str, View]:
    return {name: allocation.view for name, allocation in made.items()}


def _is_plain(view: View, like: Allocation) -> bool:
    """Whether a tensor lies contiguously in fp32."""
    sides = zip(like.shape, view.strides, like.strides, strict=True)
    return view.dtype == torch.float32 and all(size == 1 or stride == wanted for size, stride, wanted in sides)


def _addressed(
    problem: AttentionProblem, raw: RawViews, names: Sequence[str]
) -> tuple[dict[str, View], dict[str, torch.dtype]]:
    """The views of the operands, and which are copied first because TMA cannot address them (those in `names`), or
    because the kernels assume adjacent elements (rows of the block table, sinks).
    """
    views, shapes = named_views(Operands._fields, raw), shapes_of(problem)
    rows = {name: packed_rows(problem, name, views[name]) for name in names}
    copied = [name for name in names if not addressable(rows[name], shapes[name], shared=True)]
    copied += [name for name in ("block_table", "sinks") if name in views and views[name].strides[-1] != 1]
    if copied:
        whole = operand_views(problem, packed_queries="cu_seqlens_q" in views)
        views |= {name: whole[name]._replace(dtype=views[name].dtype) for name in copied}
    return views, {name: views[name].dtype for name in copied}


def calls_of(problem: AttentionProblem, device: DeviceSpec, config: BackwardConfig | None = None) -> list[KernelCall]:
    """The kernel calls of a problem with contiguous operands, for compiling ahead of time: forward, and backward if the
    problem needs gradients. `config` replaces the backward's configuration.
    """
    decoding, latents = decodes(problem), reads_latents(problem)
    views = operand_views(problem, packed_queries=problem.seqlen_q > 1 or not (decoding or latents))
    views |= _views(result_allocations(problem))
    if latents:
        return latent_calls(problem, device, views)
    if decoding:
        config_of_decoding = decode_config(problem, packed_queries="cu_seqlens_q" in views)
        return decode_calls(problem, config_of_decoding, num_programs(problem, config_of_decoding, device), views)
    if problem.fp8:
        return fp8_calls(problem, device, views | _views(fp8_allocations(problem)))
    calls = forward_calls(problem, device, views)
    if problem.needs_grad and computes_gradients(problem):
        views |= {"dout": views["out"]} | _views(gradient_allocations(problem))
        plan = backward_plan(problem, device)
        calls += backward_calls(plan if config is None else plan._replace(config=config), views)
    return calls


def work_allocation(problem: AttentionProblem, config: ForwardConfig | Fp8Config, itemsize: int) -> Allocation | None:
    """The workspace for the list of packed blocks; None for dense problems."""
    return list_allocation(sizes_of(problem, config, itemsize).num_blocks) if config.IS_VARLEN else None


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
    """All kernels in order: list the packed blocks, compute."""
    config = forward_config(problem)
    sizes = sizes_of(problem, config, problem.dtype.itemsize)
    work = Address("work", torch.int32) if config.IS_VARLEN else None
    arguments = _descriptors(problem, config, views) | {
        "lse_ptr": Address("lse", torch.float32),
        "sinks_ptr": single_address(views, "sinks"),
        "max_ptr": single_address(views, "max_logits"),
        "counter_ptr": COUNTER,
        "work_ptr": work,
        "paging": _paging(problem, views, "k", "v"),
        "lists": None if problem.tiles_shape is None else _lists(problem.tiles_shape),
        "scale_log2": (problem.scale if problem.softcap is None else problem.softcap) * LOG2E,
        "cap_scale": 0.0 if problem.softcap is None else problem.scale / problem.softcap,
        "sizes": sizes,
        "C": config,
    }
    ctas = config.CTAS_PER_SM
    kernel = forward_wide_kernel if config.SHARES_ROWS else forward_kernel if ctas == 1 else forward_quad_kernel
    call = KernelCall(
        kernel,
        (min(ctas * device.num_sms, sizes.num_tiles), 1, 1),
        arguments,
        max_registers=None if ctas == 1 else registers(config.NUM_WARPGROUPS, ctas)[0],
    )
    listing = [] if work is None else [listing_call(problem, config, sizes, problem.dtype.itemsize)]
    return [*listing, call]


def _lists(shape: tuple[int, int, int, int], *, of_keys: bool = False) -> Lists:
    """The lists of a tile mask with a map of this shape: of rows of tiles, or of columns."""
    parts, (batch, heads, _, _) = sections(shape), shape
    first, head, each = parts.groups, parts.groups_head, parts.groups_row
    if of_keys:
        first, head, each = parts.column_groups, parts.column_groups_head, parts.column_groups_column
    bits = Address("tile_bits", torch.int32, aligned=False)
    groups = Address("tile_lists", torch.int32, aligned=False, offset=4 * first)
    return Lists(groups, bits, heads * head if batch > 1 else 0, head if heads > 1 else 0, each)


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
        num_items=problem.num_heads, num_blocks=blocks, num_tiles=blocks * problem.num_heads, items_per_wave=wave
    )


def _row_bytes(problem: AttentionProblem, itemsize: int) -> int:
    """Bytes of a row of K and a row of V together."""
    return (problem.head_dim + problem.head_dim_v) * itemsize


def _grid_sizes(problem: AttentionProblem, config: ForwardConfig | Fp8Config, itemsize: int) -> Sizes:
    """Sizes of a grid in which every sequence is as long as the longest."""
    num_blocks = -(-problem.seqlen_q // (64 * config.NUM_WARPGROUPS))
    num_items = problem.batch * problem.num_heads
    head_bytes = problem.seqlen_k * _row_bytes(problem, itemsize)
    uneven = config.HAS_RIGHT or config.HAS_LEFT or problem.tiles_shape is not None
    return Sizes(
        num_heads=problem.num_heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_blocks * num_items,
        items_per_wave=_wave_items(head_bytes, num_items) if uneven else 1,
        row_tiles=0,
        window=window_of(problem),
    )


def _wave_items(head_bytes: int, num_items: int) -> int:
    """Heads of a wave: a power of two, because that mostly makes all waves equal.

    >>> _wave_items(16 << 20, 8), _wave_items(2 << 20, 64), _wave_items(1 << 30, 8)
    (2, 16, 1)
    """
    most = largest(1, smallest(num_items, MAX_WAVE_ITEMS, L2_BYTES // largest(head_bytes, 1)))
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
        tiles |= {name: (config.CHUNK, PANEL, min(tiles[name][2], PANEL)) for name in ("k", "v")}
    found: dict[str, Any] = {}
    for name, (rows, columns, rest) in tiles.items():
        view = packed_rows(problem, name, views[name])
        found[f"{name}_desc"] = describe(name, view, shapes[name], rows, columns)
        found[f"{name}_rest"] = describe(name, view, shapes[name], rows, rest) if rest else None
    return found


def _paging(problem: AttentionProblem, views: dict[str, View], *names: str) -> Paging:
    """The pages of sequences, with the rows of those of `names` (k, v) that are read."""
    if problem.kind != "paged":
        return paging_of(views)
    return paging_of(views, *(page_rows(problem, views[name]) for name in names))


def _clear_tail_call(problem: AttentionProblem) -> KernelCall:
    """Zero the packed rows of out past the last sequence and set their lse, because no tile covers them."""
    arguments = {
        "rows_ptr": Address("out", problem.dtype, aligned=False),
        "lse_ptr": Address("lse", torch.float32, aligned=False),
        "cu_seqlens": Address("cu_seqlens_q", torch.int32, aligned=False),
        "batch": problem.batch,
        "total": problem.total_q,
        "num_heads": problem.num_heads,
        "row_width": problem.num_heads * problem.head_dim_v,
    }
    return KernelCall(clear_tail_kernel, (TAIL_PROGRAMS, 1, 1), arguments)


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


def part_sizes(config: DecodeConfig, programs: int) -> tuple[int, int]:
    """fp32 words of the workspace for O, and for maxima and sums: two parts a program."""
    parts = 2 * programs * config.LANES
    return parts * config.ROWS * config.DV, parts * 2 * config.ROWS


def decode_calls(
    problem: AttentionProblem, config: DecodeConfig, programs: int, views: dict[str, View]
) -> list[KernelCall]:
    """All kernels in order: clear packed rows past the last sequence, then decode; `programs` CTAs share the work."""
    call = KernelCall(decode_kernel, (programs, 1, 1), decode_arguments(problem, config, programs, views))
    return [_clear_tail_call(problem), call] if config.PACKED_Q else [call]


def decode_arguments(
    problem: AttentionProblem, config: DecodeConfig, programs: int, views: dict[str, View]
) -> dict[str, Any]:
    """The arguments of the decode kernel; `programs` CTAs share the work."""
    return {
        **_key_tiles(problem, config, views),
        **_reader_arguments(problem, config, views, part_sizes(config, programs)[0], programs * config.LANES),
        "counters_ptr": COUNTER,
        "paging": _paging(problem, views, "k", "v"),
        "scales": scales_of(problem, views),
    }


def _reader_arguments(
    problem: AttentionProblem,
    config: DecodeConfig | LatentConfig,
    views: dict[str, View],
    output_words: int,
    shares: int,
) -> dict[str, Any]:
    """What the kernels for few queries have in common. `shares` parts of the keys leave `output_words` words of O in
    the workspace, and statistics behind them.
    """
    return {
        **{name: _rows(problem, name, views[name]) for name in ("q", "out", "lse")},
        "sinks_ptr": single_address(views, "sinks"),
        "parts_ptr": Address("workspace", torch.float32),
        "stats_ptr": Address("workspace", torch.float32, offset=4 * output_words),
        "lengths": lengths_of(views),
        "paging": _paging(problem, views, "k"),
        "scale_log2": (problem.scale if problem.softcap is None else problem.softcap) * LOG2E,
        "cap_scale": 0.0 if problem.softcap is None else problem.scale / problem.softcap,
        "sizes": DecodeSizes(
            batch=problem.batch,
            pace=problem.batch / shares,
            num_kv_heads=problem.num_kv_heads,
            seqlen_q=tokens_of(problem, packed_queries=config.PACKED_Q),
            seqlen_k=problem.seqlen_k,
            total_q=problem.total_q,
            window=window_of(problem),
        ),
        "C": config,
    }


def latent_sizes(
    problem: AttentionProblem, config: LatentConfig | DecodeConfig, grid: tuple[int, int]
) -> tuple[int, int, int]:
    """32-bit words of the workspace for O, for maxima and sums (two parts a CTA), and for the parts of every item."""
    parts = 2 * grid[0] * config.LANES * grid[1] * config.ROWS
    return parts * config.DV, parts * 2, 2 * problem.batch * problem.num_kv_heads


def latent_reader(
    problem: AttentionProblem, device: DeviceSpec, *, packed_queries: bool
) -> tuple[LatentConfig | DecodeConfig, tuple[int, int]]:
    """(configuration, grid) of the kernel that reads latents."""
    few = problem.group_size * tokens_of(problem, packed_queries=packed_queries) <= FEW_LATENT_ROWS
    config = (decode_config if few else latent_config)(problem, packed_queries=packed_queries)
    return config, latent_grid(problem, config, device)


def latent_calls(problem: AttentionProblem, device: DeviceSpec, views: dict[str, View]) -> list[KernelCall]:
    """All kernels in order: read the latents, which also clears packed rows past the last sequence; merge parts."""
    config, reading = latent_reader(problem, device, packed_queries="cu_seqlens_q" in views)
    arguments = latent_arguments(problem, config, reading, views)
    kernel = latent_kernel if isinstance(config, LatentConfig) else decode_kernel
    calls = [KernelCall(kernel, (*reading, 1), arguments, overlaps=True)]
    shares = reading[0] * config.LANES
    if shares > 1:
        common = ("out", "lse", "sinks_ptr", "parts_ptr", "stats_ptr", "lengths", "sizes", "C")
        grid, spread = latent_merge_grid(problem, config, shares, device)
        merged = {name: arguments[name] for name in common} | {
            "items_ptr": _items(problem, config, reading),
            "num_shares": shares,
            "COLUMNS": config.DV // grid[2],
            "SPREAD": spread,
        }
        rows = problem.group_size * tokens_of(problem, packed_queries=config.PACKED_Q)
        calls.append(KernelCall(merge_latent_kernel, grid, merged, overlaps=shares * rows < LATENT_EARLY))
    return calls


def _items(problem: AttentionProblem, config: LatentConfig | DecodeConfig, grid: tuple[int, int]) -> Address:
    """Where the first part of every item, and their number, are in the workspace."""
    outputs, statistics, _ = latent_sizes(problem, config, grid)
    return Address("workspace", torch.int32, aligned=False, offset=4 * (outputs + statistics))


def latent_arguments(
    problem: AttentionProblem, config: LatentConfig | DecodeConfig, grid: tuple[int, int], views: dict[str, View]
) -> dict[str, Any]:
    """The arguments of the kernel that reads latents."""
    outputs, _, _ = latent_sizes(problem, config, grid)
    common = _reader_arguments(problem, config, views, outputs, grid[0] * config.LANES)
    items = _items(problem, config, grid)
    if isinstance(config, DecodeConfig):
        scales = scales_of(problem, views)
        return {**_key_tiles(problem, config, views), **common, "scales": scales, "counters_ptr": items}
    keys = packed_rows(problem, "k", views["k"])
    box = describe("k", keys, shapes_of(problem)["k"], config.CHUNK, PANEL_BYTES // keys.dtype.itemsize)
    return {"k_desc": box, **common, "items_ptr": items}


def _key_tiles(problem: AttentionProblem, config: DecodeConfig, views: dict[str, View]) -> dict[str, Any]:
    """Tensor maps of k and v; of latents, of both parts of k."""
    keys = _described(problem, config, "k", views["k"])
    if not config.D_REST:
        return {"k_desc": keys, "k_rest": None, "v_desc": _described(problem, config, "v", views["v"])}
    rows = packed_rows(problem, "k", views["k"])
    rest = describe("k", rows, shapes_of(problem)["k"], config.CHUNK, config.D_REST)
    return {"k_desc": keys, "k_rest": rest, "v_desc": None}


def _described(problem: AttentionProblem, config: DecodeConfig, name: str, view: View) -> Any:
    rows, columns = config.BLOCK_N, min(config.D if name == "k" else config.DV, 256)
    if config.IS_PAGED:
        rows, columns = config.CHUNK, min(columns, PANEL_BYTES // config.ITEMSIZE)
    return describe(name, packed_rows(problem, name, view), shapes_of(problem)[name], rows, columns)


def _rows(problem: AttentionProblem, name: str, view: View) -> Rows:
    """Rows of q, out or lse.

    The kernel computes token offsets in 32 bits; if they may exceed that, the token stride is passed as 64 bits. Where
    all rows are aligned, the compiler knows it, and they are read and written 16 bytes at a time.
    """
    sequence, head, token = 0, view.strides[1], view.strides[0]
    if problem.kind == "dense":
        sequence, head, token = view.strides[:3]
    elif name == "lse":  # (head, token)
        head, token = view.strides
    far = problem.seqlen_q * token >= 1 << 31
    address = Address(name, view.dtype, aligned=view.aligned)
    unit = TMA_BYTES // view.dtype.itemsize
    if view.aligned and all(stride % unit == 0 for stride in (sequence, head, token)):
        return Rows(address, Multiple(sequence, unit), Multiple(head, unit), Multiple(token, unit, wide=far))
    return Rows(address, sequence, head, Multiple(token, 1, wide=True) if far else token)


def fp8_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The tensors that a call allocates: out, lse, and the tiles of V^T."""
    config = fp8_config(problem)
    slots = problem.num_kv_heads * _tiles_per_head(problem, config)
    slots *= 1 if config.IS_VARLEN else problem.batch
    values = Allocation.contiguous((slots, config.D, config.BLOCK_N), E4M3)
    return result_allocations(problem) | {"values": values}


def fp8_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], tile: Fp8Tile | None = None
) -> list[KernelCall]:
    """All kernels in order: list the packed blocks, transpose V, compute."""
    config = fp8_config(problem, tile)
    sizes = sizes_of(problem, config, itemsize=1)
    tiles_per_head = _tiles_per_head(problem, config)
    values_shape = fp8_allocations(problem)["values"].shape
    arguments = _fp8_descriptors(problem, config, views) | {
        "v_desc": describe_flat(Address("values", E4M3), values_shape, [1, config.D, config.BLOCK_N]),
        "lse_ptr": Address("lse", torch.float32),
        "sinks_ptr": single_address(views, "sinks"),
        "scales": scales_of(problem, views),
        "counter_ptr": COUNTER,
        "work_ptr": Address("work", torch.int32) if config.IS_VARLEN else None,
        "tiles_per_head": tiles_per_head,
        "scale_log2": problem.scale * LOG2E,
        "sizes": sizes,
        "C": config,
    }
    forward = KernelCall(fp8_forward_kernel, (min(device.num_sms, sizes.num_tiles), 1, 1), arguments)
    calls = [_transposition(problem, config, views, tiles_per_head), forward]
    return [listing_call(problem, config, sizes, itemsize=1), *calls] if config.IS_VARLEN else calls


def _tiles_per_head(problem: AttentionProblem, config: Fp8Config) -> int:
    """Tiles of V^T that a head has space for; every packed sequence starts on a tile of its own."""
    if config.IS_VARLEN:
        return problem.total_k // config.BLOCK_N + problem.batch
    return -(-problem.seqlen_k // config.BLOCK_N)


def _fp8_descriptors(problem: AttentionProblem, config: Fp8Config, views: dict[str, View]) -> dict[str, Any]:
    shapes = shapes_of(problem)
    shapes["out"] = (*shapes["q"][:-1], problem.head_dim_v)
    rows = {"q": 64, "k": config.BLOCK_N, "out": 64}
    return {f"{name}_desc": describe(name, views[name], shapes[name], n, config.D) for name, n in rows.items()}


def _transposition(
    problem: AttentionProblem, config: Fp8Config, views: dict[str, View], tiles_per_head: int
) -> KernelCall:
    # The stride of a dimension of size 1 may be anything; it is never used.
    sides = zip(shapes_of(problem)["v"][:-1], views["v"].strides, strict=False)
    strides = [
        Multiple((TMA_BYTES if size == 1 else stride) // FP8_WORD, TMA_BYTES // FP8_WORD) for size, stride in sides
    ]
    arguments = {
        "v_ptr": Address("v", torch.int32),
        "out_ptr": Address("values", torch.int32),
        "cu_seqlens": single_address(views, "cu_seqlens_k"),
        "seqlen": problem.seqlen_k,
        "num_heads": problem.num_kv_heads,
        "tiles_per_head": tiles_per_head,
        "v_strides": Strides(0, strides[1], strides[0]) if config.IS_VARLEN else Strides(*strides),
        "HEAD_DIM": problem.head_dim_v,
        "D": config.D,
        "BLOCK_N": config.BLOCK_N,
    }
    grid = (-(-problem.seqlen_k // config.BLOCK_N) * problem.num_kv_heads * problem.batch, 1, 1)
    return KernelCall(transpose_values_kernel, grid, arguments)


def gradient_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The tensors that the backward allocates: dq, dk and dv."""
    keys = (problem.num_kv_heads, problem.seqlen_k, problem.total_k)
    return {
        "dq": Allocation.rows(
            problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim, problem.dtype
        ),
        "dk": Allocation.rows(problem, *keys, problem.head_dim, problem.dtype),
        "dv": Allocation.rows(problem, *keys, problem.head_dim_v, problem.dtype),
    }


def backward_calls(plan: BackwardPlan, views: dict[str, View]) -> Iterator[KernelCall]:
    """All kernels in order; without a view of dq, not those that only dQ needs."""
    if plan.config.FIXED_POINT:
        yield _bound_call(plan, views)
    if (keys := plan.at("key list")) is not None:
        yield _list_call(plan, keys, views, of_keys=True)
    yield _prepare_call(plan, views)
    yield _key_gradient_call(plan, views)
    if plan.line is not None:
        yield _pieces_call(plan, plan.line, views)
        yield _join_call(plan, plan.line, views)
    if "dq" not in views:
        return
    if (queries := plan.at("query list")) is not None:
        yield _list_call(plan, queries, views, of_keys=False)
    yield _query_gradient_call(plan, views) if plan.config.WIDE else _finish_call(plan, views)


def _list_call(plan: BackwardPlan, work: Address, views: dict[str, View], *, of_keys: bool) -> KernelCall:
    """List packed blocks; the call for key blocks also clears gradients of rows past the last sequence."""
    problem, config = plan.problem, plan.config
    counts = plan.at("counts")
    return list_call(
        problem,
        work,
        config.BLOCK_N if of_keys else QUERY_BLOCK,
        together=plan.together(of_keys=of_keys),
        of_keys=of_keys,
        cleared=("dq" if "dq" in views else None, None, "dk", "dv") if of_keys else (None, None, None, None),
        heads=problem.num_kv_heads if of_keys and not config.WIDE else 1,
        beside=(counts, plan.front_tiles) if of_keys and counts is not None else None,
    )


def _bound_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Bound the lengths of K and V rows, for the units of a sum in fixed point."""
    problem = plan.problem
    arguments = {
        "k_ptr": Address("k", problem.dtype),
        "v_ptr": Address("v", problem.dtype),
        "bounds_ptr": plan.at("bounds"),
        "cu_seqlens": single_address(views, "cu_seqlens_k"),
        "k_strides": _stride_units(views["k"]),
        "v_strides": _stride_units(views["v"]),
        "num_heads": problem.num_kv_heads,
        "seqlen_k": problem.seqlen_k,
        "batch": problem.batch,
        "BLOCK_N": BOUND_BLOCK_N,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": _power_of_two(problem.head_dim),
        "BLOCK_DV": _power_of_two(problem.head_dim_v),
        "PACKED": plan.config.IS_VARLEN,
        "BOUND_KEYS": plan.bound_keys,
    }
    grid = (problem.batch * problem.num_kv_heads, int(backward_rows.BOUND_PARTS), 1)
    if plan.bound_keys:
        grid = (plan.bound_slots, problem.num_kv_heads, 1)
    return KernelCall(backward_rows.bound_keys_kernel, grid, arguments)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _prepare_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Row statistics and zeros for dQ's accumulator: of all heads, or of those that idle warps do not prepare."""
    problem, config = plan.problem, plan.config
    front = plan.front_items * problem.group_size
    stats = front if config.STATS_AHEAD else plan.query_items
    arguments = {
        "out_ptr": Address("out", problem.dtype),
        "dout_ptr": Address("dout", problem.dtype),
        "lse_ptr": _row_address(views, "lse"),
        "dlse_ptr": _row_address(views, "dlse"),
        "stats_ptr": plan.stats,
        "units_ptr": plan.at("units"),
        "main_units_ptr": plan.at("main units"),
        "dq_acc_ptr": plan.at("sums"),
        "counts_ptr": plan.at("counts"),
        "bounds_ptr": plan.at("bounds"),
        "cu_seqlens": single_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": single_address(views, "cu_seqlens_k") if config.FIXED_POINT else None,
        "out_strides": _stride_units(views["out"]),
        "dout_strides": _stride_units(views["dout"]),
        "num_heads": problem.num_heads,
        "group_size": problem.group_size,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window": plan.key_sizes.window,
        "bound_slots": plan.bound_slots,
        "total_q": problem.total_q,
        "batch": problem.batch,
        "num_items": stats,
        "cleared_items": front,
        "num_counts": 0 if config.IS_VARLEN else plan.num_counts,
        "bound_units": 2.0**plan.bound_bits,
        "bound_bits": plan.bound_bits,
        "BLOCK_M": config.BLOCK_M,
        "HEAD_DIM": problem.head_dim_v,
        "BLOCK_D": _power_of_two(problem.head_dim_v),
        "DQ_BLOCKS": dq_blocks(config),
        "PACKED": config.IS_VARLEN,
        "BOUND_KEYS": plan.bound_keys,
    }
    grid = (stats * plan.key_sizes.row_tiles, 1, 1)
    return KernelCall(backward_rows.prepare_rows_kernel, grid, arguments, overlaps=config.FIXED_POINT)


def _tiles(
    plan: BackwardPlan, views: dict[str, View], rows: dict[str, int], *, in_parts: bool
) -> dict[str, Tile | None]:
    """Tensor maps of operands and gradients with `rows` rows a tile; with in_parts also of the second column part."""
    config, shapes = plan.config, shapes_of(plan.problem)
    shapes |= {"dq": shapes["q"], "dk": shapes["k"], "dv": shapes["v"]}
    shapes["out"] = shapes["dout"] = (*shapes["q"][:-1], plan.problem.head_dim_v)
    found: dict[str, Tile | None] = {}
    for name, block in rows.items():
        of_values = name in ("v", "dv", "out", "dout")
        columns, rest = (config.DV, config.DV_REST) if of_values else (config.D, config.D_REST)
        found[f"{name}_desc"] = describe(name, views[name], shapes[name], block, columns)
        if in_parts:
            found[f"{name}_rest"] = describe(name, views[name], shapes[name], block, rest) if rest else None
    return found


def _key_gradient_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """The main kernel: dK, dV and, unless WIDE, the sums of dQ."""
    config = plan.config
    queries, keys = config.BLOCK_M, 64
    rows = {"q": queries, "dout": queries, "k": keys, "v": keys, "dk": keys, "dv": keys}
    arguments: dict[str, Any] = _tiles(plan, views, rows, in_parts=config.WIDE) | _shared(plan)
    arguments |= {
        "stats_desc": describe_flat(plan.stats, (2 * plan.num_rows,), [2 * config.BLOCK_M]),
        "counter_ptr": COUNTER,
        "work_ptr": plan.at("key list"),
        "sizes": plan.main_sizes,
    }
    if config.WIDE:
        return KernelCall(backward_wide_kernel, plan.key_grid, arguments)
    shape = plan.problem.tiles_shape
    arguments["lists"] = None if shape is None else _lists(shape, of_keys=True)
    return KernelCall(backward_kernel, plan.key_grid, arguments | _sums(plan) | _ahead(plan, views))


def _pieces_call(plan: BackwardPlan, line: Line, views: dict[str, View]) -> KernelCall:
    """The last round of tiles, in pieces."""
    queries, keys = plan.config.BLOCK_M, 64
    rows = {"q": queries, "dout": queries, "k": keys, "v": keys}
    arguments: dict[str, Any] = _tiles(plan, views, rows, in_parts=False) | _shared(plan) | _sums(plan)
    arguments |= {
        "stats_desc": describe_flat(plan.stats, (2 * plan.num_rows,), [2 * queries]),
        "parts_ptr": plan.at("pieces"),
        "line": line,
        "sizes": plan.key_sizes,
    }
    del arguments["scale"]
    return KernelCall(backward_pieces_kernel, (line.programs, 1, 1), arguments)


def _join_call(plan: BackwardPlan, line: Line, views: dict[str, View]) -> KernelCall:
    """Sum the pieces: dK and dV of the last round."""
    problem = plan.problem
    arguments = {
        "parts_ptr": plan.at("pieces"),
        "dk_ptr": Address("dk", problem.dtype),
        "dv_ptr": Address("dv", problem.dtype),
        "line": line,
        "scale": problem.scale,
        "num_heads": problem.num_kv_heads,
        "num_blocks": plan.key_sizes.num_blocks,
        "dk_strides": _stride_units(views["dk"]),
        "dv_strides": _stride_units(views["dv"]),
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "D": plan.config.D,
    }
    grid = (plan.key_sizes.num_tiles - line.first_tile, plan.config.BLOCK_N // int(JOINED_ROWS), 2)
    return KernelCall(join_pieces_kernel, grid, arguments)


def _sums(plan: BackwardPlan) -> dict[str, Any]:
    """Where dQ is added up."""
    accumulator, units = plan.at("sums"), plan.at("main units")
    assert accumulator is not None
    units_desc = None
    if units is not None and plan.config.D == 64:
        units_desc = describe_flat(units, (plan.num_rows // 4, 32), [16, 32])
    elif units is not None:
        units_desc = describe_flat(units, (plan.num_rows,), [plan.config.BLOCK_M])
    return {
        "dq_desc": describe_flat(accumulator, (plan.num_rows * plan.sums_width // 32, 32), [128, 32]),
        "units_desc": units_desc,
        "units_ptr": plan.at("units") if plan.watches_rows else None,
    }


def _ahead(plan: BackwardPlan, views: dict[str, View]) -> dict[str, Any]:
    """Arguments of the preparer (preparing.py); None for what it does not use."""
    config = plan.config
    rows = {"out": config.BLOCK_M} if config.STATS_AHEAD else {}
    return {
        "out_desc": None,
        **_tiles(plan, views, rows, in_parts=False),
        "lse_ptr": _row_address(views, "lse") if config.STATS_AHEAD else None,
        "dlse_ptr": _row_address(views, "dlse") if config.STATS_AHEAD else None,
        "stats_ptr": plan.stats if config.STATS_AHEAD else None,
        "sums_ptr": plan.at("sums") if config.AHEAD else None,
        "counts_ptr": plan.at("counts"),
        "ahead": Ahead(plan.front_items, plan.front_tiles) if config.AHEAD else None,
    }


def _row_address(views: dict[str, View], name: str) -> Address | None:
    """Of lse or dlse, which the pass gets in fp32."""
    return Address(name, torch.float32, aligned=False) if name in views else None


def _shared(plan: BackwardPlan) -> dict[str, Any]:
    scale, softcap = plan.problem.scale, plan.problem.softcap
    return {
        "scale_log2": (scale if softcap is None else softcap) * LOG2E,
        "cap_scale": None if softcap is None else scale / softcap,
        "scale": scale,
        "C": plan.config,
    }


def _finish_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Convert dQ from its accumulator."""
    problem, config = plan.problem, plan.config
    arguments = {
        "dq_acc_ptr": plan.at("sums"),
        "units_ptr": plan.at("units"),
        "dq_ptr": Address("dq", problem.dtype),
        "cu_seqlens": single_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": single_address(views, "cu_seqlens_k") if config.FIXED_POINT else None,
        "scale": problem.scale,
        "dq_strides": _stride_units(views["dq"]),
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window": plan.key_sizes.window,
        "batch": problem.batch,
        "num_items": plan.query_items,
        "BLOCK_M": config.BLOCK_M,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": plan.sums_width,
        "PACKED": config.IS_VARLEN,
    }
    return KernelCall(
        backward_rows.finish_queries_kernel, (plan.query_items * plan.key_sizes.row_tiles, 1, 1), arguments
    )


def _query_gradient_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """WIDE: compute dQ in a kernel of its own, every row summed in order."""
    rows = {"q": 64, "dout": 64, "k": plan.config.BLOCK_N, "v": plan.config.BLOCK_N, "dq": 64}
    arguments: dict[str, Any] = _tiles(plan, views, rows, in_parts=True) | _shared(plan)
    arguments |= {
        "stats_ptr": Address("workspace", torch.float32, aligned=False),
        "work_ptr": plan.at("query list"),
        "sizes": plan.query_sizes,
    }
    return KernelCall(query_gradient_kernel, (plan.query_sizes.num_tiles, 1, 1), arguments)


def _sink_gradient(plan: BackwardPlan, sinks: Tensor, workspace: Tensor) -> Tensor:
    """Sum over rows of exp(sink - lse) * (dlse - delta), from the row statistics in the workspace."""
    shape = (-1, plan.problem.num_heads, plan.key_sizes.row_tiles, 2, plan.config.BLOCK_M)
    rows = workspace[: 2 * plan.num_rows].view(shape)
    weight = torch.exp2(sinks.float().view(1, -1, 1, 1) * LOG2E - rows[:, :, :, 0])
    return -(weight * rows[:, :, :, 1]).sum((0, 2, 3)).to(sinks.dtype)


def _stride_units(view: View) -> Strides:
    """Strides in units of 16 bytes; that of a dimension of size 1 does not matter."""
    strides = view.strides
    batch, head, row = (0, strides[1], strides[0]) if len(strides) == 3 else strides[:3]
    return Strides(batch // STRIDE_UNIT, head // STRIDE_UNIT, row // STRIDE_UNIT)
