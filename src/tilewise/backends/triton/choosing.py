"""Which tile a pass of a problem gets on a device. Nothing here needs Triton, so that `explain()` can ask."""

from __future__ import annotations

from dataclasses import replace

from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import Config, Pass
from tilewise.backends.triton.traits import element_size, is_plain, is_rich, tile_widths
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["config_of"]


def config_of(problem: AttentionProblem, device: DeviceSpec, direction: Pass) -> Config:
    """The tile of one pass; few keys have their own where they were measured, with plain scores and no padding."""
    width = max(tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8)))
    short = is_plain(problem) and problem.seqlen_k <= configs.SHORT_KEYS
    config = configs.choose(direction, device, element_size(problem), width, is_rich(problem, direction), short)
    # Heads one after the other were measured with dense rows and heads that share nothing.
    measured = problem.kind == "dense" and problem.group_size == 1
    return config if measured or configs.overrides() is not None else replace(config, heads_per_wave=None)
