"""Host time of a call on a GPU where its addresses or its length are new, beside FlashAttention 2 in torch's SDPA.

    python bench/gpu_new_lengths.py [--output FILE]

Both take turns on the same tensors, the device idle before each call, garbage collection on: medians and 90th
percentiles in microseconds over 200 calls. One sequence, 16 query heads on 4 K/V heads of 128, bf16.

    same        decoding, one call repeated
    moved       the same with other tensors of the same sizes
    grown       one key more every call
    prompts     prefill, three tokens more every call
    recorded    the same, recorded by autograd
    training    the same, forward and backward
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from suite import measuring
from tilewise.bench.machine import machine, versions

HEADS, KV_HEADS, DIM = 16, 4, 128
WARM, CALLS = 30, 200
Given = tuple[Tensor, Tensor, Tensor]


def tensors(queries: int, keys: int, *, grad: bool = False) -> Given:
    """q, k and v."""
    shapes = ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))
    q, k, v = (torch.randn(1, h, n, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for h, n in shapes)
    return q, k, v


def moved() -> Iterator[Given]:
    """Each in memory of its own."""
    kept = []
    while True:
        kept.append(tensors(1, 512))
        yield kept[-1]


def grown() -> Iterator[Given]:
    """As a cache grows that is a new tensor in every step."""
    _, k, v = tensors(1, 512)
    while True:
        q, *new = tensors(1, 1)
        k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
        yield q, k, v


def prompts(*, grad: bool = False) -> Iterator[Given]:
    """Lengths that were never seen."""
    for n in itertools.count(300, 3):
        yield tensors(n, n, grad=grad)


def trained(attend: Callable[..., Tensor]) -> Callable[..., Any]:
    """Forward and backward."""

    def run(*given: Tensor) -> Any:
        out = attend(*given)
        return torch.autograd.grad(out, given, out)

    return run


def measured(name: str, given: Iterator[Given], ways: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """The row of a case."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for operands in itertools.islice(given, WARM + CALLS):
        for way, call in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(*operands)
            taken[way].append((time.perf_counter() - start) * 1e6)
    row: dict[str, Any] = {"name": name}
    for way, times in taken.items():
        row[way] = round(statistics.median(times[WARM:]), 1)
        row[f"{way} p90"] = round(sorted(times[WARM:])[int(0.9 * CALLS)], 1)
    row["ratio"] = round(row["tilewise"] / row["flash"], 3)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    """All rows, printed and written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    def both(*, causal: bool) -> dict[str, Callable[..., Tensor]]:
        return {
            "tilewise": lambda q, k, v: tw.attention(q, k, v, causal=causal),
            "flash": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        }

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        one, many = both(causal=False), both(causal=True)
        found = [
            measured("same", itertools.repeat(tensors(1, 512)), one),
            measured("moved", moved(), one),
            measured("grown", grown(), one),
            measured("prompts", prompts(), many),
            measured("recorded", prompts(grad=True), many),
            measured("training", prompts(grad=True), {way: trained(call) for way, call in many.items()}),
        ]
    if arguments.output is not None:
        about = {"machine": machine(), "versions": versions(), "commit": measuring.commit()}
        arguments.output.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
