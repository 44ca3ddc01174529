"""Passes that are prepared once, for all sizes to which their trace applies, and then called with tensors.

Strides are computed by the code that `Pass.open` writes, addresses are filled in by each call, and lengths that index
tensors hold are read by each call. The number of threads is looked at in each call, too: torch's setting may have
changed, or the process may have been forked.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.backends.cpu import launch, launch_backward, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.launch import (
    ADDRESSED,
    DTYPES,
    Block,
    Forward,
    Run,
    Strides,
    Values,
    allocate,
    is_contiguous,
)
from tilewise.backends.cpu.schedule import Bounds, BothLengths, bounds_of
from tilewise.memory import Reader
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Trace, code, is_traced

# (shape, strides, dtype) of a tensor that a pass makes.
Allocation = tuple[Strides, Strides, torch.dtype]
# Numbers closer together than this in the parameter block are put there together.
APART = 3
# Where kernels find the addresses of what a pass is given besides operands.
GIVEN = {"dout": f.DOUT, "dlse": f.DLSE, "out": f.OUT, "lse": f.LSE, "max_logits": f.LARGEST}
TOTALS_Q, TOTALS_K, LENGTHS_K, OUT, LOGITS = (
    Operands._fields.index(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "out", "max_logits")
)


class Runs(Protocol):
    """The kernels of a pass."""

    def runs(self, bounds: Bounds, given: BothLengths | None, available: int) -> list[Run]:
        """The runs for sequences of these lengths (None: of the bounds' lengths) on up to `available` threads."""


class Sized(NamedTuple):
    """What a pass needs besides addresses, for certain sizes: the tensors that it makes, the numbers that it puts into
    parameter blocks (first position, end, numbers), and its runs on up to `available` threads, if they do not depend on
    the contents of index tensors.
    """

    made: tuple[Allocation, ...]
    bounds: Bounds
    numbers: tuple[tuple[int, int, Values], ...]
    available: int
    runs: list[Run] | None

    def kept(self) -> Sized:
        """Itself: it is complete."""
        return self


class Contents:
    """The lengths that index tensors hold. They are read in every call; what follows from them is kept while they stay
    the same, as in all layers of a step.
    """

    __slots__ = ("_keys", "_last", "_rows")

    def __init__(self) -> None:
        self._rows, self._keys = Reader(), Reader()
        self._last: tuple[Any, list[Run], int] | None = None

    def runs(self, tensors: Sequence[Any], sized: Sized, kernels: Runs, available: int) -> tuple[list[Run], int]:
        """The runs, and how many rows of queries belong to a sequence."""
        totals, lengths = tensors[TOTALS_Q], tensors[LENGTHS_K] if len(tensors) > LENGTHS_K else None
        rows = b"" if totals is None else self._rows.read(totals)
        keys = self._keys.read(tensors[TOTALS_K] if lengths is None else lengths)
        key, last = (available, rows, keys, sized), self._last
        if last is None or last[0] != key:
            q = [1] * sized.bounds.batch if totals is None else _differences(rows)
            k = _differences(keys) if lengths is None else array("i", keys).tolist()
            self._last = last = key, kernels.runs(sized.bounds, (q, k), available), sum(q)
        return last[1], last[2]


def _differences(totals: bytes) -> list[int]:
    return [b - a for a, b in itertools.pairwise(array("i", totals))]


class Pass:
    """A pass over canonical operands; see tilewise.backends.base.Opening.

    `given` are the positions in the parameter block of the addresses of a call's tensors (those that are not None),
    `made` the tensors that it makes, with theirs; the first `num_results` are the caller's. `fields` is the rest of the
    block, where numbers of a trace may be.
    """

    __slots__ = ("_allocations", "_bounds", "_contents", "_fields", "_largest", "_positions", "_sized", "kernels", "made")

    def __init__(
        self,
        problem: AttentionProblem,
        kernels: Callable[[Values], Runs],
        fields: Block,
        given: Sequence[int],
        made: Mapping[str, tuple[int, Allocation]],
        num_results: int,
    ) -> None:
        self._fields, traced = fields, [at for at, value in fields.items() if is_traced(value)]
        self.kernels = kernels(f.new_block({at: value for at, value in fields.items() if at not in traced}))
        self._positions = (*given, *[position for position, _ in made.values()])
        self._allocations = tuple([allocation for _, allocation in made.values()])
        self._bounds = bounds_of(problem)
        self._contents = None if problem.kind == "dense" else Contents()
        # The dimensions of lse besides the heads, if the largest score of each head is wanted.
        self._largest: Any = None if not problem.max_logits else (0, 2) if problem.kind == "dense" else 1
        self.made = tuple(made)[:num_results]
        # For a pass that serves one size.
        self._sized = None if problem.is_traced else self._sized_for(self._allocations, self._bounds, ())

    def open(self, trace: Trace) -> Callable[..., Sized | None]:
        """See tilewise.backends.base.Opening."""
        groups: list[list[int]] = []
        for position in sorted([at for at, value in self._fields.items() if is_traced(value)]):
            if not groups or position - groups[-1][-1] > APART:
                groups.append([])
            groups[-1].append(position)
        numbers = ""
        for group in groups:
            values = tuple([self._fields.get(at, 0) for at in range(group[0], group[-1] + 1)])
            numbers += f"({group[0]}, {group[-1] + 1}, array('q', {code(values)})), "
        ending = f"return sized({code(self._allocations)}, {code(self._bounds)}, ({numbers}))"
        names = {"sized": self._sized_for, "array": array, "torch": torch, "Bounds": Bounds}
        return trace.function([ending], (self._allocations, self._bounds, self._fields), names)

    def _sized_for(
        self, made: tuple[Allocation, ...], bounds: Bounds, numbers: tuple[tuple[int, int, Values], ...]
    ) -> Sized:
        available = threads.num_threads()
        runs = None if self._contents is not None else self.kernels.runs(bounds, None, available)
        return Sized(made, bounds, numbers, available, runs)

    def __call__(
        self, tensors: Sequence[Any], places: tuple[int, ...] | None = None, sized: Sized | None = None
    ) -> list[Tensor] | None:
        """See tilewise.backends.base.Bound."""
        if sized is None:
            sized = self._sized
            if sized is None:
                return None
        made = [allocate(shape, strides, dtype) for shape, strides, dtype in sized.made]
        available = threads.num_threads()
        if self._contents is not None:
            runs, used = self._contents.runs(tensors, sized, self.kernels, available)
            out = tensors[OUT] if "out" not in self.made else made[0]
            if used < out.shape[0]:
                self._clear(out, made, used)
        elif sized.available == available:
            runs = sized.runs or ()
        else:
            runs = self.kernels.runs(sized.bounds, None, available)
        if self._largest is not None:
            made[-1].fill_(-torch.inf)
        if places is None:
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        addresses = (*places, *[tensor.data_ptr() for tensor in made])
        for run in runs:
            values = run.values[:]
            for first, end, numbers in sized.numbers:
                values[first:end] = numbers
            values[f.SEQLEN_Q] = run.values[f.SEQLEN_Q]
            for position, address in zip(self._positions, addresses, strict=True):
                values[position] = address
            run.start(values)
        if self._largest is not None:
            torch.amax(made[-1], self._largest, out=tensors[LOGITS])
        return made

    def _clear(self, out: Tensor, made: Sequence[Tensor], used: int) -> None:
        """Make the rows after the last sequence empty rows."""
        out[used:].zero_()
        if "lse" in self.made:
            made[self.made.index("lse")][:, used:].fill_(-torch.inf)


def bind_forward(problem: AttentionProblem, operands: Operands, want_lse: bool) -> Pass | None:
    """A pass for canonical operands like these; None if they must be looked at, or copied, in every call."""
    given = _positions(Operands._fields, operands)
    if given is None or 0 in problem.out_shape or not _are_readable(problem, operands):
        return None
    lse = contiguous(problem.lse_shape, torch.float32)
    made = {"lse": (f.LSE, lse)}
    if operands.out is None:
        out, strides = _rows(problem, problem.num_heads, problem.seqlen_q, problem.total_q, problem.head_dim_v)
        made = {"out": (f.OUT, out)} | made
    else:
        strides = operands.out.stride()
        if strides[-1] != 1 and problem.head_dim_v > 1:
            return None
    if problem.max_logits:
        made["largest"] = f.LARGEST, lse
    num_results = len(made) - problem.max_logits - (not want_lse)
    fields = _fields(problem, operands, strides, lse[1])
    return Pass(problem, functools.partial(Forward, problem), fields, given, made, num_results)


def bind_backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Pass | None:
    """A dense pass that makes the wanted ones of dq, dk, dv; None as for the forward, or if others are wanted."""
    tensors = (dout, dlse, out, lse, *operands)
    given = _positions((*tuple(GIVEN)[:4], *Operands._fields), tensors)
    if given is None or wanted.dbias or wanted.dsinks or problem.kind != "dense":
        return None
    if 0 in problem.out_shape or problem.seqlen_k == 0 or not _are_readable(problem, operands):
        return None
    if dout.dtype != problem.dtype or dout.stride(-1) != 1 or out.stride(-1) != 1 or not is_contiguous(lse):
        return None
    if dlse is not None and (dlse.dtype != torch.float32 or not is_contiguous(dlse)):
        return None
    fields = _fields(problem, operands, out.stride(), lse.stride()) | launch_backward.dim_fields(problem)
    fields |= launch.stride_fields(f.DOUT, dout.stride(), problem.dtype.itemsize, "dense")
    fields[f.KV_GRAD_DTYPE] = DTYPES[problem.dtype]
    made = {}
    for name, position, heads, rows, dim in (
        ("dq", f.DQ, problem.num_heads, problem.seqlen_q, problem.head_dim),
        ("dk", f.DK, problem.num_kv_heads, problem.seqlen_k, problem.head_dim),
        ("dv", f.DV, problem.num_kv_heads, problem.seqlen_k, problem.head_dim_v),
    ):
        if getattr(wanted, name):
            allocation, strides = _rows(problem, heads, rows, 0, dim)
            made[name] = position, allocation
            fields |= launch.stride_fields(position, strides, problem.dtype.itemsize, "dense")
    kernels = functools.partial(launch_backward.kernel, problem, wanted)
    return Pass(problem, kernels, fields, given, made, len(made))


def _positions(names: Sequence[str], tensors: Sequence[Any]) -> list[int] | None:
    """Where kernels find the addresses of the tensors that are not None; None if one must be looked at in every call."""
    known = ADDRESSED | GIVEN
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
