"""From canonical operands to kernels. Everything but addresses is prepared once per problem and strides.

A call looks up its pass, allocates the results and launches the kernels. Nothing here waits for the device, so calls
can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import (
    BACKWARD_GIVEN,
    HEADS_FIRST,
    MAX_PASSES,
    Allocation,
    Pass,
    Places,
    RawViews,
    View,
    Wish,
    named_views,
    pass_of,
    raw_views,
)
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.triton import configs, passes
from tilewise.backends.triton.arguments import list_words, rows_allocation, stored_rows, workspace_rows
from tilewise.backends.triton.pages import entries_by_page
from tilewise.backends.triton.planning import Plan, plan_for
from tilewise.device import DeviceSpec
from tilewise.numerics import LN2, LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = [
    "BackwardPass",
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

# Extra tensors of the backward of paged keys.
PAGE_ORDER = ("order", "page_ends")


class TunablePass(Pass):
    """A pass that declines while tiles are overridden for an experiment."""

    __slots__ = ()

    def __call__(self, tensors: Sequence[Tensor | None], places: Places | None = None) -> list[Tensor] | None:
        """The results, or None."""
        return super().__call__(tensors, places) if configs.overrides() is None else None


class BackwardPass(NamedTuple):
    """A backward call without its addresses."""

    plan: Plan
    kernels: Pass


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    if problem.dropout > 0.0 or problem.has_sinks:
        operands = _ready(operands)
    q = operands.q
    made = forward_pass(problem, devices.of(q.device), q.get_device(), raw_views(operands)).run(operands)
    out, lse = made["out"], made["lse"]
    if problem.batch == 0 or problem.seqlen_q == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    return out, lse


def _ready(operands: Operands) -> Operands:
    """Contiguous sinks, and the seed on the device."""
    sinks, seed = operands.sinks, operands.seed
    if seed is not None:
        seed = seed.contiguous() if seed.device == operands.q.device else _filled(seed, operands.q.device)
    return operands._replace(sinks=None if sinks is None else sinks.contiguous(), seed=seed)


def _filled(seed: Tensor, where: torch.device) -> Tensor:
    """A seed from the host, with or without its origin. Fill kernels instead of a copy: they need no pinned memory and
    no synchronisation, and can be captured in a graph.
    """
    there = torch.empty(seed.shape, dtype=torch.int64, device=where)
    for slot, value in zip(there.view(-1), seed.reshape(-1).tolist(), strict=True):
        slot.fill_(value)
    return there


def bind_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Binding."""
    if not _bindable(problem, operands.sinks):
        return None
    wish = Wish(in_layout=True, also=("lse",) if want_lse else ())
    return forward_pass(problem, devices.of(operands.q.device), operands.q.get_device(), raw_views(operands), wish)


def _bindable(problem: AttentionProblem, sinks: Tensor | None) -> bool:
    """Whether a call only allocates results and launches: see run_forward and run_backward."""
    nothing = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
    scattered = sinks is not None and not sinks.is_contiguous()
    return not (nothing or scattered or problem.dropout > 0.0 or configs.overrides() is not None)


def forward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, views: RawViews, wish: Wish = HEADS_FIRST
) -> Pass:
    """The pass, prepared by the first call that needs it. Not cached while tiles are overridden."""
    prepare = _kept_forward if configs.overrides() is None else _prepare_forward
    return prepare(problem, device, index, views, wish)


def _prepare_forward(problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wish: Wish) -> Pass:
    views = named_views(Operands._fields, raw)
    made: dict[str, Allocation | None] = dict(result_allocations(problem, views))
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    calls = forward_calls(problem, device, views | {name: a.view for name, a in made.items() if a is not None})
    elements = sum(passes.parts_size(plan)) + passes.forward_list_words(plan)
    # Padding that aligns the parts of out for vector loads, see passes.decode_calls.
    made["workspace"] = Allocation.contiguous((elements + 4,), torch.float32) if elements else None
    kind = TunablePass if wish.in_layout else Pass
    return pass_of(problem.layout, calls, Operands._fields, made, device, index, wish, kind=kind)


def result_allocations(problem: AttentionProblem, views: dict[str, View]) -> dict[str, Allocation]:
    """The results of the forward: out and lse."""
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
    q, paged = operands.q, problem.page_size is not None and (wanted.dk or wanted.dv)
    order = _pages_in_order(problem, operands) if paged else ()
    given = (dout, dlse, out, lse, *operands)
    wish = Wish(also=("workspace",) if wanted.dsinks else ())
    plan, kernels = backward_pass(problem, devices.of(q.device), q.get_device(), raw_views(given), wanted, wish)
    made = kernels.run((*given, *order))
    dk, dv = (made.get(f"{name}_pages", made.get(name)) for name in ("dk", "dv"))
    if problem.seqlen_k == 0:
        for gradient in (dk, dv):
            if gradient is not None:
                gradient.zero_()
    return Gradients(
        dq=made.get("dq"),
        dk=dk,
        dv=dv,
        dbias=_summed(made["dbias"], operands) if wanted.dbias else None,
        dsinks=_sink_gradient(plan, operands, made["workspace"]) if wanted.dsinks else None,
    )


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> Pass | None:
    """See Binding; `given` in the order of BACKWARD_GIVEN."""
    sinks = given[BACKWARD_GIVEN.index("sinks")]
    if not _bindable(problem, sinks) or problem.page_size is not None or wanted.dbias or wanted.dsinks:
        return None
    wish = Wish(in_layout=True, also=())
    return backward_pass(problem, devices.of(q.device), q.get_device(), raw_views(given), wanted, wish).kernels


def _pages_in_order(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    assert problem.page_size is not None
    return entries_by_page(operands.block_table, operands.seqlens_k, operands.k.shape[0], problem.page_size)


def _summed(parts: Tensor, operands: Operands) -> Tensor:
    assert operands.bias is not None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(operands.bias.dtype)


def backward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, views: RawViews, wanted: Wanted, wish: Wish = HEADS_FIRST
) -> BackwardPass:
    """The pass, prepared by the first call that needs it. Not cached while tiles are overridden."""
    prepare = _kept_backward if configs.overrides() is None else _prepare_backward
    return prepare(problem, device, index, views, wanted, wish)


def _prepare_backward(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wanted: Wanted, wish: Wish
) -> BackwardPass:
    views = named_views(BACKWARD_GIVEN, raw)
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    calls, made = backward_calls(problem, device, views, wanted), _gradient_allocations(plan, views, wanted)
    made["workspace"] = Allocation.contiguous((2 * workspace_rows(plan, 0)[1] + list_words(plan),), torch.float32)
    given = (*BACKWARD_GIVEN, *PAGE_ORDER)
    kind = TunablePass if wish.in_layout else Pass
    return BackwardPass(plan, pass_of(problem.layout, calls, given, made, device, index, wish, kind=kind))


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
