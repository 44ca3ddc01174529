"""Launches the backward pass: the work items, the choice among three kinds of pass, and gradients computed on
the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.backends.cpu import launch, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.emit import FP32
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.launch import Block, Values
from tilewise.backends.cpu.schedule import Lengths, Schedule, round_up
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

# Query rows of a block: their P and dS for a tile stay in the second-level cache.
BLOCK_ROWS = 256
# Keys per work item where dk and dv are split over keys.
BLOCK_KEYS = 256
EVERYTHING = 1 << 40
# Time of a backward pass in forward passes: up to seven products instead of two.
BACKWARD_PER_FORWARD = 3


def backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """Gradients of canonical operands."""
    q_lengths, k_lengths = launch.lengths(problem, operands)
    runs = out.numel() > 0 and problem.seqlen_k > 0
    grads = new_gradients(problem, operands, wanted, k_lengths, zero=not runs)
    delta = torch.zeros(problem.lse_shape, dtype=torch.float32, device="cpu") if wanted.dsinks else None
    if runs:
        keep: list[Tensor] = []
        values = input_values(problem, operands, out, lse, dout, dlse, keep)
        launch.put(values, output_fields(problem, operands, grads, delta, k_lengths, keep))
        run_passes("backward", workspace, problem, values, wanted, q_lengths, k_lengths, BACKWARD_PER_FORWARD)
        if grads.dq is not None:
            launch.clear_unused_rows(operands.cu_seqlens_q, grads.dq, None)
    elif delta is not None and dlse is not None:
        delta -= dlse  # a sink that is the whole denominator
    return finished(problem, operands, wanted, grads, delta, lse, k_lengths)


def finished(
    problem: AttentionProblem,
    operands: Operands,
    wanted: Wanted,
    grads: Gradients,
    delta: Tensor | None,
    lse: Tensor,
    k_lengths: Lengths,
) -> Gradients:
    """What kernels made, in the caller's shapes and dtypes."""
    dq, dk, dv, dbias, _ = grads
    if problem.kind == "paged":
        dk, dv = _into_pages(dk, operands.k, operands, k_lengths), _into_pages(dv, operands.v, operands, k_lengths)
    return Gradients(
        dq if wanted.dq else None,
        dk,
        dv,
        None if dbias is None else dbias.to(problem.bias_dtype),
        None if delta is None else _sink_gradient(operands, lse, delta),
    )


def input_values(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    keep: list[Tensor],
) -> Values:
    """Fields that the pass reads. Both head dims are padded for products in either direction."""
    isa, kind = host(), launch.query_kind(problem, operands)
    step = math.lcm(isa.value_step, isa.dim_step)
    dout = dout.to(problem.dtype)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse = lse.contiguous()
    keep += [out, dout, lse]
    values = launch.template_of(problem, operands)[:]
    launch.put_operands(values, problem, operands, out, lse, keep)
    launch.put(values, launch.tensor_fields(f.OUT, out, kind) | launch.tensor_fields(f.DOUT, dout, kind))
    if dlse is not None:
        keep.append(dlse.to(torch.float32).contiguous())
        values[f.DLSE] = keep[-1].data_ptr()
    values[f.DIM_V_PADDED] = round_up(problem.head_dim_v, isa.dim_step)
    values[f.DIM_WIDE], values[f.DIM_V_WIDE] = round_up(problem.head_dim, step), round_up(problem.head_dim_v, step)
    return values


def new_gradients(
    problem: AttentionProblem, operands: Operands, wanted: Wanted, k_lengths: Lengths, *, zero: bool
) -> Gradients:
    """Memory for the gradients. Those of pages are packed fp32 rows per sequence, because sequences may share pages."""

    def new(like: Tensor, *, zero: bool) -> Tensor:
        make = torch.zeros if zero else torch.empty
        swaps = problem.kind == "dense" and problem.layout == "bshd"
        shape = like.transpose(1, 2).shape if swaps else like.shape
        made = make(shape, dtype=like.dtype, device="cpu")
        return made.transpose(1, 2) if swaps else made

    def new_kv(like: Tensor) -> Tensor:
        if problem.kind != "paged":
            return new(like, zero=zero or problem.kind != "dense")
        shape = int(k_lengths.sum()), problem.num_kv_heads, like.shape[-1]
        return (torch.zeros if zero else torch.empty)(shape, dtype=torch.float32, device="cpu")

    shape = problem.bias_shape if wanted.dbias else None
    return Gradients(
        new(operands.q, zero=zero) if wanted.dq or wanted.dsinks else None,
        new_kv(operands.k) if wanted.dk else None,
        new_kv(operands.v) if wanted.dv else None,
        None if shape is None else torch.zeros(shape, dtype=torch.float32, device="cpu"),
    )


