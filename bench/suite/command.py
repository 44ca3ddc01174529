"""A whole benchmark run from its options."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

import torch

from suite import measuring
from suite.cases import Case, select
from suite.compile_ahead import compile_ahead
from suite.cpu_cases import cpu_cases
from suite.gpu_cases import gpu_cases
from suite.peers import implementations
from suite.results import CaseResult, Results
from suite.runner import Limits, run
from tilewise.bench import machine
from tilewise.bench.quick import threads_of
from tilewise.errors import InvalidProblem

__all__ = ["Options", "chosen_cases", "execute"]

# Seconds of timing per case and in all: (device, quick). Checks, inputs and compilation come on top of the former.
SECONDS_PER_CASE = {("cpu", False): 4.0, ("cpu", True): 0.6, ("cuda", False): 0.8, ("cuda", True): 0.5}
# Compiling first comes before those.
COMPILING_SECONDS = 300.0
MAX_SECONDS = {("cpu", False): 1800.0, ("cpu", True): 120.0, ("cuda", False): 345.0, ("cuda", True): 80.0}


@dataclass(frozen=True, slots=True)
class Options:
    """What to run; None takes the default for the device. `compile_first`: in how many processes, see compile_ahead."""

    device: str = "auto"
    only: tuple[str, ...] = ()
    quick: bool = False
    threads: int | None = None
    seconds_per_case: float | None = None
    max_seconds: float | None = None
    commit: str | None = None
    compile_first: int = 0

    @property
    def resolved_device(self) -> str:
        """The GPU where there is one, unless the CPU is asked for."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidProblem("--device", "auto, cpu or cuda", repr(self.device), "Name one of these.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InvalidProblem("--device", "a device that is here", "cuda", "Use --device cpu, or another machine.")
        found = "cuda" if torch.cuda.is_available() else "cpu"
        return found if self.device == "auto" else self.device


def chosen_cases(options: Options) -> tuple[Case, ...]:
    """The cases that the options ask for."""
    registry = gpu_cases() if options.resolved_device == "cuda" else cpu_cases()
    return select(registry, options.only, quick=options.quick)


def execute(options: Options, announce: Callable[[str], None]) -> Results:
    """Run the cases; an interrupt ends the run early and keeps what is there."""
    device = options.resolved_device
    kind = (device, options.quick)
    found: list[CaseResult] = []
    compiled = compile_ahead(chosen_cases(options), options.compile_first, COMPILING_SECONDS)
    with threads_of(options.threads) as threads:
        limits = Limits(
            options.seconds_per_case or SECONDS_PER_CASE[kind], options.max_seconds or MAX_SECONDS[kind], threads
        )
        with contextlib.suppress(KeyboardInterrupt):
            for result in run(chosen_cases(options), implementations(device), limits, announce):
                found.append(result)  # noqa: PERF402 - kept one by one for the sake of an interrupt
    if not found:
        raise KeyboardInterrupt
    return Results(
        machine=machine.machine(),
        versions=machine.versions(),
        commit=options.commit or measuring.commit(),
        date=dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        options={
            "device": device,
            "quick": options.quick,
            "only": list(options.only),
            **dataclasses.asdict(limits),
            "not_compiled_first": [one._asdict() for one in compiled if one.complaint],
        },
        cases=tuple(found),
    )
