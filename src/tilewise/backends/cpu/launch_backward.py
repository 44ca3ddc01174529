"""Launches the backward pass: the work items, the choice among three kinds of pass, and gradients computed on
the host.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.backends.cpu import launch, schedule, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.emit import FP32
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.launch import Block, Run, Values, both_lengths
from tilewise.backends.cpu.schedule import (
    BothLengths,
    Bounds,
    Division,
    Lengths,
    Numbers,
    Schedule,
    bounds_of,
    keys_seen,
    round_up,
)
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

# Query rows of a block: their P and dS for a tile stay in the second-level cache.
BLOCK_ROWS = 256
# Keys per work item where dk and dv are split over keys.
BLOCK_KEYS = 256
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
    lengths = launch.lengths(problem, operands)
    _, k_lengths = both_lengths(bounds_of(problem), lengths)
    runs = out.numel() > 0 and problem.seqlen_k > 0
    grads = new_gradients(problem, operands, wanted, k_lengths, zero=not runs)
    delta = torch.zeros(problem.lse_shape, dtype=torch.float32, device="cpu") if wanted.dsinks else None
    if runs:
        keep: list[Any] = []
        values = input_values(problem, operands, out, lse, dout, dlse, keep)
        launch.put(values, output_fields(problem, operands, grads, delta, k_lengths, keep))
        kernel(problem, wanted, values).start(bounds_of(problem), lengths)
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
    kind = launch.query_kind(problem, operands)
    dout = dout.to(problem.dtype)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse = lse.contiguous()
    keep += [out, dout, lse]
    values = launch.template_of(problem, operands)
    launch.put_operands(values, problem, operands, out, lse, keep)
    launch.put(values, launch.tensor_fields(f.OUT, out, kind) | launch.tensor_fields(f.DOUT, dout, kind))
    if dlse is not None:
        keep.append(dlse.to(torch.float32).contiguous())
        values[f.DLSE] = keep[-1].data_ptr()
    launch.put(values, dim_fields(problem))
    return values


def dim_fields(problem: AttentionProblem) -> Block:
    """Padded head dims, in which a backward differs from a forward."""
    isa = host()
    step = math.lcm(isa.value_step, isa.dim_step)
    return {
        f.DIM_V_PADDED: round_up(problem.head_dim_v, isa.dim_step),
        f.DIM_WIDE: round_up(problem.head_dim, step),
        f.DIM_V_WIDE: round_up(problem.head_dim_v, step),
    }


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
        shape = sum(k_lengths), problem.num_kv_heads, like.shape[-1]
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
    keep: list[Any],
) -> Block:
    """The fields of the tensors that kernels write."""
    dense, paged = problem.kind == "dense", problem.kind == "paged"
    block: Block = {f.KV_GRAD_DTYPE: FP32 if paged else launch.DTYPES[problem.dtype]}
    if not dense:
        totals = totals_of(k_lengths)
        keep.append(totals)
        block[f.CU_GRADS_K] = totals.buffer_info()[0]
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


def totals_of(lengths: Lengths) -> Numbers:
    """Running totals, which kernels read as int64."""
    return schedule.table([0, *itertools.accumulate(lengths)])


def _into_pages(packed: Tensor | None, pages: Tensor, operands: Operands, k_lengths: Lengths) -> Tensor | None:
    """Add every packed row into its slot of its page, in the order of the sequences."""
    if packed is None or operands.block_table is None:
        return None
    num_pages, page_size = pages.shape[:2]
    counts = np.asarray(k_lengths, dtype=np.int64)
    batch = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(batch)) - np.repeat(np.cumsum(counts) - counts, counts)
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


Workspace = Callable[[int, int, int, int], tuple[Block, int]]


class Kernel:
    """A program for a backward pass, with the part of its parameter block that does not depend on lengths.
    `per_forward` is the time of all that is wanted in forward passes.
    """

    __slots__ = (
        "_bias_shape",
        "_constants",
        "_division",
        "_in_tiles",
        "_per_forward",
        "_program",
        "_wanted",
        "_workspace",
    )

    def __init__(
        self,
        program: str,
        workspace: Workspace,
        problem: AttentionProblem,
        wanted: Wanted,
        per_forward: int,
        constants: Values,
    ) -> None:
        self._program, self._workspace, self._per_forward = program, workspace, per_forward
        self._division, self._wanted, self._constants = Division.of(problem), wanted, constants
        self._in_tiles = launch.forward_program(problem) == "forward_matrix"
        self._bias_shape = problem.bias_shape if wanted.dbias else None

    def runs(self, bounds: Bounds, given: BothLengths | None, available: int) -> list[Run]:
        """The runs for sequences of these lengths (None: of the bounds' lengths) on up to `available` threads."""
        division = self._division
        expected = launch.expected_microseconds(division, bounds, given, in_tiles=self._in_tiles)
        count, is_long = (
            launch.useful_threads(expected, available),
            self._per_forward * expected >= launch.LONG_MICROSECONDS,
        )
        found = []
        for work, plan, keys in _passes(division, self._wanted, self._bias_shape, count, bounds, given):
            offsets, size = self._workspace(division.head_dim, division.head_dim_v, work, keys)
            values = self._constants[:]
            launch.put(values, offsets)
            values[f.WORK] = work
            found.append(Run.of(self._program, values, plan, size, count, is_long=is_long))
        return found

    def items(self, bounds: Bounds, available: int) -> tuple[int, ...]:
        """None: the runs of each pass are found by lengths."""
        del bounds, available
        return ()

    def equal_runs(self, items: tuple[int, ...]) -> list[Run]:
        """Never asked for."""
        raise NotImplementedError

    def start(self, bounds: Bounds, given: BothLengths | None) -> None:
        """Run the program over all that is wanted; the constants have addresses."""
        for run in self.runs(bounds, given, threads.num_threads()):
            run.start(run.values)


def kernel(problem: AttentionProblem, wanted: Wanted, constants: Values) -> Kernel:
    """The program for the first derivatives."""
    return Kernel("backward", workspace, problem, wanted, BACKWARD_PER_FORWARD, constants)


def _passes(
    division: Division,
    wanted: Wanted,
    bias_shape: tuple[int, int, int, int] | None,
    count: int,
    bounds: Bounds,
    given: BothLengths | None,
) -> list[tuple[int, Schedule, int]]:
    """WORK, items and keys of dk and dv of each pass: all gradients per K/V head at once, or dq and dk/dv separately;
    and dbias.
    """
    q_lengths, k_lengths = both_lengths(bounds, given)
    makes_dq, makes_dkv = wanted.dq or wanted.dsinks, wanted.dk or wanted.dv
    heads = len(q_lengths) * division.num_kv_heads
    passes: list[tuple[int, list[Entry], int]] = []
    # Either 5 products per tile on as many threads as there are heads, or 3 + 4 on all threads.
    if makes_dq and makes_dkv and 5 * -(-heads // count) * count <= 7 * heads:
        pairs = [rows * keys for rows, keys in zip(q_lengths, k_lengths, strict=True)]
        longest_first = sorted(range(len(pairs)), key=pairs.__getitem__, reverse=True)
        entries = [(batch, batch + 1, *EVERYTHING, *EVERYTHING) for batch in longest_first]
        passes.append((f.MAKES_DQ | f.MAKES_DKV, entries, division.num_kv_heads))
    else:
        if makes_dkv:
            passes.append((f.MAKES_DKV, _key_blocks(k_lengths), division.num_kv_heads))
        if makes_dq:
            passes.append((f.MAKES_DQ, row_blocks(division, q_lengths, k_lengths), division.num_heads))
    if bias_shape is not None:
        passes.append((f.MAKES_DBIAS, *_bias_owners(bias_shape, q_lengths)))
    longest, found = max(k_lengths, default=0), []
    for work, entries, units in passes:
        if entries:
            keys = round_up(min(max([end - first for *_, first, end in entries]), longest), host().block_n)
            found.append((work, schedule_of(entries, units, division.num_heads // units), keys))
    return found


# (first batch, end batch, first row, end row, first key, end key).
Entry = tuple[int, int, int, int, int, int]
# The rows or keys of an entry that owns all.
EVERYTHING = (0, 1 << 40)


def schedule_of(entries: Sequence[Entry], units: int, heads_per_unit: int) -> Schedule:
    """The schedule with these entries."""
    numbers = schedule.table([number for entry in entries for number in entry])
    return Schedule(numbers, len(entries), units, heads_per_unit, BLOCK_ROWS)


def row_blocks(division: Division, q_lengths: Lengths, k_lengths: Lengths) -> list[Entry]:
    """Entries that own a block of rows each; those with most keys come first."""
    found = []
    for batch, (rows, keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        for first in range(0, rows, BLOCK_ROWS):
            end = first + BLOCK_ROWS
            cost = keys_seen(division.left, division.right, end, rows, keys)
            found.append((-cost, (batch, batch + 1, first, end, *EVERYTHING)))
    return [entry for _, entry in sorted(found)]


def _key_blocks(k_lengths: Lengths) -> list[Entry]:
    size = round_up(BLOCK_KEYS, host().block_n)
    return [
        (batch, batch + 1, *EVERYTHING, first, first + size)
        for batch, keys in enumerate(k_lengths)
        for first in range(0, keys, size)
    ]


def _bias_owners(bias_shape: tuple[int, int, int, int], q_lengths: Lengths) -> tuple[list[Entry], int]:
    """Entries that own a part of dbias: broadcast batches, heads and rows are summed within one entry."""
    batches, heads, rows, _ = bias_shape
    # One owner for each sequence, or one for all.
    apart = batches > 1 or len(q_lengths) == 1
    owners = [(i, i + 1, rows) for i, rows in enumerate(q_lengths)]
    if not apart:
        owners = [(0, len(q_lengths), max(q_lengths))] if q_lengths else []
    if rows == 1:
        return [(first, end, *EVERYTHING, *EVERYTHING) for first, end, _ in owners], heads
    blocks = [
        (first, end, row, row + BLOCK_ROWS, *EVERYTHING)
        for first, end, most in owners
        for row in range(0, most, BLOCK_ROWS)
    ]
    return blocks, heads


@functools.lru_cache(maxsize=256)
def workspace(head_dim: int, head_dim_v: int, work: int, keys: int) -> tuple[Block, int]:
    """Offsets in one thread's workspace; `keys` rows of dk and dv."""
    return launch.places(workspace_floats(head_dim, head_dim_v, work, keys))


def workspace_floats(head_dim: int, head_dim_v: int, work: int, keys: int) -> dict[int, int]:
    """The buffers of a workspace and their sizes in floats."""
    isa = host()
    step = math.lcm(isa.value_step, isa.dim_step)
    wide, wide_v = round_up(head_dim, step), round_up(head_dim_v, step)
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
