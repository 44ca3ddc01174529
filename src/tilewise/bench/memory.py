"""The most memory a call holds beyond its inputs and its output."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["extra_memory"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What Linux takes as "forget the high-water mark of resident memory".
RESET_PEAK = "5"


def extra_memory(call: Callable[[], Tensor], device: str) -> int:
    """Bytes held at the peak of a call less what was held before and what its output takes.

    On the CPU this is resident memory, whoever allocated it; on the GPU what torch's allocator handed out.
    """
    gc.collect()
    return _allocated(call) if device == "cuda" else _resident(call)


def _allocated(call: Callable[[], Tensor]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - _size(out))


def _resident(call: Callable[[], Tensor]) -> int:
    # Memory that malloc keeps for later would hide the next allocation: hand it back first.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    CLEAR.write_text(RESET_PEAK)
    before = _status_bytes("VmRSS")
    out = call()
    return max(0, _status_bytes("VmHWM") - before - _size(out))


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def _size(out: Tensor) -> int:
    return out.numel() * out.element_size()
