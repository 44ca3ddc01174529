"""Launch plans of the backward: row statistics, main kernel, then dQ.

As in launch.py, a plan (`BackwardPass`) holds everything except addresses and is cached per problem and strides.
backward_plan.py lays out the workspace. Figures: bench/results/hopper-backward-choices.csv.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import (
    BACKWARD_GIVEN,
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
from tilewise.backends.gpu.listing import list_call
from tilewise.backends.gpu.symbols import Address, KernelCall, Tile
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_pieces import (
    JOINED_ROWS,
    Line,
    backward_pieces_kernel,
    join_pieces_kernel,
)
from tilewise.backends.hopper.backward_plan import QUERY_BLOCK, BackwardPlan, backward_plan
from tilewise.backends.hopper.backward_rows import (
    BOUND_PARTS,
    bound_keys_kernel,
    finish_queries_kernel,
    prepare_rows_kernel,
)
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.configs import dq_blocks
from tilewise.backends.hopper.launch import (
    addressable,
    contiguous,
    describe,
    describe_flat,
    index_address,
    rows_allocation,
    shapes_of,
)
from tilewise.backends.hopper.preparing import Ahead
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = [
    "BackwardPass",
    "BackwardPlan",
    "backward_calls",
    "backward_pass",
    "backward_plan",
    "bind_backward",
    "run_backward",
]

# The kernels of backward_rows take strides in units of 16 bytes, 8 elements.
STRIDE_UNIT = 8
# Keys that a program of bound_keys_kernel reads at a time: fastest for short sequences, where its time weighs most.
BOUND_BLOCK_N = 16
# A window edge that hides nothing: larger than any number of keys.
NO_EDGE = 1 << 30


class BackwardPass(NamedTuple):
    """A launch plan without addresses. If TMA cannot address some tensors, `copies` names them, and there is none."""

    copies: tuple[str, ...]
    plan: BackwardPlan
    kernels: Pass | None


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
    dlse = None if dlse is None else dlse.float().contiguous()
    given: tuple[Tensor | None, ...] = (dout, dlse, out, lse.contiguous(), *operands)
    device, index = devices.of(operands.q.device), operands.q.get_device()
    wish = Wish(also=("workspace",) if wanted.dsinks else ())
    copies, plan, kernels = backward_pass(problem, device, index, raw_views(given), wanted.dq, wish)
    if kernels is None:
        copied = zip(BACKWARD_GIVEN, given, strict=True)
        given = tuple([contiguous(t) if t is not None and name in copies else t for name, t in copied])
        _, plan, kernels = backward_pass(problem, device, index, raw_views(given), wanted.dq, wish)
    assert kernels is not None
    made = kernels.run(given)
    dk, dv = made["dk"] if wanted.dk else None, made["dv"] if wanted.dv else None
    dsinks = _sink_gradient(plan, operands.sinks, made["workspace"]) if wanted.dsinks else None
    return Gradients(made.get("dq"), dk, dv, None, dsinks)


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> Pass | None:
    """See Binding; `given` in the order of BACKWARD_GIVEN."""
    whole = all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in (given[1], given[3]))
    if wanted.dsinks or not whole:
        return None
    wish = Wish(in_layout=True, also=())
    return backward_pass(problem, devices.of(q.device), q.get_device(), raw_views(given), wanted.dq, wish).kernels


@functools.lru_cache(maxsize=MAX_PASSES)
def backward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_dq: bool, wish: Wish = HEADS_FIRST
) -> BackwardPass:
    """The launch plan of a problem with these strides, cached."""
    views = named_views(BACKWARD_GIVEN, raw)
    plan = backward_plan(problem, device)
    shapes = shapes_of(problem)
    shapes["out"] = shapes["dout"] = (*shapes["q"][:-1], problem.head_dim_v)
    copies = tuple(name for name, shape in shapes.items() if not addressable(views[name], shape))
    if copies:
        return BackwardPass(copies, plan, None)
    made = gradient_allocations(problem)
    if not want_dq:
        del made["dq"]
    calls = list(backward_calls(plan, views | {name: allocation.view for name, allocation in made.items()}))
    room = made | {"workspace": plan.workspace}
    kernels = pass_of(problem.layout, calls, BACKWARD_GIVEN, room, device, index, wish, num_counters=1)
    return BackwardPass((), plan, kernels)


def gradient_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The tensors that the backward allocates: dq, dk and dv."""
    keys = (problem.num_kv_heads, problem.seqlen_k, problem.total_k)
    return {
        "dq": rows_allocation(problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim),
        "dk": rows_allocation(problem, *keys, problem.head_dim),
        "dv": rows_allocation(problem, *keys, problem.head_dim_v),
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
    if "dq" not in views or plan.finished_items == plan.key_sizes.num_items:
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
        "cu_seqlens": index_address(views, "cu_seqlens_k"),
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
    grid = (problem.batch * problem.num_kv_heads, int(BOUND_PARTS), 1)
    if plan.bound_keys:
        grid = (plan.bound_slots, problem.num_kv_heads, 1)
    return KernelCall(bound_keys_kernel, grid, arguments)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _prepare_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Row statistics and zeros for dQ's accumulator: of all heads, or of those that idle warps do not prepare."""
    problem, config = plan.problem, plan.config
    front = plan.front_items * problem.group_size
    stats = front if config.STATS_AHEAD else plan.query_items
    cleared = plan.ring_items * problem.group_size if config.FINISHES else front
    items = max(stats, cleared)
    arguments = {
        "out_ptr": Address("out", problem.dtype),
        "dout_ptr": Address("dout", problem.dtype),
        "lse_ptr": Address("lse", torch.float32, aligned=False),
        "dlse_ptr": Address("dlse", torch.float32, aligned=False) if "dlse" in views else None,
        "stats_ptr": plan.stats,
        "units_ptr": plan.at("units"),
        "main_units_ptr": plan.at("main units"),
        "dq_acc_ptr": plan.at("sums"),
        "counts_ptr": plan.at("counts"),
        "bounds_ptr": plan.at("bounds"),
        "cu_seqlens": index_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": index_address(views, "cu_seqlens_k") if config.FIXED_POINT else None,
        "out_strides": _stride_units(views["out"]),
        "dout_strides": _stride_units(views["dout"]),
        "num_heads": problem.num_heads,
        "group_size": problem.group_size,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window_left": plan.key_sizes.window_left if config.HAS_LEFT else NO_EDGE,
        "window_right": plan.key_sizes.window_right if config.HAS_RIGHT else NO_EDGE,
        "bound_slots": plan.bound_slots,
        "total_q": problem.total_q,
        "batch": problem.batch,
        "num_items": items,
        "cleared_items": cleared,
        "stats_items": stats,
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
    grid = (items * plan.key_sizes.row_tiles, 1, 1)
    return KernelCall(prepare_rows_kernel, grid, arguments, overlaps=config.FIXED_POINT)


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
        "counter_ptr": Address("counter", torch.int32, aligned=False),
        "work_ptr": plan.at("key list"),
        "sizes": plan.main_sizes,
    }
    if config.WIDE:
        return KernelCall(backward_wide_kernel, plan.key_grid, arguments)
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
        "dq_desc": describe_flat(accumulator, (plan.sums_rows * plan.sums_width // 32, 32), [128, 32]),
        "units_desc": units_desc,
        "units_ptr": plan.at("units") if plan.watches_rows else None,
    }


def _ahead(plan: BackwardPlan, views: dict[str, View]) -> dict[str, Any]:
    """Arguments of the preparer (preparing.py, finishing.py); None for what it does not use."""
    config = plan.config
    rows = {"out": config.BLOCK_M} if config.STATS_AHEAD else {}
    dlse = Address("dlse", torch.float32, aligned=False) if "dlse" in views else None
    return {
        "out_desc": None,
        **_tiles(plan, views, rows, in_parts=False),
        "lse_ptr": Address("lse", torch.float32, aligned=False) if config.STATS_AHEAD else None,
        "dlse_ptr": dlse if config.STATS_AHEAD else None,
        "stats_ptr": plan.stats if config.STATS_AHEAD else None,
        "dq_ptr": Address("dq", plan.problem.dtype) if config.FINISHES and "dq" in views else None,
        "sums_ptr": plan.at("sums") if config.AHEAD else None,
        "counts_ptr": plan.at("counts"),
        "ahead": _lead(plan, views) if config.AHEAD else None,
    }


def _lead(plan: BackwardPlan, views: dict[str, View]) -> Ahead:
    """The preparer's lead, and the strides of dQ."""
    strides = _stride_units(views["dq"]) if "dq" in views else (0, 0, 0)
    return Ahead(
        plan.front_items,
        plan.front_tiles,
        plan.ring_items,
        plan.finished_items,
        plan.lag,
        *strides,
        plan.problem.head_dim // STRIDE_UNIT,
    )


def _shared(plan: BackwardPlan) -> dict[str, Any]:
    scale, softcap = plan.problem.scale, plan.problem.softcap
    return {
        "scale_log2": (scale if softcap is None else softcap) * LOG2E,
        "cap_scale": None if softcap is None else scale / softcap,
        "scale": scale,
        "C": plan.config,
    }


def _finish_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Convert dQ from its accumulator, of the heads that the main kernel has not converted."""
    problem, config = plan.problem, plan.config
    finished = plan.finished_items * problem.group_size
    items = plan.query_items - finished
    arguments = {
        "dq_acc_ptr": plan.at("sums"),
        "units_ptr": plan.at("units"),
        "dq_ptr": Address("dq", problem.dtype),
        "cu_seqlens": index_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": index_address(views, "cu_seqlens_k") if config.FIXED_POINT else None,
        "scale": problem.scale,
        "dq_strides": _stride_units(views["dq"]),
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window_left": plan.key_sizes.window_left if config.HAS_LEFT else NO_EDGE,
        "window_right": plan.key_sizes.window_right if config.HAS_RIGHT else NO_EDGE,
        "batch": problem.batch,
        "num_items": items,
        "first_item": finished,
        "ring_items": plan.ring_items * problem.group_size,
        "BLOCK_M": config.BLOCK_M,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": plan.sums_width,
        "PACKED": config.IS_VARLEN,
    }
    return KernelCall(finish_queries_kernel, (items * plan.key_sizes.row_tiles, 1, 1), arguments)


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


def _sink_gradient(plan: BackwardPlan, sinks: Tensor | None, workspace: Tensor) -> Tensor | None:
    """Sum over rows of exp(sink - lse) * (dlse - delta), from the row statistics in the workspace."""
    if sinks is None:
        return None
    shape = (-1, plan.problem.num_heads, plan.key_sizes.row_tiles, 2, plan.config.BLOCK_M)
    rows = workspace[: 2 * plan.num_rows].view(shape)
    weight = torch.exp2(sinks.float().view(1, -1, 1, 1) * LOG2E - rows[:, :, :, 0])
    return -(weight * rows[:, :, :, 1]).sum((0, 2, 3)).to(sinks.dtype)


def _stride_units(view: View) -> tuple[int, int, int]:
    """Strides of (batch, head, row) in units of 16 bytes; the stride of a dimension of size 1 does not matter."""
    strides = view.strides
    batch, head, row = (0, strides[1], strides[0]) if len(strides) == 3 else strides[:3]
    return batch // STRIDE_UNIT, head // STRIDE_UNIT, row // STRIDE_UNIT
