"""Tangents and second derivatives: time against the forward, the backward and torch's math kernel; memory.

    PYTHONPATH=src:bench python bench/derivatives.py [--json FILE] [--device cpu | cuda]
        [--seconds 3] [--lengths 1024,4096]

On a CPU, times are CPU seconds of one thread, the least of several calls, so that other programs disturb them little.
On a GPU they are medians of times between events, in bf16, all passes of a case in turn (tilewise.bench.timing), by the
Triton backend; every result is first compared with the math kernel's in fp32 on a shorter sequence. The host gets ahead
of the device before a sample, so its time does not count; it is reported apart. The math kernel runs up to the length
at which it does not fit the GPU's memory. The package jvp_flash_attention, which has tangents but no second
derivatives, runs too where it is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from suite.measuring import allocated, commit, device_seconds
from tilewise.bench.machine import machine, versions
from tilewise.bench.memory import memory_method, peak_extra_memory
from tilewise.bench.timing import CudaClock, Entrant, race, summarise

Attend = Callable[..., Tensor]
HEADS, REPEATS = 2, 5
# On a GPU: 16 Ki tokens in sequences of each length.
GPU_HEADS, TOKENS, GPU_LENGTHS = 8, 16384, (1024, 2048, 4096, 8192, 16384)
# The largest error allowed relative to the largest element, in bf16 with sums over CHECKED keys.
CHECKED, TOLERANCE = 512, 0.03
# About 8 ms of an H200, in which the host queues a call.
AHEAD_CYCLES = 15_000_000
LIMITS = {"jvp / forward": 2.6, "double backward / backward": 3.5}
PEER = "jvp_flash_attention"
# A forward with the products of a jvp, for head dims that the kernels of tangents take.
SIX, MAX_WIDTH = "forward of 3 x head_dim", 256
AT_LEAST = {"math jvp / jvp": 5.0, "math double backward / double backward": 5.0, f"{PEER} jvp / jvp": 1.3}


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The least CPU seconds of a call in this thread."""
    call()
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return min(found)


def math_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """SDPA by its math kernel, the only one of torch's with these derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def peer_attention() -> Attend | None:
    """Attention by jvp_flash_attention, or None where it is not installed."""
    try:
        found = importlib.import_module(f"{PEER}.jvp_attention")
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        out: Tensor = found.JVPAttn.fwd_dual(q, k, v, causal=causal)
        return out

    return attend


def draw(shape: tuple[int, ...], device: str) -> list[Tensor]:
    """q, k, v, their tangents, and dout; bf16 on a GPU."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(7)]


def passes(
    attend: Attend, seqlen: int, head_dim: int, *, causal: bool, drawn: list[Tensor] | None = None
) -> dict[str, Callable[[], Any]]:
    """The calls that are measured: forward, jvp, backward, double backward."""
    q, k, v, *tangents, dout = drawn or draw((1, HEADS, seqlen, head_dim), "cpu")
    leaves = [t.clone().requires_grad_() for t in (q, k, v, dout)]

    def call(*qkv: Tensor) -> Tensor:
        return attend(*qkv, causal=causal)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves[:3]), leaves[:3], leaves[3], create_graph=True)

    recorded: list[Any] = []

    def backward() -> object:
        if not recorded:
            recorded.append(call(*leaves[:3]))
        return torch.autograd.grad(recorded[0], leaves[:3], dout, retain_graph=True)

    kept: list[Any] = []

    def double() -> object:
        if not kept:
            kept.append(gradients())
        return torch.autograd.grad(kept[0], leaves, tangents, retain_graph=True)

    return {
        "forward": lambda: call(q, k, v),
        "jvp": lambda: torch.func.jvp(call, (q, k, v), tuple(tangents)),
        "backward": backward,
        "double backward": double,
    }


def timed(seqlen: int, head_dim: int, *, causal: bool, with_math: bool) -> dict[str, Any]:
    """Times of one case in milliseconds, and the ratios that have a bar."""
    mine = {name: seconds(run) for name, run in passes(tw.attention, seqlen, head_dim, causal=causal).items()}
    found: dict[str, Any] = {
        "seqlen": seqlen, "head_dim": head_dim, "heads": HEADS, "causal": causal, "dtype": "float32",
        "milliseconds": {name: round(1e3 * value, 2) for name, value in mine.items()},
        "jvp / forward": round(mine["jvp"] / mine["forward"], 2),
        "double backward / backward": round(mine["double backward"] / mine["backward"], 2),
    }  # fmt: skip
    if with_math:
        theirs = passes(math_attention, seqlen, head_dim, causal=causal)
        for name in ("jvp", "double backward"):
            value = seconds(theirs[name], 1)
            found["milliseconds"][f"math {name}"] = round(1e3 * value, 2)
            found[f"math {name} / {name}"] = round(value / mine[name], 2)
    found["bars missed"] = [name for name, bar in LIMITS.items() if found[name] > bar]
    found["bars missed"] += [name for name, bar in AT_LEAST.items() if found.get(name, bar) < bar]
    return found


