"""What serving costs on this machine: appending rows to pages, the host's part of a step, and the cascade's break-even.

    python bench/serving_cost.py [--device cpu|cuda] [--threads N] [--only append,step,fixed,cascade,codes]
        [--output FILE]

    append    one layer's K and V of a step into their pages, against torch's indexed assignment; `fp8 us` into e4m3
              pages, quantised on the way
    step      host time of PagedKVCache.step, of its tables, of finding shared prefixes and of append, for a decoding
              batch whose requests all cross page borders in the same steps: the median step, and the worst. The median
              of 256 requests has to be less than 1 ms, or the command fails
    fixed     the same for a step with seats; on a GPU also the time a captured step of 4 layers takes when it is
              replayed, and when the same calls are made one by one
    cascade   decoding with a shared prefix attended by every sequence and once for all, whatever the rule says; `rule`
              is what it says, `saved` the time that the keys not read again took, per byte of them
    codes     decoding from pages in 16 bits, e4m3 and int8, in turn; `error` against the dequantised pages

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from suite.measuring import commit, device_seconds
from tilewise import cascade
from tilewise import device as devices
from tilewise.bench.machine import machine, versions
from tilewise.fp8 import quantize_pages
from tilewise.kv.quantised import QuantisedRows, append_quantised
from tilewise.kv.writing import write_rows
from tilewise.operands import Flags, Operands

Run = Callable[[], object]
Row = dict[str, Any]

KV_HEADS, DIM, PAGE_SIZE, OWN = 8, 128, 64, 128
GRAPH_CALLS, SAMPLES = 20, 15
WARM_STEPS = 4
# Of the host's part of a step for 256 requests.
MOST_MICROSECONDS = 1000


def seconds(run: Run, device: str) -> float:
    """Of one call."""
    run()
    if device == "cuda":
        return graph_seconds(run)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: list[float] = []
    while len(taken) < SAMPLES and sum(taken) < 2.0:
        start = clock()
        run()
        taken.append(clock() - start)
    return min(taken)


def graph_seconds(run: Run) -> float:
    """Of one call in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    return statistics.median(device_seconds(graph.replay) / GRAPH_CALLS for _ in range(SAMPLES))


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
        codes = torch.zeros(pages.shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        scales = torch.full((2, pages.shape[1], KV_HEADS), 1.0, device=device)
        # Rows of a page come one after another: those of a prompt, or one row for each of many pages.
        ordered = slots.sort().values if rows > pages.shape[1] else torch.arange(rows, device=device) * PAGE_SIZE

        def quantised(
            new: Tensor = new, codes: Tensor = codes, scales: Tensor = scales, slots: Tensor = ordered
        ) -> None:
            append_quantised(QuantisedRows._make([*new, *codes, *scales, slots]))

        mine, theirs, fp8 = (seconds(run, device) for run in (kernel, indexed, quantised))
        moved = 2 * new.numel() * new.element_size()
        yield {
            "rows": rows, "us": mine * 1e6, "GB/s": moved / mine / 1e9, "indexed us": theirs * 1e6, "fp8 us": fp8 * 1e6
        }  # fmt: skip


def measure_step(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """What a decoding step costs the host."""
    for batch in (64, 256):
        for shared in (False, True):
            cache, requests = _filled_cache(batch, shared, device, dtype)
            rows = torch.zeros(2, batch, 1, 16, dtype=dtype, device=device)
            calls: dict[str, Run] = {
                "step": functools.partial(cache.step, requests, tokens=requests),
                "tables": functools.partial(_tables, cache),
                "prefixes": cache.shared_prefix,
                "append": functools.partial(cache.append, rows[0], rows[1]),
            }
            yield {"batch": batch, "shared": shared} | _host_times(calls, 96)


def _tables(cache: tw.PagedKVCache) -> tuple[Tensor, Tensor]:
    return cache.block_table(), cache.seqlens()


def measure_fixed(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """What a step with seats costs the host, and what a captured one takes."""
    for batch in (64, 256):
        cache, requests = _filled_cache(batch, True, device, dtype, layers=4, dim=64, max_requests=batch)
        q = torch.zeros(batch, 4, 64, dtype=dtype, device=device)
        rows = torch.zeros(2, batch, 1, 64, dtype=dtype, device=device)

        def layers(cache: tw.PagedKVCache = cache, q: Tensor = q, rows: Tensor = rows) -> None:
            for layer in range(cache.num_layers):
                cache.append(rows[0], rows[1], layer=layer)
                cache.attention(q, layer=layer)

        step = functools.partial(cache.step, requests, tokens=requests, fixed=True)
        row: Row = {"batch": batch} | _host_times({"step": step, "layers": layers}, 96)
        if device == "cuda":
            step()
            layers()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layers()
            taken: dict[str, list[float]] = {"replayed us": [], "one by one us": []}
            for name, run in (("replayed us", graph.replay), ("one by one us", layers)) * 20:
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                run()
                cache.mark_written()
                torch.cuda.synchronize()
                taken[name].append((time.perf_counter() - start) * 1e6)
            row |= {name: statistics.median(times) for name, times in taken.items()}
        yield row


def _filled_cache(
    batch: int, shared: bool, device: str, dtype: torch.dtype, *, layers: int = 1, dim: int = 16, **options: Any
) -> tuple[tw.PagedKVCache, list[int]]:
    """A cache with prompts of 1002 tokens, the first 1000 of them the same if `shared`."""
    cache = tw.PagedKVCache(batch * 84, 16, layers, 1, dim, dtype=dtype, device=device, max_seqlen=84 * 16, **options)
    requests = [cache.add([0 if shared else n, *range(1000), n]) for n in range(batch)]
    for part in (requests[:1], requests[1:]):
        for request in part:
            cache.reuse(request)
        count = cache.step(part)
        for layer in range(layers):
            cache.append(*torch.zeros(2, count, 1, dim, dtype=dtype, device=device).unbind(), layer=layer)
    return cache, requests


def _host_times(calls: dict[str, Run], steps: int) -> Row:
    """CPU time of each call: the median, and the sum of all in the median step and in the worst.

    The first steps, in which kernels are compiled and memory is allocated, do not count.
    """
    times: list[list[float]] = []
    for _ in range(steps + WARM_STEPS):
        line = []
        for call in calls.values():
            start = time.thread_time()
            call()
            line.append((time.thread_time() - start) * 1e6)
        times.append(line)
    del times[:WARM_STEPS]
    each = {f"{name} us": statistics.median(line[n] for line in times) for n, name in enumerate(calls)}
    together = sorted(map(sum, times))
    return each | {"together us": together[steps // 2], "worst us": together[-1]}


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
    shared = _hint(table, lengths, prefix)
    operands, flags = Operands(q, k, v, block_table=table, seqlens_k=lengths), Flags()
    spec = devices.of(q.device)
    apart = cascade._attend_separately  # noqa: SLF001  (the rule left out)
    plain = tw.attention_paged(q, k, v, table, lengths)
    torch.testing.assert_close(apart(shared, operands, flags)[0], plain, atol=2e-2, rtol=2e-2)
    without = seconds(lambda: tw.attention_paged(q, k, v, table, lengths), device)
    with_it = seconds(lambda: apart(shared, operands, flags), device)
    saved = shared.keys_saved * KV_HEADS * 2 * DIM * k.element_size()
    return {
        "heads": heads, "batch": batch, "prefix": prefix, "without us": without * 1e6, "cascade us": with_it * 1e6,
        "ratio": without / with_it, "saved MB": saved / 1e6,
        "saved GB/s": saved / (without - with_it) / 1e9 if without > with_it else None,
        "rule": cascade.refusal(shared, operands, flags, spec) is None,
    }  # fmt: skip


def _hint(table: Tensor, lengths: Tensor, prefix: int) -> cascade.SharedPrefix:
    """One group of all sequences."""
    batch, pages, device = len(table), prefix // PAGE_SIZE, table.device
    starts = torch.tensor([0, batch], dtype=torch.int32, device=device)
    keys = torch.full((1,), prefix, dtype=torch.int32, device=device)
    groups, prefixes = (cascade.Group(batch, batch, prefix),), table[:1, :pages].contiguous()
    return cascade.SharedPrefix(groups, prefixes, keys, starts, None, table[:, pages:].contiguous(), lengths - prefix)


def measure_codes(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Decoding from pages in 8 bits."""
    shapes = ((16, 8192, 32), (64, 8192, 32), (16, 32768, 32), (64, 2048, 32), (1, 32768, 32), (16, 8192, 64))
    for batch, keys, heads in shapes if device == "cuda" else ((1, 8192, 32), (4, 2048, 32)):
        count = batch * keys // PAGE_SIZE
        k, v = (torch.randn(count, PAGE_SIZE, KV_HEADS, DIM, device=device).to(dtype) for _ in range(2))
        q = torch.randn(batch, heads, DIM, device=device).to(dtype)
        table = torch.randperm(count, device=device).int().view(batch, -1)
        lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)

        def attend(pages: Sequence[Any], q: Tensor = q, table: Tensor = table, lengths: Tensor = lengths) -> Tensor:
            return tw.attention_paged(q, pages[0], pages[1], table, lengths)

        row: Row = {"batch": batch, "keys": keys, "heads": heads}
        runs: dict[str, Run] = {"16 bits" if dtype.itemsize == 2 else "32 bits": functools.partial(attend, (k, v))}
        for name, codes in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8)):
            pages = [quantize_pages(t, dtype=codes) for t in (k, v)]
            got, want = attend(pages).double(), attend([t.dequantize().to(dtype) for t in pages]).double()
            row[f"{name} error"] = float((got - want).norm() / want.norm())
            runs[name] = functools.partial(attend, pages)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(3):
            for name, run in runs.items():
                taken[name].append(seconds(run, device) * 1e6)
        plain, *others = {name: statistics.median(times) for name, times in taken.items()}.items()
        row[f"{plain[0]} us"] = plain[1]
        for name, median in others:
            row |= {f"{name} us": median, f"{name} speedup": plain[1] / median}
        yield row


SECTIONS = {
    "append": measure_append,
    "step": measure_step,
    "fixed": measure_fixed,
    "cascade": measure_cascade,
    "codes": measure_codes,
}


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
    slow = [row for row in found.get("step", []) if row["batch"] == 256 and row["together us"] >= MOST_MICROSECONDS]
    if slow:
        sys.exit(f"a step of 256 requests takes {slow[0]['together us']:.0f} us of the host, not less than 1000")


if __name__ == "__main__":
    main()
