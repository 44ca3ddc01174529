"""Hardware facts by name, so that no other file compares compute capabilities.

`of(torch_device)` describes a present device, `named("h200")` any known one, and `overridden(spec)` replaces the device
for tests and offline compilation. Rates are the vendors' dense peaks; the CPU's are measured on first use.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from tilewise.errors import InvalidProblem

KIB, MIB, GIB, GB, TERA = 1 << 10, 1 << 20, 1 << 30, 10**9, 10**12


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Hardware facts that kernels and plans need, in bytes and per-second rates."""

    name: str
    type: str
    capability: tuple[int, int] | None
    num_sms: int
    smem_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    flops: dict[torch.dtype, float] = field(hash=False)

    def __hash__(self) -> int:
        # Short, because caches hash it in every call.
        return hash(self.name)

    @property
    def has_tma(self) -> bool:
        """Bulk tensor copies between global and shared memory (Hopper and later)."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Asynchronous warpgroup matrix instructions: Hopper only, not in Blackwell."""
        return self.capability is not None and self.capability[0] == 9

    @property
    def has_fp8(self) -> bool:
        """Matrix units take e4m3 (Ada and later)."""
        return self.capability is not None and self.capability >= (8, 9)


def _rates(
    half: float, single: float, double: float, *, bf16: bool = True, fp8: float | None = None
) -> dict[torch.dtype, float]:
    rates = {
        torch.float16: half * TERA,
        torch.bfloat16: (half if bf16 else single) * TERA,
        torch.float32: single * TERA,
        torch.float64: double * TERA,
    }
    if fp8 is not None:
        rates[torch.float8_e4m3fn] = fp8 * TERA
    return rates


def _gpu(
    name: str,
    capability: tuple[int, int],
    sms: int,
    smem: int,
    l2: int,
    memory: int,
    gb_s: int,
    rates: dict[torch.dtype, float],
) -> DeviceSpec:
    return DeviceSpec(name, "cuda", capability, sms, smem * KIB, l2 * MIB, memory * GB, gb_s * GB, rates)


# From the vendor's datasheets: SMs, maximum shared memory per block (KiB), L2 (MiB), memory (GB), bandwidth (GB/s),
# dense TFLOP/s.
DEVICES: dict[str, DeviceSpec] = {
    "v100": _gpu("NVIDIA V100 SXM2", (7, 0), 80, 96, 6, 32, 900, _rates(125, 15.7, 7.8, bf16=False)),
    "a100": _gpu("NVIDIA A100 SXM 80GB", (8, 0), 108, 163, 40, 80, 2039, _rates(312, 19.5, 19.5)),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 72, 24, 1008, _rates(165.2, 82.6, 1.29, fp8=330.3)),
    "l40s": _gpu("NVIDIA L40S", (8, 9), 142, 99, 96, 48, 864, _rates(362, 91.6, 1.43, fp8=733)),
    "h100": _gpu("NVIDIA H100 SXM", (9, 0), 132, 227, 50, 80, 3350, _rates(989, 67, 67, fp8=1979)),
    "h200": _gpu("NVIDIA H200", (9, 0), 132, 227, 50, 141, 4800, _rates(989, 67, 67, fp8=1979)),
    "b200": _gpu("NVIDIA B200", (10, 0), 148, 227, 126, 180, 8000, _rates(2250, 75, 37, fp8=4500)),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 96, 32, 1792, _rates(209.5, 104.8, 1.64, fp8=419)),
}

Function = TypeVar("Function", bound=Callable[..., object])

_override: contextvars.ContextVar[DeviceSpec | None] = contextvars.ContextVar("tilewise_device", default=None)
# The device spec that replaces all others in this context, if any. Every call asks: no Python function in between.
override = _override.get


def named(name: str) -> DeviceSpec:
    """The device of that name: a key of `DEVICES`, or "cpu" for this machine."""
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if key == "cpu":
        return this_cpu()
    if key not in DEVICES:
        raise InvalidProblem("device", "one of cpu, " + ", ".join(DEVICES), repr(name), "Name a listed device.")
    return DEVICES[key]


