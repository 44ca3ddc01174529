"""Tile tables: the tile of a problem on a device, by architecture, dtype width, head_dim and pass.

Nothing here imports Triton, so `explain()` can use it. The measurements behind rows and constants are in
bench/results/triton-tiles.csv; the id is "table pass head_dim" or the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem
from tilewise.symbolic import at_run_time, largest, smallest

Pass = Literal[
    "forward", "dkdv", "dq", "decode", "latent", "dbias", "tangent", "tangent_only", "twice_dkdv", "twice_dq",
    "twice_dbias",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is tiled and compiled.

    - `early_dp`: dK/dV multiplies dP before it computes the probabilities, not after.
    - `heads_per_wave`: heads that run at the same time; None means as many as keep their rows in L2.
    - `max_registers`: limit per thread, so that as many programs fit an SM as shared memory allows.
    - `joined`: masked tiles share the pipelined loop of unmasked ones; in the forward only with boxes and plain scores.
    - `boxes`: tiles are loaded and stored by TMA (see primitives.py) where strides allow; the backward loads what it
      streams so, in one loop, if `joined`.
    - `hold_queries`: queries stay in registers, for 16 bits and sm_90.
    - `paired`: K and V of a tile share a barrier, in the joined loop of the forward.
    - `dp_first`: the backward multiplies dP before it loads the other operand, which then takes the same shared memory.
    - `split`: two warpgroups of the backward share the columns of a tile of scores. Otherwise both compute all of them.
    - `dv`: dK and dV have a kernel each, this one for dV, with as many keys. Otherwise one kernel computes both.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    early_dp: bool = True
    heads_per_wave: int | None = None
    max_registers: int | None = None
    joined: bool = False
    boxes: bool = False
    hold_queries: bool = False
    paired: bool = False
    dp_first: bool = False
    split: bool = False
    dv: Config | None = None


# The most columns of K or V in a tile.
MOST_COLUMNS = 512
# tl.dot takes no inner dimension below this. The sides of a tile are powers of two.
MIN_DOT_SIDE = 16
# Keys in the largest tile of the tables. Pages of a multiple of it are never gathered row by row.
LARGEST_TILE = 128
# From this scale on, one multiply-add per score is not exact enough: from scores of 1.5e9 on, the rounding error of the
# product passes 128, and 2 to that power overflows. The slower EXACT path subtracts the maximum first.
LARGE_SCALE = 1024.0
# Upper limit on splits, because partial results must be merged. Starting and finishing a program costs about as much as
# reading PROGRAM_COST tiles.
MAX_SPLITS = 128
PROGRAM_COST = 2
# Shared memory of a decode program in addition to the tiles in flight.
DECODE_SHARED = 7 << 10
# By element size: how many decode programs fit an SM's registers, and how many it takes to saturate the SM's share of
# the memory bandwidth.
REGISTER_LIMIT = {1: 3, 2: 3, 4: 2}
BUSY = {1: 3.0, 2: 1.4, 4: 1.4}
# From so many query heads per K/V head on, a latent of up to MOST_COLUMNS is read once for K and V.
LATENT_GROUP = 16
# Smallest tile of e4m3 keys that is worth cutting out of a page so that it has a single scale.
SHARING = 64

# Padded head_dim (the larger of q's and v's) -> tile.
Table = dict[int, Config]

# Chosen on an H200 in bf16 as the fastest of the tiles tried, by the kernel's time alone. For dkdv and dq up to 256
# columns, and for the forward at 64 and 256, these are times of tensor maps of whole tiles; those of boxes were not
# measured.
_DV_512 = Config(32, 64, 8, 2, boxes=True, joined=True, split=True)
_HOPPER: dict[Pass, Table] = {
    "forward": {
        # Beats pointers, and tiles of twice the rows or keys.
        64: Config(64, 64, 4, 3, boxes=True),
        # Boxes and held queries beat pointers with queries in shared memory.
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True),
        # Beats pointers, half the keys, and half the rows.
        256: Config(128, 64, 8, 2, boxes=True),
        512: Config(64, 32, 8, 2),
    },
    "dkdv": {
        # Beats half the queries, two stages, and twice the keys.
        64: Config(64, 64, 4, 3, boxes=True, joined=True),
        # Beats twice the keys.
        128: Config(64, 64, 4, 2, boxes=True, joined=True),
        # Beats half the queries, and one stage.
        256: Config(64, 64, 8, 2, boxes=True, joined=True),
        512: Config(64, 64, 8, 1, boxes=True, joined=True, dp_first=True, split=True, dv=_DV_512),
    },
    "dq": {
        # Beats smaller tiles, and eight warps.
        64: Config(128, 64, 4, 3, boxes=True, joined=True),
        # Beats pointers.
        128: Config(128, 64, 8, 3, boxes=True, joined=True),
        # Beats half the keys with TMA, and half the rows.
        256: Config(128, 64, 8, 1, joined=True),
        512: Config(64, 64, 8, 1, boxes=True, joined=True, dp_first=True, split=True),
    },
    # Of tangents and second derivatives, tiles of 256 columns were not measured.
    "tangent": {
        # Beats two stages, eight warps, and twice the keys.
        64: Config(64, 64, 4, 3, boxes=True),
        # Beats half the rows, half the keys, and pointers; eight heads beat what fits L2 under a causal mask.
        128: Config(128, 64, 8, 2, boxes=True, heads_per_wave=8),
        256: Config(32, 32, 8, 1, boxes=True),
    },
    "twice_dkdv": {
        # Beats two stages, half the queries, and twice the keys.
        64: Config(64, 64, 4, 3, boxes=True),
        # Two programs fit an SM. Beats half and twice the queries, and twice the keys.
        128: Config(32, 64, 4, 2, boxes=True, heads_per_wave=4),
        256: Config(32, 32, 8, 1, boxes=True),
    },
    "twice_dq": {
        # 4 % faster than twice the keys without a mask, 3 % slower with one.
        64: Config(64, 32, 4, 3, boxes=True),
        # Beats half the rows, and half the keys.
        128: Config(128, 64, 8, 2, boxes=True, heads_per_wave=8),
        256: Config(32, 16, 8, 1, boxes=True),
    },
}

# Forward tiles for problems with plain scores and no padding. With few keys, starting a program and waiting for memory
# take as long as the products; three or four programs per SM hide both.
SHORT_KEYS = 512
Kind = Literal["few banded", "few", "window", "many", "listed"]
_HOPPER_PLAIN: dict[Kind, Table] = {
    # Under a mask, one loop waits for memory once, and K and V behind one barrier once per tile.
    "few banded": {64: Config(64, 32, 4, 4, boxes=True, joined=True, paired=True, heads_per_wave=1)},
    "few": {
        # The register limit lets four programs fit an SM. One head at a time beats 64.
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128, heads_per_wave=1),
        # The register limit lets three programs fit an SM. One loop beats two, one head at a time beats 64.
        128: Config(64, 32, 4, 3, boxes=True, hold_queries=True, joined=True, max_registers=168, heads_per_wave=1),
    },
    # A few heads at a time beat as many as fit L2.
    "window": {
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128, heads_per_wave=8),
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True, joined=True, heads_per_wave=4),
    },
    "many": {
        # The register limit lets four programs fit an SM. Boxes beat descriptors of whole tiles.
        64: Config(64, 64, 4, 3, boxes=True, hold_queries=True, max_registers=128),
        # One loop beats two, and separate barriers beat a shared one.
        128: Config(64, 64, 4, 3, boxes=True, hold_queries=True, joined=True),
    },
}

# Plain scores under a tile mask. Queries stay in shared memory: at head_dim 64, results are wrong with queries held in
# registers, which ptxas uses for something else.
_HOPPER_LISTED: dict[Pass, Table] = {
    "forward": {64: Config(64, 128, 4, 2, boxes=True), 128: Config(64, 64, 4, 3, boxes=True)},
    # A few heads at a time beat as many as fit L2 by an eighth, if the mask is causal.
    "dkdv": {
        # Beats two stages, a late dP, and twice the keys or queries.
        64: Config(64, 64, 4, 3, boxes=True, heads_per_wave=8),
        # Twice as fast as eight warps. Beats a late dP, twice the keys and, but for short documents, half the queries.
        128: Config(64, 64, 4, 2, boxes=True, heads_per_wave=4),
    },
    "dq": {
        # 1.4 times as fast as eight warps with twice the rows. Beats two stages, and twice the keys or rows.
        64: Config(64, 64, 4, 3, boxes=True, heads_per_wave=8),
        # Beats two stages, four warps with half the rows but for few tiles, and twice the keys.
        128: Config(128, 64, 8, 3, boxes=True, heads_per_wave=8),
    },
}

# This table and the next three were not measured on such devices or problems, nor were the rows of 512 anywhere. Their
# tiles fit the registers and shared memory of the devices they serve.
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
    "dq": {64: Config(128, 64, 8, 2), 128: Config(128, 32, 8, 2), 256: Config(32, 32, 8, 1), 512: Config(16, 16, 8, 1)},
    "tangent": {64: Config(64, 64, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 1)},
    "twice_dkdv": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 8, 1), 256: Config(16, 32, 8, 1)},
    "twice_dq": {64: Config(64, 32, 4, 2), 128: Config(32, 32, 8, 1), 256: Config(32, 16, 8, 1)},
}

_SMALL_SMEM: dict[Pass, Table] = {
    "forward": {
        64: Config(128, 64, 4, 3),
        128: Config(128, 32, 8, 2),
        256: Config(64, 32, 8, 1),
        512: Config(16, 16, 4, 1),
    },
    "dkdv": {64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 1), 256: Config(16, 32, 4, 1), 512: Config(16, 16, 8, 1)},
    "dq": {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 1), 256: Config(32, 16, 4, 1), 512: Config(16, 16, 8, 1)},
    "tangent": {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 1), 256: Config(16, 32, 4, 1)},
    "twice_dkdv": {64: Config(32, 64, 4, 1), 128: Config(16, 64, 8, 1), 256: Config(16, 16, 4, 1)},
    "twice_dq": {64: Config(64, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 4, 1)},
}

# Bias and mask tiles take registers and shared memory like another operand; dropout and softcap take registers; pages
# smaller than a tile take a pointer per row. Larger tiles spill or exceed shared memory.
_RICH: dict[Pass, Table] = {
    "forward": {
        64: Config(64, 64, 4, 2),
        128: Config(64, 32, 4, 2),
        256: Config(64, 32, 8, 1),
        512: Config(16, 16, 4, 1),
    },
    "dkdv": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 8, 1), 256: Config(16, 32, 8, 1), 512: Config(16, 16, 8, 1)},
    "dq": {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 1), 256: Config(32, 16, 8, 1), 512: Config(16, 16, 8, 1)},
    "tangent": {64: Config(64, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "twice_dkdv": {64: Config(32, 32, 4, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 16, 8, 1)},
    "twice_dq": {64: Config(32, 32, 4, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1)},
}

# fp32 products run on the ordinary units. Larger tiles spill, because the products are unrolled.
_SINGLE: dict[Pass, Table] = {
    "forward": {
        64: Config(32, 32, 4, 1),
        128: Config(32, 32, 8, 1),
        256: Config(16, 32, 8, 1),
        512: Config(16, 16, 8, 1),
    },
    "dkdv": {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 16, 8, 1), 512: Config(16, 16, 8, 1)},
    "dq": {64: Config(32, 32, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1), 512: Config(16, 16, 8, 1)},
    "tangent": {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1)},
    "twice_dkdv": {64: Config(16, 32, 8, 1), 128: Config(16, 16, 8, 1)},
    "twice_dq": {64: Config(32, 16, 8, 1), 128: Config(16, 16, 8, 1)},
}

# e4m3 is widened to fp16 in registers, which takes another copy of a tile.
_QUANTISED: dict[Pass, Table] = {
    "forward": {
        64: Config(64, 64, 4, 2),
        # More keys spill on an A100 where pages are small.
        128: Config(64, 32, 4, 2),
        256: Config(64, 32, 8, 2),
        512: Config(16, 32, 8, 1),
    }
}
_QUANTISED_HOPPER: dict[Pass, Table] = {
    "forward": _QUANTISED["forward"]
    | {
        # Three stages beat two, and taller tiles.
        128: Config(64, 64, 4, 3)
    }
}

# In decode block_m is a minimum: a tile has as many rows as a group has heads.
_EVERYWHERE: dict[Pass, dict[int, Table]] = {
    "decode": {
        # Three stages beat two, four warps beat eight. The register limit lets three programs fit an SM.
        1: {
            64: Config(16, 128, 4, 3),
            128: Config(16, 128, 4, 3, max_registers=168),
            256: Config(16, 64, 4, 3),
            512: Config(16, 32, 4, 2),
        },
        # The register limit lets three programs fit an SM. Other tiles: docs/log/triton.md.
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
    "twice_dbias": {
        2: {64: Config(32, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)},
        4: {64: Config(16, 16, 4, 1), 128: Config(16, 16, 8, 1)},
    },
}

# Decoding with keys in two parts, by element size and the columns of the first one: tiles in the order of their rows.
# The first that holds all rows of a group is taken, or several of the last one. Of a latent the first part is also V.
_LATENT: dict[int, dict[int, tuple[Config, ...]]] = {
    1: {
        64: (Config(16, 64, 4, 3), Config(32, 64, 4, 3)),
        128: (Config(16, 64, 4, 3), Config(32, 64, 4, 3)),
        256: (Config(16, 64, 4, 3), Config(32, 64, 4, 2)),
        512: (Config(16, 64, 8, 2), Config(32, 32, 8, 2)),
    },
    2: {
        64: (Config(16, 64, 4, 3), Config(32, 64, 4, 3)),
        128: (Config(16, 64, 4, 3), Config(32, 64, 4, 3)),
        256: (Config(16, 32, 4, 3), Config(32, 32, 4, 2)),
        512: (Config(16, 32, 4, 2), Config(32, 32, 8, 2)),
    },
    4: {64: (Config(16, 32, 4, 2),), 128: (Config(16, 32, 4, 2),), 256: (Config(16, 16, 8, 1),),
        512: (Config(16, 16, 8, 1),)},
}  # fmt: skip
# On Hopper, in addition: 64 rows, of which wgmma takes four warps' worth.
_LATENT_HOPPER: dict[int, tuple[Config, ...]] = {
    64: (Config(64, 64, 4, 3, boxes=True),),
    128: (Config(64, 64, 4, 3, boxes=True),),
    256: (Config(64, 64, 8, 2, boxes=True),),
    512: (Config(64, 64, 8, 2, boxes=True),),
}


def choose(
    direction: Pass, device: DeviceSpec, itemsize: int, block_d: int, rich: bool, kinds: Sequence[Kind] = ()
) -> Config:
    """The tile of one pass for a device, element width and padded head_dim (the larger of q's and v's).

    `rich` problems hold more than K, V and scores in a tile (see is_rich). `kinds` (see `_kinds`) are tried in
    order; the first with a row for this head_dim is used.
    """
    width = max(64, block_d)
    if direction in _EVERYWHERE:
        return _EVERYWHERE[direction][itemsize][width]
    if itemsize == 1:
        return (_QUANTISED_HOPPER if device.has_wgmma else _QUANTISED)[direction][width]
    if itemsize == 4:
        return _rows(_SINGLE, direction)[width]
    if device.has_wgmma and "listed" in kinds and not rich and width in _HOPPER_LISTED[direction]:
        return _HOPPER_LISTED[direction][width]
    if direction == "forward" and device.has_wgmma and not rich:
        for kind in kinds:
            if width in _HOPPER_PLAIN.get(kind, {}):
                return _HOPPER_PLAIN[kind][width]
    return _rows(_RICH if rich else _plain_table(device), direction)[width]


def _rows(table: dict[Pass, Table], direction: Pass) -> Table:
    """The rows of a pass. Tangents alone take the tiles of tangents with results, unless they have their own."""
    return table["tangent" if direction == "tangent_only" and direction not in table else direction]


def within_pages(config: Config, page_size: int) -> Config:
    """The tile for decoding from e4m3 pages, cut to SHARING keys where each tile then has a single scale."""
    if page_size % config.block_n and page_size % SHARING == 0:
        return replace(config, block_n=SHARING)
    return config


def _plain_table(device: DeviceSpec) -> dict[Pass, Table]:
    """The table of an architecture. A device that is not a GPU (the interpreter) takes the smallest tiles."""
    if device.has_wgmma:
        return _HOPPER
    return _LARGE_SMEM if device.type == "cuda" and device.smem_bytes >= 160 << 10 else _SMALL_SMEM


def heads_per_wave(device: DeviceSpec, bytes_per_head: int, group_size: int) -> int:
    """How many heads run at the same time: their streamed rows fill at most half of L2. Whole groups, because these
    share K and V.
    """
    fitting = device.l2_bytes // 2 // largest(1, bytes_per_head)
    return largest(group_size, smallest(64, fitting) // group_size * group_size)


def decode_programs(config: Config, device: DeviceSpec, itemsize: int, tile_columns: int) -> int:
    """Programs of split decoding that an SM runs at a time. `tile_columns` are those of K and V together."""
    in_flight = (config.num_stages - 1) * config.block_n * tile_columns * itemsize
    fitting = device.smem_bytes // max(1, in_flight + DECODE_SHARED)
    return max(1, min(REGISTER_LIMIT[itemsize], fitting))


@at_run_time
def num_splits(device: DeviceSpec, itemsize: int, programs: int, rows: int, tiles: int) -> int:
    """Into how many splits decode cuts the keys (`tiles` tiles) of each of `rows` (sequence, K/V head) pairs, where an
    SM runs `programs` at a time.

    Takes the shortest estimate, and of equal ones the fewest splits.
    """
    choices = range(1, min(MAX_SPLITS, max(1, tiles)) + 1)
    busy = min(BUSY[itemsize], programs)
    return min(choices, key=lambda splits: _duration(device.num_sms, programs, busy, rows, tiles, splits))


def _duration(num_sms: int, programs: int, busy: float, rows: int, tiles: int, splits: int) -> float:
    """Estimated duration in tiles read by one slot while all slots are busy. Within one wave, the SMs with the most
    programs decide. Over several waves, programs end at different times, and on average half a wave is wasted.
    """
    share = max(1, -(-tiles // splits))
    count, slots = rows * -(-tiles // share), num_sms * programs
    if count > slots:
        return (count / slots + 0.5) * (share + PROGRAM_COST)
    return max(busy, -(-count // num_sms)) / programs * (share + PROGRAM_COST)


def config_of(problem: AttentionProblem, device: DeviceSpec, direction: Pass) -> Config:
    """The tile of one pass."""
    width = max(tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8)))
    # Elsewhere than on Hopper, the larger tiles of problems without a tile mask would spill.
    rich = is_rich(problem, direction) or (problem.tiles_shape is not None and not device.has_wgmma)
    kinds = _kinds(problem, direction)
    config = choose(direction, device, element_size(problem), width, rich, kinds)
    # Running heads one after the other was measured for dense rows and ungrouped heads only.
    measured = problem.kind == "dense" and problem.group_size == 1
    return config if measured else replace(config, heads_per_wave=None)


def latent_config(problem: AttentionProblem, device: DeviceSpec, rows: int) -> Config:
    """The tile of decoding with keys in two parts, for groups of so many (token, head) rows."""
    itemsize = element_size(problem)
    width = max(64, padded(problem.head_dim_v)) if problem.latent else MOST_COLUMNS
    tiles = _LATENT[itemsize][width]
    if not problem.latent:  # next to values of their own, more rows do not fit everywhere
        tiles = tiles[:1]
    elif device.has_wgmma and itemsize == 2:
        tiles += _LATENT_HOPPER[width]
    return next((tile for tile in tiles if tile.block_m >= rows), tiles[-1])


def _kinds(problem: AttentionProblem, direction: Pass) -> tuple[Kind, ...]:
    """Which tables apply, in this order. The forward's require plain scores and V as wide as K: with 128 columns of V
    next to 64 of K, ptxas reuses the registers of held queries. Only the conformance suite on a GPU shows it.
    """
    if direction != "forward":
        return () if problem.tiles_shape is None else ("listed",)
    if not is_plain(problem) or problem.head_dim != problem.head_dim_v:
        return ()
    if problem.tiles_shape is not None:
        return ("listed",)
    left, right = problem.band
    few = problem.seqlen_k <= SHORT_KEYS
    asked: tuple[tuple[Kind, bool], ...] = (
        ("few banded", few and right is not None),
        ("few", few),
        ("window", not few and left is not None),
        ("many", not few),
    )
    return tuple(kind for kind, on in asked if on)


def padded(head_dim: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(MIN_DOT_SIDE, 1 << (head_dim - 1).bit_length())


def tile_widths(head_dim: int, head_dim_v: int, *, halved: bool = False) -> tuple[int, int]:
    """(columns of a Q or K tile, of a V or O tile): padded, and at least 64 where they differ. `halved`: even and odd
    columns are separate tiles.

    Triton 3.6 miscompiles sm_90 products where Q is 64 wide and V 32 or 16 (16 bits with bias, mask, softcap or
    dropout: out is wrong, lse right). Widths from 64 on pass the suite.
    """
    least = 2 * MIN_DOT_SIDE if halved else MIN_DOT_SIDE
    width, width_v = max(least, padded(head_dim)), max(least, padded(head_dim_v))
    return (width, width) if width == width_v else (max(64, width), max(64, width_v))


def is_parted(problem: AttentionProblem) -> bool:
    """Whether columns of K are two tiles: those of a latent that are V too, or those that fit a tile, and the others.

    One of 16 query heads and more is read once for all of them. Only the decode kernel takes keys in parts.
    """
    if problem.head_dim > MOST_COLUMNS:
        return True
    plain = not (problem.needs_grad or problem.higher or problem.tiles_shape is not None)
    return problem.latent and plain and problem.group_size >= LATENT_GROUP


def is_transformed(problem: AttentionProblem) -> bool:
    """Whether scores are more than q.k times a positive scale."""
    terms = (problem.softcap, problem.bias_shape, problem.mask_shape)
    return problem.has_alibi or problem.scale <= 0.0 or any(term is not None for term in terms)


def is_exact(problem: AttentionProblem) -> bool:
    """Whether the scale may take plain scores of ordinary q and k past 2^31, in log2 units."""
    return problem.scale >= LARGE_SCALE and not is_transformed(problem)


def is_plain(problem: AttentionProblem) -> bool:
    """Whether rows have 16 or 32 bits, heads need no padding, and scores are untransformed."""
    dims = (problem.head_dim, problem.head_dim_v)
    plain = not (is_transformed(problem) or is_exact(problem))
    return problem.kind != "paged" and not problem.fp8 and plain and tile_widths(*dims) == dims


def is_rich(problem: AttentionProblem, direction: str) -> bool:
    """Whether a tile holds more than K, V and plain scores, and must be smaller: bias, masks, dropout bits, softcap.

    In the backward a pointer for each row of small pages counts too, and for each row of wide heads in pages, or that
    TMA cannot address. The forward looks pages up one tile ahead and keeps the larger tile, which is faster. Tangents
    and second derivatives test each tile of a tile mask.
    """
    tested = problem.tiles_shape if direction in ("tangent", "tangent_only", "twice_dkdv", "twice_dq") else None
    extras = (problem.bias_shape, problem.mask_shape, problem.softcap, tested)
    small_pages = direction != "forward" and problem.page_size is not None and problem.page_size % LARGEST_TILE != 0
    dims = problem.head_dim, problem.head_dim_v
    by_pointers = problem.kind == "paged" or any(dim % 8 for dim in dims)
    pointers = direction in ("dkdv", "dq") and max(dims) > 256 and by_pointers
    return problem.dropout > 0.0 or small_pages or pointers or any(extra is not None for extra in extras)


def element_size(problem: AttentionProblem) -> int:
    """Bytes of an element of K and V in a tile. e4m3 that is multiplied in fp32 counts as fp32."""
    return 1 if problem.fp8 and problem.dtype != torch.float32 else problem.dtype.itemsize
