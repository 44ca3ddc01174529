"""Check and time tiles of the Triton backend against SDPA flash, cuDNN and FlexAttention on this GPU.

    python bench/tune_triton.py out.json [--dims 64,128,256] [--lengths 1024,4096,16384] [--check-only]
        [--only forward,dkdv,dq,decode,peers,overhead,tangent,tangent_only,twice_dkdv,twice_dq]

Candidates are compiled and checked in parallel processes first; a candidate that is wrong, runs out of resources or
crashes is not timed. Then every cell (pass, head_dim, causal, length) is timed round-robin in one process: the chip is
power limited, so only ratios within a cell mean something. bf16, 16384 tokens, heads * head_dim = 2048.
With --check-only nothing is timed; a later run finds the compiled kernels in Triton's cache and what was checked in
out.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime as dt
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from suite import measuring
from tilewise import device as devices
from tilewise.backends.gpu import launching as kernels
from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.launching import View
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.triton import arguments, configs, launch, launch_higher, planning
from tilewise.backends.triton.configs import Config, Pass
from tilewise.bench import machine
from tilewise.operands import Operands, Tangents
from tilewise.problem import AttentionProblem
from tilewise.testing.tiles import overridden
from tilewise.tile_masks import TileMask
from tilewise.tiles import lists_of
from tune_candidates import DECODE, HIGHER, TUNED, candidates, config_of, name_of

TOKENS, WIDTH, ROUNDS = 16384, 2048, 5
Run = Callable[[], Any]
Records = list[dict[str, Any]]
Job = tuple[Pass, int, bool, Config]
DECODE_CASES = ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (16, 65536))


def problem_of(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, dim: int, causal: bool
) -> AttentionProblem:
    """A dense bf16 problem."""
    return AttentionProblem(
        kind="dense",
        dtype=torch.bfloat16,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=batch * seqlen_q,
        total_k=batch * seqlen_k,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim,
        scale=dim**-0.5,
        causal=causal,
        needs_grad=True,
    )


class Inputs:
    """A dense problem with its tensors and everything a single kernel needs."""

    def __init__(
        self, problem: AttentionProblem, backward: bool, higher: bool = False, mask: TileMask | None = None
    ) -> None:
        self.problem = p = problem
        kv_shape = (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim)
        self.q = torch.randn(p.batch, p.num_heads, p.seqlen_q, p.head_dim, device="cuda", dtype=p.dtype)
        self.k, self.v = (torch.randn(kv_shape, device="cuda", dtype=p.dtype) for _ in range(2))
        self.operands = Operands(self.q, self.k, self.v)
        masks: dict[str, Tensor] = {}
        if mask is not None:
            batch, heads, rows, columns = mask.tiles.shape
            self.problem = p = dataclasses.replace(p, tiles_shape=(batch, heads, rows, columns))
            lists = lists_of(mask.tiles)
            tiles = mask.tiles.expand(p.batch, p.num_heads, -1, -1)
            masks = {"tiles": tiles, "tile_bits": mask.bits, "tile_lists": lists}
            self.operands = self.operands._replace(**masks)
        self.device, self.index = devices.of(self.q.device), self.q.get_device()
        self.plan = planning.plan_for(p, self.device, False)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(p.lse_shape, device="cuda")
        self.tensors: dict[str, Tensor] = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, "lse": self.lse}
        self.tensors |= masks
        if backward:
            out, lse = launch.run_forward(p, self.operands)
            self.out.copy_(out)
            self.lse.copy_(lse)
            self.dout = torch.randn_like(self.q)
            self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
            passes = arguments.TWICE if higher else arguments.ONCE
            workspace = torch.empty(arguments.workspace_words(self.plan, passes), device="cuda")
            made = {"dout": self.dout, "dq": self.dq, "dk": self.dk, "dv": self.dv, "workspace": workspace}
            self.tensors |= made
            if higher:
                self.along = tuple(torch.randn_like(t) for t in (self.q, self.k, self.v))
                *_, dot_out, dot_lse = launch_higher.forward_tangent(p, self.operands, Tangents(*self.along), None)
                self.tensors |= dict(zip(("dot_q", "dot_k", "dot_v"), self.along, strict=True))
                self.tensors |= {"dot_out": dot_out, "dot_lse": dot_lse}
            self.runner([launch.stats_call(self.plan, self.views, (), passes)])()

    def poison(self, direction: Pass) -> None:
        """Fill what a pass writes, so that what it forgets shows."""
        dots = ("dot_out", "dot_lse")
        written = {"forward": ("out", "lse"), "tangent": ("out", "lse", *dots), "tangent_only": dots}
        for name in written.get(direction, ("dq", "dk", "dv")):
            self.tensors[name].fill_(float("nan"))

    @property
    def views(self) -> dict[str, View]:
        """What the calls are described for."""
        return {name: View(t.stride(), t.dtype, aligned=True) for name, t in self.tensors.items()}

    def runner(self, calls: list[KernelCall]) -> Run:
        """The calls, compiled and ready to be started."""
        ready = kernels.Pass(calls, tuple(self.tensors), {}, self.device, self.index)
        return functools.partial(ready, tuple(self.tensors.values()))

    def calls(self, direction: Pass, config: Config) -> list[KernelCall]:
        """The kernels of a pass with the given tiles."""
        views = self.views
        with overridden({direction: config}):
            if direction == "forward":
                return launch.tiled_calls(self.plan, views)
            if direction in ("tangent", "tangent_only"):
                return launch_higher.tangent_calls(self.problem, self.device, views, direction == "tangent_only")
            if direction in HIGHER:
                shared = launch.shared_arguments(self.plan, views, arguments.TWICE)
                shared |= launch_higher.tangent_arguments(self.plan, views)
                if direction == "twice_dkdv":
                    return [launch_higher.key_call(self.plan, shared, views["dk"], views["dv"])]
                return [launch_higher.query_call(self.plan, shared, views["dq"])]
            shared = launch.shared_arguments(self.plan, views)
            if direction == "dkdv":
                return launch.key_gradient_calls(self.plan, shared, views["dk"], views["dv"])
            return [launch.query_gradient_call(self.plan, shared, views["dq"])]

    def launch(self, direction: Pass, config: Config) -> Run:
        """The same, ready to be started."""
        return self.runner(self.calls(direction, config))


def attempt(label: str, make: Callable[[], Run]) -> dict[str, Run]:
    """{label: what `make` returns}, or nothing (and a line saying why) where this GPU or PyTorch cannot."""
    try:
        return {label: make()}
    except Exception as error:  # peers and tiles may fail in any way
        print("  left out:", label, type(error).__name__, str(error)[:100], flush=True)
        return {}


def check(direction: Pass, dim: int, causal: bool, config: Config) -> dict[str, Any]:
    """Run one candidate on a small ragged problem and compare with fp32 PyTorch.

    No heads are shared, so what is compiled here is what is timed later.
    """
    torch.manual_seed(0)
    record: dict[str, Any] = {"pass": direction, "dim": dim, "causal": causal, "config": name_of(config), "error": None}
    began = time.time()
    try:
        inputs = Inputs(problem_of(2, 4, 4, 300, 557, dim, causal), direction != "forward", direction in HIGHER)
        inputs.poison(direction)
        inputs.launch(direction, config)()
        torch.cuda.synchronize()
        built = [compile_call(call, inputs.device, inputs.index) for call in inputs.calls(direction, config)]
        record |= {
            "registers": [kernel.n_regs for kernel in built],
            "spills": [kernel.n_spills for kernel in built],
            "smem": [kernel.metadata.shared for kernel in built],
        }
        worst = worst_error(inputs, direction)
        if not worst < 0.03:
            record["error"] = f"wrong: {worst:.3g}"
    except Exception as error:  # a candidate may fail in any way; it is reported and left out
        record["error"] = f"{type(error).__name__}: {str(error)[:120]}"
    return record | {"compile_s": round(time.time() - began, 1)}


def worst_error(inputs: Inputs, direction: Pass) -> float:
    """The largest error of what a pass has written, relative to the largest element."""
    plain = functools.partial(formula, inputs.problem)
    q, k, v = leaves = tuple(t.float().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    out, lse = plain(q, k, v)
    if direction == "forward":
        return max(relative(inputs.out, out), relative(inputs.lse, lse))
    if direction in HIGHER:
        along = tuple(t.float() for t in inputs.along)
        pushed: Any = torch.func.jvp(plain, leaves, along)
        dot_out, dot_lse = pushed[1]
        if direction in ("tangent", "tangent_only"):
            pairs = (("out", out), ("lse", lse), ("dot_out", dot_out), ("dot_lse", dot_lse))
            return max(relative(inputs.tensors[name], want) for name, want in pairs)
        dq, dk, dv = torch.autograd.grad(dot_out, leaves, inputs.dout.float())
    else:
        dq, dk, dv = torch.autograd.grad(out, leaves, inputs.dout.float())
    of_queries = direction in ("dq", "twice_dq")
    return relative(inputs.dq, dq) if of_queries else max(relative(inputs.dk, dk), relative(inputs.dv, dv))


def formula(p: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch."""
    scores = q @ k.repeat_interleave(p.group_size, 1).transpose(-1, -2) * p.scale
    if p.causal:
        keep = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device=q.device).tril(p.seqlen_k - p.seqlen_q)
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v.repeat_interleave(p.group_size, 1), scores.logsumexp(-1)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest wanted element, or over 1 where that is smaller."""
    want = want.detach()
    return float((got.float() - want).abs().max() / want.abs().max().clamp(min=1.0))


def check_all(jobs: list[Job], workers: int) -> dict[Job, dict[str, Any]]:
    """Check every candidate; a crashed worker breaks the pool: its jobs are reported, the rest is kept."""
    results: dict[Job, dict[str, Any]] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(check, *job): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            direction, dim, causal, config = job = futures[future]
            error = future.exception()
            facts = {"pass": direction, "dim": dim, "causal": causal, "config": name_of(config)}
            results[job] = facts | {"error": f"crashed: {error}"} if error else future.result()
    return results


def milliseconds(run: Run, at_least: float = 3.0) -> float:
    """Mean of enough back-to-back runs to last `at_least` milliseconds."""
    repeats = max(1, min(200, int(at_least / max(1e3 * measuring.device_seconds(run), 1e-3))))
    return 1e3 * measuring.device_seconds(run, repeats) / repeats


def round_robin(runs: dict[str, Run]) -> dict[str, float]:
    """Median milliseconds of each, over interleaved rounds; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, run in runs.items():
            taken = milliseconds(run)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def flops(p: AttentionProblem, direction: str) -> float:
    """Of the matrix products a pass needs; half of them for causal."""
    products = {"forward": 2, "dkdv": 4, "dq": 3, "backward": 5, "tangent": 6, "tangent_only": 5}
    products |= {"twice_dkdv": 8, "twice_dq": 7}
    return (
        2.0
        * products[direction]
        * p.batch
        * p.num_heads
        * p.seqlen_q
        * p.seqlen_k
        * p.head_dim
        / (2 if p.causal else 1)
    )


