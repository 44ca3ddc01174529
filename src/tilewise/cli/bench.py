"""`tilewise bench`: a few everyday calls next to torch's own attention, checked and timed in turn."""

from __future__ import annotations

import dataclasses
import json as text
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise import outputs
from tilewise.bench import machine
from tilewise.bench.quick import Case, Measured, cases, device_of, run, select, threads_of
from tilewise.cli.console import JsonOption, print_json, progress
from tilewise.units import counted, format_count, format_seconds

EXAMPLE = "tilewise bench --device cpu --only forward --quick"

# Seconds of timing per case, without checks and compilation.
SECONDS, QUICK_SECONDS = 2.0, 0.4


def command(
    *,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Part of a case's name, or a pattern.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for each case.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads on the CPU.")] = None,
    seconds_per_case: Annotated[float | None, typer.Option(min=0.01, help="Timing, without compilation.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON to this file, too.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Name the cases and end.")] = False,
    json: JsonOption = False,
) -> None:
    """Time tilewise against torch's attention on this machine. Every result is checked against fp64 first."""
    chosen = select(cases(device_of(device)), only or ())
    if list_cases:
        names = [case.name for case in chosen]
        print_json(names) if json else typer.echo("\n".join(names))
        return
    if output is not None:
        outputs.ensure_writable(output, "output")
    seconds = seconds_per_case or (QUICK_SECONDS if quick else SECONDS)
    found: list[tuple[Case, list[Measured]]] = []
    with threads_of(threads) as used, progress(len(chosen)) as step:
        for case in chosen:
            step(case.name)
            found.append((case, run(case, seconds)))
    document = _document(found, used)
    if output is not None:
        outputs.write(output, text.dumps(document, indent=1, allow_nan=False) + "\n", "output")
    print_json(document) if json else _show(document, found)


def _document(found: list[tuple[Case, list[Measured]]], threads: int) -> dict[str, Any]:
    cases_of = [
        dataclasses.asdict(case)
        | {"dtype": str(case.dtype).removeprefix("torch."), "unit": case.work[1]}
        | {"measured": [dataclasses.asdict(m) for m in measured]}
        for case, measured in found
    ]
    return {"machine": machine.machine(), "versions": machine.versions(), "threads": threads, "cases": cases_of}


def _show(document: dict[str, Any], found: list[tuple[Case, list[Measured]]]) -> None:
    console = Console(highlight=False)
    on_gpu = found[0][0].device == "cuda"
    where = (
        document["machine"]["gpu"]
        if on_gpu
        else f"{document['machine']['cpu']}, {counted(document['threads'], 'thread')}"
    )
    console.print(f"[bold]{escape(where)}, torch {document['versions']['torch']}[/]\n")
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("case", style="cyan")
    for name in ("tilewise", "torch", "naive", "tilewise's rate", "against torch"):
        table.add_column(name, justify="right")
    for case, measured in found:
        by_name = {m.implementation: m for m in measured}
        ours, theirs = by_name["tilewise"], by_name["torch"]
        cells = [_cell(m) for m in (ours, theirs, by_name.get("naive"))]
        rate = "" if ours.rate is None else format_count(ours.rate, case.work[1])
        ratio = f"{theirs.seconds / ours.seconds:.2f}x" if theirs.seconds and ours.seconds else ""
        table.add_row(case.name, *cells, rate, ratio)
    console.print(table)
    for case, measured in found:
        for m in measured:
            if m.fault is not None:
                console.print(f"[dim]{case.name}, {m.implementation}: {escape(m.fault)}[/]")


def _cell(measured: Measured | None) -> str:
    if measured is None or measured.seconds is None:
        return "" if measured is None else "[red]wrong[/]" if measured.error is not None else "[red]failed[/]"
    return format_seconds(measured.seconds)
