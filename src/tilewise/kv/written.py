"""Enters written pages into the prefix index, a limited number per step.

If another request filled a page with the same tokens first, that page is used and this one is given back: equal prompts
that come together end up on the same pages.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from tilewise.kv.pages import PageAllocator
from tilewise.kv.prefix import ID_BYTES, PrefixIndex, depth_of, page_of
from tilewise.kv.requests import Batch, Request
from tilewise.kv.rows import Ints, Rows

__all__ = ["Full", "WrittenPages"]

# Minimum number of pages that a step enters into the index, and the factor over the average number of pages its
# requests fill: the backlog shrinks while a batch decodes.
LEAST_AT_ONCE, HASTE = 16, 1.25


class Full(NamedTuple):
    """Pages that a step fills: page number `numbers[i]` of request `places[i]` of its batch.

    Arrays, because a prompt has many pages, and the garbage collector walks through lists.
    """

    batch: Batch
    places: Ints
    numbers: Ints

    @property
    def rows(self) -> Ints:
        """The rows of their requests."""
        return self.batch.rows[self.places]

    def part(self, begin: int, end: int) -> Full:
        """A slice of them."""
        return Full(self.batch, self.places[begin:end], self.numbers[begin:end])


class WrittenPages:
    """Full pages waiting to be entered into the index."""

    def __init__(self, index: PrefixIndex, pages: PageAllocator, rows: Rows) -> None:
        self._index, self._pages, self._rows = index, pages, rows
        # One entry per step, and how many of the first step's pages are entered.
        self._queue: deque[Full] = deque()
        self._entered = self._waiting = 0

    def add(self, full: Full) -> None:
        """Queue pages that are written."""
        self._queue.append(full)
        self._waiting += len(full.places)

    def enter_some(self, requests: int, taken: int) -> None:
        """Enter a step's share of the waiting pages; none if the step itself took many pages."""
        share = max(LEAST_AT_ONCE, int(HASTE * requests / self._index.page_size))
        if taken <= 2 * share:
            self.enter(share)

    def enter(self, most: int | None = None) -> None:
        """Enter all waiting pages, or the first `most`."""
        left = self._waiting if most is None else min(most, self._waiting)
        self._waiting -= left
        while left:
            first, full = self._entered, self._queue[0]
            self._entered = last = min(first + left, len(full.places))
            self._enter(full.part(first, last))
            left -= last - first
            if last == len(full.places):
                self._queue.popleft()
                self._entered = 0

    def _enter(self, full: Full) -> None:
        """Enter pages whose tokens are known and whose predecessors are in the index."""
        pages, insert = self._rows.table[full.rows, full.numbers].tolist(), self._index.insert
        states = [full.batch.states[place] for place in full.places.tolist()]
        for state, number, page, content in zip(
            states, full.numbers.tolist(), pages, self._contents(full, states), strict=True
        ):
            follows = content and state.traceable and depth_of(state.entry) == number
            entry = insert(state.entry, content, page) if follows else None
            if entry is None:
                state.traceable = False
                continue
            state.entry = entry
            if (known := page_of(entry)) != page:
                self._pages.hold(known)
                self._rows.write(state.row, number, [known])
                self._pages.drop(page)

    def _contents(self, full: Full, states: list[Request]) -> list[bytes]:
        """The ids of each page; empty if one is unknown."""
        size = self._index.page_size
        first = full.numbers * size
        noted, there = self._rows.noted_ids(full.rows, first, size)
        contents = [noted[at : at + ID_BYTES * size] for at in range(0, len(noted), ID_BYTES * size)]
        for place in np.nonzero(~there)[0].tolist():
            state, begin = states[place], int(first[place])
            ids = state.tokens if len(state.tokens) >= begin + size else self._rows.moved_ids(state.row, state.tokens)
            contents[place] = ids[begin : begin + size].tobytes() if len(ids) >= begin + size else b""
        return contents
