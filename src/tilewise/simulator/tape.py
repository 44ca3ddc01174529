"""Where schedules write their events: the tape knows the sizes of buffers and where in the loops the algorithm is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.simulator.events import ArraySpec, Compute, Event, Free, Load, Rescale, Skip, Span, Store, Workload


class _Size(NamedTuple):
    elements: int
    bytes: int


def span(block: int, size: int, length: int) -> Span:
    """The indices of one block of `size`; the last one ends where the sequence does."""
    return block * size, min((block + 1) * size, length)


def length_of(indices: Span) -> int:
    """How many there are."""
    return indices[1] - indices[0]


def blocks(length: int, size: int) -> list[tuple[int, Span]]:
    """All blocks of a sequence: their numbers and indices."""
    return [(block, span(block, size, length)) for block in range(-(-length // size))]


def row_blocks(work: Workload) -> list[tuple[int, Span]]:
    """The tiles of queries."""
    return blocks(work.seqlen_q, work.block_m)


def key_blocks(work: Workload) -> list[tuple[int, Span]]:
    """The tiles of keys."""
    return blocks(work.seqlen_k, work.block_n)


class Tape:
    """Events in the making."""

    def __init__(self, workload: Workload, arrays: dict[str, ArraySpec]) -> None:
        self.workload = workload
        self.arrays = arrays
        self.events: list[Event] = []
        self._sizes: dict[str, _Size] = {}
        self._place: dict[str, Any] = {}

    def at(
        self, phase: str, m_block: int | None = None, n_block: int | None = None, *, part: int | None = None
    ) -> None:
        """The phase and loop indices of the events to come."""
        self._place = {"phase": phase, "m_block": m_block, "n_block": n_block, "part": part}

    def load(self, buffer: str, rows: Span, *, array: str | None = None, cols: Span | None = None) -> None:
        """Rows (and columns, else all) of an array, by default the buffer's namesake, into a new buffer."""
        self._sizes[buffer] = self._move(Load, buffer, rows, array or buffer, cols)

    def store(self, buffer: str, rows: Span, *, array: str | None = None, cols: Span | None = None) -> None:
        """A buffer to rows (and columns, else all) of an array."""
        self._move(Store, buffer, rows, array or buffer, cols)

    def compute(
        self,
        op: str,
        target: str,
        sources: tuple[str, ...],
        shape: tuple[int, int],
        *,
        replaces: str | None = None,
        inner: int = 0,
        tokens: tuple[Span, Span] | tuple[None, None] = (None, None),
    ) -> None:
        """An operation; `inner` is the summed dimension of a matrix product, whose FLOPs are counted."""
        elements = shape[0] * shape[1]
        taken = _Size(elements, elements * self.workload.wide_itemsize) if replaces is None else _Size(0, 0)
        self._sizes[target] = taken if replaces is None else self._sizes.pop(replaces)
        names: dict[str, Any] = {"op": op, "target": target, "sources": sources, "shape": shape, "replaces": replaces}
        self._write(Compute, taken, **names, flops=2 * elements * inner, rows=tokens[0], cols=tokens[1])

    def update(self, op: str, target: str, sources: tuple[str, ...], shape: tuple[int, int], *, inner: int = 0) -> None:
        """An operation in place; the target is its first source."""
        self.compute(op, target, (target, *sources), shape, replaces=target, inner=inner)

    def rescale(self, *buffers: str, normalised: bool = False) -> None:
        """The correction by exp(row_max - new_max), after which row_max is new_max and the latter is freed."""
        elements, sizes = zip(*(self._sizes[name] for name in buffers), strict=True)
        self._write(Rescale, _Size(sum(elements), sum(sizes)), buffers=buffers, normalised=normalised)
        self.free("new_max")

    def skip(self, m_block: int, n_block: int, rows: Span, cols: Span, *, part: int | None = None) -> None:
        """A tile that is not visited."""
        self.at("skip", m_block, n_block, part=part)
        self._write(Skip, _Size(length_of(rows) * length_of(cols), 0), rows=rows, cols=cols)

    def free(self, *buffers: str) -> None:
        """Buffers that are no longer needed."""
        for name in buffers:
            self._write(Free, self._sizes.pop(name), buffer=name)

    def kernel(
        self,
        phase: str,
        loads: tuple[str, ...],
        compute: Callable[[int, Span], None],
        store: str,
        frees: tuple[str, ...],
        *,
        resident: str | None = None,
        array: str | None = None,
    ) -> None:
        """One kernel of a naive algorithm: each tile of rows is loaded, computed and stored while `resident` stays."""
        if resident is not None:
            self.at(phase)
            self.load(resident, (0, self.workload.seqlen_k))
        for m_block, rows in row_blocks(self.workload):
            self.at(phase, m_block, 0)
            for name in loads:
                self.load(name, rows)
            compute(m_block, rows)
            self.store(store, rows, array=array)
            self.free(*frees)
        if resident is not None:
            self.at(phase)
            self.free(resident)

    def _write(self, kind: type[Event], size: _Size, **fields: Any) -> None:
        self.events.append(kind(**self._place, **fields, elements=size.elements, bytes=size.bytes))

    def _move(self, kind: type[Event], buffer: str, rows: Span, array: str, cols: Span | None) -> _Size:
        spec = self.arrays[array]
        columns = (0, spec.cols) if cols is None else cols
        elements = length_of(rows) * length_of(columns)
        size = _Size(elements, elements * (self.workload.wide_itemsize if spec.wide else self.workload.itemsize))
        self._write(kind, size, buffer=buffer, array=array, rows=rows, cols=columns, wide=spec.wide)
        return size
