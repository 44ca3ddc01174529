"""One row per instruction set: the register shapes that micro-kernel emitters need.

A panel is `query_vectors * lanes` queries. It goes through scores, softmax and values together, so that its scores stay
in the first-level cache. The score kernel keeps `score_keys * query_vectors` accumulators, the value kernel
`value_rows * value_vectors`. Measurements behind the rows are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass

# Linux grants the tile registers per process: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """Tile registers of a unit that multiplies bf16 matrices into fp32 sums."""

    rows: int
    row_bytes: int
    # keys in a tile of K and V: the sums of a block of values are stored once per tile
    keys: int

    @property
    def depth(self) -> int:
        """bf16 elements in a row: the inner dimension of one product."""
        return self.row_bytes // 2


@dataclass(frozen=True, slots=True)
class Isa:
    """Register shapes of one instruction set."""

    name: str
    # fp32 numbers in a vector register
    lanes: int
    query_vectors: int
    score_keys: int
    score_unroll: int
    value_rows: int
    value_vectors: int
    value_unroll: int
    # keys in a tile
    block_n: int
    # query rows that share a packed tile of K and V
    block_m: int = 256
    # multiplies by one lane of a register (fmla by element); otherwise a scalar is broadcast by a load
    by_lane: bool = False
    # converts fp16 in hardware
    has_half: bool = True
    # has vscalef and vreduce, which make 2^x two instructions shorter and correct for -inf
    has_scalef: bool = False
    # widens bf16 in pairs, even and odd ones apart: two instructions for two vectors, without a permutation
    splits_pairs: bool = False
    # the cache level that decode prefetches into
    prefetch_level: int = 1
    # multiplies bf16 matrices in addition to the vector units
    matrix: MatrixUnit | None = None

    @property
    def panel(self) -> int:
        """Queries in a panel."""
        return self.query_vectors * self.lanes

    @property
    def key_step(self) -> int:
        """Granularity in which keys are clipped: whole score and value kernels, whole Philox draws."""
        return math.lcm(self.score_keys, self.value_unroll, self.value_rows, 4)

    @property
    def dim_step(self) -> int:
        """Packed head dims of q and k are padded to a multiple of this."""
        return self.score_unroll * (self.lanes if self.by_lane else 1)

    @property
    def value_step(self) -> int:
        """Packed head dims of v and of accumulators are padded to a multiple of this."""
        return self.value_vectors * self.lanes


# The columns are those of `Isa`: lanes; query_vectors, score_keys, score_unroll; value_rows, value_vectors,
# value_unroll; block_n. NEON has 16 accumulators, which is faster than 24 on Neoverse-N1; of AVX2's 16 registers, 12
# accumulators leave room for the operands.
NEON = Isa("neon", 4, 4, 4, 4, 8, 2, 8, 64, by_lane=True)
AVX2 = Isa("avx2", 8, 2, 6, 4, 4, 3, 4, 72)
# With fewer rows, AVX-512 would read K and V again from beyond the second level for every block. Rows of pages are a
# power of two apart and share sets of the first level; the second level, into which it prefetches, has more sets.
AVX512 = Isa("avx512", 16, 2, 8, 4, 8, 2, 4, 64, block_m=512, has_scalef=True, splits_pairs=True, prefetch_level=2)
GENERIC = Isa("generic", 4, 2, 4, 4, 4, 2, 4, 64, has_half=False)
# Long tiles store the sums of values less often. Longer ones are no faster.
AMX = MatrixUnit(rows=16, row_bytes=64, keys=256)
AVX512_AMX = dataclasses.replace(AVX512, name="avx512-amx", matrix=AMX)


def choose(machine: str, features: Mapping[str, bool]) -> Isa:
    """The widest row of the table that a processor with these LLVM features supports."""
    if machine in ("aarch64", "arm64"):
        return NEON
    if features.get("avx512f") and features.get("avx512dq") and features.get("avx512vl"):
        matrix = all(features.get(name) for name in ("avx512bw", "avx512bf16", "amx-tile", "amx-bf16"))
        return AVX512_AMX if matrix else AVX512
    if features.get("avx2") and features.get("fma") and features.get("f16c"):
        return AVX2
    return GENERIC


@functools.cache
def host() -> Isa:
    """The row for this machine."""
    from llvmlite import binding

    row = choose(platform.machine().lower(), binding.get_host_cpu_features())
    return row if row.matrix is None or _may_use_tiles() else AVX512


def _may_use_tiles() -> bool:
    """Ask the system for the tile registers. It refuses if a thread's signal stack is too small for them."""
    if platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)
