"""Which tile a problem gets on a device. Nothing here needs Triton, so that `explain()` can ask."""

from __future__ import annotations

from dataclasses import replace

from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import Config, Kind, Pass
from tilewise.backends.triton.traits import element_size, is_plain, is_rich, tile_widths
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["config_of"]


def config_of(problem: AttentionProblem, device: DeviceSpec, direction: Pass) -> Config:
    """The tile of one pass; few keys have their own where they were measured, with plain scores and no padding."""
    width = max(tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8)))
    rich, kinds = is_rich(problem, direction), _kinds(problem)
    config = configs.choose(direction, device, element_size(problem), width, rich, kinds)
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
    few = problem.seqlen_k <= configs.SHORT_KEYS
    asked: tuple[tuple[Kind, bool], ...] = (
        ("few banded", few and right is not None),
        ("few", few),
        ("window", not few and left is not None),
        ("many", not few),
    )
    return tuple(kind for kind, on in asked if on)
