"""Launch plans of decoding: from canonical operands to kernel calls; see launch.py for what a plan holds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.gpu.launching import HEADS_FIRST, MAX_PASSES, Allocation, Pass, RawViews, View, Wish, named_views
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple
from tilewise.backends.hopper.decode import decode_kernel
from tilewise.backends.hopper.decode_configs import DecodeConfig, decode_config, num_programs, tokens_of
from tilewise.backends.hopper.decode_schedule import DecodeSizes
from tilewise.backends.hopper.launch import (
    ForwardPass,
    bind_pass,
    clear_tail_call,
    describe,
    index_address,
    packed_rows,
    page_rows,
    prepared,
    result_allocations,
    run_pass,
    shapes_of,
    unaddressable,
)
from tilewise.device import DeviceSpec
from tilewise.numerics import LOG2E
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

__all__ = ["bind_decode", "decode_arguments", "decode_calls", "part_sizes", "run_decode"]

# Contiguous bytes of a row in a swizzled tile: the width of the boxes that TMA fetches from a page.
PANEL_BYTES = 128


def run_decode(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    return run_pass(decode_pass, problem, operands)


def bind_decode(problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Pass | None:
    """See Binding."""
    return bind_pass(decode_pass, problem, operands, want_lse=want_lse)


@functools.lru_cache(maxsize=MAX_PASSES)
def decode_pass(
    problem: AttentionProblem, device: DeviceSpec, index: int, raw: RawViews, wish: Wish = HEADS_FIRST
) -> ForwardPass:
    """The launch plan of a problem with these strides, cached."""
    views, made = named_views(Operands._fields, raw), result_allocations(problem)
    copies = unaddressable(problem, views, ("k", "v"))
    calls = [] if copies else decode_calls(problem, device, views | {name: a.view for name, a in made.items()})
    config = decode_config(problem, packed_queries="cu_seqlens_q" in views)
    parts = sum(part_sizes(config, num_programs(problem, config, device)))
    room = made | {"workspace": Allocation.contiguous((parts,), torch.float32)}
    return prepared(copies, problem, room, calls, device, index, wish, problem.batch * problem.num_kv_heads)


def part_sizes(config: DecodeConfig, programs: int) -> tuple[int, int]:
    """fp32 words of the workspace for O, and for maxima and sums: two parts a program."""
    parts = 2 * programs * config.LANES
    return parts * config.ROWS * config.DV, parts * 2 * config.ROWS


def decode_calls(problem: AttentionProblem, device: DeviceSpec, views: dict[str, View]) -> list[KernelCall]:
    """All kernels in order: clear packed rows past the last sequence, then decode."""
    config = decode_config(problem, packed_queries="cu_seqlens_q" in views)
    programs = num_programs(problem, config, device)
    call = KernelCall(decode_kernel, (programs, 1, 1), decode_arguments(problem, config, programs, views))
    if not config.PACKED_Q:
        return [call]
    shape = (problem.total_q, problem.num_heads, problem.head_dim_v)
    return [clear_tail_call("out", shape, problem, "cu_seqlens_q", with_lse=True), call]


def decode_arguments(
    problem: AttentionProblem, config: DecodeConfig, programs: int, views: dict[str, View]
) -> dict[str, Any]:
    """The arguments of the decode kernel; `programs` CTAs share the work."""
    paged = config.IS_PAGED
    left, right = problem.band
    return {
        **{f"{name}_desc": _described(problem, config, name, views[name]) for name in ("k", "v")},
        **{name: _rows(problem, name, views[name]) for name in ("q", "out", "lse")},
        "sinks_ptr": Address("sinks", views["sinks"].dtype, aligned=False) if "sinks" in views else None,
        "parts_ptr": Address("workspace", torch.float32),
        "stats_ptr": Address("workspace", torch.float32, offset=4 * part_sizes(config, programs)[0]),
        "counters_ptr": Address("counter", torch.int32, aligned=False),
        "cu_seqlens_q": index_address(views, "cu_seqlens_q"),
        "cu_seqlens_k": index_address(views, "seqlens_k" if paged else "cu_seqlens_k"),
        "block_table": index_address(views, "block_table"),
        "table_stride": views["block_table"].strides[0] if paged else None,
        "k_page_rows": page_rows(problem, views["k"]) if paged else None,
        "v_page_rows": page_rows(problem, views["v"]) if paged else None,
        "k_scale": _scale("k_scale", views),
        "v_scale": _scale("v_scale", views),
        "scale_log2": (problem.scale if problem.softcap is None else problem.softcap) * LOG2E,
        "cap_scale": 0.0 if problem.softcap is None else problem.scale / problem.softcap,
        "sizes": DecodeSizes(
            batch=problem.batch,
            pace=problem.batch / (programs * config.LANES),
            num_kv_heads=problem.num_kv_heads,
            seqlen_q=tokens_of(problem, packed_queries=config.PACKED_Q),
            seqlen_k=problem.seqlen_k,
            total_q=problem.total_q,
            window_left=(left or 0) if config.HAS_LEFT else 0,
            window_right=(right or 0) if config.HAS_RIGHT else 0,
        ),
        "C": config,
    }


def _described(problem: AttentionProblem, config: DecodeConfig, name: str, view: View) -> Any:
    rows, columns = config.BLOCK_N, config.D if name == "k" else config.DV
    if config.IS_PAGED:
        rows, columns = config.CHUNK, min(columns, PANEL_BYTES // config.ITEMSIZE)
    return describe(name, packed_rows(problem, name, view), shapes_of(problem)[name], rows, columns)


def _scale(name: str, views: dict[str, View]) -> tuple[Any, ...] | None:
    """(address, stride of a page, of a head)."""
    if name not in views:
        return None
    return (Address(name, torch.float32, aligned=False), *views[name].strides[:2])


def _rows(problem: AttentionProblem, name: str, view: View) -> tuple[Any, ...]:
    """(address, stride of a sequence, of a head, of a token).

    The kernel computes token offsets in 32 bits; if they may exceed that, the token stride is passed as 64 bits.
    """
    sequence, head, token = 0, view.strides[1], view.strides[0]
    if problem.kind == "dense":
        sequence, head, token = view.strides[:3]
    elif name == "lse":  # (head, token)
        head, token = view.strides
    far = problem.seqlen_q * token >= 1 << 31
    address = Address(name, view.dtype, aligned=view.aligned)
    return address, sequence, head, Multiple(token, 1, wide=True) if far else token
