"""Compile the kernels of common training and serving problems into Triton's cache; no GPU is needed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from tilewise.backends.gpu.compilation import compile_call, types_of
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128)
# Kernels are compiled for a group size where query heads share a tile, and always for a page size.
GROUP_SIZES = (1, 4, 8)
PAGE_SIZES = (16, 64)
# No kernel is compiled for a length; these only choose between the kernels for short and for long sequences.
LONG, KEYS = 4096, 8192
# Called before each compilation with: what the kernel is for, how many are done, how many there are.
Progress = Callable[[str, int, int], None]


class CacheState(NamedTuple):
    """What was compiled, and where it is stored; `size_bytes` counts machine code alone."""

    path: str
    entries: int
    entries_when_full: int
    size_bytes: int


def warmup(
    backend: str, problems: Iterable[tuple[str, AttentionProblem]], device: DeviceSpec, progress: Progress
) -> CacheState:
    """Compile every kernel that these problems run on a device."""
    calls_of = importlib.import_module(f"tilewise.backends.{backend}.launch").calls_of
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


def common_problems() -> Iterator[tuple[str, AttentionProblem]]:
    """(label, problem) of each common problem."""
    for (name, dtype), dim in itertools.product(DTYPES.items(), HEAD_DIMS):
        label = f"{name} head_dim {dim}"
        for causal in (False, True):
            kind = "causal" if causal else "full"
            yield f"training, {kind}, {label}", _problem(dtype, dim, 16, causal=causal, needs_grad=True)
        packed = _problem(dtype, dim, 16, kind="varlen", causal=True, needs_grad=True)
        yield f"packed training, causal, {label}", packed
        for group in GROUP_SIZES:
            sizes = {"seqlen_q": 1, "seqlen_k": KEYS, "total_q": 1, "total_k": KEYS}
            yield f"decoding, {group} heads share, {label}", _problem(dtype, dim, 32, group, **sizes)
            for page_size in PAGE_SIZES:
                paged = _problem(dtype, dim, 32, group, kind="paged", page_size=page_size, **sizes)
                yield f"decoding, {group} heads share, pages of {page_size}, {label}", paged


def _problem(dtype: torch.dtype, dim: int, heads: int, group: int = 1, **more: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "kind": "dense", "dtype": dtype, "batch": 1, "seqlen_q": LONG, "seqlen_k": LONG, "total_q": LONG,
        "total_k": LONG, "num_heads": heads, "num_kv_heads": heads // group, "head_dim": dim, "head_dim_v": dim,
        "scale": dim**-0.5,
    }  # fmt: skip
    return AttentionProblem(**values | more)
