"""Measuring one call: its best time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LEAST_CALLS", "TIMING_SECONDS", "best_seconds"]

Run = Callable[[], object]

# Timing repeats a call this often, and between the two for about so many seconds.
LEAST_CALLS, MOST_CALLS, TIMING_SECONDS = 2, 20, 0.8


def best_seconds(run: Run) -> float:
    """The fastest of some calls: at least two, since the first may compile, then more while there is time."""
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) + min(times) < TIMING_SECONDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
