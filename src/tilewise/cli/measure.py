"""The best time of one call."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LEAST_CALLS", "TIMING_SECONDS", "best_seconds"]

Run = Callable[[], object]

# Minimum and maximum number of calls, and the seconds to spend between the two.
LEAST_CALLS, MOST_CALLS, TIMING_SECONDS = 2, 20, 0.8


def best_seconds(run: Run) -> float:
    """The fastest of several calls: at least two, because the first may compile, then more while there is time."""
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) + min(times) < TIMING_SECONDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
