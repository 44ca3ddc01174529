"""Changes to the kernels for latents (TILEWISE_LATENT), beside FlashMLA and FA3: checked, then timed in graphs."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import latent
import tilewise as tw
from latent import CHECKED, Case, Step
from suite.measuring import commit
from tilewise import calls
from tilewise.backends.hopper import launch
from tilewise.bench.machine import machine, versions

VARIANTS = {
    "base": "",
    "merge": "merge",
    "overlap": "merge,overlap",
    "tail": "merge,overlap,tail",
    "all": "merge,overlap,tail,all",
    "few": "merge,overlap,tail,few",
}
SIZES = ((16, 4096), (128, 4096), (16, 32768), (1, 4096), (128, 16384))
CASES = [Case(*size, 128, tokens) for size in SIZES[:4] for tokens in (1, 2)]
CASES += [Case(*size, 16, tokens) for size in SIZES[:2] for tokens in (1, 2)]
CASES += [Case(*SIZES[4], 128, tokens) for tokens in (1, 2)]


def names_of(case: Case) -> list[str]:
    """The variants that differ in a case."""
    left_out = {"tail"} if case.tokens == 1 else set()
    left_out |= {"all"} if case.batch == 1 else {"few"}
    return [name for name in VARIANTS if name not in left_out]


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """The launch path makes this variant's calls within the block."""
    os.environ["TILEWISE_LATENT"] = VARIANTS[name]
    launch.latent_pass.cache_clear()
    calls.forget()
    yield
    launch.latent_pass.cache_clear()
    calls.forget()


def warm(job: tuple[list[str], tuple[int, int, int]]) -> None:
    """Compile kernels into Triton's cache."""
    names, (batch, heads, tokens) = job
    for name in names:
        with torch.inference_mode(), variant(name):
            latent.takes(Step(Case(batch, 320, heads, tokens), "cuda"), "hopper")


def wrong(name: str, device: str) -> list[str]:
    """Where a variant is not right."""
    found = []
    for case in CHECKED:
        for kind in ("even", "ragged", "peaked"):
            step = Step(case, device, ragged=kind != "even")
            if kind == "peaked":  # references move in most tiles
                step.q.mul_(8)
            if not latent.takes(step, "hopper"):
                found.append(f"{name}: {case} does not run")
            elif fault := latent.faults(step, "hopper"):
                found.append(f"{name}: {case} {kind}: {fault}")
    return found + [f"{name}: {fault}" for rows in (1, 300) if (fault := tail_fault(rows, device))]


def tail_fault(rows: int, device: str) -> str:
    """What is wrong with rows past the last sequence."""
    step = Step(Case(5, 320, 128, 2), device, ragged=True)
    q = torch.cat([step.q.flatten(0, 1), torch.full((rows, 128, latent.WIDTH), float("nan")).to(step.q)])
    out = torch.full((*q.shape[:2], latent.WIDTH_V), float("nan")).to(q)
    _, lse = tw.attention_paged(
        q, step.pages, step.pages[..., : latent.WIDTH_V], step.table, step.used, causal=True, scale=latent.SCALE,
        backend="hopper", cu_seqlens_q=step.totals, max_seqlen_q=2, out=out, return_lse=True,
    )  # fmt: skip
    expected, expected_lse = step.exact(step.pages)
    close = float((out[:-rows].double() - expected).abs().max()) < 2e-2
    close &= float((lse[:, :-rows].double() - expected_lse).abs().max()) < 1e-2
    cleared = bool((out[-rows:] == 0).all()) and bool((lse[:, -rows:] == float("-inf")).all())
    return "" if close and cleared else f"tail of {rows}: rows right {close}, cleared {cleared}"


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
    times = " ".join(f"{name} {us:6.1f}" for name, us in row["us"].items())
    return f"{cell}: {times} | " + " ".join(f"{name} {x:.3f}" for name, x in row["over peers"].items())


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    began = time.perf_counter()
    sizes = {(1 if case.batch == 1 else min(case.batch, 5), case.heads, case.tokens) for case in (*CASES, *CHECKED)}
    together = (["base", "merge"], ["overlap"], ["tail"])
    jobs = [(names, size) for size in sorted(sizes) for names in together if names != ["tail"] or size[2] > 1]
    with multiprocessing.get_context("spawn").Pool(15) as pool:
        pool.map(warm, jobs, chunksize=1)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    results: dict[str, Any] = {
        "machine": machine(), "versions": versions(), "commit": commit(), "wrong": {}, "rows": [],
    }  # fmt: skip
    with torch.inference_mode():
        right = []
        for name in VARIANTS:
            with variant(name):
                found = results["wrong"][name] = wrong(name, "cuda")
            print(f"{name}: {len(found)} of {3 * len(CHECKED) + 2} wrong", *found[:6], sep="\n    ", flush=True)
            right += [name] if not found else []
        print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
        for case in CASES:
            row = measure(case, [name for name in names_of(case) if name in right])
            torch.cuda.empty_cache()
            results["rows"].append(row)
            print(shown(row), flush=True)
            if chosen.output is not None:
                chosen.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
