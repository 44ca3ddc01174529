"""Tangents and second derivatives on the CPU: time against the forward, the backward and torch's math kernel; memory.

    PYTHONPATH=src:bench python bench/derivatives.py [--json FILE]

Times are CPU seconds of one thread, the least of several calls, so that other programs disturb them little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from suite.measuring import commit
from tilewise.bench.machine import machine, versions
from tilewise.bench.memory import memory_method, peak_extra_memory

Attend = Callable[..., Tensor]
HEADS, REPEATS = 2, 5
LIMITS = {"jvp / forward": 2.6, "double backward / backward": 3.5}
AT_LEAST = {"math jvp / jvp": 5.0, "math double backward / double backward": 5.0}


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The least CPU seconds of a call in this thread."""
    call()
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return min(found)


def math_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """SDPA by its math kernel, the only one of torch's with these derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def passes(attend: Attend, seqlen: int, head_dim: int, *, causal: bool) -> dict[str, Callable[[], object]]:
    """The calls that are measured: forward, jvp, backward, double backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, seqlen, head_dim)
    q, k, v, *tangents, dout = (torch.randn(shape, generator=generator) for _ in range(7))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, dout)]

    def call(*qkv: Tensor) -> Tensor:
        return attend(*qkv, causal=causal)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves[:3]), leaves[:3], leaves[3], create_graph=True)

    recorded: list[Any] = []

    def backward() -> object:
        if not recorded:
            recorded.append(call(*leaves[:3]))
        return torch.autograd.grad(recorded[0], leaves[:3], dout, retain_graph=True)

    kept: list[Any] = []

    def double() -> object:
        if not kept:
            kept.append(gradients())
        return torch.autograd.grad(kept[0], leaves, tangents, retain_graph=True)

    return {
        "forward": lambda: call(q, k, v),
        "jvp": lambda: torch.func.jvp(call, (q, k, v), tuple(tangents)),
        "backward": backward,
        "double backward": double,
    }


def timed(seqlen: int, head_dim: int, *, causal: bool, with_math: bool) -> dict[str, Any]:
    """Times of one case in milliseconds, and the ratios that have a bar."""
    mine = {name: seconds(run) for name, run in passes(tw.attention, seqlen, head_dim, causal=causal).items()}
    found: dict[str, Any] = {
        "seqlen": seqlen, "head_dim": head_dim, "heads": HEADS, "causal": causal, "dtype": "float32",
        "milliseconds": {name: round(1e3 * value, 2) for name, value in mine.items()},
        "jvp / forward": round(mine["jvp"] / mine["forward"], 2),
        "double backward / backward": round(mine["double backward"] / mine["backward"], 2),
    }  # fmt: skip
    if with_math:
        theirs = passes(math_attention, seqlen, head_dim, causal=causal)
        for name in ("jvp", "double backward"):
            value = seconds(theirs[name], 1)
            found["milliseconds"][f"math {name}"] = round(1e3 * value, 2)
            found[f"math {name} / {name}"] = round(value / mine[name], 2)
    found["bars missed"] = [name for name, bar in LIMITS.items() if found[name] > bar]
    found["bars missed"] += [name for name, bar in AT_LEAST.items() if found.get(name, bar) < bar]
    return found


def memory(seqlen: int, head_dim: int) -> dict[str, Any]:
    """Peak extra MiB of a jvp and of a gradient with its double backward, results included."""
    found: dict[str, Any] = {"seqlen": seqlen, "head_dim": head_dim}
    for name, attend in (("tilewise", tw.attention), ("math", math_attention)):
        if name == "math" and seqlen > 4096:
            continue
        for which in ("jvp", "double backward"):
            passes(attend, 128, head_dim, causal=False)[which]()  # compiles what it needs
            run = passes(attend, seqlen, head_dim, causal=False)[which]
            found[f"{name} {which} MiB"] = round(peak_extra_memory(run) / 2**20, 1)
    return found


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(4096, 64, False, True), (4096, 64, True, True)]
    cases += [(2048, d, causal, False) for d in (64, 128) for causal in (False, True)]
    results: dict[str, Any] = {
        "what": "tangents and second derivatives, one thread; CPU seconds, the least of several calls",
        "memory": memory_method(), "machine": machine(), "versions": versions(), "commit": commit(),
        "times": [], "peaks": [],
    }  # fmt: skip

    def keep(kind: str, found: dict[str, Any]) -> None:
        results[kind].append(found)
        print(json.dumps(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    for seqlen in (1024, 2048, 4096, 8192):
        keep("peaks", memory(seqlen, 64))
    for seqlen, head_dim, causal, with_math in cases:
        keep("times", timed(seqlen, head_dim, causal=causal, with_math=with_math))


if __name__ == "__main__":
    main()
