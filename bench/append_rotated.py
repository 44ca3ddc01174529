"""`kv.append_rotated` against separate torch operations: RMSNorm and rotation of q and k, k and v into pages.

    python bench/append_rotated.py [--device cpu|cuda] [--rows 64,8192] [--output FILE]

32/8 heads of 128, pages of 64 rows, bf16 rows (fp32 on a CPU). The separate operations are torch's own fused rms_norm,
the rotation that model code writes (a product with cosines, one with sines of the swapped halves), and an indexed
assignment for K and one for V; e4m3 rows are divided, clamped and converted first. Scales that grow (`PagedKVCache`)
have no torch operation: there K and V are written by `append_quantised`, one launch.

    graph us  device time of a call, in a CUDA graph of 20 calls
    eager us  the same, called one by one: at few rows, the time of the host

Both are compared with fp64 before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from serving_cost import graph_seconds
from suite.measuring import commit
from tilewise.bench.machine import machine, versions
from tilewise.kv import append_rotated, rotary_table
from tilewise.kv.quantised import QuantisedRows, append_quantised, new_scales

HEADS, KV_HEADS, DIM, PAGE_SIZE, LONGEST, EPS = 32, 8, 128, 64, 16384, 1e-6
GRAPH_CALLS, SAMPLES = 20, 15
E4M3 = torch.float8_e4m3fn
Run = Callable[[], object]
PAGES = ("rows' dtype", "e4m3", "e4m3, growing scales")


class Case:
    """The tensors of one measurement, and both ways to compute it."""

    def __init__(self, rows: int, pages: str, norm: bool, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        num_pages = rows // PAGE_SIZE + 1 if rows > 256 else rows
        # A prompt, or single tokens of requests with pages of their own.
        slots = (
            torch.arange(rows) if rows > 256 else torch.arange(rows) * PAGE_SIZE + torch.randint(0, PAGE_SIZE, (rows,))
        )
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM, device=device).to(dtype)
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
        self.q, self.k, self.v = (t.unflatten(1, (-1, DIM)) for t in (q, k, v))
        self.weights = [torch.rand(DIM, device=device).to(dtype) + 0.5 for _ in range(2)] if norm else None
        self.slots = slots.to(device)
        self.positions = torch.randint(0, LONGEST, (rows,), device=device)
        self.table = rotary_table(LONGEST, DIM, device=device)
        self.rounded_table = self.table.to(dtype)
        self.is_e4m3, self.grows = pages != PAGES[0], pages == PAGES[2]
        shape = (2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
        self.pages = torch.zeros(shape, device=device).to(E4M3 if self.is_e4m3 else dtype)
        self.places = self.slots // PAGE_SIZE, self.slots % PAGE_SIZE
        self.scales: list[Tensor | None] = [None, None]
        if self.grows:
            self.scales = [new_scales(1, num_pages, KV_HEADS, self.slots.device)[0] for _ in range(2)]
        elif self.is_e4m3:
            self.scales = [torch.full((1,), 0.02, device=device) for _ in range(2)]

    def fused(self) -> Tensor:
        """One launch."""
        norm: dict[str, Any] = {}
        if self.weights:
            norm = {"norm_eps": EPS, "q_weight": self.weights[0], "k_weight": self.weights[1]}
        k_scale, v_scale = self.scales
        return append_rotated(
            self.q, self.k, self.v, self.pages[0], self.pages[1], self.slots, self.positions, self.table,
            k_scale=k_scale, v_scale=v_scale, **norm,
        )  # fmt: skip

    def separate(self) -> Tensor:
        """Torch's operations."""
        q, k, v = self.q, self.k, self.v
        if self.weights:
            q, k = (rms_norm(x, (DIM,), w, EPS) for x, w in zip((q, k), self.weights, strict=True))
        cos, sin = self.rounded_table[self.positions][:, None].chunk(2, -1)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        q, k = (x * cos + _swapped(x) * sin for x in (q, k))
        k_scale, v_scale = self.scales
        result: Tensor = q
        if self.grows:
            assert k_scale is not None
            assert v_scale is not None
            append_quantised(QuantisedRows(k, v, self.pages[0], self.pages[1], k_scale, v_scale, self.slots))
            return result
        memory = self.pages
        if self.is_e4m3:
            k, v = ((x / s).clamp(-448, 448).to(E4M3).view(torch.uint8) for x, s in ((k, k_scale), (v, v_scale)))
            memory = self.pages.view(torch.uint8)
        for new, pages in zip((k, v), memory, strict=True):
            pages.index_put_(self.places, new)
        return result

    def check(self) -> float:
        """The largest error of the one launch, in q and in K; raises if either way is wrong."""
        wide = [t.double().cpu() for t in (self.q, self.k, self.v)]
        pages = torch.zeros(self.pages.shape, dtype=torch.float64)
        norm: dict[str, Any] = {}
        if self.weights:
            norm = {"norm_eps": EPS, "q_weight": self.weights[0].cpu(), "k_weight": self.weights[1].cpu()}
        index = self.slots.cpu(), self.positions.cpu()
        want = append_rotated(wide[0], wide[1], wide[2], pages[0], pages[1], *index, self.table.double().cpu(), **norm)
        worst = 0.0
        for run in (self.separate, self.fused):
            self.pages.view(torch.uint8).fill_(0)
            out = run()
            stored = self.pages.float()
            if self.is_e4m3:
                assert self.scales[0] is not None
                assert self.scales[1] is not None
                shape = (2, -1, 1, KV_HEADS, 1) if self.grows else (2, 1, 1, 1, 1)
                stored = stored * torch.stack((self.scales[0], self.scales[1])).reshape(shape)
            errors = ((out.double().cpu() - want).abs() / (1 + want.abs())).max(), (stored.cpu() - pages).abs().max()
            limit = 0.05, 0.6 if self.is_e4m3 else 0.1
            assert errors[0] < limit[0], (run, errors)
            assert errors[1] < limit[1], (run, errors)
            worst = float(errors[0])
        return worst


def _swapped(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def eager_us(run: Run, device: str) -> float:
    """Of one call in a row of them."""
    run()
    taken = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(GRAPH_CALLS):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / GRAPH_CALLS * 1e6)
    return statistics.median(taken)


def graph_us(run: Run) -> float:
    """Of one call in a CUDA graph."""
    run()
    return graph_seconds(run) * 1e6


def main() -> None:
    """Measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="64,8192", help="with commas between")
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    found = []
    for rows in map(int, given.rows.split(",")):
        for pages in PAGES:
            for norm in (True, False):
                case = Case(rows, pages, norm, given.device)
                row: dict[str, Any] = {"rows": rows, "pages": pages, "norm": norm, "error of q": case.check()}
                times: dict[str, Callable[[Run], float]] = {"eager": functools.partial(eager_us, device=given.device)}
                if given.device == "cuda":
                    times["graph"] = graph_us
                for name, clock in times.items():
                    mine, theirs = clock(case.fused), clock(case.separate)
                    row |= {f"{name} us": mine, f"separate {name} us": theirs, f"{name} ratio": theirs / mine}
                if given.device == "cuda":
                    moved = sum(2 * t.numel() * t.element_size() for t in (case.q, case.k, case.v))
                    row["GB/s"] = moved / row["graph us"] * 1e-3
                found.append(row)
                cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                print("  " + ", ".join(cells), flush=True)
    if given.output:
        about = {"machine": machine(), "versions": versions(), "commit": commit(), "cases": found}
        given.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
