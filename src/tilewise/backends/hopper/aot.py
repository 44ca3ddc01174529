"""Compile the kernels for sm_90a on any machine, and read from the machine code what decides their speed.

Triton hides the assembler's log, so ptxas is run once more on the PTX: it tells of spills and of wgmma that it had to
serialise.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.backward import backward_kernel
from tilewise.backends.hopper.backward_wide import backward_wide_kernel
from tilewise.backends.hopper.compilation import compile_kernel
from tilewise.backends.hopper.configs import PANEL, BackwardConfig, ForwardConfig
from tilewise.backends.hopper.forward import forward_kernel
from tilewise.backends.hopper.layouts import smem_layout, tile_box
from tilewise.backends.hopper.query_gradient import query_gradient_kernel
from tilewise.backends.hopper.schedule import Sizes

__all__ = ["Resources", "compile_backward", "compile_forward", "compile_query_gradient", "resources"]

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER = GPUTarget("cuda", 90, 32)
GLUON_DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i32": gl.int32}


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel needs and contains."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    hgmma: int
    serialised: bool
    instructions: int
    spills_in_hot_loops: int


def descriptor_type(dtype: str, box: list[int]) -> str:
    """The signature of a tensor descriptor argument."""
    return f"tensordesc<{dtype}[{','.join(map(str, box))}],{smem_layout(box, GLUON_DTYPES[dtype])!r}>"


def compile_forward(config: ForwardConfig, dtype: str = "bf16") -> Any:
    """The forward kernel of one configuration."""

    def desc(rows: int, columns: int) -> str | None:
        if columns == 0:
            return None
        return descriptor_type(dtype, tile_box(rows, columns, packed=config.IS_VARLEN))

    index = "*i32" if config.IS_VARLEN else None
    number = "i32" if config.IS_PAGED else None
    rows = config.CHUNK if config.IS_PAGED else config.BLOCK_N
    signature = {
        "q_desc": desc(64, config.D),
        "k_desc": desc(rows, PANEL if config.IS_PAGED else config.D),
        "v_desc": desc(rows, PANEL if config.IS_PAGED else config.DV),
        "out_desc": desc(64, config.DV),
        "q_rest": desc(64, config.D_REST),
        "k_rest": desc(rows, config.D_REST),
        "v_rest": desc(rows, config.DV_REST),
        "out_rest": desc(64, config.DV_REST),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32" if config.HAS_SINKS else None,
        "cu_seqlens_q": index,
        "cu_seqlens_k": index,
        "counter_ptr": "*i32",
        "block_table": "*i32" if config.IS_PAGED else None,
        "table_stride": number,
        "k_page_rows": number,
        "v_page_rows": number,
        "scale_log2": "fp32",
        "cap_scale": "fp32",
        "sizes": Sizes(*("i32",) * len(Sizes._fields)),  # type: ignore[arg-type]
    }
    return compile_kernel(forward_kernel, signature, {"C": config}, ("lse_ptr",), HOPPER)


def compile_backward(config: BackwardConfig, dtype: str = "bf16") -> Any:
    """The main backward kernel of one configuration."""

    def desc(rows: int, columns: int) -> str | None:
        return descriptor_type(dtype, tile_box(rows, columns, packed=config.IS_VARLEN)) if columns else None

    index = "*i32" if config.IS_VARLEN else None
    signature = {
        "q_desc": desc(config.BLOCK_M, config.D),
        "dout_desc": desc(config.BLOCK_M, config.DV),
        "k_desc": desc(64, config.D),
        "v_desc": desc(64, config.DV),
        "dk_desc": desc(64, config.D),
        "dv_desc": desc(64, config.DV),
        "stats_desc": descriptor_type("fp32", [2 * config.BLOCK_M]),
        "units_desc": descriptor_type("fp32", [config.BLOCK_M]) if config.FIXED_POINT else None,
        "dq_desc": descriptor_type("i32" if config.FIXED_POINT else "fp32", [128, 32]) if config.FUSED else None,
        "cu_seqlens_q": index,
        "cu_seqlens_k": index,
        "counter_ptr": "*i32",
        "scale_log2": "fp32",
        "cap_scale": "fp32" if config.HAS_SOFTCAP else None,
        "scale": "fp32",
        "sizes": Sizes(*("i32",) * len(Sizes._fields)),  # type: ignore[arg-type]
    }
    if not config.WIDE:
        return compile_kernel(backward_kernel, signature, {"C": config}, (), HOPPER)
    signature |= {
        "q_rest": desc(config.BLOCK_M, config.D_REST),
        "dout_rest": desc(config.BLOCK_M, config.DV_REST),
        "k_rest": desc(64, config.D_REST),
        "v_rest": desc(64, config.DV_REST),
        "dk_rest": desc(64, config.D_REST),
        "dv_rest": desc(64, config.DV_REST),
    }
    return compile_kernel(backward_wide_kernel, signature, {"C": config}, (), HOPPER)


def compile_query_gradient(config: BackwardConfig, dtype: str = "bf16") -> Any:
    """The kernel that computes dQ alone."""
    halves, keys = (descriptor_type(dtype, tile_box(rows, config.D, packed=config.IS_VARLEN)) for rows in (64, 128))
    index = "*i32" if config.IS_VARLEN else None
    signature = {
        "q_desc": halves,
        "dout_desc": halves,
        "k_desc": keys,
        "v_desc": keys,
        "dq_desc": halves,
        "stats_ptr": "*fp32",
        "cu_seqlens_q": index,
        "cu_seqlens_k": index,
        "scale_log2": "fp32",
        "cap_scale": "fp32" if config.HAS_SOFTCAP else None,
        "scale": "fp32",
        "sizes": Sizes(*("i32",) * len(Sizes._fields)),  # type: ignore[arg-type]
    }
    return compile_kernel(query_gradient_kernel, signature, {"C": config}, (), HOPPER)


def resources(compiled: Any) -> Resources:
    """Assemble once more with the log on, and disassemble."""
    ptx: str = compiled.asm["ptx"]
    log, sass = _assemble(ptx), _disassemble(compiled.asm["cubin"])
    return Resources(
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log),
        smem_bytes=compiled.metadata.shared,
        hgmma=len(re.findall(r"\bHGMMA", sass)),
        serialised="serializ" in log,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", sass, re.MULTILINE)),
        spills_in_hot_loops=_spills_in_hot_loops(sass),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _assemble(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [str(TOOLS / "ptxas"), "-v", "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [str(TOOLS / "nvdisasm"), "-c", str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _spills_in_hot_loops(sass: str) -> int:
    """Local loads and stores inside innermost loops that multiply matrices."""
    lines = sass.splitlines()
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"^(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump and labels.get(jump.group(1), i) < i:
            loops.append((labels[jump.group(1)], i))
    innermost = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    bodies = ["\n".join(lines[begin:end]) for begin, end in innermost]
    return sum(len(re.findall(r"\b(?:LDL|STL)", body)) for body in bodies if "HGMMA" in body)
