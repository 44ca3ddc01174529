"""The passes beyond the backward: tangents (tangent.py) and second derivatives (twice.py), and their kernel calls.

As in launch.py, a pass is prepared once per problem and strides; here also per set of tangents that are given.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise.backends.gpu import launching
from tilewise.backends.gpu.arguments import Views, result_allocations, single_address
from tilewise.backends.gpu.launching import Allocation, Pass, RawViews, View, named_views
from tilewise.backends.gpu.offline import operand_views
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.gpu.work_list import list_call, list_size
from tilewise.backends.triton import configs, launch, tangent, twice
from tilewise.backends.triton.arguments import (
    TWICE,
    box_descriptors,
    grid_argument,
    is_listed,
    key_rows,
    listed_heads,
    listed_tiles,
    query_rows,
    row_bytes,
    score_arguments,
    stat_descriptors,
    stat_rows,
    walked_together,
    work_address,
    workspace_words,
)
from tilewise.backends.triton.configs import Config, is_exact
from tilewise.backends.triton.planning import Along, Plan, plan_for
from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem

# The names of the tangents in a pass.
DOTS = tuple(f"dot_{name}" for name in Tangents._fields)
TANGENT_GIVEN = (*launching.INPUTS, *DOTS)
PLAIN, RESULTS = ("out", "lse"), ("out", "lse", "dot_out", "dot_lse")
TWICE_GIVEN = ("dout", "dlse", *RESULTS, *TANGENT_GIVEN)
KEYS = ("k", "v", "dot_k", "dot_v")


def forward_tangent(
    problem: AttentionProblem, operands: Operands, tangents: Tangents, known: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out', lse') of canonical operands and tangents; the first two are `known`, or computed."""
    if is_exact(problem):  # the tangents of scores that P is not recomputed from
        known = None
    given = (*_inputs(problem, operands), *tangents, *(known or (None, None)))
    made = launching.bound_to(tangent_pass, problem, given, operands.q).run(given)
    dot_out, dot_lse = launching.heads_first(problem, made["dot_out"]), made["dot_lse"]
    nothing = problem.batch == 0 or problem.seqlen_q == 0
    if nothing:
        dot_out, dot_lse = dot_out.zero_(), dot_lse.zero_()
    if known is not None:
        return *known, dot_out, dot_lse
    out, lse = launching.heads_first(problem, made["out"]), made["lse"]
    if nothing:
        out, lse = out.zero_(), lse.fill_(float("-inf"))
    return out, lse, dot_out, dot_lse


def _inputs(problem: AttentionProblem, operands: Operands) -> tuple[Tensor | None, ...]:
    return launch.ready(problem, operands)[: len(launching.INPUTS)]


