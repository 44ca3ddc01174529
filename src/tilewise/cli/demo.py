"""`tilewise demo`: exact tiled attention against naive attention on this machine, in time, memory and error."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tilewise import device
from tilewise.bench.memory import memory_method
from tilewise.cli import contest
from tilewise.cli.console import JsonOption, print_json, progress
from tilewise.cli.contest import TEXTBOOK, Limits, Measurement, Round
from tilewise.units import format_bytes, format_seconds

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "tilewise demo --heads 8 --max-seqlen 4096"

DTYPE = torch.float32


def command(
    *,
    max_seqlen: Annotated[int, typer.Option(min=256, help="Longest sequence; lengths double from 256.")] = 16384,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Width of a head.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Start no length that would end after this.")] = 45.0,
    naive_seconds: Annotated[
        float, typer.Option(min=0.0, help="Most seconds a call of naive attention may take.")
    ] = 6.0,
    naive_memory: Annotated[
        float | None, typer.Option(min=0.0, help="Most GiB it may take; by default a sixth of memory, at most 4.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Race exact tiled attention against naive attention (which stores the score matrix) on this machine.

    Lengths grow until naive attention would not be sensible. Every figure is measured: the best time of a call, the
    most memory it holds beyond its inputs, and its largest error against fp64.
    """
    memory = _sensible_memory() if naive_memory is None else int(naive_memory * (1 << 30))
    limits = Limits(max_seqlen, seconds, naive_seconds, memory)
    shape = (batch, heads, head_dim)
    player = contest.implementation(shape, DTYPE)
    with progress(contest.steps(limits)) as announce:
        rounds = list(contest.play(shape, DTYPE, player, limits, announce))
    if json:
        print_json(_as_dict(shape, player, rounds))
    else:
        _show(shape, player, rounds)


def _sensible_memory() -> int:
    """A sixth of this machine's memory, and at most 4 GiB: a demonstration must not make a machine swap."""
    return min(4 << 30, device.this_cpu().memory_bytes // 6)


def _as_dict(shape: tuple[int, int, int], player: str, rounds: Sequence[Round]) -> dict[str, Any]:
    batch, heads, head_dim = shape
    return {
        "device": device.cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "tilewise_ran": player,
        "memory_measured_by": memory_method(),
        "rounds": [dataclasses.asdict(played) for played in rounds],
        "summary": _summary(player, rounds),
    }


def _show(shape: tuple[int, int, int], player: str, rounds: Sequence[Round]) -> None:
    batch, heads, head_dim = shape
    console = Console(highlight=False)
    console.print(
        f"[bold]Exact attention, fp32, batch {batch}, {heads} heads, head_dim {head_dim}[/], on {device.cpu_name()} "
        f"with {torch.get_num_threads()} threads.\n"
        f"naive stores the score matrix; tilewise (here: [bold]{_name(player)}[/]) works in tiles and never does."
    )
    for causal in (False, True):
        console.print(_table(causal, [played for played in rounds if played.causal == causal]))
    console.print(
        f"[dim]time: best of several calls; memory: {memory_method()} beyond the inputs; "
        f"error: largest against fp64[/]\n"
    )
    console.print(_summary(player, rounds))


def _name(player: str) -> str:
    return "the textbook algorithm in torch" if player == TEXTBOOK else f"backend {player}"


def _table(causal: bool, rounds: Sequence[Round]) -> Table:
    title = "causal: each token sees itself and what came before" if causal else "full: every token sees every token"
    # Padding on one side only: eight columns must fit 80 characters.
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold cyan",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    headers = ("N", "naive\ntime", "tilewise\ntime", "speed-\nup", "naive\nmemory", "tilewise\nmemory")
    for header in (*headers, "naive\nerror", "tilewise\nerror"):
        table.add_column(header, justify="right", no_wrap=True)
    for played in rounds:
        table.add_row(*_cells(played))
    return table


def _cells(played: Round) -> tuple[str, ...]:
    naive, tiled = played.naive, played.tiled
    mine = format_seconds(tiled.seconds), format_bytes(tiled.extra_memory), f"{tiled.error:.1e}"
    if naive is None:
        needs = f"[dim]({format_bytes(played.naive_needs)})[/]"
        return f"{played.seqlen:,}", "[dim]not run[/]", mine[0], "", needs, mine[1], "", mine[2]
    ratio = naive.seconds / tiled.seconds
    colour = "green" if ratio >= 1 else "yellow"
    speed_up = f"[{colour}]{ratio:.1f}x[/]"
    theirs = format_seconds(naive.seconds), format_bytes(naive.extra_memory), f"{naive.error:.1e}"
    return f"{played.seqlen:,}", theirs[0], mine[0], speed_up, theirs[1], mine[1], theirs[2], mine[2]


def _summary(player: str, rounds: Sequence[Round]) -> str:
    """The result in words."""
    compared = [(played, played.naive) for played in rounds if played.naive is not None and not played.causal]
    if not compared:
        return "Nothing was compared: allow naive attention more time or memory."
    played, naive = compared[-1]
    sentences = [_comparison(played, naive)]
    both = [r.tiled for r in rounds if r.seqlen == played.seqlen and r.causal]
    if both:
        ratio = played.tiled.seconds / both[0].seconds
        skips = "Causal attention skips the tiles it cannot see and"
        if ratio > 1:
            sentences.append(f"{skips} was {ratio:.1f}x faster than full.")
        else:
            sentences.append(f"{skips} should be faster than full; here it was not: was the machine busy?")
    alone = [r for r in rounds if r.naive is None]
    if alone:
        last = alone[0]
        sentences.append(
            f"At {last.seqlen:,} tokens naive attention was not run (it would need {format_bytes(last.naive_needs)}); "
            f"tilewise took {format_seconds(last.tiled.seconds)} and {format_bytes(last.tiled.extra_memory)}."
        )
    if player == TEXTBOOK:
        sentences.append(
            "No compiled backend was there, so tilewise ran Python loops: look at its memory, not its speed."
        )
    return " ".join(sentences)


def _comparison(played: Round, naive: Measurement) -> str:
    tiled = played.tiled
    ratio = naive.seconds / tiled.seconds
    faster = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    less = naive.extra_memory / max(1, tiled.extra_memory)
    times = f"{format_seconds(tiled.seconds)} instead of {format_seconds(naive.seconds)}"
    memory = f"{format_bytes(tiled.extra_memory)} instead of {format_bytes(naive.extra_memory)}"
    return (
        f"You saw the same attention at {played.seqlen:,} tokens {faster} ({times}) in {less:.0f}x less extra memory "
        f"({memory}); {_verdict(tiled.error, naive.error)} against fp64 ({tiled.error:.0e}, naive {naive.error:.0e})."
    )


def _verdict(tiled: float, naive: float) -> str:
    """The contract's rule: at most twice the error of plain torch in the same dtype, and a few units of rounding."""
    if tiled <= 2 * naive + 8 * torch.finfo(DTYPE).eps:
        return "both are exact up to rounding"
    return "its error is larger than rounding explains"
