"""What events cost: elements and bytes that cross between the memories, what the fast one holds, products, scores."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.errors import InvalidProblem
from tilewise.plan.cost import Traffic
from tilewise.simulator.events import Compute, Event, Free, Load, Skip, Store, Trace
from tilewise.units import format_bytes


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals up to and including some event; `fast_*` is what the fast memory holds right then, `peak_*` the most yet.

    `traffic` counts elements as `plan.cost` does: narrow reads, narrow writes, wide both ways. `scores` are the
    computed elements of S (masked ones included), `skipped` those of skipped tiles.
    """

    traffic: Traffic = field(default_factory=Traffic)
    bytes_read: int = 0
    bytes_written: int = 0
    loads: int = 0
    stores: int = 0
    fast_elements: int = 0
    fast_bytes: int = 0
    peak_elements: int = 0
    peak_bytes: int = 0
    flops: int = 0
    scores: int = 0
    skipped: int = 0

    def after(self, event: Event) -> Counts:
        """The totals once this event has happened."""
        if isinstance(event, Load):
            crossed = Traffic(wide=event.elements) if event.wide else Traffic(reads=event.elements)
            moved = self._plus(traffic=crossed, bytes_read=event.bytes, loads=1)
            return moved.held(event.elements, event.bytes)
        if isinstance(event, Store):
            crossed = Traffic(wide=event.elements) if event.wide else Traffic(writes=event.elements)
            return self._plus(traffic=crossed, bytes_written=event.bytes, stores=1)
        if isinstance(event, Compute):
            scores = event.shape[0] * event.shape[1] if event.op == "scores" else 0
            return self._plus(flops=event.flops, scores=scores).held(event.elements, event.bytes)
        if isinstance(event, Free):
            return self.held(-event.elements, -event.bytes)
        return self._plus(skipped=event.elements) if isinstance(event, Skip) else self

    def held(self, elements: int, size: int) -> Counts:
        """The totals with so much more, or less, in fast memory."""
        now = self._plus(fast_elements=elements, fast_bytes=size)
        peaks = max(now.fast_elements, self.peak_elements), max(now.fast_bytes, self.peak_bytes)
        return replace(now, peak_elements=peaks[0], peak_bytes=peaks[1])

    def _plus(self, **more: Any) -> Counts:
        return replace(self, **{name: getattr(self, name) + amount for name, amount in more.items()})


def counts_after_each(trace: Trace) -> Iterator[Counts]:
    """The running totals, one entry per event: what a stepping display shows."""
    counts = Counts()
    for event in trace.events:
        counts = counts.after(event)
        yield counts


def count(trace: Trace) -> Counts:
    """The totals of a whole trace."""
    return functools.reduce(Counts.after, trace.events, Counts())


def require_capacity(trace: Trace, sram_bytes: int | None) -> None:
    """Rejects a trace that needs more fast memory than there is, and names the need and the buffers that make it up."""
    need = count(trace).peak_bytes
    if sram_bytes is None or need <= sram_bytes:
        return
    held: dict[str, int] = {}
    for event, counts in zip(trace.events, counts_after_each(trace), strict=True):
        _hold(held, event)
        if counts.peak_bytes == need:
            break
    holders = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
    work = trace.workload
    raise InvalidProblem(
        "sram_bytes",
        f"at least {need} for {trace.algorithm} with tiles of {work.block_m} x {work.block_n} ({holders})",
        sram_bytes,
        "Make the tiles smaller or the fast memory larger.",
    )


def _hold(held: dict[str, int], event: Event) -> None:
    if isinstance(event, Load):
        held[event.buffer] = event.bytes
    elif isinstance(event, Compute):
        held[event.target] = event.bytes if event.replaces is None else held.pop(event.replaces)
    elif isinstance(event, Free):
        del held[event.buffer]
