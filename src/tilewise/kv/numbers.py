"""Validates numbers from callers, single or many, of Python, NumPy or torch, and converts them to one type."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem

__all__ = ["are_ones", "integers_of", "sizes_of", "within"]


def sizes_of(**sizes: Any) -> list[int]:
    """Positive integers. Raises for anything else, True included."""
    found: list[int] = []
    for name, size in sizes.items():
        number = None if isinstance(size, bool) else within(size, 2**63 - 1)
        if not number:
            raise InvalidProblem(name, "an integer of at least 1", size, "A cache has pages, and pages have slots.")
        found.append(number)
    return found


def within(number: Any, last: int) -> int | None:
    """An integer from 0 to `last`, also of NumPy or torch; None if it is not one."""
    try:
        index = operator.index(number)
    except (TypeError, RuntimeError):
        return None
    return index if 0 <= index <= last else None


def integers_of(name: str, numbers: Any) -> NDArray[np.int64]:
    """The numbers as an array. Raises for fractions and for what has no shape."""
    try:
        found = np.asarray(numbers)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(name, "integers", repr(numbers), "Count tokens.") from None
    if found.size and found.dtype.kind not in "iu":
        raise InvalidProblem(name, "integers", found.dtype, "Count tokens.")
    return found.astype(np.int64)


def are_ones(counts: object, number: int) -> bool:
    """Whether these are `number` ones."""
    if isinstance(counts, np.ndarray):
        return counts.dtype.kind in "iu" and counts.shape == (number,) and bool((counts == 1).all())
    if not isinstance(counts, list | tuple):
        return False
    return len(counts) == number == counts.count(1) and {*map(type, counts)} <= {int}
