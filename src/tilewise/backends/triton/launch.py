"""From canonical operands to kernels: the passes of the forward and backward, and the kernel calls they consist of.

A call looks up its pass, which is prepared once per problem and strides, allocates the results and launches the
kernels. Nothing here waits for the device, so calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu import launching, tile_lists
from tilewise.backends.gpu.arguments import Views, result_allocations, single_address
from tilewise.backends.gpu.launching import BACKWARD_GIVEN, Allocation, Pass, RawViews, View, named_views
from tilewise.backends.gpu.offline import operand_views
from tilewise.backends.gpu.records import BiasShape
from tilewise.backends.gpu.symbols import Address, Fixed, KernelCall
from tilewise.backends.gpu.work_list import list_call, list_size
from tilewise.backends.triton import backward as bwd
from tilewise.backends.triton import configs, decode, forward
from tilewise.backends.triton.arguments import (
    ONCE,
    STAT_TILE,
    Passes,
    box_descriptors,
    dense_rows,
    is_listed,
    key_rows,
    listed_heads,
    listed_tiles,
    listing_arguments,
    packed_rows,
    page_rows,
    part_boxes,
    query_rows,
    score_arguments,
    stat_arguments,
    stat_descriptors,
    stat_rows,
    stored_rows,
    walked_together,
    work_address,
    workspace_rows,
    workspace_words,
)  # fmt: skip
from tilewise.backends.triton.configs import MAX_SPLITS, Config, padded
from tilewise.backends.triton.planning import Plan, of_rows, plan_for
from tilewise.device import DeviceSpec
from tilewise.numerics import LN2, LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.tiles import TILE

# The tensors of a backward: its operands, and table entries in order for the backward of paged keys.
GIVEN = (*BACKWARD_GIVEN, "order", "page_ends")
LISTS = BACKWARD_GIVEN.index("tile_lists")
# Where the list of the forward's tiles is.
WORK = Address("workspace", torch.int32)
STATS_ROWS = 64
PAGE_SLOTS = 16
# Partial results that a program merges at a time, bounded by registers.
COMBINED_ELEMENTS = 8192
# The limit of a grid's second and third dimension.
MAX_GRID_SIDE = 65535


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    operands = ready(problem, operands)
    made = launching.bound_to(forward_pass, problem, operands, operands.q, True).run(operands)
    out = launching.heads_first(problem, made["out"]) if operands.out is None else operands.out
    lse = made["lse"]
    if problem.batch == 0 or problem.seqlen_q == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    return out, lse


def writes_into(problem: AttentionProblem, out: Tensor) -> bool:
    """Whether the kernels write straight into a given `out`."""
    return launching.are_adjacent(problem, out)


def bind_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Backend."""
    if not _bindable(problem) or tile_lists.are_missing(problem, operands.tile_lists):
        return None
    return launching.bound_to(forward_pass, problem, operands, operands.q, want_lse)


def _bindable(problem: AttentionProblem) -> bool:
    """Whether a call only allocates results and launches: see run_forward and run_backward."""
    nothing = 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)
    return not (nothing or problem.dropout > 0.0)


def ready(problem: AttentionProblem, operands: Operands) -> Operands:
    """The operands with the seed on the device, and the lists of a tile mask."""
    return seeded(tile_lists.with_lists(problem, operands))


def seeded(operands: Operands) -> Operands:
    """The operands with the seed on the device."""
    seed, where = operands.seed, operands.q.device
    if seed is None:
        return operands
    return operands._replace(seed=seed.contiguous() if seed.device == where else _filled(seed, where))


def _filled(seed: Tensor, where: torch.device) -> Tensor:
    """A seed from the host, with or without its origin. Fill kernels instead of a copy: they need no pinned memory and
    no synchronisation, and can be captured in a graph.
    """
    there = torch.empty(seed.shape, dtype=torch.int64, device=where)
    for slot, value in zip(there.view(-1), seed.reshape(-1).tolist(), strict=True):
        slot.fill_(value)
    return there


