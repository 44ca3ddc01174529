"""Judge and time the Hopper kernels on one GPU: python3 bench/hopper_check.py --json FILE [--budget SECONDS].

First correctness: groups of cases run in processes of their own, side by side (a hang or a crash costs one group, which
names the case it died in), against fp64, with NaN in every uninitialised buffer. Then speed, in one process: ours and
PyTorch's cuDNN and flash (FA2) kernels take turns, medians over rounds (the chip is power limited, whoever runs first
looks 10 % faster). The speed of a kernel that failed a case is not printed.
"""

from __future__ import annotations

import argparse
import contextlib
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

from hopper_cases import CASES, Case, groups
from tilewise import device
from tilewise.backends.hopper import BACKEND
from tilewise.operands import Operands, Wanted
from tilewise.problem import AttentionProblem

DEVICE = "cuda"
TOKENS, WIDTH = 16384, 2048
SEQLENS = (1024, 4096, 16384)
# A group that says nothing for this long hangs; the first case of a configuration compiles for about ten seconds.
SILENCE_S = 75.0
REPEATS = 30


# ---- correctness, in a worker process


def reference(case: Case, inputs: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook attention of one dense sequence in `dtype`; scores and softmax at least in fp32."""
    q, k, v = (inputs[n].to(dtype) for n in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s = (q @ k.transpose(-1, -2)).to(wide) * case.scale
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    left, right = case.band
    hidden = torch.zeros_like(s[0, 0], dtype=torch.bool)
    hidden |= (j > i + right) if right is not None else hidden
    hidden |= (j < i - left) if left is not None else hidden
    s = s.masked_fill(hidden, -torch.inf)
    logits = s
    if case.sinks:
        sink = inputs["sinks"].to(wide).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        logits = torch.cat([s, sink], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return p.to(dtype) @ v, lse


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Dense (batch, heads, rows, dim) or packed (rows, heads, dim) tensors in the storage the case asks for."""
    generator = torch.Generator(DEVICE).manual_seed(len(case.name) * 7919 + case.seqlen_q)

    def rows(heads: int, seqlen: int, dim: int, lengths: tuple[int, ...]) -> torch.Tensor:
        if case.kind == "varlen":
            shape: tuple[int, ...] = (sum(lengths) + case.padding, heads, dim)
        else:
            shape = (case.batch, heads, seqlen, dim)
        x = torch.randn(shape, device=DEVICE, generator=generator).to(case.dtype)
        if case.kind == "varlen":
            x[sum(lengths) :] = torch.nan
            return x
        if case.storage == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if case.storage == "odd":  # neither base nor strides can be addressed by TMA
            wide = torch.full((*shape[:-1], dim + 3), torch.nan, device=DEVICE, dtype=case.dtype)
            return wide[..., 1 : dim + 1].copy_(x)
        return x

    inputs = {
        "q": rows(case.num_heads, case.seqlen_q, case.head_dim, case.lengths_q),
        "k": rows(case.num_kv_heads, case.seqlen_k, case.head_dim, case.lengths_k),
        "v": rows(case.num_kv_heads, case.seqlen_k, case.head_dim_v, case.lengths_k),
        "dout": rows(case.num_heads, case.seqlen_q, case.head_dim_v, case.lengths_q),
    }
    if case.sinks:
        inputs["sinks"] = torch.randn(case.num_heads, device=DEVICE, generator=generator)
    return inputs


class Sequence(NamedTuple):
    """One sequence of a case as dense inputs of batch 1 (or the whole dense batch), and how to cut its results out."""

    inputs: dict[str, torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor]
    keys: Callable[[torch.Tensor], torch.Tensor]
    lse: Callable[[torch.Tensor], torch.Tensor]


def sequences(case: Case, inputs: dict[str, torch.Tensor]) -> Iterator[Sequence]:
    """The independent parts of a case."""
    if case.kind == "dense":
        yield Sequence(inputs, lambda t: t, lambda t: t, lambda t: t)
        return
    starts_q, starts_k = case.starts(case.lengths_q), case.starts(case.lengths_k)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):

        def rows(t: torch.Tensor, a: int = q0, b: int = q1) -> torch.Tensor:
            return t[a:b].transpose(0, 1)[None]

        def keys(t: torch.Tensor, a: int = k0, b: int = k1) -> torch.Tensor:
            return t[a:b].transpose(0, 1)[None]

        def lse(t: torch.Tensor, a: int = q0, b: int = q1) -> torch.Tensor:
            return t[:, a:b][None]

        part = {n: rows(inputs[n]) for n in ("q", "dout")} | {n: keys(inputs[n]) for n in ("k", "v")}
        yield Sequence(inputs | part, rows, keys, lse)


