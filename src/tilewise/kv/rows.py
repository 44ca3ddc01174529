"""What is known of many requests at once: arrays with a row for each, and what changed in the table of pages.

A request keeps its row from `claim` to `release`. With `max_requests` the arrays have their full size from the start
and stay where they are, so that others may keep views of them; without it they double when they are full.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem

__all__ = ["Changes", "Ints", "Rows", "consecutive"]

Ints = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

# A table as wide as most requests will ever be does not grow while they decode; what nobody touches takes no memory.
FIRST_ROWS, FIRST_COLUMNS = 16, 1024
# Ids that are noted for a request before they are moved to its others: not for all at the same time, but over so many
# steps.
NOTED, SPREAD = 64, 32


def consecutive(first: Ints, counts: Ints) -> Ints:
    """`counts[i]` numbers from `first[i]` on, one run after another."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


class Changes(NamedTuple):
    """Entries of the table that were written: `rows[i]`, `columns[i]`; one that was written twice is there twice."""

    rows: Ints
    columns: Ints

    @classmethod
    def joined(cls, parts: list[Changes]) -> Changes:
        """One after another."""
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.int64)
        return cls(*(np.concatenate([none, *some]) for some in zip(*parts, strict=True))) if parts else cls(none, none)


class Rows:
    """The arrays: `table[row]` names pages, `lengths` counts tokens in the cache, `prompts` those of the prompt,
    `known` the first ones whose ids are known; `tail_shared` says that others may hold the last, partly filled page.
    The latest ids of requests are noted here for a whole batch at a time, and moved to each request's when somebody
    looks: appending to 256 arrays took 15 us a step, and 0.2 to 0.4 ms when all of them, equally long, had to grow.
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
        self._num_noted: Ints = np.zeros(rows, np.int64)
        self._free = list(range(rows - 1, -1, -1))
        self._changed: list[Changes] = []

    def check_room(self) -> None:
        """Refuses a request that there is no row for."""
        if not self._free and self.max_requests is not None:
            expected = f"at most max_requests = {self.max_requests} at a time"
            fix = "Free one first, or make the cache for more."
            raise InvalidProblem("requests", expected, self.max_requests + 1, fix)

    def claim(self, prompt: int, known: int) -> int:
        """A row for a request without tokens in the cache."""
        if not self._free:
            self._double()
        row = self._free.pop()
        self.lengths[row], self.prompts[row], self.known[row], self.tail_shared[row] = 0, prompt, known, False
        self._num_noted[row] = 0
        return row

    def release(self, row: int) -> None:
        """Nobody's row again."""
        self.lengths[row] = 0
        self._free.append(row)

    def write(self, row: int, column: int, pages: list[int]) -> None:
        """Name pages in a row of the table, from a column on."""
        columns = np.arange(column, column + len(pages))
        self.write_each(np.full(len(pages), row), columns, np.array(pages, np.int32))

    def write_each(self, rows: Ints, columns: Ints, pages: NDArray[np.int32]) -> None:
        """Name a page in each of some places."""
        needed, width = int(columns.max(initial=-1)) + 1, self.table.shape[1]
        if needed > width:
            self.table = _grown(self.table, (len(self.table), max(needed, 2 * width)))
        self.table[rows, columns] = pages
        self._changed.append(Changes(rows, columns))

    def note(self, rows: Ints, ids: Ints) -> Ints:
        """One more id for each of some rows; returns the places of those whose ids must be taken now."""
        places = self._num_noted[rows]
        self._noted[rows, places] = ids
        self._num_noted[rows] = places + 1
        self.known[rows] += 1
        return np.nonzero(places + rows % SPREAD >= NOTED - 1)[0]

    def taken_ids(self, row: int) -> bytes:
        """The ids noted for a row since this was asked the last time."""
        count = int(self._num_noted[row])
        self._num_noted[row] = 0
        return self._noted[row, :count].tobytes()

    def taken_changes(self) -> Changes:
        """What was written since this was asked the last time."""
        changed, self._changed = self._changed, []
        return Changes.joined(changed)

    def _double(self) -> None:
        rows = len(self.lengths)
        self.table = _grown(self.table, (2 * rows, self.table.shape[1]))
        self._noted = _grown(self._noted, (2 * rows, NOTED))
        self.lengths, self.prompts, self.known, self._num_noted = (
            _grown(array, (2 * rows,)) for array in (self.lengths, self.prompts, self.known, self._num_noted)
        )
        self.tail_shared = _grown(self.tail_shared, (2 * rows,))
        self._free = list(range(2 * rows - 1, rows - 1, -1))


def _grown(array: NDArray[Number], shape: tuple[int, ...]) -> NDArray[Number]:
    """A larger array with the same entries, 0 elsewhere."""
    larger = np.zeros(shape, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger
