"""What the tables of the Hopper backend choose between, as short words: how its records are held against them.

A kernel is compiled for a tile, head dims, a dtype, a mask, the way rows lie, and features. All combinations are some
thousand; records have to hold every tile together with every one of the other choices that some problem makes, and
with sinks one of them: those are added behind the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tilewise import device
from tilewise.backends.hopper import BACKEND, configs, decode_configs, decodes, fp8_configs
from tilewise.problem import AttentionProblem

__all__ = ["backward_choices", "decode_choices", "forward_choices", "fp8_choices", "missing", "taken", "variants"]

Choices = dict[str, str]
HOPPER = device.named("h200")


def variants(*options: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one of each, as one."""
    for combination in itertools.product(*options):
        yield {name: value for option in combination for name, value in option.items()}


def taken(problems: Iterable[AttentionProblem]) -> list[AttentionProblem]:
    """Those that the backend takes."""
    return [problem for problem in problems if BACKEND.supports(problem, HOPPER) is None]


def missing(
    described: Iterable[AttentionProblem],
    recorded: Iterable[AttentionProblem],
    choices: Callable[[AttentionProblem], Choices],
) -> dict[frozenset[tuple[str, str]], Choices]:
    """A tile and a choice that a problem which the backend takes combines and no record does, with all it chooses."""
    known = {pair for problem in recorded for pair in _pairs(choices(problem))}
    found = [choices(problem) for problem in taken(described)]
    return {pair: chosen for chosen in found for pair in _pairs(chosen) if pair not in known}


def _pairs(chosen: Choices) -> list[frozenset[tuple[str, str]]]:
    tile = ("tile", chosen["tile"])
    return [frozenset((other,) if other[0] == "sinks" else (tile, other)) for other in chosen.items()]


def forward_choices(problem: AttentionProblem) -> Choices:
    """Of a forward in 16 bits."""
    config, tile = configs.forward_config(problem), configs._forward_tile(problem)
    return {
        "tile": next(name for name, row in vars(configs).items() if row is tile),
        "dims": f"{config.D}+{config.D_REST}, {config.DV}+{config.DV_REST}",
        "rows": f"pages, {config.CHUNK} at a time" if config.IS_PAGED else problem.kind,
        **_common(problem),
    }


def backward_choices(problem: AttentionProblem) -> Choices:
    """Of a backward."""
    config = configs.backward_config(problem)
    beside, anew = ("AHEAD", "STATS_AHEAD", "FINISHES"), ("ANEW_KV", "ANEW_DQ")
    return {
        "tile": f"{config.BLOCK_M} queries, {config.D}+{config.D_REST}, {config.DV}+{config.DV_REST}",
        "beside": " ".join(name for name in beside if getattr(config, name)) or "nothing",
        "descriptors": " ".join(name for name in anew if getattr(config, name)) or "kept",
        "last waves": f"{config.ENDING} as one",
        "order": "fixed" if config.FIXED_POINT else "any",
        "key tiles": "whole" if config.EVEN_K else "cut",
        "rows": problem.kind,
        **_common(problem),
    }


def decode_choices(problem: AttentionProblem) -> Choices:
    """Of decoding."""
    config = decode_configs.decode_config(problem, packed_queries=problem.seqlen_q > 1)
    assert decodes(problem)
    return {
        "tile": f"{config.LANES} x {config.BLOCK_N} keys of {'e4m3' if config.IS_FP8 else '16 bits'}",
        "queries": f"{config.ROWS}",
        "dims": f"{config.D}, {config.DV}",
        "sequences": f"{config.FEW or 'any'}",
        "rows": f"pages, {config.CHUNK} at a time" if config.IS_PAGED else problem.kind,
        **_common(problem),
    }


def fp8_choices(problem: AttentionProblem) -> Choices:
    """Of a forward in e4m3."""
    config, tile = fp8_configs.fp8_config(problem), fp8_configs._tile(problem, fp8_configs.fp8_config(problem).D)
    return {
        "tile": next(name for name, row in vars(fp8_configs).items() if row is tile),
        "values": "scales of blocks" if config.HAS_V_BLOCKS else "one scale",
        "rows": problem.kind,
        **_common(problem),
    }


def _common(problem: AttentionProblem) -> Choices:
    right, left = configs.has_right(problem), configs.has_left(problem)
    causal = right and problem.band[1] == 0 and not left
    return {
        "dtype": "fp16" if problem.dtype == torch.float16 else "bf16",
        "mask": "causal" if causal else "band" if right or left else "none",
        "scores": "plain" if problem.softcap is None else "softcap",
        "sinks": "some" if problem.has_sinks else "none",
    }