def backward_twice(
    problem: AttentionProblem,
    operands: Operands,
    tangents: Tangents,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Gradients of sum(out' * dout) + sum(lse' * dlse) with respect to canonical operands."""
    if problem.batch == 0 or problem.seqlen_q == 0:
        return launch.zero_gradients(problem, operands, wanted)
    out, lse, dot_out, dot_lse = results
    dout, out, dot_out = (t if t.stride(-1) == 1 else t.contiguous() for t in (dout, out, dot_out))
    given = (dout, dlse, out, lse, dot_out, dot_lse, *_inputs(problem, operands), *tangents)
    order = launch.pages_in_order(problem, operands, wanted)
    made = launching.bound_to(twice_pass, problem, given, operands.q, wanted).run((*given, *order))
    dq, dk, dv = launch.row_gradients(problem, made)
    dsinks = None
    if wanted.dsinks:
        weight, delta, mean, rate = launch.sink_statistics(problem, operands, made["workspace"], TWICE)
        along = 0.0 if tangents.sinks is None else tangents.sinks.float().view(-1, 1)
        dsinks = launch.summed_over_rows(problem, operands, weight * (delta * (mean - along) - rate))
    dbias = launch.summed_shares(made["dbias"], operands) if wanted.dbias else None
    return Gradients(dq, dk, dv, dbias=dbias, dsinks=dsinks)


def tangent_pass(problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews) -> Pass:
    """The pass, prepared by the first call that needs it."""
    given = (*TANGENT_GIVEN, *PLAIN)
    views = named_views(given, raw)
    known = "out" in views
    results = {name: made for name, made in tangent_allocations(problem).items() if name not in views}
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    calls = tangent_calls(problem, device, views | {name: made.view for name, made in results.items()}, known)
    words = list_size(listed_tiles(plan, _tangent_pass(known))) if problem.kind == "varlen" else 0
    workspace = Allocation.contiguous((words,), torch.float32) if words else None
    made = launching.in_layout(problem, results) | {"workspace": workspace}
    return Pass(calls, given, made, device, index, read=RESULTS, copied=copied(views))


def copied(views: Views) -> dict[str, torch.dtype]:
    """Kernels read sinks and their tangents as adjacent elements."""
    return {n: views[n].dtype for n in ("sinks", "dot_sinks") if n in views and views[n].strides != (1,)}


def tangent_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The results, and their tangents in the same form."""
    plain = result_allocations(problem)
    return plain | {f"dot_{name}": allocation for name, allocation in plain.items()}


def _tangent_pass(known: bool) -> configs.Pass:
    return "tangent_only" if known else "tangent"


def tangent_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], known: bool
) -> list[KernelCall]:
    """The tangent kernel, preceded for packed sequences by the kernel that lists their tiles. `known`: out and lse are
    read, not written.
    """
    if 0 in (problem.batch, problem.seqlen_q):
        return []
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    direction = _tangent_pass(known)
    config = plan.config(direction)
    arguments = score_arguments(plan, views) | tangent_arguments(plan, views)
    arguments |= {name: query_rows(plan, name, views[name]) for name in ("out", "dot_out")}
    arguments |= {name: stat_rows(plan, name, views[name]) for name in ("lse", "dot_lse")}
    arguments |= {name: single_address(views, name) for name in ("sinks", "dot_sinks")}
    arguments |= box_descriptors(plan, arguments, config, ("q", "dot_q", "out", "dot_out"), KEYS)
    listed = problem.kind == "varlen"
    arguments |= {"work": launch.WORK if listed else None, "KNOWN": known}
    call = _over_queries(plan, tangent.tangent_kernel, arguments, config, direction)
    if not listed:
        return [call]
    return [list_call(problem, launch.WORK, config.block_m, together=walked_together(plan, direction)), call]


def twice_pass(problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wanted: Wanted) -> Pass:
    """The pass, prepared by the first call that needs it."""
    views = named_views(TWICE_GIVEN, raw)
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    gradients = launch.gradient_allocations(plan, views, wanted, "twice_dbias")
    workspace = Allocation.contiguous((workspace_words(plan, TWICE),), torch.float32)
    made = launching.in_layout(problem, gradients) | {"workspace": workspace}
    read = (*gradients, "workspace") if wanted.dsinks else tuple(gradients)
    given = (*TWICE_GIVEN, "order", "page_ends")
    calls = twice_calls(problem, device, views, wanted)
    return Pass(calls, given, made, device, index, read=read, copied=copied(views))


def twice_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], wanted: Wanted
) -> list[KernelCall]:
    """The kernels of a second derivative."""
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    allocations = launch.gradient_allocations(plan, views, wanted, "twice_dbias")
    given = {name: allocation.view for name, allocation in allocations.items()}
    shared = launch.shared_arguments(plan, views, TWICE) | tangent_arguments(plan, views)
    calls = [launch.stats_call(plan, views, given, TWICE)]
    if "dk" in given:
        calls.append(key_call(plan, shared, given["dk"], given["dv"]))
    if "dk_pages" in given:
        calls.append(launch.gather_pages_call(plan, views, "dk", given["dk_pages"], problem.head_dim))
        calls.append(launch.gather_pages_call(plan, views, "dv", given["dv_pages"], problem.head_dim_v))
    if "dq" in given:
        calls.append(query_call(plan, shared, given["dq"]))
    if "dbias" in given:
        kernel = twice.second_bias_kernel
        calls.append(launch.bias_gradient_call(plan, shared, given["dbias"], "twice_dbias", kernel))
    return calls


