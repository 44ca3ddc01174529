"""Shared prefixes: attends the rows of a group of sequences to the pages that all of them start with, split over
programs, then merges with each row's result over its own keys.

Grid of the first kernel: (tile of rows, split, K/V head, group), tiles fastest, so that concurrent programs read the
same keys. A row is a (token, head of a K/V head's group) pair: all query heads of a K/V head share its tiles. Few
splits are merged with the rows' own results by the program that finishes a tile's last split; many are merged by a
separate kernel with more programs. Both merge split by split in the order of the keys, so results are repeatable.

The host's side is below the kernels. Measurements behind the constants are in bench/results/triton-tiles.csv, by name.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu import launching
from tilewise.backends.gpu.arguments import Views, single_address
from tilewise.backends.gpu.launching import Allocation, Pass, RawViews, named_views, raw_views
from tilewise.backends.gpu.records import QueryTile, Rows, Source, Stretch
from tilewise.backends.gpu.symbols import Address, KernelCall, renamed
from tilewise.backends.triton.arguments import packed_rows, page_box, score_arguments
from tilewise.backends.triton.configs import Config
from tilewise.backends.triton.forward import attend, empty_accumulator, finish, initial_state, load_query_rows
from tilewise.backends.triton.planning import Plan, of_rows, plan_for
from tilewise.backends.triton.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    box_place,
    key_base,
    key_span,
    page_table,
    query_span,
    score_terms,
)
from tilewise.backends.triton.quantised import load_query_columns, scaling
from tilewise.device import DeviceSpec
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

# What the last program of a tile merges at a time, bounded by registers.
SPLITS_AT_ONCE, MERGED_ROWS = tl.constexpr(4), tl.constexpr(16)


@triton.jit(do_not_specialize=["sizes", "window", "scalars", "num_rows", "num_blocks", "num_splits"])
def prefix_kernel(
    q, k, v, scales, k_desc, v_desc, rows, out, lse, out_parts, lse_parts, counters, lengths, paging,
    sizes, window, scalars, num_rows, num_blocks, num_splits,
    T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Partial (out, lse) of a tile of a group's rows over one split of its prefix, as (split, row, head). `rows`
    indexes rows of q, group after group; None means its first rows. With `counters`, which are zero before and after,
    the program that finishes the last split of a tile merges all its splits into `out` and `lse`.
    """
    num_kv_heads = sizes.num_heads // T.GROUP_SIZE
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(0) // num_blocks % num_splits
    kv_head = tl.program_id(0) // num_blocks // num_splits % num_kv_heads
    group = tl.program_id(0) // num_blocks // num_splits // num_kv_heads
    start, count = query_span(lengths, sizes, group, T)
    if block * BLOCK_M >= count * T.GROUP_SIZE:
        return
    _, seqlen_k = key_span(lengths, sizes, group, T)
    place_in_group = block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_idx = place_in_group // T.GROUP_SIZE
    head = kv_head * T.GROUP_SIZE + place_in_group % T.GROUP_SIZE
    own = QueryTile(block * BLOCK_M, m_idx, head, group)
    row_ok = m_idx < count
    token = start + m_idx
    row = token
    if rows is not None:
        row = tl.load(rows + token, mask=row_ok, other=0)
    q_rows = q.ptr + head.to(tl.int64) * q.stride_head + row.to(tl.int64) * q.stride_row
    table = page_table(paging, group, T)
    key_place = box_place(group, kv_head, start, seqlen_k, False)
    k_base, v_base = key_base(k, group, kv_head, start, T), key_base(v, group, kv_head, start, T)
    k_source = Source(k, k_base, table, k_desc, key_place, scaling(scales.k, group, kv_head, T))
    v_source = Source(v, v_base, table, v_desc, key_place, scaling(scales.v, group, kv_head, T))
    if T.FP8:
        q_tile = load_query_columns(None, q_rows, group, head, m_idx, row_ok, T)
    else:
        q_tile = load_query_rows(q_rows, row_ok, T)
    row_terms = score_terms(None, group, head[:, None], m_idx[:, None], count, T)
    row_max, row_sum = initial_state(None, head, False, scalars, BLOCK_M, T)
    tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    share = (tiles + num_splits - 1) // num_splits * BLOCK_N
    begin = tl.minimum(split * share, seqlen_k)
    end = tl.minimum(begin + share, seqlen_k)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = attend(
        empty_accumulator(BLOCK_M, T), row_max, row_sum, q_tile, k_source, v_source, own, row_terms,
        scalars, window, count, seqlen_k, Stretch(begin, whole, whole, whole), False, BLOCK_N, T
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, k_source, v_source, own, row_terms, scalars, window, count,
        seqlen_k, Stretch(whole, whole, whole, end), True, BLOCK_N, T
    )  # fmt: skip
    result, lse_rows = finish(acc, row_max, row_sum, scalars, T)
    dv_idx = tl.arange(0, T.BLOCK_DV)[None, :]
    part = (split * num_rows + token).to(tl.int64) * sizes.num_heads + head
    tl.store(out_parts + part[:, None] * T.HEAD_DIM_V + dv_idx, result, mask=row_ok[:, None] & (dv_idx < T.HEAD_DIM_V))
    tl.store(lse_parts + part, lse_rows, mask=row_ok)
    if counters is not None:
        counter = counters + (group * num_kv_heads + kv_head) * num_blocks + block
        tl.debug_barrier()  # all threads' parts are written before one of them signals it
        if tl.atomic_add(counter, 1) == num_splits - 1:
            tl.store(counter, 0)
            # Fewer rows at a time than were attended, to limit registers.
            for place in tl.range(block * BLOCK_M, (block + 1) * BLOCK_M, MERGED_ROWS):
                merge_pairs(
                    rows, out, lse, out_parts, lse_parts, start, count, place + tl.arange(0, MERGED_ROWS), kv_head,
                    sizes.num_heads, num_rows, num_splits, T, MAX_SPLITS
                )  # fmt: skip


