"""Check and time candidate tile configurations of the Triton backend against SDPA flash, cuDNN and FlexAttention on this GPU.

    python bench/tune_triton.py out.json [--only forward,dkdv,dq,decode,peers,overhead] [--dims 64,128,256] [--lengths 1024,4096,16384]

Candidates are compiled and checked in parallel processes first; a candidate that is wrong, spills out of resources or crashes is not
timed. Then every cell (pass, head_dim, causal, length) is timed round-robin in one process: the chip is power limited, so only ratios
within a cell mean something. bf16, 16384 tokens, heads * head_dim = 2048.
"""

# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import device as devices
from tilewise.backends.triton import arguments, configs, launch, planning
from tilewise.backends.triton.configs import Config, Pass
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

TOKENS, WIDTH, ROUNDS = 16384, 2048, 5
C = Config


def forward_candidates(dim: int) -> list[Config]:
    if dim == 64:
        shapes = [
            (128, 64, 4, 3),
            (128, 128, 4, 2),
            (128, 64, 8, 3),
            (128, 128, 8, 2),
            (128, 128, 8, 3),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (256, 64, 8, 2),
            (256, 64, 8, 3),
        ]
    elif dim == 128:
        shapes = [
            (128, 128, 8, 2),
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (128, 64, 4, 2),
            (64, 128, 4, 2),
            (128, 32, 8, 4),
            (256, 64, 8, 2),
        ]
    else:
        shapes = [
            (128, 64, 8, 2),
            (128, 32, 8, 3),
            (128, 32, 8, 2),
            (64, 32, 4, 2),
            (64, 64, 4, 2),
            (64, 32, 4, 3),
            (128, 64, 8, 1),
        ]
    return [C(*s, descriptors=d) for s in shapes for d in (False, True)]


def dkdv_candidates(dim: int) -> list[Config]:
    if dim == 64:
        shapes = [
            (64, 128, 8, 2),
            (64, 128, 8, 3),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (128, 128, 8, 2),
            (128, 64, 4, 2),
            (64, 128, 4, 2),
            (32, 128, 4, 3),
        ]
    elif dim == 128:
        shapes = [
            (64, 128, 8, 2),
            (64, 128, 8, 3),
            (32, 128, 8, 2),
            (32, 128, 8, 3),
            (64, 64, 4, 2),
            (32, 64, 4, 3),
            (128, 64, 8, 2),
            (16, 128, 8, 3),
        ]
    else:
        shapes = [
            (32, 64, 8, 2),
            (32, 64, 8, 1),
            (64, 64, 8, 1),
            (16, 64, 8, 2),
            (16, 64, 4, 2),
            (32, 128, 8, 1),
            (16, 128, 8, 2),
            (64, 64, 8, 2),
        ]
    early = [C(*s, descriptors=d) for s in shapes for d in (False, True)]
    return early + [
        C(*s, descriptors=d, early_dp=False)
        for s in shapes[:3] + [s for s in shapes[3:] if s[0] == 128]
        for d in (False, True)
    ]


def dq_candidates(dim: int) -> list[Config]:
    if dim == 64:
        shapes = [
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (128, 128, 8, 2),
            (64, 64, 4, 3),
            (128, 64, 4, 2),
            (64, 128, 4, 2),
            (128, 32, 4, 3),
        ]
    elif dim == 128:
        shapes = [
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 128, 8, 2),
            (64, 64, 4, 2),
            (128, 32, 8, 3),
            (128, 32, 4, 2),
            (64, 32, 4, 3),
        ]
    else:
        shapes = [
            (128, 32, 8, 2),
            (64, 32, 8, 2),
            (64, 32, 4, 2),
            (64, 32, 8, 1),
            (128, 64, 8, 1),
            (64, 64, 8, 1),
            (64, 64, 4, 1),
            (128, 32, 8, 1),
        ]
    return [C(*s, descriptors=d) for s in shapes for d in (False, True)]


CANDIDATES: dict[Pass, Callable[[int], list[Config]]] = {
    "forward": forward_candidates,
    "dkdv": dkdv_candidates,
    "dq": dq_candidates,
}
DECODE = [
    C(16, n, w, s)
    for n, w, s in (
        (32, 4, 3),
        (32, 4, 5),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (64, 8, 3),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 2),
        (128, 8, 3),
        (64, 2, 3),
        (32, 2, 4),
    )
]
DECODE_CASES = ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (16, 65536))


def problem_of(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, dim: int, causal: bool
) -> AttentionProblem:
    return AttentionProblem(
        kind="dense", dtype=torch.bfloat16, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=batch * seqlen_q, total_k=batch * seqlen_k,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim, scale=dim**-0.5, causal=causal, needs_grad=True,
    )  # fmt: skip


