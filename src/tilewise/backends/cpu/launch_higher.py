"""Launches tangents (tangent.py) and second derivatives (twice.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.cpu import launch, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.launch import Block, Run, Values, both_lengths
from tilewise.backends.cpu.launch_backward import (
    BLOCK_ROWS,
    Kernel,
    finished,
    input_values,
    new_gradients,
    output_fields,
    row_blocks,
    schedule_of,
    workspace_floats,
)
from tilewise.backends.cpu.schedule import Division, bounds_of, round_up
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem

# Times in forward passes: six products instead of two; up to 15.
TANGENT_PER_FORWARD, TWICE_PER_FORWARD = 3, 8


def forward_tangent(
    problem: AttentionProblem, operands: Operands, tangents: Tangents
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out', lse') of canonical operands and tangents."""
    (out, lse), (dot_out, dot_lse) = launch.new_results(problem), launch.new_results(problem)
    if out.numel() == 0:
        return out, lse.fill_(-torch.inf), dot_out, dot_lse.zero_()
    lengths = launch.lengths(problem, operands)
    if operands.cu_seqlens_q is not None:
        launch.clear_unused_rows(operands.cu_seqlens_q, out, lse)
        launch.clear_unused_rows(operands.cu_seqlens_q, dot_out, None)
        dot_lse[:, int(operands.cu_seqlens_q[-1]) :].zero_()
    keep: list[Tensor] = []
    operands, tangents = _with_alike_biases(operands, tangents)
    values = launch.template_of(problem, operands)
    launch.put_operands(values, problem, operands, out, lse, keep)
    _put_tangents(values, problem, operands, tangents, dot_out, dot_lse, keep)
    division, bounds, in_tiles = (
        Division.of(problem),
        bounds_of(problem),
        launch.forward_program(problem) == "forward_matrix",
    )
    plan = schedule_of(row_blocks(division, *both_lengths(bounds, lengths)), problem.num_heads, 1)
    offsets, size = _tangent_workspace(problem.head_dim, problem.head_dim_v)
    launch.put(values, offsets)
    values[f.SEQLEN_Q] = problem.seqlen_q
    expected = TANGENT_PER_FORWARD * launch.expected_microseconds(division, bounds, lengths, in_tiles=in_tiles)
    count = launch.useful_threads(expected, threads.num_threads())
    run = Run.of("tangent", values, plan, size, count, is_long=expected >= launch.LONG_MICROSECONDS)
    run.start(values)
    return out, lse, dot_out, dot_lse


