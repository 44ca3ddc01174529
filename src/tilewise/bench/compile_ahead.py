"""Compile what contestants compile for every shape, in several processes at once, before anything is timed.

FlexAttention takes some 20 seconds of a core for a shape and direction; the timed process then finds the kernels
and graphs in torch's cache on disk (TORCHINDUCTOR_CACHE_DIR) and has only to trace.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewise.bench.cases import Case
from tilewise.bench.implementations import Implementation, results_of
from tilewise.bench.inputs import make_inputs
from tilewise.bench.peers import implementations
from tilewise.bench.timing import describe

__all__ = ["Compiled", "compile_ahead"]

# Seconds between two looks at what the processes have done.
PATIENCE = 0.2


class Compiled(NamedTuple):
    """A contestant of a case, the seconds it took, and what went wrong, if anything did."""

    case: str
    implementation: str
    seconds: float
    complaint: str = ""


def compile_ahead(cases: Sequence[Case], workers: int, max_seconds: float) -> list[Compiled]:
    """Run every contestant that compiles once in each of its cases, in so many processes; what is not done in time is
    left to the timed run, with that as its complaint. Backward passes, which take longest, come first.
    """
    contestants = [i for i in implementations(cases[0].device).values() if i.compiles] if cases and workers else []
    wanted = [(case, i.name) for case in cases for i in contestants if i.name in case.implementations and not i.missing]
    if not wanted:
        return []
    wanted.sort(key=lambda item: (item[0].measure != "backward", -item[0].head_dim))
    workers = min(workers, len(wanted))
    context = multiprocessing.get_context("spawn")
    asked, done = context.Queue(), context.Queue()
    for item in (*wanted, *(None,) * workers):
        asked.put(item)
    deadline = time.monotonic() + max_seconds
    processes = [context.Process(target=_work, args=(asked, done), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    found: list[Compiled] = []
    try:
        while len(found) < len(wanted) and time.monotonic() < deadline:
            # Asked before the look: what the last of them put in before it ended is still there.
            alive = any(p.is_alive() for p in processes)
            try:
                found.append(done.get(timeout=PATIENCE))
            except queue.Empty:
                if not alive:
                    break
    finally:
        for process in processes:
            process.terminate()
            process.join()
    reason = f"not done in {max_seconds:.0f} s" if time.monotonic() >= deadline else "its process ended"
    known = {item[:2] for item in found}
    return found + [Compiled(c.name, name, 0.0, reason) for c, name in wanted if (c.name, name) not in known]


def _work(asked: Any, done: Any) -> None:
    """One process: cases from one queue, what became of them into the other."""
    from torch._inductor import config  # its own pool of processes would be one too many

    config.compile_threads = 1
    torch.set_num_threads(1)
    while (item := asked.get()) is not None:
        case, name = item
        began, complaint = time.monotonic(), ""
        try:
            _compile(case, implementations(case.device)[name])
        except Exception as error:  # reported; the timed run will meet it again
            complaint = describe(error)
        done.put(Compiled(case.name, name, time.monotonic() - began, complaint))


def _compile(case: Case, implementation: Implementation) -> None:
    """As the timed run prepares it, so that it finds what this one leaves."""
    with implementation.scope(), torch.set_grad_enabled(case.needs_grad):
        results_of(case, implementation.prepare(case, make_inputs(case)))
        if case.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
