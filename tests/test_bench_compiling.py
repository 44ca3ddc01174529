"""What contestants of the benchmark compile for every shape can be compiled first, in other processes."""

from __future__ import annotations

import dataclasses

import pytest

from tilewise.bench import command
from tilewise.bench.__main__ import main
from tilewise.bench.compile_ahead import compile_ahead
from tilewise.bench.cpu_cases import cpu_cases
from tilewise.bench.results import CaseResult

PLAIN = dataclasses.replace(cpu_cases("x86_64")[0], batch=1, seqlen_q=70, seqlen_k=70, implementations=("sdpa",))
COMPILED = dataclasses.replace(PLAIN, name="other", measure="backward", implementations=("sdpa", "flex"))


def test_what_compiles_is_run_in_other_processes() -> None:
    """And says what went wrong: there is no such backward on a CPU, which it finds out before it compiles."""
    cases = (PLAIN, COMPILED)
    assert compile_ahead(cases, 0, 60.0) == compile_ahead(cases[:1], 2, 60.0) == compile_ahead((), 2, 60.0) == []
    (found,) = compile_ahead(cases, 2, 60.0)
    assert found[:2] == ("other", "flex")
    assert found.complaint == "NotApplicable: FlexAttention has no backward on the CPU"
    assert 0.0 < found.seconds < 60.0


def test_what_is_not_done_in_time_is_left() -> None:
    assert compile_ahead((COMPILED,), 1, 0.0) == []


def test_the_bench_compiles_first_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(command, "compile_ahead", lambda cases, workers, _: asked.append((len(cases), workers)))
    monkeypatch.setattr(command, "run", lambda cases, *_: (CaseResult(case, None, ()) for case in cases))
    assert main(["--device", "cpu", "--only", "overhead", "--compile-first", "3", "--output", "/dev/null"]) == 0
    assert asked == [(len(command.chosen_cases(command.Options("cpu", ("overhead",)))), 3)]
