"""Passes that are prepared once, for all sizes to which their trace applies, and then called with tensors.

Strides are computed by the code that `Pass.open` writes, addresses are filled in by each call, and lengths that index
tensors hold are read by each call. The number of threads is looked at in each call, too: torch's setting may have
changed, or the process may have been forked.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.backends.cpu import launch, threads
from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.launch import ADDRESSED, Block, Forward, Run, Strides
from tilewise.backends.cpu.schedule import Bounds, BothLengths, bounds_of
from tilewise.memory import Reader
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Trace, code, is_traced, numbers_in

# (shape, strides, dtype) of a tensor that a pass makes.
Allocation = tuple[Strides, Strides, torch.dtype]
# Numbers closer together than this in the parameter block are put there together.
APART = 3
# Operands that a pass is not called with: they are converted, or read, in every call.
NEVER = ("tiles", "tile_bits", "tile_lists", "seed")
TOTALS_Q, TOTALS_K, LENGTHS_K = (Operands._fields.index(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"))


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
    numbers: tuple[tuple[int, int, array[int]], ...]
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

    def runs(self, tensors: Sequence[Any], sized: Sized, kernels: Pass, available: int) -> tuple[list[Run], int]:
        """The runs, and how many rows of queries belong to a sequence."""
        totals, lengths = tensors[TOTALS_Q], tensors[LENGTHS_K] if len(tensors) > LENGTHS_K else None
        keys = tensors[TOTALS_K] if lengths is None else lengths
        found = b"" if totals is None else self._rows.read(totals), self._keys.read(keys)
        key, last = (available, sized, found), self._last
        if last is None or last[0] != key:
            rows = [1] * sized.bounds.batch if totals is None else _differences(found[0])
            both = rows, _differences(found[1]) if lengths is None else array("i", found[1]).tolist()
            self._last = last = key, kernels.with_numbers(sized, both, available), sum(rows)
        return last[1], last[2]


def _differences(totals: bytes) -> list[int]:
    numbers = array("i", totals)
    return [b - a for a, b in zip(numbers, numbers[1:], strict=False)]


class Pass:
    """A pass over canonical operands; see tilewise.backends.base.Opening.

    `given` are the positions in the parameter block of the addresses of a call's tensors (those that are not None),
    `made` the tensors that it makes with theirs. `fields` is the rest of the block, where numbers of a trace may be.
    """

    __slots__ = ("_allocations", "_bounds", "_contents", "_fields", "_kernels", "_positions", "_sized", "made")

    def __init__(
        self,
        problem: AttentionProblem,
        kernels: Callable[[launch.Values], Runs],
        fields: Block,
        given: Sequence[int],
        made: Mapping[str, tuple[int, Allocation]],
    ) -> None:
        self._fields = {position: value for position, value in sorted(fields.items()) if is_traced(value)}
        constants = f.new_block({position: n for position, n in fields.items() if position not in self._fields})
        self._kernels, self._bounds = kernels(constants), bounds_of(problem)
        self._positions = (*given, *[position for position, _ in made.values()])
        self._allocations = tuple([allocation for _, allocation in made.values()])
        self._contents = None if problem.kind == "dense" else Contents()
        self.made = tuple(made)
        self._sized: Sized | None = None if problem.is_traced else self._sized_for(self._allocations, self._bounds, ())

    def open(self, trace: Trace) -> Callable[..., Sized | None]:
        """See tilewise.backends.base.Opening."""
        groups: list[list[int]] = []
        for position in self._fields:
            if not groups or position - groups[-1][-1] > APART:
                groups.append([])
            groups[-1].append(position)
        numbers = [
            f"({first}, {last + 1}, array('q', {code(tuple(self._fields.get(p, 0) for p in range(first, last + 1)))}))"
            for first, *_, last in ((*group[:1], *group) for group in groups)
        ]
        ending = f"return sized({code(self._allocations)}, {code(tuple(self._bounds))}, ({''.join(f'{n}, ' for n in numbers)}))"
        used = self._allocations, tuple(self._bounds), tuple(self._fields.values())
        return trace.function([ending], used, {"sized": self._sized_for, "array": array, "torch": torch})
