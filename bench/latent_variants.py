"""Variants of the kernel for latents, beside FlashMLA and FA3: checked against fp64, then timed in CUDA graphs."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import latent
import latent_before
from latent import CALLS, CASES, CHECKED, Case, Step
from suite.measuring import commit
from tilewise import calls
from tilewise.backends.hopper import launch
from tilewise.bench.machine import machine, versions

PLAIN = launch.latent_kernel, launch.latent_config
VARIANTS: dict[str, dict[str, Any] | None] = {
    "before": None,
    "halves": {"PIECE": 256, "KEEPS_REST": False},
    "boxes": {"PIECE": 64, "KEEPS_REST": False},
    "rest": {"PIECE": 64, "KEEPS_REST": True},
}


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """The launch path makes this variant's calls within the block."""
    changes = VARIANTS[name]
    launch.latent_kernel = latent_before.latent_kernel if changes is None else PLAIN[0]
    launch.latent_config = lambda problem, **more: replace(PLAIN[1](problem, **more), **(changes or {}))
    forget()
    try:
        yield
    finally:
        launch.latent_kernel, launch.latent_config = PLAIN
        forget()


def forget() -> None:
    """Drop prepared launches."""
    launch.latent_pass.cache_clear()
    calls.forget()


def warm(job: tuple[str, tuple[int, int, int]]) -> None:
    """Compile one kernel into Triton's cache."""
    name, (batch, heads, tokens) = job
    with torch.inference_mode(), variant(name):
        latent.takes(Step(Case(batch, 320, heads, tokens), "cuda"), "hopper")


def wrong(name: str) -> list[str]:
    """Where a variant is not right."""
    found = []
    for case in CHECKED:
        for kind in ("even", "ragged", "peaked"):
            step = Step(case, "cuda", ragged=kind != "even")
            if kind == "peaked":  # references move in most tiles
                step.q.mul_(8)
            if not latent.takes(step, "hopper"):
                found.append(f"{name}: {case} does not run")
            elif fault := latent.faults(step, "hopper"):
                found.append(f"{name}: {case} {kind}: {fault}")
    return found


def measure(case: Case, names: list[str]) -> dict[str, Any]:
    """One row: microseconds in a graph."""
    step, graphs = Step(case, "cuda"), {}
    for name in names:
        with variant(name):
            graphs[name] = latent.captured(functools.partial(step.call, "hopper"))
    for name, run in latent.peers(step).items():
        graphs[name] = latent.captured(run)
    us = latent.raced(graphs, 1)
    best = min([us[name] for name in ("flashmla", "fa3") if name in us], default=float("nan"))
    return vars(case) | {"us": us, "over peers": {name: best / us[name] for name in names}}


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    cell = f"{row['heads']:3}h {row['tokens']} x {row['batch']:3} x {row['keys']:5}"
    times = " ".join(f"{name} {us:7.1f}" for name, us in row["us"].items())
    return f"{cell}: {times} | " + " ".join(f"{name} {x:.3f}" for name, x in row["over peers"].items())


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    began = time.perf_counter()
    sizes = {(1 if case.batch == 1 else min(case.batch, 5), case.heads, case.tokens) for case in (*CASES, *CHECKED)}
    jobs = [(name, size) for size in sorted(sizes) for name in chosen.variants]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(warm, jobs, chunksize=1)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "wrong": {},
        "rows": [],
    }
    with torch.inference_mode():
        right = []
        for name in chosen.variants:
            with variant(name):
                found = results["wrong"][name] = wrong(name)
            print(f"{name}: {len(found)} of {3 * len(CHECKED)} wrong", *found[:6], sep="\n    ", flush=True)
            right += [name] if not found else []
        print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
        for number in chosen.cells:
            row = measure(CASES[number], right)
            torch.cuda.empty_cache()
            results["rows"].append(row)
            print(shown(row), flush=True)
            if chosen.output is not None:
                chosen.output.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"done after {time.perf_counter() - began:.0f} s; graphs of {CALLS} calls, {latent.ROUNDS} rounds", flush=True
    )


if __name__ == "__main__":
    main()
