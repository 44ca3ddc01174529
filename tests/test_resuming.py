"""A suite that is run in parts (tests/backends/resuming.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parent / "backends"
TESTS = """
import pathlib
import pytest

def test_good():
    pass

def test_mended():
    assert pathlib.Path("mended").exists()

@pytest.fixture
def left():
    yield
    assert pathlib.Path("mended").exists()

def test_torn_down(left):
    pass

def test_skipped():
    pytest.skip("not here")
"""


def run(folder: Path, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "resuming",
        "-p",
        "no:cacheprovider",
        "--outcomes",
        "o.jsonl",
    ]
    ended = subprocess.run(
        [*command, *arguments], cwd=folder, env={"PYTHONPATH": str(PLUGINS)}, capture_output=True, text=True
    )
    return ended.stdout + ended.stderr


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_parts.py").write_text(TESTS)
    return tmp_path


def outcomes(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "o.jsonl").read_text().splitlines()]
    assert set(lines[0]) == {"source", "torch", "triton"}
    return [(line["test"].partition("::test_")[2], line["outcome"]) for line in lines[1:]]


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_what_failed_runs_again_and_nothing_else(suite: Path, processes: list[str]) -> None:
    assert "1 failed, 2 passed, 1 skipped, 1 error" in run(suite, *processes)
    first = dict(outcomes(suite))
    assert first == {"good": "passed", "mended": "failed", "torn_down": "failed", "skipped": "skipped"}
    (suite / "mended").touch()
    assert "2 passed" in run(suite, *processes)
    assert sorted(outcomes(suite)[4:]) == [("mended", "passed"), ("torn_down", "passed")]
    assert "4 deselected" in run(suite)


def test_outcomes_of_other_source_are_refused(suite: Path) -> None:
    run(suite)
    path = suite / "o.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "source": "another"}) + "\n" + rest)
    assert "name another file" in run(suite)
