"""Launch plans of the FP8 forward: transpose V into the workspace, then compute. launch.py says what a plan holds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.gpu.launching import HEADS_FIRST, MAX_PASSES, Allocation, Pass, RawViews, View, Wish, named_views
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple
from tilewise.backends.hopper.fp8_configs import Fp8Config, Fp8Tile, fp8_config
from tilewise.backends.hopper.fp8_forward import fp8_forward_kernel
from tilewise.backends.hopper.fp8_values import transpose_values_kernel
from tilewise.backends.hopper.launch import (
    TMA_BYTES,
    ForwardPass,
    bind_pass,
    describe,
    describe_flat,
    index_address,
    listing_call,
    prepared,
    result_allocations,
    run_pass,
    shapes_of,
    sizes_of,
    unaddressable,
    work_allocation,
)
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = ["bind_fp8_forward", "fp8_allocations", "fp8_calls", "fp8_pass", "run_fp8_forward"]

E4M3 = torch.float8_e4m3fn
# Bytes that the transposition of V moves at a time.
WORD = 4


def run_fp8_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    return run_pass(fp8_pass, problem, operands)


def bind_fp8_forward(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Binding."""
    return bind_pass(fp8_pass, problem, operands, want_lse=want_lse)


@functools.lru_cache(maxsize=MAX_PASSES)
def fp8_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wish: Wish = HEADS_FIRST,
    tile: Fp8Tile | None = None,
) -> ForwardPass:  # fmt: skip
    """The launch plan of a problem with these strides, cached; `tile` replaces the table's choice."""
    views, made = named_views(Operands._fields, raw), fp8_allocations(problem)
    copies = unaddressable(problem, views, ("q", "k", "v"))
    views |= {name: allocation.view for name, allocation in made.items()}
    calls = [] if copies else fp8_calls(problem, device, views, tile)
    work = work_allocation(problem, fp8_config(problem, tile), itemsize=1)
    return prepared(copies, problem, made | {"work": work}, calls, device, index, wish)


def fp8_allocations(problem: AttentionProblem) -> dict[str, Allocation]:
    """The tensors that a call allocates: out, lse, and the tiles of V^T."""
    config = fp8_config(problem)
    slots = problem.num_kv_heads * _tiles_per_head(problem, config)
    slots *= 1 if config.IS_VARLEN else problem.batch
    values = Allocation.contiguous((slots, config.D, config.BLOCK_N), E4M3)
    return result_allocations(problem) | {"values": values}


def fp8_calls(
    problem: AttentionProblem, device: DeviceSpec, views: dict[str, View], tile: Fp8Tile | None = None
) -> list[KernelCall]:
    """All kernels in order: list the packed blocks, transpose V, compute."""
    config = fp8_config(problem, tile)
    sizes = sizes_of(problem, config, itemsize=1)
    tiles_per_head = _tiles_per_head(problem, config)
    values_shape = fp8_allocations(problem)["values"].shape
    arguments = _descriptors(problem, config, views) | {
        "v_desc": describe_flat(Address("values", E4M3), values_shape, [1, config.D, config.BLOCK_N]),
        "lse_ptr": Address("lse", torch.float32),
        "sinks_ptr": Address("sinks", views["sinks"].dtype, aligned=False) if "sinks" in views else None,
        **_scales(problem, views),
        "counter_ptr": Address("counter", torch.int32, aligned=False),
        "work_ptr": Address("work", torch.int32) if config.IS_VARLEN else None,
        "tiles_per_head": tiles_per_head,
        "scale_log2": problem.scale * LOG2E,
        "sizes": sizes,
        "C": config,
    }
    forward = KernelCall(fp8_forward_kernel, (min(device.num_sms, sizes.num_tiles), 1, 1), arguments)
    calls = [_transposition(problem, config, views, tiles_per_head), forward]
    return [listing_call(problem, config, sizes, itemsize=1), *calls] if config.IS_VARLEN else calls


def _tiles_per_head(problem: AttentionProblem, config: Fp8Config) -> int:
    """Tiles of V^T that a head has space for; every packed sequence starts on a tile of its own."""
    if config.IS_VARLEN:
        return problem.total_k // config.BLOCK_N + problem.batch
    return -(-problem.seqlen_k // config.BLOCK_N)


def _descriptors(problem: AttentionProblem, config: Fp8Config, views: dict[str, View]) -> dict[str, Any]:
    shapes = shapes_of(problem)
    shapes["out"] = (*shapes["q"][:-1], problem.head_dim_v)
    rows = {"q": 64, "k": config.BLOCK_N, "out": 64}
    return {f"{name}_desc": describe(name, views[name], shapes[name], n, config.D) for name, n in rows.items()}


def _scales(problem: AttentionProblem, views: dict[str, View]) -> dict[str, tuple[Any, ...]]:
    """(pointer, strides of batch entry, head, block) of each scale; a stride is 0 where a scale is shared."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, block in zip(("q_scale", "k_scale", "v_scale"), problem.scale_blocks, strict=True):
        batch, head, step = views[name].strides
        found[name] = (Address(name, torch.float32, aligned=False), batch, head, step if block else 0)
    return found


def _transposition(
    problem: AttentionProblem, config: Fp8Config, views: dict[str, View], tiles_per_head: int
) -> KernelCall:
    # The stride of a dimension of size 1 may be anything; it is never used.
    sides = zip(shapes_of(problem)["v"][:-1], views["v"].strides, strict=False)
    strides = tuple(Multiple((TMA_BYTES if size == 1 else stride) // WORD, TMA_BYTES // WORD) for size, stride in sides)
    arguments = {
        "v_ptr": Address("v", torch.int32),
        "out_ptr": Address("values", torch.int32),
        "cu_seqlens": index_address(views, "cu_seqlens_k"),
        "seqlen": problem.seqlen_k,
        "num_heads": problem.num_kv_heads,
        "tiles_per_head": tiles_per_head,
        "v_strides": (0, strides[1], strides[0]) if config.IS_VARLEN else strides,
        "HEAD_DIM": problem.head_dim_v,
        "D": config.D,
        "BLOCK_N": config.BLOCK_N,
    }
    grid = (-(-problem.seqlen_k // config.BLOCK_N) * problem.num_kv_heads * problem.batch, 1, 1)
    return KernelCall(transpose_values_kernel, grid, arguments)
