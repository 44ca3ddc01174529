"""Measure context-parallel attention on the CPU ranks of one machine, and what the scaling model predicted.

    python bench/context_parallel.py --output bench/results/FILE.json

Starts torchrun for 1, 2 and 4 ranks with one thread each. Per number of ranks: CPU seconds of all ranks together
against those spent inside the attention calls (the ring's overhead), wall seconds, the peak of resident memory of a
rank, and the balance of work. The link is measured alone. CPU time is what counts where ranks outnumber cores.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilewise as tw
from suite.measuring import commit, extra_memory
from tilewise.bench.machine import machine, versions
from tilewise.distributed import LINKS, blocks, context_parallel_attention, predict
from tilewise.distributed.pieces import Layout, pairs_of, pieces
from tilewise.distributed.scaling import Link, Rates, Scenario
from tilewise.distributed.transport import group_of, rotate

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WORLDS = (1, 2, 4)
METHODS = ("ring", "all_gather", "heads")


def main() -> None:
    """Launch the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; printed otherwise")
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ring"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_report is not None:
        run_rank(options)
        return
    report: dict[str, Any] = {
        "format": 1,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "options": {"seqlen": options.seqlen, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
                    "dtype": "fp32", "causal": True, "sharding": "zigzag", "threads_per_rank": 1,
                    "repeats": options.repeats},
        "worlds": {str(world): launch(world, options) for world in WORLDS},
    }  # fmt: skip
    report["model"] = validate(report["worlds"], options.seqlen)
    text = json.dumps(report, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    print_summary(report)


def launch(world: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run this file on that many ranks and take what rank 0 found."""
    print(f"{world} ranks ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
        arguments = ["--rank-report", str(path), "--seqlen", str(options.seqlen), "--repeats", str(options.repeats)]
        arguments += ["--methods", *options.methods]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *command, *arguments], check=True, env=environment)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


class Inside:
    """CPU seconds of this thread inside the attention calls of pieces."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("piece_forward", "piece_backward"):
            setattr(blocks, name, self.timed(getattr(blocks, name)))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with its time added up."""

        @functools.wraps(call)
        def run(*arguments: Any) -> Any:
            start = time.thread_time()
            result = call(*arguments)
            self.seconds += time.thread_time() - start
            return result

        return run


def run_rank(options: argparse.Namespace) -> None:
    """One rank's part of every measurement; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(minutes=10))
    world, rank = dist.get_world_size(), dist.get_rank()
    inside, seqlen = Inside(), options.seqlen
    report: dict[str, Any] = {"balance": balance(world, seqlen), "methods": {}}
    if world > 1:
        report["link"] = measure_link()
    for method in options.methods:
        report["methods"][method] = measure(method, seqlen // world, options.repeats, inside)
    if world == 1:
        report["one_process"] = measure(None, seqlen, options.repeats, inside)
    if rank == 0:
        options.rank_report.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def shards(rows: int) -> list[torch.Tensor]:
    """This rank's q, k, v: values do not matter, so no rank ever holds the whole sequence."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, heads, rows, HEAD_DIM, generator=generator, requires_grad=True) for heads in sizes]


def measure(method: Any, rows: int, repeats: int, inside: Inside) -> dict[str, Any]:
    """Seconds of forward and backward, and the peak of memory; `method` None is the plain call."""
    q, k, v = shards(rows)

    def forward() -> torch.Tensor:
        if method is None:
            return tw.attention(q, k, v, causal=True)
        return context_parallel_attention(q, k, v, seqlen=rows * dist.get_world_size(), causal=True, method=method)

    def both() -> torch.Tensor:
        out = forward()
        out.backward(torch.ones_like(out))
        return out

    both()
    q.grad = k.grad = v.grad = None
    dist.barrier()
    extra = extra_memory(both, "cpu")
    runs: dict[str, list[dict[str, float]]] = {"forward": [], "backward": []}
    for _ in range(repeats):
        q.grad = k.grad = v.grad = None
        held: list[torch.Tensor] = []
        runs["forward"].append(timed(lambda held=held: held.append(forward()), inside))  # type: ignore[misc]
        runs["backward"].append(timed(lambda out=held[0]: out.backward(torch.ones_like(out)), inside))  # type: ignore[misc]
    shard_bytes = sum(t.numel() * t.element_size() for t in (q, k, v))
    memory: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(memory, extra)
    best = {name: min(found, key=lambda run: run["cpu_seconds"]) for name, found in runs.items()}
    return {**best, "shard_bytes": shard_bytes, "extra_bytes": max(memory)}


def timed(call: Callable[[], Any], inside: Inside) -> dict[str, float]:
    """Wall seconds, CPU seconds of all ranks (every thread, sending and receiving too), and those inside of calls."""
    dist.barrier()
    inside.seconds = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    mine = {"cpu": time.process_time() - cpu, "inside": inside.seconds}
    dist.barrier()
    wall = time.perf_counter() - wall
    every: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {
        "wall_seconds": wall,
        "cpu_seconds": sum(m["cpu"] for m in every),
        "inside_seconds": sum(m["inside"] for m in every),
        "busiest_over_mean": max(m["inside"] for m in every) * len(every) / max(1e-9, sum(m["inside"] for m in every)),
    }


def measure_link() -> dict[str, float]:
    """Bytes per second of passing a shard on, all ranks at once, and the latency of a small message."""
    group = group_of(None)
    seconds = {}
    for size in (1, 4 << 20):
        sent, received = torch.ones(size), torch.empty(size)
        times = []
        for _ in range(8):
            dist.barrier()
            start = time.perf_counter()
            rotate([sent], [received], 1, group, "measuring the link").wait()
            times.append(time.perf_counter() - start)
        seconds[size] = min(times)
    return {"latency": seconds[1], "bandwidth": 4 * (4 << 20) / (seconds[4 << 20] - seconds[1])}


def balance(world: int, seqlen: int) -> float:
    """Pairs of the busiest rank over the average, zigzag and causal."""
    rows = seqlen // world
    layout = Layout(world, "zigzag", rows, rows, seqlen, seqlen, None, 0)
    shares = [
        sum(pairs_of(p) for other in range(world) for p in pieces(layout, layout.q_shard(rank), layout.k_shard(other)))
        for rank in range(world)
    ]
    return max(shares) * world / sum(shares)


def validate(worlds: dict[str, Any], seqlen: int) -> dict[str, Any]:
    """What the model makes of the rate of one rank and the measured link, against 1, 2 and 4 ranks.

    Compared are seconds of a rank on a core of its own: predicted time, and CPU seconds, which other work on the
    machine does not stretch. Wall seconds stand beside them.
    """
    scenario = Scenario(1, seqlen, 1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, 4, causal=True)
    one = worlds["1"]["methods"]["ring"]
    forward, backward = (one[name]["inside_seconds"] for name in ("forward", "backward"))
    found: dict[str, Any] = {}
    for world, measured in worlds.items():
        rates = Rates("this machine", scenario.flops(1) / forward, 2.5 * scenario.flops(1) / backward,
                      5e9, 1e-4, measured=True)  # fmt: skip
        link = LINKS["loopback"]
        if "link" in measured:
            link = Link("loopback", measured["link"]["bandwidth"], 1.0, measured["link"]["latency"])
        predicted = predict(
            Scenario(int(world), seqlen, 1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, 4, causal=True), rates, link
        )
        passes = (("forward", predicted.forward), ("backward", predicted.backward))
        found[world] = {
            name: {
                "predicted": one_pass.seconds,
                "measured": measured["methods"]["ring"][name]["cpu_seconds"] / int(world),
                "wall": measured["methods"]["ring"][name]["wall_seconds"],
            }
            for name, one_pass in passes
        }
        found[world]["memory"] = {
            "predicted": predicted.memory_bytes,
            "measured": measured["methods"]["ring"]["shard_bytes"] + measured["methods"]["ring"]["extra_bytes"],
        }
    return found


def print_summary(report: dict[str, Any]) -> None:
    """The figures that have a bar, and the model's."""
    for world, found in report["worlds"].items():
        for method, figures in found["methods"].items():
            cpu, inside = (
                sum(figures[p][f] for p in ("forward", "backward")) for f in ("cpu_seconds", "inside_seconds")
            )
            overhead = f"{cpu / inside - 1:7.1%} overhead" if inside else " " * 16
            memory = (figures["shard_bytes"] + figures["extra_bytes"]) / 2**20
            print(f"{world} ranks  {method:<11} {cpu:7.2f} CPU s {overhead}  {memory:7.0f} MiB a rank", file=sys.stderr)
        print(f"{world} ranks  busiest rank {found['balance']:.3f} of the mean", file=sys.stderr)
    for world, passes in report["model"].items():
        texts = [f"{name} {v['predicted']:.3g} predicted {v['measured']:.3g} measured" for name, v in passes.items()]
        print(f"{world} ranks  " + ", ".join(texts), file=sys.stderr)


if __name__ == "__main__":
    main()
