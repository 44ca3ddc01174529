"""The plan of a problem: compile-time traits, run-time scalars, splits. Made once per problem and cached."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from tilewise.backends.gpu.launching import interpreted
from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import Config, Pass, config_of
from tilewise.backends.triton.traits import Band, ScoreScalars, Sizes, Traits, element_size, traits_of
from tilewise.device import DeviceSpec
from tilewise.numerics import dropout_threshold
from tilewise.problem import AttentionProblem

__all__ = ["Plan", "plan_for"]

# Query rows (tokens times heads of a group) that decode takes in one tile, and the keys below which splitting is not
# worth a second kernel. A single token without gradients always takes the decode kernel, which reads K and V once for
# the heads of a group; times in bench/results/triton-tiles.csv.
MAX_DECODE_ROWS = 64
MIN_SPLIT_KEYS = 256


class Plan(NamedTuple):
    """The launch plan of a problem, shared by all its calls."""

    problem: AttentionProblem
    device: DeviceSpec
    traits: Traits
    sizes: Sizes
    band: Band
    scalars: ScoreScalars
    num_splits: int

    def config(self, direction: Pass) -> Config:
        """The tile of one pass."""
        config = config_of(self.problem, self.device, direction)
        if direction == "decode" and self.traits.HALF and self.traits.PAGED:
            return configs.within_pages(config, self.traits.PAGE_SIZE)
        return config

    @property
    def is_unpadded(self) -> bool:
        """Whether tiles are as wide as the heads."""
        problem = self.problem
        return (problem.head_dim, problem.head_dim_v) == (self.traits.BLOCK_D, self.traits.BLOCK_DV)

    def sizes_streaming(self, config: Config, bytes_per_head: int, group_size: int) -> Sizes:
        """Sizes with the number of heads that run at the same time."""
        heads = config.heads_per_wave or configs.heads_per_wave(self.device, bytes_per_head, group_size)
        return self.sizes._replace(heads_per_wave=heads)


def plan_for(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str = "ieee") -> Plan:
    """The plan for a problem, without tensors. Cached unless tiles are overridden for an experiment."""
    return (_kept_plan if configs.overrides() is None else _plan)(problem, device, packed_q, precision)


def _plan(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str) -> Plan:
    left, right = problem.band
    traits = traits_of(problem, device, packed_q=packed_q, precision=precision, interpreted=interpreted())
    sizes = Sizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        seqlen_q=problem.seqlen_q if packed_q or problem.kind == "dense" else 1,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q if problem.kind != "dense" else problem.batch * problem.seqlen_q,
        total_k=problem.total_k,
        heads_per_wave=1,
    )
    scalars = ScoreScalars(
        scale=float(problem.scale),
        softcap=float(problem.softcap or 0.0),
        keep_scale=1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0,
        drop_below=dropout_threshold(problem.dropout),
    )
    # A window wider than the sequences cuts nothing, but may have 31 bits: sums with it would overflow int32.
    band = Band(min(left or 0, problem.seqlen_k), min(right or 0, problem.seqlen_q))
    plan = Plan(problem, device, traits, sizes, band, scalars, 0)
    few = problem.seqlen_k < MIN_SPLIT_KEYS
    serving = sizes.seqlen_q == 1 and problem.seqlen_k > 0 and not problem.needs_grad
    if sizes.seqlen_q * problem.group_size > MAX_DECODE_ROWS or (few and not serving):
        return plan
    if few:
        return plan._replace(num_splits=1)
    config = plan.config("decode")
    itemsize = element_size(problem)
    programs = configs.decode_programs(config, device, itemsize, traits.BLOCK_D + traits.BLOCK_DV)
    tiles = triton.cdiv(problem.seqlen_k, config.block_n)
    rows = problem.batch * problem.num_kv_heads
    return plan._replace(num_splits=configs.num_splits(device, itemsize, programs, rows, tiles))


_kept_plan = functools.lru_cache(maxsize=4096)(_plan)
