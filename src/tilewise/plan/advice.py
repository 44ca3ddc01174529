"""Which tile sizes fit a device, and why the largest of them is the one to start from.

The keys stream past every tile of queries, so twice the rows (`block_m`) is half the traffic. `block_n` does not change
traffic, only the work between two waits. What limits both:

- shared memory holds the tile of Q and two of K and V each: one in use, one in flight;
- registers hold O and S in fp32, spread over 128 threads for each 64 rows, at most 255 per thread.

On a CPU one core's cache holds everything, with one tile of K and V.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from tilewise.device import DeviceSpec
from tilewise.masks import TileGrid
from tilewise.plan import cost
from tilewise.problem import AttentionProblem
from tilewise.units import format_bytes

# The shapes that kernels use, largest first. Fewer rows cost traffic, so rows are the first criterion.
CANDIDATES = tuple(
    itertools.starmap(TileGrid, ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16)))
)
STAGES = 2
# Of the 255 registers of a thread, 32 are left for addresses, statistics and the next operands.
ACCUMULATOR_REGISTERS = 255 - 32
ROWS_PER_GROUP, THREADS_PER_GROUP = 64, 128


@dataclass(frozen=True, slots=True)
class TileOption:
    """One tile size: what it needs, and None or why it does not fit.

    `flops_per_byte` counts FLOPs per byte of K and V loaded. Registers are 0 on a CPU.
    """

    tile: TileGrid
    fast_bytes: int
    registers_per_thread: int
    flops_per_byte: float
    refused: str | None


@dataclass(frozen=True, slots=True)
class TileAdvice:
    """The largest tile that fits (None if none does), the fast memory it must fit in, and all options."""

    best: TileGrid | None
    capacity: int
    options: tuple[TileOption, ...]

    def option(self, tile: TileGrid) -> TileOption | None:
        """The option of one size, or None."""
        return next((option for option in self.options if option.tile == tile), None)

    def table(self) -> str:
        """All options, one line each."""
        lines = [
            f"{'tile':<11}{'fast memory':>13}{'registers':>11}{'FLOP/byte':>11}  fits {format_bytes(self.capacity)}?"
        ]
        for option in self.options:
            registers = str(option.registers_per_thread or "-")
            verdict = f"no: {option.refused}" if option.refused else "yes"
            lines.append(
                f"{_name(option.tile):<11}{format_bytes(option.fast_bytes):>13}{registers:>11}"
                f"{option.flops_per_byte:>11.0f}  {verdict}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        """One sentence: what fits, and what the next larger tile would need."""
        if self.best is None:
            return f"none fits {format_bytes(self.capacity)}; the head is too wide or the dtype too large"
        best = next(option for option in self.options if option.tile == self.best)
        text = f"{_name(self.best)} is the largest that fits: {format_bytes(best.fast_bytes)} of "
        text += f"{format_bytes(self.capacity)} fast memory"
        if best.registers_per_thread:
            text += f", {best.registers_per_thread} registers a thread"
        text += f", {best.flops_per_byte:.0f} FLOP per byte of K and V"
        larger = [option for option in self.options if option.refused and all(map(operator.ge, option.tile, self.best))]
        return f"{text}; not {_name(larger[-1].tile)}: {larger[-1].refused}" if larger else text


def advise(problem: AttentionProblem, spec: DeviceSpec) -> TileAdvice:
    """The tile sizes for a problem's head dims and dtype on a device."""
    options = tuple(_option(tile, problem, spec) for tile in CANDIDATES)
    best = next((option.tile for option in options if option.refused is None), None)
    return TileAdvice(best, spec.smem_bytes, options)


def _option(tile: TileGrid, problem: AttentionProblem, spec: DeviceSpec) -> TileOption:
    size, wide = problem.dtype.itemsize, problem.accumulate_dtype.itemsize
    dims = problem.head_dim, problem.head_dim_v
    registers = 0
    if spec.type == "cpu":
        needed = cost.fast_memory_bytes(tile, *dims, size, wide)
    else:
        needed = (tile.block_m * dims[0] + STAGES * tile.block_n * sum(dims)) * size
        threads = THREADS_PER_GROUP * max(1, tile.block_m // ROWS_PER_GROUP)
        registers = -(-tile.block_m * (dims[1] + tile.block_n) * (wide // 4) // threads)
    refused = None
    if needed > spec.smem_bytes:
        refused = f"{format_bytes(needed)} of fast memory"
    elif registers > ACCUMULATOR_REGISTERS:
        refused = f"{registers} registers a thread for O and S"
    # Per key of a tile: 2 * block_m FLOPs for each of its elements in K and in V.
    return TileOption(tile, needed, registers, 2 * tile.block_m / size, refused)


def _name(tile: TileGrid) -> str:
    return f"{tile.block_m} x {tile.block_n}"
