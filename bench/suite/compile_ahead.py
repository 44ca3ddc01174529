"""Compile what contestants compile for every shape, in several processes at once, before anything is timed.

FlexAttention takes some 20 seconds of a core for a shape and direction; the timed process then finds the kernels
and graphs in torch's cache on disk (TORCHINDUCTOR_CACHE_DIR) and has only to trace.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, TypeAlias, cast

import torch

from suite.cases import Case
from suite.implementations import Implementation, results_of
from suite.inputs import make_inputs
from suite.peers import implementations
from tilewise.bench.timing import describe

__all__ = ["Compiled", "compile_ahead"]

# A case and the name of a contestant.
Item: TypeAlias = tuple[Case, str]


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
    deadline = time.monotonic() + max_seconds
    crew = [_Worker() for _ in range(min(workers, len(wanted)))]
    try:
        return _shared_out(wanted, crew, deadline, f"in {max_seconds:.0f} s")
    finally:
        for worker in crew:
            worker.end()


def _shared_out(wanted: Sequence[Item], crew: Sequence[_Worker], deadline: float, limit: str) -> list[Compiled]:
    """Each worker takes the next item when it is done with one; whose process ended takes no more."""
    found: list[Compiled] = []
    waiting, busy = deque(wanted), dict[Connection, tuple[_Worker, Item]]()

    def employ(worker: _Worker) -> None:
        if waiting:
            item = waiting.popleft()
            busy[worker.connection] = worker, item
            worker.give(item)

    for worker in crew:
        employ(worker)
    while busy and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(busy), left):
            worker, (case, name) = busy.pop(cast("Connection", connection))
            done = worker.answer()
            found.append(done or Compiled(case.name, name, 0.0, worker.farewell()))
            if done:
                employ(worker)
    unbegun = f"not begun {limit}" if busy else "every process had ended"
    found += [Compiled(case.name, name, 0.0, f"not done {limit}") for _, (case, name) in busy.values()]
    return found + [Compiled(case.name, name, 0.0, unbegun) for case, name in waiting]


class _Worker:
    """A process that compiles what it is given, one item after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        # While this process held that end too, the other's end would not be noticed.
        theirs.close()

    def give(self, item: Item) -> None:
        """What to compile next."""
        with contextlib.suppress(OSError):  # it has ended, which its answer will say
            self.connection.send(item)

    def answer(self) -> Compiled | None:
        """What became of the item, or None if the process ended over it."""
        try:
            done: Compiled = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        return done

    def farewell(self) -> str:
        """How the process ended: -9 is the signal by which a system short of memory ends one."""
        self.process.join()
        return f"its process ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        """Whatever it is doing."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _work(items: Connection) -> None:
    """One process: cases come, what became of them goes back."""
    from torch._inductor import config  # its own pool of processes would be one too many

    config.compile_threads = 1
    torch.set_num_threads(1)
    while True:
        case, name = items.recv()
        began, complaint = time.monotonic(), ""
        try:
            _compile(case, implementations(case.device)[name])
        except Exception as error:  # reported; the timed run will meet it again
            complaint = describe(error)
        items.send(Compiled(case.name, name, time.monotonic() - began, complaint))


def _compile(case: Case, implementation: Implementation) -> None:
    """As the timed run prepares it, so that it finds what this one leaves."""
    with implementation.scope(), torch.set_grad_enabled(case.needs_grad):
        results_of(case, implementation.prepare(case, make_inputs(case)))
        if case.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
