"""From canonical operands to the backward kernels: prepare rows, main kernel, finish dQ (or compute it in order)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_rows import finish_queries_kernel, prepare_rows_kernel
from tilewise.backends.hopper.configs import BACKWARD_BLOCK_N, BackwardConfig, backward_config
from tilewise.backends.hopper.launch import clear_tail, empty_rows, on_device_of
from tilewise.backends.hopper.launching import Launcher, counter_for, describe, describe_flat, tma_ready
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.backends.hopper.schedule import Sizes
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["run_backward"]

# Heads walked together under a causal mask: what their key tiles (query tiles, for dQ alone) share, in this much of L2.
L2_BYTES = 32 << 20
# The kernels of backward_rows take strides in units of 16 bytes, 8 elements.
STRIDE_UNIT = 8


class BackwardPlan(NamedTuple):
    """What every call with a problem shares: sizes seen from the keys and from the queries."""

    config: BackwardConfig
    key_sizes: Sizes
    query_sizes: Sizes
    key_grid: tuple[int, int, int]
    num_m: int
    scale_log2: float
    cap_scale: float | None


@functools.lru_cache(maxsize=4096)
def backward_plan(problem: AttentionProblem, device: DeviceSpec) -> BackwardPlan:
    """Everything about a call that needs no tensor."""
    config = backward_config(problem)
    # Q, dO in 16 bits and dQ in 32, of every query head of the group; K and V in 16 bits.
    query_bytes = problem.seqlen_q * problem.head_dim * 8 * problem.group_size
    key_bytes = problem.seqlen_k * problem.head_dim * 4
    keys = _sizes(problem, config, problem.num_kv_heads, -(-problem.seqlen_k // BACKWARD_BLOCK_N), query_bytes)
    queries = _sizes(problem, config, problem.num_heads, -(-problem.seqlen_q // 128), key_bytes)
    programs = min(device.num_sms, keys.num_tiles) if config.PERSISTENT else keys.num_tiles
    cap = problem.softcap
    scale_log2, cap_scale = (problem.scale, None) if cap is None else (cap, problem.scale / cap)
    num_m = -(-problem.seqlen_q // config.BLOCK_M)
    return BackwardPlan(config, keys, queries, (programs, 1, 1), num_m, scale_log2 * LOG2E, cap_scale)


def _sizes(problem: AttentionProblem, config: BackwardConfig, heads: int, num_blocks: int, streamed: int) -> Sizes:
    left, right = problem.band
    num_items = problem.batch * heads
    banded = config.HAS_RIGHT or config.HAS_LEFT
    return Sizes(
        num_heads=heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_blocks * num_items,
        items_per_wave=max(1, min(num_items, L2_BYTES // streamed)) if banded else 1,
        window_left=(left or 0) if config.HAS_LEFT else 0,
        window_right=(right or 0) if config.HAS_RIGHT else 0,
    )


@functools.cache
def _launcher(kernel: Any, *key: object) -> Launcher:
    del key  # what the kernel is compiled for
    return Launcher(kernel)


class Call(NamedTuple):
    """One backward call: the problem's plan and the tensors all kernels share, as TMA can address them."""

    problem: AttentionProblem
    plan: BackwardPlan
    operands: Operands
    out: Tensor
    dout: Tensor

    @property
    def key(self) -> tuple[object, ...]:
        """What launchers are cached under."""
        return self.plan.config, self.problem.dtype, self.operands.q.device

    @property
    def is_packed(self) -> bool:
        """Whether rows are packed."""
        return self.plan.config.IS_VARLEN

    def empty_like_rows(self, like: Tensor, heads: int, seqlen: int) -> Tensor:
        """An uninitialised gradient."""
        return empty_rows(self.problem, like, heads, seqlen, self.problem.head_dim)


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
    plan = backward_plan(problem, devices.of(operands.q.device))
    ready = operands._replace(q=tma_ready(operands.q), k=tma_ready(operands.k), v=tma_ready(operands.v))
    call = Call(problem, plan, ready, tma_ready(out), tma_ready(dout))
    with on_device_of(operands.q):
        num_rows = problem.batch * problem.num_heads * plan.num_m * plan.config.BLOCK_M
        stats = operands.q.new_empty(2 * num_rows, dtype=torch.float32)
        dq_acc = None
        if plan.config.FUSED:
            dq_acc = stats.new_empty((num_rows * plan.config.D // 32, 32))
        _prepare(call, lse, dlse, stats, dq_acc)
        dk, dv = _key_gradients(call, stats, dq_acc)
        dq = _query_gradient(call, stats, dq_acc) if wanted.dq else None
        dsinks = _sink_gradient(call, stats) if wanted.dsinks else None
    return Gradients(dq, dk if wanted.dk else None, dv if wanted.dv else None, None, dsinks)


def _prepare(call: Call, lse: Tensor, dlse: Tensor | None, stats: Tensor, dq_acc: Tensor | None) -> None:
    problem, config = call.problem, call.plan.config
    launcher = _launcher(prepare_rows_kernel, *call.key, problem.head_dim, dlse is None)
    launcher(
        (problem.batch * problem.num_heads, call.plan.num_m, 1),
        call.out,
        call.dout,
        lse.contiguous(),
        None if dlse is None else dlse.float().contiguous(),
        stats,
        dq_acc,
        call.operands.cu_seqlens_q,
        _stride_units(call.out),
        _stride_units(call.dout),
        problem.num_heads,
        problem.seqlen_q,
        problem.total_q,
        config.BLOCK_M,
        problem.head_dim,
        config.D,
        call.is_packed,
    )


def _key_gradients(call: Call, stats: Tensor, dq_acc: Tensor | None) -> tuple[Tensor, Tensor]:
    problem, plan, config = call.problem, call.plan, call.plan.config
    q, k, v = call.operands[:3]
    dk, dv = (call.empty_like_rows(t, problem.num_kv_heads, problem.seqlen_k) for t in (k, v))
    if call.is_packed:
        for gradient in (dk, dv):
            clear_tail(gradient, None, call.operands.cu_seqlens_k, 0.0)
    _launcher(backward_kernel, *call.key)(
        plan.key_grid,
        *(describe(t, config.BLOCK_M, config.D) for t in (q, call.dout)),
        *(describe(t, 64, config.D) for t in (k, v)),
        describe_flat(stats, [2 * config.BLOCK_M]),
        None if dq_acc is None else describe_flat(dq_acc, [128, 32]),
        *(describe(t, 64, config.D) for t in (dk, dv)),
        call.operands.cu_seqlens_q,
        call.operands.cu_seqlens_k,
        counter_for(q),
        plan.scale_log2,
        plan.cap_scale,
        problem.scale,
        plan.key_sizes,
        config,
    )
    return dk, dv


def _query_gradient(call: Call, stats: Tensor, dq_acc: Tensor | None) -> Tensor:
    problem, plan, config = call.problem, call.plan, call.plan.config
    dq = call.empty_like_rows(call.operands.q, problem.num_heads, problem.seqlen_q)
    if call.is_packed:
        clear_tail(dq, None, call.operands.cu_seqlens_q, 0.0)
    if dq_acc is None:
        _query_gradient_in_order(call, stats, dq)
        return dq
    _launcher(finish_queries_kernel, *call.key, problem.head_dim)(
        (problem.batch * problem.num_heads, 2 * plan.num_m, 1),
        dq_acc,
        dq,
        call.operands.cu_seqlens_q,
        problem.scale,
        _stride_units(dq),
        problem.num_heads,
        problem.seqlen_q,
        config.BLOCK_M,
        problem.head_dim,
        config.D,
        call.is_packed,
    )
    return dq


def _query_gradient_in_order(call: Call, stats: Tensor, dq: Tensor) -> None:
    problem, plan, config = call.problem, call.plan, call.plan.config
    q, k, v = call.operands[:3]
    _launcher(query_gradient_kernel, *call.key)(
        (plan.query_sizes.num_tiles, 1, 1),
        *(describe(t, 64, config.D) for t in (q, call.dout)),
        *(describe(t, 128, config.D) for t in (k, v)),
        describe(dq, 64, config.D),
        stats,
        call.operands.cu_seqlens_q,
        call.operands.cu_seqlens_k,
        plan.scale_log2,
        plan.cap_scale,
        problem.scale,
        plan.query_sizes,
        config,
    )


def _sink_gradient(call: Call, stats: Tensor) -> Tensor | None:
    """Sum over rows of exp(sink - lse) * (dlse - delta), from the packed statistics."""
    sinks = call.operands.sinks
    if sinks is None:
        return None
    rows = stats.view(call.problem.batch, call.problem.num_heads, call.plan.num_m, 2, call.plan.config.BLOCK_M)
    weight = torch.exp2(sinks.float().view(1, -1, 1, 1) * LOG2E - rows[:, :, :, 0])
    return -(weight * rows[:, :, :, 1]).sum((0, 2, 3)).to(sinks.dtype)


def _stride_units(rows: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, head, row) in units of 16 bytes; those of dimensions of size 1 do not matter."""
    strides: Any = rows.stride()
    batch, head, row = (0, strides[1], strides[0]) if rows.dim() == 3 else strides[:3]
    return batch // STRIDE_UNIT, head // STRIDE_UNIT, row // STRIDE_UNIT
