"""Ends a long call early: Python's signal handlers run during the kernels, and an exception in one ends the call.

The calling thread also works. If it is the main thread, it leaves its work about every 50 ms for a callback (POLL) in
which Python runs pending handlers. If one raises, as Ctrl-C does, the callback sets STOP. All threads read STOP between
tiles and skip the remaining work; the results are dropped. When the calling thread runs out of work, it keeps handling
signals until the other threads are done.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import shapes as sz
from tilewise.backends.cpu.compiler import driver, named
from tilewise.backends.cpu.intrinsics import atomic_add, call_function, field, load_shared, store_i64

POLL_MILLISECONDS = 50
# Tile loops poll at keys that are multiples of this, which is at most 10 ms apart.
POLL_KEYS = 8 * sz.BLOCK_N
LONGEST_SLEEP = 1000


@driver
def answers_signals(p: int) -> int:
    """Whether this is the thread that handles signals."""
    if field(p, f.POLL) == 0:
        return 0
    return call_function(field(p, f.THREAD_ID), 0, 0) == field(p, f.CALLER)


@driver
def is_due(p: int) -> int:
    """Whether this thread handles signals and has not done so for a while."""
    if answers_signals(p) == 0:
        return 0
    call_function(field(p, f.CLOCK), field(p, f.CLOCK_ID), p + 8 * f.CLOCK_SECONDS)
    now = field(p, f.CLOCK_SECONDS) * 1000 + field(p, f.CLOCK_NANOSECONDS) // 1000000
    if now < field(p, f.NEXT_POLL):
        return 0
    store_i64(p + 8 * f.NEXT_POLL, now + POLL_MILLISECONDS)
    return 1


@driver
def answer_signals(p: int) -> None:
    """Let Python run pending signal handlers."""
    call_function(field(p, f.POLL), 0, 0)


@driver
def has_stopped(p: int) -> int:
    """Whether the remaining work is to be skipped."""
    return load_shared(p + 8 * f.STOP)


@driver
def stops(p: int) -> int:
    """`has_stopped`, after handling signals if that is due."""
    if is_due(p):
        answer_signals(p)
    return has_stopped(p)


@driver
def stops_at(p: int, key: int) -> int:
    """`stops` in a loop over tiles, most of which do not poll."""
    return stops(p) if key % POLL_KEYS == 0 else 0


@driver
def leave(p: int) -> None:
    """The end of a thread's work. Sleeps grow with the time waited, so it ends at most a few percent late."""
    if field(p, f.POLL) == 0:
        return
    atomic_add(p + 8 * f.THROUGH, 1)
    if answers_signals(p) == 0:
        return
    microseconds = 0
    # Threads that have not started yet will find nothing to do.
    while load_shared(p + 8 * f.THROUGH) < load_shared(p + 8 * f.BLOCK_FIELDS):
        stops(p)
        call_function(field(p, f.SLEEP), microseconds, 0)
        microseconds = min(microseconds + 1, LONGEST_SLEEP)


def taking_items(program: str, compute: Callable[[int, int, int], None]) -> Callable[[int], None]:
    """The entry point of a program, which each thread runs: take work items until none is left."""

    def entry(p: int) -> None:
        counters = p + 8 * f.BLOCK_FIELDS
        ws = field(p, f.WORKSPACE) + atomic_add(counters, 1) * field(p, f.WORKSPACE_BYTES)
        while True:
            item = atomic_add(counters + 64, 1)
            if item >= field(p, f.NUM_ITEMS) or stops(p):
                break
            compute(p, ws, item)
        leave(p)

    return named(program, entry)
