"""The command line: one module per command, each with a function `command` and an `EXAMPLE` for its help page."""

from __future__ import annotations

import importlib
import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewise.cli.console import print_error
from tilewise.errors import TilewiseError
from tilewise.version import __version__

__all__ = ["COMMANDS", "build_app"]

# Modules of this package, in the order of the help page.
COMMANDS = ("doctor", "demo", "explain", "explore", "profile", "accuracy", "bench", "warmup")

HELP = """Exact, IO-aware attention on CPUs and GPUs.

See what it does here with "demo", what is installed with "doctor", and what a problem would cost with "explain".
"""


class FriendlyGroup(TyperGroup):
    """Errors that tilewise raises on purpose become one message and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except TilewiseError as error:
            print_error(ctx, error)
            raise typer.Exit(2) from None


def build_app() -> typer.Typer:
    """The application with every command."""
    # Commands inherit the names of the help option.
    context = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        cls=FriendlyGroup, help=HELP, no_args_is_help=True, add_completion=False, context_settings=context
    )
    # A callback keeps command names required even if there were only one command.
    app.callback(epilog="Example:  tilewise demo")(_top_level)
    for name in COMMANDS:
        module = importlib.import_module(f"tilewise.cli.{name}")
        help_text = _reflowed(module.command.__doc__)
        app.command(name, help=help_text, epilog=f"Example:  {module.EXAMPLE}")(module.command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tilewise {__version__}")
        raise typer.Exit


def _top_level(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Options before the name of a command."""


def _reflowed(docstring: str | None) -> str:
    """Paragraphs on one line each: the help page breaks them to the terminal's width, not to the source's."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
