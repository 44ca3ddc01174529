"""What only the benchmark measures: device time, extra memory and host time of a call, and the commit of the source."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.bench.machine import machine, versions
from tilewise.bench.memory import peak_extra_memory
from tilewise.bench.timing import Batch, Clock, CudaClock

__all__ = ["HostClock", "allocated", "commit", "device_seconds", "extra_memory", "store"]


class HostClock(Clock):
    """The host time of a call, without waiting for the device. A sample fits the device's launch queue."""

    sample_seconds = CudaClock.sample_seconds

    def __call__(self, batch: Batch, lead_in: Batch) -> float:  # noqa: ARG002 - the host starts from rest
        """Run the batch once."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds


def device_seconds(run: Callable[[], object], times: int = 1) -> float:
    """Seconds that a GPU takes for `times` runs, one after the other."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


def extra_memory(call: Callable[[], Tensor], device: str) -> int:
    """Bytes held at the peak of a call less what was held before and what its output takes.

    On the CPU measured by `peak_extra_memory`; on the GPU by torch's allocator.
    """
    sizes: list[int] = []

    def run() -> Tensor:
        out = call()
        sizes.append(out.numel() * out.element_size())
        return out

    peak = allocated(run) if device == "cuda" else peak_extra_memory(run)
    return max(0, peak - sizes[-1])


def allocated(run: Callable[[], object]) -> int:
    """Bytes that torch's allocator holds on the GPU at the peak of a call beyond what it held before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def store(path: Path, what: str, **figures: Any) -> None:
    """Write figures as JSON, with what they are and where they were measured."""
    facts = {"what": what, "machine": machine(), "versions": versions(), "commit": commit()}
    path.write_text(json.dumps(facts | figures, indent=1) + "\n")


def commit() -> str | None:
    """The commit of this source tree, with a + if the package differs from it; None outside a checkout."""
    package = Path(tilewise.__file__).parent
    head = _output("git", "-C", str(package), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(package), "status", "--porcelain", "--", str(package))
    return head + "+" if head and changed else head


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
