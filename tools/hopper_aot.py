"""Compile the kernels for sm_90a on any machine, and read from the machine code what decides their speed.

Triton hides the assembler's log, so ptxas is run once more on the PTX: it tells of spills and of wgmma that it had to
serialise.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton

from machine_code import LocalAccesses, counted
from tilewise import device
from tilewise.backends.gpu import releases
from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.hopper.again import again_kernel
from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_pieces import backward_pieces_kernel
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.configs import BackwardConfig
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.forward_quad import forward_quad_kernel
from tilewise.backends.hopper.offline import calls_of
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.problem import AttentionProblem

__all__ = [
    "Resources",
    "compile_again",
    "compile_backward",
    "compile_forward",
    "compile_pieces",
    "compile_query_gradient",
    "resources",
]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER = device.named("h200")


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel needs and contains."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    hgmma: int
    serialised: bool
    instructions: int
    local: LocalAccesses


def compile_forward(problem: AttentionProblem) -> Any:
    """The forward kernel of a problem, as the launch path compiles it."""
    return _compiled(calls_of(problem, HOPPER), forward_kernel, forward_quad_kernel)


def compile_again(problem: AttentionProblem) -> Any:
    """The kernel that computes lost rows again, of a problem whose forward may lose some."""
    return _compiled(calls_of(problem, HOPPER), again_kernel)


def compile_backward(problem: AttentionProblem, config: BackwardConfig | None = None) -> Any:
    """The main backward kernel of a problem; `config` to try another one."""
    calls = calls_of(replace(problem, needs_grad=True), HOPPER, config)
    return _compiled(calls, backward_kernel, backward_wide_kernel)


def compile_pieces(problem: AttentionProblem) -> Any:
    """The kernel that computes the last round of a backward without a mask."""
    return _compiled(calls_of(replace(problem, needs_grad=True), HOPPER), backward_pieces_kernel)


def compile_query_gradient(problem: AttentionProblem) -> Any:
    """The kernel that computes dQ alone, for wide heads."""
    return _compiled(calls_of(replace(problem, needs_grad=True), HOPPER), query_gradient_kernel)


def _compiled(calls: list[KernelCall], *kernels: Any) -> Any:
    (call,) = (call for call in calls if call.kernel in kernels)
    return compile_call(call, HOPPER, -1)


def resources(compiled: Any) -> Resources:
    """Assemble once more with the log on, and disassemble."""
    ptx: str = compiled.asm["ptx"]
    log, sass = _assemble(ptx), _disassemble(compiled.asm["cubin"])
    return Resources(
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log),
        smem_bytes=compiled.metadata.shared,
        hgmma=len(re.findall(r"\b[HQ]GMMA", sass)),
        serialised="serializ" in log,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", sass, re.MULTILINE)),
        local=counted(sass),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _assemble(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [releases.ptxas(90), "-v", "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [str(TOOLS / "nvdisasm"), "-c", str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