def cell_name(direction: str, p: AttentionProblem) -> str:
    """What a row of the results is called."""
    return f"{direction} D={p.head_dim} {'causal' if p.causal else 'full'} N={p.seqlen_q}"


def report(cell: str, p: AttentionProblem, direction: str, taken: dict[str, float], records: Records) -> None:
    """Record all rates in TFLOP/s, print the first eight."""
    rates = {name: flops(p, direction) / ms * 1e-9 for name, ms in taken.items()}
    records.append({"cell": cell, "tflops": {name: round(rate, 1) for name, rate in rates.items()}})
    print(f"{cell:34s}", "  ".join(f"{name} {rate:.0f}" for name, rate in list(rates.items())[:8]), flush=True)


def tune_cell(direction: Pass, p: AttentionProblem, good: list[Config], records: Records) -> Config | None:
    """Time all candidates of a cell, then the best one with other numbers of heads side by side."""
    inputs = Inputs(p, direction != "forward", direction in HIGHER)

    def timed(candidates: list[Config]) -> dict[str, float]:
        return round_robin({name_of(c): inputs.launch(direction, c) for c in candidates})

    taken = timed(good)
    if not taken:
        return None
    ranked = sorted(taken, key=taken.__getitem__)
    cell = cell_name(direction, p)
    report(cell, p, direction, {name: taken[name] for name in ranked}, records)
    best = config_of(ranked[0])
    waves = [dataclasses.replace(best, heads_per_wave=heads) for heads in (None, 1, 2, 4, 8, 16, 64)]
    report(cell + " heads", p, direction, timed(waves), records)
    return best


