"""Where schedules write their events: the tape knows the sizes of buffers and where in the loops the algorithm is."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.simulator.events import ArraySpec, Compute, Event, Free, Load, Rescale, Skip, Span, Store, Workload

__all__ = ["Tape", "blocks", "length_of", "span"]


class _Size(NamedTuple):
    elements: int
    bytes: int


class _Place(NamedTuple):
    phase: str
    m_block: int | None
    n_block: int | None
    part: int | None


def span(block: int, size: int, length: int) -> Span:
    """The indices of one block of `size`; the last one ends where the sequence does."""
    return block * size, min((block + 1) * size, length)


def length_of(indices: Span) -> int:
    """How many there are."""
    return indices[1] - indices[0]


def blocks(length: int, size: int) -> range:
    """All blocks of a sequence."""
    return range(-(-length // size))


class Tape:
    """Events in the making."""

    def __init__(self, workload: Workload, arrays: dict[str, ArraySpec]) -> None:
        self.workload = workload
        self.arrays = arrays
        self.events: list[Event] = []
        self._sizes: dict[str, _Size] = {}
        self._place = _Place("setup", None, None, None)

    def at(
        self, phase: str, m_block: int | None = None, n_block: int | None = None, *, part: int | None = None
    ) -> None:
        """The phase and loop indices of the events to come."""
        self._place = _Place(phase, m_block, n_block, part)

    def load(self, buffer: str, rows: Span, *, array: str | None = None, cols: Span | None = None) -> None:
        """Rows (and columns, else all) of an array, by default the buffer's namesake, into a new buffer."""
        name, columns, size, wide = self._moved(array or buffer, rows, cols)
        self._sizes[buffer] = size
        self.events.append(
            Load(
                **self._place._asdict(), buffer=buffer, array=name, rows=rows, cols=columns, wide=wide, **size._asdict()
            )
        )

    def store(self, buffer: str, rows: Span, *, array: str | None = None, cols: Span | None = None) -> None:
        """A buffer to rows (and columns, else all) of an array."""
        name, columns, size, wide = self._moved(array or buffer, rows, cols)
        self.events.append(
            Store(
                **self._place._asdict(), buffer=buffer, array=name, rows=rows, cols=columns, wide=wide, **size._asdict()
            )
        )

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
        if replaces is None:
            size = _Size(elements, elements * self.workload.wide_itemsize)
            self._sizes[target] = size
        else:
            self._sizes[target] = self._sizes.pop(replaces)
            size = _Size(0, 0)
        self.events.append(
            Compute(
                **self._place._asdict(),
                op=op,
                target=target,
                sources=sources,
                shape=shape,
                replaces=replaces,
                flops=2 * elements * inner,
                rows=tokens[0],
                cols=tokens[1],
                **size._asdict(),
            )
        )

    def update(self, op: str, target: str, sources: tuple[str, ...], shape: tuple[int, int], *, inner: int = 0) -> None:
        """An operation in place; the target is its first source."""
        self.compute(op, target, (target, *sources), shape, replaces=target, inner=inner)

    def rescale(self, *buffers: str, normalised: bool = False) -> None:
        """The correction by exp(row_max - new_max), after which row_max is new_max and the latter is freed."""
        touched = [self._sizes[name] for name in buffers]
        self.events.append(
            Rescale(
                **self._place._asdict(),
                buffers=buffers,
                normalised=normalised,
                elements=sum(size.elements for size in touched),
                bytes=sum(size.bytes for size in touched),
            )
        )
        self.free("new_max")

    def skip(self, m_block: int, n_block: int, rows: Span, cols: Span, *, part: int | None = None) -> None:
        """A tile that is not visited."""
        pairs = length_of(rows) * length_of(cols)
        self.events.append(
            Skip(phase="skip", m_block=m_block, n_block=n_block, part=part, rows=rows, cols=cols, elements=pairs)
        )

    def free(self, *buffers: str) -> None:
        """Buffers that are no longer needed."""
        for name in buffers:
            size = self._sizes.pop(name)
            self.events.append(Free(**self._place._asdict(), buffer=name, **size._asdict()))

    def _moved(self, array: str, rows: Span, cols: Span | None) -> tuple[str, Span, _Size, bool]:
        spec = self.arrays[array]
        columns = (0, spec.cols) if cols is None else cols
        elements = length_of(rows) * length_of(columns)
        itemsize = self.workload.wide_itemsize if spec.wide else self.workload.itemsize
        return array, columns, _Size(elements, elements * itemsize), spec.wide