def forward_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, want_lse: bool = True
) -> Pass:
    """The pass, prepared by the first call that needs it."""
    views = named_views(Operands._fields, raw)
    results = {name: made for name, made in result_allocations(problem).items() if name not in views}
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    calls = forward_calls(problem, device, views | {name: made.view for name, made in results.items()})
    elements = sum(parts_size(plan)) + forward_list_words(plan)
    # Padding that aligns the parts of out for vector loads, see decode_calls.
    workspace = Allocation.contiguous((elements + 4,), torch.float32) if elements else None
    made = launching.in_layout(problem, results) | {"workspace": workspace}
    read = ("out", "lse") if want_lse else ("out",)
    return Pass(calls, Operands._fields, made, device, index, read=read, copied=_copied_sinks(views))


def _copied_sinks(views: Views) -> dict[str, torch.dtype]:
    """Kernels read sinks as adjacent elements."""
    return {"sinks": views["sinks"].dtype} if "sinks" in views and views["sinks"].strides != (1,) else {}


def forward_calls(problem: AttentionProblem, device: DeviceSpec, views: dict[str, View]) -> list[KernelCall]:
    """The kernels of a forward call."""
    if 0 in (problem.batch, problem.seqlen_q):
        return []
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    return decode_calls(plan, views) if plan.num_splits > 0 else tiled_calls(plan, views)


def calls_of(problem: AttentionProblem, device: DeviceSpec) -> list[KernelCall]:
    """The kernel calls of a problem with contiguous operands, for compiling ahead of time: forward, and backward if the
    problem needs gradients.
    """
    views = operand_views(problem, packed_queries=problem.seqlen_q > 1)
    views |= {name: allocation.view for name, allocation in result_allocations(problem).items()}
    calls = forward_calls(problem, device, views)
    if problem.needs_grad:
        views["dout"] = views["out"]
        wanted = Wanted(dbias=problem.bias_shape is not None, dsinks=problem.has_sinks)
        calls += backward_calls(problem, device, views, wanted)
    return calls


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
        return zero_gradients(problem, operands, wanted)
    operands = ready(problem, operands)
    order = pages_in_order(problem, operands, wanted)
    given = (dout, dlse, out, lse, *operands[: len(launching.INPUTS)])
    made = launching.bound_to(backward_pass, problem, given, operands.q, wanted).run((*given, *order))
    dq, dk, dv = row_gradients(problem, made)
    dsinks = None
    if wanted.dsinks:
        weight, delta = sink_statistics(problem, operands, made["workspace"])
        dsinks = summed_over_rows(problem, operands, -weight * delta)
    return Gradients(dq, dk, dv, dbias=summed_shares(made["dbias"], operands) if wanted.dbias else None, dsinks=dsinks)


def bind_backward(
    problem: AttentionProblem, given: tuple[Tensor | None, ...], q: Tensor, wanted: Wanted
) -> Pass | None:
    """See Backend; `given` in the order of BACKWARD_GIVEN."""
    if not _bindable(problem) or problem.page_size is not None or tile_lists.are_missing(problem, given[LISTS]):
        return None
    return launching.bound_to(backward_pass, problem, given, q, wanted)


