"""What a call costs on a CPU where its length is new, or the same again, beside torch's SDPA.

    python bench/cpu_calls.py [--threads N] [--output FILE]

Decoding over a cache that grows by one key a call, also in pages and by the registered operator, prompts of all
lengths, packed prompts, and training on sequences of all lengths, also packed and with dropout. Every length is met
once ("new"), then three times more ("again"): medians in microseconds over all lengths. `ratio` is new over again,
`torch` SDPA's time for the same new lengths, in turn with ours. Garbage collection is on, as in programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from suite import measuring
from tilewise.bench.machine import machine, versions
from tilewise.operands import Flags
from tilewise.schemas import operand_names

# Lengths that compile and plan, before any is measured.
FIRST = range(3, 17)
Call = Callable[[], object]
# (tilewise, torch or None) for each length.
Cases = Iterator[tuple[Call, Call | None]]


def seconds(call: Call) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def decoding(lengths: range, heads: int, kv_heads: int, batch: int = 1, dim: int = 64) -> Cases:
    """One query over a cache with one key more every call."""
    q = torch.randn(batch, heads, 1, dim)
    cache = [torch.randn(batch, kv_heads, lengths[-1], dim) for _ in range(2)]
    for n in lengths:
        k, v = (each[:, :, :n] for each in cache)
        yield (
            lambda k=k, v=v: tw.attention(q, k, v),  # type: ignore[misc]
            lambda k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads),  # type: ignore[misc]
        )


def prompts(lengths: range, heads: int, dim: int, *, causal: bool) -> Cases:
    """Prefill."""
    most = torch.randn(3, 1, heads, lengths[-1], dim)
    for n in lengths:
        q, k, v = most[:, :, :, :n].contiguous()
        yield (
            lambda q=q, k=k, v=v: tw.attention(q, k, v, causal=causal),  # type: ignore[misc]
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=causal),  # type: ignore[misc]
        )


def packed(lengths: range, heads: int, dim: int) -> Cases:
    """Two prompts, packed."""
    for n in lengths:
        q, k, v = torch.randn(3, 2 * n, heads, dim)
        cu = torch.tensor([0, n - n // 3, 2 * n], dtype=torch.int32)
        yield lambda q=q, k=k, v=v, cu=cu: tw.attention_varlen(q, k, v, cu, cu, causal=True), None  # type: ignore[misc]


def pages(lengths: range, heads: int, kv_heads: int, dim: int) -> Cases:
    """One query of each of two sequences over pages, of which there are more every 16 calls."""
    q, stored = torch.randn(2, heads, dim), torch.randn(2, 64, 16, kv_heads, dim)
    for n in lengths:
        table, keys = torch.arange(2 * -(-n // 16), dtype=torch.int32).view(2, -1), torch.full((2,), n).int()
        yield lambda t=table, n=keys: tw.attention_paged(q, *stored, t, n), None  # type: ignore[misc, call-overload]


def operator(lengths: range, heads: int, dim: int) -> Cases:
    """Decoding as compiled code calls it."""
    op, flags = torch.ops.tilewise.dense.default, tuple(Flags())
    q, cache = torch.randn(1, heads, 1, dim), torch.randn(2, 1, heads, lengths[-1], dim)
    rest = (*[None] * (len(operand_names("dense")) - 3), *flags)
    for n in lengths:
        k, v = (each[:, :, :n] for each in cache)
        yield lambda k=k, v=v: op(q, k, v, *rest), None  # type: ignore[misc]


def differentiated(attend: Callable[..., Tensor], *given: Any, **flags: Any) -> None:
    """Forward and backward; `given` are q, k, v, the gradient of the result, and other tensors."""
    q, k, v, dout, *others = given
    torch.autograd.grad(attend(q, k, v, *others, **flags), (q, k, v), dout)


def training(lengths: range, heads: int, dim: int, dropout: float = 0.0) -> Cases:
    """Forward and backward."""
    run, torchs = differentiated, scaled_dot_product_attention
    for n in lengths:
        given = [torch.randn(1, heads, n, dim, requires_grad=True) for _ in range(3)]
        dout = torch.randn(1, heads, n, dim)
        yield (
            lambda a=given, g=dout: run(tw.attention, *a, g, causal=True, dropout=dropout),  # type: ignore[misc]
            lambda a=given, g=dout: run(torchs, *a, g, is_causal=True, dropout_p=dropout),  # type: ignore[misc]
        )


def packed_training(lengths: range, heads: int, dim: int) -> Cases:
    """Forward and backward of two packed sequences."""
    for n in lengths:
        given = [torch.randn(2 * n, heads, dim, requires_grad=True) for _ in range(3)]
        given += [torch.randn(2 * n, heads, dim), *[torch.tensor([0, n - n // 3, 2 * n], dtype=torch.int32)] * 2]
        yield lambda a=given: differentiated(tw.attention_varlen, *a, causal=True), None  # type: ignore[misc]


CASES: dict[str, Callable[[range], Cases]] = {
    "decode 8 heads": lambda lengths: decoding(lengths, 8, 8),
    "decode 8/2 heads": lambda lengths: decoding(lengths, 8, 2),
    "decode 8/2 heads, batch 16": lambda lengths: decoding(lengths, 8, 2, batch=16),
    "prefill 8 heads": lambda lengths: prompts(lengths, 8, 64, causal=False),
    "prefill 8 heads, causal": lambda lengths: prompts(lengths, 8, 64, causal=True),
    "prefill 2 heads of 32, causal": lambda lengths: prompts(lengths, 2, 32, causal=True),
    "packed 2 heads of 32, causal": lambda lengths: packed(lengths, 2, 32),
    "pages, decode 8/2 heads, batch 2": lambda lengths: pages(lengths, 8, 2, 64),
    "operator, decode 8 heads": lambda lengths: operator(lengths, 8, 64),
    "training 2 heads of 32, causal": lambda lengths: training(lengths, 2, 32),
    "training 2 heads of 32, causal, dropout": lambda lengths: training(lengths, 2, 32, 0.1),
    "packed training 2 heads of 32, causal": lambda lengths: packed_training(lengths, 2, 32),
}


def measured(name: str, cases: Cases) -> dict[str, Any]:
    """The row of a case."""
    new, again, torch_new, torch_again = (list[float]() for _ in range(4))
    for number, (ours, torchs) in enumerate(cases):
        ways = [(ours, new, again)] if torchs is None else [(ours, new, again), (torchs, torch_new, torch_again)]
        for call, first, later in ways if number % 2 else reversed(ways):
            first.append(seconds(call))
            later += [seconds(call) for _ in range(3)]
    samples = {"new": new, "again": again, "torch new": torch_new, "torch again": torch_again}
    skipped = {"new": len(FIRST), "torch new": len(FIRST), "again": 3 * len(FIRST), "torch again": 3 * len(FIRST)}
    medians = {at: statistics.median(found[skipped[at] :]) * 1e6 for at, found in samples.items() if found}
    row = {"name": name, **medians, "ratio": medians["new"] / medians["again"]}
    if torch_new:
        row["torch"] = medians["new"] / medians["torch new"]
    print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    return row


def main() -> None:
    """All rows, printed and written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = [measured(name, make(range(FIRST[0], 301))) for name, make in CASES.items()]
    if arguments.output is not None:
        about = {
            "machine": machine(),
            "versions": versions(),
            "commit": measuring.commit(),
            "threads": arguments.threads,
        }
        arguments.output.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
