"""Where the time of naive and of tilewise attention goes, from torch.profiler's events.

Both run in one profiled session, each call inside a range of its own, so the trace shows both. An event belongs to the
range in which it starts; its own time counts, without that of the events inside it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tilewise import settings
from tilewise.api import attention
from tilewise.errors import InvalidProblem
from tilewise.plan import Plan, explain

__all__ = ["CATEGORIES", "Profile", "Side", "Sizes", "plan_for", "run", "steps"]

Triple = tuple[Tensor, Tensor, Tensor]

# In the order of the table. "fused" is a kernel that does everything at once.
CATEGORIES = ("matmul", "softmax", "memory", "fused", "other")
# The first of these that the name of an operator or kernel contains decides; lower case.
MARKS = (
    ("softmax", ("softmax",)),
    ("matmul", ("bmm", "matmul", "::mm", "addmm", "gemm", "cutlass", "xmma", "nvjet")),
    # The rest of torch's own moves or combines elements: copies, fills, masks, scaling.
    ("memory", ("aten::", "at::native", "memcpy", "memset", "elementwise")),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The problem to profile, and how often each side computes it under the profiler."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    backward: bool
    calls: int


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation: seconds of a call by category, and their sum."""

    name: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of a call."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Profile:
    """Both sides, the plan of the call, and the largest difference of their results."""

    plan: Plan
    naive: Side
    tilewise: Side
    difference: float

    @property
    def least_matmul_seconds(self) -> float | None:
        """The time of the visible products alone at the device's rate; None if that is unknown."""
        rate = self.plan.device.flops.get(self.plan.problem.dtype)
        return self.plan.tiled.flops / rate if rate else None


def plan_for(sizes: Sizes) -> Plan:
    """The plan of the call; rejects score matrices that take more than half of the memory."""
    q, k, v = _tensors(sizes, torch.device("meta"))
    plan = explain(q, k, v, causal=sizes.causal, device=sizes.device)
    needed, there = plan.naive.extra_memory + plan.memory.inputs, plan.device.memory_bytes
    if there and needed > there // 2:
        got = f"{sizes.seqlen}, for which naive attention takes {needed / 2**30:.1f} of {there / 2**30:.1f} GiB"
        raise InvalidProblem("seqlen", "a length whose score matrix fits half the memory", got, "Choose a shorter one.")
    return plan


def steps(sizes: Sizes) -> int:
    """How many steps `run` announces."""
    return 3 + 2 * sizes.calls


def run(sizes: Sizes, trace: Path, announce: Callable[[str], None]) -> Profile:
    """Profile both sides, write the trace, and add up their time by category."""
    plan = plan_for(sizes)
    tensors = _tensors(sizes, sizes.device)
    label = f"tilewise.attention [{plan.backend or 'none'}]"
    calls = {"naive": _naive, "tilewise": lambda q, k, v, causal: _tilewise(q, k, v, causal, label)}
    announce("first calls (compile where needed)")
    results = {name: _call(name, compute, tensors, sizes) for name, compute in calls.items()}
    difference = float((results["naive"].double() - results["tilewise"].double()).abs().max())
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (sizes.device.type == "cuda")
    announce("starting the profiler")
    # On a GPU an error of the profiler's driver interface is worth the two lines.
    hush = settings.quiet_profiler() if sizes.device.type == "cpu" else contextlib.nullcontext()
    with hush, profile(activities=activities, record_shapes=True) as session:
        for number in range(sizes.calls):
            for name, compute in calls.items():
                announce(f"{name}, call {number + 1} of {sizes.calls}")
                _call(name, compute, tensors, sizes)
    announce("writing the trace")
    session.export_chrome_trace(str(trace))
    events = session.events() or ()
    naive = Side("naive", _by_category(events, "naive", sizes, fused=False))
    tilewise = Side("tilewise", _by_category(events, "tilewise", sizes, fused=not plan.materialises))
    return Profile(plan, naive, tilewise, difference)


def _tensors(sizes: Sizes, device: torch.device) -> Triple:
    shape = sizes.batch, sizes.heads, sizes.seqlen, sizes.head_dim
    shared = sizes.batch, sizes.kv_heads, sizes.seqlen, sizes.head_dim
    # Deterministic inputs without changing a global generator.
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(s, dtype=sizes.dtype, device=device, generator=generator) for s in (shape, shared, shared))
    for tensor in (q, k, v):
        tensor.requires_grad_(sizes.backward)
    return q, k, v


def _call(
    name: str, compute: Callable[[Tensor, Tensor, Tensor, bool], Tensor], tensors: Triple, sizes: Sizes
) -> Tensor:
    """One call in its range, finished when the range ends."""
    q, k, v = tensors
    dout = q.detach()
    with record_function(name):
        out = compute(q, k, v, sizes.causal)
        if sizes.backward:
            with record_function(f"{name}.backward"):
                torch.autograd.grad(out, tensors, dout)
        if sizes.device.type == "cuda":
            torch.cuda.synchronize(sizes.device)
    return out.detach()


def _naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula as written, each of its three kernels in a range."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    with record_function("naive.scores"):
        s = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    with record_function("naive.softmax"):
        p = torch.softmax(s, -1)
    with record_function("naive.values"):
        return p @ v


def _tilewise(q: Tensor, k: Tensor, v: Tensor, causal: bool, label: str) -> Tensor:
    with record_function(label):
        return attention(q, k, v, causal=causal)


def _by_category(events: Sequence[Any], name: str, sizes: Sizes, *, fused: bool) -> dict[str, float]:
    """Seconds of a call by category. On a GPU its kernels count, on a CPU the operators' own time."""
    on_gpu = sizes.device.type == "cuda"
    kind = "CUDA" if on_gpu else "CPU"
    spans = [e.time_range for e in events if e.name == name and e.device_type.name == "CPU"]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for event in events:
        inside = any(span.start <= event.time_range.start <= span.end for span in spans)
        is_range = on_gpu and event.name.startswith((name, "naive", "tilewise."))
        if event.device_type.name == kind and inside and not is_range:
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            seconds[category(event.name, fused=fused and event.name != name)] += spent * 1e-6 / sizes.calls
    return seconds


def category(event: str, *, fused: bool) -> str:
    """The category of an event. What is not torch's is the fused kernel of a side that has one, else "other"."""
    lowered = event.lower()
    for found, marks in MARKS:
        if any(mark in lowered for mark in marks):
            return found
    return "fused" if fused else "other"
