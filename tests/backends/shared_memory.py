"""Where the buffers of a compiled kernel lie in shared memory, and what becomes of barriers whose memory is used again.

Triton's allocator gives the memory of a buffer to others once nothing names it any more. PTX asks that a barrier's life
is ended (`mbarrier.inval`) before that: a multiprocessor keeps barriers in a cache and writes them back later.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

BARRIER_BYTES = 8
ELEMENT_BYTES = {"i64": 8, "i32": 4, "f32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "f8E4M3FN": 1}
ALLOCATION = re.compile(r"(%\w+) = ttg\.local_alloc.*?allocation\.offset = (\d+).*?-> !ttg\.memdesc<((?:\d+x)+)(\w+),")
BARRIER = re.compile(r"ttng\.init_barrier (%\w+),")
PART = re.compile(r"(%\w+) = ttg\.memdesc_index (%\w+)\[")
# What PTX has to say: a register is the start of shared memory plus a constant; a barrier begins or ends; TMA writes.
BASE = re.compile(r"mov\.b32\s+(%r\d+), global_smem;")
SUM = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);")
LIFE = re.compile(r"mbarrier\.(init|inval)\.shared::cta\.b64 \[(%r\d+|global_smem)(?:\+(\d+))?\]")
COPY = re.compile(r"cp\.async\.bulk\.tensor")


class Buffer(NamedTuple):
    """Bytes `begin` to `end` of shared memory."""

    begin: int
    end: int
    holds_barriers: bool

    def meets(self, other: Buffer) -> bool:
        """Whether they have a byte in common."""
        return self.begin < other.end and other.begin < self.end


def buffers_of(ttgir: str, capability: int, ptx_version: int = 86) -> list[Buffer]:
    """The named buffers of a kernel, where the compiler's own pass puts them."""
    text = _placed(ttgir, capability, ptx_version)
    parts = dict(PART.findall(text))
    barriers = {parts.get(name, name) for name in BARRIER.findall(text)}
    found = []
    for name, offset, sizes, element in ALLOCATION.findall(text):
        count = math.prod(int(size) for size in sizes.split("x") if size)
        begin = int(offset)
        found.append(Buffer(begin, begin + count * ELEMENT_BYTES[element], name in barriers))
    return found


def _placed(ttgir: str, capability: int, ptx_version: int) -> str:
    """The module as it is after shared memory was allocated: the passes of Triton's own pipeline up to there."""
    from triton._C.libtriton import ir, nvidia, passes

    context: Any = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    manager.run(module, "shared memory")
    return str(module)


def strays_of(buffers: Sequence[Buffer]) -> set[int]:
    """Offsets of barriers in memory that other buffers have too."""
    others = [buffer for buffer in buffers if not buffer.holds_barriers]
    return {
        offset
        for buffer in buffers
        if buffer.holds_barriers
        for offset in range(buffer.begin, buffer.end, BARRIER_BYTES)
        if any(Buffer(offset, offset + BARRIER_BYTES, True).meets(other) for other in others)
    }


def complaints_about(ptx: str, strays: set[int]) -> list[str]:
    """What is wrong with the lives of barriers: those of strays have to end between their last initialisation and the
    first copy by TMA, those of the others must not.
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    places: dict[str, int] = {"global_smem": 0}
    first_copy = math.inf
    for number, line in enumerate(ptx.splitlines()):
        if base := BASE.search(line):
            places[base[1]] = 0
        elif (total := SUM.search(line)) and total[2] in places:
            places[total[1]] = places[total[2]] + int(total[3])
        elif life := LIFE.search(line):
            (begins if life[1] == "init" else ends)[places[life[2]] + int(life[3] or 0)] = number
        elif COPY.search(line):
            first_copy = min(first_copy, number)
    found = [f"the barrier at {stray} is never made" for stray in strays if stray not in begins]
    for offset, begin in begins.items():
        end = ends.get(offset)
        if offset not in strays and end is not None:
            found.append(f"the barrier at {offset} ends, but is in use")
        if offset in strays and (end is None or not begin < end < first_copy):
            found.append(f"the barrier at {offset} does not end before a tile is copied there")
    return found
