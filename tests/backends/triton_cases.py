"""Problems that between them take every row of the Triton backend's tables, on every architecture, and what their
kernels compile to: registers, bytes of them that lie in memory, shared memory.

`python tests/backends/triton_cases.py` prints the table that is recorded in triton_records.csv.
"""

from __future__ import annotations

import csv
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import device as devices
from tilewise.backends.triton import BACKEND
from tilewise.problem import AttentionProblem

if TYPE_CHECKING:
    from tilewise.backends.gpu.symbols import KernelCall

__all__ = ["CASES", "Case", "Used", "calls_of", "places", "recorded", "used_by"]

FIELDS = ("device", "case", "head_dim", "kernel", "registers", "spilled", "shared")
EVERYWHERE = ("h200", "a100", "l40s", "b200", "rtx5090")
WIDTHS = (64, 128, 256, 512)


class Case(NamedTuple):
    """What makes a problem special, and the (devices, head dims) for which it is compiled.

    For those of `elsewhere` only where not one of the first: what differs there is the architecture, not the table.
    """

    features: dict[str, Any]
    devices: tuple[str, ...] = EVERYWHERE
    head_dims: tuple[int, ...] = WIDTHS
    elsewhere: tuple[int, ...] = ()


H200 = ("h200",)
GRADIENTS: dict[str, Any] = {"needs_grad": True}
CAUSAL: dict[str, Any] = {"causal": True}
MANY: dict[str, Any] = {"seqlen_k": 4096, "total_k": 4096}
RICH: dict[str, Any] = {
    **CAUSAL, **GRADIENTS, "window_left": 50, "softcap": 20.0, "dropout": 0.1, "has_sinks": True,
    "bias_shape": (1, 4, 300, 300), "bias_dtype": torch.float32,
}  # fmt: skip
PAGES: dict[str, Any] = {"kind": "paged", "page_size": 16, "seqlen_k": 320, "total_k": 3200}
ONE_TOKEN: dict[str, Any] = {"seqlen_q": 1, "total_q": 1, "seqlen_k": 8192, "total_k": 8192}
E4M3: dict[str, Any] = {**PAGES, "page_size": 64, "fp8": ("k", "v")}
CASES: dict[str, Case] = {
    "causal": Case({**CAUSAL, **GRADIENTS}),
    "full": Case({}, H200),
    "many": Case(MANY, H200),
    "many causal": Case({**MANY, **CAUSAL, **GRADIENTS}, H200, (64, 128)),
    "short": Case(GRADIENTS, H200, (64, 128)),
    "window": Case({**MANY, **CAUSAL, **GRADIENTS, "window_left": 100}, H200, (64, 128), (128,)),
    "packed": Case({"kind": "varlen", **CAUSAL, **GRADIENTS}, H200, (64, 128, 256), (128,)),
    "packed many": Case({"kind": "varlen", **MANY, **CAUSAL}, H200, (64, 128)),
    "fp16": Case({"dtype": torch.float16, **CAUSAL, **GRADIENTS}, H200, (64, 128), (128,)),
    "unequal": Case({"head_dim_v": 64, **CAUSAL, **GRADIENTS}, H200, (128, 256)),
    "rich": Case(RICH, H200, WIDTHS, (128,)),
    "fp32": Case({"dtype": torch.float32, **CAUSAL, **GRADIENTS}),
    "decode": Case(ONE_TOKEN),
    "decode fp32": Case({**ONE_TOKEN, "dtype": torch.float32}, H200, WIDTHS, (64,)),
    "decode pages": Case({**PAGES, **ONE_TOKEN}, H200, (128,), (128,)),
    "decode e4m3": Case({**E4M3, **ONE_TOKEN, "page_size": 128}, H200, WIDTHS, (128,)),
    "decode e4m3 64": Case({**E4M3, **ONE_TOKEN}, H200, (64, 128)),
    "e4m3": Case({**E4M3, **CAUSAL}, H200, WIDTHS, (128,)),
    "mask and slopes": Case({**GRADIENTS, "mask_shape": (1, 1, 300, 300), "has_alibi": True}, H200, (64, 128)),
    "pages": Case({**PAGES, **CAUSAL, **GRADIENTS}, H200, (64, 128), (128,)),
    "fp32 rich": Case({"dtype": torch.float32, **RICH}, H200),
}


class Used(NamedTuple):
    """What a compiled kernel takes of a multiprocessor: registers a thread and bytes of those that lie in memory, bytes
    of shared memory a program.
    """

    registers: int
    spilled: int
    shared: int


def places() -> Iterator[tuple[str, str, int]]:
    """(device, case, head_dim) of all that is compiled."""
    for name, case in CASES.items():
        for device in EVERYWHERE:
            for head_dim in case.head_dims if device in case.devices else case.elsewhere:
                yield device, name, head_dim


def problem_of(name: str, head_dim: int) -> AttentionProblem:
    """300 tokens in one sequence of four heads on two, but for what is special."""
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 1, "seqlen_q": 300, "seqlen_k": 300, "total_q": 300,
        "total_k": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim, "scale": 0.1,
    }  # fmt: skip
    return AttentionProblem(**values | CASES[name].features)


def calls_of(device: str, name: str, head_dim: int) -> list[KernelCall]:
    """The kernels of a case; without gradients where a device has no room for them."""
    from tilewise.backends.triton import offline

    problem, spec = problem_of(name, head_dim), devices.named(device)
    if BACKEND.supports(problem, spec) is not None:
        problem = replace(problem, needs_grad=False)
    assert BACKEND.supports(problem, spec) is None
    return offline.calls_of(problem, spec)


def used_by(call: KernelCall, device: str) -> Used:
    """Compile one call as the launch path does, but for a device that is not here."""
    from tilewise.backends.gpu import compilation

    compiled = compilation.compile_call(call, devices.named(device), -1)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_tool("cuobjdump"), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None
    return Used(int(found[1]), int(found[2]), compiled.metadata.shared)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


@functools.cache
def recorded() -> dict[tuple[str, str, int], dict[str, Used]]:
    """By place and kernel, as Triton 3.6.0 compiled it."""
    found: dict[tuple[str, str, int], dict[str, Used]] = {}
    with Path(__file__).with_name("triton_records.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            place = (row["device"], row["case"], int(row["head_dim"]))
            numbers = Used(*(int(row[field]) for field in FIELDS[-3:]))
            found.setdefault(place, {})[row["kernel"]] = numbers
    return found


def write(file: Any) -> None:
    """Compile all of it and print the table."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow(FIELDS)
    for device, name, head_dim in places():
        calls = {call.kernel.__name__: call for call in calls_of(device, name, head_dim)}
        for kernel, call in calls.items():
            table.writerow((device, name, head_dim, kernel, *used_by(call, device)))
        file.flush()


if __name__ == "__main__":
    write(sys.stdout)
