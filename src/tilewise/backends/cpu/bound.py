"""Passes that are prepared once, for all sizes to which their trace applies, and then called with tensors.

Strides are computed by the plan that `Pass.open` makes, addresses are filled in by each call, and lengths that index
tensors hold are read by each call. The number of threads is looked at in each call, too: torch's setting may have
changed, or the process may have been forked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.backends.cpu import launch, launch_backward, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.launch import ADDRESSED, DTYPES, Block, Forward, Run, Strides, Values
from tilewise.backends.cpu.schedule import BothLengths, Bounds, bounds_of
from tilewise.native import Plan
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Trace, is_traced
from tilewise.totals import lengths_of

# (shape, strides, dtype) of a tensor that a pass makes.
Allocation = tuple[Strides, Strides, torch.dtype]
# Where kernels find the addresses of what a pass is given besides operands.
GIVEN = {"dout": f.DOUT, "dlse": f.DLSE, "out": f.OUT, "lse": f.LSE, "max_logits": f.LARGEST}
# They find the seed itself there.
SEED = {"seed": f.SEED_LOW}
# The largest score of each row: made for `max_logits`, not for the caller.
LARGEST = "largest"
TOTALS_Q, TOTALS_K, LENGTHS_K, SEED_AT, OUT, LOGITS = (
    Operands._fields.index(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "seed", "out", "max_logits")
)


class Runs(Protocol):
    """The kernels of a pass."""

    def runs(self, bounds: Bounds, given: BothLengths | None, available: int) -> list[Run]:
        """The runs for sequences of these lengths (None: of the bounds' lengths) on up to `available` threads."""

    def items(self, bounds: Bounds, available: int) -> tuple[int, ...]:
        """What decides on the runs where all sequences have the bounds' lengths; `available` comes first. A trace
        records it. Empty if that is not known without the lengths.
        """

    def equal_runs(self, items: tuple[int, ...]) -> list[Run]:
        """These runs, by what `items` returned."""


class Sized(NamedTuple):
    """What a pass needs besides addresses, for certain sizes.

    `made` are the tensors that it makes, `unread` the bytes of an lse that nobody reads, `numbers` those that a trace
    has in the parameter block. `places` are the addresses of a call's tensors and `items` what decides on the runs, if
    they are known.
    """

    made: Sequence[Allocation]
    unread: int
    bounds: Bounds
    numbers: tuple[int, ...] = ()
    places: tuple[int, ...] | None = None
    items: tuple[int, ...] = ()


class Pass:
    """A pass over canonical operands; see tilewise.backends.base.Bound.

    `given` are the positions in the parameter block of the addresses of a call's tensors (those that are not None),
    `made` the tensors that it makes, with theirs. `fields` is the rest of the block, where numbers of a trace may be.
    Kernels always write an lse: `unread` are its bytes if nobody reads it. A backward is given q at position `first`.
    """

    __slots__ = (
        "_allocations", "_bounds", "_fields", "_fill", "_first", "_has_dropout", "_is_dense", "_kernels", "_largest",
        "_last", "_sized", "_traced", "_unread", "made",
    )  # fmt: skip

    def __init__(
        self,
        problem: AttentionProblem,
        kernels: Callable[[Values], Runs],
        fields: Block,
        given: Sequence[int],
        made: Mapping[str, tuple[int, Allocation]],
        unread: int = 0,
        first: int = 0,
    ) -> None:
        self._first, self._is_dense, self._has_dropout = first, problem.kind == "dense", problem.dropout > 0.0
        self._fields, self._bounds, self._unread = fields, bounds_of(problem), unread
        self._kernels = kernels(f.new_block({at: value for at, value in fields.items() if not is_traced(value)}))
        # Where numbers of a trace are.
        self._traced = [at for at, value in fields.items() if is_traced(value)]
        # Packed gradients of K and V have totals of their own.
        totals = [f.CU_GRADS_K] if first and not self._is_dense else []
        self._fill = _filler((*given, *[position for position, _ in made.values()], *self._traced, *totals))
        self._allocations = tuple([allocation for _, allocation in made.values()])
        # The dimensions of lse besides the heads, if the largest score of each head is wanted.
        self._largest: Any = None if LARGEST not in made else (0, 2) if problem.kind == "dense" else 1
        self.made = tuple([name for name in made if name != LARGEST])
        # For a pass that serves one size.
        self._sized = None if problem.is_traced else Sized(self._allocations, unread, self._bounds)
        # The runs found last, and for what: the layers of a step ask for the same.
        self._last: tuple[Any, list[Run]] = (), []

    def open(self, trace: Trace) -> Callable[..., Sized | None]:
        """See tilewise.backends.base.Bound."""
        places = [numbers[-1] for numbers in trace.tensors.values()]
        traced = [self._fields[at] for at in self._traced]
        items = self._kernels.items(self._bounds, threads.num_threads()) if self._is_dense else ()
        outputs: list[Any] = [*self._bounds, self._unread, *places, *traced, *items]
        first, middle, made = 4, 4 + len(places), list[tuple[slice, slice, torch.dtype]]()
        end, last = middle + len(traced), len(outputs)
        for shape, strides, dtype in self._allocations:
            begin, rank = len(outputs), len(shape)
            made.append((slice(begin, begin + rank), slice(begin + rank, begin + 2 * rank), dtype))
            outputs += (*shape, *strides)
        plan = Plan(trace, outputs).finish()

        def measure(tensors: Sequence[Tensor], lengths: Sequence[int | None]) -> Sized | None:
            frame = plan.measure(tensors, lengths)
            if frame is None:
                return None
            found = plan.read(frame)
            plan.release(frame)
            allocations = [(found[shape], found[strides], dtype) for shape, strides, dtype in made]
            return Sized(allocations, found[3], found[:3], found[middle:end], found[first:middle], found[end:last])

        return measure

    def __call__(
        self, tensors: Sequence[Any], places: tuple[int, ...] | None = None, sized: Sized | None = None
    ) -> list[Tensor] | None:
        """See tilewise.backends.base.Bound."""
        if sized is None:
            sized = self._sized
            if sized is None:
                return None
        allocations, unread, bounds, numbers, known, items = sized
        places = places or known
        made = [launch.allocate(shape, strides, dtype) for shape, strides, dtype in allocations]
        available, lengths = threads.num_threads(), None if self._is_dense else self._lengths(tensors, bounds, made)
        if items and items[0] == available:
            runs = self._kernels.equal_runs(items)
        else:
            key, (last, runs) = (bounds, available, lengths), self._last
            if key != last:
                runs = self._kernels.runs(bounds, lengths, available)
                self._last = key, runs
        if places is None or self._largest is not None:  # those of a trace have no memory for max_logits
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        numbers = (*places, *[tensor.data_ptr() for tensor in made], *numbers)
        if self._first and lengths is not None:
            totals = launch_backward.totals_of(lengths[1])
            numbers = (*numbers, totals.buffer_info()[0])
        if self._largest is not None:
            made[-1].fill_(-torch.inf)  # rows of no sequence are not written
        for run in runs:
            values = run.values[:]
            self._fill(values, numbers)
            if self._has_dropout:
                launch.put(values, launch.seed_fields(tensors[self._first + SEED_AT]))
            run.start(values, unread)
        if self._largest is not None:
            torch.amax(made[-1], self._largest, out=tensors[LOGITS])
        return made

    def _lengths(self, tensors: Sequence[Any], bounds: Bounds, made: Sequence[Tensor]) -> BothLengths:
        """The lengths in index tensors. Rows after the last sequence become empty rows."""
        operands, named = tensors[self._first :], dict(zip(self.made, made, strict=False))
        totals, rows = operands[TOTALS_Q], [1] * bounds[0]
        if totals is not None:
            entries = totals.tolist()
            rows = lengths_of(entries)
            if entries[-1] < operands[0].shape[0]:
                result = named.get("dq") if self._first else named["out"] if "out" in named else operands[OUT]
                if result is not None:
                    launch.clear_unused_rows(totals, result, named.get("lse"))
        if self._first:  # keys that nobody sees
            for name in ("dk", "dv"):
                if name in named:
                    named[name].zero_()
        if len(operands) > LENGTHS_K and operands[LENGTHS_K] is not None:
            return rows, operands[LENGTHS_K].tolist()
        return rows, lengths_of(operands[TOTALS_K].tolist())


def _filler(positions: tuple[int, ...]) -> Callable[[Values, tuple[int, ...]], None]:
    """A function that puts numbers at these positions: in one statement, which takes half the time of a loop."""
    targets = "".join([f"values[{at}], " for at in positions])
    names: dict[str, Any] = {}
    exec(f"def fill(values, numbers): {targets}= numbers", names)
    return names["fill"]  # type: ignore[no-any-return]


def bind_forward(problem: AttentionProblem, operands: Operands, want_lse: bool) -> Pass | None:
    """A pass for canonical operands like these; None if they must be looked at, or copied, in every call."""
    given = _positions(Operands._fields, operands)
    if given is None or 0 in problem.out_shape or not _are_readable(problem, operands):
        return None
    lse = contiguous(problem.lse_shape, torch.float32)
    made = {"lse": (f.LSE, lse)} if want_lse else {}
    if operands.out is None:
        out, strides = _rows(problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim_v)
        made = {"out": (f.OUT, out)} | made
    else:
        strides = operands.out.stride()
        if strides[-1] != 1 and problem.head_dim_v > 1:
            return None
    if problem.max_logits:
        made[LARGEST] = f.LARGEST, lse
    fields = _fields(problem, operands, strides, lse[1])
    unread = 0 if want_lse else 4 * math.prod(problem.lse_shape)
    return Pass(problem, functools.partial(Forward, problem), fields, given, made, unread)


def bind_backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Pass | None:
    """A dense or packed pass that makes the wanted ones of dq, dk, dv; None as for the forward, or if others are
    wanted.
    """
    tensors = (dout, dlse, out, lse, *operands)
    given = _positions((*tuple(GIVEN)[:4], *Operands._fields), tensors)
    if given is None or wanted.dbias or wanted.dsinks or problem.kind == "paged":
        return None
    if 0 in problem.out_shape or problem.seqlen_k == 0 or not _are_readable(problem, operands):
        return None
    if dout.dtype != problem.dtype or dout.stride(-1) != 1 or out.stride(-1) != 1 or not lse.is_contiguous():
        return None
    if dlse is not None and (dlse.dtype != torch.float32 or not dlse.is_contiguous()):
        return None
    fields = _fields(problem, operands, out.stride(), lse.stride()) | launch_backward.dim_fields(problem)
    kind = launch.query_kind(problem, operands)
    fields |= launch.stride_fields(f.DOUT, dout.stride(), problem.dtype.itemsize, kind)
    fields[f.KV_GRAD_DTYPE] = DTYPES[problem.dtype]
    made = {}
    queries, keys = (problem.num_heads, problem.seqlen_q, problem.total_q), (problem.num_kv_heads, problem.seqlen_k)
    for name, position, rows, dim in (
        ("dq", f.DQ, queries, problem.head_dim),
        ("dk", f.DK, (*keys, problem.total_k), problem.head_dim),
        ("dv", f.DV, (*keys, problem.total_k), problem.head_dim_v),
    ):
        if getattr(wanted, name):
            allocation, strides = _rows(problem, *rows, dim)
            made[name] = position, allocation
            fields |= launch.stride_fields(position, strides, problem.dtype.itemsize, kind)
    kernels = functools.partial(launch_backward.kernel, problem, wanted)
    return Pass(problem, kernels, fields, given, made, first=len(tensors) - len(operands))


def _positions(names: Sequence[str], tensors: Sequence[Any]) -> list[int] | None:
    """Where kernels find the addresses of the tensors that are not None; None if one cannot be addressed."""
    known = ADDRESSED | GIVEN | SEED
    present = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    return [known[name] for name in present] if known.keys() >= set(present) else None


def _are_readable(problem: AttentionProblem, operands: Operands) -> bool:
    """Whether kernels read all operands where they are."""
    if operands.tiles is not None or (operands.bias is not None and operands.bias.dtype not in DTYPES):
        return False
    return all(a is b for a, b in zip(operands, launch.readable(problem, operands), strict=True))


def _fields(problem: AttentionProblem, operands: Operands, out: Strides, lse: Strides) -> Block:
    """The parameter block without addresses and lengths."""
    kind = launch.query_kind(problem, operands)
    strides = operands.q.stride(), operands.k.stride(), operands.v.stride()
    fields = launch.problem_fields(problem) | launch.row_fields(problem, kind, *strides, out, lse)
    return fields | launch.more_fields(problem, operands)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
    """A contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return shape, tuple(reversed(strides)), dtype


def _rows(problem: AttentionProblem, heads: int, seqlen: int, total: int, dim: int) -> tuple[Allocation, Strides]:
    """A tensor of rows in the caller's layout, and its strides as kernels see it."""
    if problem.kind != "dense":
        made = contiguous((total, heads, dim), problem.dtype)
        return made, made[1]
    if problem.layout == "bshd":
        made = contiguous((problem.batch, seqlen, heads, dim), problem.dtype)
        batch, row, head, element = made[1]
        return made, (batch, head, row, element)
    made = contiguous((problem.batch, heads, seqlen, dim), problem.dtype)
    return made, made[1]
