"""What serving costs on this machine: appending rows to pages, the host's part of a step, and the cascade's break-even.

    python bench/serving_cost.py [--device cpu|cuda] [--threads N] [--only append,step,cascade] [--output FILE]

    append    one layer's K and V of a step into their pages, against torch's indexed assignment
    step      host time of PagedKVCache.step and of finding shared prefixes, for a decoding batch
    cascade   decoding with a shared prefix attended by every sequence and once for all, whatever the rule says; `rule`
              is what it says, `saved` the time that the keys not read again took, per byte of them; `in parts` with
              the group cut so that a decode kernel takes each part

On a GPU, kernels are timed in a CUDA graph of many calls. On a CPU the fastest of several calls counts: wall time, or
with one thread its own CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise import cascade
from tilewise import device as devices
from tilewise.bench.machine import commit, machine, versions
from tilewise.kv.writing import write_rows
from tilewise.operands import Flags, Operands

Run = Callable[[], object]
Row = dict[str, Any]

KV_HEADS, DIM, PAGE_SIZE, OWN = 8, 128, 64, 128
GRAPH_CALLS, SAMPLES = 20, 15
DECODE_ROWS = 64


def seconds(run: Run, device: str) -> float:
    """Of one call."""
    run()
    if device == "cuda":
        return _graph_seconds(run)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: list[float] = []
    while len(taken) < SAMPLES and sum(taken) < 2.0:
        start = clock()
        run()
        taken.append(clock() - start)
    return min(taken)


def _graph_seconds(run: Run) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    taken = []
    for _ in range(SAMPLES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        taken.append(float(start.elapsed_time(stop)) * 1e-3 / GRAPH_CALLS)
    return statistics.median(taken)


def measure_append(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The kernel that writes one layer's rows."""
    for rows in (1, 64, 256, 4096):
        pages = torch.empty(2, rows // PAGE_SIZE + 64, PAGE_SIZE, KV_HEADS, DIM, dtype=dtype, device=device)
        new = torch.randn(2, rows, KV_HEADS, DIM, device=device).to(dtype)
        slots = torch.randperm(pages.shape[1] * PAGE_SIZE, device=device)[:rows]
        places = slots // PAGE_SIZE, slots % PAGE_SIZE

        def indexed(pages: Tensor = pages, new: Tensor = new, places: tuple[Tensor, ...] = places) -> None:
            for layer, part in zip(pages, new, strict=True):
                layer.index_put_(places, part)

        def kernel(pages: Tensor = pages, new: Tensor = new, slots: Tensor = slots) -> None:
            write_rows(new[0], new[1], pages[0], pages[1], slots)

        kernel()
        want = pages.flatten(1, 2)[:, slots]
        assert torch.equal(want, new)
        mine, theirs = seconds(kernel, device), seconds(indexed, device)
        moved = 2 * new.numel() * new.element_size()
        yield {"rows": rows, "us": mine * 1e6, "GB/s": moved / mine / 1e9, "indexed us": theirs * 1e6}


def measure_step(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """What a decoding step costs the host."""
    for batch in (64, 256):
        for shared in (False, True):
            cache = tw.PagedKVCache(batch * 80, 16, 1, 1, 16, dtype=dtype, device=device)
            requests = [cache.add([0 if shared else n, *range(1000), n]) for n in range(batch)]
            for part in (requests[:1], requests[1:]):
                for request in part:
                    cache.reuse(request)
                count = cache.step(part)
                cache.append(*torch.zeros(2, count, 1, 16, dtype=dtype, device=device).unbind())
            times: dict[str, list[float]] = {"step us": [], "prefixes us": [], "append us": []}
            rows = torch.zeros(2, batch, 1, 16, dtype=dtype, device=device)
            calls: tuple[Run, ...] = (
                functools.partial(cache.step, requests, tokens=requests),
                cache.shared_prefix,
                functools.partial(cache.append, rows[0], rows[1]),
            )
            for _ in range(48):
                for name, call in zip(times, calls, strict=True):
                    start = time.thread_time()
                    call()
                    times[name].append((time.thread_time() - start) * 1e6)
            yield {"batch": batch, "shared": shared} | {k: statistics.median(v) for k, v in times.items()}


def measure_cascade(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Decoding with and without, from little in common to much."""
    for heads in (8, 32):
        for batch, prefix in ((2, 1024), (2, 8192), (8, 256), (8, 2048), (64, 64), (64, 512), (64, 4096)):
            yield _cascade_row(device, dtype, heads, batch, prefix)


def _cascade_row(device: str, dtype: torch.dtype, heads: int, batch: int, prefix: int) -> Row:
    pages = prefix // PAGE_SIZE + batch * (OWN // PAGE_SIZE)
    table = torch.arange(prefix // PAGE_SIZE, device=device).expand(batch, -1)
    own = torch.arange(prefix // PAGE_SIZE, pages, device=device).view(batch, -1)
    table = torch.cat((table, own), 1).int()
    k, v = (torch.randn(pages, PAGE_SIZE, KV_HEADS, DIM, device=device).to(dtype) for _ in range(2))
    q = torch.randn(batch, heads, DIM, device=device).to(dtype)
    lengths = torch.full((batch,), prefix + OWN, dtype=torch.int32, device=device)
    shared = _hint(table, lengths, prefix, batch)
    # Few enough rows for the GPU's decode kernel, which splits keys over processors.
    parts = _hint(table, lengths, prefix, min(batch, max(1, DECODE_ROWS * KV_HEADS // heads)))
    operands, flags = Operands(q, k, v, block_table=table, seqlens_k=lengths), Flags()
    spec = devices.of(q.device)
    apart = cascade._apart  # noqa: SLF001  (the rule left out)
    plain = tw.attention_paged(q, k, v, table, lengths)
    for hint in (shared, parts):
        torch.testing.assert_close(apart(hint, operands, flags)[0], plain, atol=2e-2, rtol=2e-2)
    without = seconds(lambda: tw.attention_paged(q, k, v, table, lengths), device)
    with_it = seconds(lambda: apart(shared, operands, flags), device)
    in_parts = seconds(lambda: apart(parts, operands, flags), device)
    saved = shared.keys_saved * KV_HEADS * 2 * DIM * k.element_size()
    return {
        "heads": heads, "batch": batch, "prefix": prefix, "without us": without * 1e6, "cascade us": with_it * 1e6,
        "in parts us": in_parts * 1e6, "ratio": without / with_it, "saved MB": saved / 1e6,
        "saved GB/s": saved / (without - with_it) / 1e9 if without > with_it else None,
        "rule": cascade.refusal(shared, operands, flags, spec) is None,
    }  # fmt: skip


def _hint(table: Tensor, lengths: Tensor, prefix: int, size: int) -> cascade.SharedPrefix:
    """One group of all sequences, or several of `size` with the same prefix."""
    batch, pages, device = len(table), prefix // PAGE_SIZE, table.device
    count = batch // size
    starts = torch.arange(0, batch + 1, size, dtype=torch.int32, device=device)
    keys = torch.full((count,), prefix, dtype=torch.int32, device=device)
    groups = (cascade.Group(size, size, prefix),) * count
    prefixes = table[:count, :pages].contiguous()
    return cascade.SharedPrefix(groups, prefixes, keys, starts, None, table[:, pages:].contiguous(), lengths - prefix)


SECTIONS = {"append": measure_append, "step": measure_step, "cascade": measure_cascade}


def show(row: Row) -> str:
    """One line."""
    cells = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    return "  " + ", ".join(cells)


def main() -> None:
    """Measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on a CPU, else bfloat16")
    parser.add_argument("--threads", type=int, help="torch's threads on a CPU")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    found: dict[str, list[Row]] = {}
    for name in given.only.split(","):
        print(f"{name} ({given.device}, {dtype}, {torch.get_num_threads()} threads)")
        found[name] = []
        for row in SECTIONS[name](given.device, dtype):
            found[name].append(row)
            print(show(row))
            sys.stdout.flush()
    if given.output:
        about: Row = {"machine": machine(), "versions": versions(), "commit": commit(), "dtype": str(dtype)}
        about["threads"] = torch.get_num_threads()
        given.output.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
