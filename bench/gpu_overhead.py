"""Host microseconds of a call on this GPU, from the public function down to the driver's launcher.

    python bench/gpu_overhead.py [out.json] [--only triton,hopper,decode] [--profile] [--calls 300]

Tiny problems are queued back to back without waiting, so the host is what takes the time. Every case is checked against
PyTorch first, then timed in layers, each a part of the one before:

    public    tilewise.attention (forward and backward: with torch.autograd.grad)
    backend   problem and operands given: look the pass up, make the results, launch
    launches  results given too: fill in addresses and start the kernels
    driver    the C launcher alone, all arguments given
    torch     SDPA on the same tensors

`lengths` is the number of kernels that 20 sequence lengths compile beyond those of the first call: 0, or 1 in the
Hopper backward, which has a kernel for whole key tiles.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise import device as devices
from tilewise import dispatch, validation
from tilewise.backends.gpu import driver, launching
from tilewise.bench import machine
from tilewise.canonical import canonical
from tilewise.operands import Flags, Operands, Wanted

BF16 = torch.bfloat16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 112, 128, 129, 240, 256, 333, 512, 1000)
BATCHES, WARM = 7, 20
Run = Callable[[], Any]
Layers = dict[str, Run]


def microseconds(run: Run, calls: int) -> float:
    """Host time of one of many calls queued without waiting; the median of some batches."""
    for _ in range(WARM):
        run()
    taken = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(taken)


def tensors(seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, dim: int, *, grad: bool = False) -> list[Tensor]:
    """q, k, v of one sequence."""
    shapes = ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k))
    return [torch.randn(1, h, n, dim, device="cuda", dtype=BF16, requires_grad=grad) for h, n in shapes]


def driver_run(launches: Any, given: tuple[Tensor | None, ...]) -> Run | None:
    """The C launchers of a pass with the arguments of one call."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    starts = [start for start in launches._starts if isinstance(start, driver.DirectLaunch)]  # noqa: SLF001
    functions = [start._function for start in starts]  # noqa: SLF001
    for start, function in zip(starts, functions, strict=True):
        start._function = lambda *args, function=function: seen.append((function, args))  # noqa: SLF001
    launches.run(given)
    for start, function in zip(starts, functions, strict=True):
        start._function = function  # noqa: SLF001

    def run() -> None:
        for function, args in seen:
            function(*args)

    return run if seen else None


def forward_layers(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Layers:
    """Of an inference call."""
    flags = Flags(causal=causal, backend=backend)
    problem = validation.problem_of("dense", Operands(q, k, v), flags)
    operands = canonical(problem, Operands(q, k, v))
    run_forward = dispatch.load(backend).forward
    module = __import__(f"tilewise.backends.{backend}.launch", fromlist=["forward_pass"])
    index = q.get_device()
    ready = module.forward_pass(problem, devices.of(q.device), index, launching.raw_views(operands))
    out, lse = ready.out.new(q), ready.lse.new(q)
    last = module.counter_for(q) if backend == "hopper" else ready.workspace and ready.workspace.new(q)
    given = (*operands, out, lse, last)
    layers: Layers = {
        "public": lambda: tilewise.attention(q, k, v, causal=causal, backend=backend),
        "backend": lambda: run_forward(problem, operands),
        "launches": lambda: ready.launches.run(given),
        "allocation": lambda: (ready.out.new(q), ready.lse.new(q)),
        "torch": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]),
    }
    alone = driver_run(ready.launches, given)
    return layers if alone is None else layers | {"driver": alone}


