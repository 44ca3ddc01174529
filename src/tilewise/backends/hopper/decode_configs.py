"""What the decode kernel is compiled for, and over how many programs a problem is spread.

GB/s in the comments: an H200, bf16, 32 query and 8 K/V heads, head_dim 128, batch x keys as said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.backends.hopper.configs import has_left, has_right
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["DecodeConfig", "DecodeTile", "decode_config", "num_programs", "tokens_of"]


@dataclass(frozen=True)
class DecodeTile:
    """One way to tile: BLOCK_N keys at a time in each of LANES warpgroups, which read shares of their own."""

    BLOCK_N: int
    LANES: int


# 128 keys: 2426 / 4354 / 4499 GB/s at 1 x 8192 / 16 x 8192 / 64 x 8192, 64 keys: 2271 / 4306 / 4478. Two lanes of 64:
# 1866 / 4117 / 4519 where one has 2068 / 4129 / 4551.
TILES = (DecodeTile(128, 1), DecodeTile(64, 1))
# e4m3 is converted in registers, which takes one warpgroup longer than memory: 254 us for 16 x 32768 keys in pages of
# 64 (64 keys: 264), 329 with one lane (64 keys: 424); bf16 took 485 in that run.
FP8_TILES = (DecodeTile(128, 2), DecodeTile(64, 2), *TILES)
# Smaller pages are many small boxes: 284 us with 64 keys, 297 with 128 (pages of 16).
FP8_SMALL_PAGE, FP8_SMALL_TILES = 64, FP8_TILES[1:]
# Numbers a thread can hold of scores, sums, O and a converted operand, by lanes: 255 and 168 registers.
TILE_NUMBERS = {1: 160, 2: 96}
# Shared memory for the rings of K and V, Q and P; the rest of 227 KiB is for barriers and reductions. So many slots
# has a ring at least, and at most: more only take longer to set up.
SMEM_BYTES, MIN_STAGES, MAX_STAGES = 223 << 10, 3, 8
# Partial results that are merged at a time, and their numbers: 64 a thread.
MERGED_PARTS, MERGED_NUMBERS = 16, 64 * 128
# Programs that share an item at most: one of them merges what all of them leave.
MAX_PARTS = 32
# Numbers of sequences that kernels are compiled for, because so few are searched in less code: 1 x 2048 keys in pages
# of 64 take 7.47 us instead of 7.64, 2 x 512 6.09 instead of 6.38, and with one for two of them 5.94 instead of 6.10.
FEW_SEQUENCES = (1, 2, 4)
# Fewer CTAs than SMs, up to this share, if items then are not cut, or all alike: 128 instead of 132 read 4354 instead
# of 4177 GB/s at 16 x 8192, 4256 instead of 4130 at 1 x 131072. Memory keeps all of them waiting either way.
EVEN = 0.85


@dataclass(frozen=True)
class DecodeConfig(DecodeTile):
    """Everything the decode kernel is compiled for.

    ROWS: query tokens times heads of a group, padded, the columns of S^T; D, DV: padded head dims; IS_UNIFORM: all
    sequences have the bounds' lengths; PACKED_Q: cu_seqlens_q is given; PACKED_ROWS: queries and results are
    (token, head, column) rows; CHUNK: rows of a page that TMA fetches at a time; MERGED_PARTS: partial results of
    MERGED_ROWS rows that are merged at a time; FEW: sequences there are at most, 0 for any number.
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
    PACKED_Q: bool
    PACKED_ROWS: bool
    PAGE_SIZE: int
    CHUNK: int
    ITEMSIZE: int
    FEW: int = 0
    PRODUCER_REGS: int = 64
    # Of the second lane; the first one has what is left, 224. e4m3 pages with 168/184/200/216, TB/s: D=128, 16 x 32768
    # keys 4.24/4.28/4.19/4.28, pages of 16 3.70/3.71/3.76/3.76, 4 tokens 3.36/3.43/3.37/3.46; D=64 3.38/3.37/3.38/3.38,
    # 4 tokens 2.28/2.48/2.63/2.47, groups of 8 and 4 tokens in pages of 8 0.86/0.89/1.00/1.04.
    CONSUMER_REGS: int = 216


def decode_config(problem: AttentionProblem, *, packed_queries: bool, tile: DecodeTile | None = None) -> DecodeConfig:
    """The configuration of a problem; `tile` to try another one."""
    d, dv = _padded(problem.head_dim), _padded(problem.head_dim_v)
    rows = 1 << (problem.group_size * tokens_of(problem, packed_queries=packed_queries) - 1).bit_length()
    itemsize, uniform = 1 if problem.fp8 else 2, problem.kind == "dense"
    chosen = tile or next(t for t in _tiles(problem) if _fits(t, max(8, rows), d, dv, itemsize))
    return DecodeConfig(
        BLOCK_N=chosen.BLOCK_N,
        LANES=chosen.LANES,
        ROWS=max(8, rows),
        GROUP_SIZE=problem.group_size,
        D=d,
        DV=dv,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        NUM_STAGES=_stages(chosen, max(8, rows), d, dv, itemsize),
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
        PACKED_Q=packed_queries,
        PACKED_ROWS=problem.kind != "dense",
        PAGE_SIZE=problem.page_size or 0,
        CHUNK=math.gcd(problem.page_size or 0, chosen.BLOCK_N),
        ITEMSIZE=itemsize,
        FEW=0 if uniform or problem.fp8 else next((few for few in FEW_SEQUENCES if problem.batch <= few), 0),
    )


def tokens_of(problem: AttentionProblem, *, packed_queries: bool) -> int:
    """Query tokens of the longest sequence; paged queries without running totals are one each."""
    return problem.seqlen_q if packed_queries or problem.kind == "dense" else 1


def _tiles(problem: AttentionProblem) -> tuple[DecodeTile, ...]:
    """In the order of preference."""
    if not problem.fp8:
        return TILES
    return FP8_SMALL_TILES if (problem.page_size or 0) < FP8_SMALL_PAGE else FP8_TILES


def _fits(tile: DecodeTile, rows: int, d: int, dv: int, itemsize: int) -> bool:
    numbers = (2 * tile.BLOCK_N + dv) * rows // 128
    converted = tile.BLOCK_N * max(d, dv) // 256 if itemsize == 1 else 0
    enough = _stages(tile, rows, d, dv, itemsize) >= MIN_STAGES
    return enough and numbers + converted <= TILE_NUMBERS[tile.LANES]


def _stages(tile: DecodeTile, rows: int, d: int, dv: int, itemsize: int) -> int:
    """Slots of the rings of one lane."""
    ring = SMEM_BYTES // tile.LANES - rows * (d + tile.BLOCK_N) * 2
    return min(MAX_STAGES, ring // (tile.BLOCK_N * (d + dv) * itemsize))


def _padded(head_dim: int) -> int:
    return next(width for width in (64, 128, 256) if head_dim <= width)


def num_programs(problem: AttentionProblem, config: DecodeConfig, device: DeviceSpec) -> int:
    """CTAs: one for each SM, fewer for few keys; by the bounds on lengths, so that nobody waits for the device."""
    items = problem.batch * problem.num_kv_heads
    tiles = items * -(-problem.seqlen_k // config.BLOCK_N)
    limit = max(1, min(device.num_sms, min(tiles, items * MAX_PARTS) // config.LANES))
    shares = ((n, n * config.LANES) for n in range(limit, int(EVEN * limit), -1))
    return next((n for n, share in shares if share % items == 0 or items % share == 0), limit)
