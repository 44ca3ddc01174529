"""`tilewise doctor`: what is installed, which devices are here, and which backends run on them."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise import device, dispatch, settings
from tilewise.bench.machine import installed_version
from tilewise.cli.console import JsonOption, cache_line, print_json
from tilewise.device import DeviceSpec
from tilewise.plan import explain
from tilewise.units import counted, format_bytes, format_count
from tilewise.version import __version__

EXAMPLE = "tilewise doctor --json"

PACKAGES = ("torch", "numpy", "llvmlite", "triton")


def command(*, json: JsonOption = False) -> None:
    """Show versions, devices, backends (available, or why not) and the settings in force."""
    print_json(diagnose()) if json else _show(diagnose())


def diagnose() -> dict[str, Any]:
    """Everything the command shows, ready for JSON."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "versions": {
            "tilewise": __version__,
            "python": platform.python_version(),
            **{name: installed_version(name) for name in PACKAGES},
            "torch": str(torch.__version__),  # which also names the CUDA release it was built for
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "devices": [_device(device.measured_cpu(), torch.device("cpu")), *(_device(device.of(g), g) for g in gpus)],
        "backends": [_backend(status) for status in dispatch.statuses()],
        "settings": {
            name: value if value is None or isinstance(value, (bool, int, str)) else str(value)
            for name, value in dataclasses.asdict(settings.current()).items()
        },
    }


def _device(spec: DeviceSpec, where: torch.device) -> dict[str, Any]:
    """The facts of one device, and the backend that plain attention gets on it."""
    dtype = torch.float32 if spec.type == "cpu" else torch.bfloat16
    q = torch.empty(1, 1, 128, 64, dtype=dtype, device="meta")
    return {
        "device": str(where),
        "name": spec.name,
        "backend": explain(q, q, q, device=where).backend,
        "processors": spec.num_sms,
        "threads": torch.get_num_threads() if spec.type == "cpu" else None,
        "capability": None if spec.capability is None else ".".join(map(str, spec.capability)),
        "memory_bytes": spec.memory_bytes,
        "bandwidth": spec.bandwidth,
        "flops": {str(key).removeprefix("torch."): rate for key, rate in spec.flops.items()},
    }


def _backend(status: dispatch.Status) -> dict[str, Any]:
    """Name, availability, and what the backend reports of its compiler, its kernel cache and its launches."""
    backend, runs = dispatch.load(status.name), status.reason is None
    cache = backend.cache_state() if runs else None
    return {
        "name": status.name,
        "available": runs,
        "reason": status.reason,
        "compiler": backend.compiler() if runs else None,
        "cache": None if cache is None else dict(cache),
        "launch_path": backend.launch_path() if runs else None,
    }


def _show(findings: dict[str, Any]) -> None:
    console = Console(highlight=False)
    values = findings["settings"].items()
    in_force = {name: "[dim]default[/]" if value is None else escape(str(value)) for name, value in values}
    _section(console, "versions", {n: v or "[yellow]not installed[/]" for n, v in findings["versions"].items()})
    _section(console, "devices", {found["device"]: _device_line(found) for found in findings["devices"]})
    _section(console, "backends, in order of preference", {b["name"]: _backend_line(b) for b in findings["backends"]})
    _section(console, "settings in force", in_force)


def _section(console: Console, title: str, lines: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=14, style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in lines.items():
        table.add_row(f"  {name}", line)
    console.print(f"[bold]{title}[/]", table, "", sep="\n")


def _device_line(found: dict[str, Any]) -> str:
    single, half = (found["flops"].get(dtype) for dtype in ("float32", "bfloat16"))
    bandwidth = format_count(found["bandwidth"], "B/s")
    if found["threads"] is not None:
        what = f"{counted(found['processors'], 'core')}, {counted(found['threads'], 'thread')}"
        rates = f"measured: {format_count(single, 'FLOP/s')} fp32, {bandwidth}"
    else:
        what = f"{found['processors']} SMs, compute capability {found['capability']}"
        rates = f"peak: {format_count(half, 'FLOP/s')} bf16, {bandwidth}" if half else "rates unknown"
    memory = format_bytes(found["memory_bytes"])
    runs = f"attention runs on backend [bold]{found['backend']}[/]" if found["backend"] else "[red]no backend[/]"
    return f"{escape(found['name'])}: {what}, {memory}\n{rates}\n{runs}"


def _backend_line(found: dict[str, Any]) -> str:
    line = "[green]available[/]" if found["available"] else f"[yellow]no:[/] {escape(found['reason'])}"
    if found["compiler"]:
        line += f"\ncompiled by {escape(found['compiler'])}"
    if found["cache"]:
        line += f"\n{escape(cache_line(found['cache']))}"
    if found["launch_path"]:
        line += f"\nlaunch path {escape(found['launch_path'])}"
    return line
