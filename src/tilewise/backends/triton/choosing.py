"""Which tile, and which forward kernel, a problem gets on a device. Nothing here needs Triton, so that `explain()` can
ask.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.backends.gpu import releases
from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import Config, Kind, Pass, ShortBackward
from tilewise.backends.triton.traits import element_size, is_plain, is_rich, tile_widths
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["config_of", "is_specialisable", "short_backward_of"]


def config_of(
    problem: AttentionProblem, device: DeviceSpec, direction: Pass, *, general: bool = False, one_tile: bool = True
) -> Config:
    """The tile of one pass; few keys have their own where they were measured, with plain scores and no padding.

    `general`: of forward kernels that do without warps of their own for loading; if not `one_tile`, of the one that
    takes every problem.
    """
    special = None if general or direction != "forward" else _specialised(problem, device)
    if special is not None:
        return special
    width = max(tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8)))
    kinds = [kind for kind in _kinds(problem) if one_tile or kind != "one tile"]
    config = configs.choose(direction, device, element_size(problem), width, is_rich(problem, direction), kinds)
    # Heads one after the other were measured with dense rows and heads that share nothing.
    measured = problem.kind == "dense" and problem.group_size == 1
    overridden = direction in (configs.overrides() or {})
    return config if measured or overridden else replace(config, heads_per_wave=None)


def _kinds(problem: AttentionProblem) -> tuple[Kind, ...]:
    """Which tables of plain problems to ask, in this order; they were measured, and their code was read, with V as wide
    as K. With 128 columns beside 64 ptxas gives the registers of held queries away (test_triton_aot.lost_queries).
    """
    if not is_plain(problem) or problem.head_dim != problem.head_dim_v:
        return ()
    left, right = problem.band
    dense, few = problem.kind == "dense", problem.seqlen_k <= configs.SHORT_KEYS
    least, most = configs.ONE_TILE_KEYS
    one_tile = min(problem.seqlen_q, problem.seqlen_k) > least and problem.seqlen_k <= most and not problem.has_sinks
    asked: tuple[tuple[Kind, bool], ...] = (
        ("one tile", dense and one_tile),
        ("few banded", few and right is not None),
        ("few", few),
        ("window", not few and left is not None),
        ("many", not few),
    )
    return tuple(kind for kind, on in asked if on)


def _specialised(problem: AttentionProblem, device: DeviceSpec) -> Config | None:
    """The tile of the forward with warps of their own for loading, where it is the faster one or an experiment's."""
    if not is_specialisable(problem):
        return None
    override = (configs.overrides() or {}).get("forward")
    if override is not None:
        return override if override.specialised else None
    row = configs.SPECIALISED.get(problem.head_dim)
    if row is None or not device.has_wgmma or not _fills(problem, device, row.config.block_m):
        return None
    return row.config if problem.seqlen_k <= (row.full_keys if problem.band[1] is None else row.causal_keys) else None


def is_specialisable(problem: AttentionProblem) -> bool:
    """Whether the forward with warps of their own for loading computes it: dense and plain, at most causal, and by a
    compiler whose work was read.
    """
    left, right = problem.band
    dense = problem.kind == "dense" and problem.head_dim == problem.head_dim_v and problem.dtype != torch.float32
    banded = left is not None or right not in (None, 0)
    plain = is_plain(problem) and not (banded or problem.has_sinks or problem.dropout > 0.0)
    return dense and plain and releases.serves_specialised_forward()


def short_backward_of(problem: AttentionProblem, device: DeviceSpec) -> ShortBackward | None:
    """The tiles of the backward of short sequences, where it computes the problem and is the faster one: dense and
    plain, with V as wide as K; or an experiment's.
    """
    plain = is_plain(problem) and not problem.dropout > 0.0 and problem.head_dim == problem.head_dim_v
    if problem.kind != "dense" or not plain:
        return None
    overrides = configs.overrides() or {}
    if "dq" in overrides or "dkdv" in overrides:
        tiles = [overrides.get(name) for name in ("dq", "dkdv")]
        asked = [tile for tile in tiles if tile is not None and tile.boxes]
        return ShortBackward(*asked) if len(asked) == len(tiles) else None
    lengths = sorted((problem.seqlen_q, problem.seqlen_k))
    short = lengths[0] > configs.SHORT_BACKWARD_ABOVE and lengths[1] <= configs.SHORT_KEYS
    if not (short and device.has_wgmma) or problem.dtype == torch.float32:
        return None
    return configs.SHORT_BACKWARD["full" if problem.band == (None, None) else "banded"].get(problem.head_dim)


def _fills(problem: AttentionProblem, device: DeviceSpec, block_m: int) -> bool:
    """Whether query tiles are not mostly empty, and few multiprocessors without one in the last round."""
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // block_m)
    rounds = -(-tiles // device.num_sms)
    enough = tiles >= configs.SPECIALISED_SHARE * rounds * device.num_sms
    return enough and problem.seqlen_q > block_m // 2
