"""Which requests of a batch start with the same pages, from the host's table: the hint for cascade attention.

Requests with the same first page form a tree: they part where their pages differ. A request is in one group at most, so
at every fork the tree is either cut above it (all share the stem) or below (each branch shares its longer one),
whichever leaves fewer keys to read. A tree is followed through MOST_FORKS nested forks and cut above the next.

The search takes host time, so `PrefixGroups` caches its result while the same requests decode: pages that a step takes
belong to its requests alone, and pages that become shared are written into the table as such.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.kv.book import Step
from tilewise.kv.rows import Ints

Table = NDArray[np.int32]

# Requests that leave a stem one at a time make one fork each. The limit bounds the recursion.
MOST_FORKS = 32


class PrefixGroup(NamedTuple):
    """Indices in the batch, and the pages that all of them start with.

    The pages themselves are kept, because a table row may belong to another request by the time the hint is made.
    """

    places: Ints
    pages: Table

    @property
    def num_pages(self) -> int:
        """How many pages they share."""
        return len(self.pages)

    @property
    def pages_saved(self) -> int:
        """Page reads that are saved."""
        return (len(self.places) - 1) * self.num_pages


class PrefixGroups:
    """The groups of one step after another."""

    def __init__(self) -> None:
        self._rows: Ints | None = None
        self._shareable: Ints = np.empty(0, np.int64)
        self._found: list[PrefixGroup] = []

    def follow(self, step: Step, page_size: int) -> None:
        """Keeps the cached groups if they must still hold. Must be called for every step."""
        # If every request has one more token and new pages are its own, what was shared still is.
        if self._rows is None or (step.previous is not None and step.rows is self._rows):
            return
        shareable = step.before // page_size
        if not np.array_equal(step.rows, self._rows) or bool((shareable < self._shareable).any()):
            self._rows = None
            return
        self._shareable = shareable
        if len(step.changed.rows):
            within = np.zeros(max(int(step.changed.rows.max()), int(step.rows.max(initial=0))) + 1, np.int64)
            within[step.rows] = shareable
            if bool((step.changed.columns < within[step.changed.rows]).any()):
                self._rows = None

    def of(self, table: Table, step: Step, page_size: int) -> list[PrefixGroup]:
        """The step's groups; the same list as for the previous step if they are unchanged."""
        if self._rows is None:
            self._shareable = step.before // page_size
            self._found = find_groups(table, step.rows, self._shareable)
            self._rows = step.rows  # last: from now on the groups count as found
        return self._found


def find_groups(table: Table, rows: Ints, shareable: Ints) -> list[PrefixGroup]:
    """Groups of a batch: `table[rows[i]]` are the pages of request i; the first `shareable[i]` may be shared."""
    places = np.nonzero(shareable > 0)[0]
    return _branches(table, rows, shareable, places, 0, 0) if len(places) > 1 else []


def _branches(table: Table, rows: Ints, shareable: Ints, places: Ints, depth: int, forks: int) -> list[PrefixGroup]:
    """The groups among requests that share `depth` pages so far."""
    places = places[shareable[places] > depth]
    pages = table[rows[places], depth]
    order = np.argsort(pages, kind="stable")
    cuts = np.nonzero(np.diff(pages[order]))[0] + 1
    found: list[PrefixGroup] = []
    # Most batches share nothing: then there is a cut between any two.
    if len(cuts) + 1 < len(places):
        for branch in np.split(places[order], cuts):
            if len(branch) > 1:
                found += _stem(table, rows, shareable, np.sort(branch), depth, forks)
    return found


def _stem(table: Table, rows: Ints, shareable: Ints, places: Ints, depth: int, forks: int) -> list[PrefixGroup]:
    """The best groups among requests that share page number `depth`."""
    end = int(shareable[places].min())
    same = (table[rows[places], depth:end] == table[rows[places[0]], depth:end]).all(0)
    common = end if same.all() else depth + int(same.argmin())
    whole = PrefixGroup(places, table[rows[places[0]], :common].copy())
    parts = _branches(table, rows, shareable, places, common, forks + 1) if forks < MOST_FORKS else []
    return parts if sum(part.pages_saved for part in parts) > whole.pages_saved else [whole]
