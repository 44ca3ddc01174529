"""From canonical operands to the forward kernel: what depends on the problem alone is planned once and cached.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.hopper.configs import ForwardConfig, forward_config
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.launching import Launcher, counter_for, describe, tma_ready
from tilewise.backends.hopper.schedule import Sizes
from tilewise.backends.hopper.tails import clear_tail_kernel
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = ["clear_tail", "empty_rows", "on_device_of", "run_forward"]

# Heads walked together under a causal mask: their K and V in this much of the 50 MiB of L2, and at most so many.
L2_BYTES, MAX_WAVE_ITEMS = 48 << 20, 64
# Programs that clear packed rows past the last sequence.
TAIL_PROGRAMS = 132


class ForwardPlan(NamedTuple):
    """What every call with a problem shares."""

    config: ForwardConfig
    sizes: Sizes
    grid: tuple[int, int, int]
    scale_log2: float
    cap_scale: float


@functools.lru_cache(maxsize=4096)
def forward_plan(problem: AttentionProblem, device: DeviceSpec) -> ForwardPlan:
    """Everything about a call that needs no tensor."""
    config = forward_config(problem)
    num_blocks = -(-problem.seqlen_q // (64 * config.NUM_WARPGROUPS))
    num_items = problem.batch * problem.num_heads
    head_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * 2
    banded = config.HAS_RIGHT or config.HAS_LEFT
    left, right = problem.band
    sizes = Sizes(
        num_heads=problem.num_heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_blocks * num_items,
        items_per_wave=max(1, min(num_items, MAX_WAVE_ITEMS, L2_BYTES // max(head_bytes, 1))) if banded else 1,
        window_left=(left or 0) if config.HAS_LEFT else 0,
        window_right=(right or 0) if config.HAS_RIGHT else 0,
    )
    scale_log2 = (problem.scale if problem.softcap is None else problem.softcap) * LOG2E
    cap_scale = 0.0 if problem.softcap is None else problem.scale / problem.softcap
    return ForwardPlan(config, sizes, (min(device.num_sms, sizes.num_tiles), 1, 1), scale_log2, cap_scale)


@functools.cache
def _forward_launcher(
    config: ForwardConfig, dtype: torch.dtype, sinks: torch.dtype | None, device: torch.device
) -> Launcher:
    del config, dtype, sinks, device  # the key
    return Launcher(forward_kernel)


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    q, sinks = operands.q, None if operands.sinks is None else operands.sinks.contiguous()
    out = empty_rows(problem, q, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    plan = forward_plan(problem, devices.of(q.device))
    config = plan.config
    with on_device_of(q):
        launcher = _forward_launcher(config, q.dtype, None if sinks is None else sinks.dtype, q.device)
        if config.IS_VARLEN:
            clear_tail(out, lse, operands.cu_seqlens_q, float("-inf"))
        launcher(
            plan.grid,
            *_descriptors(config, tma_ready(q), tma_ready(operands.k), tma_ready(operands.v), out),
            lse,
            sinks,
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            counter_for(q),
            plan.scale_log2,
            plan.cap_scale,
            plan.sizes,
            config,
        )
    return out, lse


def _descriptors(config: ForwardConfig, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[object]:
    """Of both column parts, None where there is no second one."""
    tiles = (
        (q, 64, config.D, config.D_REST),
        (k, config.BLOCK_N, config.D, config.D_REST),
        (v, config.BLOCK_N, config.DV, config.DV_REST),
        (out, 64, config.DV, config.DV_REST),
    )
    first = [describe(tensor, rows, columns) for tensor, rows, columns, _ in tiles]
    return first + [describe(tensor, rows, rest) if rest else None for tensor, rows, _, rest in tiles]


def empty_rows(problem: AttentionProblem, like: Tensor, heads: int, seqlen: int, head_dim: int) -> Tensor:
    """An uninitialised tensor of token rows in canonical shape, over the memory order of the problem's layout."""
    if problem.kind != "dense":
        return like.new_empty((like.shape[0], heads, head_dim))
    if problem.layout == "bshd":
        return like.new_empty((problem.batch, seqlen, heads, head_dim)).transpose(1, 2)
    return like.new_empty((problem.batch, heads, seqlen, head_dim))


@functools.cache
def _tail_launcher(dtype: torch.dtype, has_lse: bool, device: torch.device) -> Launcher:
    del dtype, has_lse, device  # the key
    return Launcher(clear_tail_kernel)


def clear_tail(rows: Tensor, lse: Tensor | None, cu_seqlens: Tensor | None, lse_value: float) -> None:
    """Zero the packed rows past the last sequence, and set their lse: no tile covers them."""
    if cu_seqlens is not None:
        total, heads, width = rows.shape
        launcher = _tail_launcher(rows.dtype, lse is not None, rows.device)
        launcher(
            (TAIL_PROGRAMS, 1, 1),
            rows,
            lse,
            cu_seqlens,
            cu_seqlens.shape[0] - 1,
            total,
            heads,
            heads * width,
            lse_value,
        )


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels start on the current device: switch only if that is another one."""
    if tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
