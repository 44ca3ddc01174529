"""`pytest --outcomes FILE`: a suite that takes longer than a machine is there is run in parts.

The file gets a line for every test that ended, as it ends. A later run with the same file leaves out what passed or was
skipped, so a run that was cut off goes on, and failures run again. Its first line says what was tested: the source and
the releases. For anything else the file is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent.parent
DONE = ("passed", "skipped")
PACKAGES = ("torch", "triton")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where outcomes are written and read."""
    parser.addoption("--outcomes", type=Path, help="write outcomes there; leave out what passed there before")


def pytest_configure(config: pytest.Config) -> None:
    """Read the file of an earlier run. A worker of pytest-xdist is told what the process that started it has read."""
    path: Path | None = config.getoption("outcomes")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut(config.workerinput.get("done", [])))
    elif path is not None:
        written = Outcomes(path, tested())
        config.pluginmanager.register(written)
        config.pluginmanager.register(LeftOut(written.done))


def tested() -> dict[str, str]:
    """A digest of source and tests, and the releases."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            digest.update(str(path.relative_to(SOURCE)).encode() + path.read_bytes())
    return {"source": digest.hexdigest()[:16], **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class LeftOut:
    """Tests that are not run."""

    def __init__(self, done: Collection[str]) -> None:
        self._done = frozenset(done)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take them out."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._done])
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_report_header(self) -> str:
        """How many there are."""
        return f"outcomes: {len(self._done)} tests are done"


class Outcomes:
    """Reads outcomes, and writes new ones."""

    def __init__(self, path: Path, what: dict[str, str]) -> None:
        self._worst: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if known and known[0] != what:
            raise pytest.UsageError(f"{path} is about {known[0]}, not {what}: name another file")
        last = {line["test"]: line["outcome"] for line in known[1:]}
        self.done = [test for test, outcome in last.items() if outcome in DONE]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        if not known:
            self._write(what)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Of pytest-xdist: a worker that replaces one that crashed leaves out the same."""
        node.workerinput["done"] = self.done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test ends with its teardown; the first part that did not pass is its outcome."""
        test = report.nodeid
        if self._worst.get(test, "passed") == "passed":
            self._worst[test] = report.outcome
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.when == "teardown":
            self._write({"test": test, "outcome": self._worst.pop(test), "seconds": round(self._seconds.pop(test), 2)})

    def pytest_unconfigure(self) -> None:
        """Nothing more is written."""
        self._file.close()
