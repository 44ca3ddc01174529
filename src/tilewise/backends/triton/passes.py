"""The kernel calls of the forward and backward passes, described without tensors (see gpu.symbols)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import triton

from tilewise.backends.gpu.launching import Allocation, View
from tilewise.backends.gpu.listing import list_call, list_size, rows_together
from tilewise.backends.gpu.symbols import Address, Fixed, KernelCall
from tilewise.backends.triton import backward as bwd
from tilewise.backends.triton import bias_gradient, decode, forward, pages, row_stats
from tilewise.backends.triton.arguments import (
    STAT_TILE,
    Views,
    box_descriptors,
    dense_rows,
    is_listed,
    key_descriptors,
    key_rows,
    listed_heads,
    listed_tiles,
    listing_arguments,
    packed_rows,
    page_rows,
    query_descriptors,
    query_rows,
    scale_arguments,
    score_arguments,
    single_address,
    stat_descriptors,
    stat_rows,
    stored_rows,
    work_address,
    workspace_rows,
)
from tilewise.backends.triton.configs import MAX_SPLITS, Config
from tilewise.backends.triton.planning import Plan
from tilewise.backends.triton.traits import of_rows, padded

__all__ = [
    "bias_gradient_call",
    "bias_shares",
    "decode_calls",
    "forward_calls",
    "forward_list_words",
    "gather_pages_call",
    "key_gradient_call",
    "page_rows_shape",
    "parts_size",
    "query_gradient_call",
    "shared_arguments",
    "stats_call",
]

# Where the list of the forward's tiles is.
WORK = Address("workspace", torch.int32)
STATS_ROWS = 64
PAGE_SLOTS = 16
# Partial results that a program merges at a time, bounded by registers.
COMBINED_ELEMENTS = 8192
# The limit of a grid's second and third dimension.
MAX_GRID_SIDE = 65535


def forward_calls(plan: Plan, views: Views) -> list[KernelCall]:
    """The forward kernel, preceded for packed sequences by the kernel that lists their tiles."""
    problem, config = plan.problem, plan.config("forward")
    arguments = score_arguments(plan, views) | scale_arguments(views) | _results(plan, views)
    boxes = box_descriptors(plan, arguments, config)
    boxed = boxes["q_desc"] is not None
    if config.boxes and not boxed:  # pointers take more registers than boxes: under the limit they spill
        config = replace(config, max_registers=None)
    streamed = key_descriptors(plan, arguments, config)
    arguments |= streamed | boxes if boxed else boxes | streamed
    # Queries loaded by pointers stay in shared memory: in registers, ptxas waits after every wgmma (C7515).
    arguments["HOLD_QUERIES"] = config.hold_queries and boxed
    traits = plan.traits
    arguments["JOINED"] = config.joined and boxed and not (traits.TRANSFORMED or traits.EXACT or traits.HAS_DROPOUT)
    arguments["PAIRED"] = config.paired
    if _takes_list(plan):
        return _listed_calls(plan, arguments, config)
    arguments["DIRECT"] = direct = _is_direct(plan, config)
    arguments |= {"work": None, "sizes": plan.sizes_streaming(config, _key_bytes(plan), problem.group_size)}
    tiles = triton.cdiv(plan.sizes.seqlen_q, config.block_m)
    call = _tiled(forward.forward_kernel, tiles * problem.num_heads * problem.batch, arguments, config)
    return [replace(call, grid=(tiles, problem.num_heads, problem.batch)) if direct else call]


def _listed_calls(plan: Plan, arguments: dict[str, Any], config: Config) -> list[KernelCall]:
    """The kernel that lists tiles, and the forward over (head of a wave, list index, wave of heads). A list too long
    for that grid is walked in one dimension, which costs divisions.
    """
    heads, tiles = listed_heads(plan, "forward"), listed_tiles(plan, "forward")
    waves = triton.cdiv(plan.problem.num_heads, heads)
    direct = max(tiles, waves) <= MAX_GRID_SIDE
    arguments |= {"work": WORK, "sizes": plan.sizes._replace(heads_per_wave=heads), "DIRECT": direct}
    call = _tiled(forward.forward_kernel, tiles * plan.problem.num_heads, arguments, config)
    return [_listing(plan, config, heads), replace(call, grid=(heads, tiles, waves)) if direct else call]


def _is_direct(plan: Plan, config: Config) -> bool:
    """Whether the forward's program ids are (tile, head, sequence), which saves divisions."""
    problem = plan.problem
    fits = max(problem.num_heads, problem.batch) <= MAX_GRID_SIDE
    return problem.kind == "dense" and config.heads_per_wave == 1 and fits


