"""Compile the common kernels of a backend into Triton's cache, for a GPU that may be elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import triton

from tilewise.backends.gpu.compilation import compile_call, types_of
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["CacheState", "warmup"]

# Called before a kernel is compiled with what it is for, how many are done, and how many there are.
Progress = Callable[[str, int, int], None]


class CacheState(NamedTuple):
    """What was compiled, and where it is kept; `size_bytes` counts machine code alone."""

    path: str
    entries: int
    entries_when_full: int
    size_bytes: int


def warmup(
    backend: str, problems: Iterable[tuple[str, AttentionProblem]], device: DeviceSpec, progress: Progress
) -> CacheState:
    """Compile every kernel that these problems run on a device."""
    calls_of = importlib.import_module(f"tilewise.backends.{backend}.offline").calls_of
    wanted: dict[Any, tuple[str, KernelCall]] = {}
    for label, problem in problems:
        for call in calls_of(problem, device):
            key = (call.kernel, types_of(call), tuple(call.options.items()))
            wanted.setdefault(key, (f"{call.kernel.__name__} for {label}", call))
    size = 0
    for done, (label, call) in enumerate(wanted.values()):
        progress(label, done, len(wanted))
        size += len(compile_call(call, device, -1).kernel)
    return CacheState(triton.knobs.cache.dir, len(wanted), len(wanted), size)