def training_layers(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Layers:
    """Of forward and backward with autograd, and of the backward alone."""
    flags = Flags(causal=causal, backend=backend, needs_grad=True)
    problem = validation.problem_of("dense", Operands(q, k, v), flags)
    with torch.no_grad():
        operands = canonical(problem, Operands(q, k, v))
        out, lse = dispatch.load(backend).forward(problem, operands)
    dout = torch.randn_like(out)
    run_backward = dispatch.load(backend).backward

    def torch_run() -> None:
        result = scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.autograd.grad(result, (q, k, v), dout)

    def run() -> None:
        torch.autograd.grad(tilewise.attention(q, k, v, causal=causal, backend=backend), (q, k, v), dout)

    return {
        "public": run,
        "forward, recorded": lambda: tilewise.attention(q, k, v, causal=causal, backend=backend),
        "backend, backward": lambda: run_backward(problem, operands, out, lse, dout, None, Wanted()),
        "an empty autograd node": lambda: torch.autograd.grad(q.view_as(q), q, dout),
        "torch": torch_run,
    }


def check(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """The largest difference to PyTorch in fp32, of the output and (where recorded) the gradient of q."""
    out = tilewise.attention(q, k, v, causal=causal, backend=backend)
    exact = [t.detach().float().requires_grad_(t.requires_grad) for t in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    want = scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=causal, enable_gqa=grouped)
    worst = float((out - want).abs().max().detach())
    if q.requires_grad:
        dout = torch.randn_like(out)
        mine = torch.autograd.grad(out, (q, k, v), dout)
        theirs = torch.autograd.grad(want, exact, dout.float())
        worst = max([worst, *(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))])
    return worst


def compiled_by_lengths(backend: str) -> int:
    """Kernels that new lengths compile after the first call."""
    count, plain = 0, triton.compile

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    def call(length: int) -> None:
        q, k, v = tensors(length, length, 4, 4, 64, grad=True)
        torch.autograd.grad(tilewise.attention(q, k, v, backend=backend).sum(), (q, k, v))

    call(300)
    triton.compile = counting
    try:
        for length in LENGTHS:
            call(length)
    finally:
        triton.compile = plain
    return count


def measure(
    name: str, backend: str, make: Callable[..., Layers], args: tuple[Any, ...], options: Any
) -> dict[str, Any]:
    """One case: checked, timed in layers, printed, and profiled if asked."""
    began = time.perf_counter()
    error = check(backend, *args)
    first = time.perf_counter() - began
    if not error < 0.05:
        print(f"{name}: WRONG by {error:.3g}, not timed", flush=True)
        return {"case": name, "backend": backend, "error": error}
    layers = make(backend, *args)
    taken = {layer: round(microseconds(run, options.calls), 1) for layer, run in layers.items()}
    print(f"{name}  (error {error:.2g}, first call and check {first:.1f} s)", flush=True)
    print("   " + "   ".join(f"{layer} {us:.1f}" for layer, us in taken.items()), flush=True)
    if options.profile:
        print(profiled(layers["public"], options.calls), flush=True)
    return {"case": name, "backend": backend, "error": error, "first_s": round(first, 1), "us": taken}


def profiled(run: Run, calls: int) -> str:
    """The 20 functions in which most time goes; the profiler itself makes Python calls two to three times slower."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        run()
    profile.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(20)
    return text.getvalue()


def parsed_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="where the figures go as JSON")
    parser.add_argument("--only", default="triton,hopper,decode", help="which cases, by commas")
    parser.add_argument("--profile", action="store_true", help="also print where the public call spends its time")
    parser.add_argument("--calls", type=int, default=300, help="calls in a batch")
    return parser.parse_args()


def main() -> None:
    """Run the chosen cases."""
    options = parsed_options()
    only, records = options.only.split(","), list[dict[str, Any]]()
    print(f"launch path: {driver.launch_path()}", flush=True)
    for backend in ("triton", "hopper"):
        if backend not in only or dispatch.load(backend).unavailable() is not None:
            continue
        plain, recorded = tensors(256, 256, 4, 4, 64), tensors(256, 256, 4, 4, 64, grad=True)
        records.append(measure(f"{backend} forward", backend, forward_layers, (*plain, True), options))
        records.append(measure(f"{backend} training", backend, training_layers, (*recorded, True), options))
        records.append({"case": f"{backend} lengths", "compiled": compiled_by_lengths(backend)})
        print(
            f"{backend} lengths: {records[-1]['compiled']} kernels compiled by {len(LENGTHS)} new lengths", flush=True
        )
    if "decode" in only:
        one = tensors(1, 2048, 32, 8, 128)
        records.append(measure("decode", "triton", forward_layers, (*one, False), options))
    if options.out is not None:
        about = {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit()}
        found = about | {"launch_path": driver.launch_path(), "cases": records}
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