@triton.jit
def merge_pairs(
    rows, out, lse, out_parts, lse_parts, start, count, place, kv_head, num_heads, num_rows, num_splits,
    T: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of these (row, head) pairs of a group into their results over their own keys. Like
    `merge_prefix_kernel`, which takes one pair per program and several splits at a time.
    """
    m_idx = place // T.GROUP_SIZE
    head = kv_head * T.GROUP_SIZE + place % T.GROUP_SIZE
    row_ok = m_idx < count
    row = start + m_idx
    first = row.to(tl.int64) * num_heads + head
    step = tl.cast(num_rows, tl.int64) * num_heads
    if rows is not None:
        row = tl.load(rows + row, mask=row_ok, other=0)
    every = tl.arange(0, MAX_SPLITS)[:, None]
    there = (every < num_splits) & row_ok[None, :]
    # Other programs wrote these: load them from L2, like all parts.
    logs = tl.load(lse_parts + every * step + first[None, :], mask=there, other=NEG_INF, cache_modifier=".cg")
    lse_rows = lse.ptr + head * lse.stride_head + row.to(tl.int64) * lse.stride_row
    own_log = tl.load(lse_rows, mask=row_ok, other=NEG_INF)
    top = tl.maximum(tl.max(logs, 0), own_log)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    own_weight = tl.exp2((own_log - anchor) * LOG2E)
    total = own_weight + tl.sum(tl.exp2((logs - anchor[None, :]) * LOG2E), 0)
    d_idx = tl.arange(0, T.BLOCK_DV)[None, :]
    ok = row_ok[:, None] & (d_idx < T.HEAD_DIM_V)
    here = out.ptr + (head * out.stride_head + row.to(tl.int64) * out.stride_row)[:, None] + d_idx
    own = tl.load(here, mask=ok, other=0.0).to(tl.float32)
    acc = tl.where((own_weight != 0.0)[:, None], own, 0.0) * own_weight[:, None]
    for begin in tl.range(0, num_splits, SPLITS_AT_ONCE):
        for i in tl.static_range(SPLITS_AT_ONCE):
            here_ok = row_ok & (begin + i < num_splits)
            part = (begin + i) * step + first
            log = tl.load(lse_parts + part, mask=here_ok, other=NEG_INF, cache_modifier=".cg")
            weight = tl.exp2((log - anchor) * LOG2E)[:, None]
            places = out_parts + part[:, None] * T.HEAD_DIM_V + d_idx
            # Loaded unconditionally: a load that depended on the weights would wait twice.
            values = tl.load(places, mask=here_ok[:, None] & ok, other=0.0, cache_modifier=".cg")
            acc += tl.where(weight != 0.0, values, 0.0) * weight
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    tl.debug_barrier()  # every warp has read a row's own lse before one of them writes it
    tl.store(here, result.to(out.ptr.dtype.element_ty), mask=ok)
    tl.store(lse_rows, tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2), mask=row_ok)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_splits"])
def merge_prefix_kernel(
    out, lse, out_parts, lse_parts, rows, num_rows, num_heads, num_splits,
    T: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a (row, head) pair into its result over its own keys. Grid: row * num_heads.

    Parts without weight are selected away, because 0 * NaN is NaN.
    """
    pair = tl.program_id(0).to(tl.int64)
    head = pair % num_heads
    row = pair // num_heads
    if rows is not None:
        row = tl.load(rows + row)
    pairs = tl.cast(num_rows, tl.int64) * num_heads
    every = tl.arange(0, MAX_SPLITS)
    logs = tl.load(lse_parts + every * pairs + pair, mask=every < num_splits, other=NEG_INF)
    lse_row = lse.ptr + head * lse.stride_head + row * lse.stride_row
    own_log = tl.load(lse_row)
    top = tl.maximum(tl.max(logs, 0), own_log)
    anchor = tl.where(top == NEG_INF, 0.0, top)
    own_weight = tl.exp2((own_log - anchor) * LOG2E)
    total = own_weight + tl.sum(tl.exp2((logs - anchor) * LOG2E), 0)
    d_idx = tl.arange(0, T.BLOCK_DV)
    column_ok = d_idx < T.HEAD_DIM_V
    here = out.ptr + head * out.stride_head + row * out.stride_row + d_idx
    own = tl.load(here, mask=column_ok, other=0.0).to(tl.float32)
    acc = tl.where(own_weight != 0.0, own, 0.0) * own_weight
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        part = split * pairs + pair
        logs_here = tl.load(lse_parts + part, mask=split < num_splits, other=NEG_INF)
        weights = tl.exp2((logs_here - anchor) * LOG2E)
        places = out_parts + part[:, None] * T.HEAD_DIM_V + d_idx[None, :]
        values = tl.load(places, mask=(weights != 0.0)[:, None] & column_ok[None, :], other=0.0)
        acc += tl.sum(values * weights[:, None], 0)
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)
    tl.store(here, result.to(out.ptr.dtype.element_ty), mask=column_ok)
    tl.store(lse_row, tl.where(empty, NEG_INF, anchor + tl.log2(tl.where(empty, 1.0, total)) * LN2))


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
SCORED = ("q", "k", "v", "scales", "lengths", "paging", "sizes", "window", "scalars", "T")
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
    found = launching.kept(prefix_pass, problem, num_rows, devices.of(q.device), q.get_device(), views, False)
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
    read = [name for name in own.allocations if name in RESULTS and name not in unread]
    # Kernels on one stream run in order, so both passes can share the counters.
    return own.followed_by(prefixes, calls, given, made, read)