def problem_of(case: Case, *, needs_grad: bool) -> AttentionProblem:
    """The case as a backend sees it."""
    return AttentionProblem(
        kind=case.kind,
        dtype=case.dtype,
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        total_q=sum(case.lengths_q) + case.padding if case.kind == "varlen" else case.batch * case.seqlen_q,
        total_k=sum(case.lengths_k) + case.padding if case.kind == "varlen" else case.batch * case.seqlen_k,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        scale=case.scale,
        causal=case.causal,
        window_left=case.window[0],
        window_right=case.window[1],
        softcap=case.softcap,
        has_sinks=case.sinks,
        layout="bshd" if case.storage == "bshd" else "bhsd",
        deterministic=case.deterministic,
        needs_grad=needs_grad,
    )


def operands_of(case: Case, inputs: dict[str, torch.Tensor]) -> Operands:
    """The case's tensors as a backend gets them."""
    cu: list[Any] = [None, None]
    if case.kind == "varlen":
        cu = [torch.tensor(case.starts(n), dtype=torch.int32, device=DEVICE) for n in (case.lengths_q, case.lengths_k)]
    return Operands(
        inputs["q"], inputs["k"], inputs["v"], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], sinks=inputs.get("sinks")
    )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised floating-point memory is full of NaN."""
    makers = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    plain = [getattr(owner, name) for owner, name in makers]

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            t = make(*args, **kwargs)
            return t.fill_(torch.nan) if t.is_floating_point() else t

        return made

    for (owner, name), make in zip(makers, plain, strict=True):
        setattr(owner, name, filled(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(makers, plain, strict=True):
            setattr(owner, name, make)


def distance(name: str, got: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> str | None:
    """None if `got` is as close to fp64 as twice plain PyTorch in the same dtype (and a few ulp), else how far off."""
    got, ref, plain = got.double(), ref.double(), plain.double()
    finite = torch.isfinite(ref)
    if bool((torch.isnan(got)).any()) or not torch.equal(got[~finite], ref[~finite]):
        return f"{name}: {int(torch.isnan(got).sum())} NaN, infinities {'differ' if (~finite).any() else 'unexpected'}"
    if not bool(finite.any()):
        return None
    error = (got - ref)[finite].abs().max().item()
    # Where plain is not finite (rows without keys) it does not count.
    base = (plain - ref)[finite & torch.isfinite(plain)].abs()
    size = ref[finite].abs().max().item()
    allowed = 2 * (base.max().item() if base.numel() else 0.0) + 4 * torch.finfo(dtype).eps * size
    return None if error <= allowed else f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check_forward(case: Case) -> list[str]:
    """What is wrong with out and lse."""
    inputs = make_inputs(case)
    problem, operands = problem_of(case, needs_grad=False), operands_of(case, inputs)
    if reason := BACKEND.supports(problem, device.of(operands.q.device)):
        return [f"refused: {reason}"]
    with poisoned():
        runs = [BACKEND.forward(problem, operands) for _ in range(REPEATS if case.repeat else 2)]
    torch.cuda.synchronize()
    out, lse = runs[0]
    same = [torch.equal(o, out) and torch.equal(s, lse) for o, s in runs]
    wrong = [f"run {i} differs bitwise" for i, equal in enumerate(same) if not equal]
    for part in sequences(case, inputs):
        ref, ref_lse = reference(case, part.inputs, torch.float64)
        plain, _ = reference(case, part.inputs, case.dtype)
        found = distance("out", part.rows(out), ref, plain, case.dtype)
        found_lse = distance("lse", part.lse(lse), ref_lse, ref_lse + 2e-5, torch.float32)
        wrong += [w for w in (found, found_lse) if w]
    if case.kind == "varlen":
        end = sum(case.lengths_q)
        if not (bool((out[end:] == 0).all()) and bool((lse[:, end:] == -torch.inf).all())):
            wrong.append("rows past the last sequence are not 0 and -inf")
    return wrong


def check_backward(case: Case) -> list[str]:
    """What is wrong with the gradients of sum(out * dout) + sum(lse * dlse)."""
    inputs = make_inputs(case)
    problem, operands = problem_of(case, needs_grad=True), operands_of(case, inputs)
    if reason := BACKEND.supports(problem, device.of(operands.q.device)):
        return [f"refused: {reason}"]
    with poisoned():
        out, lse = BACKEND.forward(problem, operands)
        dlse = torch.randn(lse.shape, device=DEVICE) if case.dlse else None
        wanted = Wanted(dsinks=case.sinks)
        runs = [BACKEND.backward(problem, operands, out, lse, inputs["dout"], dlse, wanted) for _ in range(2)]
    torch.cuda.synchronize()
    got, again = runs
    names = ["dq", "dk", "dv"] + (["dsinks"] if case.sinks else [])
    wrong = []
    if case.deterministic:
        wrong = [f"{n} differs bitwise" for n in names if not torch.equal(getattr(got, n), getattr(again, n))]
    for part in sequences(case, inputs):
        refs, plains = (autograd(case, part, dlse, dtype) for dtype in (torch.float64, case.dtype))
        cuts = {"dq": part.rows, "dk": part.keys, "dv": part.keys, "dsinks": lambda t: t}
        for name, ref, plain in zip(names, refs, plains, strict=True):
            if found := distance(name, cuts[name](getattr(got, name)), ref, plain, case.dtype):  # type: ignore[no-untyped-call]
                wrong.append(found)
    return wrong


def autograd(case: Case, part: Sequence, dlse: torch.Tensor | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients by PyTorch in `dtype`."""
    names = ["q", "k", "v"] + (["sinks"] if case.sinks else [])
    leaves = {n: part.inputs[n].detach().to(dtype).requires_grad_() for n in names}
    out, lse = reference(case, part.inputs | leaves, dtype)
    results, cotangents = [out], [part.inputs["dout"].to(dtype)]
    if dlse is not None:
        results.append(torch.where(torch.isfinite(lse), lse, 0.0))
        cotangents.append(part.lse(dlse).to(lse.dtype))
    return list(torch.autograd.grad(results, list(leaves.values()), cotangents))


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
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            estimate[name] = max(begin.elapsed_time(end) / count, 1e-3)
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
    problem, operands = problem_of(case, needs_grad=direction != "forward"), operands_of(case, inputs)
    q, k, v, dout = (inputs[n] for n in ("q", "k", "v", "dout"))
    if direction == "forward":
        calls: dict[str, Callable[[], Any]] = {"ours": lambda: BACKEND.forward(problem, operands)}
        for name, kernel in PEERS.items():
            calls[name] = functools.partial(sdpa, kernel, q, k, v, case.causal)
        return calls
    out, lse = BACKEND.forward(problem, operands)
    calls = {"ours": lambda: BACKEND.backward(problem, operands, out, lse, dout, None, Wanted())}
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    for name, kernel in PEERS.items():
        peer = sdpa(kernel, leaves[0], leaves[1], leaves[2], case.causal)
        calls[name] = functools.partial(torch.autograd.grad, peer, leaves, dout, retain_graph=True)
    return calls


