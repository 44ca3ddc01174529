"""What flags of a call cost on a GPU: `out=`, `return_max_logits`, `deterministic="batch"`, against a call without.

    python bench/call_flags.py [--output FILE]

Device time is that of a CUDA graph of many calls, the median of several replays, both forms in turn. Host time is that
of calls that are queued without waiting for the device. `ratio` is the device time with the flag over that without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from suite import measuring
from tilewise.bench.machine import machine, versions

GRAPH_CALLS, REPLAYS, HOST_CALLS = 20, 15, 100
Run = Callable[[], object]


def rows(*shape: int) -> Tensor:
    """Random bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """A graph of GRAPH_CALLS calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    return graph


def device_seconds(runs: list[Run]) -> list[float]:
    """Of one call of each."""
    graphs, taken = [captured(run) for run in runs], [list[float]() for _ in runs]
    turns = list(zip(graphs, taken, strict=True))
    for _ in range(REPLAYS):
        turns.reverse()  # the clock depends on what ran before
        for graph, samples in turns:
            samples.append(measuring.device_seconds(graph.replay) / GRAPH_CALLS)
    return [statistics.median(samples) for samples in taken]


def host_seconds(run: Run) -> float:
    """Of queueing one call."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / HOST_CALLS


def compared(name: str, call: Callable[..., object], **flag: Any) -> dict[str, Any]:
    """The row of a call with and without a flag."""
    plain, flagged = device_seconds([call, lambda: call(**flag)])
    host, host_flagged = host_seconds(call), host_seconds(lambda: call(**flag))
    row = {
        "name": name, "us": plain * 1e6, "us with": flagged * 1e6, "ratio": flagged / plain,
        "host us": host * 1e6, "host us with": host_flagged * 1e6,
    }  # fmt: skip
    print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return row


def forward(batch: int, seqlen: int, head_dim: int, causal: bool) -> tuple[Callable[..., object], Tensor]:
    """A call with 16 heads, and memory for its result."""
    q, k, v = (rows(batch, 16, seqlen, head_dim) for _ in range(3))
    return lambda **more: tw.attention(q, k, v, causal=causal, **more), torch.empty_like(q)


def decoding(batch: int, seqlen: int, page_size: int | None) -> tuple[Callable[..., object], Tensor]:
    """A call with 32 query heads on 8, and memory for its result."""
    if page_size is None:
        q, k, v = rows(batch, 32, 1, 128), rows(batch, 8, seqlen, 128), rows(batch, 8, seqlen, 128)
        return lambda **more: tw.attention(q, k, v, **more), torch.empty_like(q)
    q, count = rows(batch, 32, 128), batch * seqlen // page_size
    k, v = rows(count, page_size, 8, 128), rows(count, page_size, 8, 128)
    table = torch.randperm(count, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    return lambda **more: tw.attention_paged(q, k, v, table, lengths, **more), torch.empty_like(q)


def main() -> None:
    """All rows, printed and written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = []
    for batch, seqlen, head_dim, causal in (
        (4, 4096, 64, True), (2, 8192, 64, True), (2, 8192, 64, False), (4, 4096, 128, True), (2, 8192, 128, False),
        (2, 4096, 256, True),
    ):  # fmt: skip
        call, out = forward(batch, seqlen, head_dim, causal)
        name = f"forward {batch} x {seqlen}, head_dim {head_dim}{', causal' if causal else ''}"
        found.append(compared(f"max_logits: {name}", call, return_max_logits=True))
        found.append(compared(f"out: {name}", call, out=out))
        found.append(compared(f"batch: {name}", call, deterministic="batch"))
    for batch, seqlen, page_size in (
        (16, 8192, None), (16, 8192, 16), (16, 8192, 64), (64, 8192, None), (1, 8192, None), (1, 131072, None),
        (16, 65536, None),
    ):  # fmt: skip
        call, out = decoding(batch, seqlen, page_size)
        name = f"decoding {batch} x {seqlen}{'' if page_size is None else f', pages of {page_size}'}"
        found.append(compared(f"batch: {name}", call, deterministic="batch"))
        found.append(compared(f"out: {name}", call, out=out))
    if arguments.output is not None:
        about = {"machine": machine(), "versions": versions(), "commit": measuring.commit()}
        arguments.output.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
