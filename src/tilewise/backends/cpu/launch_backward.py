"""Launches the backward pass: the work items, the choice among three kinds of pass, and gradients computed on
the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

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

__all__ = [
    "BLOCK_ROWS",
    "Buffers",
    "backward",
    "both_lengths",
    "empty_like",
    "input_values",
    "row_blocks",
    "run_passes",
    "workspace_floats",
]

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
    grads = Buffers(problem, operands, wanted)
    if out.numel() > 0 and problem.seqlen_k > 0:
        q_lengths, k_lengths = both_lengths(problem, operands)
        keep: list[Tensor] = []
        values = input_values(problem, operands, out, lse, dout, dlse, keep)
        launch.put(values, grads.fields(problem, operands, k_lengths))
        run_passes("backward", workspace, problem, values, wanted, q_lengths, k_lengths)
        if problem.kind != "dense" and grads.dq is not None:
            launch.clear_unused_rows(int(q_lengths.sum()), grads.dq, None)
        return grads.finished(problem, operands, lse, k_lengths)
    return grads.empty(problem, operands, lse, dlse)


def both_lengths(problem: AttentionProblem, operands: Operands) -> tuple[Lengths, Lengths]:
    """Query and key lengths of the sequences."""
    return schedule.dense_lengths(problem) if problem.kind == "dense" else launch.lengths(problem, operands)


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


Workspace = Callable[[AttentionProblem, int, int], tuple[Block, int]]


class Buffers:
    """The gradient tensors. dk and dv of pages are computed per sequence in fp32, because sequences may share pages."""

    def __init__(self, problem: AttentionProblem, operands: Operands, wanted: Wanted) -> None:
        self.dq = empty_like(problem, operands.q) if wanted.dq or wanted.dsinks else None
        self.returns_dq = wanted.dq
        new = empty_like if problem.kind == "dense" else _zeros_like
        paged = problem.kind == "paged"
        self.dk = new(problem, operands.k) if wanted.dk and not paged else None
        self.dv = new(problem, operands.v) if wanted.dv and not paged else None
        self.wanted = wanted
        self.delta = torch.zeros(problem.lse_shape, dtype=torch.float32, device="cpu") if wanted.dsinks else None
        shape = problem.bias_shape if wanted.dbias else None
        self.dbias = torch.zeros(shape, dtype=torch.float32, device="cpu") if shape is not None else None
        self.cu_grads: Tensor | None = None

    def fields(self, problem: AttentionProblem, operands: Operands, k_lengths: Lengths) -> Block:
        """The fields of the tensors that kernels write."""
        block: Block = {f.KV_GRAD_DTYPE: launch.DTYPES[problem.dtype]}
        if problem.kind == "paged":
            total = int(k_lengths.sum())
            self.dk = _packed_sums(problem, total, problem.head_dim) if self.wanted.dk else None
            self.dv = _packed_sums(problem, total, problem.head_dim_v) if self.wanted.dv else None
            block[f.KV_GRAD_DTYPE] = FP32
        if problem.kind != "dense":
            self.cu_grads = torch.from_numpy(np.concatenate([[0], np.cumsum(k_lengths)]))
            block[f.CU_GRADS_K] = self.cu_grads.data_ptr()
        kv_kind = "dense" if problem.kind == "dense" else "packed"
        if self.dq is not None:
            block |= launch.tensor_fields(f.DQ, self.dq, launch.query_kind(problem, operands))
        if self.dk is not None:
            block |= launch.tensor_fields(f.DK, self.dk, kv_kind)
        if self.dv is not None:
            block |= launch.tensor_fields(f.DV, self.dv, kv_kind)
        if self.delta is not None:
            block[f.DELTA] = self.delta.data_ptr()
        if self.dbias is not None:
            block[f.DBIAS] = self.dbias.data_ptr()
            sizes_and_strides = zip(self.dbias.shape, self.dbias.stride(), strict=True)
            for i, (size, stride) in enumerate(sizes_and_strides):
                block[f.DBIAS + 1 + i] = 0 if size == 1 else 4 * stride
        return block

    def finished(self, problem: AttentionProblem, operands: Operands, lse: Tensor, k_lengths: Lengths) -> Gradients:
        """The gradients in the caller's shapes."""
        dk, dv = self.dk, self.dv
        if problem.kind == "paged":
            slots = _slots(operands, k_lengths)
            dk = _into_pages(dk, operands.k, slots) if dk is not None else None
            dv = _into_pages(dv, operands.v, slots) if dv is not None else None
        dbias = self.dbias.to(problem.bias_dtype) if self.dbias is not None else None
        dsinks = _sink_gradient(operands, lse, self.delta) if self.delta is not None else None
        return Gradients(self.dq if self.returns_dq else None, dk, dv, dbias, dsinks)

    def empty(self, problem: AttentionProblem, operands: Operands, lse: Tensor, dlse: Tensor | None) -> Gradients:
        """Gradients if no query sees a key: zeros, except for a sink that is the whole denominator."""
        zeros = [torch.zeros_like(x) if want else None for x, want in zip(operands[:3], self.wanted[:3], strict=True)]
        dbias = self.dbias.to(problem.bias_dtype) if self.dbias is not None else None
        dsinks = None
        if self.delta is not None:
            self.delta.copy_(-dlse) if dlse is not None else self.delta.zero_()
            dsinks = _sink_gradient(operands, lse, self.delta)
        return Gradients(zeros[0], zeros[1], zeros[2], dbias, dsinks)


