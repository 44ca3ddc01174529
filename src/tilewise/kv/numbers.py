"""Numbers that callers pass, alone or many at a time, of Python, NumPy or torch: judged, and made one kind."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem

__all__ = ["are_ones", "integers_of", "sizes_of", "within"]


def sizes_of(**sizes: Any) -> list[int]:
    """Positive integers; rejects anything else, True too."""
    found: list[int] = []
    for name, size in sizes.items():
        number = None if isinstance(size, bool) else within(size, 2**63 - 1)
        if not number:
            raise InvalidProblem(name, "an integer of at least 1", size, "A cache has pages, and pages have slots.")
        found.append(number)
    return found


def within(number: Any, last: int) -> int | None:
    """An integer from 0 to `last`, of NumPy or torch too; None if it is none."""
    try:
        index = operator.index(number)
    except (TypeError, RuntimeError):
        return None
    return index if 0 <= index <= last else None


def integers_of(name: str, numbers: Any) -> NDArray[np.int64]:
    """As an array; rejects fractions and what has no shape."""
    try:
        found = np.asarray(numbers)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(name, "integers", repr(numbers), "Count tokens.") from None
    if found.size and found.dtype.kind not in "iu":
        raise InvalidProblem(name, "integers", found.dtype, "Count tokens.")
    return found.astype(np.int64)


def are_ones(counts: object, number: int) -> bool:
    """Whether these are so many ones."""
    if isinstance(counts, np.ndarray):
        return counts.dtype.kind in "iu" and counts.shape == (number,) and bool((counts == 1).all())
    if not isinstance(counts, list | tuple):
        return False
    return len(counts) == number == counts.count(1) and {*map(type, counts)} <= {int}
