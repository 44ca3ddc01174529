"""Host side of shared prefixes: how rows and keys are split, and the prepared pass.

Measurements behind the constants are in bench/results/triton-tiles.csv, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.launching import MAX_PASSES, Allocation, Pass, RawViews, named_views, raw_views
from tilewise.backends.gpu.symbols import Address, KernelCall, Tile, renamed
from tilewise.backends.triton.arguments import Views, packed_rows, scale_arguments, score_arguments, single_address
from tilewise.backends.triton.configs import Config
from tilewise.backends.triton.planning import Plan, plan_for
from tilewise.backends.triton.prefix import merge_prefix_kernel, prefix_kernel
from tilewise.backends.triton.traits import Rows, of_rows
from tilewise.device import DeviceSpec
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = ["attend_prefixes", "bind_after", "bind_prefixes", "num_splits", "prefix_calls"]

# The results that are updated, in the order in which tensors are given.
RESULTS = ("rows", "out", "lse")
GIVEN = (*Operands._fields, *RESULTS)
# The tensors of a call with a hint, after its operands, and their names in this pass.
HINT = ("prefix_table", "prefix_seqlens", "prefix_starts", "rows", "block_table", "seqlens_k")
RENAMED = {
    "block_table": "prefix_table", "seqlens_k": "prefix_seqlens", "cu_seqlens_q": "prefix_starts",
    "workspace": "prefix_parts",
}  # fmt: skip
# The batch's own tables, which such a call does not read.
UNUSED = {"block_table": "whole_table", "seqlens_k": "whole_seqlens"}
# The score arguments that the prefix kernel takes.
SCORED = ("q", "k", "v", "lengths", "sizes", "band", "scalars", "T")
# Programs per SM and the maximum number of splits. The merge reads the parts of all splits, so one program per SM wins.
PROGRAMS, MAX_SPLITS = 1, 32
# Splits that a warp merges at a time. One (row, head) pair per program is fastest.
MERGED_SPLITS = 8
# Up to JOINED_SPLITS splits of rows up to JOINED_COLUMNS wide are merged by the program that finishes a tile's last
# split. That saves a launch on the host but takes the device longer, with fewer programs at work. So it is used only
# outside CUDA graphs, where the device waits for the host: prefixes with at most QUICK_PRODUCTS, and own keys of at
# most QUICK_BYTES.
JOINED_SPLITS, JOINED_COLUMNS = 4, 128
QUICK_PRODUCTS, QUICK_BYTES = 1 << 30, 1 << 25


class PrefixPass(Pass):
    """The pass with a separate merge kernel; `joined` makes the other one."""

    __slots__ = ("joined", "problem")

    joined: Callable[[], Pass]
    problem: AttentionProblem


def attend_prefixes(
    problem: AttentionProblem, operands: Operands, num_rows: int, rows: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge what the `num_rows` rows of all groups see of their prefixes into `out` and `lse`, which hold the results
    over their own keys: see tilewise.cascade. Groups are the sequences of problem and operands.
    """
    bind_prefixes(problem, operands, num_rows, rows, out, lse).run((*operands, rows, out, lse))


def bind_prefixes(
    problem: AttentionProblem, operands: Operands, num_rows: int, rows: Tensor | None, out: Tensor, lse: Tensor
) -> PrefixPass:
    """`attend_prefixes` bound to tensors with such strides, in this order."""
    q, views = operands.q, raw_views((*operands, rows, out, lse))
    found = prefix_pass(problem, num_rows, devices.of(q.device), q.get_device(), views, joined=False)
    assert isinstance(found, PrefixPass)
    return found


def bind_after(own: Pass, prefixes: PrefixPass, count: int, unread: Sequence[str], problem: AttentionProblem) -> Pass:
    """Both passes in one, the own keys (`problem`) first. Takes the first `count` operands and the tensors of the hint,
    which has the tables of both. `unread` are results that the caller does not want.
    """
    apart = _after(own, prefixes, count, unread)
    if not is_quick(problem, prefixes.problem):
        return apart
    both = _after(own, prefixes.joined(), count, unread)
    both.captured = apart
    return both


def is_quick(own: AttentionProblem, prefixes: AttentionProblem) -> bool:
    """Whether the device finishes a call before the host has queued the next one."""
    width = prefixes.head_dim + prefixes.head_dim_v
    products = prefixes.batch * prefixes.seqlen_q * prefixes.num_heads * prefixes.seqlen_k * width
    read = own.batch * own.seqlen_k * own.num_kv_heads * width * (1 if own.fp8 else own.dtype.itemsize)
    return products <= QUICK_PRODUCTS and read <= QUICK_BYTES


def _after(own: Pass, prefixes: Pass, count: int, unread: Sequence[str]) -> Pass:
    given = (*[UNUSED.get(name, name) for name in Operands._fields[:count]], *HINT)
    calls = [renamed(call, RENAMED) for call in prefixes.calls]
    made = {RENAMED[name]: allocation for name, allocation in prefixes.allocations.items()}
    hidden = (*unread, *[n for n in own.allocations if n not in RESULTS], *made)
    # Kernels on one stream run in order, so both passes can share the counters.
    return own.followed_by(prefixes, calls, given, made, hidden)


