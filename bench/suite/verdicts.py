"""Did it clear the bar: every bar of every case, and the means over whole groups, judged from the measured medians."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from suite.cases import Bar
from suite.results import CaseResult, Results
from tilewise.units import format_bytes, format_count, format_seconds

__all__ = ["Verdict", "judge_all", "judge_case"]

# Mean ratio over the peers' table that the Hopper backend promises: case pattern, limit.
HOPPER, MEANS = "tilewise-hopper", (("forward-d*-n*", 1.05), ("backward-d*-n*", 1.01))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar judged: `passed` is None where something it needs was not measured; `text` says all of it in one line."""

    case: str
    subject: str
    value: float | None
    limit: float
    passed: bool | None
    text: str


def judge_all(results: Results) -> list[Verdict]:
    """Every verdict of a run, and the means where they can be formed."""
    verdicts = [v for result in results.cases for v in judge_case(result, results.cases, results.device_name)]
    return verdicts + [mean for pattern, limit in MEANS if (mean := _mean(verdicts, pattern, limit)) is not None]


def judge_case(result: CaseResult, others: Sequence[CaseResult], device_name: str) -> list[Verdict]:
    """The verdicts on one case's bars; bars for another chip are left out."""
    return [_judge(bar, result, others) for bar in result.case.bars if bar.machine in device_name]


def _judge(bar: Bar, result: CaseResult, others: Sequence[CaseResult]) -> Verdict:
    name = result.case.name
    mine = result.valid(bar.subject)
    if mine is None or mine.value is None:
        return Verdict(name, bar.subject, None, bar.limit, None, f"{bar.subject}: not measured")
    if bar.against:
        value, yardstick = _against(bar, result, mine.value)
    elif bar.case is not None:
        value, yardstick = _across(bar, result, others), f"itself in {bar.case}"
    else:
        return _absolute(bar, name, mine.rate if bar.by == "rate" else mine.value)
    if value is None:
        return Verdict(name, bar.subject, None, bar.limit, None, f"{bar.subject}: {yardstick} not measured")
    passed = value >= bar.limit
    sign = ">=" if passed else "<"
    text = f"{_word(passed)} {bar.subject} {value:.2f}x of {yardstick} ({sign} {bar.limit:.4g})"
    return Verdict(name, bar.subject, value, bar.limit, passed, text)


def _against(bar: Bar, result: CaseResult, mine: float) -> tuple[float | None, str]:
    """Ratio to the best peer measured, and its name."""
    found = {name: m.value for name in bar.against if (m := result.valid(name)) is not None and m.value is not None}
    if not found:
        return None, " or ".join(bar.against)
    best = min(found, key=lambda name: found[name])
    # A call may need no measurable memory at all; a page is then the unit.
    floor = 4096.0 if result.case.metric == "memory" else 0.0
    return found[best] / max(mine, floor), best


def _across(bar: Bar, result: CaseResult, others: Sequence[CaseResult]) -> float | None:
    other = next((r for r in others if r.case.name == bar.case), None)
    mine, theirs = result.valid(bar.subject), None if other is None else other.valid(bar.subject)
    if mine is None or theirs is None:
        return None
    if bar.by == "rate":
        return mine.rate / theirs.rate if mine.rate and theirs.rate else None
    return theirs.value / mine.value if mine.value and theirs.value else None


def _absolute(bar: Bar, name: str, value: float | None) -> Verdict:
    if value is None:
        return Verdict(name, bar.subject, None, bar.limit, None, f"{bar.subject}: no rate")
    passed = value >= bar.limit if bar.by == "rate" else value <= bar.limit
    show = {"rate": lambda x: format_count(x) + "/s", "bytes": format_bytes, "seconds": format_seconds}[bar.by]
    sign = (">=" if passed else "<") if bar.by == "rate" else ("<=" if passed else ">")
    text = f"{_word(passed)} {bar.subject} {show(value)} ({sign} {show(bar.limit)})"
    return Verdict(name, bar.subject, value, bar.limit, passed, text)


def _mean(verdicts: Sequence[Verdict], pattern: str, limit: float) -> Verdict | None:
    ratios = [
        v.value
        for v in verdicts
        if v.subject == HOPPER
        and v.value is not None
        and fnmatch.fnmatchcase(v.case, pattern)
        and "itself" not in v.text
    ]
    if not ratios:
        return None
    mean = sum(ratios) / len(ratios)
    passed = mean >= limit
    sign = ">=" if passed else "<"
    text = f"{_word(passed)} {HOPPER} {mean:.3f}x of the best peer, mean of {len(ratios)} ({sign} {limit})"
    return Verdict(pattern, HOPPER, mean, limit, passed, text)


def _word(passed: bool) -> str:
    return "pass" if passed else "MISS"
