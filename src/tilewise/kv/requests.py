"""What the book knows of a request that has no place in an array, and of a batch that comes again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise.kv.prefix import Entry, Ids
from tilewise.kv.rows import Ints

__all__ = ["Batch", "Request"]


class Request:
    """The ids that are known of its tokens, and how far the index knows them."""

    __slots__ = ("entry", "row", "tokens", "traceable")

    def __init__(self, row: int, tokens: Ids[int]) -> None:
        self.row = row
        # Those of the prompt, and of later ones what was moved here: see `Rows.note`.
        self.tokens = tokens
        self.entry: Entry | None = None
        # False from the first token whose id is not known, where the index cannot follow, and of a finished request.
        self.traceable = True


class Batch:
    """The requests of a step, kept for the next one: most steps of an engine have the requests of the step before.

    `slots` has the slot of each one's last token where all of them only decode and write to pages of their own: then
    the next token's is the one after it, but for those that need a page.
    """

    __slots__ = ("hashed", "ones", "requests", "rows", "slots", "states")

    def __init__(self, requests: Sequence[int], states: list[Request]) -> None:
        self.requests = tuple(requests)
        # Before they are compared: a tensor of torch's is equal to the number it holds, but is no request.
        self.hashed = hash(self.requests)
        self.states = states
        self.rows: Ints = np.array([state.row for state in states], np.int64)
        self.ones: Ints = np.ones(len(states), np.int64)
        self.slots: Ints | None = None
