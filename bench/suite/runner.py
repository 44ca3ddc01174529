"""Runs cases: inputs, the check of every implementation, then the race between those that are right."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from suite.cases import Case
from suite.checking import Checker
from suite.first_call import first_call_seconds
from suite.implementations import Implementation, NotApplicable, Prepared, chosen_backend, results_of
from suite.inputs import Inputs, make_inputs
from suite.measuring import HostClock, extra_memory
from suite.results import CaseResult, Measured
from tilewise import device
from tilewise.bench.timing import Clock, CpuClock, CudaClock, Entrant, Summary, describe, race, summarise

__all__ = ["Limits", "run"]

# Sets of inputs that are rotated at most, where one set fits the GPU's second-level cache.
MOST_COPIES = 16
MEMORY_SAMPLES = 2

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of timing per case, and in all; cases that no time is left for are reported as skipped."""

    seconds_per_case: float
    max_seconds: float
    threads: int


def run(
    cases: Sequence[Case], contestants: Mapping[str, Implementation], limits: Limits, announce: Callable[[str], None]
) -> Iterator[CaseResult]:
    """One result per case, as they come."""
    deadline = time.monotonic() + limits.max_seconds
    for case in cases:
        announce(case.name)
        if time.monotonic() > deadline:
            reason = f"not run: {limits.max_seconds:.0f} s were up"
            yield CaseResult(case, None, tuple(Measured(name, "skipped", reason) for name in case.implementations))
        elif case.measure == "first-call":
            yield _first_call(case, limits)
        else:
            yield _Session(case, contestants, limits).result()
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()


def _first_call(case: Case, limits: Limits) -> CaseResult:
    name = case.implementations[0]
    backend = chosen_backend(case, make_inputs(case))
    try:
        seconds = first_call_seconds(case, limits.threads)
    except Exception as error:
        return CaseResult(case, backend, (Measured(name, "failed", describe(error)),))
    summary = summarise(Entrant(name, lambda _: lambda: None, samples=seconds))
    return CaseResult(case, backend, (Measured.of(case, name, summary, detail=f"backend {backend}"),))


class _Session:
    """One case from its inputs to its result."""

    def __init__(self, case: Case, contestants: Mapping[str, Implementation], limits: Limits) -> None:
        self.case, self.limits = case, limits
        self.inputs = _copies(case)
        self.contestants = [contestants[name] for name in case.implementations if name in contestants]
        self.measured = {
            name: Measured(name, "missing", "no such backend here")
            for name in case.implementations
            if name not in contestants
        }
        self.checker = Checker(case, self.inputs[0])
        self.auto = chosen_backend(case, self.inputs[0])
        self.stream = torch.cuda.Stream() if case.graph else None

    def result(self) -> CaseResult:
        """Check everybody, measure those that are right."""
        ready = {i.name: works for i in self.contestants if (works := self._ready(i)) is not None}
        if self.case.measure == "memory":
            for implementation in self.contestants:
                if implementation.name in ready:
                    self._memory(implementation, ready[implementation.name][0])
        else:
            self._race(ready)
        order = self.case.implementations
        return CaseResult(self.case, self.auto, tuple(self.measured[name] for name in order))

    def _ready(self, implementation: Implementation) -> list[Work] | None:
        """One piece of work per set of inputs, warmed up and right; None with the reason noted otherwise."""
        name = implementation.name
        if implementation.missing is not None:
            self.measured[name] = Measured(name, "missing", implementation.missing)
            return None
        try:
            with self._inside(implementation):
                prepared = [implementation.prepare(self.case, inputs) for inputs in self.inputs]
                outcome = self.checker.judge(results_of(self.case, prepared[0]), coarse=implementation.coarse)
                works = [_work(self.case, p, self.stream) for p in prepared]
                for work in works:
                    work()
                self._wait()
        except NotApplicable as reason:
            self.measured[name] = Measured(name, "skipped", str(reason))
            return None
        except Exception as error:  # a contestant that fails is reported, the others go on
            self.measured[name] = Measured(name, "failed", describe(error))
            return None
        if outcome.complaint is not None:
            self.measured[name] = Measured(name, "wrong", outcome.complaint, outcome.error)
            return None
        self.measured[name] = Measured(name, "ok", error=outcome.error)
        return works

    def _race(self, ready: Mapping[str, list[Work]]) -> None:
        scopes = {i.name: functools.partial(self._inside, i) for i in self.contestants}
        repeats = _repeated if self.stream is None else functools.partial(_captured, self.stream)
        entrants = [Entrant(name, functools.partial(repeats, works, scopes[name])) for name, works in ready.items()]
        race(entrants, self._clock(), self.limits.seconds_per_case)
        for entrant in entrants:
            name = entrant.name
            detail = f"backend {self.auto}" if name == "tilewise" else ""
            if entrant.failure is not None:
                self.measured[name] = Measured(name, "failed", entrant.failure)
            else:
                error = self.measured[name].error
                self.measured[name] = Measured.of(self.case, name, summarise(entrant), error=error, detail=detail)

    def _memory(self, implementation: Implementation, work: Work) -> None:
        name = implementation.name
        with self._inside(implementation):
            samples = [float(extra_memory(work, self.case.device)) for _ in range(MEMORY_SAMPLES)]  # type: ignore[arg-type]
        summary = Summary(max(samples), min(samples), max(samples), len(samples), 1)
        self.measured[name] = Measured.of(self.case, name, summary, error=self.measured[name].error)

    def _clock(self) -> Clock:
        if self.case.device == "cpu":
            return CpuClock()
        return HostClock() if self.case.measure == "overhead" else CudaClock()

    @contextlib.contextmanager
    def _inside(self, implementation: Implementation) -> Iterator[None]:
        with implementation.scope(), torch.set_grad_enabled(self.case.needs_grad):
            yield

    def _wait(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()


def _copies(case: Case) -> list[Inputs]:
    """One set of inputs, or on a GPU enough of them that none is still in the cache when its turn comes again."""
    first = make_inputs(case)
    if case.device == "cpu" or case.measure in ("memory", "overhead"):
        return [first]
    cache = device.of(torch.device("cuda")).l2_bytes
    count = min(MOST_COPIES, 1 + 4 * cache // max(1, first.nbytes))
    return [first, *(make_inputs(case, seed) for seed in range(1, count))]


def _work(case: Case, prepared: Prepared, stream: torch.cuda.Stream | None) -> Work:
    """What is timed: the call, or the backward of an output made here.

    Autograd runs a backward on the stream of its forward, so that one to be captured begins there.
    """
    if case.measure != "backward":
        return prepared.call
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = prepared.call()
    return lambda: torch.autograd.grad(out, prepared.leaves, prepared.dout, retain_graph=True)


def _repeated(works: list[Work], scope: Callable[[], contextlib.AbstractContextManager[None]], calls: int) -> Work:
    """A batch of calls that rotates over the sets of inputs."""
    # Ends with the last set, which a lead-in of one call uses: the batch after it starts with another one.
    sequence = [works[(index - calls) % len(works)] for index in range(calls)]

    def batch() -> None:
        with scope():
            for work in sequence:
                work()

    return batch


def _captured(
    stream: torch.cuda.Stream,
    works: list[Work],
    scope: Callable[[], contextlib.AbstractContextManager[None]],
    calls: int,
) -> Work:
    """The same batch as one CUDA graph."""
    batch = _repeated(works, scope, calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        batch()
    replay: Work = graph.replay
    return replay
