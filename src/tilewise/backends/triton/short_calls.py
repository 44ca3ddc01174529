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
from tilewise.backends.triton.traits import Rows

__all__ = ["short_backward_calls"]

# What has as many rows as there are keys.
KEYS = ("k", "v", "dk", "dv")
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
    rows = _rows(plan, {**{name: views[name] for name in ("q", "k", "v", "out", "dout")}, **given})
    if any(_box(plan, rows, name, tiles.queries.block_m) is None for name in ("q", "k", "v", "dout")):
        return None
    calls = [_query_call(plan, rows, views["lse"], tiles.queries)]
    return [*calls, _key_call(plan, rows, tiles.keys)] if "dk" in given else calls


def _rows(plan: Plan, views: Views) -> dict[str, Rows]:
    """The tensors as rows, by name."""
    return {n: key_rows(plan.problem, n, v) if n in KEYS else query_rows(plan, n, v) for n, v in views.items()}


def _box(plan: Plan, rows: Mapping[str, Rows], name: str, block: int) -> Tile | None:
    """The descriptor of a tensor as (batch, heads, rows, columns)."""
    problem = plan.problem
    of_queries, of_keys = (problem.num_heads, problem.seqlen_q), (problem.num_kv_heads, problem.seqlen_k)
    heads, length = of_keys if name in KEYS else of_queries
    return box_of(rows[name], problem.batch, heads, length, block, problem.head_dim)


def _boxes(
    plan: Plan, rows: Mapping[str, Rows], names: tuple[str, ...], block: int, *, on: bool = True
) -> dict[str, Tile | None]:
    return {f"{name}_desc": _box(plan, rows, name, block) if on else None for name in names}


def _query_call(plan: Plan, rows: Mapping[str, Rows], lse: View, config: Config) -> KernelCall:
    problem, own = plan.problem, ("q", "dout", "dq")
    arguments = _common(plan, config) | {name: rows[name] for name in (*own, "out")}
    arguments |= _boxes(plan, rows, ("k", "v"), config.block_n)
    arguments |= _boxes(plan, rows, own, config.block_m, on=config.own_boxes)
    arguments |= {"lse": stat_rows(plan, "lse", lse), "HOLD": config.hold_queries}
    arguments["MASKED"] = plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT or problem.seqlen_k % config.block_n != 0
    grid = (triton.cdiv(problem.seqlen_q, config.block_m), problem.num_heads, problem.batch)
    return _call(kernels.short_query_gradient_kernel, grid, arguments, config)


def _key_call(plan: Plan, rows: Mapping[str, Rows], config: Config) -> KernelCall:
    problem, own = plan.problem, ("k", "v", "dk", "dv")
    arguments = _common(plan, config) | {name: rows[name] for name in own} | stat_descriptors(plan, config)
    arguments |= _boxes(plan, rows, ("q", "dout"), config.block_m)
    arguments |= _boxes(plan, rows, own, config.block_n, on=config.own_boxes)
    arguments["HOLD"] = config.hold_keys
    grid = (triton.cdiv(problem.seqlen_k, config.block_n), problem.num_kv_heads, problem.batch)
    return _call(kernels.short_key_gradient_kernel, grid, arguments, config)


def _common(plan: Plan, config: Config) -> dict[str, Any]:
    """What both kernels are given."""
    stats = {name: workspace_rows(plan, index)[0] for index, name in enumerate(("lse_unit", "delta"))}
    shape = {"T": plan.traits, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return stats | shape | {"sizes": plan.sizes, "band": plan.band, "scalars": plan.scalars}


def _call(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], config: Config) -> KernelCall:
    return KernelCall(kernel, grid, arguments, config.num_warps, config.num_stages, config.max_registers)
