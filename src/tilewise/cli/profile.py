"""`tilewise profile`: naive against tilewise attention under torch.profiler, as a timeline, a table and a picture.

Both run in one profiled session, each call inside a range of its own, so the trace shows both. An event belongs to the
range in which it starts; its own time counts, without that of the events inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tilewise import figures, outputs, settings
from tilewise.api import attention
from tilewise.cli.console import JsonOption, Step, check_plot, print_json, progress, write_plot
from tilewise.cli.explain import DType
from tilewise.errors import InvalidProblem
from tilewise.plan import Plan, explain
from tilewise.units import counted, format_count, format_seconds

EXAMPLE = "tilewise profile --seqlen 2048 --causal --backward"

# In the order of the table. "fused" is a kernel that does everything at once.
WORDS = {
    "matmul": "matrix products",
    "softmax": "softmax",
    "memory": "copies, masks, scaling",
    "fused": "fused kernel, all at once",
    "other": "calls, Python",
}
COLOURS = dict(zip(WORDS, (*figures.OTHERS[:3], figures.OURS[0], figures.OTHERS[4]), strict=True))
# The first of these that the name of an operator or kernel contains decides; lower case.
MARKS = (
    ("softmax", ("softmax",)),
    ("matmul", ("bmm", "matmul", "::mm", "addmm", "gemm", "cutlass", "xmma", "nvjet")),
    # The rest of torch's own moves or combines elements: copies, fills, masks, scaling.
    ("memory", ("aten::", "at::native", "memcpy", "memset", "elementwise")),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The problem to profile, and how often each side computes it under the profiler."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    backward: bool
    calls: int


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation: seconds of a call by category."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of a call."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Profile:
    """Both sides, the plan of the call, and the largest difference of their results."""

    plan: Plan
    naive: Side
    tilewise: Side
    difference: float

    @property
    def least_matmul_seconds(self) -> float | None:
        """The time of the visible products alone at the device's rate; None if that is unknown."""
        rate = self.plan.device.flops.get(self.plan.problem.dtype)
        return self.plan.tiled.flops / rate if rate else None


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
    if trace.suffix != ".json" and trace.suffixes[-2:] != [".json", ".gz"]:
        raise InvalidProblem("trace", "a name that ends in .json or .json.gz", str(trace), "Name it so.")
    outputs.ensure_writable(trace, "trace")
    if plot is not None:
        check_plot(plot)
    with progress(3 + 2 * calls) as announce:
        found = _run(sizes, trace, announce)
    typer.echo(f"written: {trace}", err=True)
    if plot is not None:
        write_plot(plot, _draw(found, sizes))
    print_json(_as_dict(found, sizes, trace)) if json else _show(found, sizes)


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise InvalidProblem("device", "auto, cpu or cuda", repr(name), "What is not here cannot be profiled.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidProblem("device", "a device that is here", repr(name), "There is no CUDA device: use cpu.")
    return torch.device(name if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


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
    heads = f"{sizes.heads}/{sizes.kv_heads} heads" if sizes.kv_heads != sizes.heads else counted(sizes.heads, "head")
    threads = f" with {counted(torch.get_num_threads(), 'thread')}" if sizes.device.type == "cpu" else ""
    return (
        f"{passes}{mask}, {dtype}, batch {sizes.batch}, {heads}, {counted(sizes.seqlen, 'token')}, head_dim "
        f"{sizes.head_dim}, on {found.plan.device.name}{threads}"
    )


def _show(found: Profile, sizes: Sizes) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(_headline(found, sizes))}[/]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("where the time of a call goes")
    for header in ("naive", "share", f"tilewise ({found.plan.backend})", "share"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in WORDS:
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
    calls = counted(sizes.calls, "call")
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


def _draw(found: Profile, sizes: Sizes) -> str:
    """The table as two stacked bars, as SVG text."""

    def fill(figure: Any) -> None:
        ax = figure.subplots()
        for row, side in enumerate((found.tilewise, found.naive)):
            start = 0.0
            for name in WORDS:
                width = side.seconds[name] * 1e3
                ax.barh(row, width, left=start, color=COLOURS[name], height=0.55, label=WORDS[name] if row else None)
                start += width
            ax.text(start, row, f" {format_seconds(side.total)}", va="center")
        ax.set_yticks([0, 1], [f"tilewise\n({found.plan.backend})", "naive"])
        ax.set_xlabel("milliseconds of a call")
        ax.set_title(_headline(found, sizes), fontsize=8, loc="right")
        ax.margins(x=0.12)
        ax.grid(axis="x", alpha=0.25, color=figures.INK)
        figure.legend(loc="outside lower center", ncols=len(WORDS), frameon=False, fontsize=8)

    return figures.render(fill, 8.0, 2.6)


def _plan_for(sizes: Sizes) -> Plan:
    """The plan of the call; rejects score matrices that take more than half of the memory."""
    q, k, v = _tensors(sizes, torch.device("meta"))
    plan = explain(q, k, v, causal=sizes.causal, device=sizes.device)
    needed, there = plan.naive.extra_memory + plan.memory.inputs, plan.device.memory_bytes
    if there and needed > there // 2:
        got = f"{sizes.seqlen}, for which naive attention takes {needed / 2**30:.1f} of {there / 2**30:.1f} GiB"
        raise InvalidProblem("seqlen", "a length whose score matrix fits half the memory", got, "Choose a shorter one.")
    return plan


def _run(sizes: Sizes, trace: Path, announce: Step) -> Profile:
    """Profile both sides, write the trace, and add up their time by category."""
    plan = _plan_for(sizes)
    tensors = _tensors(sizes, sizes.device)

    def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with record_function(f"tilewise.attention [{plan.backend or 'none'}]"):
            return attention(q, k, v, causal=causal)

    calls = {"naive": _naive, "tilewise": tiled}
    announce("first calls (compile where needed)")
    results = {name: _call(name, compute, tensors, sizes) for name, compute in calls.items()}
    difference = float((results["naive"].double() - results["tilewise"].double()).abs().max())
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (sizes.device.type == "cuda")
    announce("starting the profiler")
    # On a GPU an error of the profiler's driver interface is worth the two lines.
    hush = settings.quiet_profiler() if sizes.device.type == "cpu" else contextlib.nullcontext()
    with hush, profile(activities=activities, record_shapes=True) as session:
        for number in range(sizes.calls):
            for name, compute in calls.items():
                announce(f"{name}, call {number + 1} of {sizes.calls}")
                _call(name, compute, tensors, sizes)
    announce("writing the trace")
    session.export_chrome_trace(str(trace))
    events = session.events() or ()
    naive = Side(_by_category(events, "naive", sizes, fused=False))
    tilewise = Side(_by_category(events, "tilewise", sizes, fused=not plan.materialises))
    return Profile(plan, naive, tilewise, difference)


def _tensors(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    shape = sizes.batch, sizes.heads, sizes.seqlen, sizes.head_dim
    shared = sizes.batch, sizes.kv_heads, sizes.seqlen, sizes.head_dim
    # Deterministic inputs without changing a global generator.
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(s, dtype=sizes.dtype, device=device, generator=generator) for s in (shape, shared, shared))
    for tensor in (q, k, v):
        tensor.requires_grad_(sizes.backward)
    return q, k, v


def _call(
    name: str,
    compute: Callable[[Tensor, Tensor, Tensor, bool], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
) -> Tensor:
    """One call in its range, finished when the range ends."""
    q, k, v = tensors
    dout = q.detach()
    with record_function(name):
        out = compute(q, k, v, sizes.causal)
        if sizes.backward:
            with record_function(f"{name}.backward"):
                torch.autograd.grad(out, tensors, dout)
        if sizes.device.type == "cuda":
            torch.cuda.synchronize(sizes.device)
    return out.detach()


def _naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula as written, each of its three kernels in a range."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    with record_function("naive.scores"):
        s = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    with record_function("naive.softmax"):
        p = torch.softmax(s, -1)
    with record_function("naive.values"):
        return p @ v


def _by_category(events: Sequence[Any], name: str, sizes: Sizes, *, fused: bool) -> dict[str, float]:
    """Seconds of a call by category. On a GPU its kernels count, on a CPU the operators' own time."""
    on_gpu = sizes.device.type == "cuda"
    kind = "CUDA" if on_gpu else "CPU"
    spans = [e.time_range for e in events if e.name == name and e.device_type.name == "CPU"]
    seconds = dict.fromkeys(WORDS, 0.0)
    for event in events:
        inside = any(span.start <= event.time_range.start <= span.end for span in spans)
        is_range = on_gpu and event.name.startswith((name, "naive", "tilewise."))
        if event.device_type.name == kind and inside and not is_range:
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            seconds[category(event.name, fused=fused and event.name != name)] += spent * 1e-6 / sizes.calls
    return seconds


def category(event: str, *, fused: bool) -> str:
    """The category of an event. What is not torch's is the fused kernel of a side that has one, else "other"."""
    lowered = event.lower()
    for found, marks in MARKS:
        if any(mark in lowered for mark in marks):
            return found
    return "fused" if fused else "other"
