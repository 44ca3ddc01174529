"""`tilewise warmup`: compile kernels now, so that the first call of a program does not wait for it."""

from __future__ import annotations

from typing import Any

import typer

from tilewise import dispatch
from tilewise.cli.console import JsonOption, Step, print_json, progress
from tilewise.units import format_bytes

__all__ = ["EXAMPLE", "command", "fill"]

EXAMPLE = "TILEWISE_CACHE_DIR=/opt/kernels tilewise warmup"


def command(*, json: JsonOption = False) -> None:
    """Compile the kernels of every backend that keeps them on disk, and show where they are.

    Worth a line in a container image: processes that find the cache filled start without compiling.
    """
    with progress(None) as step:
        filled = [fill(status, step) for status in dispatch.statuses()]
    if json:
        print_json({"backends": filled})
    else:
        for found in filled:
            typer.echo(_line(found))
    # A cache that stays incomplete would be noticed only later, by every process that compiles again.
    if any(found["cache"] and found["cache"]["entries"] < found["cache"]["entries_when_full"] for found in filled):
        raise typer.Exit(1)


def fill(status: dispatch.Status, step: Step) -> dict[str, Any]:
    """Fill one backend's cache; `skipped` says why there was nothing to do."""
    backend = dispatch.load(status.name)
    warmup, cache_state = getattr(backend, "warmup", None), getattr(backend, "cache_state", None)
    if status.reason is not None or warmup is None or cache_state is None:
        reason = status.reason or "compiles nothing, or only for the problem it is given"
        return {"name": status.name, "cache": None, "skipped": reason}
    warmup(lambda name, done, total: step(f"{status.name}: {name} ({done + 1} of {total})"))
    return {"name": status.name, "cache": dict(cache_state()), "skipped": None}


def _line(found: dict[str, Any]) -> str:
    if found["skipped"] is not None:
        return f"{found['name']}: skipped, {found['skipped']}"
    cache = found["cache"]
    entries = f"{cache['entries']} of {cache['entries_when_full']} programs"
    return f"{found['name']}: {entries}, {format_bytes(cache['size_bytes'])} in {cache['path']}"
