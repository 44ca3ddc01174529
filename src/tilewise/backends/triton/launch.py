"""From canonical operands to kernel launches: what depends on the problem alone is planned once and cached, the rest
is strides.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.triton import backward as bwd
from tilewise.backends.triton import bias_gradient, decode, forward, pages
from tilewise.backends.triton.arguments import (
    dense_rows,
    empty_like_rows,
    key_descriptors,
    packed_rows,
    packed_stats,
    page_rows,
    query_descriptors,
    query_rows,
    score_arguments,
    stat_rows,
)  # fmt: skip
from tilewise.backends.triton.configs import Config
from tilewise.backends.triton.planning import Plan, plan_for
from tilewise.backends.triton.traits import Rows, padded
from tilewise.numerics import LN2, LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["Launch", "forward_launches", "run_backward", "run_forward"]

STATS_ROWS = 64
PAGE_SLOTS = 16


class Launch(NamedTuple):
    """A kernel and everything it is started with; kept apart from starting it so that it can be compiled without a
    GPU.
    """

    kernel: Any
    programs: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def start(self) -> None:
        """Queue the kernel on the current stream, unless there is nothing to do."""
        if 0 not in self.programs:
            self.kernel[self.programs](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    out = empty_like_rows(problem, operands.q, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=operands.q.device)
    if problem.batch == 0 or problem.seqlen_q == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    plan = plan_for(problem, devices.of(operands.q.device), operands.cu_seqlens_q is not None)
    with _on_device_of(operands.q):
        launches = decode_launches if plan.num_splits > 0 else forward_launches
        for launch in launches(plan, operands, out, lse):
            launch.start()
    return out, lse


def forward_launches(plan: Plan, operands: Operands, out: Tensor, lse: Tensor) -> list[Launch]:
    """The forward kernel."""
    problem, config = plan.problem, plan.config("forward")
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize // problem.group_size
    arguments = score_arguments(plan, operands) | {
        "sinks": None if operands.sinks is None else operands.sinks.contiguous(),
        "out": query_rows(plan, out),
        "lse": stat_rows(plan, lse),
        "sizes": plan.sizes_streaming(config, kv_bytes, problem.group_size),
    }
    arguments |= key_descriptors(plan, arguments, config)
    programs = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.num_heads * problem.batch
    return [_tiled(forward.forward_kernel, (programs,), arguments, config)]


def decode_launches(plan: Plan, operands: Operands, out: Tensor, lse: Tensor) -> list[Launch]:
    """The split kernel and, if its results are partial, the one that merges them."""
    problem, config, splits = plan.problem, plan.config("decode"), plan.num_splits
    # Packed rows past the last sequence are filled in by the merge.
    partial = splits > 1 or plan.traits.PACKED_Q
    parts = (splits, plan.sizes.total_q, problem.num_heads)
    out_parts = torch.empty((*parts, problem.head_dim_v), dtype=torch.float32, device=out.device) if partial else None
    lse_parts = torch.empty(parts, dtype=torch.float32, device=out.device) if partial else None
    rows = plan.sizes.seqlen_q * problem.group_size
    arguments = score_arguments(plan, operands) | {
        "sinks": None if operands.sinks is None else operands.sinks.contiguous(),
        "out": query_rows(plan, out),
        "lse": stat_rows(plan, lse),
        "out_parts": out_parts,
        "lse_parts": lse_parts,
        "num_splits": splits,
        "SPLIT": partial,
    }
    config = Config(
        max(config.block_m, triton.next_power_of_2(rows)), config.block_n, config.num_warps, config.num_stages
    )
    launch = _tiled(decode.decode_kernel, (splits * problem.num_kv_heads * problem.batch,), arguments, config)
    return [launch, _combine_launch(plan, operands, out, lse, out_parts, lse_parts)] if partial else [launch]


def _combine_launch(
    plan: Plan, operands: Operands, out: Tensor, lse: Tensor, out_parts: Tensor | None, lse_parts: Tensor | None
) -> Launch:
    arguments = {
        "out_parts": out_parts,
        "lse_parts": lse_parts,
        "out": query_rows(plan, out),
        "lse": stat_rows(plan, lse),
        "cu_seqlens_q": operands.cu_seqlens_q,
        "total_q": plan.sizes.total_q,
        # Packed tokens are addressed as one long sequence.
        "seqlen_q": plan.sizes.total_q if plan.traits.PACKED_Q else plan.sizes.seqlen_q,
        "num_heads": plan.problem.num_heads,
        "num_splits": plan.num_splits,
        "batch": plan.problem.batch,
        "T": plan.traits,
        "BLOCK_SPLITS": triton.next_power_of_2(plan.num_splits),
    }
    return Launch(decode.combine_kernel, (plan.sizes.total_q * plan.problem.num_heads,), arguments, 4, 1)


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
    plan = plan_for(problem, devices.of(operands.q.device), operands.cu_seqlens_q is not None)
    with _on_device_of(operands.q):
        lse_unit, delta = torch.empty_like(lse), torch.empty_like(lse)
        stats_launch(plan, out, dout, lse, dlse, lse_unit, delta).start()
        shared = score_arguments(plan, operands) | {
            "dout": query_rows(plan, dout),
            "lse_unit": stat_rows(plan, lse_unit),
            "delta": stat_rows(plan, delta),
        }
        dk, dv = _key_gradients(plan, operands, shared) if wanted.dk or wanted.dv else (None, None)
        return Gradients(
            dq=_query_gradient(plan, operands, shared) if wanted.dq else None,
            dk=dk,
            dv=dv,
            dbias=_bias_gradient(plan, operands, shared) if wanted.dbias else None,
            dsinks=_sink_gradient(plan, operands, lse_unit, delta) if wanted.dsinks else None,
        )


def stats_launch(
    plan: Plan, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, lse_unit: Tensor, delta: Tensor
) -> Launch:
    problem = plan.problem
    dense = problem.kind == "dense"
    num_rows, batch = (problem.seqlen_q, problem.batch) if dense else (problem.total_q, 1)
    rows = dense_rows if dense else packed_rows
    stats = dense_rows if dense else packed_stats
    arguments = {
        "out": rows(out),
        "dout": rows(dout),
        "lse": stats(lse),
        "dlse": None if dlse is None else stats(dlse),
        "lse_unit": stats(lse_unit),
        "delta": stats(delta),
        "num_rows": num_rows,
        "num_heads": problem.num_heads,
        "T": plan.traits,
        "BLOCK_M": STATS_ROWS if plan.traits.BLOCK_DV <= 256 else STATS_ROWS // 4,
    }
    blocks = triton.cdiv(num_rows, arguments["BLOCK_M"])
    return Launch(bwd.row_stats_kernel, (blocks * problem.num_heads * batch,), arguments, 4, 1)


def key_gradient_launch(plan: Plan, shared: dict[str, Any], dk: Rows, dv: Rows) -> Launch:
    """The kernel that writes dK and dV."""
    problem, config = plan.problem, plan.config("dkdv")
    bytes_per_head = (
        problem.seqlen_q * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize * problem.group_size
    )
    sizes = plan.sizes_streaming(config, bytes_per_head, 1)
    programs = triton.cdiv(problem.seqlen_k, config.block_n) * problem.num_kv_heads * problem.batch
    arguments = shared | {"dk": dk, "dv": dv, "sizes": sizes, "EARLY_DP": config.early_dp}
    arguments |= query_descriptors(plan, shared, config)
    return _tiled(bwd.key_gradient_kernel, (programs,), arguments, config)


def _key_gradients(plan: Plan, operands: Operands, shared: dict[str, Any]) -> tuple[Tensor, Tensor]:
    problem = plan.problem
    if problem.kind != "paged":
        dk = empty_like_rows(problem, operands.k, problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
        dv = empty_like_rows(problem, operands.v, problem.num_kv_heads, problem.seqlen_k, problem.head_dim_v)
        if problem.seqlen_k == 0:
            return dk.zero_(), dv.zero_()
        rows = dense_rows if problem.kind == "dense" else packed_rows
        key_gradient_launch(plan, shared, rows(dk), rows(dv)).start()
        return dk, dv
    shape = (problem.batch, problem.num_kv_heads, problem.seqlen_k)
    device = operands.q.device
    dk_rows = torch.empty((*shape, problem.head_dim), dtype=torch.float32, device=device)
    dv_rows = torch.empty((*shape, problem.head_dim_v), dtype=torch.float32, device=device)
    key_gradient_launch(plan, shared, dense_rows(dk_rows), dense_rows(dv_rows)).start()
    return _into_pages(operands.k, dk_rows, operands), _into_pages(operands.v, dv_rows, operands)


def _into_pages(like: Tensor, rows: Tensor, operands: Operands) -> Tensor:
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    num_pages, page_size, num_kv_heads, dim = like.shape
    grad = torch.empty_like(like, memory_format=torch.contiguous_format)
    order, ends = pages.entries_by_page(operands.block_table, operands.seqlens_k, num_pages, page_size)
    arguments = {
        "rows": dense_rows(rows),
        "pages": page_rows(grad),
        "order": order,
        "page_ends": ends,
        "seqlens_k": operands.seqlens_k,
        "num_kv_heads": num_kv_heads,
        "max_pages": operands.block_table.shape[1],
        "PAGE_SIZE": page_size,
        "BLOCK_S": min(PAGE_SLOTS, triton.next_power_of_2(page_size)),
        "DIM": dim,
        "BLOCK_D": padded(dim),
    }
    Launch(pages.gather_pages_kernel, (num_pages * num_kv_heads,), arguments, 4, 1).start()
    return grad


def query_gradient_launch(plan: Plan, shared: dict[str, Any], dq: Tensor) -> Launch:
    """The kernel that writes dQ."""
    problem, config = plan.problem, plan.config("dq")
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize // problem.group_size
    sizes = plan.sizes_streaming(config, kv_bytes, problem.group_size)
    programs = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.num_heads * problem.batch
    arguments = shared | {"dq": query_rows(plan, dq), "sizes": sizes} | key_descriptors(plan, shared, config)
    return _tiled(bwd.query_gradient_kernel, (programs,), arguments, config)


def _query_gradient(plan: Plan, operands: Operands, shared: dict[str, Any]) -> Tensor:
    problem = plan.problem
    dq = empty_like_rows(problem, operands.q, problem.num_heads, problem.seqlen_q, problem.head_dim)
    if problem.seqlen_q == 0:
        return dq.zero_()
    query_gradient_launch(plan, shared, dq).start()
    return dq


def _bias_gradient(plan: Plan, operands: Operands, shared: dict[str, Any]) -> Tensor:
    problem, config = plan.problem, plan.config("dbias")
    shape = problem.bias_shape
    assert shape is not None
    assert operands.bias is not None
    tiles = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    # Enough programs for two waves; the partial sums stay below the size of the bias times that.
    shares = max(1, min(64, 2 * plan.device.num_sms // max(1, tiles)))
    dtype = operands.bias.dtype if shares == 1 else torch.float32
    parts = torch.empty((shares, *shape), dtype=dtype, device=operands.bias.device)
    arguments = shared | {"dbias": parts, "shape": shape, "num_shares": shares}
    _tiled(bias_gradient.bias_gradient_kernel, (shares * tiles,), arguments, config).start()
    return parts[0] if shares == 1 else parts.sum(0).to(operands.bias.dtype)


def _sink_gradient(plan: Plan, operands: Operands, lse_unit: Tensor, delta: Tensor) -> Tensor:
    """-sum over rows of exp(sink - lse) * delta, in a fixed order."""
    assert operands.sinks is not None
    unit = 1.0 if plan.traits.TRANSFORMED else LN2
    by_head = (0, 2) if plan.problem.kind == "dense" else (1,)
    sinks = (
        operands.sinks.to(torch.float32).view(1, -1, 1)
        if plan.problem.kind == "dense"
        else operands.sinks.float().view(-1, 1)
    )
    weight = torch.exp2((sinks - lse_unit * unit) * LOG2E)
    return -(weight * delta).sum(by_head).to(operands.sinks.dtype)


def _zero_gradients(problem: AttentionProblem, operands: Operands, wanted: Wanted) -> Gradients:
    q, k, v = (torch.zeros_like(t) for t in operands[:3])
    bias = operands.bias
    dbias = None if bias is None or problem.bias_shape is None else bias.new_zeros(problem.bias_shape)
    dsinks = None if operands.sinks is None else torch.zeros_like(operands.sinks)
    return Gradients(q, k, v, dbias if wanted.dbias else None, dsinks if wanted.dsinks else None)


def _tiled(kernel: Any, programs: tuple[int, ...], arguments: dict[str, Any], config: Config) -> Launch:
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return Launch(kernel, programs, arguments | tiles, config.num_warps, config.num_stages)


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels start on the current device; switching costs microseconds, so only where it is another one."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