def key_call(plan: Plan, shared: dict[str, Any], dk: View, dv: View) -> KernelCall:
    """The kernel that writes dK and dV."""
    problem, config, direction = plan.problem, plan.config(TWICE.dkdv), TWICE.dkdv
    arguments = shared | launch.key_gradient_rows(problem, dk, dv) | {"work": work_address(plan, direction, TWICE)}
    arguments |= box_descriptors(plan, arguments, config, ("q", "dot_q", "dout"), KEYS)
    arguments |= stat_descriptors(plan, config, TWICE)
    if is_listed(plan, direction):
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, direction))
        tiles = listed_tiles(plan, direction)
    else:
        arguments["sizes"] = plan.sizes_streaming(config, problem.seqlen_q * row_bytes(plan, direction), 1)
        tiles = triton.cdiv(problem.seqlen_k, config.block_n) * problem.batch
    return launch.tiled(twice.second_key_kernel, tiles * problem.num_kv_heads, arguments, config)


def query_call(plan: Plan, shared: dict[str, Any], dq: View) -> KernelCall:
    """The kernel that writes dQ."""
    config, direction = plan.config(TWICE.dq), TWICE.dq
    arguments = shared | {"dq": query_rows(plan, "dq", dq), "work": work_address(plan, direction, TWICE)}
    arguments |= box_descriptors(plan, arguments, config, ("q", "dot_q", "dout"), KEYS)
    return _over_queries(plan, twice.second_query_kernel, arguments, config, direction)


def _over_queries(
    plan: Plan, kernel: Any, arguments: dict[str, Any], config: Config, direction: configs.Pass
) -> KernelCall:
    """A kernel whose programs own tiles of queries, from a list if `direction` has one."""
    problem = plan.problem
    if arguments["work"] is not None:
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, direction))
        tiles = listed_tiles(plan, direction)
    else:
        streamed = problem.seqlen_k * row_bytes(plan, direction) // problem.group_size
        arguments["sizes"] = plan.sizes_streaming(config, streamed, problem.group_size)
        tiles = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.batch
    return launch.tiled(kernel, tiles * problem.num_heads, arguments, config)


def tangent_arguments(plan: Plan, views: Views) -> dict[str, Any]:
    """The tangents of q, k, v and the bias, and which operands have one."""
    found: dict[str, Any] = {"dot_bias": grid_argument(views, "dot_bias")}
    found["dot_q"] = query_rows(plan, "dot_q", views["dot_q"]) if "dot_q" in views else None
    for name in ("dot_k", "dot_v"):
        found[name] = key_rows(plan.problem, name, views[name]) if name in views else None
    return found | {"A": Along(*(name in views for name in DOTS))}


def calls_of(
    problem: AttentionProblem, device: DeviceSpec, along: Collection[str] = Tangents._fields
) -> list[KernelCall]:
    """The kernel calls of a problem with contiguous operands, of which those in `along` have tangents, for compiling
    ahead of time.
    """
    views = operand_views(problem, packed_queries=problem.seqlen_q > 1)
    views |= {f"dot_{name}": views[name] for name in along if name in views}
    views |= {name: allocation.view for name, allocation in tangent_allocations(problem).items()}
    calls = [call for known in (False, True) for call in tangent_calls(problem, device, views, known)]
    wanted = Wanted(dbias=problem.bias_shape is not None, dsinks=problem.has_sinks)
    return calls + twice_calls(problem, device, views | {"dout": views["out"]}, wanted)
