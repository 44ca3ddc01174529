"""Judge and time the Hopper kernels on one GPU: python3 bench/hopper_check.py --json FILE [--budget SECONDS].

First correctness: groups of cases run in processes of their own, side by side (a hang or a crash costs one group, which
names the case it died in), against fp64, with NaN in every uninitialised buffer. Then speed, in one process: ours and
PyTorch's cuDNN and flash (FA2) kernels take turns, medians over rounds (the chip is power limited, whoever runs first
looks 10 % faster); our Triton kernels, too, where the Hopper ones are new (backward over 128 columns, forward over
256, softcap, paged), and the configurations of hopper_candidates.py. The speed of a kernel that failed a case is not
printed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "bench"))

# ruff: noqa: E402
import torch

from hopper_candidates import backward_candidates
from hopper_cases import CASES, Case, groups
from hopper_judge import check_backward, check_forward, make_inputs, operands_of, problem_of
from suite import measuring
from tilewise.backends.hopper import BACKEND
from tilewise.backends.triton import BACKEND as TRITON
from tilewise.bench import machine
from tilewise.operands import Wanted

TOKENS, WIDTH = 16384, 2048
SEQLENS = (1024, 4096, 16384)
# A group that says nothing for this long hangs; the first case of a configuration compiles for about ten seconds.
SILENCE_S = 75.0


# ---- correctness, in a worker process


def worker(group: str) -> None:
    """Run the cases of a group, saying before and after each one what happens."""
    for case in CASES[group]:
        print("START " + case.name, flush=True)
        try:
            wrong = (check_backward if case.backward else check_forward)(case)
        except Exception:
            wrong = ["exception: " + traceback.format_exc()[-700:]]
        print("DONE " + json.dumps([case.name, wrong]), flush=True)
        if any("CUDA" in w or "Compil" in w for w in wrong):
            break


# ---- the parent: groups side by side


class Running(NamedTuple):
    """A group in its process, and the file it writes to."""

    group: str
    process: subprocess.Popen[bytes]
    log: Path


def start_group(group: str, folder: Path) -> Running:
    """Start a worker."""
    log = folder / f"{group}.log"
    with log.open("wb") as sink:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", group]
        return Running(group, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT), log)


def verdict(running: Running, hung: bool) -> dict[str, Any]:
    """What a worker's log says."""
    lines = running.log.read_text(errors="replace").splitlines()
    done = [json.loads(line[5:]) for line in lines if line.startswith("DONE ")]
    started = [line[6:] for line in lines if line.startswith("START ")]
    failures = [f"{name}: {'; '.join(wrong)}" for name, wrong in done if wrong]
    if hung or len(done) < len(started) or not started:
        tail = "" if hung else " | " + " ".join(lines[-6:])[-600:]
        failures.append(f"{started[-1] if started else 'start'}: {'HANG' if hung else 'died'}{tail}")
    return {"group": running.group, "cases": len(CASES[running.group]), "done": len(done), "failures": failures}


def check_all(names: list[str], jobs: int, deadline: float, folder: Path) -> list[dict[str, Any]]:
    """Run every group, at most `jobs` at a time."""
    waiting, active, results = list(names), list[Running](), list[dict[str, Any]]()
    while waiting or active:
        while waiting and len(active) < jobs and time.monotonic() < deadline:
            active.append(start_group(waiting.pop(0), folder))
        if time.monotonic() > deadline:
            waiting.clear()
        for running in list(active):
            silent = time.time() - running.log.stat().st_mtime > SILENCE_S or time.monotonic() > deadline
            if running.process.poll() is None and not silent:
                continue
            hung = running.process.poll() is None
            if hung:
                running.process.kill()
            active.remove(running)
            results.append(verdict(running, hung))
            last = results[-1]
            mark = "FAIL" if last["failures"] else "pass"
            print(f"{mark} {last['group']:26s} {last['done']}/{last['cases']}", flush=True)
            for failure in last["failures"][:3]:
                print("     " + failure[:500], flush=True)
        time.sleep(0.1)
    return results


# ---- speed, in a process of its own