def memory(seqlen: int, head_dim: int) -> dict[str, Any]:
    """Peak extra MiB of a jvp and of a gradient with its double backward, results included."""
    found: dict[str, Any] = {"seqlen": seqlen, "head_dim": head_dim}
    for name, attend in (("tilewise", tw.attention), ("math", math_attention)):
        if name == "math" and seqlen > 4096:
            continue
        for which in ("jvp", "double backward"):
            passes(attend, 128, head_dim, causal=False)[which]()  # compiles what it needs
            run = passes(attend, seqlen, head_dim, causal=False)[which]
            found[f"{name} {which} MiB"] = round(peak_extra_memory(run) / 2**20, 1)
    return found


def gpu_draw(seqlen: int, head_dim: int) -> list[Tensor]:
    """The tensors of a case on the GPU."""
    return draw((TOKENS // seqlen, GPU_HEADS, seqlen, head_dim), "cuda")


on_triton = functools.partial(tw.attention, backend="triton")


def flat(found: Any) -> list[Tensor]:
    """All tensors of a result."""
    return [found] if isinstance(found, Tensor) else [t for part in found for t in flat(part)]


def checked(head_dim: int, *, causal: bool) -> float:
    """The largest error of our passes, see errors."""
    found = errors(on_triton, head_dim, causal=causal)
    wrong = {name: error for name, error in found.items() if not error <= TOLERANCE}
    if wrong:
        raise AssertionError(f"head_dim {head_dim}, causal {causal}: errors {wrong}")
    return max(found.values())


def errors(attend: Attend, head_dim: int, *, causal: bool, only: tuple[str, ...] = ()) -> dict[str, float]:
    """Errors of passes (all, or those in `only`) against the math kernel in fp32, relative to a result's largest
    element.
    """
    drawn = [t[:1].contiguous() for t in gpu_draw(CHECKED, head_dim)]
    runs = passes(attend, CHECKED, head_dim, causal=causal, drawn=drawn)
    wanted = passes(math_attention, CHECKED, head_dim, causal=causal, drawn=[t.float() for t in drawn])
    return {
        name: max(
            float((got.float() - want).abs().max() / want.abs().max())
            for got, want in zip(flat(runs[name]()), flat(wanted[name]()), strict=True)
        )
        for name in only or runs
    }


def peer_error(head_dim: int, *, causal: bool) -> float | str | None:
    """The error of the peer's tangents, or why it does not run; None where it is not installed."""
    attend = peer_attention()
    if attend is None:
        return None
    try:
        return errors(attend, head_dim, causal=causal, only=("jvp",))["jvp"]
    except Exception as error:  # another package may fail in any way
        return f"{type(error).__name__}: {str(error)[:200]}"


class AheadClock(CudaClock):
    """Time of one call on the device, which starts when the host has queued all of it."""

    sample_seconds = 0.0

    def __call__(self, batch: Callable[[], object], lead_in: Callable[[], object]) -> float:  # noqa: ARG002
        """Run the batch once."""
        self.flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)  # noqa: SLF001
        return device_seconds(batch)


def host_seconds(call: Callable[[], object]) -> float:
    """The least time that the host takes to queue a call."""
    found = []
    for _ in range(2 * REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(found)


def gpu_timed(seqlen: int, head_dim: int, seconds: float, *, causal: bool) -> dict[str, Any]:
    """Medians of one case on the GPU in milliseconds, and the ratios that have a bar."""
    drawn = gpu_draw(seqlen, head_dim)
    calls = dict(passes(on_triton, seqlen, head_dim, causal=causal, drawn=drawn))
    ours = list(calls)
    if 3 * head_dim <= MAX_WIDTH:
        q, k, v = (torch.cat([t.detach()] * 3, -1) for t in drawn[:3])
        calls[SIX] = lambda: on_triton(q, k, v, causal=causal)
    together = list(calls)
    theirs = passes(math_attention, seqlen, head_dim, causal=causal, drawn=drawn)
    if (peer := peer_attention()) is not None:
        calls[f"{PEER} jvp"] = passes(peer, seqlen, head_dim, causal=causal, drawn=drawn)["jvp"]
    calls |= {f"math {name}": theirs[name] for name in ("jvp", "double backward")}
    # Others come last and alone: what the math kernel's graph holds would leave no room for their calls.
    medians: dict[str, float] = {}
    for group in (together, *([name] for name in calls if name not in together)):
        entrants = [Entrant(name, functools.partial(repeated, calls[name])) for name in group]
        race(entrants, AheadClock(), seconds)
        medians |= {e.name: summarise(e).median for e in entrants if e.failure is None}
        for entrant in entrants:
            if entrant.failure is not None:
                print(f"{seqlen} {head_dim} {entrant.name}: {entrant.failure}", flush=True)
        torch.cuda.empty_cache()
    found: dict[str, Any] = {
        "seqlen": seqlen, "head_dim": head_dim, "heads": GPU_HEADS, "batch": TOKENS // seqlen, "causal": causal,
        "dtype": "bfloat16", "milliseconds": {name: round(1e3 * value, 4) for name, value in medians.items()},
        "host milliseconds": {name: round(1e3 * host_seconds(calls[name]), 4) for name in ours},
    }  # fmt: skip
    for one, other in (name.split(" / ") for name in (*LIMITS, *AT_LEAST, f"{SIX} / forward")):
        if one in medians and other in medians:
            found[f"{one} / {other}"] = round(medians[one] / medians[other], 2)
    found["bars missed"] = [name for name, bar in LIMITS.items() if found.get(name, 0.0) > bar]
    found["bars missed"] += [name for name, bar in AT_LEAST.items() if seqlen == 4096 and found.get(name, bar) < bar]
    return found


def repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A batch of calls."""

    def batch() -> None:
        for _ in range(count):
            call()

    return batch


def gpu_memory(seqlen: int, head_dim: int) -> dict[str, Any]:
    """Peak extra MiB on the GPU of one sequence: a jvp, and a gradient with its double backward, results included."""
    found: dict[str, Any] = {"seqlen": seqlen, "head_dim": head_dim, "heads": GPU_HEADS, "batch": 1}
    for name, attend in (("tilewise", on_triton), ("math", math_attention)):
        for which in ("jvp", "double backward"):
            torch.cuda.empty_cache()
            try:
                drawn = [t[:1].contiguous() for t in gpu_draw(seqlen, head_dim)]
                run = passes(attend, seqlen, head_dim, causal=False, drawn=drawn)[which]
                found[f"{name} {which} MiB"] = round(allocated(run) / 2**20, 1)
            except torch.OutOfMemoryError:
                found[f"{name} {which} MiB"] = "out of memory"
    return found


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each case on a GPU")
    parser.add_argument("--lengths", default=",".join(map(str, GPU_LENGTHS)), help="of sequences on a GPU")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    torch.set_num_threads(1)
    cases = [(4096, 64, False, True), (4096, 64, True, True)]
    cases += [(2048, d, causal, False) for d in (64, 128) for causal in (False, True)]
    results: dict[str, Any] = {
        "what": "tangents and second derivatives, "
        + ("medians on the GPU" if on_gpu else "one thread; CPU seconds, the least of several calls"),
        "memory": "torch's allocator" if on_gpu else memory_method(),
        "machine": machine(), "versions": versions(), "commit": commit(),
        "times": [], "peaks": [],
    }  # fmt: skip

    def keep(kind: str, found: dict[str, Any]) -> None:
        results[kind].append(found)
        print(json.dumps(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    if on_gpu:
        kinds = list(itertools.product((64, 128), (False, True)))
        results["errors"] = {f"{d} {c}": checked(d, causal=c) for d, c in kinds}
        results["errors"] |= {f"{PEER} {d} {c}": peer_error(d, causal=c) for d, c in kinds}
        print(json.dumps(results["errors"]), flush=True)
        lengths = [int(length) for length in options.lengths.split(",")]
        for seqlen in lengths:
            keep("peaks", gpu_memory(seqlen, 64))
        for head_dim, causal, seqlen in itertools.product((64, 128), (False, True), lengths):
            keep("times", gpu_timed(seqlen, head_dim, options.seconds, causal=causal))
        return
    for seqlen in (1024, 2048, 4096, 8192):
        keep("peaks", memory(seqlen, 64))
    for seqlen, head_dim, causal, with_math in cases:
        keep("times", timed(seqlen, head_dim, causal=causal, with_math=with_math))


if __name__ == "__main__":
    main()
