"""`tilewise bench`: what it prints and writes, that a wrong result has no time, and that it times fairly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from making import invoke
from tilewise.bench import quick
from tilewise.bench.timing import Clock, Entrant, race, summarise


@pytest.mark.parametrize("case", quick.cases("cpu"), ids=lambda case: case.name)
def test_every_case_is_measured_and_right(case: quick.Case) -> None:
    """Shorter than they are run."""
    lengths = (130, 7, 64) if case.seqlens else ()
    rows = sum(lengths) or 130
    small = dataclasses.replace(case, seqlen_q=min(case.seqlen_q, rows), seqlen_k=rows, seqlens=lengths)
    found = {m.implementation: m for m in quick.run(small, 0.01)}
    assert set(found) >= {"tilewise", "torch"}
    for m in found.values():
        assert m.fault is None
        assert m.seconds is not None
        assert m.rate == pytest.approx(small.work[0] / m.seconds)
        assert m.error is not None
        assert m.error < 1e-2


def test_json_says_where_and_with_what() -> None:
    before = torch.get_num_threads()
    done = invoke(
        "bench", "--device", "cpu", "--only", "decode", "--seconds-per-case", "0.01", "--threads", "1", "--json"
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["threads"] == 1
    assert torch.get_num_threads() == before
    assert document["machine"]["cores"] > 0
    assert {"tilewise", "python", "torch"} <= set(document["versions"])
    (case,) = document["cases"]
    assert (case["name"], case["dtype"], case["unit"]) == ("decode", "float32", "B/s")
    for m in case["measured"]:
        assert m["low"] <= m["seconds"] <= m["high"]


def test_the_table_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = invoke(
        "bench", "--device", "cpu", "--only", "decode", "--quick", "--seconds-per-case", "0.01", "--output", str(path)
    )
    assert done.exit_code == 0, done.output
    assert "against torch" in done.stdout
    assert "B/s" in done.stdout
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == ["decode"]


@pytest.mark.parametrize("name", ["forward-causal", "backward", "packed-causal"])
def test_what_is_wrong_or_fails_has_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(case: quick.Case, q: Tensor, k: Tensor, v: Tensor) -> quick.Call:
        right = quick.IMPLEMENTATIONS["tilewise"](case, q, k, v)
        assert right is not None
        return lambda: right() * 1.01

    def raises(*_: Any) -> quick.Call:
        raise RuntimeError("broken\nwith a long tail")

    (case,) = quick.select(quick.cases("cpu"), [name])[:1]
    entrants = {"tilewise": quick.IMPLEMENTATIONS["tilewise"], "off": off, "raises": raises}
    monkeypatch.setattr(quick, "IMPLEMENTATIONS", entrants)
    found = {m.implementation: m for m in quick.run(case, 0.01)}
    assert found["tilewise"].seconds is not None
    assert found["off"].seconds is found["raises"].seconds is None
    assert "deviates from fp64 by" in str(found["off"].fault)
    assert found["raises"].fault == "RuntimeError: broken"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing-like-this"], "error: --only: expected a part of a case's name: forward, forward-causal"),
        (["--device", "tpu"], "error: --device: expected auto, cpu or cuda"),
        (["--output", "/"], "error: output: expected a file that can be written"),
    ],
)
def test_what_makes_no_sense_is_refused_before_measuring(arguments: list[str], said: str) -> None:
    done = invoke("bench", "--device", "cpu", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


# --- rounds, turns, and who drops out


class FakeClock(Clock):
    """A batch returns the seconds it would take."""

    sample_seconds = 1.0

    def __call__(self, batch: Callable[[], object], lead_in: Callable[[], object]) -> float:  # noqa: ARG002
        seconds = batch()
        assert isinstance(seconds, float)
        return seconds


def noting(order: list[str], name: str, seconds: float) -> Entrant:
    """An entrant that takes so long and writes down when it is called."""

    def repeat(calls: int) -> Callable[[], float]:
        def batch() -> float:
            order.append(name)
            return seconds * calls

        return batch

    return Entrant(name, repeat)


def test_rounds_are_interleaved_and_slow_entrants_sampled_less() -> None:
    order: list[str] = []
    fast, other, slow = (noting(order, *who) for who in (("fast", 0.25), ("other", 0.5), ("slow", 30.0)))
    race([fast, other, slow], FakeClock(), seconds=60.0)
    assert (fast.calls, other.calls, slow.calls) == (4, 2, 1)
    assert len(fast.samples) == len(other.samples) == 5
    assert len(slow.samples) == 2
    assert summarise(fast).median == 0.25
    timed = order[order.index("slow") + 2 :]
    # The same ones meet in another order; the slow one sits out every round but the first and the fourth.
    rounds = [["fast", "other", "slow"], ["fast", "other"], ["other", "fast"], ["other", "slow", "fast"]]
    assert timed == [name for names in rounds for name in names] + ["fast", "other"]


def test_an_entrant_that_fails_drops_out() -> None:
    def broken(calls: int) -> Callable[[], float]:
        if calls > 1:
            raise ValueError("no batches")
        return lambda: 0.1

    bad, good = Entrant("bad", broken), Entrant("good", lambda calls: lambda: 0.1 * calls)
    race([bad, good], FakeClock(), seconds=100.0)
    assert bad.failure == "ValueError: no batches"
    assert good.failure is None
    assert len(good.samples) >= 5
