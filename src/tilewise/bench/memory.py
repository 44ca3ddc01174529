"""The most memory a call holds beyond what was there before."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise.settings import quiet_profiler

Run = Callable[[], object]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Linux: resets the high-water mark of resident memory.
RESET_PEAK = "5"
# Bytes that are allocated twice, to see whether they are returned in between.
PROBE = 4 << 20


def memory_method() -> str:
    """How `peak_extra_memory` measures on this system, in words."""
    return "peak resident memory of the process" if _sees_every_call() else "peak of torch's allocations"


def peak_extra_memory(run: Run) -> int:
    """Bytes that a call holds at its peak beyond what the process held before, its result included.

    On Linux, if permitted, this is the process's high-water mark of resident memory, reset before the call: it sees
    every allocation, torch's or not. Elsewhere, and where torch keeps what it frees (on ARM processors), it is what
    torch allocated.
    """
    gc.collect()
    return _resident_peak(run) if _sees_every_call() else torch_peak(run)


@functools.cache
def _sees_every_call() -> bool:
    """Whether the high-water mark shows memory that an earlier call had freed."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    peaks = [_resident_peak(lambda: torch.ones(PROBE, dtype=torch.uint8)) for _ in range(2)]
    return min(peaks) > PROBE // 2


def _resident_peak(run: Run) -> int:
    # Memory that malloc keeps for reuse would hide the next allocation: return it first.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    CLEAR.write_text(RESET_PEAK)
    before = _status_bytes("VmRSS")
    result = run()
    peak = _status_bytes("VmHWM")
    del result
    return max(0, peak - before)


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def torch_peak(run: Run) -> int:
    """The most that torch's CPU allocator held at once during a call, from its allocation events."""
    with (
        quiet_profiler(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        result = run()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
