"""Plots of the benchmark: one point a length, labels that can be read, and what happens where they cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from suite import plots, results
from suite.__main__ import main
from suite.cases import Case
from suite.results import CaseResult, Measured, Results


def measured(seqlen: int, seconds: float, graph: bool = False) -> CaseResult:
    """One head of 16 columns and so many tokens, taken by tilewise in so many seconds."""
    case = Case(
        "test", "test", "forward", "cpu", "float32", 1, 1, 1, seqlen, seqlen, 16, graph=graph,
        implementations=("tilewise",),
    )  # fmt: skip
    return CaseResult(case, None, (Measured("tilewise", "ok", value=seconds, rate=case.rate(seconds)),))


def run(*cases: CaseResult) -> Results:
    return Results(
        {"cpu": "Chip", "cores": 2},
        {"torch": "2"},
        "0123456",
        "2030-01-02T03:04:05Z",
        {"device": "cpu", "threads": 2},
        cases,
    )


def test_plots_have_one_point_a_length_and_labels_that_do_not_touch(tmp_path: Path) -> None:
    cases = [measured(1024, 1e-3), measured(2304, 2e-3), measured(4096, 3e-3), measured(4096, 9e-3)]
    (panel,) = plots._panels(cases)
    assert plots._points(panel, "tilewise") == {r.case.seqlen_k: r.measured[0].rate for r in cases[:3]}
    (drawn,) = plots.write_plots(run(*cases), tmp_path)
    assert ">1024<" in drawn.read_text()
    assert ">2304<" not in drawn.read_text()
    assert plots._labelled([128, 256, 512, 1024, 16384]) == [128, 256, 512, 1024, 16384]
    assert plots._labelled([16, 64, 128, 512, 1024, 2048, 4096]) == [16, 128, 1024, 4096]


def test_a_run_without_matplotlib_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(measured(64, 1e-3), measured(128, 1e-3))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("suite.__main__.execute", lambda *_: made)
    kept = tmp_path / "run.json"
    assert main(["--device", "cpu", "--output", str(kept), "--plots", str(tmp_path)]) == 0
    assert f"--results {kept} --plots {tmp_path}" in capsys.readouterr().err
    assert results.read(kept) == made
    assert main(["--results", str(kept), "--plots", str(tmp_path)]) == 2
