"""Decoding from a cache of latents (576 columns, of which 512 are the values), against FlashMLA and FA3.

    python bench/latent.py [--backends hopper "hopper e4m3" triton "triton e4m3"] [--quick] [--tiles] [--output FILE]

FLASHMLA_LIBRARY and FA3_LIBRARY name vLLM's libraries of these peers; a peer that is not named is left out. Pages of 64
tokens in random order, bf16, 128 or 16 query heads on one latent, one or two query tokens. Every backend is compared
with fp64 first, with outputs full of NaN and lengths that end inside pages. Then all take turns, and medians over the
rounds are reported, in a CUDA graph and call by call.

    us      time of a call        GB/s    bytes of the latents in that time        TFLOP/s    both products in that time

--tiles times other tiles of the Triton kernel. Without a GPU, the CPU backend is compared with torch's SDPA on expanded
keys, and with the two products of the same shapes by torch.matmul.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import tilewise as tw
from suite.measuring import commit, device_seconds
from tilewise import fp8
from tilewise.bench.machine import machine, versions

WIDTH, WIDTH_V, PAGE = 576, 512, 64
SCALE = 192**-0.5
ROUNDS, CALLS = 8, 20
# Of bf16 results against fp64: the root mean square of the error, as a part of that of the result.
TOLERANCE = 5e-3
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `keys` latents, each with `tokens` query tokens of `heads` heads."""

    batch: int
    keys: int
    heads: int
    tokens: int

    @property
    def bytes(self) -> int:
        """Memory of the latents in bf16."""
        return self.batch * self.keys * WIDTH * 2

    @property
    def flops(self) -> int:
        """Both products."""
        return 2 * self.batch * self.tokens * self.heads * self.keys * (WIDTH + WIDTH_V)


SIZES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (128, 4096), (128, 16384))
CASES = tuple(Case(*size, heads, tokens) for heads in (128, 16) for size in SIZES for tokens in (1, 2))
CPU_CASES = (Case(1, 4096, 128, 1), Case(1, 4096, 16, 1), Case(4, 1024, 128, 1), Case(1, 4096, 128, 2))


