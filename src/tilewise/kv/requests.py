"""Per-request state that is not in an array, and the cached batch of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise.kv.prefix import Entry, Ids
from tilewise.kv.rows import Ints

__all__ = ["Batch", "Request"]


class Request:
    """The known token ids of a request, and how far the index has them."""

    __slots__ = ("entry", "row", "tokens", "traceable")

    def __init__(self, row: int, tokens: Ids[int]) -> None:
        self.row = row
        # Ids of the prompt, and later ones that were moved here: see `Rows.note`.
        self.tokens = tokens
        self.entry: Entry | None = None
        # False after the first unknown token id, if the index cannot continue the chain, and for a finished request.
        self.traceable = True


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