def medians(candidates: dict[str, Callable[[], Any]], rounds: int = 5, budget_ms: float = 12.0) -> dict[str, float]:
    """Milliseconds a call; the candidates take turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    estimate: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, call in candidates.items():
            count = 2 if turn == 0 else max(2, int(budget_ms / estimate[name]))
            call()
            estimate[name] = max(1e3 * measuring.device_seconds(call, count) / count, 1e-3)
            if turn:
                times[name].append(estimate[name])
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's attention with one of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}


def cell_candidates(case: Case, direction: str) -> dict[str, Callable[[], Any]]:
    """What is timed for one cell: ours and the peers on the same tensors."""
    inputs = make_inputs(case)
    needs_grad = direction not in ("forward", "paged")
    problem, operands = problem_of(case, needs_grad=needs_grad), operands_of(case, inputs)
    q, k, v, dout = (inputs[n] for n in ("q", "k", "v", "dout"))
    if direction == "paged":
        return {
            "ours": functools.partial(BACKEND.forward, problem, operands),
            "triton": functools.partial(TRITON.forward, problem, operands),
        }
    if direction == "forward":
        calls: dict[str, Callable[[], Any]] = {"ours": lambda: BACKEND.forward(problem, operands)}
        if case.head_dim > 256:  # no peer has it
            return calls | {"triton": lambda: TRITON.forward(problem, operands)}
        for name, kernel in PEERS.items():
            calls[name] = functools.partial(sdpa, kernel, q, k, v, case.causal)
        return calls
    out, lse = BACKEND.forward(problem, operands)
    calls = {"ours": lambda: BACKEND.backward(problem, operands, out, lse, dout, None, Wanted())}
    calls |= backward_candidates(problem, operands, out, lse, dout)
    if case.head_dim > 128 or case.softcap is not None:
        calls["triton"] = lambda: TRITON.backward(problem, operands, out, lse, dout, None, Wanted())
    if case.softcap is not None:  # no peer has it
        return calls
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    for name, kernel in PEERS.items():
        with contextlib.suppress(RuntimeError):  # not every peer takes unequal head dims
            peer = sdpa(kernel, leaves[0], leaves[1], leaves[2], case.causal)
            calls[name] = functools.partial(torch.autograd.grad, peer, leaves, dout, retain_graph=True)
    return calls


def cells(direction: str) -> Iterator[Case]:
    """The cells of the table: 16384 tokens, heads x head_dim = 2048."""
    for head_dim in (128, 64, 256, 192, 96, *((512, 384) if direction == "forward" else ())):
        for causal in (False, True):
            for seqlen in SEQLENS if head_dim in (64, 128, 256, 512) else (4096,):
                heads = WIDTH // head_dim
                yield Case(
                    f"{direction} D={head_dim} {'causal' if causal else 'full'} N={seqlen}",
                    batch=TOKENS // seqlen, num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
                    head_dim=head_dim, head_dim_v=head_dim, causal=causal, deterministic=direction == "deterministic",
                )  # fmt: skip


def further_cells() -> Iterator[tuple[str, Case]]:
    """(group of cases that must be right, cell) of what has no row in the table."""
    shape: dict[str, Any] = {"batch": 4, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096}
    for head_dim in (128, 64, 256):
        dims: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": True, "softcap": 30.0}
        yield f"backward-d{head_dim}-softcap", Case(f"backward D={head_dim} causal softcap N=4096", **shape, **dims)
    for causal in (False, True):
        dims = {"head_dim": 192, "head_dim_v": 128, "causal": causal}
        kind = "causal" if causal else "full"
        yield "backward-unequal", Case(f"backward D=192/128 {kind} N=4096", **shape, **dims)
    packed: dict[str, Any] = {"kind": "varlen", "lengths_q": (4096,) * 4, "lengths_k": (4096,) * 4, "causal": True}
    for page_size in (None, 64, 128, 256):
        yield "paged-d128", Case(f"paged D=128 causal N=4096 pages={page_size}", **shape, **packed, page_size=page_size)


def tflops(case: Case, direction: str, milliseconds: float) -> float:
    """Of the textbook count: 4 N^2 D a head, half of it for causal, 2.5 times for a backward."""
    pairs = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k * (0.5 if case.causal else 1.0)
    forward = 2 * pairs * (case.head_dim + case.head_dim_v)
    return forward * (1.0 if direction in ("forward", "paged") else 2.5) / milliseconds * 1e-9


def all_cells() -> Iterator[tuple[str, str, Case]]:
    """(group of cases that must be right, direction, cell), what is new first."""
    for group, case in further_cells():
        yield group, group.split("-", maxsplit=1)[0], case
    for direction in ("backward", "deterministic", "forward"):
        for case in cells(direction):
            kind = "" if direction == "deterministic" else "-causal" if case.causal else "-full"
            yield f"{direction}-d{case.head_dim}{kind}", direction, case


def bench(wrong: list[str], deadline: float, path: Path) -> None:
    """Time every cell whose kernel is right; results go to `path` as they come."""
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for _ in range(10):
            warm @ warm
        torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    for group, direction, case in all_cells():
        if group in wrong:
            print(f"{case.name:36s} wrong or not checked, not timed", flush=True)
            continue
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return
        try:
            times = medians(cell_candidates(case, direction))
            measured = {n: tflops(case, direction, ms) for n, ms in times.items()}
        except Exception as error:
            print(f"{case.name}: {error!r}"[:300], flush=True)
            continue
        rows.append({"cell": case.name} | {n: round(t, 1) for n, t in measured.items()})
        shown = "  ".join(f"{n} {t:6.1f} ({measured['ours'] / t:.2f}x)" for n, t in measured.items() if n != "ours")
        print(f"{case.name:36s} ours {measured['ours']:6.1f}  {shown}", flush=True)
        path.write_text(json.dumps(rows))
    for name, value in extras().items():
        print(f"{name}: {value}", flush=True)
        rows.append({"extra": name, "value": value})
        path.write_text(json.dumps(rows))


def host_us(call: Callable[[], Any], count: int = 300) -> float:
    """Microseconds until a call returns, the device being faster than that."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return round(elapsed / count * 1e6, 1)