def empty_like(problem: AttentionProblem, tensor: Tensor) -> Tensor:
    """Uninitialised memory in the order of the caller's layout, heads first."""
    if problem.kind == "dense" and problem.layout == "bshd":
        b, h, s, d = tensor.shape
        return torch.empty((b, s, h, d), dtype=tensor.dtype, device="cpu").transpose(1, 2)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _zeros_like(_problem: AttentionProblem, tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _packed_sums(problem: AttentionProblem, total: int, dim: int) -> Tensor:
    """Memory for the gradients of paged rows, sequence after sequence."""
    return torch.empty(total, problem.num_kv_heads, dim, dtype=torch.float32, device="cpu")


def _slots(operands: Operands, k_lengths: Lengths) -> Tensor:
    """Page and slot of every key as one number, sequence after sequence."""
    assert operands.block_table is not None
    page_size = operands.k.shape[1]
    batch = np.repeat(np.arange(len(k_lengths)), k_lengths)
    position = np.arange(len(batch)) - np.repeat(np.cumsum(k_lengths) - k_lengths, k_lengths)
    page = operands.block_table.numpy()[batch, position // page_size].astype(np.int64)
    return torch.from_numpy(page * page_size + position % page_size)


def _into_pages(packed: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Add every row into its slot, in the order of the sequences."""
    total = torch.zeros(pages.shape[0] * pages.shape[1], *pages.shape[2:], dtype=torch.float32, device="cpu")
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


# Schedules: entries of (first batch, end batch, first row, end row, first key, end key).


class _Effort(NamedTuple):
    """The program of the passes and its workspace; maximum threads, keys of the longest sequence (seqlen_k is only a
    bound), and whether long.
    """

    program: str
    workspace: Workspace
    threads: int
    longest: int
    is_long: bool


def run_passes(
    program: str,
    workspace: Workspace,
    problem: AttentionProblem,
    values: Values,
    wanted: Wanted,
    q_lengths: Lengths,
    k_lengths: Lengths,
    per_forward: int = BACKWARD_PER_FORWARD,
) -> None:
    """Run what is needed: all gradients per K/V head at once, or dq and dk/dv separately; and dbias."""
    expected = launch.expected_microseconds(problem)
    count = launch.useful_threads(expected, threads.num_threads())
    long = launch.is_long(problem, expected, q_lengths, k_lengths, per_forward)
    effort = _Effort(program, workspace, count, int(k_lengths.max(initial=0)), long)
    makes_dq, makes_dkv = wanted.dq or wanted.dsinks, wanted.dk or wanted.dv
    heads = len(q_lengths) * problem.num_kv_heads
    # Either 5 products per tile on as many threads as there are heads, or 3 + 4 on all threads.
    whole = makes_dq and makes_dkv and 5 * -(-heads // count) * count <= 7 * heads
    batches = np.arange(len(q_lengths))
    if whole:
        entries = _entries(batches, batches + 1)
        _run(
            problem,
            values,
            f.MAKES_DQ | f.MAKES_DKV,
            _longest_first(entries, q_lengths * k_lengths),
            problem.num_kv_heads,
            effort,
        )
    else:
        if makes_dkv:
            _run(problem, values, f.MAKES_DKV, _key_blocks(k_lengths), problem.num_kv_heads, effort)
        if makes_dq:
            _run(problem, values, f.MAKES_DQ, row_blocks(problem, q_lengths, k_lengths), problem.num_heads, effort)
    if wanted.dbias and problem.bias_shape is not None:
        entries, units = _bias_owners(problem, q_lengths)
        _run(problem, values, f.MAKES_DBIAS, entries, units, effort)


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


def _bias_owners(problem: AttentionProblem, q_lengths: Lengths) -> tuple[Lengths, int]:
    """Entries that own a part of dbias: broadcast batches, heads and rows are summed within one entry."""
    assert problem.bias_shape is not None
    batches, heads, rows, _ = problem.bias_shape
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
        f.WS_ROWS: launch.ROW_TABLE_FIELDS * rows,
        f.WS_PANELS: launch.PANEL_BOUNDS_BYTES // 4 * panels,
        f.WS_DK: keys * wide if work & f.MAKES_DKV else 0,
        f.WS_DV: keys * wide_v if work & f.MAKES_DKV else 0,
    }


def _run(problem: AttentionProblem, values: Values, work: int, entries: Lengths, units: int, effort: _Effort) -> None:
    """One pass over a list of entries."""
    if len(entries) == 0:
        return
    keys = round_up(min(int((entries[:, 5] - entries[:, 4]).max()), effort.longest), host().block_n)
    offsets, size = effort.workspace(problem, work, keys)
    plan = Schedule(torch.from_numpy(entries), units, problem.num_heads // units, BLOCK_ROWS)
    values = values[:]
    launch.put(values, offsets)
    values[f.WORK] = work
    launch.run_items(effort.program, values, plan, size, effort.threads, effort.is_long)
