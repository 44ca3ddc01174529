"""What every call with a problem shares: compile-time traits, run-time numbers, splits. Made once, cached."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from tilewise.backends.gpu.launching import interpreted
from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import Config, Pass
from tilewise.backends.triton.traits import Band, ScoreScalars, Sizes, Traits, element_size, is_rich, traits_of
from tilewise.device import DeviceSpec
from tilewise.numerics import dropout_threshold
from tilewise.problem import AttentionProblem

__all__ = ["Plan", "plan_for"]

# Query rows (tokens times heads of a group) that decode takes in one tile, and the keys below which splitting is not
# worth a second kernel.
MAX_DECODE_ROWS = 64
MIN_DECODE_KEYS = 256


class Plan(NamedTuple):
    """What every call with a problem shares."""

    problem: AttentionProblem
    device: DeviceSpec
    traits: Traits
    sizes: Sizes
    band: Band
    scalars: ScoreScalars
    num_splits: int

    def config(self, direction: Pass) -> Config:
        """The tile of one pass."""
        width = max(self.traits.BLOCK_D, self.traits.BLOCK_DV)
        return configs.choose(direction, self.device, element_size(self.problem), width, is_rich(self.problem))

    def query_schedule(self, config: Config, bytes_per_head: int) -> tuple[Sizes, int]:
        """(sizes with the order of work, programs) of a kernel that owns tiles of queries and streams keys."""
        problem, sizes = self.problem, self.sizes
        heads = config.heads_per_wave or configs.heads_per_wave(self.device, bytes_per_head, problem.group_size)
        total = sizes.total_q if self.traits.PACKED_Q else None
        slots, tiles = self._tiles(sizes.seqlen_q, total, config.block_m)
        if slots > 0:
            heads = configs.even_waves(problem.num_heads, heads, problem.group_size)
        return sizes._replace(heads_per_wave=heads, num_slots=slots), tiles * problem.num_heads

    def key_schedule(self, config: Config, bytes_per_head: int) -> tuple[Sizes, int]:
        """The same of a kernel that owns tiles of keys and streams queries."""
        heads = config.heads_per_wave or configs.heads_per_wave(self.device, bytes_per_head, 1)
        total = self.sizes.total_k if self.traits.PACKED_K else None
        slots, tiles = self._tiles(self.sizes.seqlen_k, total, config.block_n)
        if slots > 0:
            heads = configs.even_waves(self.problem.num_kv_heads, heads, 1)
        return self.sizes._replace(heads_per_wave=heads, num_slots=slots), tiles * self.problem.num_kv_heads

    def _tiles(self, max_seqlen: int, total: int | None, block: int) -> tuple[int, int]:
        """(slots, tiles of a head): packed sequences take slots where these are fewer than in a grid as long as the
        longest sequence: 272 instead of 1024 for 16 sequences of 7 to 4096 tokens.
        """
        grid = triton.cdiv(max_seqlen, block) * self.problem.batch
        slots = grid if total is None else total // block + self.problem.batch
        return (slots, slots) if slots < grid else (0, grid)


@functools.lru_cache(maxsize=4096)
def plan_for(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str = "ieee") -> Plan:
    """Everything about a call that needs no tensor."""
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
        num_slots=0,
    )
    scalars = ScoreScalars(
        scale=float(problem.scale),
        softcap=float(problem.softcap or 0.0),
        keep_scale=1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0,
        drop_below=dropout_threshold(problem.dropout),
    )
    plan = Plan(problem, device, traits, sizes, Band(left or 0, right or 0), scalars, 0)
    if sizes.seqlen_q * problem.group_size > MAX_DECODE_ROWS or problem.seqlen_k < MIN_DECODE_KEYS:
        return plan
    config = plan.config("decode")
    programs = configs.decode_programs(config, device, element_size(problem), traits.BLOCK_D + traits.BLOCK_DV)
    tiles = triton.cdiv(problem.seqlen_k, config.block_n)
    return plan._replace(num_splits=configs.num_splits(device, programs, problem.batch * problem.num_kv_heads, tiles))