def cells(direction: str) -> Iterator[Case]:
    """The cells of the table: 16384 tokens, heads x head_dim = 2048."""
    dims = (128, 64, 256, 192, 96) if direction == "forward" else (128, 64, 96)
    for head_dim in dims:
        for causal in (False, True):
            for seqlen in SEQLENS if head_dim in (64, 128, 256) else (4096,):
                heads = WIDTH // head_dim
                yield Case(
                    f"{direction} D={head_dim} {'causal' if causal else 'full'} N={seqlen}",
                    batch=TOKENS // seqlen, num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
                    head_dim=head_dim, head_dim_v=head_dim, causal=causal, deterministic=direction == "deterministic",
                )  # fmt: skip


def tflops(case: Case, direction: str, milliseconds: float) -> float:
    """Of the textbook count: 4 N^2 D a head, half of it for causal, 2.5 times for a backward."""
    pairs = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k * (0.5 if case.causal else 1.0)
    return 4 * pairs * case.head_dim * (1.0 if direction == "forward" else 2.5) / milliseconds * 1e-9


def bench(wrong: list[str], deadline: float, path: Path) -> None:
    """Time every cell whose kernel is right; results go to `path` as they come."""
    warm = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for _ in range(10):
            warm @ warm
        torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    for direction in ("forward", "backward", "deterministic"):
        for case in cells(direction):
            kind = "" if direction == "deterministic" else "-causal" if case.causal else "-full"
            if f"{direction}-d{case.head_dim}{kind}" in wrong:
                print(f"{case.name:36s} wrong, not timed", flush=True)
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
            ratio = measured["ours"] / measured["cudnn"]
            shown = "  ".join(f"{n} {t:6.1f}" for n, t in measured.items())
            print(f"{case.name:36s} {shown}  ours/cudnn {ratio:.2f}", flush=True)
            path.write_text(json.dumps(rows))
    for name, value in extras().items():
        print(f"{name}: {value}", flush=True)
        rows.append({"extra": name, "value": value})
        path.write_text(json.dumps(rows))


