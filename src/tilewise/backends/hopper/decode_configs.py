"""What the decode kernel is compiled for, and how many programs share a problem.

Choices measured on an H200; the figures are in bench/results/hopper-decode-choices.csv, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.backends.hopper import LATENT_REST, reads_latents
from tilewise.backends.hopper.configs import has_left, has_right
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem
from tilewise.symbolic import at_run_time, fixed, largest, smallest


@dataclass(frozen=True)
class DecodeTile:
    """A tile: BLOCK_N keys at a time in each of LANES consumer warpgroups, which read separate shares."""

    BLOCK_N: int
    LANES: int


# In order of preference; the first that fits is used.
TILES = (DecodeTile(128, 1), DecodeTile(64, 1))
# 8-bit numbers are converted in registers, which takes a warpgroup longer than loading: two keep up with memory.
FP8_TILES = (DecodeTile(128, 2), DecodeTile(64, 2), *TILES)
# Of latents in 16 bits, for few query rows. Two slots are in flight or in use.
LATENT_TILE = TILES[1]
# Of e4m3 latents. Two slots of a lane, 72 KiB, are in flight or in use.
FP8_LATENT_TILE = FP8_TILES[1]
# Both lanes get the same: O takes 64 registers of a thread in each.
FP8_LATENT_REGS = {"CONSUMER_REGS": 224, "PRODUCER_REGS": 56}
# Small pages need many small boxes; smaller tiles are faster then.
FP8_SMALL_PAGE, FP8_SMALL_TILES = 64, FP8_TILES[1:]
# Numbers of scores, sums, O and a converted operand that a thread can hold, by lanes.
TILE_NUMBERS = {1: 160, 2: 96}
# Shared memory for Q, P and the rings of K and V; the rest of 227 KiB is for barriers and reductions. The bounds of a
# ring's slots: more than MAX_STAGES only take longer to set up.
SMEM_BYTES, MIN_STAGES, MAX_STAGES = 223 << 10, 3, 8
# Wider tiles take long to arrive, those of K and V in turn: one slot for each keeps memory busy.
MAX_DEEP_HEAD_DIM = 256
# Parts that are merged at a time, at most; and the numbers they hold: 64 a thread.
MERGED_PARTS, MERGED_NUMBERS = 16, 64 * 128
# An item is shared by at most so many programs, because one of them merges all parts.
MAX_PARTS = 32
# For up to so many sequences there are separate kernels, which search them with less code.
FEW_SEQUENCES = (1, 2, 4)
# Use fewer CTAs than SMs, down to this share, if then no item is cut, or all are cut equally. Memory is the limit in
# both cases.
EVEN = 0.85


@dataclass(frozen=True)
class DecodeConfig(DecodeTile):
    """Everything the decode kernel is compiled for.

    ROWS          query tokens times heads of a group, padded: the columns of S^T
    D, DV         padded head dims
    D_REST        of latents: columns of K behind V's, padded; V is K's first D = DV columns
    IS_UNIFORM    all sequences have the maximum length
    PACKED_Q      cu_seqlens_q is given
    PACKED_ROWS   queries and results are (token, head, column) rows
    IS_FP8        pages of 8-bit numbers: e4m3 with a scale a page, or if IS_INT8 int8 with one a token
    CHUNK         rows of a page that TMA fetches at a time
    MERGED_PARTS  parts of MERGED_ROWS rows that are merged at a time
    FEW           there are at most so many sequences; 0: any number
    """

    ROWS: int
    GROUP_SIZE: int
    D: int
    DV: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    NUM_STAGES: int
    MERGED_ROWS: int
    MERGED_PARTS: int
    HAS_RIGHT: bool
    HAS_LEFT: bool
    HAS_SOFTCAP: bool
    HAS_SINKS: bool
    IS_UNIFORM: bool
    IS_VARLEN: bool
    IS_PAGED: bool
    IS_FP8: bool
    IS_INT8: bool
    PACKED_Q: bool
    PACKED_ROWS: bool
    PAGE_SIZE: int
    CHUNK: int
    ITEMSIZE: int
    FEW: int = 0
    PRODUCER_REGS: int = 64
    # Of the second lane; the first one gets what is left.
    CONSUMER_REGS: int = 216
    D_REST: int = 0


@dataclass(frozen=True)
class LatentConfig:
    """Everything the kernels for latents are compiled for; names as in DecodeConfig, DV are the columns of V."""

    GROUP_SIZE: int
    DV: int
    HEAD_DIM: int
    HAS_RIGHT: bool
    HAS_LEFT: bool
    HAS_SOFTCAP: bool
    HAS_SINKS: bool
    IS_UNIFORM: bool
    IS_VARLEN: bool
    IS_PAGED: bool
    PACKED_Q: bool
    PACKED_ROWS: bool
    PAGE_SIZE: int
    CHUNK: int
    FEW: int = 0
    BLOCK_N: int = 64
    LANES: int = 1
    IS_FP8: bool = False
    # Of scores.py. Scores are multiplied by the scale beforehand, and a factor of 1 needs no EXACT.
    IS_LAZY: bool = True
    INTEGER_MAX: bool = False
    EXACT: bool = False
    NUM_STAGES: int = 2
    ROWS: int = 64
    CONSUMER_REGS: int = 232
    PRODUCER_REGS: int = 40


# How many rows of parts are written and merged in the time of a tile, see latent_shares.
LATENT_MERGE_RATE = 1536
# More parts of an item than this are shared by the warps of a program that merges.
LATENT_PARTS = 32
# Columns that a program merges: for many parts, for few, and for few if every SM still gets one. Programs per SM.
LATENT_COLUMNS, LATENT_PROGRAMS = (16, 64, 256), 6
# Of fewer rows of parts the merge may start while the first kernel ends. It starts on the SMs that are free first,
# where more rows would crowd.
LATENT_EARLY = 8192


def latent_config(problem: AttentionProblem, *, packed_queries: bool) -> LatentConfig:
    """The configuration of a problem with latents."""
    uniform = problem.kind == "dense"
    return LatentConfig(
        GROUP_SIZE=problem.group_size,
        DV=problem.head_dim_v,
        HEAD_DIM=problem.head_dim,
        HAS_RIGHT=has_right(problem),
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        HAS_SINKS=problem.has_sinks,
        IS_UNIFORM=uniform,
        IS_VARLEN=problem.kind == "varlen",
        IS_PAGED=problem.page_size is not None,
        PACKED_Q=packed_queries,
        PACKED_ROWS=problem.kind != "dense",
        PAGE_SIZE=problem.page_size or 0,
        CHUNK=math.gcd(problem.page_size or 0, LatentConfig.BLOCK_N),
        FEW=0 if uniform else next((few for few in FEW_SEQUENCES if problem.batch <= few), 0),
    )


def latent_grid(problem: AttentionProblem, config: LatentConfig | DecodeConfig, device: DeviceSpec) -> tuple[int, int]:
    """(CTAs that share the key tiles, tiles of query rows): together at most one per SM."""
    rows = problem.group_size * tokens_of(problem, packed_queries=config.PACKED_Q)
    blocks = -(-rows // config.ROWS)
    items = problem.batch * problem.num_kv_heads
    tiles = items * -(-problem.seqlen_k // config.BLOCK_N)
    limit = _at_least_one(device.num_sms // blocks * config.LANES, tiles)
    return _evenly(-(-latent_shares(tiles, rows, limit) // config.LANES), items, config.LANES), blocks


def _at_least_one(a: int, b: int) -> int:
    return largest(1, smallest(a, b))


@at_run_time
def latent_shares(tiles: int, rows: int, limit: int) -> int:
    """The number of shares that takes the least time by estimate: tiles of the longest, and all parts to merge."""
    return min(range(1, limit + 1), key=lambda n: (-(-tiles // n) + n * rows / LATENT_MERGE_RATE, n))


def latent_merge_grid(
    problem: AttentionProblem, config: LatentConfig | DecodeConfig, shares: int, device: DeviceSpec
) -> tuple[tuple[int, int, int], int]:
    """((items, programs that share the rows of one, those that share the columns), warps that share a row's parts)."""
    rows = problem.group_size * tokens_of(problem, packed_queries=config.PACKED_Q)
    items = problem.batch * problem.num_kv_heads
    many, few, fewer = LATENT_COLUMNS
    if shares > LATENT_PARTS * items:
        return (items, -(-rows // 8), config.DV // many), 4
    programs = min(-(-rows // 8), max(1, LATENT_PROGRAMS * device.num_sms // (items * (config.DV // fewer))))
    enough = items * programs * (config.DV // fewer) >= device.num_sms
    return (items, programs, config.DV // (fewer if enough else few)), 1


def decode_config(problem: AttentionProblem, *, packed_queries: bool, tile: DecodeTile | None = None) -> DecodeConfig:
    """The configuration of a problem; `tile` replaces the table's choice."""
    rest = LATENT_REST if reads_latents(problem) else 0
    d, dv = _padded(problem.head_dim - rest), _padded(problem.head_dim_v)
    rows = fixed(1 << (problem.group_size * tokens_of(problem, packed_queries=packed_queries) - 1).bit_length())
    itemsize, uniform = 1 if problem.fp8 else 2, problem.kind == "dense"
    chosen = tile or (FP8_LATENT_TILE if problem.fp8 else LATENT_TILE)
    if tile is None and not rest:
        chosen = next(t for t in _tiles(problem) if _fits(t, max(8, rows), d, dv, itemsize))
    return DecodeConfig(
        BLOCK_N=chosen.BLOCK_N,
        LANES=chosen.LANES,
        ROWS=max(8, rows),
        GROUP_SIZE=problem.group_size,
        D=d,
        DV=dv,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        NUM_STAGES=_stages(chosen, max(8, rows), d + rest, 0 if rest else dv, itemsize),
        MERGED_ROWS=max(4, rows),
        MERGED_PARTS=max(1, min(MERGED_PARTS, MERGED_NUMBERS // (max(4, rows) * dv))),
        HAS_RIGHT=has_right(problem),
        HAS_LEFT=has_left(problem),
        HAS_SOFTCAP=problem.softcap is not None,
        HAS_SINKS=problem.has_sinks,
        IS_UNIFORM=uniform,
        IS_VARLEN=problem.kind == "varlen",
        IS_PAGED=problem.page_size is not None,
        IS_FP8=bool(problem.fp8),
        IS_INT8=problem.int8,
        PACKED_Q=packed_queries,
        PACKED_ROWS=problem.kind != "dense",
        PAGE_SIZE=problem.page_size or 0,
        CHUNK=math.gcd(problem.page_size or 0, chosen.BLOCK_N),
        ITEMSIZE=itemsize,
        FEW=0 if uniform or problem.fp8 else next((few for few in FEW_SEQUENCES if problem.batch <= few), 0),
        D_REST=rest,
        **(FP8_LATENT_REGS if rest and problem.fp8 else {}),
    )


def tokens_of(problem: AttentionProblem, *, packed_queries: bool) -> int:
    """Query tokens of the longest sequence; paged queries without cu_seqlens_q are one each."""
    return problem.seqlen_q if packed_queries or problem.kind == "dense" else 1


def _tiles(problem: AttentionProblem) -> tuple[DecodeTile, ...]:
    """The candidates, in order of preference."""
    if not problem.fp8:
        return TILES
    return FP8_SMALL_TILES if (problem.page_size or 0) < FP8_SMALL_PAGE else FP8_TILES


def _fits(tile: DecodeTile, rows: int, d: int, dv: int, itemsize: int) -> bool:
    numbers = (2 * tile.BLOCK_N + dv) * rows // 128
    converted = tile.BLOCK_N * max(d, dv) // 256 if itemsize == 1 else 0
    least = 1 if min(d, dv) > MAX_DEEP_HEAD_DIM else MIN_STAGES
    enough = _stages(tile, rows, d, dv, itemsize) >= least
    return enough and numbers + converted <= TILE_NUMBERS[tile.LANES]


def _stages(tile: DecodeTile, rows: int, d: int, dv: int, itemsize: int) -> int:
    """Slots of a lane's rings."""
    ring = SMEM_BYTES // tile.LANES - rows * (d + tile.BLOCK_N) * 2
    return min(MAX_STAGES, ring // (tile.BLOCK_N * (d + dv) * itemsize))


def _padded(head_dim: int) -> int:
    return next(width for width in (64, 128, 256, 512) if head_dim <= width)


def num_programs(problem: AttentionProblem, config: DecodeConfig, device: DeviceSpec) -> int:
    """CTAs: one per SM, fewer for few keys. Computed from the bounds on lengths, so the host needs no device data."""
    items = problem.batch * problem.num_kv_heads
    tiles = items * -(-problem.seqlen_k // config.BLOCK_N)
    return _evenly(_most_programs(tiles, items, device.num_sms, config.LANES), items, config.LANES)


def _most_programs(tiles: int, items: int, num_sms: int, lanes: int) -> int:
    return largest(1, smallest(num_sms, smallest(tiles, items * MAX_PARTS) // lanes))


@at_run_time
def _evenly(limit: int, items: int, lanes: int) -> int:
    """At most `limit` CTAs of so many lanes, a few less if that cuts no item, or all of them equally."""
    for programs in range(limit, int(EVEN * limit), -1):
        shares = programs * lanes
        if shares % items == 0 or items % shares == 0:
            return programs
    return limit