def backward_twice(
    problem: AttentionProblem,
    operands: Operands,
    tangents: Tangents,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Gradients of sum(out' * dout) + sum(lse' * dlse) with respect to the operands."""
    out, lse, dot_out, dot_lse = results
    lengths = launch.lengths(problem, operands)
    _, k_lengths = both_lengths(bounds_of(problem), lengths)
    runs = out.numel() > 0 and problem.seqlen_k > 0
    grads = new_gradients(problem, operands, wanted, k_lengths, zero=not runs)
    delta = torch.zeros(problem.lse_shape, dtype=torch.float32, device="cpu") if wanted.dsinks else None
    if runs:  # otherwise no probability depends on anything: a sink that is alone is the whole denominator
        keep: list[Tensor] = []
        read, along = _with_alike_biases(operands, tangents)
        values = input_values(problem, read, out, lse, dout, dlse, keep)
        launch.put(values, output_fields(problem, read, grads, delta, k_lengths, keep))
        _put_tangents(values, problem, read, along, dot_out, dot_lse, keep)
        rate = torch.zeros(problem.lse_shape, dtype=torch.float32, device="cpu") if wanted.dsinks else None
        if rate is not None:
            values[f.RATE] = rate.data_ptr()
        kernel = Kernel("twice", _twice_workspace, problem, wanted, TWICE_PER_FORWARD, values)
        kernel.start(bounds_of(problem), lengths)
        if grads.dq is not None:
            launch.clear_unused_rows(operands.cu_seqlens_q, grads.dq, None)
        if delta is not None and rate is not None and operands.sinks is not None:
            sinks = torch.zeros_like(operands.sinks) if tangents.sinks is None else tangents.sinks
            delta = delta.double() * (sinks.double()[:, None] - dot_lse.double()) + rate.double()
    return finished(problem, operands, wanted, grads, delta, lse, k_lengths)


def _put_tangents(
    values: Values,
    problem: AttentionProblem,
    operands: Operands,
    tangents: Tangents,
    dot_out: Tensor,
    dot_lse: Tensor,
    keep: list[Tensor],
) -> None:
    kind = launch.query_kind(problem, operands)
    kv_kind = problem.kind if problem.kind in ("dense", "paged") else "packed"
    dot_out = dot_out if dot_out.stride(-1) == 1 else dot_out.contiguous()
    keep += [dot_out, dot_lse.contiguous()]
    fields: Block = launch.tensor_fields(f.TOUT, dot_out, kind) | {f.TLSE: keep[-1].data_ptr()}
    if tangents.q is not None:
        fields |= launch.tensor_fields(f.TQ, tangents.q, kind)
    if tangents.k is not None:
        fields |= launch.tensor_fields(f.TK, tangents.k, kv_kind)
    if tangents.v is not None:
        fields |= launch.tensor_fields(f.TV, tangents.v, kv_kind)
    if tangents.bias is not None and operands.bias is not None:
        behind = tangents.bias.data_ptr() - operands.bias.data_ptr()
        fields |= {f.HAS_TBIAS: 1, f.TBIAS_BEHIND: behind}
        keep += [tangents.bias, operands.bias]
    if tangents.sinks is not None:
        keep.append(tangents.sinks.to(torch.float32).contiguous())
        fields[f.TSINKS] = keep[-1].data_ptr()
    # The packed q is scaled as plain scores, or those of features, need it (see launch.problem_fields).
    factor = 1.0 if values[f.FEATURES] & f.CHANGES_SCORES or problem.scale == 0.0 else abs(problem.scale)
    if problem.softcap is not None:
        factor = problem.softcap
        fields[f.TWICE_PER_CAP] = f.float_bits(2.0 / problem.softcap)
    fields[f.TANGENT_SCALE] = f.float_bits(factor)
    launch.put(values, fields)


def _with_alike_biases(operands: Operands, tangents: Tangents) -> tuple[Operands, Tangents]:
    """Bias and tangent with the same strides and a dtype that kernels read: rows of one are found from the other's."""
    bias, tangent = operands.bias, tangents.bias
    if bias is None or tangent is None:
        return operands, tangents
    if bias.stride() == tangent.stride() and bias.dtype == tangent.dtype and bias.dtype in launch.DTYPES:
        return operands, tangents
    # Only what neither repeats is copied.
    one, other = (
        x[
            tuple(
                slice(0, 1) if a == b == 0 else slice(None)
                for a, b in zip(bias.stride(), tangent.stride(), strict=True)
            )
        ]
        .to(torch.float32)
        .contiguous()
        .expand(bias.shape)
        for x in (bias, tangent)
    )
    return operands._replace(bias=one), tangents._replace(bias=other)


def _tangent_workspace(head_dim: int, head_dim_v: int) -> tuple[Block, int]:
    """Offsets in one thread's workspace: the forward's, and what tangents need."""
    isa = host()
    rows = round_up(BLOCK_ROWS, isa.panel)
    floats = launch.forward_floats(head_dim, head_dim_v, rows)
    floats |= {
        f.WS_TQ: floats[f.WS_Q],
        f.WS_TK: floats[f.WS_K],
        f.WS_TV: floats[f.WS_V],
        f.WS_TSCORES: isa.block_n * isa.panel,
        f.WS_TACC: floats[f.WS_ACC] - 2 * rows,
        f.WS_TSUM: rows,
        f.WS_CAP: isa.block_n * isa.panel,
    }
    return launch.places(floats)


def _twice_workspace(head_dim: int, head_dim_v: int, work: int, keys: int) -> tuple[Block, int]:
    """Offsets in one thread's workspace: the backward's, and what tangents need; `keys` rows of dk and dv."""
    isa = host()
    step = math.lcm(isa.value_step, isa.dim_step)
    wide, wide_v = round_up(head_dim, step), round_up(head_dim_v, step)
    floats = workspace_floats(head_dim, head_dim_v, work, keys)
    rows = floats[f.WS_LSE]
    # The numbers of a row lie in one buffer, one kind after the other, as higher.py reads them.
    numbers = (f.WS_LSE, f.WS_LSE_LOW, f.WS_DELTA, f.WS_TLSE, f.WS_RATE)
    floats = {name: count for name, count in floats.items() if name not in numbers}
    floats |= {
        f.WS_LSE: len(numbers) * rows,
        f.WS_TQ: rows * wide,
        f.WS_TQ_ROWS: rows * wide,
        f.WS_TK: isa.block_n * wide,
        f.WS_TV: isa.block_n * wide_v,
        f.WS_TK_COLUMNS: isa.block_n * wide,
        f.WS_USCORES: floats[f.WS_SCORES],
        f.WS_TSCORES: (isa.block_n + isa.lanes) * isa.panel,
        f.WS_TANH: isa.block_n * isa.panel,
    }
    offsets, size = launch.places(floats)
    return offsets | {name: offsets[f.WS_LSE] + 4 * rows * i for i, name in enumerate(numbers)}, size