def sdpa(which: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's attention by one of its kernels."""
    with sdpa_kernel(which):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def peer_runs(p: AttentionProblem, inputs: Inputs, backward: bool, flex: Any) -> dict[str, Run]:
    """What the peers do for one pass, on tensors of the same values."""
    q, k, v = (t.detach().requires_grad_(backward) for t in (inputs.q, inputs.k, inputs.v))
    dout = torch.randn_like(q)

    def tried(attend: Callable[[], Tensor]) -> Run:
        run: Run = attend
        if backward:
            run = functools.partial(torch.autograd.grad, attend(), (q, k, v), dout, retain_graph=True)
        run()
        torch.cuda.synchronize()
        return run

    attends: dict[str, Callable[[], Tensor]] = {
        "fa2": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION, q, k, v, p.causal),
        "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION, q, k, v, p.causal),
    }
    if flex is not None:
        attends["flex"] = functools.partial(flex, q, k, v)
    peers: dict[str, Run] = {}
    for name, attend in attends.items():
        peers |= attempt(name, functools.partial(tried, attend))
    return peers


def compiled_flex(p: AttentionProblem) -> Any:
    """FlexAttention, with a block mask where the problem is causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call = torch.compile(flex_attention, dynamic=False)
    if not p.causal:
        return call

    def visible(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    block = create_block_mask(visible, None, None, p.seqlen_q, p.seqlen_k, device="cuda")
    return functools.partial(call, block_mask=block)


def compare_cell(p: AttentionProblem, chosen: dict[Pass, Config], with_flex: bool, records: Records) -> None:
    """The whole forward and backward with the chosen configurations against the peers."""
    flex = compiled_flex(p) if with_flex else None
    for backward in (False, True):
        inputs = Inputs(p, True)
        directions: tuple[Pass, ...] = ("dkdv", "dq") if backward else ("forward",)
        calls = [launch.stats_call(inputs.plan, inputs.views, ())] if backward else []
        calls += [call for name in directions for call in inputs.calls(name, chosen[name])]
        taken = round_robin({"tilewise": inputs.runner(calls)} | peer_runs(p, inputs, backward, flex))
        direction = "backward" if backward else "forward"
        report(cell_name(direction, p) + " peers", p, direction, taken, records)


def graph_of(run: Run) -> Run:
    """The same work as a CUDA graph, so that host time does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def decode_run(inputs: Inputs, config: Config, splits: int) -> Run:
    """Split-KV decoding and its merge."""
    plan = inputs.plan._replace(num_splits=splits)
    inputs.tensors["workspace"] = torch.empty(sum(launch.parts_size(plan)) + 4, device="cuda")
    with overridden({"decode": config}):
        calls = launch.decode_calls(plan, inputs.views)
    return graph_of(inputs.runner(calls))


