"""Checks running totals of packed sequences (`cu_seqlens`)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from tilewise.errors import InvalidProblem


def check_totals(name: str, entries: Sequence[int], rows: int) -> None:
    """Raise unless the entries are running totals of at most `rows` rows."""
    if entries[0] != 0:
        raise InvalidProblem(name, "0 as its first entry", entries[0], "Prepend the 0: it holds running totals.")
    for index, (start, stop) in enumerate(itertools.pairwise(entries)):
        if stop < start:
            got = f"{start} followed by {stop} at entry {index + 1}"
            raise InvalidProblem(name, "entries that never decrease", got, "Pass running totals, not lengths.")
    if entries[-1] > rows:
        fix = "The last entry counts the packed rows in use."
        raise InvalidProblem(name, f"a last entry of at most {rows}, the rows stored", entries[-1], fix)


def lengths_of(entries: Sequence[int]) -> list[int]:
    """The length of each sequence."""
    return list(map(operator.sub, entries[1:], entries))


def checked_longest(name: str, totals: str, entries: Sequence[int], rows: int, given: int | None) -> int:
    """`longest_of` after `check_totals`, in half the time for valid totals."""
    lengths = lengths_of(entries)
    if entries[0] != 0 or entries[-1] > rows or min(lengths, default=0) < 0:
        check_totals(totals, entries, rows)
    longest = max(lengths, default=0)
    return longest if given is None else given if given >= longest else longest_of(name, totals, entries, given)


def longest_of(name: str, totals: str, entries: Sequence[int], given: int | None) -> int:
    """The longest length, or a `given` upper bound for it, which must not be smaller."""
    longest = max(lengths_of(entries), default=0)
    if given is not None and given < longest:
        fix = "Pass the longest length or more, or None."
        raise InvalidProblem(name, f"at least {longest}, the longest in {totals}", given, fix)
    return longest if given is None else given
