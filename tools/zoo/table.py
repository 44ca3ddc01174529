"""Writes what walks have found into a page, between two marks.

python -m zoo.table 5.17.0.json 5.22.2.json --page docs/transformers.md
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["main", "render"]

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
    parser = argparse.ArgumentParser(prog="zoo.table", description="the table of docs/transformers.md")
    parser.add_argument("found", type=Path, nargs="+", help="files that walks have written")
    parser.add_argument("--page", type=Path, required=True)
    options = parser.parse_args(arguments)
    walks = [json.loads(path.read_text()) for path in options.found]
    page = options.page.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    options.page.write_text(f"{before}{BEGIN}\n{render(walks)}{END}{after}")
    return 0


def render(walks: list[dict[str, Any]]) -> str:
    """The tables, for these walks."""
    releases = [walk["transformers"] for walk in walks]
    types: dict[str, dict[str, str]] = {outcome: {} for outcome in OUTCOMES}
    counts = {outcome: [0] * len(walks) for outcome in OUTCOMES}
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for index, walk in enumerate(walks):
        by_type: dict[str, list[str]] = collections.defaultdict(list)
        for entry in walk["results"]:
            by_type[entry["type"]].append(entry["outcome"])
        for model_type, outcomes in by_type.items():
            outcome = _of_type(outcomes)
            counts[outcome][index] += 1
            found[model_type][releases[index]] = outcome
    for model_type, by_release in sorted(found.items()):
        for outcome in dict.fromkeys(by_release.values()):
            where = [release for release, said in by_release.items() if said == outcome]
            types[outcome][model_type] = "" if len(where) == len(releases) else f" ({', '.join(where)})"
    lines = ["", f"| model types | {' | '.join(releases)} |", f"|---|{'---:|' * len(releases)}"]
    for outcome, title in OUTCOMES.items():
        if any(counts[outcome]) or outcome in ("wrong", "unclear"):
            lines.append(f"| {title} | {' | '.join(map(str, counts[outcome]))} |")
    lines += ["", *_list("Right", types["right"]), *_list("Right, and tilewise is never called", types["untouched"])]
    for title, kinds in (
        ("Refused", ("refused", "partly")),
        ("Differs from eager attention by more than that", ("wrong", "unclear")),
    ):
        rows = _reasons(walks, kinds)
        if rows:
            lines += [f"### {title}", "| models | name | release | reason |", "|---|---|---|---|", *rows, ""]
    rows = _not_built(walks)
    if rows:
        lines += ["### Not built offline", "| reason | types |", "|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"


def _of_type(outcomes: list[str]) -> str:
    """Of several classes and names: refused only if nothing of it runs."""
    if {"refused", "right"} <= set(outcomes) or {"refused", "untouched"} <= set(outcomes):
        outcomes = [*outcomes, "partly"]
    return min(outcomes, key=WORST.index)


def _list(title: str, types: dict[str, str]) -> list[str]:
    if not types:
        return []
    return [f"### {title}", ", ".join(f"{name}{where}" for name, where in types.items()) + ".", ""]


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


def _not_built(walks: list[dict[str, Any]]) -> list[str]:
    rows: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for walk in walks:
        for entry in walk["results"]:
            if entry["outcome"] == "not built":
                rows[_cell(_short(entry["reason"]))][entry["type"]].append(walk["transformers"])
    found = []
    for reason, types in sorted(rows.items(), key=lambda row: (-len(row[1]), row[0])):
        named = [f"{t}{'' if len(set(r)) == len(walks) else f' ({r[0]})'}" for t, r in sorted(types.items())]
        found.append(f"| {reason} | {', '.join(named)} |")
    return found


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