def cudnn_decode_run(inputs: Inputs) -> Run:
    """The same by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return graph_of(
            functools.partial(
                torch.nn.functional.scaled_dot_product_attention, inputs.q, inputs.k, inputs.v, enable_gqa=True
            )
        )


def tune_decode(records: Records) -> None:
    """Time the decode tiles, then the best one with other numbers of splits."""
    for batch, keys in DECODE_CASES:
        inputs = Inputs(problem_of(batch, 32, 8, 1, keys, 128, False), False)
        read = inputs.k.numel() * 2 * inputs.k.element_size()
        default = inputs.plan.num_splits
        runs: dict[str, Run] = {}
        for config in DECODE:
            runs |= attempt(f"{name_of(config)}/{default}", functools.partial(decode_run, inputs, config, default))
        runs |= attempt("cudnn", functools.partial(cudnn_decode_run, inputs))
        taken = round_robin(runs)
        ranked = sorted(taken, key=taken.__getitem__)
        report_decode(f"decode B={batch} N={keys}", read, {name: taken[name] for name in ranked}, records)
        best = next(c for name in ranked for c in DECODE if name.startswith(name_of(c) + "/"))
        splits = sorted({max(1, default // 4), max(1, default // 2), default, default * 2, default * 3, default * 4})
        taken = round_robin({f"{name_of(best)}/{s}": decode_run(inputs, best, s) for s in splits if s <= 256})
        report_decode(f"decode B={batch} N={keys} splits", read, taken, records)


def report_decode(cell: str, read: int, taken: dict[str, float], records: Records) -> None:
    """Record and print GB/s of the keys and values read."""
    rates = {name: read / ms * 1e-6 for name, ms in taken.items()}
    records.append({"cell": cell, "gb_s": {name: round(rate) for name, rate in rates.items()}})
    print(f"{cell:28s}", "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)


def host_overhead(records: Records) -> None:
    """Microseconds of host time a call takes: many tiny calls queued without waiting."""
    for name, p in (
        ("forward", problem_of(1, 4, 4, 128, 128, 64, True)),
        ("decode", problem_of(1, 32, 8, 1, 8192, 128, False)),
    ):
        inputs = Inputs(p, False)
        for _ in range(20):
            launch.run_forward(p, inputs.operands)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            launch.run_forward(p, inputs.operands)
        taken = (time.perf_counter() - began) / 200 * 1e6
        torch.cuda.synchronize()
        records.append({"cell": f"host overhead {name}", "us": round(taken, 1)})
        print(f"host overhead {name}: {taken:.1f} us", flush=True)


def parsed_options() -> argparse.Namespace:
    """The command line, lists split."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file")
    parser.add_argument("--only", type=names, default="forward,dkdv,dq,peers,decode,overhead")
    parser.add_argument("--dims", type=numbers, default="64,128,256", help="of these three")
    parser.add_argument("--lengths", type=numbers, default="1024,4096,16384")
    parser.add_argument("--flex-lengths", type=numbers, default="4096,16384")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile and check")
    parser.add_argument("--check-only", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--commit", help="the commit that is tuned, where the source is not in a checkout")
    return parser.parse_args()


def check_candidates(options: argparse.Namespace, passes: list[Pass]) -> dict[Job, dict[str, Any]]:
    """Compile and check every candidate of the passes, causal and not; say which are left out."""
    began, workers = time.time(), options.workers
    if not options.check_only and options.out.exists():
        found = [record for record in json.loads(options.out.read_text())["records"] if "pass" in record]
        return {(r["pass"], r["dim"], r["causal"], config_of(r["config"])): r for r in found}
    cells = [(name, dim, causal) for name in passes for dim in options.dims for causal in (False, True)]
    jobs = [
        (*cell, config)
        for cell in cells
        for config in dict.fromkeys(c for length in options.lengths for c in candidates(cell[0], cell[1], length))
    ]
    checked = check_all(jobs, workers) if jobs else {}
    bad = [record for record in checked.values() if record["error"]]
    print(f"{len(jobs)} candidates checked in {time.time() - began:.0f} s, {len(bad)} left out", flush=True)
    for record in bad:
        print("  left out:", *(record[key] for key in ("pass", "dim", "causal", "config", "error")), flush=True)
    return checked


def main() -> None:
    """Check, then time."""
    options = parsed_options()
    passes: list[Pass] = [name for name in TUNED if name in options.only]
    began = time.time()
    facts = {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": options.commit or measuring.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }
    checked = check_candidates(options, passes)
    records: Records = list(checked.values())
    if options.check_only:
        save(options.out, facts, records)
        return
    gpu = devices.of(torch.device("cuda"))
    cells = [(dim, causal, length) for dim in options.dims for causal in (False, True) for length in options.lengths]
    for dim, causal, length in cells:
        p = problem_of(TOKENS // length, WIDTH // dim, WIDTH // dim, length, length, dim, causal)
        chosen = {name: configs.choose(name, gpu, 2, dim, False) for name in TUNED}
        for name in passes:
            tried = candidates(name, dim, length)
            good = [c for c in tried if not checked.get((name, dim, causal, c), {"error": "unchecked"})["error"]]
            chosen[name] = tune_cell(name, p, good, records) or chosen[name]
        if "peers" in options.only:
            compare_cell(p, chosen, length in options.flex_lengths, records)
        save(options.out, facts, records)
    if "decode" in options.only:
        tune_decode(records)
    if "overhead" in options.only:
        host_overhead(records)
    save(options.out, facts, records)
    print(f"done in {time.time() - began:.0f} s", flush=True)


def save(path: Path, facts: dict[str, Any], records: Records) -> None:
    """Write what is there so far."""
    path.write_text(json.dumps(facts | {"records": records}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
