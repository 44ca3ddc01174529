"""`tilewise bench`: tilewise and its peers on the same problems, checked and timed in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise.bench.command import Options, chosen_cases, execute
from tilewise.bench.plots import write_plots
from tilewise.bench.report import Table as TextTable
from tilewise.bench.report import headline, notes, summary, tables
from tilewise.bench.results import Results, default_path, document, ensure_writable, read, write
from tilewise.bench.verdicts import judge_all
from tilewise.cli.console import JsonOption, print_json, progress

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "tilewise bench --device cpu --only forward --quick"


def command(
    *,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Part of a case's name, a pattern, or a group.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The short list, less time for each.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads on the CPU.")] = None,
    seconds_per_case: Annotated[float | None, typer.Option(min=0.01, help="Timing, without compilation.")] = None,
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Cases not begun by then are skipped.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded where git does not know it.")] = None,
    compile_first: Annotated[int, typer.Option(min=0, help="Processes that compile FlexAttention before.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Default: bench/results/<device>-<date>.json.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVG plots into this folder (needs matplotlib).")] = None,
    results: Annotated[Path | None, typer.Option(help="Report a stored run instead of running.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Name the cases and end.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure tilewise against its peers in one process, check every result, and say which bars are cleared."""
    options = Options(device, tuple(only or ()), quick, threads, seconds_per_case, max_seconds, commit, compile_first)
    if list_cases:
        names = [case.name for case in chosen_cases(options)]
        print_json(names) if json else typer.echo("\n".join(names))
        return
    if results is not None:
        found = read(results)
    else:
        if output is not None:
            ensure_writable(output)
        with progress(len(chosen_cases(options))) as step:
            found = execute(options, step)
        path = output or default_path(found)
        write(found, path, judge_all(found))
        typer.echo(f"written: {path}", err=True)
    if json:
        print_json(document(found, judge_all(found)))
    else:
        _show(found)
    if plots is not None:
        for drawn in write_plots(found, plots):
            typer.echo(f"written: {drawn}", err=True)


def _show(results: Results) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(headline(results))}[/]\n")
    for table in tables(results):
        console.print(_rich(table))
    for note in notes(results):
        console.print(f"[dim]{escape(note)}[/]")
    first, *missed = summary(results)
    console.print(f"\n[bold]{first}[/]")
    for line in missed:
        console.print(_coloured(line))


def _rich(table: TextTable) -> Table:
    shown = Table(title=table.title, title_style="bold", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(table.columns):
        is_text = index in (0, len(table.columns) - 1)
        shown.add_column(column, justify="left" if is_text else "right", style="cyan" if index == 0 else None)
    for row in table.rows:
        shown.add_row(*(_coloured(cell) for cell in row))
    return shown


def _coloured(cell: str) -> str:
    """Verdicts and failures stand out."""
    text = escape(cell)
    for word, colour in (("pass", "green"), ("MISS", "red"), ("wrong", "red"), ("failed", "red")):
        text = text.replace(word, f"[{colour}]{word}[/]")
    return text
