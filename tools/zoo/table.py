"""Writes what walks have found: tables into a page, between two marks, and a CSV file with every model type.

python -m zoo.table 5.17.0.json 5.22.2.json --page docs/transformers.md --models docs/transformers-models.csv
"""

from __future__ import annotations

import argparse
import collections
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["main", "models", "render"]

BEGIN, END = "<!-- The zoo writes from here -->", "<!-- to here. -->"
LONGEST = 260

OUTCOMES = {
    "right": "right",
    "untouched": "right, and tilewise is never called",
    "partly": "right or refused, by case",
    "refused": "refused",
    "not built": "not built offline",
    "wrong": "differs from eager attention",
    "unclear": "fails without a reason",
}
# Why nothing was built, by what an error says.
WHY_NOT = {
    "couldn't connect": "needs files from the hub",
    "timm": "needs the package timm",
    "million parameters": "too large",
    "^no input found": "no inputs known",
    "^(its configuration|the model|eager attention):": "no small configuration known",
}

# The outcome of a type is the worst of its classes and names.
WORST = ("wrong", "unclear", "partly", "refused", "right", "untouched", "not built")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="zoo.table", description="the tables of docs/transformers.md")
    parser.add_argument("found", type=Path, nargs="+", help="files that walks have written")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="the CSV file with the outcome of every model type")
    options = parser.parse_args(arguments)
    walks = [json.loads(path.read_text()) for path in options.found]
    page = options.page.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    options.page.write_text(f"{before}{BEGIN}\n{render(walks)}{END}{after}")
    options.models.write_text(models(walks))
    return 0


def render(walks: list[dict[str, Any]]) -> str:
    """The tables of the page: how many types have each outcome, and the reasons of refusals and failures."""
    releases = [walk["transformers"] for walk in walks]
    found = _outcomes(walks)
    lines = ["", f"| model types | {' | '.join(releases)} |", f"|---|{'---:|' * len(releases)}"]
    for outcome, title in OUTCOMES.items():
        counts = [sum(said.get(release) == outcome for said in found.values()) for release in releases]
        if any(counts) or outcome in ("wrong", "unclear"):
            lines.append(f"| {title} | {' | '.join(map(str, counts))} |")
    lines.append("")
    for title, kinds in (
        ("Refused", ("refused", "partly")),
        ("Differs from eager attention by more than that", ("wrong", "unclear")),
    ):
        rows = _reasons(walks, kinds)
        if rows:
            lines += [f"### {title}", "| models | name | release | reason |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"


def models(walks: list[dict[str, Any]]) -> str:
    """A CSV table: each model type, its outcome in each release, and why it was not built."""
    releases = [walk["transformers"] for walk in walks]
    reasons = {
        (walk["transformers"], entry["type"]): _short(entry["reason"])
        for walk in walks
        for entry in walk["results"]
        if entry["outcome"] == "not built"
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["type", *releases])
    for model_type, said in sorted(_outcomes(walks).items()):
        cells = []
        for release in releases:
            outcome = OUTCOMES.get(said.get(release, ""), "not in this release")
            reason = reasons.get((release, model_type)) if said.get(release) == "not built" else None
            cells.append(f"{outcome}: {reason}" if reason else outcome)
        writer.writerow([model_type, *cells])
    return text.getvalue()


def _outcomes(walks: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The outcome of each model type, by release."""
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for walk in walks:
        by_type: dict[str, list[str]] = collections.defaultdict(list)
        for entry in walk["results"]:
            by_type[entry["type"]].append(entry["outcome"])
        for model_type, outcomes in by_type.items():
            found[model_type][walk["transformers"]] = _of_type(outcomes)
    return found


def _of_type(outcomes: list[str]) -> str:
    """Of several classes and names: refused only if nothing of it runs."""
    if {"refused", "right"} <= set(outcomes) or {"refused", "untouched"} <= set(outcomes):
        outcomes = [*outcomes, "partly"]
    return min(outcomes, key=WORST.index)


def _reasons(walks: list[dict[str, Any]], outcomes: tuple[str, ...]) -> list[str]:
    """A row for each reason: which models give it, under which names, in which releases."""
    rows: dict[tuple[str, str, str], set[str]] = collections.defaultdict(set)
    by_model: dict[tuple[str, str], dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for walk in walks:
        for entry in walk["results"]:
            if entry["outcome"] in outcomes:
                reason = _sentence(entry)
                by_model[entry["type"], reason][walk["transformers"]].add(entry["name"])
    for (model_type, reason), by_release in by_model.items():
        names = sorted({name for names in by_release.values() for name in names})
        rows[", ".join(f"`{name}`" for name in names), ", ".join(sorted(by_release)), reason].add(model_type)
    ordered = sorted(rows.items(), key=lambda row: (sorted(row[1]), row[0]))
    return [f"| {', '.join(sorted(types))} | {names} | {where} | {why} |" for (names, where, why), types in ordered]


def _sentence(entry: dict[str, Any]) -> str:
    """The reason in its own words, without the names of classes, so that equal reasons are equal."""
    text = re.sub(r"^(\w+): (refused|wrong|unclear): (\w+: )?", r"\1: ", entry["reason"])
    text = text.removeprefix("build: ").replace(entry["class"] or "\0", "the model")
    text = re.sub(r"\d\.\de[-+]\d\d", "…", text)
    return _cell(text)


def _short(reason: str) -> str:
    package = re.search(r"requires the (\w+) library", reason)
    return (
        f"needs the package {package[1]}"
        if package
        else next((short for pattern, short in WHY_NOT.items() if re.search(pattern, reason)), reason)
    )


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    raise SystemExit(main())
