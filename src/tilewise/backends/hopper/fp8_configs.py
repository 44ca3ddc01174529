"""Tile table of the FP8 forward, and everything that its kernel is compiled for.

Rows were chosen by measurements on an H200. Figures: bench/results/hopper-fp8-choices.csv, by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.backends.hopper.configs import CONSUMER_REGS, has_left, has_right
from tilewise.problem import AttentionProblem

# Keys in a tile. They share a scale, and make a row of a tile of transposed values (one 128-byte swizzle atom).
FP8_BLOCK_N = 128


@dataclass(frozen=True)
class Fp8Tile:
    """One row of the table.

    NUM_WARPGROUPS  consumers of 64 query rows each
    NUM_STAGES      slots in the K and V rings; Q_STAGES: slots in Q's ring
    CARRY           P is carried to the next tile, whose step computes P V
    OVERLAP         with CARRY: P V is issued together with the next Q K^T
    PING_PONG       with CARRY: warpgroups take turns in issuing products, so that one's softmax overlaps the other's
                    products
    PIN_EXP         as in ForwardTile
    """

    NUM_WARPGROUPS: int = 2
    NUM_STAGES: int = 3
    Q_STAGES: int = 2
    CARRY: bool = True
    OVERLAP: bool = True
    PING_PONG: bool = True
    PIN_EXP: bool = False


# Overlapped products would spill: three warpgroups have 160 registers a thread.
D64 = Fp8Tile(NUM_WARPGROUPS=3, NUM_STAGES=4, OVERLAP=False)
# The loop for a left edge does not fit into 160 registers: two warpgroups.
D64_WINDOW = Fp8Tile(NUM_STAGES=4)
D128 = Fp8Tile(NUM_WARPGROUPS=3, CARRY=False, OVERLAP=False, PING_PONG=False)
# A left edge, or values with a scale per block, need more than 160 registers: two warpgroups.
D128_OTHER = Fp8Tile(OVERLAP=False, PING_PONG=False)
# O takes 128 registers of a thread, so P V (64 more) must wait until S is free: no overlap, in turns.
D256 = Fp8Tile(NUM_STAGES=2, Q_STAGES=1, OVERLAP=False)


@dataclass(frozen=True)
class Fp8Config(Fp8Tile):
    """Everything the FP8 forward kernel is compiled for. D covers head_dim and head_dim_v; PART is the number of
    columns of O that one product accumulates.
    """

    D: int = 128
    PART: int = 128
    BLOCK_N: int = FP8_BLOCK_N
    CONSUMER_REGS: int = 240
    HAS_RIGHT: bool = False
    IS_CAUSAL: bool = False
    HAS_LEFT: bool = False
    HAS_SINKS: bool = False
    HAS_V_BLOCKS: bool = False
    IS_VARLEN: bool = False
    IS_PAGED: bool = False
    SENDS_PLACES: bool = False


def _tile(problem: AttentionProblem, width: int) -> Fp8Tile:
    left = has_left(problem)
    if width == 64:
        return D64_WINDOW if left else D64
    if width == 128:
        return D128_OTHER if left or problem.scale_blocks[2] is not None else D128
    return D256


def fp8_config(problem: AttentionProblem, tile: Fp8Tile | None = None) -> Fp8Config:
    """The table's row for a problem (or `tile` instead), completed by what its features need."""
    width = next(width for width in (64, 128, 256) if max(problem.head_dim, problem.head_dim_v) <= width)
    tile = tile or _tile(problem, width)
    return Fp8Config(
        **vars(tile),
        D=width,
        PART=min(width, 128),
        CONSUMER_REGS=CONSUMER_REGS[tile.NUM_WARPGROUPS],
        HAS_RIGHT=has_right(problem),
        IS_CAUSAL=has_right(problem) and problem.band[1] == 0,
        HAS_LEFT=has_left(problem),
        HAS_SINKS=problem.has_sinks,
        HAS_V_BLOCKS=problem.scale_blocks[2] is not None,
        IS_VARLEN=problem.kind == "varlen",
        SENDS_PLACES=problem.kind == "varlen",
    )
