"""Host microseconds of a call on this GPU, from the public function down to the driver's launcher.

    python bench/gpu_overhead.py [out.json] [--only triton,hopper,decode] [--profile] [--calls 300]

Tiny problems are queued back to back without waiting, so the host is what takes the time. Every case is checked against
PyTorch first, then timed in layers, all of them in turn, each a part of the one before:

    public      tilewise.attention (forward and backward: with torch.autograd.grad)
    bound pass  what a call that looks like an earlier one runs: make the results, launch
    results     making out, lse and workspace
    launches    the kernels at known addresses: the plan's operations, and the driver
    new pass    what a call that looks like none before runs beside its judgement, once the problem is prepared
    torch       SDPA on the same tensors

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
from suite import measuring
from tilewise import dispatch, validation
from tilewise.backends.gpu import driver
from tilewise.bench import machine
from tilewise.canonical import canonical
from tilewise.operands import Flags, Operands, Wanted

BF16 = torch.bfloat16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 112, 128, 129, 240, 256, 333, 512, 1000)
BATCHES, WARM = 7, 20
PAGE_SIZE = 64
Run = Callable[[], Any]
Layers = dict[str, Run]


def microseconds(runs: Layers, calls: int) -> dict[str, float]:
    """Host time of one of many calls queued without waiting; medians of some batches, taken in turn: clocks move."""
    for run in runs.values():
        for _ in range(WARM):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(BATCHES):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            taken[name].append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def tensors(seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, dim: int, *, grad: bool = False) -> list[Tensor]:
    """q, k, v of one sequence."""
    shapes = ((heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k))
    return [torch.randn(1, h, n, dim, device="cuda", dtype=BF16, requires_grad=grad) for h, n in shapes]


def parts_of(bound: Any, given: tuple[Tensor | None, ...]) -> Layers:
    """A bound pass, and its parts with the tensors of one call."""
    held = bound(given)  # lives as long as its addresses are used
    found, stream = bound._laid_out, torch.cuda.current_stream().cuda_stream  # noqa: SLF001
    counters = [] if bound._counters is None else [bound._counters.current(bound.num_counters, stream)]  # noqa: SLF001
    frame, used = found.plan.frame(), [*[t for t in given if t is not None], *held, *counters]
    found.put(frame.words, found.first, stream, False, *[tensor.data_ptr() for tensor in used])

    def launches() -> Any:
        found.plan.start(*frame.starting)
        return used

    def results() -> Any:
        return [bound._allocate(*made) for made in found.made]  # noqa: SLF001

    return {"bound pass": lambda: bound(given), "results": results, "launches": launches}


def forward_layers(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Layers:
    """Of an inference call."""
    flags = Flags(causal=causal, backend=backend)
    problem = validation.problem_of("dense", Operands(q, k, v), flags)
    operands = canonical(problem, Operands(q, k, v))
    chosen: Any = dispatch.load(backend)
    grouped = q.shape[1] != k.shape[1]
    return {
        "public": lambda: tilewise.attention(q, k, v, causal=causal, backend=backend),
        **parts_of(chosen.bind_forward(problem, operands, want_lse=False), (q, k, v)),
        "new pass": lambda: chosen.forward(problem, operands),
        "torch": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped),
    }


def paged_layers(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Layers:
    """Of decoding one sequence whose keys lie in pages."""
    k_pages, v_pages = (t[0].transpose(0, 1).unflatten(0, (-1, PAGE_SIZE)).contiguous() for t in (k, v))
    table = torch.arange(len(k_pages), dtype=torch.int32, device=q.device)[None]
    lengths = torch.full((1,), k.shape[2], dtype=torch.int32, device=q.device)
    given = Operands(q[:, :, 0], k_pages, v_pages, block_table=table, seqlens_k=lengths)
    problem = validation.problem_of("paged", given, Flags(causal=causal, backend=backend))
    operands = canonical(problem, given)
    chosen: Any = dispatch.load(backend)

    def public() -> Tensor:
        return tilewise.attention_paged(*given[:3], table, lengths, causal=causal, backend=backend)

    torch.testing.assert_close(public()[:, :, None], tilewise.attention(q, k, v, backend=backend), atol=0.01, rtol=0.01)
    bound = chosen.bind_forward(problem, operands, want_lse=False)
    return {
        "public": public,
        **({} if bound is None else parts_of(bound, tuple(given))),
        "new pass": lambda: chosen.forward(problem, operands),
    }


def training_layers(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Layers:
    """Of forward and backward with autograd, and of the backward alone."""
    flags = Flags(causal=causal, backend=backend, needs_grad=True)
    problem = validation.problem_of("dense", Operands(q, k, v), flags)
    chosen: Any = dispatch.load(backend)
    with torch.no_grad():
        operands = canonical(problem, Operands(q, k, v))
        out, lse = chosen.forward(problem, operands)
    dout = torch.randn_like(out)
    saved = (operands, out, lse, dout, None, Wanted())
    bound = chosen.bind_backward(problem, *saved)

    def torch_run() -> None:
        result = scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.autograd.grad(result, (q, k, v), dout)

    def run() -> None:
        torch.autograd.grad(tilewise.attention(q, k, v, causal=causal, backend=backend), (q, k, v), dout)

    return {
        "public": run,
        "torch": torch_run,
        "forward, recorded": lambda: tilewise.attention(q, k, v, causal=causal, backend=backend),
        **parts_of(bound, (dout, None, out, lse, q, k, v)),
        "new pass": lambda: chosen.backward(problem, *saved),
        "an empty autograd node": lambda: torch.autograd.grad(q.view_as(q), q, dout),
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
    taken = microseconds(layers, options.calls)
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


def training_and_lengths(backend: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts and training of one backend, and what new lengths compile."""
    plain, recorded = tensors(256, 256, 4, 4, 64), tensors(256, 256, 4, 4, 64, grad=True)
    records = [
        measure(f"{backend} forward", backend, forward_layers, (*plain, True), options),
        measure(f"{backend} training", backend, training_layers, (*recorded, True), options),
        {"case": f"{backend} lengths", "compiled": compiled_by_lengths(backend)},
    ]
    compiled = records[-1]["compiled"]
    print(f"{backend} lengths: {compiled} kernels compiled by {len(LENGTHS)} new lengths", flush=True)
    return records


def main() -> None:
    """Run the chosen cases."""
    options = parsed_options()
    only, records = options.only.split(","), list[dict[str, Any]]()
    print(f"launch path: {driver.launch_path()}", flush=True)
    for backend in ("triton", "hopper"):
        if dispatch.load(backend).unavailable() is not None:
            continue
        if backend in only:
            records += training_and_lengths(backend, options)
        if "decode" in only:
            one = (*tensors(1, 2048, 32, 8, 128), False)
            records.append(measure(f"{backend} decode", backend, forward_layers, one, options))
            records.append(measure(f"{backend} decode from pages", backend, paged_layers, one, options))
    if options.out is not None:
        about = {"machine": machine.machine(), "versions": machine.versions(), "commit": measuring.commit()}
        found = about | {"launch_path": driver.launch_path(), "cases": records}
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
