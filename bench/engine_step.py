"""One step of a serving engine, beside FA3: the calls of all attention layers, driven by an engine's own metadata.

    python bench/engine_step.py [--layers 64] [--output FILE]

The layers are `tilewise.integrations.engines.Layer`, as vLLM's backend makes them. Each has a cache of its own, of
vLLM's shape (blocks, K/V heads, block size, K and V next to each other), in both physical orders that vLLM has. A step
has a block table with shuffled pages, a slot mapping and query_start_loc. FA3 is the operator of vLLM's own library
(FA3_LIBRARY names the file), called as vLLM's backend calls it: results into the engine's buffer, the schedule computed
once per step.

    graph us  time of a layer in a CUDA graph of all layers
    eager us  the same, called one by one
    host us   host time of a layer's call, while the GPU lags behind
    write us  host time of storing a layer's keys and values

Results are compared with FA3's before anything is timed. A captured decoding step is replayed with other lengths and
pages, and compared with the same calls made one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suite.measuring import commit, device_seconds
from tilewise.bench.machine import machine, versions
from tilewise.integrations.engines import Batch, Layer

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
SAMPLES = 15
TOLERANCE = 2e-2
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `seqlen_k` keys, of which the last `seqlen_q` are this step's; of the first `decodes`
    sequences, the last one is.
    """

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    decodes: int = 0

    @property
    def counts(self) -> list[int]:
        """Query rows of each sequence."""
        return [1] * self.decodes + [self.seqlen_q] * (self.batch - self.decodes)

    @property
    def rows(self) -> int:
        """Query rows of the step."""
        return sum(self.counts)


CASES = (
    Case("decode", 1, 1, 8192),
    Case("decode", 16, 1, 8192),
    Case("decode", 64, 1, 2048),
    Case("verify 4 drafts", 16, 5, 8192),
    Case("prefill", 1, 8192, 8192),
    Case("chunk of a prefill", 1, 2048, 8192),
    Case("decode beside a chunk", 17, 2048, 8192, 16),
    Case("decode beside a chunk", 65, 512, 2048, 64),
)
# Sequences of different lengths, for what a step costs the host.
SMALL = Case("host", 16, 1, 512)


