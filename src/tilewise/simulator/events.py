"""What an algorithm does to a two-level memory, as typed events: the contract between schedules, machine and explorer.

The slow memory (HBM) holds named *arrays*, the fast one (SRAM) named *buffers*; both are two-dimensional, and vectors
such as lse have one column. An event names everything it touches, so whoever executes the events in order, on nothing
but the inputs, gets the result (`machine.replay`). Events depend on sizes only, never on the numbers.

Every event has `kind`, `phase`, the loop indices `m_block`, `n_block` (tile of queries, tile of keys) and `part` (slice
of the inner dimension in a matmul, split in decoding), None where a loop is not entered, and `elements`, `bytes`:

| kind    | what happens                                                              | elements, bytes           |
|---------|---------------------------------------------------------------------------|---------------------------|
| load    | `array[rows, cols]` of slow memory is copied into a new `buffer`          | read from slow memory     |
| store   | `buffer` is copied to `array[rows, cols]`; the buffer stays               | written to slow memory    |
| compute | `op` on buffers `sources` gives `target`; `replaces` is the buffer whose  | newly taken of the fast   |
|         | memory the target takes over, which may be the target itself              | memory (0 if it replaces) |
| rescale | `buffers` *= exp(row_max - new_max), then row_max = new_max; with         | touched in fast memory    |
|         | `normalised` acc is also multiplied by the old row_sum first (FA-1)       |                           |
| skip    | a tile `rows` x `cols` of the scores is wholly masked: nothing happens    | scores not computed, 0 B  |
| free    | `buffer` is dropped                                                       | given back, fast memory   |

Narrow elements have `workload.itemsize` bytes, wide ones (statistics, sums, scores in fast memory) `wide_itemsize`.
A loaded buffer is as wide as its array, a computed one is wide, and one that replaces another has that one's width.
`rows`, `cols` are (start, stop), stop excluded.
A *step* is a run of events with equal phase, m_block, n_block and part, in which m_block and n_block are not None and
the phase is not setup, finish or skip.

Order: as forward.py, backward.py and matmul.py write them. Blocks run upwards, and a skip stands where the tile would.
Partial is a tile with a masked pair, and also one that ends beyond the last key (`masks.Band.tile_kind`). `init` fills
with 0, and row_max with -inf. `skip` events have phase "skip". In kernels with a resident operand (naive,
naive_backward) its load, init, store and free have m_block None and the phase of the kernel. In `paged`, n_block is a
page of the sequence; of the last one only the slots in use are loaded. Table entries are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from tilewise.errors import InvalidProblem
from tilewise.masks import Band, TileGrid, TileKind

Algorithm = Literal[
    "naive", "fa1", "fa2", "naive_backward", "backward", "decode", "paged", "matmul_naive", "matmul"
]  # fmt: skip
Span = tuple[int, int]
Fill = Literal["input", "empty", "zero", "minus_infinity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have; see the table above."""

    kind: ClassVar[str]
    phase: str
    m_block: int | None = None
    n_block: int | None = None
    part: int | None = None
    elements: int = 0
    bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All fields and `kind`, ready for JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move(Event):
    buffer: str
    array: str
    rows: Span
    cols: Span
    wide: bool


class Load(_Move):
    """Slow to fast memory."""

    __slots__ = ()
    kind: ClassVar[str] = "load"


class Store(_Move):
    """Fast to slow memory."""

    __slots__ = ()
    kind: ClassVar[str] = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Event):
    """An operation in fast memory. `shape` is the target's; `rows`, `cols` are the mask's tokens and else None."""

    kind: ClassVar[str] = "compute"
    op: str
    target: str
    sources: tuple[str, ...]
    shape: tuple[int, int]
    replaces: str | None = None
    flops: int = 0
    rows: Span | None = None
    cols: Span | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale(Event):
    """The correction of the online softmax; row_max becomes new_max, which stays until it is freed."""

    kind: ClassVar[str] = "rescale"
    buffers: tuple[str, ...]
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(Event):
    """A tile that is never touched."""

    kind: ClassVar[str] = "skip"
    rows: Span
    cols: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Event):
    """A buffer that is no longer needed."""

    kind: ClassVar[str] = "free"
    buffer: str


