"""Which page holds which tokens: a chain of page hashes per known prefix.

K and V of a token depend on every token before it, so a full page is known by its own tokens *and* by the page before
it. The key of a page hashes both; after a hit the tokens and the predecessor are compared, so two prefixes with the
same hash are never confused: the later one is simply not remembered.

    system prompt  [page 7] -- [page 2] --+-- [page 9]   question one
                                          +-- [page 4]   question two
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilewise.errors import InvalidProblem

__all__ = ["Entry", "Ids", "Key", "PrefixIndex", "hash_page", "known_ids"]

# Ids of tokens, 64 bits each. Not a list: the garbage collector walks through lists, which took 3 ms for 256 requests
# of 1000 tokens, in the middle of a step.
Ids = array
ID_BYTES = 8
Key = Callable[[int, bytes], int]


def known_ids(tokens: Iterable[Any]) -> Ids[int]:
    """Ids as 64-bit integers; None, 1.5 and "1" are none."""
    try:
        return array("q", map(operator.index, tokens))
    except (TypeError, OverflowError) as problem:
        fix = "Give what a tokenizer gives, as a list."
        raise InvalidProblem("tokens", "integer ids of 64 bits", problem, fix) from None


def hash_page(before: int, tokens: bytes) -> int:
    """The key of a page from its predecessor's key and its own tokens."""
    return hash((before, tokens))


class Entry:
    """A full page in the index: the bytes of its ids, the entry before it (None: it is the first), and where it is."""

    __slots__ = ("depth", "key", "page", "parent", "tokens")

    def __init__(self, parent: Entry | None, tokens: bytes, page: int, key: int, depth: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.key = key
        self.depth = depth


class PrefixIndex:
    """Full pages by content. Forgetting a page is the caller's business: see `PageAllocator`."""

    def __init__(self, page_size: int, key: Key = hash_page) -> None:
        self.page_size = page_size
        self._key = key
        self._by_key: dict[int, Entry] = {}
        self._by_page: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def follow(self, tokens: Ids[int], parent: Entry | None = None) -> Iterator[Entry]:
        """The known pages of a prefix, one after another, starting behind `parent`."""
        first = 0 if parent is None else parent.depth
        every, size = tokens.tobytes(), ID_BYTES * self.page_size
        for number in range(first, len(tokens) // self.page_size):
            content = every[number * size : (number + 1) * size]
            found = self._by_key.get(self._key(0 if parent is None else parent.key, content))
            if found is None or found.parent is not parent or found.tokens != content:
                return
            parent = found
            yield found

    def insert(self, parent: Entry | None, tokens: bytes, page: int) -> Entry | None:
        """Remember a full page. If another page has this content, its entry; None if the chain cannot go on here."""
        if parent is None:
            before, depth = 0, 1
        else:
            before, depth = parent.key, parent.depth + 1
            if self._by_page.get(parent.page) is not parent:
                return None
        key = self._key(before, tokens)
        known = self._by_key.get(key)
        if known is not None:
            return known if known.parent is parent and known.tokens == tokens else None
        entry = Entry(parent, tokens, page, key, depth)
        self._by_key[key] = self._by_page[page] = entry
        return entry

    def forget(self, page: int) -> None:
        """The page is about to hold something else."""
        entry = self._by_page.pop(page, None)
        if entry is not None:
            del self._by_key[entry.key]