def row_gradients(problem: AttentionProblem, made: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv) of what a pass made; None for those it did not make."""
    dq, dk, dv = (launching.heads_first(problem, made[name]) if name in made else None for name in ("dq", "dk", "dv"))
    dk, dv = made.get("dk_pages", dk), made.get("dv_pages", dv)
    if problem.seqlen_k == 0:
        for gradient in (dk, dv):
            if gradient is not None:
                gradient.zero_()
    return dq, dk, dv


def pages_in_order(problem: AttentionProblem, operands: Operands, wanted: Wanted) -> tuple[Tensor, ...]:
    """Table entries in the order that the gradients of pages are summed in; nothing where there are none."""
    if problem.page_size is None or not (wanted.dk or wanted.dv):
        return ()
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    return bwd.entries_by_page(operands.block_table, operands.seqlens_k, operands.k.shape[0], problem.page_size)


def summed_shares(parts: Tensor, operands: Operands) -> Tensor:
    """Dbias of its partial sums."""
    assert operands.bias is not None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(operands.bias.dtype)


def sink_statistics(
    problem: AttentionProblem, operands: Operands, workspace: Tensor, passes: Passes = ONCE
) -> tuple[Tensor, ...]:
    """exp(sink - lse) of every row, and the statistics that follow lse in the workspace."""
    assert operands.sinks is not None
    plan = plan_for(problem, devices.of(operands.q.device), operands.cu_seqlens_q is not None)
    dense = problem.kind == "dense"
    packed = plan.traits.PACKED_Q
    length = problem.seqlen_q if dense else stored_rows(plan) if packed else problem.total_q
    heads = (problem.batch, problem.num_heads) if dense else (problem.num_heads,)
    statistics = workspace[: passes.num_stats * workspace_rows(plan, 0)[1]]
    lse_unit, *others = statistics.view(passes.num_stats, *heads, -1)[..., :length]
    unit = 1.0 if plan.traits.TRANSFORMED else LN2
    return torch.exp2((operands.sinks.float().view(-1, 1) - lse_unit * unit) * LOG2E), *others


def summed_over_rows(problem: AttentionProblem, operands: Operands, terms: Tensor) -> Tensor:
    """The gradient of the sinks, in a fixed order."""
    assert operands.sinks is not None
    total: Tensor = terms.sum((0, 2) if problem.kind == "dense" else 1)
    return total.to(operands.sinks.dtype)


def zero_gradients(problem: AttentionProblem, operands: Operands, wanted: Wanted) -> Gradients:
    """The gradients of a problem without queries."""
    q, k, v = (torch.zeros_like(t) for t in operands[:3])
    bias = operands.bias
    dbias = None if bias is None or problem.bias_shape is None else bias.new_zeros(problem.bias_shape)
    dsinks = None if operands.sinks is None else torch.zeros_like(operands.sinks)
    return Gradients(q, k, v, dbias if wanted.dbias else None, dsinks if wanted.dsinks else None)


def backward_pass(problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wanted: Wanted) -> Pass:
    """The pass, prepared by the first call that needs it."""
    views = named_views(BACKWARD_GIVEN, raw)
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    calls, gradients = backward_calls(problem, device, views, wanted), gradient_allocations(plan, views, wanted)
    workspace = Allocation.contiguous((workspace_words(plan),), torch.float32)
    made = launching.in_layout(problem, gradients) | {"workspace": workspace}
    read = (*gradients, "workspace") if wanted.dsinks else tuple(gradients)
    return Pass(calls, GIVEN, made, device, index, read=read, copied=_copied_sinks(views))


def gradient_allocations(
    plan: Plan, views: Views, wanted: Wanted, bias_pass: configs.Pass = "dbias"
) -> dict[str, Allocation]:
    """What a backward makes: gradients, rows of pages before they are summed, shares of dbias."""
    problem, made = plan.problem, dict[str, Allocation]()
    queries, keys = (problem.num_heads, problem.seqlen_q, problem.total_q), (problem.num_kv_heads, problem.seqlen_k)
    if wanted.dq:
        made["dq"] = Allocation.rows(problem, *queries, problem.head_dim, views["q"].dtype)
    if wanted.dk or wanted.dv:
        for name, dim in (("dk", problem.head_dim), ("dv", problem.head_dim_v)):
            if problem.page_size is None:
                made[name] = Allocation.rows(problem, *keys, problem.total_k, dim, views["k"].dtype)
            else:
                made[name] = Allocation.contiguous(page_rows_shape(plan, dim), torch.float32)
                num_pages = problem.total_k // problem.page_size
                shape = (num_pages, problem.page_size, problem.num_kv_heads, dim)
                made[f"{name}_pages"] = Allocation.contiguous(shape, problem.dtype)
    if wanted.dbias:
        shares, _ = bias_shares(plan, bias_pass)
        assert problem.bias_shape is not None
        dtype = views["bias"].dtype if shares == 1 else torch.float32
        made["dbias"] = Allocation.contiguous((shares, *problem.bias_shape), dtype)
    return made


def backward_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], wanted: Wanted
) -> list[KernelCall]:
    """The kernels of a backward call."""
    plan = plan_for(problem, device, "cu_seqlens_q" in views)
    made = gradient_allocations(plan, views, wanted)
    given = {name: allocation.view for name, allocation in made.items()}
    shared = shared_arguments(plan, views)
    calls = [stats_call(plan, views, given)]
    if "dk" in given:
        calls += key_gradient_calls(plan, shared, given["dk"], given["dv"])
    if "dk_pages" in given:
        calls.append(gather_pages_call(plan, views, "dk", given["dk_pages"], problem.head_dim))
        calls.append(gather_pages_call(plan, views, "dv", given["dv_pages"], problem.head_dim_v))
    if "dq" in given:
        calls.append(query_gradient_call(plan, shared, given["dq"]))
    if "dbias" in given:
        calls.append(bias_gradient_call(plan, shared, given["dbias"]))
    return calls


def tiled_calls(plan: Plan, views: Views) -> list[KernelCall]:
    """The forward kernel, preceded for packed sequences by the kernel that lists their tiles."""
    problem, config = plan.problem, plan.config("forward")
    arguments = score_arguments(plan, views) | _results(plan, views)
    boxes = box_descriptors(plan, arguments, config)
    boxed = boxes["q_desc"] is not None
    if config.boxes and not boxed:  # pointers take more registers than boxes: under the limit they spill
        config = replace(config, max_registers=None)
    arguments |= boxes
    # Queries loaded by pointers stay in shared memory: in registers, ptxas waits after every wgmma (C7515).
    arguments["HOLD_QUERIES"] = config.hold_queries and boxed
    traits = plan.traits
    arguments["JOINED"] = config.joined and boxed and not (traits.TRANSFORMED or traits.EXACT or traits.HAS_DROPOUT)
    arguments["PAIRED"] = config.paired
    if _takes_list(plan):
        return _listed_calls(plan, arguments, config)
    arguments["DIRECT"] = direct = _is_direct(plan, config)
    arguments |= {"work": None, "sizes": plan.sizes_streaming(config, _key_bytes(plan), problem.group_size)}
    tiles = _blocks(plan, plan.sizes.seqlen_q, config.block_m)
    call = tiled(forward.forward_kernel, tiles * problem.num_heads * problem.batch, arguments, config)
    return [replace(call, grid=(tiles, problem.num_heads, problem.batch)) if direct else call]


def _listed_calls(plan: Plan, arguments: dict[str, Any], config: Config) -> list[KernelCall]:
    """The kernel that lists tiles, and the forward over (head of a wave, list index, wave of heads). A list too long
    for that grid is walked in one dimension, which costs divisions.
    """
    heads, tiles = listed_heads(plan, "forward"), listed_tiles(plan, "forward")
    waves = triton.cdiv(plan.problem.num_heads, heads)
    direct = max(tiles, waves) <= MAX_GRID_SIDE
    arguments |= {"work": WORK, "sizes": plan.sizes._replace(heads_per_wave=heads), "DIRECT": direct}
    call = tiled(forward.forward_kernel, tiles * plan.problem.num_heads, arguments, config)
    return [_listing(plan, config), replace(call, grid=(heads, tiles, waves)) if direct else call]


def _blocks(plan: Plan, length: int, block: int) -> int:
    """Programs for so many rows: under a tile mask for whole tiles of it, because programs take those in its order."""
    whole = length if plan.problem.tiles_shape is None else triton.cdiv(length, TILE) * TILE
    blocks: int = triton.cdiv(whole, block)
    return blocks


def _joins(plan: Plan, config: Config) -> bool:
    """Whether masked tiles share the loop of unmasked ones: those of a tile mask always do."""
    return config.joined or plan.problem.tiles_shape is not None


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


def _listing(plan: Plan, config: Config) -> KernelCall:
    """The kernel that lists the tiles of queries."""
    together = walked_together(plan, "forward")
    return list_call(plan.problem, WORK, config.block_m, together=together, cleared=("out", "lse", None, None))


def _results(plan: Plan, views: Views) -> dict[str, Any]:
    return {
        "sinks": single_address(views, "sinks"),
        "max_logits": single_address(views, "max_logits"),
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
    problem, config, splits = plan.problem, plan.decode_config, plan.num_splits
    num_out, num_lse = parts_size(plan)
    # The lse parts come first. Their number is rounded up, so that vector loads of the out parts are aligned.
    lse_bytes = -(-num_lse // 4) * 16
    parts = {
        "out_parts": Address("workspace", torch.float32, offset=lse_bytes) if num_out else None,
        "lse_parts": Address("workspace", torch.float32) if num_lse else None,
    }
    arguments = score_arguments(plan, views) | _results(plan, views) | parts
    arguments |= {"num_splits": splits, "SPLIT": num_out > 0}
    blocks = plan.row_blocks
    arguments |= {"SPLIT_KEYS": plan.split_keys, "num_blocks": blocks if blocks > 1 else None}
    arguments |= part_boxes(plan, arguments, config)
    call = tiled(decode.decode_kernel, blocks * splits * problem.num_kv_heads * problem.batch, arguments, config)
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
        "MAX_SPLITS": 0 if plan.problem.batch_invariant else triton.next_power_of_2(max(MAX_SPLITS, plan.num_splits)),
        "BLOCK_SPLITS": COMBINED_ELEMENTS // plan.traits.BLOCK_DV,
    }
    programs = plan.sizes.total_q * plan.problem.num_heads
    return KernelCall(decode.combine_kernel, (programs, 1, 1), arguments, 4, 1)


def stats_call(plan: Plan, views: Views, made: Collection[str], passes: Passes = ONCE) -> KernelCall:
    """The kernel that fills the workspace: lse in the unit of the scores, delta (for second derivatives also lse' and
    dout . out'), and the lists of packed tiles that the kernels of the gradients in `made` need.
    """
    problem = plan.problem
    dense = problem.kind == "dense"
    num_rows, batch = (problem.seqlen_q, problem.batch) if dense else (problem.total_q, 1)
    num_stored = stored_rows(plan)

    def rows(name: str) -> Any:
        if name not in views:
            return None
        if dense:
            return dense_rows(problem, name, views[name], problem.num_heads)
        return packed_rows(name, views[name], problem.num_heads)

    block_m = STATS_ROWS if plan.traits.BLOCK_DV <= 256 else STATS_ROWS // 4
    once = dict.fromkeys(("dot_out", "dot_lse", "mean", "rate"))
    arguments = (
        once
        | {
            **{name: rows(name) for name in ("out", "dout", "dot_out")},
            **{
                n: stat_rows(plan, n, views[n], packed=True) if n in views else None for n in ("lse", "dlse", "dot_lse")
            },
            **stat_arguments(plan, passes, packed=True),
            "cu_seqlens_q": single_address(views, "cu_seqlens_q"),
            "num_rows": num_rows,
            "num_stored": num_stored,
            "num_heads": problem.num_heads,
            "batch": problem.batch,
            "T": of_rows(plan.traits),
            "BLOCK_M": block_m,
        }
        | listing_arguments(plan, made, passes)
    )
    programs = triton.cdiv(num_stored, block_m) * problem.num_heads * batch
    return KernelCall(bwd.row_stats_kernel, (programs, 1, 1), arguments, 4, 1)


def shared_arguments(plan: Plan, views: Views, passes: Passes = ONCE) -> dict[str, Any]:
    """Arguments of every backward kernel that computes scores."""
    return score_arguments(plan, views) | {
        "dout": query_rows(plan, "dout", views["dout"]),
        **stat_arguments(plan, passes),
    }


def key_gradient_calls(plan: Plan, shared: dict[str, Any], dk: View, dv: View) -> list[KernelCall]:
    """The kernel that writes dK and dV, or one for each. For paged keys they write one fp32 row per (sequence, key)."""
    shared = shared | key_gradient_rows(plan.problem, dk, dv)
    config = plan.config("dkdv")
    if config.dv is None:
        return [_key_gradient_call(plan, shared | {"OF_K": True, "OF_V": True}, config)]
    # Lists of packed tiles and the order of programs are made for both.
    apart = replace(config.dv, block_n=config.block_n, heads_per_wave=config.heads_per_wave)
    return [
        _key_gradient_call(plan, shared | {"OF_K": False, "OF_V": True}, apart),
        _key_gradient_call(plan, shared | {"OF_K": True, "OF_V": False}, config),
    ]


def _key_gradient_call(plan: Plan, shared: dict[str, Any], config: Config) -> KernelCall:
    problem = plan.problem
    if STAT_TILE % config.block_m:
        raise ValueError(f"statistics are stored in tiles of {STAT_TILE} rows, not of {config.block_m}")
    width = problem.head_dim + problem.head_dim_v
    bytes_per_head = problem.seqlen_q * width * problem.dtype.itemsize * problem.group_size
    arguments = shared | {"work": work_address(plan, "dkdv"), "JOINED": _joins(plan, config)}
    arguments |= {"EARLY_DP": config.early_dp, "DP_FIRST": config.dp_first, "SPLIT": config.split}
    arguments |= _streamed(plan, arguments, config, queries=True) | stat_descriptors(plan, config)
    if is_listed(plan, "dkdv"):
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, "dkdv"))
        tiles = listed_tiles(plan, "dkdv")
    else:
        arguments["sizes"] = plan.sizes_streaming(config, bytes_per_head, 1)
        tiles = _blocks(plan, problem.seqlen_k, config.block_n) * problem.batch
    return tiled(bwd.key_gradient_kernel, tiles * problem.num_kv_heads, arguments, config)


def _streamed(plan: Plan, arguments: dict[str, Any], config: Config, *, queries: bool) -> dict[str, Any]:
    """Boxes of what a kernel of the backward streams, q and dout or k and v; None for both without its one loop."""
    names = ("q", "dout") if queries else ("k", "v")
    config = replace(config, boxes=config.boxes and arguments["JOINED"])
    return box_descriptors(plan, arguments, config, *((names, ()) if queries else ((), names)), pads=True)


def key_gradient_rows(problem: AttentionProblem, dk: View, dv: View) -> dict[str, Any]:
    """Rows of dk and dv; of paged keys, one row per (sequence, key)."""
    pair = (("dk", dk), ("dv", dv))
    if problem.kind == "paged":
        return {n: dense_rows(problem, n, view, problem.num_kv_heads) for n, view in pair}
    return {n: key_rows(problem, n, view) for n, view in pair}


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
    return KernelCall(bwd.gather_pages_kernel, (num_pages * problem.num_kv_heads, 1, 1), arguments, 4, 1)


def query_gradient_call(plan: Plan, shared: dict[str, Any], dq: View) -> KernelCall:
    """The kernel that writes dQ."""
    problem, config = plan.problem, plan.config("dq")
    arguments = shared | {
        "dq": query_rows(plan, "dq", dq),
        "work": work_address(plan, "dq"),
        "DP_FIRST": config.dp_first,
        "SPLIT": config.split,
        "JOINED": _joins(plan, config),
    }
    arguments |= _streamed(plan, arguments, config, queries=False)
    if is_listed(plan, "dq"):
        arguments["sizes"] = plan.sizes._replace(heads_per_wave=listed_heads(plan, "dq"))
        tiles = listed_tiles(plan, "dq")
    else:
        arguments["sizes"] = plan.sizes_streaming(config, _key_bytes(plan), problem.group_size)
        tiles = _blocks(plan, plan.sizes.seqlen_q, config.block_m) * problem.batch
    return tiled(bwd.query_gradient_kernel, tiles * problem.num_heads, arguments, config)


def bias_shares(plan: Plan, bias_pass: configs.Pass) -> tuple[int, int]:
    """(programs that share the work of one bias tile, bias tiles)."""
    shape, config = plan.problem.bias_shape, plan.config(bias_pass)
    assert shape is not None
    tiles = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    # Enough programs for two waves. The partial sums take at most that many times the bias.
    return max(1, min(64, 2 * plan.device.num_sms // max(1, tiles))), tiles


def bias_gradient_call(
    plan: Plan,
    shared: dict[str, Any],
    dbias: View,
    bias_pass: configs.Pass = "dbias",
    kernel: Any = bwd.bias_gradient_kernel,
) -> KernelCall:
    """The kernel that writes partial sums of dbias."""
    shape = plan.problem.bias_shape
    assert shape is not None
    shares, tiles = bias_shares(plan, bias_pass)
    arguments = shared | {
        "dbias": Address("dbias", dbias.dtype),
        # Broadcast dimensions are compiled in.
        "shape": BiasShape(*(Fixed(1) if size == 1 else size for size in shape)),
        "num_shares": shares,
    }
    return tiled(kernel, shares * tiles, arguments, plan.config(bias_pass))


def tiled(kernel: Any, programs: int, arguments: dict[str, Any], config: Config) -> KernelCall:
    """A kernel call with the tiles of a configuration."""
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    shape = (config.num_warps, config.num_stages, config.max_registers)
    return KernelCall(kernel, (programs, 1, 1), arguments | tiles, *shape)