def prefix_pass(
    problem: AttentionProblem, num_rows: int, device: DeviceSpec, index: int, raw: RawViews, joined: bool
) -> Pass:
    """The pass, prepared by the first call that needs it."""
    splits = num_splits(problem, num_rows, device)
    words = splits * num_rows * problem.num_heads * (problem.head_dim_v + 1) + 4
    made = {"workspace": Allocation.contiguous((words,), torch.float32)}
    calls = prefix_calls(problem, num_rows, device, named_views(GIVEN, raw), joined=joined)
    counters = problem.batch * problem.num_kv_heads * _blocks(problem, device)
    kind = Pass if joined else PrefixPass
    found = kind(calls, GIVEN, made, device, index, num_counters=counters)
    if isinstance(found, PrefixPass):
        found.problem = problem
        found.joined = functools.partial(launching.kept, prefix_pass, problem, num_rows, device, index, raw, True)
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
    scored = score_arguments(plan, views)
    blocks = _blocks(problem, device)
    attended = shared | {name: scored[name] for name in SCORED}
    attended |= _boxes(plan, scored, config)
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


def _boxes(plan: Plan, scored: dict[str, Any], config: Config) -> dict[str, Any]:
    """Boxes of K and V in pages, or of neither."""
    problem = plan.problem
    dims = {"k": problem.head_dim, "v": problem.head_dim_v}
    on = plan.device.has_tma and plan.is_unpadded and not problem.fp8
    found = {name: page_box(problem, scored[name], config.block_n, dim) if on else None for name, dim in dims.items()}
    return {f"{name}_desc": None if None in found.values() else box for name, box in found.items()}
