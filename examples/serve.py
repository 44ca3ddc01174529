"""Serve a toy language model with continuous batching from a paged KV cache, or simulate the memory of serving.

    python examples/serve.py                                   # random weights, random tokens, a real engine
    python examples/serve.py --seats 64                        # decoding steps with seats: on a GPU one CUDA graph
    python examples/serve.py --simulate                        # no model: memory of three policies over a long trace
    python examples/serve.py --simulate --plot memory.svg      # and a picture of it (needs matplotlib)
    python examples/serve.py --trace requests.json             # your own trace, see load_trace in serving.py

The model has no tokenizer and no sense; attention, cache, sharing of prefixes and scheduling are the real ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from serving import (
    POLICIES,
    SPARE_TOKENS,
    VOCABULARY,
    Job,
    Scheduler,
    Trace,
    Work,
    draw,
    load_trace,
    make_trace,
    simulate,
)
from tilewise.nn import rotary_table, rotate


@dataclass(frozen=True)
class Shape:
    """Sizes of the toy model."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention to the cache and a feed-forward network, each on the normalised residual stream."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tw.PagedKVCache) -> Tensor:
        """The rows (rows, width) of one step of the cache."""
        s = self.shape
        heads = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, s.head_dim))
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], 1)
        cache.append(rotate(k, cos, sin), v, layer=self.layer)
        attended: Tensor = cache.attention(rotate(q, cos, sin), layer=self.layer)
        x = x + self.out(attended.flatten(1))
        hidden: Tensor = self.down(F.silu(self.up(F.rms_norm(x, x.shape[-1:]))))
        return x + hidden


class Toy(nn.Module):
    """A decoder with random weights."""

    def __init__(self, shape: Shape, max_seqlen: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape, n) for n in range(shape.layers))
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.angles: tuple[Tensor, ...] = rotary_table(max_seqlen, shape.head_dim)

    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: tw.PagedKVCache) -> Tensor:
        """Logits of the rows in `last`; tokens and positions (rows,) are those of a step of the cache."""
        x: Tensor = self.embedding(tokens)
        # Once: a graph cannot hold a copy from the host.
        self.angles = tuple(table.to(x.device) for table in self.angles)
        cos, sin = (table[positions] for table in self.angles)
        for block in self.blocks:
            x = block(x, cos, sin, cache)
        logits: Tensor = self.head(F.rms_norm(x[last], x.shape[-1:]))
        return logits


@dataclass
class Tally:
    """What an engine has done."""

    steps: int = 0
    rows: int = 0
    produced: int = 0
    seconds: float = 0.0
    peak_running: int = 0
    peak_pages: int = 0
    utilisation: float = 0.0


class Decoder:
    """Fixed steps of a cache with seats: the same tensors every time, so that a GPU replays one graph of the model."""

    @torch.no_grad()
    def __init__(self, model: Toy, cache: tw.PagedKVCache, seats: int) -> None:
        self.model, self.cache = model, cache
        # Token, position and row of every seat.
        self.inputs = torch.zeros(3, seats, dtype=torch.int64, device=cache.device)
        self.inputs[2] = torch.arange(seats)
        cache.step([], fixed=True)
        self.logits = self.model(*self.inputs, cache)
        self.graph = torch.cuda.CUDAGraph() if cache.device.type == "cuda" else None
        if self.graph is not None:
            with torch.cuda.graph(self.graph):
                self.logits = self.model(*self.inputs, cache)

    def __call__(self, works: list[Work]) -> Tensor:
        """Logits of the requests of a step that yield."""
        seats = self.cache.seats([work.number for work in works])
        ids = [work.job.tokens[work.start] if work.token is None else work.token for work in works]
        told = torch.tensor([ids, [work.start for work in works]])
        self.inputs[:2, seats] = told.to(self.inputs.device)
        if self.graph is None:
            self.logits = self.model(*self.inputs, self.cache)
        else:
            self.graph.replay()
            self.cache.mark_written()
        yielding = [seat for seat, work in zip(seats, works, strict=True) if work.yields]
        logits: Tensor = self.logits[yielding]
        return logits


