"""`tilewise accuracy`: what fp16, bf16 and FP8 lose against fp64, by granularity, rotation and distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tilewise import figures, outputs
from tilewise.cli import accuracies
from tilewise.cli.accuracies import Measured
from tilewise.cli.activations import DISTRIBUTIONS
from tilewise.cli.console import JsonOption, print_json, progress
from tilewise.errors import InvalidProblem

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "tilewise accuracy --seqlen 8192 --plot accuracy.svg"
COLOURS = dict(zip(DISTRIBUTIONS, (figures.OTHERS[0], figures.OURS[0], figures.OTHERS[1]), strict=True))


def command(
    *,
    seqlen: Annotated[int, typer.Option(min=16, help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the drawn distributions.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=512, help="Width of the drawn distributions' heads.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Query rows compared, evenly spaced.")] = 256,
    distribution: Annotated[str | None, typer.Option(help=f"Only this one: {', '.join(DISTRIBUTIONS)}.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this .svg (matplotlib).")] = None,
    json: JsonOption = False,
) -> None:
    """Measure the error of attention against fp64 in fp16, bf16 and FP8: every granularity of scales, with and without
    rotation, on normal numbers, on normal numbers with outliers, and on a small model trained for the purpose.
    """
    if distribution is not None and distribution not in DISTRIBUTIONS:
        raise InvalidProblem("distribution", "one of " + ", ".join(DISTRIBUTIONS), repr(distribution), "Or none: all.")
    if plot is not None:
        if plot.suffix.lower() != ".svg":
            raise InvalidProblem("plot", "a file name that ends in .svg", str(plot), "The picture is an SVG.")
        outputs.ensure_writable(plot, "plot")
    names = DISTRIBUTIONS if distribution is None else (distribution,)
    found: list[Measured] = []
    notes: dict[str, str] = {}
    with progress(None) as announce:
        for name in names:
            measured, notes[name] = accuracies.measure(name, seqlen, heads, head_dim, rows, seed, announce)
            found += measured
    if plot is not None:
        outputs.write(plot, draw(found, seqlen), "plot")
        typer.echo(f"written: {plot}", err=True)
    print_json(_as_dict(found, notes, seqlen)) if json else _show(found, notes, seqlen)


def _show(found: list[Measured], notes: dict[str, str], seqlen: int) -> None:
    console = Console()
    table = Table(
        title=f"error against fp64, {seqlen} tokens", box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0)
    )
    table.add_column("q, k, v in", no_wrap=True)
    for name in notes:
        table.add_column(f"{name}\nRMSE", justify="right", no_wrap=True)
        table.add_column("\nof out", justify="right", no_wrap=True)
    for recipe in dict.fromkeys(m.recipe for m in found):
        cells = [m for m in found if m.recipe == recipe]
        table.add_row(recipe.name, *(text for m in cells for text in (f"{m.rmse:.2e}", f"{_share(m):.1%}")))
    console.print(table)
    for name, note in notes.items():
        console.print(f"{name}: {note}", highlight=False)


def _share(measured: Measured) -> float:
    return measured.rmse / measured.rms_out if measured.rms_out else 0.0


def _as_dict(found: list[Measured], notes: dict[str, str], seqlen: int) -> dict[str, Any]:
    rows = [
        {
            **m.recipe._asdict(),
            "distribution": m.distribution,
            "rmse": m.rmse,
            "largest": m.largest,
            "rms_out": m.rms_out,
        }
        for m in found
    ]
    return {"seqlen": seqlen, "distributions": notes, "errors": rows}


def draw(found: list[Measured], seqlen: int) -> str:
    """Bars of RMSE, relative to the output, by recipe and distribution, as SVG text."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        recipes = list(dict.fromkeys(m.recipe for m in found))
        names = list(dict.fromkeys(m.distribution for m in found))
        thickness = 0.8 / len(names)
        for i, name in enumerate(names):
            shares = [_share(m) for m in found if m.distribution == name]
            places = [row + (i - (len(names) - 1) / 2) * thickness for row in range(len(recipes))]
            axes.barh(places, shares, thickness * 0.9, color=COLOURS[name], label=name)
        axes.set_yticks(range(len(recipes)), [recipe.name for recipe in recipes])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"RMS error / RMS of the exact output, {seqlen} tokens")
        axes.legend(frameon=False)

    return figures.render(on, 7.0, 4.0)