def _takes_list(plan: Plan) -> bool:
    """Whether the forward takes its tiles from a list. Packed queries of paged keys do not."""
    return plan.problem.kind == "varlen" and plan.num_splits == 0


def forward_list_words(plan: Plan) -> int:
    """32-bit words of the list of the forward's tiles."""
    return list_size(listed_tiles(plan, "forward")) if _takes_list(plan) else 0


def _listing(plan: Plan, config: Config, heads: int) -> KernelCall:
    """The kernel that lists the tiles of queries; `heads` heads are walked together."""
    problem = plan.problem
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    banded = plan.traits.HAS_LEFT or plan.traits.HAS_RIGHT
    together = rows_together(row_bytes, max(1, heads // problem.group_size), banded=banded)
    return list_call(problem, WORK, config.block_m, together=together, cleared=("out", "lse", None, None))


def _results(plan: Plan, views: Views) -> dict[str, Any]:
    return {
        "sinks": single_address(views, "sinks"),
        "out": query_rows(plan, "out", views["out"]),
        "lse": stat_rows(plan, "lse", views["lse"]),
    }


def _key_bytes(plan: Plan) -> int:
    """Bytes of K and V that one query head streams, in proportion to its group."""
    problem = plan.problem
    return problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize // problem.group_size


def parts_size(plan: Plan) -> tuple[int, int]:
    """Elements of the (out, lse) partial results of split decoding; none if a single split writes the result itself."""
    # The merge also fills packed rows past the last sequence.
    if plan.num_splits == 0 or (plan.num_splits == 1 and not plan.traits.PACKED_Q):
        return 0, 0
    rows = plan.num_splits * plan.sizes.total_q * plan.problem.num_heads
    return rows * plan.problem.head_dim_v, rows


def decode_calls(plan: Plan, views: Views) -> list[KernelCall]:
    """The split kernel and, if its results are partial, the one that merges them."""
    problem, config, splits = plan.problem, plan.config("decode"), plan.num_splits
    num_out, num_lse = parts_size(plan)
    # The lse parts come first. Their number is rounded up, so that vector loads of the out parts are aligned.
    lse_bytes = -(-num_lse // 4) * 16
    parts = {
        "out_parts": Address("workspace", torch.float32, offset=lse_bytes) if num_out else None,
        "lse_parts": Address("workspace", torch.float32) if num_lse else None,
    }
    arguments = score_arguments(plan, views) | scale_arguments(views) | _results(plan, views) | parts
    arguments |= {"num_splits": splits, "SPLIT": num_out > 0}
    rows = plan.sizes.seqlen_q * problem.group_size
    config = replace(config, block_m=max(config.block_m, triton.next_power_of_2(rows)))
    call = _tiled(decode.decode_kernel, splits * problem.num_kv_heads * problem.batch, arguments, config)
    return [call, _combine_call(plan, views, parts)] if num_out else [call]


def _combine_call(plan: Plan, views: Views, parts: dict[str, Any]) -> KernelCall:
    arguments = parts | {
        "out": query_rows(plan, "out", views["out"]),
        "lse": stat_rows(plan, "lse", views["lse"]),
        "cu_seqlens_q": single_address(views, "cu_seqlens_q"),
        "total_q": plan.sizes.total_q,
        # Packed tokens are addressed as one long sequence.
        "seqlen_q": plan.sizes.total_q if plan.traits.PACKED_Q else plan.sizes.seqlen_q,
        "num_heads": plan.problem.num_heads,
        "num_splits": plan.num_splits,
        "batch": plan.problem.batch,
        "T": replace(of_rows(plan.traits), HAS_SINKS=plan.traits.HAS_SINKS),
        "MAX_SPLITS": triton.next_power_of_2(max(MAX_SPLITS, plan.num_splits)),
        "BLOCK_SPLITS": COMBINED_ELEMENTS // plan.traits.BLOCK_DV,
    }
    programs = plan.sizes.total_q * plan.problem.num_heads
    return KernelCall(decode.combine_kernel, (programs, 1, 1), arguments, 4, 1)


def stats_call(plan: Plan, views: Views, made: Collection[str]) -> KernelCall:
    """The kernel that fills the workspace: lse in the unit of the scores, delta, and the lists of packed tiles that the
    kernels of the gradients in `made` need.
    """
    problem = plan.problem
    dense = problem.kind == "dense"
    num_rows, batch = (problem.seqlen_q, problem.batch) if dense else (problem.total_q, 1)
    num_stored = stored_rows(plan)

    def rows(name: str) -> Any:
        if dense:
            return dense_rows(problem, name, views[name], problem.num_heads)
        return packed_rows(name, views[name], problem.num_heads)

    block_m = STATS_ROWS if plan.traits.BLOCK_DV <= 256 else STATS_ROWS // 4
    arguments = {
        "out": rows("out"),
        "dout": rows("dout"),
        "lse": stat_rows(plan, "lse", views["lse"], packed=True),
        "dlse": stat_rows(plan, "dlse", views["dlse"], packed=True) if "dlse" in views else None,
        "lse_unit": workspace_rows(plan, 0, packed=True)[0],
        "delta": workspace_rows(plan, 1, packed=True)[0],
        "cu_seqlens_q": single_address(views, "cu_seqlens_q"),
        "num_rows": num_rows,
        "num_stored": num_stored,
        "num_heads": problem.num_heads,
        "batch": problem.batch,
        "T": of_rows(plan.traits),
        "BLOCK_M": block_m,
    } | listing_arguments(plan, made)
    programs = triton.cdiv(num_stored, block_m) * problem.num_heads * batch
    return KernelCall(row_stats.row_stats_kernel, (programs, 1, 1), arguments, 4, 1)


def shared_arguments(plan: Plan, views: Views) -> dict[str, Any]:
    """Arguments of every backward kernel that computes scores."""
    return score_arguments(plan, views) | {
        "dout": query_rows(plan, "dout", views["dout"]),
        "lse_unit": workspace_rows(plan, 0)[0],
        "delta": workspace_rows(plan, 1)[0],
    }


def key_gradient_call(plan: Plan, shared: dict[str, Any], dk: View, dv: View) -> KernelCall:
    """The kernel that writes dK and dV. For paged keys it writes one fp32 row per (sequence, key)."""
    problem, config = plan.problem, plan.config("dkdv")
    if STAT_TILE % config.block_m:
        raise ValueError(f"statistics are stored in tiles of {STAT_TILE} rows, not of {config.block_m}")
    width = problem.head_dim + problem.head_dim_v
    bytes_per_head = problem.seqlen_q * width * problem.dtype.itemsize * problem.group_size
    if problem.kind == "paged":
        rows = {n: dense_rows(problem, n, view, problem.num_kv_heads) for n, view in (("dk", dk), ("dv", dv))}
    else:
        rows = {n: key_rows(problem, n, view) for n, view in (("dk", dk), ("dv", dv))}
    arguments = (
        shared | rows | {"work": work_address(plan, "dkdv"), "EARLY_DP": config.early_dp, "JOINED": config.joined}
    )
    arguments |= query_descriptors(plan, shared, config) | stat_descriptors(plan, config)
    if is_listed(plan, "dkdv"):
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, "dkdv"))
        tiles = listed_tiles(plan, "dkdv")
    else:
        arguments["sizes"] = plan.sizes_streaming(config, bytes_per_head, 1)
        tiles = triton.cdiv(problem.seqlen_k, config.block_n) * problem.batch
    return _tiled(bwd.key_gradient_kernel, tiles * problem.num_kv_heads, arguments, config)


def page_rows_shape(plan: Plan, dim: int) -> tuple[int, int, int, int]:
    """Shape of the gradient of every key that a sequence reads, before pages are summed."""
    problem = plan.problem
    return problem.batch, problem.num_kv_heads, problem.seqlen_k, dim


def gather_pages_call(plan: Plan, views: Views, name: str, target: View, dim: int) -> KernelCall:
    """The kernel that adds the rows of gradient `name` (dk or dv) into `{name}_pages`."""
    problem = plan.problem
    page_size = problem.page_size
    assert page_size is not None
    rows = Allocation.contiguous(page_rows_shape(plan, dim), torch.float32).view
    arguments = {
        "rows": dense_rows(problem, name, rows, problem.num_kv_heads),
        "pages": page_rows(problem, f"{name}_pages", target),
        "order": Address("order", torch.int64, aligned=False),
        "page_ends": Address("page_ends", torch.int64, aligned=False),
        "seqlens_k": single_address(views, "seqlens_k"),
        "num_kv_heads": problem.num_kv_heads,
        "max_pages": problem.seqlen_k // page_size,
        "PAGE_SIZE": page_size,
        "BLOCK_S": min(PAGE_SLOTS, triton.next_power_of_2(page_size)),
        "DIM": dim,
        "BLOCK_D": padded(dim),
    }
    num_pages = problem.total_k // page_size
    return KernelCall(pages.gather_pages_kernel, (num_pages * problem.num_kv_heads, 1, 1), arguments, 4, 1)


def query_gradient_call(plan: Plan, shared: dict[str, Any], dq: View) -> KernelCall:
    """The kernel that writes dQ."""
    problem, config = plan.problem, plan.config("dq")
    arguments = shared | {"dq": query_rows(plan, "dq", dq), "work": work_address(plan, "dq"), "JOINED": config.joined}
    arguments |= key_descriptors(plan, shared, config)
    if is_listed(plan, "dq"):
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, "dq"))
        tiles = listed_tiles(plan, "dq")
    else:
        arguments["sizes"] = plan.sizes_streaming(config, _key_bytes(plan), problem.group_size)
        tiles = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.batch
    return _tiled(bwd.query_gradient_kernel, tiles * problem.num_heads, arguments, config)


