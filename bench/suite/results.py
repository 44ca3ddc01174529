"""What was measured, the verdict on each bar, and both as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from suite.cases import Bar, Case
from tilewise import outputs
from tilewise.bench.timing import Summary
from tilewise.errors import InvalidProblem

__all__ = ["CaseResult", "Measured", "Results", "default_path", "document", "ensure_writable", "read", "write"]

FORMAT = 1
# The folder of results for which no path is given.
RESULTS = Path("bench", "results")
Status = Literal["ok", "wrong", "failed", "skipped", "missing"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One implementation in one case. `value` is seconds a call, or bytes in a memory case; None unless it is "ok"."""

    implementation: str
    status: Status
    detail: str = ""
    error: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    calls: int = 0
    rate: float | None = None

    @classmethod
    def of(cls, case: Case, name: str, summary: Summary, *, error: float | None = None, detail: str = "") -> Measured:
        """A valid measurement."""
        return cls(
            name, "ok", detail, error, summary.median, summary.low, summary.high, summary.samples, summary.calls,
            case.rate(summary.median) if case.metric in ("flops", "bytes") else None,
        )  # fmt: skip

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        if not self.value or self.low is None or self.high is None:
            return 0.0
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case and how everybody did; `auto` is the backend that tilewise chooses by itself there."""

    case: Case
    auto: str | None
    measured: tuple[Measured, ...]

    def valid(self, name: str) -> Measured | None:
        """The measurement of an implementation; "tilewise" is what a plain call runs."""
        names = (name, f"tilewise-{self.auto}") if name == "tilewise" else (name,)
        return next((m for m in self.measured if m.implementation in names and m.status == "ok"), None)


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run."""

    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: str | None
    date: str
    options: dict[str, Any]
    cases: tuple[CaseResult, ...]

    @property
    def device_name(self) -> str:
        """The processor or GPU that was measured."""
        return str(self.machine["gpu" if self.options["device"] == "cuda" else "cpu"])

    @property
    def slug(self) -> str:
        """The device's name for a file: nvidia-h200, or a processor with its threads."""
        words = re.sub(r"\((r|tm)\)", " ", self.device_name.lower())
        slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
        return slug if self.options["device"] == "cuda" else f"{slug}-{self.options['threads']}-threads"


def default_path(results: Results) -> Path:
    """Where results are kept unless another path is given."""
    return RESULTS / f"{results.slug}-{results.date[:10]}.json"


def document(results: Results, verdicts: Sequence[Any] = ()) -> dict[str, Any]:
    """Ready for JSON; `verdicts` are added for readers and computed again when a file is read."""
    return {"format": FORMAT, **dataclasses.asdict(results), "verdicts": [dataclasses.asdict(v) for v in verdicts]}


def write(results: Results, path: Path, verdicts: Sequence[Any] = ()) -> None:
    """The document as a file."""
    text = json.dumps(document(results, verdicts), indent=1, allow_nan=False) + "\n"
    outputs.write(path, text, "output")


def ensure_writable(path: Path) -> None:
    """Known before an hour of measurements, not after it."""
    outputs.ensure_writable(path, "output")


def read(path: Path) -> Results:
    """The results in a file that `write` made."""
    try:
        return _results(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = error.strerror
    except ValueError:
        reason = "not JSON"
    except (AttributeError, KeyError, TypeError):
        reason = "other contents"
    expected = f"a benchmark file of format {FORMAT}"
    raise InvalidProblem("results", expected, f"{path} ({reason})", "Run the benchmark again.")


def _results(fields: dict[str, Any]) -> Results:
    if fields.pop("format") != FORMAT:
        raise KeyError("format")
    fields.pop("verdicts", None)
    cases = tuple(
        CaseResult(_case(entry["case"]), entry["auto"], tuple(Measured(**m) for m in entry["measured"]))
        for entry in fields.pop("cases")
    )
    return Results(**fields, cases=cases)


def _case(fields: dict[str, Any]) -> Case:
    tuples = {name: tuple(fields[name]) for name in ("seqlens", "implementations")}
    window = None if fields["window"] is None else tuple(fields["window"])
    bars = tuple(_bar(bar) for bar in fields["bars"])
    return Case(**{**fields, **tuples, "window": window, "bars": bars})


def _bar(fields: dict[str, Any]) -> Bar:
    fields.pop("stand_in", None)  # older files estimated peers that were not installed
    return Bar(**{**fields, "against": tuple(fields["against"])})
