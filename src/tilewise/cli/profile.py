"""`tilewise profile`: naive against tilewise attention under torch.profiler, as a timeline, a table and a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise import figures, outputs
from tilewise.cli import profiling
from tilewise.cli.console import JsonOption, check_plot, print_json, progress
from tilewise.cli.explain import DType
from tilewise.cli.profiling import CATEGORIES, Profile, Side, Sizes
from tilewise.errors import InvalidProblem
from tilewise.units import format_count, format_seconds

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "tilewise profile --seqlen 2048 --causal --backward"

WORDS = {
    "matmul": "matrix products",
    "softmax": "softmax",
    "memory": "copies, masks, scaling",
    "fused": "fused kernel, all at once",
    "other": "calls, Python",
}
COLOURS = dict(zip(CATEGORIES, (*figures.OTHERS[:3], figures.OURS[0], figures.OTHERS[4]), strict=True))


def command(
    *,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    seqlen: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="K/V heads; fewer share (GQA).")] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Width of a head.")] = 64,
    dtype: Annotated[DType | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    causal: Annotated[bool, typer.Option("--causal", help="Keys after a query are hidden.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Profile the gradients too.")] = False,
    calls: Annotated[int, typer.Option(min=1, max=1000, help="Profiled calls of each side.")] = 5,
    trace: Annotated[Path, typer.Option(help="The timeline, for Perfetto or chrome://tracing.")] = Path(
        "tilewise-profile.json"
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this .svg (matplotlib).")] = None,
    json: JsonOption = False,
) -> None:
    """Show where the time of naive and of tilewise attention goes on this machine, by torch.profiler.

    Writes a timeline of both, which https://ui.perfetto.dev and chrome://tracing open, and prints the mean time of a
    call by kind of work.
    """
    where = _device(device)
    like = (dtype or (DType.float32 if where.type == "cpu" else DType.bfloat16)).torch_dtype
    sizes = Sizes(batch, seqlen, heads, kv_heads or heads, head_dim, like, where, causal, backward, calls)
    _check_outputs(trace, plot)
    with progress(profiling.steps(sizes)) as announce:
        found = profiling.run(sizes, trace, announce)
    typer.echo(f"written: {trace}", err=True)
    if plot is not None:
        outputs.write(plot, draw(found, sizes), "plot")
        typer.echo(f"written: {plot}", err=True)
    if json:
        print_json(_as_dict(found, sizes, trace))
    else:
        _show(found, sizes)


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise InvalidProblem("device", "auto, cpu or cuda", repr(name), "What is not here cannot be profiled.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidProblem("device", "a device that is here", repr(name), "There is no CUDA device: use cpu.")
    return torch.device(name if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _check_outputs(trace: Path, plot: Path | None) -> None:
    """Checked before the measurement."""
    if trace.suffix != ".json" and trace.suffixes[-2:] != [".json", ".gz"]:
        raise InvalidProblem("trace", "a name that ends in .json or .json.gz", str(trace), "Name it so.")
    outputs.ensure_writable(trace, "trace")
    if plot is not None:
        check_plot(plot)


def _as_dict(found: Profile, sizes: Sizes, trace: Path) -> dict[str, Any]:
    described = dataclasses.asdict(sizes) | {"dtype": str(sizes.dtype).removeprefix("torch.")}
    return {
        **described,
        "device": str(sizes.device),
        "device_name": found.plan.device.name,
        "threads": torch.get_num_threads() if sizes.device.type == "cpu" else None,
        "torch": torch.__version__,
        "backend": found.plan.backend,
        "naive": {"seconds": found.naive.total, "by_category": found.naive.seconds},
        "tilewise": {"seconds": found.tilewise.total, "by_category": found.tilewise.seconds},
        "largest_difference": found.difference,
        "least_matmul_seconds": found.least_matmul_seconds,
        "trace": str(trace),
    }


def _headline(found: Profile, sizes: Sizes) -> str:
    passes = "forward and backward" if sizes.backward else "forward"
    mask = ", causal" if sizes.causal else ""
    dtype = str(sizes.dtype).removeprefix("torch.")
    heads = f"{sizes.heads}/{sizes.kv_heads}" if sizes.kv_heads != sizes.heads else str(sizes.heads)
    threads = f" with {torch.get_num_threads()} threads" if sizes.device.type == "cpu" else ""
    return (
        f"{passes}{mask}, {dtype}, batch {sizes.batch}, {heads} heads, {sizes.seqlen} tokens, head_dim "
        f"{sizes.head_dim}, on {found.plan.device.name}{threads}"
    )


def _show(found: Profile, sizes: Sizes) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(_headline(found, sizes))}[/]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("where the time of a call goes")
    for header in ("naive", "share", f"tilewise ({found.plan.backend})", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in CATEGORIES:
        table.add_row(WORDS[name], *_cells(found.naive, name), *_cells(found.tilewise, name))
    table.add_section()
    ratio = found.naive.total / found.tilewise.total if found.tilewise.total else float("nan")
    table.add_row(
        "[bold]in all[/]", format_seconds(found.naive.total), "", format_seconds(found.tilewise.total), f"{ratio:.1f}x"
    )
    console.print(table)
    for line in _remarks(found, sizes):
        console.print(escape(line))


def _cells(side: Side, name: str) -> tuple[str, str]:
    spent = side.seconds[name]
    if spent == 0.0:
        return "-", ""
    return format_seconds(spent), f"{100 * spent / side.total:.0f} %"


def _remarks(found: Profile, sizes: Sizes) -> list[str]:
    """Remarks that the table cannot show."""
    calls = f"{sizes.calls} call{'s' * (sizes.calls != 1)}"
    lines = [
        f"Mean of {calls} under the profiler, which adds a little to each operator. Results differ by at most "
        f"{found.difference:.1e}."
    ]
    if found.plan.materialises:
        lines.append(
            "Only the reference takes this problem here: it stores the score matrix and is not meant to be fast."
        )
    else:
        text = "The profiler sees a fused kernel as one piece: products, softmax and loads of a tile overlap inside it."
        if found.least_matmul_seconds is not None:
            rate = found.plan.device.flops[found.plan.problem.dtype]
            source = "measured here" if sizes.device.type == "cpu" else "the vendor's peak"
            text += (
                f" Its {format_count(found.plan.tiled.flops, 'FLOP')} of products alone take "
                f"{format_seconds(found.least_matmul_seconds)} at {format_count(rate, 'FLOP/s')} ({source})."
            )
        lines.append(text)
    return lines


def draw(found: Profile, sizes: Sizes) -> str:
    """The table as two stacked bars, as SVG text."""

    def fill(figure: Any) -> None:
        ax = figure.subplots()
        for row, side in enumerate((found.tilewise, found.naive)):
            start = 0.0
            for name in CATEGORIES:
                width = side.seconds[name] * 1e3
                ax.barh(row, width, left=start, color=COLOURS[name], height=0.55, label=WORDS[name] if row else None)
                start += width
            ax.text(start, row, f" {format_seconds(side.total)}", va="center")
        ax.set_yticks([0, 1], [f"tilewise\n({found.plan.backend})", "naive"])
        ax.set_xlabel("milliseconds of a call")
        ax.set_title(_headline(found, sizes), fontsize=8, loc="right")
        ax.margins(x=0.12)
        ax.grid(axis="x", alpha=0.25, color=figures.INK)
        figure.legend(loc="outside lower center", ncols=len(CATEGORIES), frameon=False, fontsize=8)

    return figures.render(fill, 8.0, 2.6)
