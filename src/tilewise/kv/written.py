"""From written pages to the index of prefixes, some of them a step.

A page that another request filled with the same tokens first is given back for that one: equal prompts that come
together end up on the same pages.
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

# Pages that a step enters into the index at least, 1.2 us each, and how many times those that its requests fill on the
# average: what waits becomes less while a batch decodes.
LEAST_AT_ONCE, HASTE = 16, 1.25


class Full(NamedTuple):
    """Pages that a step fills: number `numbers[i]` of those of request `places[i]` of its batch.

    Arrays, because a prompt has many of them, and the garbage collector walks through lists.
    """

    batch: Batch
    places: Ints
    numbers: Ints

    @property
    def rows(self) -> Ints:
        """The rows of their requests."""
        return self.batch.rows[self.places]

    def part(self, begin: int, end: int) -> Full:
        """Some of them."""
        return Full(self.batch, self.places[begin:end], self.numbers[begin:end])


class WrittenPages:
    """Full pages on their way into the index."""

    def __init__(self, index: PrefixIndex, pages: PageAllocator, rows: Rows) -> None:
        self._index, self._pages, self._rows = index, pages, rows
        # Step after step, and how many of the first step's are entered.
        self._queue: deque[Full] = deque()
        self._entered = self._waiting = 0

    def add(self, full: Full) -> None:
        """They are written."""
        self._queue.append(full)
        self._waiting += len(full.places)

    def enter_some(self, requests: int, taken: int) -> None:
        """As many of those that wait as a step of so many requests enters; none if it took many pages by itself."""
        share = max(LEAST_AT_ONCE, int(HASTE * requests / self._index.page_size))
        if taken <= 2 * share:
            self.enter(share)

    def enter(self, most: int | None = None) -> None:
        """All that wait, or the first ones."""
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
        """Pages into the index, as far as their tokens are known and their predecessors are there."""
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
        """The ids of pages; empty where one is not known."""
        size = self._index.page_size
        first = full.numbers * size
        noted, there = self._rows.noted_ids(full.rows, first, size)
        contents = [noted[at : at + ID_BYTES * size] for at in range(0, len(noted), ID_BYTES * size)]
        for place in np.nonzero(~there)[0].tolist():
            state, begin = states[place], int(first[place])
            ids = state.tokens if len(state.tokens) >= begin + size else self._rows.moved_ids(state.row, state.tokens)
            contents[place] = ids[begin : begin + size].tobytes() if len(ids) >= begin + size else b""
        return contents
