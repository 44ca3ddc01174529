"""Tile shapes as a pure function of (architecture class, dtype width, head_dim class, pass). `overridden` replaces
rows for experiments.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tilewise.device import DeviceSpec

__all__ = ["PASSES", "Config", "Pass", "architecture", "choose", "overridden"]

Pass = Literal["forward", "dkdv", "dq", "decode", "dbias"]
PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq", "decode", "dbias")
Architecture = Literal["datacenter", "hopper", "small_smem"]


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is tiled and compiled.

    `descriptors`: whole tiles are loaded by TMA where the tensors allow. `heads_per_wave`: None means as many as keep
    their rows in L2.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    early_dp: bool = True
    heads_per_wave: int | None = None


# (dtype bytes, padded head_dim) -> tile, the head dim being the larger of the two padded ones.
Table = Mapping[tuple[int, int], Config]

_FORWARD: dict[Architecture, Table] = {
    "hopper": {
        (2, 64): Config(128, 128, 4, 3),
        (2, 128): Config(128, 128, 8, 2),
        (2, 256): Config(128, 64, 8, 2),
        (2, 512): Config(64, 32, 8, 2),
        (4, 64): Config(64, 32, 4, 2),
        (4, 128): Config(64, 32, 4, 2),
        (4, 256): Config(32, 32, 4, 2),
        (4, 512): Config(16, 16, 4, 2),
    },
    "datacenter": {
        (2, 64): Config(128, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 3),
        (2, 256): Config(64, 32, 4, 2),
        (2, 512): Config(32, 32, 8, 1),
        (4, 64): Config(64, 32, 4, 2),
        (4, 128): Config(64, 32, 4, 2),
        (4, 256): Config(32, 16, 4, 2),
        (4, 512): Config(16, 16, 4, 1),
    },
    "small_smem": {
        (2, 64): Config(128, 64, 4, 3),
        (2, 128): Config(128, 32, 8, 2),
        (2, 256): Config(64, 32, 8, 1),
        (2, 512): Config(16, 16, 4, 1),
        (4, 64): Config(64, 32, 4, 2),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
        (4, 512): Config(16, 16, 4, 1),
    },
}

_DKDV: dict[Architecture, Table] = {
    "hopper": {
        (2, 64): Config(64, 128, 4, 3),
        (2, 128): Config(64, 128, 8, 2),
        (2, 256): Config(32, 64, 8, 1),
        (2, 512): Config(16, 32, 8, 1),
        (4, 64): Config(32, 64, 4, 1),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(16, 32, 8, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
    "datacenter": {
        (2, 64): Config(64, 128, 8, 2),
        (2, 128): Config(32, 128, 8, 2),
        (2, 256): Config(32, 32, 8, 1),
        (2, 512): Config(16, 16, 8, 1),
        (4, 64): Config(32, 64, 4, 1),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
    "small_smem": {
        (2, 64): Config(64, 64, 4, 2),
        (2, 128): Config(32, 64, 4, 1),
        (2, 256): Config(16, 32, 4, 1),
        (2, 512): Config(16, 16, 8, 1),
        (4, 64): Config(32, 32, 4, 1),
        (4, 128): Config(16, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
}

_DQ: dict[Architecture, Table] = {
    "hopper": {
        (2, 64): Config(128, 64, 4, 3),
        (2, 128): Config(128, 64, 8, 2),
        (2, 256): Config(64, 32, 8, 1),
        (2, 512): Config(32, 16, 8, 1),
        (4, 64): Config(64, 32, 4, 1),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(32, 16, 8, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
    "datacenter": {
        (2, 64): Config(128, 64, 8, 2),
        (2, 128): Config(128, 32, 8, 2),
        (2, 256): Config(32, 32, 8, 1),
        (2, 512): Config(16, 16, 8, 1),
        (4, 64): Config(64, 32, 4, 1),
        (4, 128): Config(32, 32, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
    "small_smem": {
        (2, 64): Config(64, 64, 4, 2),
        (2, 128): Config(64, 32, 4, 1),
        (2, 256): Config(32, 16, 4, 1),
        (2, 512): Config(16, 16, 8, 1),
        (4, 64): Config(32, 32, 4, 1),
        (4, 128): Config(32, 16, 4, 1),
        (4, 256): Config(16, 16, 4, 1),
        (4, 512): Config(16, 16, 8, 1),
    },
}

# block_m is a floor here: decode takes as many rows as a group of heads has.
_DECODE: Table = {
    (2, 64): Config(16, 64, 4, 3),
    (2, 128): Config(16, 64, 4, 3),
    (2, 256): Config(16, 32, 4, 2),
    (2, 512): Config(16, 16, 4, 2),
    (4, 64): Config(16, 32, 4, 2),
    (4, 128): Config(16, 32, 4, 2),
    (4, 256): Config(16, 16, 4, 2),
    (4, 512): Config(16, 16, 4, 1),
}

_DBIAS: Table = {
    (2, 64): Config(64, 64, 4, 1),
    (2, 128): Config(64, 64, 8, 1),
    (2, 256): Config(32, 32, 4, 1),
    (2, 512): Config(16, 16, 4, 1),
    (4, 64): Config(32, 32, 4, 1),
    (4, 128): Config(32, 32, 4, 1),
    (4, 256): Config(16, 16, 4, 1),
    (4, 512): Config(16, 16, 4, 1),
}

_overrides: contextvars.ContextVar[Mapping[Pass, Config] | None] = contextvars.ContextVar(
    "tilewise_triton_configs", default=None
)


def architecture(device: DeviceSpec) -> Architecture:
    """The class of tile tables a device uses; a device that is not a GPU (the interpreter) uses the smallest tiles."""
    if device.has_wgmma:
        return "hopper"
    return "datacenter" if device.smem_bytes >= 160 << 10 and device.type == "cuda" else "small_smem"


def choose(direction: Pass, device: DeviceSpec, itemsize: int, block_d: int) -> Config:
    """The tile of one pass for a device, element width and padded head_dim (the larger of q's and v's)."""
    override = (_overrides.get() or {}).get(direction)
    if override is not None:
        return override
    key = (itemsize, max(64, block_d))
    if direction == "decode":
        return _DECODE[key]
    if direction == "dbias":
        return _DBIAS[key]
    return {"forward": _FORWARD, "dkdv": _DKDV, "dq": _DQ}[direction][architecture(device)][key]


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


def num_splits(device: DeviceSpec, rows: int, max_tiles: int) -> int:
    """Into how many parts decode cuts the keys of each of `rows` (sequence, K/V head) pairs: fills the chip's last
    wave.

    Two programs fit on a multiprocessor. Takes the fewest splits that reach 90 % of the best occupancy of the last
    wave.
    """
    slots = 2 * device.num_sms
    # A split of less than two tiles costs more in merging than it gains.
    limit = max(1, min(128, max_tiles // 2))
    if rows >= 4 * slots or limit == 1:
        return 1
    filled = [_last_wave(rows * splits / slots) for splits in range(1, limit + 1)]
    return next(splits for splits, share in enumerate(filled, start=1) if share >= 0.9 * max(filled))


def _last_wave(waves: float) -> float:
    return waves / -(-waves // 1)
