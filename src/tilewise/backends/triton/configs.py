"""Which tile a problem gets on a device: tables by architecture, dtype width, head_dim and pass.

Nothing here needs Triton, so that `explain()` can ask. `overridden` replaces rows for experiments.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tilewise.backends.triton.traits import element_size, is_plain, is_rich, tile_widths
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["MAX_SPLITS", "Config", "Kind", "Pass", "choose", "config_of", "overridden", "overrides", "within_pages"]

Pass = Literal["forward", "dkdv", "dq", "decode", "dbias"]


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is tiled and compiled.

    `descriptors`: whole tiles of what is streamed are loaded by TMA where the tensors allow. `boxes`: in the forward
    all tiles are. `hold_queries`: in registers, for 16 bits and sm_90.
    `heads_per_wave`: None means as many as keep their rows in L2. `max_registers` a thread, so that as many programs
    fit a multiprocessor as shared memory allows. `joined`: tiles that a band masks share the pipelined loop of those
    that need no mask; in the forward with boxes, dense rows and plain scores. `paired`: there K and V of a tile share a
    barrier.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    early_dp: bool = True
    heads_per_wave: int | None = None
    max_registers: int | None = None
    joined: bool = False
    boxes: bool = False
    hold_queries: bool = False
    paired: bool = False


# More partial results than this are not worth merging; starting and finishing a program costs as much as reading this
# many tiles.
MAX_SPLITS = 128
PROGRAM_COST = 2
# Shared memory of a decode program beside tiles in flight.
DECODE_SHARED = 7 << 10
# By element size: decode programs that a multiprocessor has registers for (168 a thread of four warps leave room for
# three), and how many it takes to keep its share of the memory's bandwidth busy (16 bits: one has 0.7 of it, two all;
# e4m3, batch 16 of 32768 keys, pages of 16, GB/s as of 16-bit keys: two 7650, three 8073).
REGISTER_LIMIT = {1: 3, 2: 3, 4: 2}
BUSY = {1: 3.0, 2: 1.4, 4: 1.4}
# Keys of the smallest tile of e4m3 that is worth cutting out, so that it has one scale.
SHARING = 64

# Padded head_dim (the larger of q's and v's) -> tile.
Table = dict[int, Config]

# Measured on an H200, bf16, 16384 tokens, TFLOP/s of the kernel alone at N = 4096 / 16384, against the next best tile.
_HOPPER: dict[Pass, Table] = {
    "forward": {
        # full at 4096 414 (without TMA: 404, 128x64 with 8 warps: 391, 64x128: 341)
        64: Config(64, 64, 4, 3, descriptors=True),
        # causal at 4096 465, with pointers for boxes and queries in shared memory 404 in the same run
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True),
        # full at 4096 514 (128x32 with 3 stages: 461, without TMA: 447, 64x32 with 4 warps: 436)
        256: Config(128, 64, 8, 2, descriptors=True),
        512: Config(64, 32, 8, 2),
    },
    "dkdv": {
        # full at 4096 541 (32x64: 505, 2 stages: 430, 64x128: 329)
        64: Config(64, 64, 4, 3, descriptors=True, joined=True),
        # full 610 / 642 (64x128 by TMA: 572 / 607)
        128: Config(64, 64, 4, 2, descriptors=True, joined=True),
        # full at 4096 315 (32x64: 206, with one stage 136)
        256: Config(64, 64, 8, 2, descriptors=True, joined=True),
        512: Config(16, 32, 8, 1),
    },
    "dq": {
        # full at 4096 602 (64x64: 587, 64x32: 559, 64x128: 481, 128x64 with 8 warps: 279)
        64: Config(128, 64, 4, 3, descriptors=True, joined=True),
        # full 618 / 677 (the same without TMA: 591 / 640)
        128: Config(128, 64, 8, 3, descriptors=True, joined=True),
        # full at 4096 469 (128x32 by TMA: 424, 64x32 with 4 warps: 306, with 8 warps: 171)
        256: Config(128, 64, 8, 1, joined=True),
        512: Config(32, 16, 8, 1),
    },
}

# Kinds of problems with plain scores and no padding that have forward tiles of their own, in us of 16384 tokens, dense.
# Few keys: at N = 128 / 256 / 512, full and causal; there starting a program and waiting for memory take as long as the
# products, and three or four programs a multiprocessor hide it. Packed, in another run: sequences of 128 / 512, and a
# mix of 16 sequences of 7 to 4096 tokens.
SHORT_KEYS = 512
Kind = Literal["few banded", "few", "window", "many"]
_HOPPER_PLAIN: dict[Kind, Table] = {
    # One loop under a mask waits for memory once.
    "few banded": {
        # 78 93 138 (a barrier each for K and V at 256 and 512 97 144, 64x64 in two loops 89 103 136)
        # packed: 95 146 (64x64 in two loops 103 150)
        64: Config(64, 32, 4, 4, boxes=True, joined=True, paired=True, heads_per_wave=1),
    },
    "few": {
        # 83 109 176, 89 103 136 (64 heads side by side: 88 116 191, 93 108 149; without `boxes` and `hold_queries`
        # 102 133 201, 108 123 163)
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128, heads_per_wave=1),
        # 84 113 178, 75 89 120 (two loops 84 114 179, 78 94 125; and 64 heads side by side 86 113 180, 80 94 128)
        # packed, causal: 87 129 (two loops 95 142, 4 stages 89 128, 64x64 at 512 138), full at 512 170 (172)
        128: Config(64, 32, 4, 3, boxes=True, hold_queries=True, joined=True, max_registers=168, heads_per_wave=1),
    },
    # 1024 keys of N = 16384
    "window": {
        # 376 (4 heads at a time 384; by descriptors 4 heads 422, as many as fit L2 420)
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128, heads_per_wave=8),
        # 335 (8 heads 338; K and V with one barrier 341; two loops, as many heads as fit L2 375)
        # packed, all heads: 330 (two loops 381, 4 heads 329)
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True, joined=True, heads_per_wave=4),
    },
    "many": {
        # N = 4096 full, causal, N = 16384 causal: 1329, 640, 2497 (by descriptors 1414, 692, 2622)
        # mix, causal and full: 401, 747 (by descriptors 451, 809; 4 stages 448, one loop 437, 64x32 in one loop 468)
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128),
        # the same: 1025, 529, 2082 (two loops 1058, 551, 2202; K and V with one barrier 2293)
        # mix: 357, 663 (two loops 389, 673; K and V with one barrier 377, 64x32 384, 712)
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True, joined=True),
    },
}

# This table and the next three were not measured on such devices or problems, nor were the rows of 512 anywhere: they
# are what compiles into the registers and shared memory there are.
_LARGE_SMEM: dict[Pass, Table] = {
    "forward": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 64, 8, 3),
        256: Config(64, 32, 4, 2),
        512: Config(32, 32, 8, 1),
    },
    "dkdv": {
        64: Config(64, 128, 8, 2),
        128: Config(32, 128, 8, 2),
        256: Config(32, 32, 8, 1),
        512: Config(16, 16, 8, 1),
    },
    "dq": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 32, 8, 2),
        256: Config(32, 32, 8, 1),
        512: Config(16, 16, 8, 1),
    },
}

_SMALL_SMEM: dict[Pass, Table] = {
    "forward": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 32, 8, 2),
        256: Config(64, 32, 8, 1),
        512: Config(16, 16, 4, 1),
    },
    "dkdv": {
        64: Config(64, 64, 4, 2),
        128: Config(32, 64, 4, 1),
        256: Config(16, 32, 4, 1),
        512: Config(16, 16, 8, 1),
    },
    "dq": {
        64: Config(64, 64, 4, 2),
        128: Config(64, 32, 4, 1),
        256: Config(32, 16, 4, 1),
        512: Config(16, 16, 8, 1),
    },
}

# Bias and mask tiles take registers and shared memory like another operand, dropout and softcap take registers, and
# pages smaller than a tile take a pointer a row. 128 x 128 tiles with a bias would need 311 KB of shared memory and
# spill 17 KB.
_RICH: dict[Pass, Table] = {
    "forward": {
        64: Config(64, 64, 4, 2),
        128: Config(64, 32, 4, 2),
        256: Config(64, 32, 8, 1),
        512: Config(16, 16, 4, 1),
    },
    "dkdv": {
        64: Config(32, 64, 4, 2),
        128: Config(32, 64, 8, 1),
        256: Config(16, 32, 8, 1),
        512: Config(16, 16, 8, 1),
    },
    "dq": {
        64: Config(64, 32, 4, 2),
        128: Config(64, 32, 8, 1),
        256: Config(32, 16, 8, 1),
        512: Config(16, 16, 8, 1),
    },
}

# fp32 products run on the ordinary units: small tiles, or the unrolled products spill.
_SINGLE: dict[Pass, Table] = {
    "forward": {
        64: Config(32, 32, 4, 1),
        128: Config(32, 32, 8, 1),
        256: Config(16, 32, 8, 1),
        512: Config(16, 16, 8, 1),
    },
    "dkdv": {
        64: Config(32, 32, 8, 1),
        128: Config(16, 32, 8, 1),
        256: Config(16, 16, 8, 1),
        512: Config(16, 16, 8, 1),
    },
    "dq": {
        64: Config(32, 32, 8, 1),
        128: Config(32, 16, 8, 1),
        256: Config(16, 16, 8, 1),
        512: Config(16, 16, 8, 1),
    },
}

# e4m3, widened to fp16 in registers: another copy of a tile on its way to the matrix units.
_QUANTISED: dict[Pass, Table] = {
    "forward": {
        64: Config(64, 64, 4, 2),
        # 64 keys spill 1272 bytes on an A100 where pages are small
        128: Config(64, 32, 4, 2),
        256: Config(64, 32, 8, 2),
        512: Config(16, 32, 8, 1),
    },
}
_QUANTISED_HOPPER: dict[Pass, Table] = {
    "forward": _QUANTISED["forward"]
    | {
        # TFLOP/s of 4 sequences of 4096, causal, pages of 64: 232 (2 stages: 228, 128x64 with 8 warps: 206)
        128: Config(64, 64, 4, 3),
    },
}

# block_m is a floor in decode, which takes as many rows as a group of heads has.
_EVERYWHERE: dict[Pass, dict[int, Table]] = {
    "decode": {
        # GB/s as of 16-bit keys, batch 16 of 32768, pages of 16, 64, 256: 8073, 8406, 8567 (bf16 4397, 4458, 4470).
        # In another run, pages of 256: 2 stages 7227, 8 warps 5947, this row without a bound on registers 8392.
        1: {
            64: Config(16, 128, 4, 3),
            128: Config(16, 128, 4, 3, max_registers=168),
            256: Config(16, 64, 4, 3),
            512: Config(16, 32, 4, 2),
        },
        # GB/s at batch 16 of 8192 / 65536 and 64 of 8192 keys: 4232 / 4585 / 4418; others in docs/log/triton.md.
        2: {
            64: Config(16, 64, 4, 3),
            128: Config(16, 64, 4, 3, max_registers=168),
            256: Config(16, 32, 4, 2),
            512: Config(16, 16, 4, 2),
        },
        4: {64: Config(16, 32, 4, 2), 128: Config(16, 32, 4, 2), 256: Config(16, 16, 4, 2), 512: Config(16, 16, 4, 1)},
    },
    "dbias": {
        2: {64: Config(64, 64, 4, 1), 128: Config(64, 64, 8, 1), 256: Config(32, 32, 8, 1), 512: Config(16, 16, 8, 1)},
        4: {64: Config(32, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1), 512: Config(16, 16, 8, 1)},
    },
}

_overrides: contextvars.ContextVar[Mapping[Pass, Config] | None] = contextvars.ContextVar(
    "tilewise_triton_configs", default=None
)


def choose(
    direction: Pass, device: DeviceSpec, itemsize: int, block_d: int, rich: bool, kinds: Sequence[Kind] = ()
) -> Config:
    """The tile of one pass for a device, element width and padded head_dim (the larger of q's and v's).

    `rich` problems hold more than K, V and scores in a tile, see traits.is_rich; of `kinds`, see `_kinds`, the first
    that has a tile is taken.
    """
    override = (overrides() or {}).get(direction)
    if override is not None:
        return override
    width = max(64, block_d)
    if direction in _EVERYWHERE:
        return _EVERYWHERE[direction][itemsize][width]
    if itemsize == 1:
        return (_QUANTISED_HOPPER if device.has_wgmma else _QUANTISED)[direction][width]
    if itemsize == 4:
        return _SINGLE[direction][width]
    if direction == "forward" and device.has_wgmma and not rich:
        for kind in kinds:
            if width in _HOPPER_PLAIN[kind]:
                return _HOPPER_PLAIN[kind][width]
    return (_RICH if rich else _plain_table(device))[direction][width]


def within_pages(config: Config, page_size: int) -> Config:
    """The tile of decoding from e4m3 pages, cut to 64 keys where all of them then have one scale.

    An H200, batch 16 of 32768 keys, GB/s as of 16-bit keys: 8406 from pages of 64, tiles of 128 from pages of 32 7534.
    """
    if overrides() is None and page_size % config.block_n and page_size % SHARING == 0:
        return replace(config, block_n=SHARING)
    return config


def _plain_table(device: DeviceSpec) -> dict[Pass, Table]:
    """By architecture; a device that is not a GPU (the interpreter) takes the smallest tiles."""
    if device.has_wgmma:
        return _HOPPER
    return _LARGE_SMEM if device.type == "cuda" and device.smem_bytes >= 160 << 10 else _SMALL_SMEM


def overrides() -> Mapping[Pass, Config] | None:
    """The rows replaced here and now, if any."""
    return _overrides.get()


@contextlib.contextmanager
def overridden(configs: Mapping[Pass, Config]) -> Iterator[None]:
    """Replace the configurations of some passes within a block, for experiments."""
    token = _overrides.set(configs)
    try:
        yield
    finally:
        _overrides.reset(token)


def heads_per_wave(device: DeviceSpec, bytes_per_head: int, group_size: int) -> int:
    """How many heads run side by side: their streamed rows fill at most half of L2; whole groups, for they share K
    and V.
    """
    fitting = device.l2_bytes // 2 // max(1, bytes_per_head)
    return max(group_size, min(64, fitting) // group_size * group_size)


def decode_programs(config: Config, device: DeviceSpec, itemsize: int, tile_columns: int) -> int:
    """Programs of split decoding that a multiprocessor runs at a time; `tile_columns` are those of K and V together."""
    in_flight = (config.num_stages - 1) * config.block_n * tile_columns * itemsize
    fitting = device.smem_bytes // max(1, in_flight + DECODE_SHARED)
    return max(1, min(REGISTER_LIMIT[itemsize], fitting))


def num_splits(device: DeviceSpec, itemsize: int, programs: int, rows: int, tiles: int) -> int:
    """Into how many parts decode cuts the keys (`tiles` tiles) of each of `rows` (sequence, K/V head) pairs, where a
    multiprocessor runs `programs` at a time.

    The shortest estimate wins, of equal ones the fewest splits.
    """
    choices = range(1, min(MAX_SPLITS, max(1, tiles)) + 1)
    busy = min(BUSY[itemsize], programs)
    return min(choices, key=lambda splits: _duration(device.num_sms, programs, busy, rows, tiles, splits))


def _duration(num_sms: int, programs: int, busy: float, rows: int, tiles: int, splits: int) -> float:
    """Tiles of one slot while all are busy. Within one wave memory is shared by the multiprocessors that have the most
    programs; over several waves programs end at different times, and the last half of one is lost. An H200, batch 64
    of 8192 keys (128 tiles), GB/s at 1 to 4 splits: 3926, 4211, 4264, 4323; batch 16 at 2, 4, 6, 8: 4130, 3759, 4034,
    3992.
    """
    share = max(1, -(-tiles // splits))
    count, slots = rows * -(-tiles // share), num_sms * programs
    if count > slots:
        return (count / slots + 0.5) * (share + PROGRAM_COST)
    return max(busy, -(-count // num_sms)) / programs * (share + PROGRAM_COST)


def config_of(problem: AttentionProblem, device: DeviceSpec, direction: Pass) -> Config:
    """The tile of one pass; few keys have their own where they were measured, with plain scores and no padding."""
    width = max(tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8)))
    rich, kinds = is_rich(problem, direction), _kinds(problem)
    config = choose(direction, device, element_size(problem), width, rich, kinds)
    # Heads one after the other were measured with dense rows and heads that share nothing.
    measured = problem.kind == "dense" and problem.group_size == 1
    replaced = direction in (overrides() or {})
    return config if measured or replaced else replace(config, heads_per_wave=None)


def _kinds(problem: AttentionProblem) -> tuple[Kind, ...]:
    """Which tables of plain problems to ask, in this order; they were measured, and their code was read, with V as wide
    as K. With 128 columns beside 64 ptxas gives the registers of held queries away (test_triton_aot.lost_queries).
    """
    if not is_plain(problem) or problem.head_dim != problem.head_dim_v:
        return ()
    left, right = problem.band
    few = problem.seqlen_k <= SHORT_KEYS
    asked: tuple[tuple[Kind, bool], ...] = (
        ("few banded", few and right is not None),
        ("few", few),
        ("window", not few and left is not None),
        ("many", not few),
    )
    return tuple(kind for kind, on in asked if on)