def output_fields(
    problem: AttentionProblem,
    operands: Operands,
    grads: Gradients,
    delta: Tensor | None,
    k_lengths: Lengths,
    keep: list[Tensor],
) -> Block:
    """The fields of the tensors that kernels write."""
    dense, paged = problem.kind == "dense", problem.kind == "paged"
    block: Block = {f.KV_GRAD_DTYPE: FP32 if paged else launch.DTYPES[problem.dtype]}
    if not dense:
        keep.append(torch.from_numpy(np.concatenate([[0], np.cumsum(k_lengths)])))
        block[f.CU_GRADS_K] = keep[-1].data_ptr()
    kv_kind = "dense" if dense else "packed"
    kinds = launch.query_kind(problem, operands), kv_kind, kv_kind
    for position, tensor, kind in zip((f.DQ, f.DK, f.DV), grads[:3], kinds, strict=True):
        if tensor is not None:
            block |= launch.tensor_fields(position, tensor, kind)
    if delta is not None:
        block[f.DELTA] = delta.data_ptr()
    if grads.dbias is not None:
        strides = [
            0 if size == 1 else 4 * stride for size, stride in zip(grads.dbias.shape, grads.dbias.stride(), strict=True)
        ]
        block |= dict(enumerate((grads.dbias.data_ptr(), *strides), f.DBIAS))
    return block


