"""The calls of the backward of short sequences (short_backward.py), where it can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from tilewise.backends.gpu.launching import View
from tilewise.backends.gpu.symbols import KernelCall, Tile
from tilewise.backends.triton import short_backward as kernels
from tilewise.backends.triton.arguments import (
    STAT_TILE,
    Views,
    box_of,
    key_rows,
    query_rows,
    stat_descriptors,
    stat_rows,
    workspace_rows,
)
from tilewise.backends.triton.choosing import short_backward_of
from tilewise.backends.triton.configs import Config
from tilewise.backends.triton.planning import Plan

__all__ = ["short_backward_calls"]

# Programs along the second and third dimension of a grid.
MAX_GRID_SIDE = 65535


def short_backward_calls(plan: Plan, views: Views, given: Mapping[str, View]) -> list[KernelCall] | None:
    """The kernel of dQ and the row statistics, then that of dK and dV; None where other kernels are meant or
    needed: dQ is not wanted, lse has a gradient, or TMA cannot address the rows.
    """
    problem, tiles = plan.problem, short_backward_of(plan.problem, plan.device)
    fits = max(problem.num_heads, problem.batch) <= MAX_GRID_SIDE
    if tiles is None or "dq" not in given or "dlse" in views or not fits:
        return None
    if STAT_TILE % tiles.queries.block_m or tiles.queries.block_m % tiles.keys.block_m:
        raise ValueError(f"statistics of {tiles.queries.block_m} rows do not fill tiles of {tiles.keys.block_m}")
    queries = _boxes(plan, views, ("k", "v"), tiles.queries.block_n)
    keys = _boxes(plan, views, ("q", "dout"), tiles.keys.block_m)
    if None in (*queries.values(), *keys.values()):
        return None
    calls = [_query_call(plan, views, queries, given["dq"], tiles.queries)]
    return [*calls, _key_call(plan, views, keys, given, tiles.keys)] if "dk" in given else calls


def _boxes(plan: Plan, views: Views, names: tuple[str, str], block: int) -> dict[str, Tile | None]:
    """Descriptors of two tensors as (batch, heads, rows, columns)."""
    problem = plan.problem
    found: dict[str, Tile | None] = {}
    for name in names:
        of_keys = name in ("k", "v")
        rows = key_rows(problem, name, views[name]) if of_keys else query_rows(plan, name, views[name])
        heads, length = (problem.num_kv_heads, problem.seqlen_k) if of_keys else (problem.num_heads, problem.seqlen_q)
        found[f"{name}_desc"] = box_of(rows, problem.batch, heads, length, block, problem.head_dim)
    return found


def _query_call(plan: Plan, views: Views, boxes: dict[str, Any], dq: View, config: Config) -> KernelCall:
    problem = plan.problem
    arguments = _common(plan, config) | boxes
    arguments |= {name: query_rows(plan, name, view) for name, view in (*_of(views, "q", "out", "dout"), ("dq", dq))}
    arguments["lse"] = stat_rows(plan, "lse", views["lse"])
    arguments["MASKED"] = plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT or problem.seqlen_k % config.block_n != 0
    grid = (triton.cdiv(problem.seqlen_q, config.block_m), problem.num_heads, problem.batch)
    return _call(kernels.short_query_gradient_kernel, grid, arguments, config)


def _key_call(plan: Plan, views: Views, boxes: dict[str, Any], given: Mapping[str, View], config: Config) -> KernelCall:
    problem = plan.problem
    arguments = _common(plan, config) | boxes | stat_descriptors(plan, config)
    arguments |= {
        name: key_rows(problem, name, view) for name, view in (*_of(views, "k", "v"), *_of(given, "dk", "dv"))
    }
    grid = (triton.cdiv(problem.seqlen_k, config.block_n), problem.num_kv_heads, problem.batch)
    return _call(kernels.short_key_gradient_kernel, grid, arguments, config)


def _common(plan: Plan, config: Config) -> dict[str, Any]:
    """What both kernels are given."""
    stats = {name: workspace_rows(plan, index)[0] for index, name in enumerate(("lse_unit", "delta"))}
    shape = {"T": plan.traits, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return stats | shape | {"sizes": plan.sizes, "band": plan.band, "scalars": plan.scalars}


def _of(views: Views, *names: str) -> list[tuple[str, View]]:
    return [(name, views[name]) for name in names]


def _call(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], config: Config) -> KernelCall:
    return KernelCall(kernel, grid, arguments, config.num_warps, config.num_stages, config.max_registers)