class Inputs:
    """A dense problem with its tensors and everything a single kernel of the backward needs."""

    def __init__(self, problem: AttentionProblem, backward: bool) -> None:
        self.problem = p = problem
        make = lambda h, s: torch.randn(p.batch, h, s, p.head_dim, device="cuda", dtype=p.dtype)  # noqa: E731
        self.q, self.k, self.v = (
            make(p.num_heads, p.seqlen_q),
            make(p.num_kv_heads, p.seqlen_k),
            make(p.num_kv_heads, p.seqlen_k),
        )
        self.operands = Operands(self.q, self.k, self.v)
        self.plan = planning.plan_for(p, devices.of(self.q.device), False)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(p.lse_shape, device="cuda")
        if backward:
            self.out, self.lse = launch.run_forward(p, self.operands)
            self.dout = torch.randn_like(self.q)
            self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
            self.lse_unit, self.delta = torch.empty_like(self.lse), torch.empty_like(self.lse)
            self.stats().start()
            rows = arguments.dense_rows
            self.shared = arguments.score_arguments(self.plan, self.operands) | {
                "dout": rows(self.dout), "lse_unit": rows(self.lse_unit), "delta": rows(self.delta)}  # fmt: skip

    def stats(self) -> launch.Launch:
        return launch.stats_launch(self.plan, self.out, self.dout, self.lse, None, self.lse_unit, self.delta)

    def launch(self, direction: Pass, config: Config) -> launch.Launch:
        rows = arguments.dense_rows
        with configs.overridden({direction: config}):
            if direction == "forward":
                return launch.forward_launches(self.plan, self.operands, self.out, self.lse)[0]
            if direction == "dkdv":
                return launch.key_gradient_launch(self.plan, self.shared, rows(self.dk), rows(self.dv))
            return launch.query_gradient_launch(self.plan, self.shared, self.dq)


def start(item: launch.Launch) -> Any:
    return item.kernel[item.programs](**item.arguments, num_warps=item.num_warps, num_stages=item.num_stages)


def check(direction: Pass, dim: int, causal: bool, config: Config) -> dict[str, Any]:
    """Run one candidate on a small ragged problem and compare with fp32 PyTorch."""
    torch.manual_seed(0)
    record: dict[str, Any] = {"pass": direction, "dim": dim, "causal": causal, "config": repr(config), "error": None}
    began = time.time()
    try:
        inputs = Inputs(problem_of(2, 4, 2, 300, 557, dim, causal), direction != "forward")
        compiled = start(inputs.launch(direction, config))
        torch.cuda.synchronize()
        record |= {"registers": compiled.n_regs, "spills": compiled.n_spills, "smem": compiled.metadata.shared}
        worst = worst_error(inputs, direction)
        if not worst < 0.03:
            record["error"] = f"wrong: {worst:.3g}"
    except Exception as error:  # a candidate may fail in any way; it is reported and left out
        record["error"] = f"{type(error).__name__}: {str(error)[:120]}"
    return record | {"compile_s": round(time.time() - began, 1)}


def worst_error(inputs: Inputs, direction: Pass) -> float:
    p = inputs.problem
    q, k, v = (t.float().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    heads = p.group_size
    scores = q @ k.repeat_interleave(heads, 1).transpose(-1, -2) * p.scale
    if p.causal:
        keep = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device="cuda").tril(p.seqlen_k - p.seqlen_q)
        scores = scores.masked_fill(~keep, float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(heads, 1)
    if direction == "forward":
        return max(relative(inputs.out, out), relative(inputs.lse, scores.logsumexp(-1)))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.dout.float())
    return relative(inputs.dq, dq) if direction == "dq" else max(relative(inputs.dk, dk), relative(inputs.dv, dv))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).abs().max() / want.abs().max().clamp(min=1.0))


