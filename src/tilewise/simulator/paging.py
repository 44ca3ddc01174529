"""A KV cache's memory under two policies: pages on demand (shared, copied on write), and contiguous reservation.

Both count in pages of `page_size` tokens, so that they can stand side by side. Requests arrive with a prompt, grow
token by token, and finish. A request for which there is no room is refused and changes nothing.

    >>> pool = PagePool(num_pages=20, page_size=4)
    >>> pool.arrive("A", 5)
    True
    >>> pool.tables["A"]
    [0, 1]
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from tilewise.errors import InvalidProblem
from tilewise.units import counted

__all__ = ["ContiguousPool", "PageEvent", "PagePool"]


class PageEvent(NamedTuple):
    """What happened to a page: taken, shared with another request, copied before a write (`source`), given back when
    its last holder went; or a request was refused for want of pages.
    """

    kind: Literal["take", "share", "copy", "free", "refuse"]
    request: str
    page: int | None = None
    source: int | None = None


class _Pool:
    """What both policies keep: the tokens of each request, and what happened."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        _positive(num_pages=num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.tokens: dict[str, int] = {}
        self.events: list[PageEvent] = []

    def _new(self, request: str, tokens: int) -> None:
        _positive(tokens=tokens)
        if request in self.tokens:
            raise InvalidProblem("request", "a new name", repr(request), "Requests have names of their own.")

    def _known(self, request: str, tokens: int = 1) -> None:
        _positive(tokens=tokens)
        if request not in self.tokens:
            fix = "Let it arrive first."
            raise InvalidProblem("request", "one that has arrived and not finished", repr(request), fix)

    def _accepted(self, request: str, fits: bool) -> bool:
        if not fits:
            self.events.append(PageEvent("refuse", request))
        return fits


class PagePool(_Pool):
    """Pages go out on demand, the most recently freed first; a page with several holders is copied before a write."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.tables: dict[str, list[int]] = {}
        self.holders: Counter[int] = Counter()
        self._free = list(reversed(range(num_pages)))

    def arrive(self, request: str, tokens: int) -> bool:
        """A request with so many tokens; False if it is refused."""
        self._new(request, tokens)
        if not self._accepted(request, self._pages(tokens) <= len(self._free)):
            return False
        self.tables[request], self.tokens[request] = [], 0
        self._extend(request, tokens)
        return True

    def append(self, request: str, tokens: int = 1) -> bool:
        """More tokens for a request; its last page is copied first if others hold it too."""
        self._known(request, tokens)
        table, have = self.tables[request], self.tokens[request]
        copies = have % self.page_size != 0 and self.holders[table[-1]] > 1
        needed = self._pages(have + tokens) - len(table) + copies
        if not self._accepted(request, needed <= len(self._free)):
            return False
        if copies:
            self._copy_last(request)
        self._extend(request, tokens)
        return True

    def fork(self, parent: str, request: str) -> None:
        """A request that starts as a copy of another: it shares all its pages and takes none."""
        self._known(parent)
        self._new(request, 1)
        self.tables[request], self.tokens[request] = list(self.tables[parent]), self.tokens[parent]
        for page in self.tables[request]:
            self.holders[page] += 1
            self.events.append(PageEvent("share", request, page))

    def finish(self, request: str) -> None:
        """The request ends. Pages without other holders are free at once; its first page is the next to be taken."""
        self._known(request)
        for page in reversed(self.tables.pop(request)):
            self._release(request, page)
        del self.tokens[request]

    @property
    def reserved_pages(self) -> int:
        """Pages that are held, shared ones counted once."""
        return len(self.holders)

    @property
    def used_pages(self) -> int:
        """Pages with a token in them: all that are held."""
        return self.reserved_pages

    @property
    def utilisation(self) -> float:
        """Slots with a token, of those in held pages; a shared page counts once."""
        fill: dict[int, int] = {}
        for request, table in self.tables.items():
            for index, page in enumerate(table):
                filled = min(self.page_size, self.tokens[request] - index * self.page_size)
                fill[page] = max(fill.get(page, 0), filled)
        return sum(fill.values()) / max(1, self.reserved_pages * self.page_size)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self) -> int:
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def _extend(self, request: str, tokens: int) -> None:
        self.tokens[request] += tokens
        while len(self.tables[request]) < self._pages(self.tokens[request]):
            self.tables[request].append(self._take())
            self.events.append(PageEvent("take", request, self.tables[request][-1]))

    def _copy_last(self, request: str) -> None:
        source = self.tables[request][-1]
        self.holders[source] -= 1
        self.tables[request][-1] = self._take()
        self.events.append(PageEvent("copy", request, self.tables[request][-1], source))

    def _release(self, request: str, page: int) -> None:
        self.holders[page] -= 1
        if self.holders[page] == 0:
            del self.holders[page]
            self._free.append(page)
            self.events.append(PageEvent("free", request, page))


class ContiguousPool(_Pool):
    """A tensor of (slots, max_tokens), as a server has it that fixes its batch: a request takes a whole slot.

    `slots` is by default as many as the pages allow.
    """

    def __init__(self, num_pages: int, page_size: int, max_tokens: int, slots: int | None = None) -> None:
        super().__init__(num_pages, page_size)
        _positive(max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.pages_per_slot = -(-max_tokens // page_size)
        most = num_pages // self.pages_per_slot
        if slots is not None and not 1 <= slots <= most:
            fix = f"There is room for {counted(most, 'slot')} of {self.pages_per_slot} in {counted(num_pages, 'page')}."
            raise InvalidProblem("slots", f"1 to {most}", slots, fix)
        self.slots: list[str | None] = [None] * (most if slots is None else slots)

    def arrive(self, request: str, tokens: int) -> bool:
        """A request with so many tokens; False if no slot is free or it is too long for one."""
        self._new(request, tokens)
        if not self._accepted(request, tokens <= self.max_tokens and None in self.slots):
            return False
        slot = self.slots.index(None)
        self.slots[slot], self.tokens[request] = request, tokens
        self.events += [PageEvent("take", request, page) for page in self._pages(slot)]
        return True

    def append(self, request: str, tokens: int = 1) -> bool:
        """More tokens for a request; False where its slot is full."""
        self._known(request, tokens)
        if not self._accepted(request, self.tokens[request] + tokens <= self.max_tokens):
            return False
        self.tokens[request] += tokens
        return True

    def finish(self, request: str) -> None:
        """The request ends and its slot is free."""
        self._known(request)
        slot = self.slots.index(request)
        self.slots[slot] = None
        del self.tokens[request]
        self.events += [PageEvent("free", request, page) for page in self._pages(slot)]

    @property
    def reserved_pages(self) -> int:
        """Pages of the slots that are taken."""
        return len(self.tokens) * self.pages_per_slot

    @property
    def used_pages(self) -> int:
        """Reserved pages with a token in them."""
        return sum(-(-tokens // self.page_size) for tokens in self.tokens.values())

    @property
    def wasted_pages(self) -> int:
        """Reserved pages without a token."""
        return self.reserved_pages - self.used_pages

    @property
    def utilisation(self) -> float:
        """Slots with a token, of those reserved."""
        return sum(self.tokens.values()) / max(1, self.reserved_pages * self.page_size)

    def _pages(self, slot: int) -> range:
        return range(slot * self.pages_per_slot, (slot + 1) * self.pages_per_slot)


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InvalidProblem(name, "at least 1", size, "Sizes and lengths count from 1.")
