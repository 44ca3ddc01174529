"""`tilewise explore`: the lesson and its benches, served to a browser on this machine or written to one file."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import JsonOption, print_json
from tilewise.errors import InvalidProblem
from tilewise.explorer import ExplorerServer, chapter_names, exported_page
from tilewise.outputs import ensure_writable, write
from tilewise.units import format_bytes

EXAMPLE = "tilewise explore --export attention.html"


def command(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: any free one.")] = 8421,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write an HTML file that works offline instead.")] = None,
    chapter: Annotated[str | None, typer.Option(help="Open, or export only, this chapter: online-softmax.")] = None,
    json: JsonOption = False,
) -> None:
    """A lesson on attention in a browser: a tour in ten chapters, benches to play with, and your own problem.

    The page is served on 127.0.0.1 only and sends nothing anywhere. Ctrl+C stops it.
    """
    if chapter is not None and chapter not in chapter_names():
        names = ", ".join(chapter_names())
        raise InvalidProblem("--chapter", f"one of {names}", chapter, "Name a chapter of the lesson.")
    _serve(port, chapter, no_browser, json) if export is None else _export(export, chapter, json)


def _export(target: Path, chapter: str | None, json: bool) -> None:
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidProblem("--export", "a name that ends in .html", str(target), "Browsers go by the ending.")
    ensure_writable(target, "export")
    page = exported_page(chapter)
    write(target, page, "export")
    size = len(page.encode())
    if json:
        print_json({"file": str(target), "bytes": size})
    else:
        typer.echo(f"{target}: {format_bytes(size)}, open it in any browser; it needs no server and no network")


def _serve(port: int, chapter: str | None, no_browser: bool, json: bool) -> None:
    with ExplorerServer(port) as server:
        address = server.url if chapter is None else f"{server.url}#{chapter}"
        if json:
            print_json({"url": address, "stop": "Ctrl+C"})
        else:
            typer.echo(f"tilewise explorer at {address}")
            typer.echo("Only this machine can reach it. Stop it with Ctrl+C.")
        if not no_browser:
            # Starting a browser can take seconds; the server answers meanwhile.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped", err=json)
