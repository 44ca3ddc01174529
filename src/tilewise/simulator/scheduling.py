"""The algorithms, and the two entry points: `schedule` takes sizes, `simulate` real arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from tilewise.errors import InvalidProblem
from tilewise.simulator import backward, forward, matmul
from tilewise.simulator.events import Algorithm, ArraySpec, Trace, Workload
from tilewise.simulator.ledger import Counts, count, require_capacity
from tilewise.simulator.machine import replay
from tilewise.simulator.tape import Tape
from tilewise.units import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# About twelve events a tile: beyond this a trace takes gigabytes, and the closed forms of `plan.cost` say the same.
MOST_TILES = 100_000


class _Schedule(NamedTuple):
    write: Callable[[Tape], None]
    arrays: Callable[[Workload], dict[str, ArraySpec]]
    kept: tuple[str, ...] = ()


SCHEDULES: dict[Algorithm, _Schedule] = {
    "naive": _Schedule(forward.naive, forward.naive_arrays, backward.NAIVE_KEPT),
    "fa1": _Schedule(forward.fa1, forward.fa1_arrays),
    "fa2": _Schedule(forward.fa2, forward.attention_arrays, backward.KEPT),
    "naive_backward": _Schedule(backward.naive_backward, backward.naive_backward_arrays, backward.NAIVE_KEPT),
    "backward": _Schedule(backward.backward, backward.backward_arrays, backward.KEPT),
    "decode": _Schedule(forward.decode, forward.decode_arrays),
    "paged": _Schedule(forward.decode, forward.decode_arrays),
    "matmul_naive": _Schedule(matmul.matmul_naive, matmul.matmul_arrays),
    "matmul": _Schedule(matmul.matmul, matmul.matmul_arrays),
}


@dataclass(frozen=True, slots=True)
class Simulation:
    """What an algorithm did with real arrays: its events, their totals, and the arrays it left in slow memory."""

    trace: Trace
    counts: Counts
    results: dict[str, NDArray[np.float64]]


def schedule(algorithm: Algorithm, workload: Workload, *, sram_bytes: int | None = None) -> Trace:
    """The events of an algorithm; rejects sizes below 1, and fast memory that is too small for the tiles.

    >>> trace = schedule("fa2", Workload(6, 6, 4, 4, block_m=2, block_n=2))
    >>> trace.num_steps
    27
    """
    if algorithm not in SCHEDULES:
        names = ", ".join(get_args(Algorithm))
        raise InvalidProblem("algorithm", f"one of {names}", repr(algorithm), "Name a listed algorithm.")
    _check(algorithm, workload)
    chosen = SCHEDULES[algorithm]
    tape = Tape(workload, chosen.arrays(workload))
    chosen.write(tape)
    trace = Trace(algorithm, workload, tape.arrays, tuple(tape.events), chosen.kept)
    require_capacity(trace, sram_bytes)
    return trace


def simulate(
    algorithm: Algorithm, workload: Workload, inputs: Mapping[str, NDArray[Any]], *, sram_bytes: int | None = None
) -> Simulation:
    """Schedules an algorithm and executes its events on `inputs`: q, k, v, or as the algorithm needs.

    The machine computes in fp64 whatever element sizes are modelled, so results are exact to rounding.
    """
    trace = schedule(algorithm, workload, sram_bytes=sram_bytes)
    return Simulation(trace, count(trace), replay(trace, inputs))


def _check(algorithm: Algorithm, work: Workload) -> None:
    for item in dataclasses.fields(work):
        value = getattr(work, item.name)
        least = 0 if item.name in ("left", "right") else 1
        if item.name in ("scale", "block_table", "seen") or (value is None and least == 0):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidProblem(item.name, f"a whole number of at least {least}", repr(value), "Change the workload.")
    if not math.isfinite(work.scale):
        raise InvalidProblem("scale", "a finite number", work.scale, "1 / sqrt(head_dim) is usual.")
    _check_pages(algorithm, work)
    _check_drawn(work)
    tiles = _tiles(algorithm, work)
    if tiles > MOST_TILES:
        fix = "Take larger tiles, or the closed forms of tilewise.plan.cost."
        raise InvalidProblem("workload", f"at most {MOST_TILES:,} tiles", f"{tiles:,}", fix)


def _check_pages(algorithm: Algorithm, work: Workload) -> None:
    pages = -(-work.seqlen_k // work.block_n)
    table = work.block_table
    if (algorithm == "paged") != (table is not None):
        fix = "Give one physical page for each block_n keys to 'paged', and no table to anything else."
        raise InvalidProblem("block_table", "a table for 'paged' alone", table, fix)
    if table is not None and (len(table) < pages or min(table) < 0):
        fix = f"Keys fill pages of {work.block_n}; there are {work.seqlen_k} of them."
        raise InvalidProblem("block_table", f"{counted(pages, 'page')} of 0 or more", table, fix)


def _check_drawn(work: Workload) -> None:
    if work.seen is None:
        return
    if (work.left, work.right) != (None, None):
        fix = "Write the window into the mask."
        raise InvalidProblem("seen", "a mask without left and right", (work.left, work.right), fix)
    if len(work.seen) != work.seqlen_q or any(len(row) != work.seqlen_k or set(row) - {"0", "1"} for row in work.seen):
        expected = f"{work.seqlen_q} texts of {work.seqlen_k} times 0 or 1"
        raise InvalidProblem("seen", expected, work.seen, "Give one text a query, one character a key.")


def _tiles(algorithm: Algorithm, work: Workload) -> int:
    rows, keys = -(-work.seqlen_q // work.block_m), -(-work.seqlen_k // work.block_n)
    if algorithm == "matmul_naive":
        return work.seqlen_q * work.seqlen_k
    if algorithm in ("naive", "naive_backward"):
        return rows
    return rows * keys * (-(-work.head_dim // work.block_k) if algorithm == "matmul" else 1) + rows * work.num_splits