def bias_shares(plan: Plan) -> tuple[int, int]:
    """(programs that share the work of one bias tile, bias tiles)."""
    shape, config = plan.problem.bias_shape, plan.config("dbias")
    assert shape is not None
    tiles = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    # Enough programs for two waves. The partial sums take at most that many times the bias.
    return max(1, min(64, 2 * plan.device.num_sms // max(1, tiles))), tiles


def bias_gradient_call(plan: Plan, shared: dict[str, Any], dbias: View) -> KernelCall:
    """The kernel that writes partial sums of dbias."""
    shape = plan.problem.bias_shape
    assert shape is not None
    shares, tiles = bias_shares(plan)
    arguments = shared | {
        "dbias": Address("dbias", dbias.dtype),
        # Broadcast dimensions are compiled in.
        "shape": tuple(Fixed(1) if size == 1 else size for size in shape),
        "num_shares": shares,
    }
    return _tiled(bias_gradient.bias_gradient_kernel, shares * tiles, arguments, plan.config("dbias"))


def _tiled(kernel: Any, programs: int, arguments: dict[str, Any], config: Config) -> KernelCall:
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    shape = (config.num_warps, config.num_stages, config.max_registers)
    return KernelCall(kernel, (programs, 1, 1), arguments | tiles, *shape)