def constant_in_traces(function: Function) -> Function:
    """For functions that compilers cannot trace and need not: called once per trace.

    Like torch.compiler.assume_constant_result, which loads the compilers even if nothing is compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
    return function


@constant_in_traces
def of(device: torch.device) -> DeviceSpec:
    """The facts of a present device. A meta tensor's device is the best one present."""
    spec = _override.get()
    if spec is not None:
        return spec
    if device.type == "cuda":
        return _cuda(_index(device))
    if device.type == "meta" and torch.cuda.is_available():
        return _cuda(torch.cuda.current_device())
    return this_cpu() if device.type in ("cpu", "meta") else _unknown(device.type)


@contextlib.contextmanager
def overridden(spec: DeviceSpec) -> Iterator[DeviceSpec]:
    """Within the block every device is described by `spec`."""
    token = _override.set(spec)
    try:
        yield spec
    finally:
        _override.reset(token)


def _index(device: torch.device) -> int:
    index: int | None = device.index  # typed as int by torch, but None for a plain "cuda"
    return torch.cuda.current_device() if index is None else index


@functools.cache
def _cuda(index: int) -> DeviceSpec:
    props = torch.cuda.get_device_properties(index)
    capability = (props.major, props.minor)
    alike = [s for s in DEVICES.values() if s.capability == capability]
    exact = [s for s in alike if s.name == props.name]
    nearest = (exact or alike or [DEVICES["a100"]])[0]
    scale = props.multi_processor_count / nearest.num_sms
    return DeviceSpec(
        name=props.name,
        type="cuda",
        capability=capability,
        num_sms=props.multi_processor_count,
        smem_bytes=getattr(props, "shared_memory_per_block_optin", nearest.smem_bytes),
        l2_bytes=props.L2_cache_size,
        memory_bytes=props.total_memory,
        bandwidth=nearest.bandwidth,
        flops={dtype: rate * scale for dtype, rate in nearest.flops.items()},
    )


def _unknown(kind: str) -> DeviceSpec:
    return DeviceSpec(f"unknown device type {kind!r}", kind, None, 1, 0, 0, 0, 1.0, {})


def cpu_name() -> str:
    """The processor's marketing name, if the system reports it."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def this_cpu() -> DeviceSpec:
    """This machine's processor, without rates: `measured_cpu` measures them, which takes longer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    # Defaults where the system does not report cache sizes: 1 MiB per core and 32 MiB shared are common.
    own, shared = _cache_bytes(2) or MIB, _cache_bytes(3) or 32 * MIB
    return DeviceSpec(cpu_name(), "cpu", None, cores, own, shared, memory, 0.0, {})


def _cache_bytes(level: int) -> int | None:
    """The size of a data cache level of the first core, from Linux files such as "2048K"."""
    with contextlib.suppress(OSError, ValueError):
        for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
            if int((cache / "level").read_text()) == level:
                return int((cache / "size").read_text().strip().removesuffix("K")) * KIB
    return None


@functools.cache
def measured_cpu() -> DeviceSpec:
    """`this_cpu` with the fp32 matrix rate and copy bandwidth that torch reaches with its current threads."""
    # In another thread, where autocast, fake tensors and other modes of the caller are off.
    with ThreadPoolExecutor(1) as thread:
        rate, bandwidth = thread.submit(_cpu_rates).result()
    flops = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), rate) | {torch.float64: rate / 2}
    return replace(this_cpu(), bandwidth=bandwidth, flops=flops)


def _cpu_rates() -> tuple[float, float]:
    """FLOP and bytes per second. No random numbers: torch's generator is the user's."""
    a = torch.ones(768, 768, dtype=torch.float32, device="cpu")
    matmul = _best_seconds(lambda: a @ a)
    source = torch.ones(1 << 24, dtype=torch.float32, device="cpu")
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source))
    return 2 * 768**3 / matmul, 2 * 4 * source.numel() / copy


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])
