"""Timing: all implementations of a case in turn, round after round, each sample a batch of calls.

The order changes from round to round, because on a chip at its power limit a sample inherits the clock frequency that
the previous one left.

On a GPU a sample is the time between two events with the second-level cache flushed before the first one. The call
rotates over several sets of inputs if one set would stay in that cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Batch = Callable[[], object]

MOST_CALLS = 1000
MOST_ROUNDS, LEAST_SAMPLES = 60, 2
# Written before each GPU sample; larger than any second-level cache (50 MB on Hopper, 126 MB on Blackwell).
FLUSH_BYTES = 256 << 20


class Clock:
    """Measures how long a batch of calls takes, in seconds; `lead_in` is an untimed call before."""

    # A call is repeated until a sample takes so long: a clock tick or an event's latency is then under 0.5 %.
    sample_seconds = 10e-3
    least_rounds = 5

    def __call__(self, batch: Batch, lead_in: Batch) -> float:
        """Run the batch once."""
        raise NotImplementedError


class CpuClock(Clock):
    """Wall time of calls that return when they are done."""

    def __call__(self, batch: Batch, lead_in: Batch) -> float:  # noqa: ARG002 - nothing runs ahead on a CPU
        """Run the batch once."""
        start = time.perf_counter()
        batch()
        return time.perf_counter() - start


class CudaClock(Clock):
    """Time on the device, with the cache flushed before.

    The lead-in keeps the device busy while the host prepares the next call, as in a stream of calls: a long kernel
    hides the host's work, a short one does not.
    """

    sample_seconds = 3e-3
    # Twice five implementations, so that each has followed every other one twice.
    least_rounds = 10

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, batch: Batch, lead_in: Batch) -> float:
        """Run the batch once."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        lead_in()
        start.record()
        batch()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


@dataclass(slots=True)
class Entrant:
    """An implementation in one case: `repeat(calls)` makes the batch that is timed. Filled in by `race`."""

    name: str
    repeat: Callable[[int], Batch]
    calls: int = 1
    lead_in: Batch | None = None
    samples: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds per call: median and quartiles over the samples."""

    median: float
    low: float
    high: float
    samples: int
    calls: int


def race(entrants: Sequence[Entrant], clock: Clock, seconds: float) -> None:
    """Time the entrants round after round for about `seconds` in all, in another order (`turns`) each time the same
    ones meet again.

    An entrant that takes more than its share takes part in fewer rounds; one that raises drops out with `failure`.
    """
    batches = {e.name: batch for e in entrants if (batch := _calibrated(e, clock)) is not None}
    running = [e for e in entrants if e.name in batches]
    if not running:
        return
    costs = {e.name: e.samples[-1] * e.calls for e in running}
    rounds = max(clock.least_rounds, min(MOST_ROUNDS, int(seconds / sum(costs.values()))))
    share = 2 * seconds / len(running)
    strides = {
        name: math.ceil(rounds / max(LEAST_SAMPLES, min(rounds, int(share / cost)))) for name, cost in costs.items()
    }
    for entrant in running:
        entrant.samples.clear()
    # Counts how often the same set met. Counted by rounds, one that skips `count - 1` of `count` would keep one
    # position.
    met: Counter[tuple[int, ...]] = Counter()
    for index in range(rounds):
        present = tuple(place for place, e in enumerate(running) if index % strides[e.name] == 0 and not e.failure)
        for turn in turns(len(present), met[present]):
            entrant = running[present[turn]]
            _sample(entrant, batches[entrant.name], clock)
        met[present] += 1


def turns(count: int, index: int) -> list[int]:
    """The order of round `index`: in `count` rounds, twice as many if odd, each follows every other one equally often.

    >>> [turns(4, index) for index in range(4)]
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    order = [(place + index) % count for place in zigzag]
    return order[::-1] if count % 2 and index // count % 2 else order


def _calibrated(entrant: Entrant, clock: Clock) -> Batch | None:
    """Choose how often the call is repeated in a sample, and store one such sample in `samples`."""
    try:
        once = entrant.lead_in = entrant.repeat(1)
        seconds = min(clock(once, once) for _ in range(2))
        entrant.calls = max(1, min(MOST_CALLS, math.ceil(clock.sample_seconds / max(seconds, 1e-7))))
        if entrant.calls == 1:  # slow calls are not repeated more than needed
            entrant.samples.append(seconds)
            return once
        batch = entrant.repeat(entrant.calls)
        batch()
    except Exception as error:  # a failure is reported, the others go on
        entrant.failure = describe(error)
        return None
    _sample(entrant, batch, clock)
    return None if entrant.failure else batch


def _sample(entrant: Entrant, batch: Batch, clock: Clock) -> None:
    try:
        entrant.samples.append(clock(batch, entrant.lead_in or batch) / entrant.calls)
    except Exception as error:
        entrant.failure = describe(error)


def describe(error: Exception) -> str:
    """The first line of what went wrong, short enough for a table's footnote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def summarise(entrant: Entrant) -> Summary:
    """Median and quartiles of an entrant's samples."""
    samples = sorted(entrant.samples)
    if len(samples) < 2:
        return Summary(samples[0], samples[0], samples[0], len(samples), entrant.calls)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, low, high, len(samples), entrant.calls)
