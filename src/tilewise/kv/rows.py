"""State of all requests: arrays with one row per request, the changes of the page table, and the batch of a step.

A request keeps its row from `claim` to `release`. With `max_requests` the arrays have their full size from the start
and stay at their address, so that others may keep views of them; without it they double when they are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem
from tilewise.kv.prefix import Entry, Ids

Ints = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

# Wide enough that most requests never grow the table while they decode; untouched memory is not allocated.
FIRST_ROWS, FIRST_COLUMNS = 16, 1024
# Number of latest ids per request kept here, and the steps over which a batch's ids are moved to their requests.
NOTED, SPREAD = 256, 128
# `known` of a request whose ids are all known.
ALL = 1 << 62


def consecutive(first: Ints, counts: Ints) -> Ints:
    """`counts[i]` numbers from `first[i]` on, one run after another."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


class Changes(NamedTuple):
    """Table entries that were written: `rows[i]`, `columns[i]`. An entry written twice appears twice."""

    rows: Ints
    columns: Ints

    @classmethod
    def joined(cls, parts: list[Changes]) -> Changes:
        """Concatenation."""
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.int64)
        return cls(*(np.concatenate([none, *some]) for some in zip(*parts, strict=True))) if parts else cls(none, none)


class Rows:
    """The arrays: `table[row]` names pages, `lengths` counts tokens in the cache, `prompts` those of the prompt,
    `known` the number of leading tokens with known ids unless ALL are; `tail_shared` says that others may hold the
    last, partly filled page. The latest ids are stored here for a whole batch at a time, token i of a request in column
    i % NOTED of its row, and moved to the request when they are needed: appending to one array per request in every
    step would be slow.
    """

    def __init__(self, max_requests: int | None, max_pages: int) -> None:
        self.max_requests = max_requests
        rows = FIRST_ROWS if max_requests is None else max_requests
        columns = min(FIRST_COLUMNS, max_pages) if max_requests is None else max_pages
        self.table: NDArray[np.int32] = np.zeros((rows, columns), np.int32)
        self.lengths: Ints = np.zeros(rows, np.int64)
        self.prompts: Ints = np.zeros(rows, np.int64)
        self.known: Ints = np.zeros(rows, np.int64)
        self.tail_shared: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self._noted: Ints = np.zeros((rows, NOTED), np.int64)
        # The first token of a row that is stored here, unless more than NOTED came since.
        self._noted_from: Ints = np.zeros(rows, np.int64)
        self._free = list(range(rows - 1, -1, -1))
        self._changed: list[Changes] = []

    def refuse_another(self) -> None:
        """Raise if `claim` would find no row."""
        if not self._free and self.max_requests is not None:
            expected = f"at most max_requests = {self.max_requests} at a time"
            fix = "Free one first, or make the cache for more."
            raise InvalidProblem("requests", expected, self.max_requests + 1, fix)

    def claim(self, prompt: int) -> int:
        """A row for a request without cached tokens and with a known prompt."""
        if not self._free:
            self._double()
        row = self._free.pop()
        self.lengths[row], self.prompts[row], self.known[row], self.tail_shared[row] = 0, prompt, ALL, False
        self._noted_from[row] = prompt
        return row

    def release(self, row: int) -> None:
        """Free a row."""
        self.lengths[row] = 0
        self._free.append(row)

    def recount(self, rows: Ints, pages: Ints) -> NDArray[np.int32]:
        """Take `rows` as those in use and free the others. The first `pages[i]` entries of `rows[i]` count as changed;
        returns the pages there.
        """
        unused = np.ones(len(self.lengths), np.bool_)
        unused[rows] = False
        self.lengths[unused] = 0
        self.tail_shared[rows] = True
        self._free = np.nonzero(unused)[0][::-1].tolist()
        entries = Changes(np.repeat(rows, pages), consecutive(np.zeros_like(pages), pages))
        self._changed = [entries]
        return self.table[entries.rows, entries.columns]

    def write(self, row: int, column: int, pages: list[int]) -> None:
        """Write pages into a row of the table, from a column on."""
        columns = np.arange(column, column + len(pages))
        self.write_each(np.full(len(pages), row), columns, np.array(pages, np.int32))

    def write_each(self, rows: Ints, columns: Ints, pages: NDArray[np.integer]) -> None:
        """Write one page into each of these entries."""
        needed, width = int(columns.max(initial=-1)) + 1, self.table.shape[1]
        if needed > width:
            self.table = _grown(self.table, (len(self.table), max(needed, 2 * width)))
        self.table[rows, columns] = pages
        self._changed.append(Changes(rows, columns))

    def note(self, rows: Ints, at: Ints, ids: Ints) -> Ints:
        """Store ids after the prompt: token `at[i]` of `rows[i]`. Returns which rows must be moved in this step."""
        self._noted[rows, at % NOTED] = ids
        return np.nonzero((at + rows) % SPREAD == 0)[0]

    def moved_ids(self, row: int, ids: Ids[int]) -> Ids[int]:
        """All known ids of a row's request; `ids` has the first ones and is extended."""
        first, last = len(ids), min(int(self.known[row]), int(self.lengths[row]))
        if first < last:
            ids.frombytes(self._noted[row].take(np.arange(first, last), mode="wrap").tobytes())
        return ids

    def noted_ids(self, rows: Ints, first: Ints, count: int) -> tuple[bytes, NDArray[np.bool_]]:
        """The ids of `count` tokens from `first[i]` on of each `rows[i]`, and which rows have all of them here."""
        lengths, known = self.lengths[rows], self.known[rows]
        there = (first >= self._noted_from[rows]) & (first >= lengths - NOTED) & (first + count <= known)
        places = (first[:, None] + np.arange(count)) % NOTED
        return self._noted[rows[:, None], places].tobytes(), there

    def forget_ids(self, row: int, known: int) -> None:
        """Reset a request: its first `known` ids are known, and none is stored here."""
        length = max(int(self.prompts[row]), int(self.lengths[row]))
        self.known[row] = ALL if known >= length else known
        self._noted_from[row] = length

    @property
    def is_changed(self) -> bool:
        """Whether there are changes that were not taken yet."""
        return bool(self._changed)

    def taken_changes(self) -> Changes:
        """The changes since the last call."""
        changed, self._changed = self._changed, []
        return Changes.joined(changed)

    def _double(self) -> None:
        rows = len(self.lengths)
        self.table = _grown(self.table, (2 * rows, self.table.shape[1]))
        self._noted = _grown(self._noted, (2 * rows, NOTED))
        self.tail_shared = _grown(self.tail_shared, (2 * rows,))
        self.prompts, self.known, self._noted_from = (
            _grown(array, (2 * rows,)) for array in (self.prompts, self.known, self._noted_from)
        )
        # Last, because their number is the number of rows.
        self.lengths = _grown(self.lengths, (2 * rows,))
        self._free = list(range(2 * rows - 1, rows - 1, -1))


@dataclass(slots=True, eq=False)
class Request:
    """The known token ids of a request, and how far the index has them."""

    row: int
    # Ids of the prompt, and later ones that were moved here: see `Rows.note`.
    tokens: Ids[int]
    entry: Entry | None = None
    # False after the first unknown token id, if the index cannot continue the chain, and for a finished request.
    traceable: bool = True


class Batch:
    """The requests of a step, cached for the next one: most steps of an engine have the same requests.

    `slots` has the slot of each request's last token if all of them only decode and write to pages of their own: then
    the next slot follows it, except for requests that need a page.
    """

    __slots__ = ("hashed", "ones", "requests", "rows", "slots", "states")

    def __init__(self, requests: Sequence[int], states: list[Request]) -> None:
        self.requests = tuple(requests)
        # Hashed before the comparison: a torch tensor equals the number it holds, but is no request.
        self.hashed = hash(self.requests)
        self.states = states
        self.rows: Ints = np.array([state.row for state in states], np.int64)
        self.ones: Ints = np.ones(len(states), np.int64)
        self.slots: Ints | None = None


def _grown(array: NDArray[Number], shape: tuple[int, ...]) -> NDArray[Number]:
    """A larger array with the same entries, 0 elsewhere."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