def extras() -> dict[str, Any]:
    """Host overhead, CUDA graph, packed and grouped heads against dense."""
    small = Case("small", batch=1, num_heads=2, num_kv_heads=2, seqlen_q=128, seqlen_k=128, causal=True)
    inputs = make_inputs(small)
    problem, operands = problem_of(small, needs_grad=False), operands_of(small, inputs)
    out, lse = BACKEND.forward(problem, operands)
    calls: dict[str, Callable[[], Any]] = {
        "forward": functools.partial(BACKEND.forward, problem, operands),
        "backward": functools.partial(BACKEND.backward, problem, operands, out, lse, inputs["dout"], None, Wanted()),
    }
    found: dict[str, Any] = {f"host us a {name} call": host_us(call) for name, call in calls.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = BACKEND.forward(problem, operands)
    out.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    found["graph replay equal"] = bool(torch.equal(out, BACKEND.forward(problem, operands)[0]))
    dense = Case("dense", batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, causal=True)
    packed = dense.replace(kind="varlen", lengths_q=(4096,) * 4, lengths_k=(4096,) * 4)
    grouped = dense.replace(num_kv_heads=4)
    calls = {}
    for name, case in (("dense", dense), ("packed", packed), ("grouped", grouped)):
        inputs = make_inputs(case)
        args = problem_of(case, needs_grad=False), operands_of(case, inputs)
        calls[name] = functools.partial(BACKEND.forward, *args)
    for name, ms in medians(calls).items():
        found[f"TFLOP/s D=128 causal N=4096 {name}"] = round(tflops(dense, "forward", ms), 1)
    return found


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("hopper_check.json"))
    parser.add_argument("--budget", type=float, default=290.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="groups whose name contains one of these, by comma")
    parser.add_argument("--commit", help="the commit that is judged, where the source is not in a checkout")
    parser.add_argument("--worker", default="")
    parser.add_argument("--bench", default=None, help="JSON list of wrong kernels")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.worker:
        worker(args.worker)
    elif args.bench is not None:
        bench(json.loads(args.bench), begin + args.budget, args.json)
    else:
        run_all(args, begin)


def facts(commit: str | None) -> dict[str, Any]:
    """When, where and what was judged, under the names that `tilewise bench` uses."""
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or measuring.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }


def run_all(args: argparse.Namespace, begin: float) -> None:
    """Correctness with at most 60 % of the budget, then speed with what is left."""
    folder = Path(args.json).with_suffix(".logs")
    folder.mkdir(parents=True, exist_ok=True)
    names = [g for g in groups() if any(part in g for part in args.only.split(","))]
    results = check_all(names, args.jobs, begin + 0.6 * args.budget, folder)
    wrong = [g for g in groups() if g not in {r["group"] for r in results if not r["failures"]}]
    left = args.budget - (time.monotonic() - begin)
    print(f"{sum(not r['failures'] for r in results)} of {len(results)} groups pass, {left:.0f} s left", flush=True)
    timings = Path(args.json).with_suffix(".timings.json")
    timings.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", __file__, "--bench", json.dumps(wrong), "--json", str(timings)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*command, "--budget", str(left - 5)], timeout=max(left, 10), check=False)
    speed = json.loads(timings.read_text()) if timings.exists() else []
    found = facts(args.commit) | {"correctness": results, "tflops": speed}
    Path(args.json).write_text(json.dumps(found, indent=1))
    print(f"total {time.monotonic() - begin:.0f} s, written to {args.json}", flush=True)


if __name__ == "__main__":
    main()
