"""The tiles that tune_triton.py tries, by pass, head_dim and length, and how they are written down.

`64x128w8s2LJBh4r168`: BLOCK_M x BLOCK_N, warps, stages; then L takes dP late, J joins the loops over masked and other
tiles, B loads tiles by TMA, Q holds the queries of the forward in registers, P lets K and V share a barrier, F takes dP
first, S splits scores between warpgroups, h4 runs four heads at a time, r168 allows so many registers a thread. `A+B`:
dK with tile A, dV with tile B.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tilewise.backends.triton.configs import Config, Pass

__all__ = ["DECODE", "HIGHER", "TUNED", "candidates", "config_of", "name_of"]

# Tangents and second derivatives.
HIGHER: tuple[Pass, ...] = ("tangent", "tangent_only", "twice_dkdv", "twice_dq")
TUNED: tuple[Pass, ...] = ("forward", "dkdv", "dq", *HIGHER)
# Lengths up to this are tuned from tables of their own: there starting a program counts, and memory.
SHORT = 512

LONG_TILES: dict[tuple[Pass, int], str] = {
    ("forward", 64): "64x64w4s3 64x64w4s3BQr128 64x64w4s3B 64x64w4s4 64x128w4s2 64x128w4s2B 128x64w8s3B 128x128w8s2B",
    ("forward", 128): """64x64w4s3 64x64w4s3BQ 64x64w4s3JBQ 64x32w4s3BQr168 64x64w4s3B 64x64w4s2 64x64w4s2B 128x64w8s2
        128x64w8s3B 128x128w8s2B 64x128w4s2 64x128w4s2B""",
    ("forward", 256): "128x64w8s2 128x64w8s2B 128x32w8s3 128x32w8s3B 64x32w4s2 64x32w4s2B 64x64w4s2",
    ("dkdv", 64): "64x64w4s3JB 64x64w4s2JB 64x64w4s2J 64x64w4s2LJB 64x64w4s3LJB 32x64w4s3JB 32x64w4s3J 64x128w8s2JB",
    (
        "dkdv",
        128,
    ): "64x64w4s2JB 64x64w4s2LJB 64x128w8s2JB 32x64w4s3JB 32x64w4s2JB 64x64w4s2J 32x128w8s3JB 64x128w8s2LJB",
    ("dkdv", 256): "32x64w8s2JB 64x64w8s2JB 64x64w8s2LJB 64x64w8s2J 64x64w8s1J",
    ("dq", 64): "128x64w8s2J 64x64w4s2J 64x64w4s3J 64x64w4s3JB 64x64w4s2JB 64x128w4s2JB 128x64w4s3JB 64x32w4s3JB",
    ("dq", 128): "128x64w8s3JB 64x64w4s2JB 64x64w4s2J 64x32w4s3JB 64x32w4s3J 128x32w8s3JB 128x64w8s2JB",
    ("dq", 256): "64x32w8s1J 128x32w8s2J 128x32w8s2JB 64x32w4s2J 64x32w4s2JB 64x32w8s2JB 128x64w8s1J",
    ("dkdv", 512): """64x64w8s1JBFS+32x64w8s2JBS 32x64w8s1JBS+64x64w8s1JBS 32x64w8s1JBFS+32x64w8s1JBS
        16x64w8s2JBS+16x64w8s3JBS 64x64w8s1JBF+32x64w8s2JB 16x32w8s1""",
    ("dq", 512): "64x64w8s1JBFS 64x32w8s1JBS 64x32w8s1JBFS 64x16w8s2JBS 64x64w8s1JBF 32x16w8s1",
    ("tangent", 64): "64x64w4s2B 64x64w4s3B 128x64w8s2B 128x64w8s3B 64x128w4s2B 128x128w8s2B 64x64w4s2",
    ("tangent", 128): "128x64w8s2B 128x32w8s3B 128x32w8s2B 64x32w4s2B 64x32w4s3B 64x64w4s2B 128x64w8s2",
    (
        "tangent_only",
        64,
    ): "64x64w4s3B 64x64w4s2B 128x64w4s3B 128x64w4s2B 128x64w8s3B 64x32w4s3B 64x32w4s4B 128x32w4s3B 64x128w4s2B",
    (
        "tangent_only",
        128,
    ): "128x64w8s2B 64x64w4s2B 64x32w4s2B 64x32w4s3B 128x32w8s3B 128x32w8s2B 128x64w8s2Bh8 64x32w4s2Bh8 128x32w8s3Bh8",
    ("twice_dkdv", 64): "64x64w4s2B 64x64w4s3B 32x64w4s2B 32x64w4s3B 64x128w8s2B 32x128w8s2B",
    ("twice_dkdv", 128): "32x64w4s2B 32x128w8s2B 32x128w8s3B 64x64w4s2B 64x128w8s1B 16x64w4s2B",
    ("twice_dq", 64): "64x64w4s2B 64x64w4s3B 128x64w8s2B 128x64w8s3B 64x32w4s3B",
    ("twice_dq", 128): "128x64w8s2B 128x32w8s2B 128x32w8s3B 64x32w4s2B 64x64w4s2B",
}
SHORT_TILES: dict[tuple[Pass, int], str] = {
    ("forward", 64): "64x64w4s3BQr128 64x64w4s3BQh1r128 64x32w4s4JBPh1 64x64w4s3B 64x64w4s3 64x32w4s3B 128x64w8s2B",
    ("forward", 128): """64x32w4s3BQr168 64x32w4s3JBQh1r168 64x32w4s4JBQh1r168 64x64w4s3JBQ 64x64w4s3BQ 64x64w4s3
        64x64w4s3B 64x32w4s3 64x32w4s3B 128x64w8s2""",
    ("dkdv", 64): "64x64w4s3JB 64x64w4s2JB 32x64w4s3JB 32x64w4s2J",
    ("dkdv", 128): "64x64w4s2JB 32x64w4s2J 32x64w4s2JB 32x64w4s3JB 64x128w8s2J",
    ("dq", 64): "128x64w4s3JB 64x64w4s3JB 64x32w4s3JB",
    ("dq", 128): "128x64w8s3JB 64x64w4s2J 64x64w4s2JB 64x32w4s2J 64x32w4s3JB",
}

WRITTEN = re.compile(r"(\d+)x(\d+)w(\d+)s(\d+)(L?)(J?)(B?)(Q?)(P?)(F?)(S?)(?:h(\d+))?(?:r(\d+))?")


def candidates(direction: Pass, head_dim: int, length: int) -> list[Config]:
    """The tiles to try; none where none are listed."""
    tiles = SHORT_TILES if length <= SHORT else LONG_TILES
    return [config_of(name) for name in tiles.get((direction, head_dim), "").split()]


def config_of(name: str) -> Config:
    """The configuration that is written so."""
    if "+" in name:
        of_k, of_v = map(config_of, name.split("+"))
        return replace(of_k, dv=of_v)
    found = WRITTEN.fullmatch(name)
    if found is None:
        raise ValueError(f"not a tile: {name!r}")
    block_m, block_n, warps, stages, late, joined, boxes, held, paired, first, split, heads, registers = found.groups()
    return Config(
        int(block_m),
        int(block_n),
        int(warps),
        int(stages),
        early_dp=not late,
        joined=bool(joined),
        boxes=bool(boxes),
        hold_queries=bool(held),
        paired=bool(paired),
        dp_first=bool(first),
        split=bool(split),
        heads_per_wave=int(heads) if heads else None,
        max_registers=int(registers) if registers else None,
    )


def name_of(config: Config) -> str:
    """How a configuration is written down."""
    letters = {
        "L": not config.early_dp,
        "J": config.joined,
        "B": config.boxes,
        "Q": config.hold_queries,
        "P": config.paired,
        "F": config.dp_first,
        "S": config.split,
        f"h{config.heads_per_wave}": config.heads_per_wave,
        f"r{config.max_registers}": config.max_registers,
    }
    extra = "".join(letter for letter, on in letters.items() if on)
    of_v = "" if config.dv is None else f"+{name_of(config.dv)}"
    return f"{config.block_m}x{config.block_n}w{config.num_warps}s{config.num_stages}{extra}{of_v}"


DECODE = [
    Config(16, block_n, warps, stages)
    for block_n, warps, stages in (
        (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2),
        (128, 8, 3), (64, 2, 3), (32, 2, 4),
    )
]  # fmt: skip