class Engine:
    """A model, its cache and a scheduler; `run` serves a trace, one forward pass a step. With `seats`, as many as the
    cache has, steps that only decode are fixed ones.
    """

    def __init__(self, model: Toy, cache: tw.PagedKVCache, *, token_budget: int = 512, seats: int = 0) -> None:
        self.model, self.cache = model, cache
        spare = -(-SPARE_TOKENS // cache.book.page_size)
        self.decode = Decoder(model, cache, seats) if seats else None
        self.scheduler = Scheduler(
            cache, token_budget=token_budget, max_running=seats or 256, spare=spare, fixed=bool(seats)
        )
        self.finished: list[Job] = []
        self.tally = Tally()

    @torch.no_grad()
    def step(self) -> int:
        """Everybody's next token, and pieces of prompts; returns how many requests finished."""
        works = self.scheduler.step()
        if not works:
            return 0
        if self.decode is not None and self.scheduler.is_fixed(works):
            logits = self.decode(works)
        else:
            logits = self.model(*(torch.tensor(x, device=self.cache.device) for x in _packed(works)), self.cache)
        stats = self.cache.stats()
        self.tally.peak_pages = max(self.tally.peak_pages, stats.pages_held)
        self.tally.peak_running = max(self.tally.peak_running, len(self.scheduler.running))
        self.tally.utilisation += stats.utilisation
        yielding = [work.job for work in works if work.yields]
        done = [
            job
            for job, token in zip(yielding, logits.argmax(-1).tolist(), strict=True)
            if self.scheduler.produce(job, token)
        ]
        self.finished += done
        self.tally.steps += 1
        self.tally.rows += sum(work.count for work in works)
        self.tally.produced += len(yielding)
        return len(done)

    def run(self, trace: Trace, progress: Progress) -> Tally:
        """Serve all requests, each from its arrival (in steps) on."""
        coming, step = list(trace.requests), 0
        bar = progress.add_task("serving", total=len(coming), note="")
        start = time.perf_counter()
        while coming or self.scheduler.waiting or self.scheduler.running:
            while coming and (coming[0].arrival <= step or not (self.scheduler.waiting or self.scheduler.running)):
                self.scheduler.submit(coming.pop(0))
            finished = self.step()
            if self.scheduler.waiting and not self.scheduler.running and not finished:
                raise tw.OutOfPages("a prompt does not fit into the empty cache; use more --memory")
            speed = self.tally.produced / (time.perf_counter() - start)
            progress.update(bar, advance=finished, note=f"{len(self.scheduler.running)} running, {speed:.0f} tokens/s")
            step += 1
        self.tally.seconds = time.perf_counter() - start
        return self.tally


def _packed(works: list[Work]) -> tuple[list[int], list[int], list[int]]:
    """Token ids and positions of all rows of a step, and the last row of each request that yields a token."""
    tokens: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    for work in works:
        tokens += work.job.tokens[work.start : work.start + work.count]
        positions += range(work.start, work.start + work.count)
        if work.yields:
            last.append(len(tokens) - 1)
    return tokens, positions, last


def serve(trace: Trace, options: argparse.Namespace, console: Console) -> Engine:
    """Serve a trace with the toy model and print what came of it."""
    torch.manual_seed(options.seed)
    shape = Shape(layers=options.layers)
    model = Toy(shape, trace.max_seqlen).to(device=options.device, dtype=getattr(torch, options.dtype))
    cache = tw.PagedKVCache(
        options.memory * trace.max_seqlen // options.page_size, options.page_size, shape.layers, shape.kv_heads,
        shape.head_dim, dtype=getattr(torch, options.dtype), device=options.device, max_seqlen=trace.max_seqlen,
        prefix_sharing=not options.no_sharing, max_requests=options.seats or None,
    )  # fmt: skip
    engine = Engine(model, cache, seats=options.seats)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        tally = engine.run(trace, progress)
    console.print(_served(engine, tally, trace, options))
    return engine


def _served(engine: Engine, tally: Tally, trace: Trace, options: argparse.Namespace) -> Table:
    cache, stats = engine.cache, engine.cache.stats()
    token_bytes = sum(pages[:, 0, 0].numel() * pages.element_size() for pages in (cache.k, cache.v))
    paged, reserved = tally.peak_pages * options.page_size, tally.peak_running * trace.max_seqlen
    pace, used = tally.produced / tally.seconds, tally.utilisation / tally.steps
    done = f"{len(engine.finished)}, at most {tally.peak_running} at a time, {engine.scheduler.preemptions} preempted"
    rows = {
        "requests": done,
        "tokens": f"{tally.produced} produced in {tally.steps} steps, {pace:.0f} a second",
        "rows through the model": f"{tally.rows}, {tally.rows / tally.seconds:.0f} a second",
        "KV memory, paged": f"{paged * token_bytes / 2**20:.1f} MiB at the peak, {used:.1%} of it in use",
        "KV memory, reserved": f"{reserved * token_bytes / 2**20:.1f} MiB would be needed ({reserved / paged:.1f}x)",
        "prompt tokens found": f"{stats.hit_tokens} of {stats.prompt_tokens} ({stats.hit_rate:.1%})",
    }
    table = Table("served", "", title=f"{options.device}, {options.dtype}, pages of {options.page_size}")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def compare(trace: Trace, options: argparse.Namespace, console: Console) -> None:
    """Simulate the three policies with enough memory and with little, print them, and draw them if asked to."""
    scarce = options.memory * trace.max_seqlen
    ample = len(trace.requests) * trace.max_seqlen
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def run(policy: str, capacity: int) -> Any:
            bar = progress.add_task(f"{policy}, {capacity // 1024} K tokens", total=len(trace.requests))
            return simulate(
                trace, policy, capacity=capacity, page_size=options.page_size, seed=options.seed,
                advance=lambda: progress.advance(bar),
            )  # fmt: skip

        enough, little = [run(policy, ample) for policy in POLICIES], [run(policy, scarce) for policy in POLICIES]
    title = f"{len(trace.requests)} requests of at most {trace.max_seqlen} tokens, pages of {options.page_size}"
    table = Table(
        "", "in use", "memory, mean", f"at a time in {scarce // 1024} K", "steps", "preempted", "found", title=title
    )
    for rich, poor in zip(enough, little, strict=True):
        table.add_row(
            rich.policy, f"{rich.utilisation:.1%}", f"{rich.memory / 1024:.1f} K tokens", f"{poor.concurrency:.1f}",
            str(poor.steps), str(poor.preemptions), f"{poor.hit_rate:.1%}",
        )  # fmt: skip
    console.print(table)
    pages, sharing = 1 - enough[1].memory / enough[0].memory, 1 - enough[2].memory / enough[1].memory
    console.print(f"saved by pages {pages:.1%}, by sharing prefixes another {sharing:.1%} of what is left")
    if options.plot is not None:
        options.plot.write_text(draw(enough, little, scarce), encoding="utf-8")
        console.print(f"drawn: {options.plot}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--simulate", action="store_true", help="count memory, run no model")
    parser.add_argument("--plot", type=Path, help="with --simulate: write the picture here (SVG)")
    parser.add_argument("--trace", type=Path, help="a trace as JSON; default: a generated one")
    parser.add_argument("--requests", type=int, help="requests of the generated trace (48, or 400 with --simulate)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=16, help="memory of the cache, in requests of full length")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--no-sharing", action="store_true", help="do not share prefixes")
    parser.add_argument("--seats", type=int, default=0, help="requests at a time in fixed steps, a graph on a GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Serve or simulate; 2 where the arguments make no sense."""
    options = parse(arguments)
    console = Console()
    try:
        if options.plot is not None and not (options.simulate and options.plot.suffix.lower() == ".svg"):
            raise tw.InvalidProblem(
                "plot", "--simulate, and a name that ends in .svg", str(options.plot), "The picture is an SVG."
            )
        if options.trace is not None:
            trace = load_trace(options.trace, seed=options.seed)
        elif options.simulate:
            trace = make_trace(options.requests or 400, seed=options.seed)
        else:
            trace = make_trace(
                options.requests or 48, seed=options.seed, prompt=40, output=40, max_seqlen=1024, gap=2.0
            )
        (compare if options.simulate else serve)(trace, options, console)
    except (tw.TilewiseError, OSError) as error:
        console.print(f"error: {error}", style="red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
