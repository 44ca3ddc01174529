"""From canonical operands to kernels: everything but addresses is prepared once for a problem and its strides.

A call looks its pass up, makes the results and starts the kernels. Nothing here waits for the device, so a call can be
captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import (
    BOUND_BACKWARD,
    MAX_PASSES,
    Allocation,
    BoundPass,
    Launches,
    RawViews,
    View,
    named_views,
    on_device,
    raw_views,
)
from tilewise.backends.gpu.scratch import Places
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.triton import configs, passes
from tilewise.backends.triton.arguments import rows_allocation, stored_rows, workspace_rows
from tilewise.backends.triton.lists import list_words
from tilewise.backends.triton.pages import entries_by_page
from tilewise.backends.triton.planning import Plan, plan_for
from tilewise.backends.triton.short_calls import short_backward_calls
from tilewise.device import DeviceSpec
from tilewise.numerics import LN2, LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = [
    "BackwardPass",
    "ForwardPass",
    "backward_calls",
    "backward_pass",
    "bind_backward",
    "bind_forward",
    "forward_calls",
    "forward_pass",
    "result_allocations",
    "run_backward",
    "run_forward",
]

# In which order tensors are handed to the launches of a pass.
FORWARD_TENSORS = (*Operands._fields, "out", "lse", "workspace")
BACKWARD_GIVEN = (*Operands._fields, "out", "lse", "dout", "dlse")
BACKWARD_TENSORS = (
    *BACKWARD_GIVEN, "workspace", "dq", "dk", "dv", "dbias", "dk_pages", "dv_pages", "order", "page_ends",
)  # fmt: skip


class ForwardPass(NamedTuple):
    """A forward call with everything but addresses."""

    out: Allocation
    lse: Allocation
    workspace: Allocation | None
    launches: Launches


class BackwardPass(NamedTuple):
    """A backward call with everything but addresses; what is not wanted is None."""

    plan: Plan
    workspace: Allocation
    dq: Allocation | None
    dk: Allocation | None
    dv: Allocation | None
    dbias: Allocation | None
    dk_pages: Allocation | None
    dv_pages: Allocation | None
    launches: Launches


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    if problem.dropout > 0.0 or problem.has_sinks:
        operands = _ready(operands)
    result: tuple[Tensor, Tensor] = on_device(operands.q.get_device(), _forward, problem, operands)
    return result


def _forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    q = operands.q
    ready = forward_pass(problem, devices.of(q.device), q.get_device(), raw_views(operands))
    out, lse = ready.out.new(q), ready.lse.new(q)
    if problem.batch == 0 or problem.seqlen_q == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    workspace = None if ready.workspace is None else ready.workspace.new(q)
    ready.launches.run((*operands, out, lse, workspace))
    return out, lse


def _ready(operands: Operands) -> Operands:
    """Sinks side by side, and the seed on the device."""
    sinks, seed = operands.sinks, operands.seed
    if seed is not None:
        seed = seed.contiguous() if seed.device == operands.q.device else _filled(seed, operands.q.device)
    return operands._replace(sinks=None if sinks is None else sinks.contiguous(), seed=seed)


def _filled(seed: Tensor, where: torch.device) -> Tensor:
    """A seed from the host, with or without its origin. Fills, not a copy: they need no pinned memory, wait for
    nothing, and can be captured in a graph.
    """
    there = torch.empty(seed.shape, dtype=torch.int64, device=where)
    for slot, value in zip(there.view(-1), seed.reshape(-1).tolist(), strict=True):
        slot.fill_(value)
    return there


class TunableBoundPass(BoundPass):
    """One that steps back where tiles are overridden for an experiment."""

    __slots__ = ()

    def __call__(self, tensors: Sequence[Tensor | None], places: Places | None = None) -> list[Tensor] | None:
        """What was made, or None."""
        return super().__call__(tensors, places) if configs.overrides() is None else None


def bind_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> BoundPass | None:
    """See Binding."""
    if not _bindable(problem, operands.sinks):
        return None
    q, index = operands.q, operands.q.get_device()
    ready: ForwardPass = on_device(index, forward_pass, problem, devices.of(q.device), index, raw_views(operands))
    made = {"out": ready.out.in_layout(problem.layout), "lse": ready.lse, "workspace": ready.workspace}
    unread = ("workspace",) if want_lse else ("lse", "workspace")
    return TunableBoundPass(ready.launches, Operands._fields, made, index, unread=unread)


def _bindable(problem: AttentionProblem, sinks: Tensor | None) -> bool:
    """Whether a call does nothing but make results and launch: see run_forward and run_backward."""
    nothing = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
    scattered = sinks is not None and not sinks.is_contiguous()
    return not (nothing or scattered or problem.dropout > 0.0 or configs.overrides() is not None)


def forward_pass(problem: AttentionProblem, device: DeviceSpec, index: int, views: RawViews) -> ForwardPass:
    """The pass, prepared by the first call that needs it; tiles overridden for an experiment are not kept."""
    prepare = _kept_forward if configs.overrides() is None else _prepare_forward
    return prepare(problem, device, index, views)


def _prepare_forward(problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews) -> ForwardPass:
    views = named_views(Operands._fields, raw)
    made = result_allocations(problem, views)
    calls = forward_calls(problem, device, views | {name: allocation.view for name, allocation in made.items()})
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    elements = sum(passes.parts_size(plan)) + passes.forward_list_words(plan)
    # Room for the lse parts to end where vectors may begin, see passes.decode_calls.
    workspace = Allocation.contiguous((elements + 4,), torch.float32) if elements else None
    return ForwardPass(made["out"], made["lse"], workspace, Launches(calls, FORWARD_TENSORS, device, index))


def result_allocations(problem: AttentionProblem, views: dict[str, View]) -> dict[str, Allocation]:
    """What the forward makes: out and lse."""
    rows = (problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim_v)
    return {
        "out": rows_allocation(problem, views["q"]._replace(dtype=problem.dtype), *rows),
        "lse": Allocation.contiguous(problem.lse_shape, torch.float32),
    }


def forward_calls(problem: AttentionProblem, device: DeviceSpec, views: dict[str, View]) -> list[KernelCall]:
    """The kernels of a forward call."""
    if 0 in (problem.batch, problem.seqlen_q):
        return []
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    return passes.decode_calls(plan, views) if plan.num_splits > 0 else passes.forward_calls(plan, views)


_kept_forward = functools.lru_cache(maxsize=MAX_PASSES)(_prepare_forward)


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
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if problem.batch == 0 or problem.seqlen_q == 0:
        return _zero_gradients(problem, operands, wanted)
    if problem.dropout > 0.0 or problem.has_sinks:
        operands = _ready(operands)
    given = (*operands, out, lse, dout, dlse)
    gradients: Gradients = on_device(operands.q.get_device(), _backward, problem, operands, given, wanted)
    return gradients


def _backward(
    problem: AttentionProblem, operands: Operands, given: tuple[Tensor | None, ...], wanted: Wanted
) -> Gradients:
    q = operands.q
    ready = backward_pass(problem, devices.of(q.device), q.get_device(), raw_views(given), wanted)
    made = [None if allocation is None else allocation.new(q) for allocation in ready[1:8]]
    workspace, dq, dk, dv, dbias, dk_pages, dv_pages = made
    assert workspace is not None
    order, ends = _pages_in_order(problem, operands) if dk_pages is not None else (None, None)
    ready.launches.run((*given, *made, order, ends))
    if problem.seqlen_k == 0:
        for gradient in (dk, dv):
            if gradient is not None:
                gradient.zero_()
    return Gradients(
        dq=dq,
        dk=dk if dk_pages is None else dk_pages,
        dv=dv if dv_pages is None else dv_pages,
        dbias=None if dbias is None else _summed(dbias, operands),
        dsinks=_sink_gradient(ready.plan, operands, workspace) if wanted.dsinks else None,
    )


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> BoundPass | None:
    """See Binding; `given` in the order of BACKWARD_GIVEN."""
    sinks = given[BACKWARD_GIVEN.index("sinks")]
    if not _bindable(problem, sinks) or problem.page_size is not None or wanted.dbias or wanted.dsinks:
        return None
    index = q.get_device()
    views = raw_views(given)
    ready: BackwardPass = on_device(index, backward_pass, problem, devices.of(q.device), index, views, wanted)
    gradients = {"dq": ready.dq, "dk": ready.dk, "dv": ready.dv}
    made = {name: a.in_layout(problem.layout) for name, a in gradients.items() if a is not None}
    made["workspace"] = ready.workspace
    return TunableBoundPass(ready.launches, BOUND_BACKWARD, made, index, unread=("workspace",))


def _pages_in_order(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    assert problem.page_size is not None
    return entries_by_page(operands.block_table, operands.seqlens_k, operands.k.shape[0], problem.page_size)


def _summed(parts: Tensor, operands: Operands) -> Tensor:
    assert operands.bias is not None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(operands.bias.dtype)


def backward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, views: RawViews, wanted: Wanted
) -> BackwardPass:
    """The pass, prepared by the first call that needs it; tiles overridden for an experiment are not kept."""
    prepare = _kept_backward if configs.overrides() is None else _prepare_backward
    return prepare(problem, device, index, views, wanted)


def _prepare_backward(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wanted: Wanted
) -> BackwardPass:
    views = named_views((*Operands._fields, "out", "lse", "dout", "dlse"), raw)
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    return BackwardPass(
        plan=plan,
        workspace=Allocation.contiguous((2 * workspace_rows(plan, 0)[1] + list_words(plan),), torch.float32),
        **_gradient_allocations(plan, views, wanted),
        launches=Launches(backward_calls(problem, device, views, wanted), BACKWARD_TENSORS, device, index),
    )


_kept_backward = functools.lru_cache(maxsize=MAX_PASSES)(_prepare_backward)


def _gradient_allocations(plan: Plan, views: dict[str, View], wanted: Wanted) -> dict[str, Allocation | None]:
    problem = plan.problem
    made: dict[str, Allocation | None] = dict.fromkeys(("dq", "dk", "dv", "dbias", "dk_pages", "dv_pages"))
    if wanted.dq:
        made["dq"] = rows_allocation(
            problem, views["q"], problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim
        )
    if wanted.dk or wanted.dv:
        for name, dim in (("dk", problem.head_dim), ("dv", problem.head_dim_v)):
            if problem.page_size is None:
                made[name] = rows_allocation(
                    problem, views["k"], problem.num_kv_heads, problem.seqlen_k, problem.total_k, dim
                )
            else:
                made[name] = Allocation.contiguous(passes.page_rows_shape(plan, dim), torch.float32)
                num_pages = problem.total_k // problem.page_size
                shape = (num_pages, problem.page_size, problem.num_kv_heads, dim)
                made[f"{name}_pages"] = Allocation.contiguous(shape, problem.dtype)
    if wanted.dbias:
        shares, _ = passes.bias_shares(plan)
        assert problem.bias_shape is not None
        dtype = views["bias"].dtype if shares == 1 else torch.float32
        made["dbias"] = Allocation.contiguous((shares, *problem.bias_shape), dtype)
    return made


def backward_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], wanted: Wanted
) -> list[KernelCall]:
    """The kernels of a backward call."""
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    made = _gradient_allocations(plan, views, wanted)
    given = {name: allocation.view for name, allocation in made.items() if allocation is not None}
    short = short_backward_calls(plan, views, given)
    if short is not None:
        return short
    shared = passes.shared_arguments(plan, views)
    calls = [passes.stats_call(plan, views, given)]
    if "dk" in given:
        calls.append(passes.key_gradient_call(plan, shared, given["dk"], given["dv"]))
    if "dk_pages" in given:
        calls.append(passes.gather_pages_call(plan, views, "dk", given["dk_pages"], problem.head_dim))
        calls.append(passes.gather_pages_call(plan, views, "dv", given["dv_pages"], problem.head_dim_v))
    if "dq" in given:
        calls.append(passes.query_gradient_call(plan, shared, given["dq"]))
    if "dbias" in given:
        calls.append(passes.bias_gradient_call(plan, shared, given["dbias"]))
    return calls


def _sink_gradient(plan: Plan, operands: Operands, workspace: Tensor) -> Tensor:
    """-sum over rows of exp(sink - lse) * delta, in a fixed order."""
    assert operands.sinks is not None
    problem = plan.problem
    dense = problem.kind == "dense"
    packed = plan.traits.PACKED_Q
    length = problem.seqlen_q if dense else stored_rows(plan) if packed else problem.total_q
    shape = (2, problem.batch, problem.num_heads, -1) if dense else (2, problem.num_heads, -1)
    statistics = workspace[: 2 * workspace_rows(plan, 0)[1]]
    lse_unit, delta = statistics.view(shape)[..., :length]
    unit = 1.0 if plan.traits.TRANSFORMED else LN2
    weight = torch.exp2((operands.sinks.float().view(-1, 1) - lse_unit * unit) * LOG2E)
    total: Tensor = (weight * delta).sum((0, 2) if dense else 1)
    return -total.to(operands.sinks.dtype)


def _zero_gradients(problem: AttentionProblem, operands: Operands, wanted: Wanted) -> Gradients:
    q, k, v = (torch.zeros_like(t) for t in operands[:3])
    bias = operands.bias
    dbias = None if bias is None or problem.bias_shape is None else bias.new_zeros(problem.bias_shape)
    dsinks = None if operands.sinks is None else torch.zeros_like(operands.sinks)
    return Gradients(q, k, v, dbias if wanted.dbias else None, dsinks if wanted.dsinks else None)
