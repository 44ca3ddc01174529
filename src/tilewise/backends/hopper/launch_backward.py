"""From canonical operands to the backward kernels: prepare rows, main kernel, finish dQ (or compute it in order)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import (
    BOUND_BACKWARD,
    MAX_PASSES,
    Allocation,
    BoundPass,
    Launches,
    RawView,
    View,
    on_device,
    raw_views,
)
from tilewise.backends.gpu.listing import heads_per_wave, list_call, list_size, most_blocks, rows_together
from tilewise.backends.gpu.symbols import Address, KernelCall, Tile
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_rows import (
    BOUND_PARTS,
    bound_keys_kernel,
    finish_queries_kernel,
    prepare_rows_kernel,
)
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.configs import BackwardConfig, backward_config, dq_blocks
from tilewise.backends.hopper.launch import index_address, shapes_of
from tilewise.backends.hopper.launching import (
    addressable,
    contiguous,
    counter_for,
    counter_maker,
    describe,
    describe_flat,
    rows_allocation,
)
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.backends.hopper.schedule import Sizes
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

# Heads walked together under a causal mask: what their key tiles (query tiles, for dQ alone) share, in this much of L2.
L2_BYTES = 32 << 20
# The kernels of backward_rows take strides in units of 16 bytes, 8 elements.
STRIDE_UNIT = 8
# Queries of a block of the kernel that computes dQ alone.
QUERY_BLOCK = 128
# Keys that a program of bound_keys_kernel reads at a time.
BOUND_BLOCK_N = 64
# In which order tensors are handed to the launches.
GIVEN = (*Operands._fields, "out", "lse", "dout", "dlse")
TENSORS = (*GIVEN, "workspace", "dq", "dk", "dv", "counter")

RawViews = tuple[RawView | None, ...]


class BackwardPlan(NamedTuple):
    """What every call with a problem shares: sizes seen from the keys and from the queries."""

    problem: AttentionProblem
    config: BackwardConfig
    key_sizes: Sizes
    query_sizes: Sizes
    key_grid: tuple[int, int, int]

    @property
    def query_items(self) -> int:
        """What has row statistics of its own: (batch, head) pairs or, packed, heads."""
        return self.problem.num_heads * (1 if self.config.IS_VARLEN else self.problem.batch)

    @property
    def num_rows(self) -> int:
        """Query rows in whole tiles."""
        return self.query_items * self.key_sizes.row_tiles * self.config.BLOCK_M

    @property
    def stats(self) -> Address:
        """[lse * log2(e) | delta] of every query tile: the workspace begins with them."""
        return Address("workspace", torch.float32)

    @property
    def accumulator(self) -> Address | None:
        """The sums of dQ, behind the statistics."""
        dtype = torch.int32 if self.config.FIXED_POINT else torch.float32
        return None if self.config.WIDE else Address("workspace", dtype, offset=8 * self.num_rows)

    @property
    def sums_width(self) -> int:
        """Columns of dQ that are summed."""
        return 0 if self.config.WIDE else self.config.D

    @property
    def units(self) -> Address | None:
        """The units of a sum in fixed point, behind the sums."""
        offset = (2 + self.sums_width) * 4 * self.num_rows
        return Address("workspace", torch.float32, offset=offset) if self.config.FIXED_POINT else None

    @property
    def bounds(self) -> Address | None:
        """What the units are derived from, behind them."""
        offset = (3 + self.sums_width) * 4 * self.num_rows
        return Address("workspace", torch.int32, offset=offset) if self.config.FIXED_POINT else None

    @property
    def num_bounds(self) -> int:
        """Of every head of keys."""
        heads = self.problem.batch * self.problem.num_kv_heads
        return 2 * int(BOUND_PARTS) * heads if self.config.FIXED_POINT else 0

    @property
    def key_work(self) -> Address | None:
        """The list of packed blocks of keys."""
        width = 2 + self.sums_width + (1 if self.config.FIXED_POINT else 0)
        offset = 4 * (width * self.num_rows + self.num_bounds)
        return Address("workspace", torch.int32, offset=offset) if self.config.IS_VARLEN else None

    @property
    def query_work(self) -> Address | None:
        """The list of packed blocks of queries, where dQ has a kernel of its own."""
        if self.key_work is None or not self.config.WIDE:
            return None
        return replace(self.key_work, offset=self.key_work.offset + 4 * list_size(self.key_sizes.num_blocks))

    @property
    def workspace(self) -> Allocation:
        """Room for all of them."""
        width = 2 + self.sums_width + (1 if self.config.FIXED_POINT else 0)
        lists = [sizes.num_blocks for sizes in (self.key_sizes, self.query_sizes) if self.config.IS_VARLEN]
        words = width * self.num_rows + self.num_bounds + sum(map(list_size, lists))
        return Allocation.contiguous((words,), torch.float32)


class BackwardPass(NamedTuple):
    """A backward call with everything but addresses; `copies` are the tensors that TMA cannot address as they are."""

    copies: tuple[str, ...]
    plan: BackwardPlan
    workspace: Allocation
    dq: Allocation | None
    dk: Allocation
    dv: Allocation
    launches: Launches


def backward_plan(problem: AttentionProblem, device: DeviceSpec) -> BackwardPlan:
    """Everything about a call that needs no tensor."""
    config = backward_config(problem)
    keys = _sizes(problem, config, of_keys=True)
    queries = _sizes(problem, config, of_keys=False)
    programs = min(device.num_sms, keys.num_tiles)
    return BackwardPlan(problem, config, keys, queries, (programs, 1, 1))


def _sizes(problem: AttentionProblem, config: BackwardConfig, *, of_keys: bool) -> Sizes:
    left, right = problem.band
    packed = config.IS_VARLEN
    heads = problem.num_kv_heads if of_keys else problem.num_heads
    longest, total, block = problem.seqlen_q, problem.total_q, QUERY_BLOCK
    if of_keys:
        longest, total, block = problem.seqlen_k, problem.total_k, config.BLOCK_N
    num_items = heads if packed else problem.batch * heads
    num_blocks = -(-longest // block)
    streamed = _streamed_bytes(problem, of_keys=of_keys) * (problem.seqlen_q if of_keys else problem.seqlen_k)
    wave = max(1, min(num_items, L2_BYTES // streamed)) if config.HAS_RIGHT or config.HAS_LEFT else 1
    if packed:
        wave = heads_per_wave(heads, num_blocks, streamed)
        num_blocks = most_blocks(total, block, problem.batch)
    rows = config.BLOCK_M
    return Sizes(
        num_heads=heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_blocks * num_items,
        items_per_wave=wave,
        row_tiles=most_blocks(problem.total_q, rows, problem.batch) if packed else -(-problem.seqlen_q // rows),
        window_left=(left or 0) if config.HAS_LEFT else 0,
        window_right=(right or 0) if config.HAS_RIGHT else 0,
    )


def _streamed_bytes(problem: AttentionProblem, *, of_keys: bool) -> int:
    """Of a row that passes by a block of keys (of queries): what the blocks of a head share.

    Q and dO in 16 bits and dQ in 32, of one query head: the CTAs of a group walk through its heads side by side.
    Counted for the whole group, GQA 32/8 (4096 tokens) went two K/V heads a wave and waited for the last ones: 445
    TFLOP/s instead of 537. K and V in 16 bits.
    """
    if of_keys:
        return problem.head_dim * 6 + problem.head_dim_v * 2
    return (problem.head_dim + problem.head_dim_v) * 2


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
    given = (*operands, out, lse.contiguous(), dout, dlse)
    gradients: Gradients = on_device(operands.q.get_device(), _backward, problem, given, wanted)
    return gradients


def _backward(problem: AttentionProblem, given: tuple[Tensor | None, ...], wanted: Wanted) -> Gradients:
    q = given[0]
    assert q is not None
    device, index = devices.of(q.device), q.get_device()
    ready = backward_pass(problem, device, index, raw_views(given), wanted.dq)
    if ready.copies:
        copied = zip(GIVEN, given, strict=True)
        given = tuple([contiguous(t) if t is not None and name in ready.copies else t for name, t in copied])
        ready = backward_pass(problem, device, index, raw_views(given), wanted.dq)
    workspace, dk, dv = ready.workspace.new(q), ready.dk.new(q), ready.dv.new(q)
    dq = None if ready.dq is None else ready.dq.new(q)
    ready.launches.run((*given, workspace, dq, dk, dv, counter_for(q)))
    dsinks = _sink_gradient(ready.plan, given[GIVEN.index("sinks")], workspace) if wanted.dsinks else None
    return Gradients(dq, dk if wanted.dk else None, dv if wanted.dv else None, None, dsinks)


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> BoundPass | None:
    """See Binding; `given` in the order of GIVEN."""
    lse, dlse = given[GIVEN.index("lse")], given[GIVEN.index("dlse")]
    whole = all(t is None or (t.dtype == torch.float32 and t.is_contiguous()) for t in (lse, dlse))
    if wanted.dsinks or not whole:
        return None
    index = q.get_device()
    views = raw_views(given)
    ready: BackwardPass = on_device(index, backward_pass, problem, devices.of(q.device), index, views, wanted.dq)
    if ready.copies:
        return None
    layout = problem.layout
    made = {"dk": ready.dk.in_layout(layout), "dv": ready.dv.in_layout(layout), "workspace": ready.workspace}
    if ready.dq is not None:
        made["dq"] = ready.dq.in_layout(layout)
    return BoundPass(ready.launches, BOUND_BACKWARD, made, index, counter_maker(q))


@functools.lru_cache(maxsize=MAX_PASSES)
def backward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_dq: bool
) -> BackwardPass:
    """The pass, prepared by the first call that needs it."""
    views = {name: View(*view) for name, view in zip(GIVEN, raw, strict=True) if view is not None}
    plan = backward_plan(problem, device)
    shapes = shapes_of(problem)
    shapes["out"] = shapes["dout"] = (*shapes["q"][:-1], problem.head_dim_v)
    copies = tuple(name for name, shape in shapes.items() if not addressable(views[name], shape))
    made = gradient_allocations(problem)
    if not want_dq:
        del made["dq"]
    views |= {name: allocation.view for name, allocation in made.items()}
    calls = [] if copies else list(backward_calls(plan, views))
    launches = Launches(calls, TENSORS, device, index)
    return BackwardPass(copies, plan, plan.workspace, made.get("dq"), made["dk"], made["dv"], launches)


def gradient_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """What the backward makes: dq, dk and dv."""
    keys = (problem.num_kv_heads, problem.seqlen_k, problem.total_k)
    return {
        "dq": rows_allocation(problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim),
        "dk": rows_allocation(problem, *keys, problem.head_dim),
        "dv": rows_allocation(problem, *keys, problem.head_dim_v),
    }


def backward_calls(plan: BackwardPlan, views: dict[str, View]) -> Iterator[KernelCall]:
    """All kernels in order; without a view of dq, none that only dQ needs."""
    if plan.config.FIXED_POINT:
        yield _bound_call(plan, views)
    if plan.key_work is not None:
        yield _list_call(plan, plan.key_work, views, of_keys=True)
    yield _prepare_call(plan, views)
    yield _key_gradient_call(plan, views)
    if "dq" not in views:
        return
    if plan.query_work is not None:
        yield _list_call(plan, plan.query_work, views, of_keys=False)
    yield _query_gradient_call(plan, views) if plan.config.WIDE else _finish_call(plan, views)


def _list_call(plan: BackwardPlan, work: Address, views: dict[str, View], *, of_keys: bool) -> KernelCall:
    """List packed blocks; with those of keys, clear the gradients of rows past the last sequence."""
    problem, config = plan.problem, plan.config
    sizes = plan.key_sizes if of_keys else plan.query_sizes
    banded = config.HAS_RIGHT or config.HAS_LEFT
    return list_call(
        problem,
        work,
        config.BLOCK_N if of_keys else QUERY_BLOCK,
        together=rows_together(_streamed_bytes(problem, of_keys=of_keys), sizes.items_per_wave, banded=banded),
        of_keys=of_keys,
        cleared=("dq" if "dq" in views else None, None, "dk", "dv") if of_keys else (None, None, None, None),
    )


def _bound_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """How large keys and values are, for the units of a sum in fixed point."""
    problem = plan.problem
    arguments = {
        "k_ptr": Address("k", problem.dtype),
        "v_ptr": Address("v", problem.dtype),
        "bounds_ptr": plan.bounds,
        "cu_seqlens": index_address(views, "cu_seqlens_k"),
        "k_strides": _stride_units(views["k"]),
        "v_strides": _stride_units(views["v"]),
        "num_heads": problem.num_kv_heads,
        "seqlen_k": problem.seqlen_k,
        "BLOCK_N": BOUND_BLOCK_N,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": _power_of_two(problem.head_dim),
        "BLOCK_DV": _power_of_two(problem.head_dim_v),
        "PACKED": plan.config.IS_VARLEN,
    }
    heads = problem.batch * problem.num_kv_heads
    return KernelCall(bound_keys_kernel, (heads, int(BOUND_PARTS), 1), arguments)


def _power_of_two(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _prepare_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """Row statistics, and zeros into the accumulator."""
    problem, config = plan.problem, plan.config
    arguments = {
        "out_ptr": Address("out", problem.dtype),
        "dout_ptr": Address("dout", problem.dtype),
        "lse_ptr": Address("lse", torch.float32, aligned=False),
        "dlse_ptr": Address("dlse", torch.float32, aligned=False) if "dlse" in views else None,
        "stats_ptr": plan.stats,
        "units_ptr": plan.units,
        "dq_acc_ptr": plan.accumulator,
        "bounds_ptr": plan.bounds,
        "cu_seqlens": index_address(views, "cu_seqlens_q"),
        "out_strides": _stride_units(views["out"]),
        "dout_strides": _stride_units(views["dout"]),
        "num_heads": problem.num_heads,
        "group_size": problem.group_size,
        "seqlen_q": problem.seqlen_q,
        "total_q": problem.total_q,
        "batch": problem.batch,
        "num_items": plan.query_items,
        "BLOCK_M": config.BLOCK_M,
        "HEAD_DIM": problem.head_dim_v,
        "BLOCK_D": _power_of_two(problem.head_dim_v),
        "DQ_BLOCKS": dq_blocks(config),
        "PACKED": config.IS_VARLEN,
    }
    return KernelCall(prepare_rows_kernel, (plan.query_items * plan.key_sizes.row_tiles, 1, 1), arguments)


def _tiles(
    plan: BackwardPlan, views: dict[str, View], rows: dict[str, int], *, in_parts: bool
) -> dict[str, Tile | None]:
    """Descriptors of operands and gradients, by rows of a tile; in parts, of both column parts or None."""
    config, shapes = plan.config, shapes_of(plan.problem)
    shapes |= {"dq": shapes["q"], "dk": shapes["k"], "dv": shapes["v"]}
    shapes["dout"] = (*shapes["q"][:-1], plan.problem.head_dim_v)
    found: dict[str, Tile | None] = {}
    for name, block in rows.items():
        of_values = name in ("v", "dv", "dout")
        columns, rest = (config.DV, config.DV_REST) if of_values else (config.D, config.D_REST)
        found[f"{name}_desc"] = describe(name, views[name], shapes[name], block, columns)
        if in_parts:
            found[f"{name}_rest"] = describe(name, views[name], shapes[name], block, rest) if rest else None
    return found


def _key_gradient_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """dK, dV and, if not WIDE, the sums of dQ."""
    config = plan.config
    queries, keys = config.BLOCK_M, 64
    rows = {"q": queries, "dout": queries, "k": keys, "v": keys, "dk": keys, "dv": keys}
    arguments: dict[str, Any] = _tiles(plan, views, rows, in_parts=config.WIDE) | _shared(plan)
    arguments |= {
        "stats_desc": describe_flat(plan.stats, (2 * plan.num_rows,), [2 * config.BLOCK_M]),
        "counter_ptr": Address("counter", torch.int32, aligned=False),
        "work_ptr": plan.key_work,
        "sizes": plan.key_sizes,
    }
    if config.WIDE:
        return KernelCall(backward_wide_kernel, plan.key_grid, arguments)
    return KernelCall(backward_kernel, plan.key_grid, arguments | _sums(plan))


def _sums(plan: BackwardPlan) -> dict[str, Any]:
    """Where dQ is added up."""
    accumulator, units = plan.accumulator, plan.units
    assert accumulator is not None
    return {
        "dq_desc": describe_flat(accumulator, (plan.num_rows * plan.sums_width // 32, 32), [128, 32]),
        "units_desc": None if units is None else describe_flat(units, (plan.num_rows,), [plan.config.BLOCK_M]),
    }


def _shared(plan: BackwardPlan) -> dict[str, Any]:
    scale, softcap = plan.problem.scale, plan.problem.softcap
    return {
        "scale_log2": (scale if softcap is None else softcap) * LOG2E,
        "cap_scale": None if softcap is None else scale / softcap,
        "scale": scale,
        "C": plan.config,
    }


def _finish_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """DQ out of its accumulator."""
    problem, config = plan.problem, plan.config
    arguments = {
        "dq_acc_ptr": plan.accumulator,
        "units_ptr": plan.units,
        "dq_ptr": Address("dq", problem.dtype),
        "cu_seqlens": index_address(views, "cu_seqlens_q"),
        "scale": problem.scale,
        "dq_strides": _stride_units(views["dq"]),
        "num_heads": problem.num_heads,
        "seqlen_q": problem.seqlen_q,
        "batch": problem.batch,
        "num_items": plan.query_items,
        "BLOCK_M": config.BLOCK_M,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": plan.sums_width,
        "DQ_BLOCKS": dq_blocks(config),
        "PACKED": config.IS_VARLEN,
    }
    blocks = plan.key_sizes.row_tiles * dq_blocks(config)
    return KernelCall(finish_queries_kernel, (plan.query_items * blocks, 1, 1), arguments)


def _query_gradient_call(plan: BackwardPlan, views: dict[str, View]) -> KernelCall:
    """DQ alone, every row summed in order."""
    rows = {"q": 64, "dout": 64, "k": plan.config.BLOCK_N, "v": plan.config.BLOCK_N, "dq": 64}
    arguments: dict[str, Any] = _tiles(plan, views, rows, in_parts=True) | _shared(plan)
    arguments |= {
        "stats_ptr": Address("workspace", torch.float32, aligned=False),
        "work_ptr": plan.query_work,
        "sizes": plan.query_sizes,
    }
    return KernelCall(query_gradient_kernel, (plan.query_sizes.num_tiles, 1, 1), arguments)


def _sink_gradient(plan: BackwardPlan, sinks: Tensor | None, workspace: Tensor) -> Tensor | None:
    """Sum over rows of exp(sink - lse) * (dlse - delta), from the packed statistics."""
    if sinks is None:
        return None
    shape = (-1, plan.problem.num_heads, plan.key_sizes.row_tiles, 2, plan.config.BLOCK_M)
    rows = workspace[: 2 * plan.num_rows].view(shape)
    weight = torch.exp2(sinks.float().view(1, -1, 1, 1) * LOG2E - rows[:, :, :, 0])
    return -(weight * rows[:, :, :, 1]).sum((0, 2, 3)).to(sinks.dtype)


def _stride_units(view: View) -> tuple[int, int, int]:
    """Strides of (batch, head, row) in units of 16 bytes; those of dimensions of size 1 do not matter."""
    strides = view.strides
    batch, head, row = (0, strides[1], strides[0]) if len(strides) == 3 else strides[:3]
    return batch // STRIDE_UNIT, head // STRIDE_UNIT, row // STRIDE_UNIT