class Step:
    """The tensors of a case, on the device."""

    def __init__(self, case: Case, layers: int, heads_first: bool, device: str) -> None:
        self.case, self.layers = case, layers
        pages = case.seqlen_k // BLOCK
        blocks = case.batch * pages + 1
        order = (blocks, KV_HEADS, BLOCK, 2 * DIM) if heads_first else (blocks, BLOCK, KV_HEADS, 2 * DIM)
        memory = torch.empty(layers, *order, dtype=torch.bfloat16, device=device)
        for layer in memory:
            layer.normal_()
        self.caches = list(memory if heads_first else memory.transpose(2, 3))
        self.q = torch.randn(case.rows, HEADS, DIM, device=device).bfloat16()
        self.k, self.v = torch.randn(2, case.rows, KV_HEADS, DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.pages, self.blocks, self.device = pages, blocks, device
        self.table = torch.zeros(case.batch, pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(case.batch, dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, *case.counts]).cumsum(0).int()
        self.totals = self.starts.to(device)
        self.slots = torch.zeros(case.rows, dtype=torch.int64, device=device)
        self.plan(0)

    def plan(self, seed: int) -> None:
        """Other pages and, from seed 1 on, other lengths, written in place as an engine does."""
        case = self.case
        order = torch.randperm(self.blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.table.copy_(order.view(case.batch, self.pages).int())
        shorter = torch.zeros(case.batch, dtype=torch.int64)
        if seed:
            shorter = torch.arange(case.batch) * 37 % (case.seqlen_k - case.seqlen_q)
        lengths = case.seqlen_k - shorter
        self.lengths.copy_(lengths.int())
        pairs = zip(lengths.tolist(), case.counts, strict=True)
        places = torch.cat([torch.arange(length - count, length) for length, count in pairs])
        owners = torch.arange(case.batch).repeat_interleave(torch.tensor(case.counts))
        pages = self.table.cpu().long()[owners, places // BLOCK]
        self.slots.copy_(pages * BLOCK + places % BLOCK)

    def batch(self) -> Batch:
        """What the builder makes of it."""
        case = self.case
        batch = Batch(case.rows, self.totals, case.seqlen_q, self.lengths, self.table, self.slots, True, BLOCK)
        if case.decodes:
            batch.part_decodes(self.starts)
        return batch


class Tilewise:
    """All layers of a step."""

    def __init__(self, step: Step) -> None:
        self.step, self.batch = step, step.batch()
        self.layers = [Layer(HEADS, DIM, DIM**-0.5, KV_HEADS) for _ in step.caches]

    def attend(self) -> Tensor:
        """The attention of every layer."""
        step = self.step
        for layer, cache in zip(self.layers, step.caches, strict=True):
            layer.attend(step.q, cache, self.batch, step.out)
        return step.out

    def write(self) -> None:
        """The keys and values of every layer."""
        step = self.step
        for layer, cache in zip(self.layers, step.caches, strict=True):
            layer.write(step.k, step.v, cache, step.slots)


class Fa3:
    """The same by vLLM's FA3."""

    def __init__(self, step: Step) -> None:
        torch.ops.load_library(os.environ["FA3_LIBRARY"])
        self.ops: Any = torch.ops._vllm_fa3_C  # noqa: SLF001 - the name that the library registers
        self.step = step
        self.pages = [cache.transpose(1, 2).split(DIM, -1) for cache in step.caches]
        self.schedule = self._schedule()

    def _schedule(self) -> Tensor | None:
        case, step = self.step.case, self.step
        shape = (case.batch, case.seqlen_q, case.seqlen_k, HEADS, KV_HEADS, DIM, DIM, torch.bfloat16, step.lengths)
        more = (step.totals, None, None, None, None, BLOCK, 0, True, -1, -1, False, 0, None, 0)
        schedule: Tensor = self.ops.get_scheduler_metadata(*shape, *more)
        return schedule

    def attend(self) -> Tensor:
        """The attention of every layer."""
        step, case = self.step, self.step.case
        lists = (step.totals, None, None, None, step.lengths, case.seqlen_q, case.seqlen_k, step.table)
        others = (None,) * 8
        flags = (DIM**-0.5, True, -1, -1, 0.0, True, self.schedule, 0, None, 0, None, 1, 0, None)
        for k, v in self.pages:
            self.ops.fwd(step.q, k, v, None, None, None, step.out, *lists, *others, *flags)
        return step.out


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """A graph of all layers."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(run: Run, layers: int) -> float:
    """Microseconds of a layer on the device."""
    run()
    return statistics.median(1e6 * device_seconds(run) / layers for _ in range(SAMPLES))


def host_time(run: Run, layers: int) -> float:
    """Microseconds of a layer's call on the host: the GPU is busy before the first, so no call waits for it."""
    run()
    taken = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e6 / layers)
    return statistics.median(taken)


def check_replay(ours: Tilewise, graph: torch.cuda.CUDAGraph) -> None:
    """A captured step gives what single calls give when lengths and pages have changed."""
    for seed in (1, 2):
        ours.step.plan(seed)
        want = ours.attend().clone()
        ours.step.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(ours.step.out, want):
            sys.exit(f"{ours.step.case}: a replayed step differs by {(ours.step.out - want).abs().max()}")
    ours.step.plan(0)


def measure(case: Case, layers: int, heads_first: bool) -> dict[str, Any]:
    """One row of the table."""
    step = Step(case, layers, heads_first, "cuda")
    ours = Tilewise(step)
    theirs = Fa3(step) if "FA3_LIBRARY" in os.environ else None
    got = ours.attend().clone()
    row: dict[str, Any] = {"case": case.name, "batch": case.batch, "seqlen_q": case.seqlen_q, "keys": case.seqlen_k}
    row["decodes"] = case.decodes
    row["order"] = "heads first" if heads_first else "tokens first"
    if theirs is not None:
        row["largest difference"] = float((theirs.attend() - got).abs().max())
        if not row["largest difference"] < TOLERANCE:
            sys.exit(f"{case}: differs from FA3 by {row['largest difference']}")
    graph = captured(ours.attend)
    if case.seqlen_q < 64:
        check_replay(ours, graph)
    row["tilewise graph us"] = timed(graph.replay, layers)
    row["tilewise eager us"] = timed(ours.attend, layers)
    row["write graph us"] = timed(captured(ours.write).replay, layers)
    if theirs is not None:
        row["fa3 graph us"] = timed(captured(theirs.attend).replay, layers)
        row["fa3 eager us"] = timed(theirs.attend, layers)
        row["speed in a graph"] = row["fa3 graph us"] / row["tilewise graph us"]
        row["speed eager"] = row["fa3 eager us"] / row["tilewise eager us"]
    return row


def measure_host(layers: int) -> dict[str, Any]:
    """What a layer costs the host."""
    step = Step(SMALL, layers, False, "cuda")
    ours = Tilewise(step)
    row = {"attend us": host_time(ours.attend, layers), "write us": host_time(ours.write, layers)}
    start = time.perf_counter()
    for _ in range(100):
        step.batch()
    row["build us a step"] = (time.perf_counter() - start) * 1e4
    if "FA3_LIBRARY" in os.environ:
        row["fa3 us"] = host_time(Fa3(step).attend, layers)
    return row


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("engine_step.py needs a GPU")
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit()}
    with torch.inference_mode():
        results["host"] = measure_host(chosen.layers)
        print("host, a layer:", {name: round(value, 1) for name, value in results["host"].items()}, flush=True)
        results["steps"] = []
        for case in CASES:
            for heads_first in (False, True):
                # A prefill's caches need not be read from memory again: fewer layers show the same.
                layers = chosen.layers if case.seqlen_q < 64 else max(1, chosen.layers // 8)
                row = measure(case, layers, heads_first)
                results["steps"].append(row)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                torch.cuda.empty_cache()
                if chosen.output is not None:
                    chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