@functools.lru_cache(maxsize=MAX_PASSES)
def prefix_pass(
    problem: AttentionProblem, num_rows: int, device: DeviceSpec, index: int, raw: RawViews, *, joined: bool
) -> Pass:
    """The pass, prepared by the first call that needs it."""
    splits = num_splits(problem, num_rows, device)
    words = splits * num_rows * problem.num_heads * (problem.head_dim_v + 1) + 4
    made = {"workspace": Allocation.contiguous((words,), torch.float32)}
    calls = prefix_calls(problem, num_rows, device, named_views(GIVEN, raw), joined=joined)
    counters = problem.batch * problem.num_kv_heads * _blocks(problem, device)
    kind = Pass if joined else PrefixPass
    found = kind(calls, GIVEN, made, device, index, num_counters=counters, unread=("workspace",))
    if isinstance(found, PrefixPass):
        found.problem = problem
        found.joined = functools.partial(prefix_pass, problem, num_rows, device, index, raw, joined=True)
    return found


def _plan(problem: AttentionProblem, device: DeviceSpec) -> tuple[Plan, Config]:
    plan = plan_for(problem, device, packed_q=True)
    return plan, plan.config("forward")


def _blocks(problem: AttentionProblem, device: DeviceSpec) -> int:
    """The most row tiles a group may have, for each K/V head."""
    return -(-problem.seqlen_q * problem.group_size // _plan(problem, device)[1].block_m)


def num_splits(problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> int:
    """Into how many splits the keys of every prefix are cut, so that all SMs have work."""
    _, config = _plan(problem, device)
    tiles = -(-problem.seqlen_k // config.block_n)
    longest = _blocks(problem, device)
    blocks = min(longest * problem.batch, num_rows * problem.group_size // config.block_m + problem.batch)
    return max(1, min(MAX_SPLITS, tiles, PROGRAMS * device.num_sms // max(1, blocks * problem.num_kv_heads)))


def prefix_calls(
    problem: AttentionProblem, num_rows: int, device: DeviceSpec, views: Views, *, joined: bool
) -> list[KernelCall]:
    """The prefix kernel, and the merge kernel unless the merge is joined. `views` are those of the operands, `out`,
    `lse` and maybe `rows`.
    """
    plan, config = _plan(problem, device)
    splits, heads = num_splits(problem, num_rows, device), problem.num_heads
    joined, lse = joined and splits <= JOINED_SPLITS and problem.head_dim_v <= JOINED_COLUMNS, views["lse"]
    # The lse parts come first; the out parts start at a multiple of 16 bytes for vector loads.
    shared: dict[str, Any] = {
        "rows": single_address(views, "rows"),
        "out_parts": Address("workspace", torch.float32, offset=-(-splits * num_rows * heads // 4) * 16),
        "lse_parts": Address("workspace", torch.float32),
        "num_rows": num_rows,
        "num_splits": splits,
    }
    results = {
        "out": packed_rows("out", views["out"], heads),
        "lse": Rows(single_address(views, "lse"), 0, *lse.strides),
    }
    scored = score_arguments(plan, views) | scale_arguments(views)
    blocks = _blocks(problem, device)
    attended = shared | {name: scored[name] for name in (*SCORED, "k_scale", "v_scale")}
    attended |= _descriptors(plan, scored, config)
    attended |= results if joined else dict.fromkeys(results)
    attended |= {
        "counters": Address("counter", torch.int32, aligned=False) if joined else None,
        "num_blocks": blocks,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "MAX_SPLITS": JOINED_SPLITS,
    }
    merged = (shared | results) | {
        "num_heads": heads,
        "T": of_rows(plan.traits),
        "MAX_SPLITS": MAX_SPLITS,
        "BLOCK_SPLITS": MERGED_SPLITS,
    }
    programs = blocks * splits * problem.num_kv_heads * problem.batch
    attend = KernelCall(prefix_kernel, (programs, 1, 1), attended, config.num_warps, config.num_stages)
    return [attend] if joined else [attend, KernelCall(merge_prefix_kernel, (num_rows * heads, 1, 1), merged, 1, 1)]


def _descriptors(plan: Plan, scored: dict[str, Any], config: Config) -> dict[str, Any]:
    """Descriptors of K and V and the rows of their matrices per page, or of neither."""
    problem = plan.problem
    whole = (
        plan.device.has_tma and plan.is_unpadded and not problem.fp8 and (problem.page_size or 0) % config.block_n == 0
    )
    dims = {"k": problem.head_dim, "v": problem.head_dim_v}
    found = {name: _page_matrix(problem, scored[name], config.block_n, dim) for name, dim in dims.items() if whole}
    if not whole or None in found.values():
        return {"k_desc": None, "v_desc": None, "page_rows": (0, 0)}
    tiles, page_rows = zip(*found.values(), strict=True)
    return {"k_desc": tiles[0], "v_desc": tiles[1], "page_rows": page_rows}


def _page_matrix(problem: AttentionProblem, rows: Rows, block: int, dim: int) -> tuple[Tile, int] | None:
    """All pages as one matrix, heads side by side, and its rows per page. None if TMA cannot address it."""
    if not rows.ptr.aligned or problem.page_size is None:
        return None
    page, head, row = (stride.value for stride in (rows.stride_batch, rows.stride_head, rows.stride_row))
    if row <= 0 or page % row or head * (problem.num_kv_heads - 1) + dim > row:
        return None
    per_page = page // row
    height = (problem.total_k // problem.page_size - 1) * per_page + problem.page_size
    return (Tile(rows.ptr, (height, row), (row, 1), (block, dim)), per_page) if height < 2**31 else None
