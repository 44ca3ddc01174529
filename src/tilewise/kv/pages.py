"""The page allocator: which page of the pool is held, in constant time per page.

A page is in one of three states. *Free*: no request holds it and its contents are not needed. *Held*: `references`
counts the requests whose tables name it. *Idle*: no request holds it, but the prefix index knows its contents; idle
pages are evicted when the free ones have run out, least recently used first. The three counts always add up to the
pool.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import OutOfPages
from tilewise.units import counted


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1; `evicted(pages)` is called before idle pages are reused.

    >>> pool = PageAllocator(2)
    >>> page = pool.take()
    >>> pool.drop(page), pool.available
    (None, 2)
    """

    def __init__(self, num_pages: int, evicted: Callable[[list[int]], None] = lambda _pages: None) -> None:
        self.num_pages = num_pages
        # Arrays, because the garbage collector walks through lists, which would interrupt a step.
        self._references = array("q", bytes(8 * num_pages))
        self.shared = 0
        self.evictions = 0
        self._evicted = evicted
        # A stack: the page that was freed last is the most likely to be in a cache.
        self._free = array("q", range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def references(self) -> list[int]:
        """The holders of every page."""
        return self._references.tolist()

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._references[page]

    @property
    def available(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that the index knows but no request holds."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Pages in some request's table."""
        return self.num_pages - self.available

    def is_idle(self, page: int) -> bool:
        """Whether the index knows a page that no request holds."""
        return page in self._idle

    def take(self) -> int:
        """A page that no request holds: a free one, else the least recently used idle one."""
        if not self.available:
            raise OutOfPages(f"of {counted(self.num_pages, 'page')} none is free: all are held")
        return int(self.take_many(1)[0])

    def take_many(self, count: int) -> NDArray[np.int64]:
        """`take`, `count` times. The caller has checked that they are available."""
        quick = min(count, len(self._free))
        pages = np.frombuffer(self._free[len(self._free) - quick :], np.int64)[::-1]
        del self._free[len(self._free) - quick :]
        if quick < count:
            pages = np.append(pages, self._evict(count - quick))
        np.frombuffer(self._references, np.int64)[pages] = 1
        return pages

    def recount(self, held: NDArray[np.integer]) -> None:
        """Take the holders from a list that names each page once for every holder. The others become free."""
        references = np.bincount(held, minlength=self.num_pages).astype(np.int64)
        self._references = array("q", references.tobytes())
        self._free = array("q", np.nonzero(references == 0)[0][::-1].astype(np.int64).tobytes())
        self._idle = OrderedDict()
        self.shared = int((references > 1).sum())

    def _evict(self, count: int) -> list[int]:
        """Evict the least recently used idle pages at once, which is faster than one by one."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self.evictions += count
        self._evicted(pages)
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held or idle."""
        count = self._references[page] + 1
        self._references[page] = count
        if count == 1:
            del self._idle[page]
        self.shared += count == 2

    def drop(self, page: int, *, remembered: bool = False) -> None:
        """Remove a holder. Without holders the page becomes free, or idle if it is `remembered`."""
        count = self._references[page] - 1
        self._references[page] = count
        self.shared -= count == 1
        if count == 0:
            if remembered:
                self._idle[page] = None
            else:
                self._free.append(page)
