"""The machine of a measurement: processor, GPU, memory, versions and driver."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

from tilewise import device
from tilewise.version import __version__

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "flash-attn", "flash-attn-3", "flash-attn-4")


def machine() -> dict[str, Any]:
    """The hardware and the system."""
    cpu = device.this_cpu()
    facts: dict[str, Any] = {
        "cpu": cpu.name,
        "cores": cpu.num_sms,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_bytes": cpu.memory_bytes,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpu": None,
    }
    if torch.cuda.is_available():
        gpu = device.of(torch.device("cuda"))
        facts |= {"gpu": gpu.name, "gpu_processors": gpu.num_sms, "gpu_memory_bytes": gpu.memory_bytes}
    return facts


def versions() -> dict[str, Any]:
    """Everything that could change a figure; packages that are not installed are left out."""
    found: dict[str, Any] = {"tilewise": __version__, "python": platform.python_version()}
    installed = {package: installed_version(package) for package in PACKAGES}
    found |= {package: version for package, version in installed.items() if version is not None}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return found


def installed_version(package: str) -> str | None:
    """None for one that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = done.stdout.split("\n")[0].strip()
    return found or None
