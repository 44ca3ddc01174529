"""What contestants of the benchmark compile for every shape can be compiled first, in other processes."""

from __future__ import annotations

import dataclasses
import os

from suite.cases import Case
from suite.compile_ahead import compile_ahead
from suite.cpu_cases import cpu_cases

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
