"""`tilewise demo`: exact tiled attention against naive attention on this machine, in time, memory and error."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tilewise import device
from tilewise.api import attention
from tilewise.backends.reference.tiled import fa2
from tilewise.bench.memory import memory_method, peak_extra_memory
from tilewise.bench.quick import formula
from tilewise.cli.console import JsonOption, Step, print_json, progress
from tilewise.masks import Band
from tilewise.plan import explain
from tilewise.units import counted, format_bytes, format_seconds

EXAMPLE = "tilewise demo --heads 8 --max-seqlen 4096"

DTYPE = torch.float32
TEXTBOOK = "textbook"
SMALLEST = 256
# Minimum and maximum number of timed calls, and the seconds to spend between the two.
LEAST_CALLS, MOST_CALLS, TIMING_SECONDS = 2, 20, 0.8
# Rows of each head that are compared with fp64; all of them up to this many tokens.
CHECKED_ROWS = 256
# Time and memory of naive attention grow with the square of N, and a little more once it leaves the caches.
GROWTH = 4.5

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
# Batch, heads, head_dim.
Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the comparison: longest sequence, total seconds, and seconds and bytes for naive attention."""

    max_seqlen: int
    seconds: float
    naive_seconds: float
    naive_memory: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One implementation at one size: best time, memory beyond the inputs, largest deviation from fp64."""

    seconds: float
    extra_memory: int
    error: float


@dataclass(frozen=True, slots=True)
class Round:
    """One size. Naive attention is None if it would exceed the limits; `naive_needs` says what it would take."""

    seqlen: int
    causal: bool
    naive: Measurement | None
    tiled: Measurement
    naive_needs: int


def command(
    *,
    max_seqlen: Annotated[int, typer.Option(min=256, help="Longest sequence; lengths double from 256.")] = 16384,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Width of a head.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Start no length that would end after this.")] = 45.0,
    naive_seconds: Annotated[float, typer.Option(min=0.0, help="Most seconds of a naive call.")] = 6.0,
    naive_memory: Annotated[float | None, typer.Option(min=0.0, help="Most GiB; default: 1/6 of RAM, up to 4.")] = None,
    json: JsonOption = False,
) -> None:
    """Race exact tiled attention against naive attention (which stores the score matrix) on this machine.

    Lengths grow until naive attention would not be sensible. Every figure is measured: the best time of a call, the
    most memory it holds beyond its inputs, and its largest error against fp64.
    """
    # A demonstration must not make a machine swap.
    memory = min(4 << 30, device.this_cpu().memory_bytes // 6) if naive_memory is None else int(naive_memory * 2**30)
    limits = Limits(max_seqlen, seconds, naive_seconds, memory)
    shape = (batch, heads, head_dim)
    player = implementation(shape)
    # The first call, and two implementations, full and causal, at every length.
    with progress(1 + 4 * len(_seqlens(limits))) as announce:
        rounds = list(_play(shape, player, limits, announce))
    stopped = _stopped(rounds, limits)
    print_json(_as_dict(shape, player, rounds, stopped)) if json else _show(shape, player, rounds, stopped)


def _as_dict(shape: Shape, player: str, rounds: Sequence[Round], stopped: str | None) -> dict[str, Any]:
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
        "stopped": stopped,
    }


def _show(shape: Shape, player: str, rounds: Sequence[Round], stopped: str | None) -> None:
    batch, heads, head_dim = shape
    name = "the textbook algorithm in torch" if player == TEXTBOOK else f"backend {player}"
    console = Console(highlight=False)
    console.print(
        f"[bold]Exact attention, fp32, batch {batch}, {counted(heads, 'head')}, head_dim {head_dim}[/], on "
        f"{device.cpu_name()} with {counted(torch.get_num_threads(), 'thread')}.\n"
        f"naive stores the score matrix; tilewise (here: [bold]{name}[/]) works in tiles and never does."
    )
    for causal in (False, True):
        console.print(_table(causal, [played for played in rounds if played.causal == causal]))
    console.print(
        f"[dim]time: best of several calls; memory: {memory_method()} beyond the inputs; "
        f"error: largest against fp64[/]\n"
    )
    console.print(_summary(player, rounds))
    if stopped is not None:
        console.print(f"\n{stopped}")


def _table(causal: bool, rounds: Sequence[Round]) -> Table:
    title = "causal: each token sees itself and what came before" if causal else "full: every token sees every token"
    # Padding on one side only: eight columns must fit 80 characters.
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold cyan", "box": box.SIMPLE_HEAD}
    table = Table(title=title, pad_edge=False, padding=(0, 1, 0, 0), **style)
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


def _stopped(rounds: Sequence[Round], limits: Limits) -> str | None:
    """Why the longest lengths were not run; None if all were."""
    last, longest = rounds[-1].seqlen, _seqlens(limits)[-1]
    if last == longest:
        return None
    ended = [played for played in rounds if played.seqlen == last]
    if any(played.naive is not None for played in ended):
        why = f"the next length would have ended after {limits.seconds:g} s; --seconds allows more"
    elif ended[0].naive_needs > limits.naive_memory:
        allowed = format_bytes(limits.naive_memory)
        why = f"naive attention would need more than {allowed} from here on; --naive-memory allows more"
    else:
        allowed = f"{limits.naive_seconds:g} s"
        why = f"a naive call would take more than {allowed} from here on; --naive-seconds allows more"
    return f"Stopped at {last:,} of {longest:,} tokens: {why}."


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


def implementation(shape: Shape) -> str:
    """What runs for tilewise: the backend that a plain call gets, or the textbook if only the reference takes it."""
    batch, heads, head_dim = shape
    q = torch.empty(batch, heads, SMALLEST, head_dim, dtype=DTYPE, device="meta")
    backend = explain(q, q, q, device=torch.device("cpu")).backend
    return TEXTBOOK if backend in (None, "reference") else str(backend)


def _play(shape: Shape, player: str, limits: Limits, announce: Step) -> Iterator[Round]:
    """Rounds of growing length, full and causal, until naive attention has exceeded the limits for one length."""
    deadline = time.monotonic() + limits.seconds
    tiled: Attention = _textbook if player == TEXTBOOK else lambda q, k, v, causal: attention(q, k, v, causal=causal)
    announce("first call (compiles where needed)")
    for causal in (False, True):
        tiled(*_inputs(shape, SMALLEST), causal)
    before: dict[bool, Round] = {}
    with torch.no_grad():
        for seqlen in _seqlens(limits):
            if before and _expected(before.values(), limits) > deadline - time.monotonic():
                return
            for causal in (False, True):
                q, k, v = _inputs(shape, seqlen)
                needs = explain(q, k, v, causal=causal).naive.extra_memory
                naive = None
                if _sensible(before.get(causal), needs, limits):
                    announce(f"naive attention, {seqlen} tokens")
                    naive = _measure(formula, q, k, v, causal)
                announce(f"tilewise ({player}), {seqlen} tokens")
                before[causal] = Round(seqlen, causal, naive, _measure(tiled, q, k, v, causal), needs)
                yield before[causal]
            if all(played.naive is None for played in before.values()):
                return


def _seqlens(limits: Limits) -> list[int]:
    count = max(0, int(math.log2(max(1, limits.max_seqlen) / SMALLEST))) + 1
    return [SMALLEST << index for index in range(count)]


def _expected(last: Iterable[Round], limits: Limits) -> float:
    """Estimated seconds of the next length, from the last one; its score matrices are four times as large."""
    calls = [played.tiled.seconds for played in last]
    calls += [p.naive.seconds for p in last if p.naive and _sensible(p, 4 * p.naive_needs, limits)]
    return sum(max(LEAST_CALLS * GROWTH * seconds, TIMING_SECONDS) + GROWTH * seconds for seconds in calls)


def _sensible(last: Round | None, needs: int, limits: Limits) -> bool:
    if last is None:
        return True
    if last.naive is None or needs > limits.naive_memory:
        return False
    return GROWTH * last.naive.seconds <= limits.naive_seconds


def _inputs(shape: Shape, seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seqlen)
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, dtype=DTYPE, generator=generator) for _ in range(3))
    return q, k, v


def _textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = torch.empty_like(q)
    band = Band(q.shape[2], k.shape[2], None, 0 if causal else None)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            out[batch, head] = fa2(q[batch, head], k[batch, head], v[batch, head], band=band)[0]
    return out


def _measure(compute: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Measurement:
    seconds = _best_seconds(lambda: compute(q, k, v, causal))
    kept: list[Tensor] = []
    memory = peak_extra_memory(lambda: kept.append(compute(q, k, v, causal)))
    return Measurement(seconds, memory, _error(kept[0], q, k, v, causal))


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Largest deviation from the fp64 specification over up to CHECKED_ROWS rows, spread from the first to the last."""
    seqlen = q.shape[2]
    rows = torch.linspace(0, seqlen - 1, min(seqlen, CHECKED_ROWS)).round().long()
    visible = torch.arange(seqlen)[None, :] <= rows[:, None] if causal else None
    exact = attention(q[:, :, rows].double(), k.double(), v.double(), mask=visible, backend="reference")
    return float((out[:, :, rows].double() - exact).abs().max())


def _best_seconds(run: Callable[[], object]) -> float:
    """The fastest of several calls: at least two, because the first may compile, then more while there is time."""
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) + min(times) < TIMING_SECONDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
