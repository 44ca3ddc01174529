"""`tilewise bench`: what it prints and writes, and that a wrong result has no time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from tilewise.bench import quick
from tilewise.cli import build_app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["bench", "--device", "cpu", *arguments], env={"COLUMNS": "120"})


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
    done = invoke("--only", "decode", "--seconds-per-case", "0.01", "--threads", "1", "--json")
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
    path = tmp_path / "deep" / "run.json"
    done = invoke("--only", "decode", "--quick", "--seconds-per-case", "0.01", "--output", str(path))
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
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
