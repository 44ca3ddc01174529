"""Shared by commands: the --json option, and progress on stderr while results go to stdout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tilewise import figures, outputs
from tilewise.errors import InvalidProblem
from tilewise.units import counted, format_bytes

JSON_KEY = "tilewise.json"


def _remember(context: typer.Context, json_asked: bool) -> bool:
    """Remembers --json in the context, because errors are printed outside the command."""
    context.meta[JSON_KEY] = json_asked
    return json_asked


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", callback=_remember)]

# Called before each step of a long job with a description of it.
Step = Callable[[str], None]


def print_json(value: Any) -> None:
    """The value on stdout, strictly as JSON."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_error(context: Any, error: Exception) -> None:
    """On stderr as text; on stdout as {"error": ...} where the command was given --json."""
    if context.meta.get(JSON_KEY):
        print_json({"error": str(error)})
    else:
        typer.echo(f"error: {error}", err=True)


def cache_line(cache: Mapping[str, Any]) -> str:
    """A backend's compiled kernels on disk: how many, how large, where, and whether more can be kept."""
    if cache.get("refused"):
        return f"{cache['path']} is not used: {cache['refused']}"
    entries = f"{cache['entries']} of {counted(cache['entries_when_full'], 'program')}"
    kept = f"{entries}, {format_bytes(cache['size_bytes'])} in {cache['path']}"
    return kept if cache.get("writable", True) else f"{kept}, which cannot be written"


def check_plot(path: Path) -> None:
    """Checked before the work: refuses a path that is not SVG or cannot be written, and a missing matplotlib."""
    if path.suffix.lower() != ".svg":
        raise InvalidProblem("plot", "a name that ends in .svg", str(path), "The picture is an SVG.")
    outputs.ensure_writable(path, "plot")
    figures.require()


def write_plot(path: Path, picture: str) -> None:
    """Write a picture, and say so on stderr."""
    outputs.write(path, picture, "plot")
    typer.echo(f"written: {path}", err=True)


@contextlib.contextmanager
def progress(total: int | None) -> Iterator[Step]:
    """A bar on stderr that disappears at the end (without a total: a pulse); silent if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        started = False

        def step(description: str) -> None:
            nonlocal started
            bar.update(task, description=description, advance=1 if started else 0)
            started = True

        yield step