def extras() -> dict[str, Any]:
    """Host overhead, CUDA graph, packed and grouped heads against dense."""
    small = Case("small", batch=1, num_heads=2, num_kv_heads=2, seqlen_q=128, seqlen_k=128, causal=True)
    inputs = make_inputs(small)
    problem, operands = problem_of(small, needs_grad=False), operands_of(small, inputs)
    BACKEND.forward(problem, operands)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(500):
        BACKEND.forward(problem, operands)
    found: dict[str, Any] = {"host us a forward call": round((time.perf_counter() - begin) / 500 * 1e6, 1)}
    torch.cuda.synchronize()
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
    calls: dict[str, Callable[[], Any]] = {}
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
    parser.add_argument("--only", default="", help="groups whose name contains this")
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


def run_all(args: argparse.Namespace, begin: float) -> None:
    """Correctness with at most 60 % of the budget, then speed with what is left."""
    folder = Path(args.json).with_suffix(".logs")
    folder.mkdir(parents=True, exist_ok=True)
    names = [g for g in groups() if args.only in g]
    results = check_all(names, args.jobs, begin + 0.6 * args.budget, folder)
    wrong = [g for g in groups() if g not in {r["group"] for r in results if not r["failures"]}]
    left = args.budget - (time.monotonic() - begin)
    print(f"{sum(not r['failures'] for r in results)} of {len(results)} groups pass, {left:.0f} s left", flush=True)
    timings = Path(args.json).with_suffix(".timings.json")
    timings.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", __file__, "--bench", json.dumps(wrong), "--json", str(timings)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*command, "--budget", str(left - 5)], timeout=max(left, 10), check=False)
    import triton

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    speed = json.loads(timings.read_text()) if timings.exists() else []
    Path(args.json).write_text(json.dumps({"machine": machine, "correctness": results, "tflops": speed}, indent=1))
    print(f"total {time.monotonic() - begin:.0f} s, written to {args.json}", flush=True)


if __name__ == "__main__":
    main()
