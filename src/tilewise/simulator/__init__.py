"""Attention step by step over a modelled two-level memory: what is loaded, computed, rescaled, stored and skipped.

    >>> trace = schedule("fa2", Workload(256, 256, 64, 64, block_m=128, block_n=128))
    >>> count(trace).traffic.elements
    98304

`schedule` turns sizes into events, `replay` executes them on real arrays, `count` adds them up. `online` and `paging`
are two smaller models: one row's softmax in blocks, and pages of a KV cache against contiguous reservation.
"""

from tilewise.simulator.events import (
    Algorithm,
    ArraySpec,
    Compute,
    Event,
    Free,
    Load,
    Rescale,
    Skip,
    Store,
    Trace,
    Workload,
)
from tilewise.simulator.ledger import Counts, count, counts_after_each
from tilewise.simulator.machine import Machine, replay
from tilewise.simulator.scheduling import Simulation, schedule, simulate

__all__ = [
    "Algorithm",
    "ArraySpec",
    "Compute",
    "Counts",
    "Event",
    "Free",
    "Load",
    "Machine",
    "Rescale",
    "Simulation",
    "Skip",
    "Store",
    "Trace",
    "Workload",
    "count",
    "counts_after_each",
    "replay",
    "schedule",
    "simulate",
]