# Phases that come before, after or instead of the steps.
AROUND = ("setup", "finish", "skip")
KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in (Load, Store, Compute, Rescale, Skip, Free)}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of slow memory before the first event: given, unset, or filled at no cost."""

    rows: int
    cols: int
    wide: bool = False
    fill: Fill = "input"


class Drawn(NamedTuple):
    """A mask pair by pair, such as one that was drawn: what schedules ask of a `Band`, answered by a table.

    `rows` has one text a query: "1" for a key that it sees, "0" for one that is hidden.
    """

    rows: tuple[str, ...]

    def sees(self, m_idx: int, n_idx: int) -> bool:
        """Whether query m_idx attends to key n_idx."""
        return self.rows[m_idx][n_idx] == "1"

    def queries_seeing(self, n_start: int, n_stop: int) -> list[int]:
        """The queries that see at least one of the keys n_start .. n_stop-1."""
        return [m_idx for m_idx, row in enumerate(self.rows) if "1" in row[n_start:n_stop]]

    def tile_kind(self, m_block: int, n_block: int, grid: TileGrid) -> TileKind:
        """What a tile needs; as under a `Band`, one that reaches past the last key is never full."""
        rows = self.rows[m_block * grid.block_m : (m_block + 1) * grid.block_m]
        start, stop = n_block * grid.block_n, (n_block + 1) * grid.block_n
        parts = [row[start:stop] for row in rows]
        if not any("1" in part for part in parts):
            return TileKind.SKIP
        return TileKind.FULL if all(part == "1" * grid.block_n for part in parts) else TileKind.PARTIAL


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one head of one sequence, tiles, and modelled element sizes. In a matmul (seqlen_q, head_dim) is a, and
    (head_dim, seqlen_k) is b. `block_k` tiles its inner dimension; `block_table` are the physical pages of `paged`.
    `seen` is a mask of any form, in place of `left` and `right` (see Drawn).
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    left: int | None = None
    right: int | None = None
    scale: float = 1.0
    itemsize: int = 2
    wide_itemsize: int = 4
    num_splits: int = 1
    block_k: int = 1
    block_table: tuple[int, ...] | None = None
    seen: tuple[str, ...] | None = None

    @property
    def band(self) -> Band:
        """The visible part of the scores, where nothing is drawn."""
        return Band(self.seqlen_q, self.seqlen_k, self.left, self.right)

    @property
    def visible(self) -> Band | Drawn:
        """The visible part of the scores."""
        return self.band if self.seen is None else Drawn(self.seen)

    @property
    def grid(self) -> TileGrid:
        """Tokens of a tile."""
        return TileGrid(self.block_m, self.block_n)


@dataclass(frozen=True, slots=True)
class Trace:
    """An algorithm's events on a workload, and the arrays they work on; `kept` are kept for the backward."""

    algorithm: Algorithm
    workload: Workload
    arrays: dict[str, ArraySpec]
    events: tuple[Event, ...] = field(repr=False)
    kept: tuple[str, ...] = ()

    def steps(self) -> Iterator[tuple[Event, ...]]:
        """The events of each step (see above)."""
        run: list[Event] = []
        for event in self.events:
            if run and _place(run[0]) != _place(event):
                yield from _as_step(run)
                run = []
            run.append(event)
        yield from _as_step(run)

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return sum(1 for _ in self.steps())

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain dicts, lists, strings and numbers."""
        return {
            "algorithm": self.algorithm,
            "workload": asdict(self.workload),
            "arrays": {name: asdict(spec) for name, spec in self.arrays.items()},
            "kept": list(self.kept),
            "events": [event.to_dict() for event in self.events],
        }

    def to_json(self) -> str:
        """`to_dict` as text: {"algorithm", "workload", "arrays", "kept", "events": [{"kind", ...fields}]}."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote; rejects text that it could not have written."""
        try:
            plain = json.loads(text)
            return cls(
                algorithm=plain["algorithm"],
                workload=Workload(**_tuples(plain["workload"])),
                arrays={name: ArraySpec(**spec) for name, spec in plain["arrays"].items()},
                events=tuple(_event(item) for item in plain["events"]),
                kept=tuple(plain["kept"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            fix = "Pass what Trace.to_json returned."
            raise InvalidProblem("text", "a trace as JSON", f"{type(error).__name__}: {error}", fix) from error


def _place(event: Event) -> tuple[object, ...]:
    return event.phase, event.m_block, event.n_block, event.part


def _as_step(run: list[Event]) -> Iterator[tuple[Event, ...]]:
    if run and None not in (run[0].m_block, run[0].n_block) and run[0].phase not in AROUND:
        yield tuple(run)


def _event(plain: dict[str, Any]) -> Event:
    cls = KINDS[plain["kind"]]
    names = {item.name for item in fields(cls)}
    return cls(**_tuples({name: value for name, value in plain.items() if name in names}))


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
