"""`tilewise warmup`: compile kernels now, so that the first call of a program does not wait for it."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import torch
import typer

from tilewise import device as devices
from tilewise import dispatch
from tilewise.backends.gpu import releases
from tilewise.cli.console import JsonOption, Step, cache_line, print_json, progress
from tilewise.device import DEVICES, DeviceSpec
from tilewise.errors import InvalidProblem, Unsupported

EXAMPLE = "TILEWISE_CACHE_DIR=/opt/kernels tilewise warmup"
GPU_BACKENDS = ("hopper", "triton")
DEVICE_HELP = (
    f"cpu, cuda (the GPU here), or a GPU that need not be here: {', '.join(DEVICES)}. Default: all that is here."
)


def command(*, device: Annotated[str | None, typer.Option(help=DEVICE_HELP)] = None, json: JsonOption = False) -> None:
    """Compile the kernels of every backend that keeps them on disk, and show where they are.

    Worth a line in a container image: processes that find the cache filled start without compiling. Kernels for a GPU
    are compiled without one if it is named; they go into Triton's cache (TRITON_CACHE_DIR).
    """
    gpu = _gpu(device)
    with progress(None) as step:
        filled = [_filled(status, device, gpu, step) for status in dispatch.statuses()]
    print_json({"backends": filled}) if json else typer.echo("\n".join(map(_line, filled)))
    # A cache that stays incomplete would make every later process compile again.
    caches = [found["cache"] for found in filled if found["cache"] is not None]
    if any(found["failed"] for found in filled) or any(c["entries"] < c["entries_when_full"] for c in caches):
        raise typer.Exit(1)


def _gpu(name: str | None) -> DeviceSpec | None:
    """The GPU to compile for: the present one unless another one, or none, is named."""
    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        known = ", ".join(DEVICES)
        raise InvalidProblem("device", "a GPU", "cuda, but none is visible to torch", f"Name a device: {known}.")
    if name == "cpu" or (name is None and not here):
        return None
    return devices.of(torch.device("cuda")) if name in (None, "cuda") else devices.named(name or "")


def _filled(status: dispatch.Status, device: str | None, gpu: DeviceSpec | None, step: Step) -> dict[str, Any]:
    if status.name in GPU_BACKENDS and gpu is not None:
        return fill_for_gpu(status.name, gpu, step)
    if device not in (None, "cpu"):
        return _skipped(status.name, f"compiles nothing for {device}")
    return fill(status, step)


def _skipped(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "cache": None, "skipped": reason, "failed": None}


def fill(status: dispatch.Status, step: Step) -> dict[str, Any]:
    """Fill one backend's cache; `skipped` says why there was nothing to do."""
    backend = dispatch.load(status.name)
    if status.reason is not None:
        return _skipped(status.name, status.reason)
    backend.warmup(lambda name, done, total: step(f"{status.name}: {name} ({done + 1} of {total})"))
    if (state := backend.cache_state()) is None:
        return _skipped(status.name, "compiles nothing, or only for the problem it is given")
    return {"name": status.name, "cache": dict(state), "skipped": None, "failed": None}


def fill_for_gpu(name: str, gpu: DeviceSpec, step: Step) -> dict[str, Any]:
    """Compile the kernels of the common problems that a backend gets on a GPU, which need not be present."""
    if (missing := releases.missing()) is not None:
        return _skipped(name, missing)
    kernels = importlib.import_module("tilewise.backends.gpu.warmup")
    mine = [(label, problem) for label, problem in kernels.common_problems() if _runs(name, problem, gpu)]
    if not mine:
        return _skipped(name, f"serves none of the common problems on {gpu.name}")
    compiling = ""

    def told(what: str, done: int, total: int) -> None:
        nonlocal compiling
        compiling = what
        step(f"{name}: {what} ({done + 1} of {total})")

    try:
        state = kernels.warmup(name, mine, gpu, told)
    except Exception as error:  # any error of a compiler: the other caches are still filled
        first = (str(error).strip() or "no reason given").splitlines()[0]
        reason = f"triton {releases.installed()} could not compile {compiling}: {type(error).__name__}: {first}"
        return _skipped(name, reason) | {"skipped": None, "failed": reason}
    return {"name": name, "cache": state._asdict(), "skipped": None, "failed": None}


def _runs(name: str, problem: Any, gpu: DeviceSpec) -> bool:
    try:
        return dispatch.select(problem, gpu, "auto", here=False).backend.name == name
    except Unsupported:
        return False


def _line(found: dict[str, Any]) -> str:
    if found["failed"] is not None:
        return f"{found['name']}: failed, {found['failed']}"
    if found["skipped"] is not None:
        return f"{found['name']}: skipped, {found['skipped']}"
    return f"{found['name']}: {cache_line(found['cache'])}"
