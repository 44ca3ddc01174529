"""The prefix index: which page holds which tokens, as a chain of page hashes per cached prefix.

K and V of a token depend on every token before it, so a full page is identified by its own tokens *and* by the page
before it. The key of a page hashes both. After a hit the tokens and the predecessor are compared, so two prefixes with
the same hash are never confused: the later one is not cached.

    system prompt  [page 7] -- [page 2] --+-- [page 9]   question one
                                          +-- [page 4]   question two
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilewise.errors import InvalidProblem

# Token ids, 64 bits each. Not a list, because the garbage collector walks through lists in the middle of a step.
Ids = array
ID_BYTES = 8
Key = Callable[[int, bytes], int]


def known_ids(tokens: Iterable[Any]) -> Ids[int]:
    """Ids as 64-bit integers. Raises for None, 1.5 and "1"."""
    try:
        return array("q", map(operator.index, tokens))
    except (TypeError, OverflowError) as problem:
        fix = "Give what a tokenizer gives, as a list."
        raise InvalidProblem("tokens", "integer ids of 64 bits", problem, fix) from None


def hash_page(before: int, tokens: bytes) -> int:
    """The key of a page from its predecessor's key and its own tokens."""
    return hash((before, tokens))


# A full page in the index: page number, number of pages in its prefix, its key, and its token ids. Plain bytes,
# compared by identity, because the garbage collector walks through objects in the middle of a step.
Entry = bytes
_HEAD, _EMPTY = struct.Struct("<qqq"), (-1, 0, 0)


def page_of(entry: Entry) -> int:
    """The page number of an entry."""
    return int(_HEAD.unpack_from(entry)[0])


def depth_of(entry: Entry | None) -> int:
    """Pages of a prefix that ends with this entry; 0 for None, the empty prefix."""
    return 0 if entry is None else int(_HEAD.unpack_from(entry)[1])


class PrefixIndex:
    """Full pages by content. The caller evicts pages: see `PageAllocator`."""

    def __init__(self, page_size: int, key: Key = hash_page) -> None:
        self.page_size = page_size
        self._key = key
        self._by_key: dict[int, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._parents: dict[int, Entry | None] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def parent(self, entry: Entry) -> Entry | None:
        """The entry before one that is still in the index; None if it is the first."""
        return self._parents[page_of(entry)]

    def follow(self, tokens: Ids[int], parent: Entry | None = None) -> Iterator[Entry]:
        """The cached pages of a prefix in order, starting after `parent`."""
        every, size = tokens.tobytes(), ID_BYTES * self.page_size
        for number in range(depth_of(parent), len(tokens) // self.page_size):
            content = every[number * size : (number + 1) * size]
            before = 0 if parent is None else int(_HEAD.unpack_from(parent)[2])
            found = self._by_key.get(self._key(before, content))
            if found is None or not self._is_known(found, parent, content):
                return
            parent = found
            yield found

    def insert(self, parent: Entry | None, tokens: bytes, page: int) -> Entry | None:
        """Add a full page. Returns its entry, or the one of a page with this content; None if the chain ends here."""
        page_before, depth, key = _EMPTY if parent is None else _HEAD.unpack_from(parent)
        if parent is not None and self._by_page.get(page_before) is not parent:
            return None
        key = self._key(key, tokens)
        known = self._by_key.get(key)
        if known is not None:
            return known if self._is_known(known, parent, tokens) else None
        entry = _HEAD.pack(page, depth + 1, key) + tokens
        self._by_key[key] = self._by_page[page] = entry
        self._parents[page] = parent
        return entry

    def forget(self, pages: Iterable[int]) -> None:
        """Remove pages that are about to be overwritten. Pages that are not in the index are ignored."""
        by_key, by_page, parents, unpack = self._by_key, self._by_page, self._parents, _HEAD.unpack_from
        for page in pages:
            entry = by_page.pop(page, None)
            if entry is not None:
                del by_key[unpack(entry)[2]], parents[page]

    def clear(self) -> None:
        """Remove all pages."""
        self._by_key, self._by_page, self._parents = {}, {}, {}

    def _is_known(self, entry: Entry, parent: Entry | None, tokens: bytes) -> bool:
        """Whether an entry has these tokens after that parent: keys may be equal by chance."""
        return self.parent(entry) is parent and entry.endswith(tokens)