def check_all(jobs: list[tuple[Pass, int, bool, Config]], workers: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    results = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(check, *job): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            job = futures[future]
            try:
                results[job] = future.result()
            except Exception as error:  # a crashed worker breaks the pool: report its jobs, keep the rest
                results[job] = {
                    "pass": job[0],
                    "dim": job[1],
                    "causal": job[2],
                    "config": repr(job[3]),
                    "error": f"crashed: {error}",
                }
    return results


def milliseconds(run: Callable[[], Any], at_least: float = 3.0) -> float:
    """Mean of enough back-to-back runs to last `at_least` milliseconds."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    repeats = max(1, min(200, int(at_least / max(first.elapsed_time(last), 1e-3))))
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / repeats


def round_robin(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, over interleaved rounds; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, run in runs.items():
            taken = milliseconds(run)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def flops(p: AttentionProblem, direction: str) -> float:
    products = {"forward": 2, "dkdv": 4, "dq": 3, "backward": 5}[direction]
    return 2.0 * products * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * p.head_dim / (2 if p.causal else 1)


def short(config: Config) -> str:
    extra = (
        ("T" if config.descriptors else "")
        + ("" if config.early_dp else "L")
        + (f"h{config.heads_per_wave}" if config.heads_per_wave else "")
    )
    return f"{config.block_m}x{config.block_n}w{config.num_warps}s{config.num_stages}{extra}"


def cell_name(direction: str, p: AttentionProblem) -> str:
    return f"{direction} D={p.head_dim} {'causal' if p.causal else 'full'} N={p.seqlen_q}"


def tune_cell(direction: Pass, p: AttentionProblem, good: list[Config], records: list[dict[str, Any]]) -> Config | None:
    """Time all candidates of a cell, then the best one with other numbers of heads side by side."""
    inputs = Inputs(p, direction != "forward")
    launches = {short(c): inputs.launch(direction, c) for c in good}
    by_name = {short(c): c for c in good}
    taken = round_robin({name: (lambda item=item: start(item)) for name, item in launches.items()})
    if not taken:
        return None
    ranked = sorted(taken, key=taken.__getitem__)
    rate = lambda ms: flops(p, direction) / ms * 1e-9  # noqa: E731
    records.append({"cell": cell_name(direction, p), "tflops": {name: round(rate(taken[name]), 1) for name in ranked}})
    print(
        f"{cell_name(direction, p):28s}",
        "  ".join(f"{name} {rate(taken[name]):.0f}" for name in ranked[:6]),
        flush=True,
    )
    best = by_name[ranked[0]]
    waves = [
        C(best.block_m, best.block_n, best.num_warps, best.num_stages, best.descriptors, best.early_dp, h)
        for h in (None, 1, 2, 4, 8, 16, 64)
    ]
    taken = round_robin({short(c): (lambda item=inputs.launch(direction, c): start(item)) for c in waves})
    records.append(
        {"cell": cell_name(direction, p) + " heads", "tflops": {name: round(rate(ms), 1) for name, ms in taken.items()}}
    )
    print(" " * 28, "  ".join(f"{name} {rate(ms):.0f}" for name, ms in taken.items()), flush=True)
    return best


def peer_runs(p: AttentionProblem, inputs: Inputs, backward: bool, flex: Any) -> dict[str, Callable[[], Any]]:
    q, k, v = (t.detach().requires_grad_(backward) for t in (inputs.q, inputs.k, inputs.v))
    dout = torch.randn_like(q)

    def of(attend: Callable[[], Tensor]) -> Callable[[], Any]:
        if not backward:
            return attend
        out = attend()
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def sdpa(which: SDPBackend) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with sdpa_kernel(which):
                return F.scaled_dot_product_attention(q, k, v, is_causal=p.causal)

        return attend

    peers: dict[str, Callable[[], Any]] = {}
    attempts: dict[str, Callable[[], Tensor]] = {
        "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    if flex is not None:
        attempts["flex"] = lambda: flex(q, k, v)
    for name, attend in attempts.items():
        try:
            run = of(attend)
            run()
            torch.cuda.synchronize()
            peers[name] = run
        except Exception as error:
            print("peer", name, "left out:", type(error).__name__, str(error)[:100], flush=True)
    return peers


def compiled_flex(p: AttentionProblem) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call = torch.compile(flex_attention, dynamic=False)
    if not p.causal:
        return call
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, p.seqlen_q, p.seqlen_k, device="cuda")
    return lambda q, k, v: call(q, k, v, block_mask=block)


def compare_cell(
    p: AttentionProblem, chosen: dict[Pass, Config], with_flex: bool, records: list[dict[str, Any]]
) -> None:
    """The whole forward and backward with the chosen configurations against the peers."""
    flex = compiled_flex(p) if with_flex else None
    for backward in (False, True):
        inputs = Inputs(p, True)
        direction = "backward" if backward else "forward"

        def ours(inputs: Inputs = inputs, backward: bool = backward) -> None:
            if not backward:
                start(ours_forward)
                return
            for item in ours_backward:
                start(item)

        ours_forward = inputs.launch("forward", chosen["forward"])
        ours_backward = [inputs.stats(), inputs.launch("dkdv", chosen["dkdv"]), inputs.launch("dq", chosen["dq"])]
        taken = round_robin({"tilewise": ours} | peer_runs(p, inputs, backward, flex))
        rates = {name: flops(p, direction) / ms * 1e-9 for name, ms in taken.items()}
        records.append(
            {
                "cell": cell_name(direction, p) + " peers",
                "tflops": {name: round(rate, 1) for name, rate in rates.items()},
            }
        )
        print(
            f"{cell_name(direction, p):28s}",
            "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items()),
            flush=True,
        )


def graph_of(run: Callable[[], Any]) -> Callable[[], None]:
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


def decode_runs(inputs: Inputs, config: Config, splits: int) -> Callable[[], None]:
    plan = inputs.plan._replace(num_splits=splits)
    with configs.overridden({"decode": config}):
        items = launch.decode_launches(plan, inputs.operands, inputs.out, inputs.lse)
    return graph_of(lambda: [start(item) for item in items])


def tune_decode(records: list[dict[str, Any]]) -> None:
    for batch, keys in DECODE_CASES:
        inputs = Inputs(problem_of(batch, 32, 8, 1, keys, 128, False), False)
        read = inputs.k.numel() * 2 * inputs.k.element_size()
        default = inputs.plan.num_splits
        runs: dict[str, Callable[[], None]] = {}
        for config in DECODE:
            try:
                runs[f"{short(config)}/{default}"] = decode_runs(inputs, config, default)
            except Exception as error:
                print("decode", short(config), "left out:", str(error)[:80])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            peer = lambda: F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, enable_gqa=True)  # noqa: E731
            try:
                runs["cudnn"] = graph_of(peer)
            except Exception as error:
                print("cudnn decode left out:", str(error)[:80])
        taken = round_robin(runs)
        ranked = sorted(taken, key=taken.__getitem__)
        report_decode(f"decode B={batch} N={keys}", read, {name: taken[name] for name in ranked}, records)
        best = next(c for name in ranked for c in DECODE if name.startswith(short(c) + "/"))
        splits = sorted({max(1, default // 4), max(1, default // 2), default, default * 2, default * 3, default * 4})
        taken = round_robin({f"{short(best)}/{s}": decode_runs(inputs, best, s) for s in splits if s <= 256})
        report_decode(f"decode B={batch} N={keys} splits", read, taken, records)


def report_decode(cell: str, read: int, taken: dict[str, float], records: list[dict[str, Any]]) -> None:
    rates = {name: read / ms * 1e-6 for name, ms in taken.items()}
    records.append({"cell": cell, "gb_s": {name: round(rate) for name, rate in rates.items()}})
    print(f"{cell:28s}", "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), flush=True)


def host_overhead(records: list[dict[str, Any]]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--only", default="forward,dkdv,dq,peers,decode,overhead")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--flex-lengths", default="4096,16384")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    only, dims, lengths = (
        options.only.split(","),
        [int(d) for d in options.dims.split(",")],
        [int(n) for n in options.lengths.split(",")],
    )
    passes: list[Pass] = [name for name in CANDIDATES if name in only]
    began = time.time()
    jobs = [
        (name, dim, causal, c)
        for name in passes
        for dim in dims
        for causal in (False, True)
        for c in CANDIDATES[name](dim)
    ]
    checked = check_all(jobs, options.workers) if jobs else {}
    records: list[dict[str, Any]] = list(checked.values())
    bad = [r for r in records if r["error"]]
    print(
        f"{len(jobs)} candidates compiled and checked in {time.time() - began:.0f} s, {len(bad)} left out", flush=True
    )
    for r in bad:
        print("  left out:", r["pass"], r["dim"], r["causal"], r["config"], r["error"], flush=True)
    for dim in dims:
        for causal in (False, True):
            for length in lengths:
                p = problem_of(TOKENS // length, WIDTH // dim, WIDTH // dim, length, length, dim, causal)
                chosen: dict[Pass, Config] = {
                    name: configs.choose(name, devices.of(torch.device("cuda")), 2, dim, False) for name in CANDIDATES
                }
                for name in passes:
                    good = [
                        job[3]
                        for job, record in checked.items()
                        if job[:3] == (name, dim, causal) and not record["error"]
                    ]
                    chosen[name] = tune_cell(name, p, good, records) or chosen[name]
                if "peers" in only:
                    compare_cell(p, chosen, str(length) in options.flex_lengths.split(",") and dim <= 128, records)
                save(options.out, records)
    if "decode" in only:
        tune_decode(records)
    if "overhead" in only:
        host_overhead(records)
    save(options.out, records)
    print(f"done in {time.time() - began:.0f} s", flush=True)


def save(path: str, records: list[dict[str, Any]]) -> None:
    versions = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"versions": versions, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