def _into_pages(packed: Tensor | None, pages: Tensor, operands: Operands, k_lengths: Lengths) -> Tensor | None:
    """Add every packed row into its slot of its page, in the order of the sequences."""
    if packed is None or operands.block_table is None:
        return None
    num_pages, page_size = pages.shape[:2]
    batch = np.repeat(np.arange(len(k_lengths)), k_lengths)
    position = np.arange(len(batch)) - np.repeat(np.cumsum(k_lengths) - k_lengths, k_lengths)
    page = operands.block_table.numpy()[batch, position // page_size].astype(np.int64)
    slots = torch.from_numpy(page * page_size + position % page_size)
    total = torch.zeros(num_pages * page_size, *pages.shape[2:], dtype=torch.float32, device="cpu")
    return total.index_add_(0, slots, packed).view(pages.shape).to(pages.dtype)


def _sink_gradient(operands: Operands, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum over rows of exp(sink - lse) * delta, in fp64 on one thread: the same bits for any number of threads."""
    sinks = operands.sinks
    assert sinks is not None
    packed = lse.dim() == 2
    logits = sinks.to(torch.float64).numpy().reshape((-1, 1) if packed else (1, -1, 1))
    # Rows after the last packed sequence have lse -inf and contribute nothing.
    seen = lse.to(torch.float64).nan_to_num(neginf=math.inf).numpy()
    with np.errstate(invalid="ignore"):  # a sink of +inf has no gradient: NaN, as in the reference
        share = np.exp(logits - seen) * delta.to(torch.float64).numpy()
        total: NDArray[np.float64] = -share.sum(axis=1 if packed else (0, 2))
    return torch.from_numpy(total).to(sinks.dtype)


def run_passes(
    program: str,
    workspace: Callable[[AttentionProblem, int, int], tuple[Block, int]],
    problem: AttentionProblem,
    values: Values,
    wanted: Wanted,
    q_lengths: Lengths,
    k_lengths: Lengths,
    per_forward: int,
) -> None:
    """Run a program over what is needed. `per_forward` is the time of all passes in forward passes."""
    expected = launch.expected_microseconds(problem, q_lengths, k_lengths)
    count = launch.useful_threads(expected, threads.num_threads())
    for work, plan, keys in _passes(problem, wanted, count, q_lengths.tobytes(), k_lengths.tobytes()):
        offsets, size = workspace(problem, work, keys)
        block = values[:]
        launch.put(block, offsets)
        block[f.WORK] = work
        launch.run_items(program, block, plan, size, count, per_forward * expected >= launch.LONG_MICROSECONDS)


@functools.lru_cache(maxsize=64)
def _passes(
    problem: AttentionProblem, wanted: Wanted, count: int, q_bytes: bytes, k_bytes: bytes
) -> list[tuple[int, Schedule, int]]:
    """WORK, items and keys of dk and dv of each pass, for lengths as int64: all gradients per K/V head at once, or dq
    and dk/dv separately; and dbias. Cached: the layers of a model ask for the same.
    """
    q_lengths, k_lengths = np.frombuffer(q_bytes, np.int64), np.frombuffer(k_bytes, np.int64)
    makes_dq, makes_dkv = wanted.dq or wanted.dsinks, wanted.dk or wanted.dv
    heads = len(q_lengths) * problem.num_kv_heads
    passes: list[tuple[int, Lengths, int]] = []
    # Either 5 products per tile on as many threads as there are heads, or 3 + 4 on all threads.
    if makes_dq and makes_dkv and 5 * -(-heads // count) * count <= 7 * heads:
        batches = np.arange(len(q_lengths))
        entries = _longest_first(_entries(batches, batches + 1), q_lengths * k_lengths)
        passes.append((f.MAKES_DQ | f.MAKES_DKV, entries, problem.num_kv_heads))
    else:
        if makes_dkv:
            passes.append((f.MAKES_DKV, _key_blocks(k_lengths), problem.num_kv_heads))
        if makes_dq:
            passes.append((f.MAKES_DQ, row_blocks(problem, q_lengths, k_lengths), problem.num_heads))
    if wanted.dbias and problem.bias_shape is not None:
        passes.append((f.MAKES_DBIAS, *_bias_owners(problem.bias_shape, q_lengths)))
    longest, found = int(k_lengths.max(initial=0)), []
    for work, entries, units in passes:
        if len(entries) > 0:
            keys = round_up(min(int((entries[:, 5] - entries[:, 4]).max()), longest), host().block_n)
            plan = Schedule(torch.from_numpy(entries), units, problem.num_heads // units, BLOCK_ROWS)
            found.append((work, plan, keys))
    return found


# Schedules: entries of (first batch, end batch, first row, end row, first key, end key).


def _entries(
    first: Lengths,
    end: Lengths,
    *,
    rows: tuple[Lengths, Lengths] | None = None,
    keys: tuple[Lengths, Lengths] | None = None,
) -> Lengths:
    nothing, everything = np.zeros_like(first), np.full_like(first, EVERYTHING)
    row_range, key_range = rows or (nothing, everything), keys or (nothing, everything)
    return np.ascontiguousarray(np.stack([first, end, *row_range, *key_range], axis=1), dtype=np.int64)


def _longest_first(entries: Lengths, cost: Lengths) -> Lengths:
    return np.ascontiguousarray(entries[np.argsort(-cost, kind="stable")])


def _blocks(lengths: Lengths, size: int) -> tuple[Lengths, Lengths]:
    """(sequence, first row) of every block of `size` rows."""
    counts = -(-lengths // size)
    batch = np.repeat(np.arange(len(lengths)), counts)
    return batch, (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size


def row_blocks(problem: AttentionProblem, q_lengths: Lengths, k_lengths: Lengths) -> Lengths:
    """Entries that own a block of rows each."""
    batch, first = _blocks(q_lengths, BLOCK_ROWS)
    entries = _entries(batch, batch + 1, rows=(first, first + BLOCK_ROWS))
    return _longest_first(entries, schedule.keys_seen(problem, first + BLOCK_ROWS, q_lengths[batch], k_lengths[batch]))


def _key_blocks(k_lengths: Lengths) -> Lengths:
    size = round_up(BLOCK_KEYS, host().block_n)
    batch, first = _blocks(k_lengths, size)
    return _entries(batch, batch + 1, keys=(first, first + size))


def _bias_owners(bias_shape: tuple[int, int, int, int], q_lengths: Lengths) -> tuple[Lengths, int]:
    """Entries that own a part of dbias: broadcast batches, heads and rows are summed within one entry."""
    batches, heads, rows, _ = bias_shape
    lengths = q_lengths if batches > 1 or len(q_lengths) == 1 else q_lengths.max(keepdims=True, initial=0)
    first, end = np.arange(len(lengths)), np.arange(len(lengths)) + 1
    if len(lengths) != len(q_lengths):
        end = np.full_like(end, len(q_lengths))
    if rows > 1:
        owner, row = _blocks(lengths, BLOCK_ROWS)
        return _entries(first[owner], end[owner], rows=(row, row + BLOCK_ROWS)), heads
    return _entries(first, end), heads


@functools.lru_cache(maxsize=256)
def workspace(problem: AttentionProblem, work: int, keys: int) -> tuple[Block, int]:
    """Offsets in one thread's workspace; `keys` rows of dk and dv."""
    return launch.places(workspace_floats(problem, work, keys))


def workspace_floats(problem: AttentionProblem, work: int, keys: int) -> dict[int, int]:
    """The buffers of a workspace and their sizes in floats."""
    isa = host()
    step = math.lcm(isa.value_step, isa.dim_step)
    wide, wide_v = round_up(problem.head_dim, step), round_up(problem.head_dim_v, step)
    rows, panels = round_up(BLOCK_ROWS, isa.panel), -(-BLOCK_ROWS // isa.panel)
    scores = (panels * isa.block_n + isa.lanes) * isa.panel
    return {
        f.WS_Q: rows * wide,
        f.WS_DOUT: rows * wide_v,
        f.WS_Q_ROWS: rows * wide,
        f.WS_DOUT_ROWS: rows * wide_v,
        f.WS_DQ: rows * wide,
        f.WS_K: isa.block_n * wide,
        f.WS_V: isa.block_n * wide_v,
        f.WS_K_COLUMNS: isa.block_n * wide,
        f.WS_SCORES: scores,
        f.WS_DSCORES: scores,
        f.WS_CAP: isa.block_n * isa.panel,
        f.WS_EXTRA: max(wide_v, (isa.block_n + isa.lanes) * isa.panel),
        f.WS_STAGE: isa.panel * max(wide, wide_v, isa.block_n),
        f.WS_MAX: isa.panel,
        f.WS_ONES: isa.panel,
        f.WS_LSE: rows,
        f.WS_LSE_LOW: rows,
        f.WS_DELTA: rows,
        f.WS_HEAD_ROW: 4,
        f.WS_ROWS: f.ROW_FIELDS * rows,
        f.WS_PANELS: f.PANEL_BYTES // 4 * panels,
        f.WS_DK: keys * wide if work & f.MAKES_DKV else 0,
        f.WS_DV: keys * wide_v if work & f.MAKES_DKV else 0,
    }
