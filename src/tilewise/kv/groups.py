"""Which requests of a batch start with the same pages, from the host's table: the hint for cascade attention.

Requests with the same first page form a tree: they part where their pages differ. A request is in one group at most,
so at every fork the tree is either cut above it (all share the stem) or below (each branch shares its longer one),
whichever leaves fewer keys to read. A tree is followed through MOST_FORKS forks in a row, and cut above the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["PrefixGroup", "find_groups"]

Table = NDArray[np.int32]
Ints = NDArray[np.int64]

# Requests that leave a stem one at a time make a fork each: 700 of them would be as many calls inside one another.
MOST_FORKS = 32


class PrefixGroup(NamedTuple):
    """Places in the batch that share their first `num_pages` pages."""

    places: Ints
    num_pages: int

    @property
    def pages_saved(self) -> int:
        """Pages that need not be read again."""
        return (len(self.places) - 1) * self.num_pages


def find_groups(table: Table, rows: Ints, shareable: Ints) -> list[PrefixGroup]:
    """Groups of a batch: `table[rows[i]]` are the pages of place i, of which the first `shareable[i]` may be shared."""
    places = np.nonzero(shareable > 0)[0]
    return _branches(table, rows, shareable, places, 0, 0) if len(places) > 1 else []


def _branches(table: Table, rows: Ints, shareable: Ints, places: Ints, depth: int, forks: int) -> list[PrefixGroup]:
    """The groups among places that share `depth` pages so far."""
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
    """The best groups among places that share page number `depth`."""
    end = int(shareable[places].min())
    same = (table[rows[places], depth:end] == table[rows[places[0]], depth:end]).all(0)
    common = end if same.all() else depth + int(same.argmin())
    whole = PrefixGroup(places, common)
    parts = _branches(table, rows, shareable, places, common, forks + 1) if forks < MOST_FORKS else []
    return parts if sum(part.pages_saved for part in parts) > whole.pages_saved else [whole]