class Step:
    """The tensors of a case. With `ragged`, lengths differ and end inside pages, whose unused rows are NaN."""

    def __init__(self, case: Case, device: str, *, ragged: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        self.case, count = case, case.batch * case.keys // PAGE
        generator = torch.Generator(device).manual_seed(case.keys + case.heads)
        self.pages = torch.randn(count, PAGE, 1, WIDTH, device=device, generator=generator).to(dtype)
        shape = (case.batch, case.tokens, case.heads, WIDTH)
        self.q = torch.randn(shape, device=device, generator=generator).to(dtype)
        order = torch.randperm(count, device=device, generator=generator)
        self.table = order.int().view(case.batch, -1)
        lengths = torch.full((case.batch,), case.keys)
        if ragged:
            lengths = case.keys - torch.arange(case.batch) * 37 % (case.keys // 2) - 5
        self.used = lengths.int().to(device)
        if ragged:
            rows = torch.arange(case.keys, device=device).expand(case.batch, -1) >= self.used[:, None]
            place = self.table.long().repeat_interleave(PAGE, 1) * PAGE + torch.arange(case.keys, device=device) % PAGE
            self.pages.view(-1, WIDTH)[place[rows]] = float("nan")
        self.totals = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.tokens

    def call(self, backend: str, **more: Any) -> Any:
        """The public call; latents in e4m3 if the name of the backend ends so."""
        name, _, quantised = backend.partition(" ")
        k: Any = self.quantised if quantised else self.pages
        v = k.first_columns(WIDTH_V) if quantised else k[..., :WIDTH_V]
        rows = self.q.flatten(0, 1)
        queries: dict[str, Any] = (
            {} if self.case.tokens == 1 else {"cu_seqlens_q": self.totals, "max_seqlen_q": self.case.tokens}
        )
        return tw.attention_paged(
            rows, k, v, self.table, self.used, causal=True, scale=SCALE, backend=name, **queries, **more,
        )  # fmt: skip

    @functools.cached_property
    def quantised(self) -> fp8.Fp8Tensor:
        """The latents in e4m3."""
        return fp8.quantize_pages(self.pages)

    def exact(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) in fp64."""
        case, outs, lses = self.case, [], []
        for index in range(case.batch):
            length = int(self.used[index])
            latent = pages[self.table[index].long()].flatten(0, 2)[:length].double()
            scores = torch.einsum("thd,nd->htn", self.q[index].double(), latent) * SCALE
            hidden = torch.arange(length, device=latent.device) > length - case.tokens + torch.arange(
                case.tokens, device=latent.device
            ).view(-1, 1)
            scores = scores.masked_fill(hidden, float("-inf"))
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("htn,nd->thd", scores.softmax(-1), latent[:, :WIDTH_V]))
        return torch.cat(outs), torch.cat(lses, 1)


def faults(step: Step, backend: str) -> str:
    """Compare a backend with fp64; empty if it is right."""
    out = torch.full((step.q.shape[0] * step.q.shape[1], step.case.heads, WIDTH_V), float("nan")).to(step.q)
    _, lse = step.call(backend, out=out, return_lse=True)
    pages = step.quantised.dequantize() if "e4m3" in backend else step.pages
    expected, expected_lse = step.exact(pages)
    error = float((out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    worst = float((lse.double() - expected_lse).abs().max())
    again = step.call(backend)
    same = torch.equal(again, step.call(backend)) and torch.equal(again, out)
    right = error < TOLERANCE and worst < 1e-2 and same
    return "" if right else f"rms error {error:.2e}, lse off by {worst:.2e}, repeats: {same}"


CHECKED = (
    Case(5, 512, 128, 1), Case(6, 1024, 16, 2), Case(5, 320, 128, 2), Case(1, 4096, 128, 1), Case(5, 384, 16, 1),
    Case(2, 384, 20, 3), Case(1, 4096, 16, 1), Case(3, 704, 8, 2),
)  # fmt: skip


def warm(backends: Sequence[str]) -> None:
    """Compile the kernels of all cases in processes of their own, into Triton's cache."""
    sizes = {(1 if case.batch == 1 else min(case.batch, 5), case.heads, case.tokens) for case in (*CASES, *CHECKED)}
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.starmap(_warm, [(size, backend) for backend in backends for size in sorted(sizes)])


def _warm(size: tuple[int, int, int], backend: str) -> None:
    batch, heads, tokens = size
    takes(Step(Case(batch, 320, heads, tokens), "cuda"), backend)


def is_right(backend: str, device: str) -> bool:
    """Whether a backend gives the results of fp64 where it takes the case; says where it does not."""
    right, wrong = 0, 0
    for case in CHECKED:
        for ragged in (False, True):
            step = Step(case, device, ragged=ragged)
            if not takes(step, backend):
                continue
            if fault := faults(step, backend):
                wrong += 1
                print(f"{backend}: {case}, ragged {ragged}: {fault}", flush=True)
            else:
                right += 1
    print(f"{backend}: right in {right} of {right + wrong} cases that it takes", flush=True)
    return right > 0 and not wrong


def peers(step: Step) -> dict[str, Run]:
    """The calls of the peers whose libraries are given."""
    found: dict[str, Run] = {}
    q, pages, table, used, ops = step.q, step.pages, step.table, step.used, torch.ops
    if "FLASHMLA_LIBRARY" in os.environ:
        torch.ops.load_library(os.environ["FLASHMLA_LIBRARY"])
        mla = ops._flashmla_C  # noqa: SLF001 - the name that the library registers
        meta = mla.dense_decode_fwd(q, pages, WIDTH_V, used, table, SCALE, True, None, None, None)
        found["flashmla"] = lambda: mla.dense_decode_fwd(
            q, pages, WIDTH_V, used, table, SCALE, True, meta[2], meta[3], None
        )
    if "FA3_LIBRARY" in os.environ:
        torch.ops.load_library(os.environ["FA3_LIBRARY"])
        fwd = ops._vllm_fa3_C.fwd  # noqa: SLF001
        rope, absorbed = q[..., WIDTH_V:].contiguous(), q[..., :WIDTH_V].contiguous()
        keys, values = pages[..., WIDTH_V:], pages[..., :WIDTH_V]
        lists = (None, None, None, None, used, step.case.tokens, step.case.keys, table)
        flags = (SCALE, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)
        found["fa3"] = lambda: fwd(rope, keys, values, None, None, absorbed, None, *lists, *(None,) * 8, *flags)
    return found


def captured(run: Run) -> Run:
    """Replays of a graph of CALLS calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(CALLS):
                run()
    torch.cuda.synchronize()
    return graph.replay


def raced(runs: Mapping[str, Run], times: int) -> dict[str, float]:
    """Median microseconds of a call of each; they take turns, in both orders: clocks depend on who came before."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            found = 1e6 * device_seconds(runs[name], times) / CALLS
            if number:
                taken[name].append(found)
    return {name: statistics.median(values) for name, values in taken.items()}


def takes(step: Step, backend: str) -> bool:
    """Whether a backend takes the case."""
    try:
        step.call(backend)
    except Exception as error:
        print(f"{backend}, {step.case}: {type(error).__name__}: {error}"[:200], flush=True)
        return False
    return True


def measure(case: Case, backends: list[str]) -> dict[str, Any]:
    """One row of the table."""
    step = Step(case, "cuda")
    runs: dict[str, Run] = {name: functools.partial(step.call, name) for name in backends if takes(step, name)}
    runs |= peers(step)
    row: dict[str, Any] = vars(case).copy()
    row["calls us"] = raced(runs, CALLS)
    row["graph us"] = raced({name: captured(run) for name, run in runs.items()}, 1)
    row["GB/s"] = {name: case.bytes / us * 1e-3 for name, us in row["graph us"].items()}
    row["TFLOP/s"] = {name: case.flops / us * 1e-6 for name, us in row["graph us"].items()}
    return row


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    case = f"{row['heads']:3} heads {row['tokens']} x {row['batch']:3} x {row['keys']:5}"
    times = " | ".join(
        f"{name} {us:6.1f} ({row['calls us'][name]:6.1f}) us {row['GB/s'][name]:.0f} GB/s {row['TFLOP/s'][name]:.0f} TF"
        for name, us in row["graph us"].items()
    )
    return f"{case}: {times}"


def sweep(quick: bool) -> list[dict[str, Any]]:
    """Other tiles of the Triton kernel, timed in graphs."""
    from tilewise.backends.triton.configs import Config
    from tilewise.testing.tiles import overridden

    both = (True, False)
    tall = [Config(64, n, 8, stages, boxes=tma) for n, stages in ((64, 2), (32, 3)) for tma in both]
    few = [
        Config(16, n, warps, stages, boxes=tma)
        for n, warps, stages in ((32, 4, 2), (32, 4, 3), (32, 8, 3), (64, 8, 2), (16, 4, 3))
        for tma in both
    ]
    rows = []
    for case, tiles in ((Case(16, 32768, 128, 1), tall), (Case(16, 32768, 16, 1), few)):
        step = Step(case, "cuda")
        for tile in tiles[:3] if quick else tiles:
            row: dict[str, Any] = vars(case) | {"tile": str(tile)}
            try:
                with overridden({"latent": tile}):
                    out = step.call("triton")
                    row["us"] = 1e6 * device_seconds(captured(lambda s=step: s.call("triton"))) / CALLS  # type: ignore[misc]
                row["off"] = float((out - step.call("triton")).abs().max())
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:120]
            print({name: value for name, value in row.items() if name not in ("tokens",)}, flush=True)
            rows.append(row)
    return rows


def fastest(run: Run) -> float:
    """Milliseconds of the fastest of a few runs on a CPU."""
    run()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def measure_cpu(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The CPU backend, compared with torch."""
    q = torch.randn(case.batch, case.heads, case.tokens, WIDTH).to(dtype)
    latent = torch.randn(case.batch, 1, case.keys, WIDTH).to(dtype)
    k, v = (t.expand(-1, case.heads, -1, -1) for t in (latent, pad(latent[..., :WIDTH_V], (0, WIDTH - WIDTH_V))))
    flat = q.flatten(1, 2)

    def products() -> Tensor:
        scores = (flat @ latent[:, 0].mT).float() * SCALE
        return scores.softmax(-1).to(dtype) @ latent[:, 0, :, :WIDTH_V]

    return vars(case) | {
        "dtype": str(dtype),
        "tilewise ms": fastest(lambda: tw.attention(q, latent, latent[..., :WIDTH_V], scale=SCALE)),
        "sdpa ms": fastest(lambda: scaled_dot_product_attention(q, k, v, scale=SCALE)),
        "matmul ms": fastest(products),
    }


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["hopper", "hopper e4m3", "triton", "triton e4m3"])
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--tiles", action="store_true", help="other tiles of the Triton kernel")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "rows": []}

    def keep(row: dict[str, Any], line: str) -> None:
        results["rows"].append(row)
        print(line, flush=True)
        if chosen.output is not None:
            chosen.output.write_text(json.dumps(results, indent=1) + "\n")

    with torch.inference_mode():
        if not torch.cuda.is_available():
            for dtype in (torch.float32, torch.bfloat16):
                for case in CPU_CASES[:1] if chosen.quick else CPU_CASES:
                    row = measure_cpu(case, dtype)
                    keep(row, str({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}))
            return
        warm(chosen.backends)
        right = [backend for backend in chosen.backends if is_right(backend, "cuda")]
        for case in CASES[2:4] if chosen.quick else CASES:
            row = measure(case, right)
            keep(row, shown(row))
        if chosen.tiles:
            results["tiles"] = sweep(chosen.quick)
        if chosen.output is not None:
            chosen.output.write_text(json.dumps(results, indent=1) + "\n")
        if len(right) < len(chosen.backends):
            sys.exit(1)


if __name__ == "__main__":
    main()
