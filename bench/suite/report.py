"""Results as tables of text, one per group: a row per case, a column per implementation, the ratio, and the bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from suite.cases import Case
from suite.results import CaseResult, Measured, Results
from suite.verdicts import Verdict, judge_all
from tilewise.units import format_bytes, format_seconds

__all__ = ["Table", "headline", "notes", "plain", "summary", "tables"]

# What the columns of rates are in: the divisor and its name.
UNITS = {("cpu", "flops"): (1e9, "GFLOP/s"), ("cuda", "flops"): (1e12, "TFLOP/s")}
GIGABYTES = (1e9, "GB/s")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as plain text; the last column holds the verdicts, which start with "pass", "MISS" or a name."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables(results: Results) -> list[Table]:
    """One table per group and unit, in the order of the registry."""
    verdicts = judge_all(results)
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results.cases:
        groups.setdefault((result.case.group, _unit(result.case)[1]), []).append(result)
    return [_table(f"{group}, {unit}", members, verdicts) for (group, unit), members in groups.items()]


def _unit(case: Case) -> tuple[float, str]:
    if case.metric in ("seconds", "memory"):
        return 1.0, "time" if case.metric == "seconds" else "memory beyond the output"
    return UNITS.get((case.device, case.metric), GIGABYTES)


def _table(title: str, members: Sequence[CaseResult], verdicts: Sequence[Verdict]) -> Table:
    every = dict.fromkeys(m.implementation for result in members for m in result.measured)
    shown = [
        n
        for n in every
        if any(m.implementation == n and m.status in ("ok", "wrong", "failed") for r in members for m in r.measured)
    ]
    rows = []
    for result in members:
        cells = {m.implementation: _cell(result.case, m) for m in result.measured}
        bars = "\n".join(v.text for v in verdicts if v.case == result.case.name)
        rows.append([result.case.name, *(cells.get(name, "") for name in shown), _ratio(result), bars])
    return Table(title, ["case", *shown, "ratio", "bar"], rows)


def _cell(case: Case, measured: Measured) -> str:
    if measured.status != "ok" or measured.value is None:
        return "" if measured.status in ("skipped", "missing") else measured.status
    spread = f" ±{100 * measured.spread:.0f}%"
    if case.metric == "memory":
        return format_bytes(measured.value)
    if measured.rate is None:
        return format_seconds(measured.value) + spread
    return f"{measured.rate / _unit(case)[0]:.4g}{spread}"


def _ratio(result: CaseResult) -> str:
    """The fastest of tilewise over the fastest of the others."""
    valid = [m for m in result.measured if m.status == "ok" and m.value]
    ours = [m for m in valid if m.implementation.startswith("tilewise")]
    others = [m for m in valid if not m.implementation.startswith("tilewise")]
    if not ours or not others:
        return ""
    best, mine = (min(group, key=lambda m: m.value or 0.0) for group in (others, ours))
    return f"{(best.value or 0.0) / (mine.value or 1.0):.2f}x {best.implementation}"


def headline(results: Results) -> str:
    """Where and with what."""
    machine, versions = results.machine, results.versions
    parts = [results.device_name]
    if results.options["device"] == "cpu":
        parts.append(f"{results.options['threads']} threads of {machine['cores']} cores")
    named = ("torch", "triton", "llvmlite", "driver")
    parts += [f"{name} {versions[name]}" for name in named if versions.get(name)]
    return ", ".join([*parts, f"commit {results.commit or 'unknown'}", results.date])


def notes(results: Results) -> list[str]:
    """Who did not take part and why, who failed, who was wrong, and who was not compiled first, so that the run did it
    in its time; the same reason is said once.
    """
    cases: dict[tuple[str, str, str], list[str]] = {}
    for result in results.cases:
        for m in result.measured:
            if m.status != "ok":
                cases.setdefault((m.implementation, m.status, m.detail), []).append(result.case.name)
    for one in results.options.get("not_compiled_first", ()):
        cases.setdefault((one["implementation"], "not compiled first", one["complaint"]), []).append(one["case"])
    return [f"{name} {status}: {detail} ({_where(where, results)})" for (name, status, detail), where in cases.items()]


def _where(names: list[str], results: Results) -> str:
    if len(names) == len(results.cases):
        return "every case"
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} cases: {names[0]} .. {names[-1]}"


def summary(results: Results) -> list[str]:
    """How many bars were cleared, and every one that was not."""
    verdicts = judge_all(results)
    passed = sum(v.passed is True for v in verdicts)
    missed = [v for v in verdicts if v.passed is False]
    unjudged = sum(v.passed is None for v in verdicts)
    lines = [f"bars: {passed} passed, {len(missed)} missed, {unjudged} could not be judged"]
    lines += [f"  {v.text}   [{v.case}]" for v in missed]
    means = [v for v in verdicts if "mean of" in v.text and v.passed]
    return lines + [f"  {v.text}   [{v.case}]" for v in means]


def plain(results: Results) -> str:
    """The whole report without rich."""
    lines = [headline(results), ""]
    for table in tables(results):
        lines += [table.title, *_aligned(table), ""]
    lines += [wrapped for note in notes(results) for wrapped in textwrap.wrap(note, 160, subsequent_indent="    ")]
    return "\n".join([*lines, *summary(results)])


def _aligned(table: Table) -> list[str]:
    rows: list[list[Any]] = [table.columns]
    for row in table.rows:
        first, *more = row[-1].split("\n")
        rows.append([*row[:-1], first])
        rows += [[*[""] * (len(row) - 1), line] for line in more]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
