"""What contestants of the benchmark compile for every shape can be compiled first, in other processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from suite import command
from suite import compile_ahead as ahead
from suite.__main__ import main
from suite.cases import Case
from suite.compile_ahead import compile_ahead
from suite.cpu_cases import cpu_cases
from suite.results import CaseResult

PLAIN = dataclasses.replace(cpu_cases("x86_64")[0], batch=1, seqlen_q=70, seqlen_k=70, implementations=("sdpa",))
COMPILED = dataclasses.replace(PLAIN, name="other", measure="backward", implementations=("sdpa", "flex"))


def test_what_compiles_is_run_in_another_process() -> None:
    """One after the other, and says what went wrong: there is no such backward on a CPU, which it finds out before it
    compiles.
    """
    cases = (PLAIN, COMPILED, dataclasses.replace(COMPILED, name="third"))
    assert compile_ahead(cases, 0, 60.0) == compile_ahead(cases[:1], 2, 60.0) == compile_ahead((), 2, 60.0) == []
    found = compile_ahead(cases, 1, 60.0)
    assert [one[:2] for one in found] == [("other", "flex"), ("third", "flex")]
    assert {one.complaint for one in found} == {"NotApplicable: FlexAttention has no backward on the CPU"}
    assert all(0.0 < one.seconds < 60.0 for one in found)


def test_what_is_not_done_in_time_is_left() -> None:
    """And said."""
    other = dataclasses.replace(COMPILED, name="third", measure="forward")
    wanted = [("other", "flex", 0.0, "not done in 0 s"), ("third", "flex", 0.0, "not begun in 0 s")]
    assert compile_ahead((other, COMPILED), 1, 0.0) == wanted


class Fatal(Case):
    """Ends the process that is given it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (7,)


def test_a_process_that_ends_is_said() -> None:
    """With how it ended, which says whether memory ran out."""
    fatal = Fatal(**{field.name: getattr(COMPILED, field.name) for field in dataclasses.fields(Case)})
    ended = ("other", "flex", 0.0, "its process ended with exit code 7")
    after = dataclasses.replace(COMPILED, name="after")
    assert compile_ahead((fatal, after), 1, 60.0) == [ended, ("after", "flex", 0.0, "every process had ended")]


def test_the_report_says_what_was_not_compiled_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = [ahead.Compiled("a", "flex", 3.0), ahead.Compiled("b", "flex", 1.0, "RuntimeError: no compiler")]
    monkeypatch.setattr(command, "compile_ahead", lambda *_: found)
    monkeypatch.setattr(command, "run", lambda cases, *_: (CaseResult(case, None, ()) for case in cases))
    path = tmp_path / "run.json"
    for arguments in (["--device", "cpu", "--only", "overhead", "--output"], ["--results"]):
        assert main([*arguments, str(path)]) == 0
        said = capsys.readouterr().out
        assert "flex not compiled first: RuntimeError: no compiler (" in said
        assert said.count("not compiled first") == 1


def test_the_bench_compiles_first_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ask(cases: Sequence[Case], workers: int, _: float) -> list[ahead.Compiled]:
        asked.append((len(cases), workers))
        return []

    monkeypatch.setattr(command, "compile_ahead", ask)
    monkeypatch.setattr(command, "run", lambda cases, *_: (CaseResult(case, None, ()) for case in cases))
    assert main(["--device", "cpu", "--only", "overhead", "--compile-first", "3", "--output", "/dev/null"]) == 0
    assert asked == [(len(command.chosen_cases(command.Options("cpu", ("overhead",)))), 3)]
