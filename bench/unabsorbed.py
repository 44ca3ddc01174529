"""Prefill of DeepSeek's unabsorbed form (keys of 192 columns, values of 128), causal, against cuDNN.

    python bench/unabsorbed.py [--heads 128] [--lengths 4096 8192 16384] [--rounds 7] [--output FILE]

bf16, one sequence. Forward and backward of tilewise, ordinary and deterministic, and of torch's SDPA with the cuDNN
backend. The first and the last head are compared with fp64 first, in memory that was full of NaN. Then all take turns,
and medians over the rounds are reported. FLOPs: both products of the forward, five of the backward, half of each.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from suite.measuring import commit, device_seconds
from tilewise.bench.machine import machine, versions

WIDTH, WIDTH_V = 192, 128
# Of bf16 results against fp64: the root mean square of the error, as a part of that of the result.
TOLERANCE = 8e-3
NAMES = ("out", "dq", "dk", "dv")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def tilewise(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool) -> Tensor:
    """The public call."""
    return tw.attention(q, k, v, causal=True, deterministic=deterministic)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA by cuDNN, or an error."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


CALLS: dict[str, Attend] = {
    "tilewise": functools.partial(tilewise, deterministic=False),
    "deterministic": functools.partial(tilewise, deterministic=True),
    "cudnn": cudnn,
}


class Step:
    """The tensors of one length."""

    def __init__(self, heads: int, length: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(length)

        def made(columns: int) -> Tensor:
            return torch.randn(1, heads, length, columns, device=device, generator=generator).bfloat16()

        self.q, self.k, self.v, self.dout = made(WIDTH), made(WIDTH), made(WIDTH_V), made(WIDTH_V)
        self.leaves = tuple(t.requires_grad_() for t in (self.q, self.k, self.v))
        self.pairs = heads * length * length

    def results(self, attend: Attend) -> tuple[Tensor, ...]:
        """Out and gradients, in memory that was full of NaN."""
        stale = [torch.full_like(t, float("nan")) for t in (*self.leaves, *self.leaves, self.dout)]
        del stale
        out = attend(*self.leaves)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.dout))

    def exact(self, head: int) -> tuple[Tensor, ...]:
        """Out and gradients of a head in fp64."""
        q, k, v, dout = (t[0, head].detach().double() for t in (self.q, self.k, self.v, self.dout))
        hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        p = (q @ k.mT * WIDTH**-0.5).masked_fill_(hidden, float("-inf")).softmax(-1)
        out = p @ v
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * WIDTH**-0.5
        return out, ds @ k, ds.mT @ q, p.mT @ dout


def errors(step: Step, attend: Attend) -> dict[str, Any]:
    """Relative errors of each result, the worse of two heads, and whether a second call gives the same bits."""
    results = step.results(attend)
    found: dict[str, Any] = dict.fromkeys(NAMES, 0.0)
    for head in (0, step.q.shape[1] - 1):
        for name, got, expected in zip(NAMES, results, step.exact(head), strict=True):
            error = (got[0, head].double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            found[name] = max(found[name], float(error)) if bool(error.isfinite()) else float("inf")
    finite = all(bool(t.isfinite().all()) for t in results)
    again = step.results(attend)
    same = all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    return found | {"finite": finite, "repeats": same, "right": finite and max(found.values()) < TOLERANCE}


def raced(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each; they take turns of about 20 ms."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiles
    calls = {name: max(1, min(20, round(0.02 / device_seconds(run)))) for name, run in runs.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(1e3 * device_seconds(run, calls[name]) / calls[name])
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(step: Step, names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of both directions."""

    def forward(name: str) -> Any:
        with torch.no_grad():
            return CALLS[name](step.q, step.k, step.v)

    outs = {name: CALLS[name](*step.leaves) for name in names}

    def backward(name: str) -> Any:
        return torch.autograd.grad(outs[name], step.leaves, step.dout, retain_graph=True)

    ms = {
        "forward": raced({name: functools.partial(forward, name) for name in names}, rounds),
        "backward": raced({name: functools.partial(backward, name) for name in names}, rounds),
    }
    work = {"forward": WIDTH + WIDTH_V, "backward": 3 * WIDTH + 2 * WIDTH_V}
    return {
        direction: {name: step.pairs * work[direction] / taken * 1e-9 for name, taken in found.items()}
        for direction, found in ms.items()
    }


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "rows": []}
    for length in chosen.lengths:
        step = Step(chosen.heads, length, chosen.device)
        row: dict[str, Any] = {"heads": chosen.heads, "length": length, "errors": {}}
        for name, attend in CALLS.items():
            try:
                row["errors"][name] = errors(step, attend)
            except Exception as error:
                row["errors"][name] = {"right": False, "failed": f"{type(error).__name__}: {error}"[:200]}
            if not row["errors"][name]["right"]:
                print(f"{length} {name}: {row['errors'][name]}", flush=True)
        right = [name for name in CALLS if row["errors"][name]["right"]]
        if chosen.device == "cuda":
            row |= measure(step, right, chosen.rounds)
            for direction in ("forward", "backward"):
                found = row[direction]
                row[f"{direction} over cudnn"] = {n: x / found.get("cudnn", float("nan")) for n, x in found.items()}
                shown = " | ".join(
                    f"{n} {x:4.0f} TFLOP/s, {row[f'{direction} over cudnn'][n]:.3f}" for n, x in found.items()
                )
                print(f"{length:6} {direction:8} {shown}", flush=True)
        else:
            print(row)
        results["rows"].append(row)
        if chosen.output is not None:
            chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
