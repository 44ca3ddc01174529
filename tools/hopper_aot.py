"""Compile the Hopper kernels for sm_90a on any machine, and read from the machine code what decides their speed.

The log of ptxas tells of spills and of wgmma that it had to serialise. Triton prints it when it assembles a kernel; for
one that lay in its cache ptxas is run once more.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from machine_code import LocalAccesses, counted
from tilewise import device
from tilewise.backends.gpu import releases
from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.symbols import KernelCall
from tilewise.backends.hopper.configs import BackwardConfig
from tilewise.backends.hopper.launch import calls_of
from tilewise.problem import AttentionProblem

__all__ = ["HOPPER", "Resources", "call_of", "resources"]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER = device.named("h200")


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel needs and contains.

    `unused_barriers` are initialised, but no role has them. Their memory is used for something else then, which is
    wrong: see channels.make_ring. `early_signals`: how often one thread of a role signals without a barrier after what
    the others stored in shared memory.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int
    hgmma: int
    serialised: bool
    instructions: int
    local: LocalAccesses
    unused_barriers: list[str]
    early_signals: int


def call_of(problem: AttentionProblem, kernel: str, config: BackwardConfig | None = None) -> KernelCall:
    """The call of the kernel of that name that the launch path makes; `config` to try another backward."""
    (call,) = (call for call in calls_of(problem, HOPPER, config) if call.kernel.__name__ == kernel)
    return call


def resources(call: KernelCall) -> Resources:
    """Compile a call as the launch path does, and disassemble."""
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = compile_call(call, HOPPER, -1)
    log, sass = said.getvalue() or _assemble(kernel), _disassemble(kernel.asm["cubin"])
    return Resources(
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log),
        smem_bytes=kernel.metadata.shared,
        hgmma=len(re.findall(r"\b[HQ]GMMA", sass)),
        serialised="serializ" in log,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", sass, re.MULTILINE)),
        local=counted(sass),
        unused_barriers=_unused_barriers(kernel.asm["ttgir"]),
        early_signals=_early_signals(kernel.asm["ptx"]),
    )


def _unused_barriers(ir: str) -> list[str]:
    slots = dict(re.findall(r"(%\S+) = ttg\.memdesc_index (%[^\[\s]+)", ir))
    barriers = {slots.get(name, name) for name in re.findall(r"ttng\.init_barrier (%[^,\s]+)", ir)}
    given = {name for names in re.findall(r"ttg\.warp_specialize\((.*?)\)", ir) for name in names.split(", ")}
    return sorted(barriers - given)


def _early_signals(ptx: str) -> int:
    between = re.split(r"\bbar(?:rier)?\.(?:warp\.)?sync\b", ptx)
    return sum(re.search(r"\b(st\.shared|stmatrix)\b.*\bmbarrier\.arrive\b", x, re.DOTALL) is not None for x in between)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _assemble(kernel: Any) -> str:
    options = (kernel.metadata.ptx_options or "").split()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        command = [releases.ptxas(90), "-v", *options, "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [str(TOOLS / "nvdisasm"), "-c", str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
