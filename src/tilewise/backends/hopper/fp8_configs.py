"""Which tile an FP8 problem gets, and what its kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.backends.hopper.configs import CONSUMER_REGS, has_left, has_right
from tilewise.problem import AttentionProblem

__all__ = ["FP8_BLOCK_N", "Fp8Config", "Fp8Tile", "fp8_config"]

# Keys in a tile: those that share a scale, and the row of a tile of transposed values (one 128-byte swizzle atom).
FP8_BLOCK_N = 128


@dataclass(frozen=True)
class Fp8Tile:
    """One row of the table.

    NUM_WARPGROUPS of 64 query rows; NUM_STAGES slots in the K and V rings and Q_STAGES in Q's; CARRY: P V of a tile is
    left to the step of the next one. There, OVERLAP: it is issued together with Q K^T; PING_PONG: warpgroups take turns
    in issuing products, so that one's softmax runs under the other's products; PIN_EXP as in ForwardTile.
    """

    NUM_WARPGROUPS: int = 2
    NUM_STAGES: int = 3
    Q_STAGES: int = 2
    CARRY: bool = True
    OVERLAP: bool = True
    PING_PONG: bool = True
    PIN_EXP: bool = False


# TFLOP/s at 16k on an H200, full and causal. 660 and 628; without turns 625 and 608, overlapped 613 and 497 (spills).
D64 = Fp8Tile(NUM_WARPGROUPS=3, NUM_STAGES=4, OVERLAP=False)
# A third loop and a left edge do not fit into 160 registers (671 spills).
D64_WINDOW = Fp8Tile(NUM_STAGES=4)
# 1009 and 925; with P carried 979. Two warpgroups 868 (carried 891, overlapped 802), in turns 669 (carried 928).
D128 = Fp8Tile(NUM_WARPGROUPS=3, CARRY=False, OVERLAP=False, PING_PONG=False)
# For a left edge and for values with scales of blocks: more registers than 160.
D128_OTHER = Fp8Tile(OVERLAP=False, PING_PONG=False)
# O takes 128 registers of a thread, so the parts of P V (64 more) wait until S is free: without overlap, in turns.
D256 = Fp8Tile(NUM_STAGES=2, Q_STAGES=1, OVERLAP=False)


@dataclass(frozen=True)
class Fp8Config(Fp8Tile):
    """Everything the FP8 forward kernel is compiled for; D covers head_dim and head_dim_v, PART the columns of O that
    a product of its own accumulates.
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


def _tile(problem: AttentionProblem, width: int) -> Fp8Tile:
    left = has_left(problem)
    if width == 64:
        return D64_WINDOW if left else D64
    if width == 128:
        return D128_OTHER if left or problem.scale_blocks[2] is not None else D128
    return D256


def fp8_config(problem: AttentionProblem, tile: Fp8Tile | None = None) -> Fp8Config:
    """The table's row for a problem (or `tile` in its place), with what its features add."""
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
    )
