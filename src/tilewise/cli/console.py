"""What commands share: the --json option, and progress on stderr while results go to stdout."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["JsonOption", "Step", "print_json", "progress"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

# Called before each step of a long job with what is about to happen.
Step = Callable[[str], None]


def print_json(value: Any) -> None:
    """The value on stdout, strictly as JSON."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@contextlib.contextmanager
def progress(total: int | None) -> Iterator[Step]:
    """A bar on stderr that disappears at the end (without a total: a pulse); silent where stderr is not a terminal."""
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
