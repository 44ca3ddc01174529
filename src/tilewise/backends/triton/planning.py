"""The plan of a problem: compile-time traits, run-time scalars, splits. Made once per problem and cached.

`Traits`, everything about a problem that changes the code, is passed to the kernels as one constexpr. Lengths, strides,
scale, window sizes and the dropout rate are not in it, so a new sequence length never compiles anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton

from tilewise.backends.gpu.arguments import window_of
from tilewise.backends.gpu.launching import interpreted
from tilewise.backends.gpu.records import Window
from tilewise.backends.triton import configs
from tilewise.backends.triton.configs import (
    MIN_DOT_SIDE,
    Config,
    Pass,
    element_size,
    is_exact,
    is_transformed,
    padded,
    tile_widths,
)
from tilewise.device import DeviceSpec
from tilewise.numerics import dropout_threshold
from tilewise.problem import AttentionProblem

# Query rows (tokens times heads of a group) that decode takes in one tile, and the keys below which splitting is not
# worth a second kernel. A single token without gradients always takes the decode kernel, which reads K and V once for
# the heads of a group; times in bench/results/triton-tiles.csv.
MAX_DECODE_ROWS = 64
MIN_SPLIT_KEYS = 256
# Keys of a split where results may not depend on the batch. By the estimate of configs.num_splits this takes at most
# 1.1 times as long as the best number of splits for 16 sequences of 8192 and more keys; shorter splits start too many
# programs there, and longer ones leave more of a device idle for a few sequences.
SPLIT_KEYS = 4096


class Listed(NamedTuple):
    """A list of packed tiles to be made: address, programs per sequence, rows walked together (see
    gpu/work_list.py).
    """

    work: Any
    parts: int
    rows_together: int


class Tail(NamedTuple):
    """A packed tensor, its rows and their width. Rows past the last sequence are cleared."""

    ptr: Any
    total: int
    width: int


class Sizes(NamedTuple):
    """Run-time numbers that kernels are not specialised on."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    heads_per_wave: int


class ScoreScalars(NamedTuple):
    """Run-time numbers of the score function."""

    scale: float
    softcap: float
    keep_scale: float
    drop_below: int


@dataclass(frozen=True, slots=True)
class Traits:
    """Compile-time facts of a problem.

    BLOCK_D and BLOCK_DV are the head dims padded to what the matrix units take. TRANSFORMED: scores are more than scale
    * q.k, so they are kept in natural units instead of log2 units. A scale of 0 or less counts as that, because the
    fast path masks and takes the maximum before it scales. EXACT: plain scores may be so large that the maximum must be
    subtracted before scaling, which gives an exact 0 for the largest.

    FP8: K and V are e4m3, or if INT8 int8 (see quantised.py), multiplied in fp16 if HALF, else in fp32. FP8_Q: q is
    e4m3 too. *_SHARED_ROWS rows share a scale, 0 means all rows of a head, or of a page. E4M3_INSTRUCTION: the device
    has a conversion instruction. OWN_LISTS: heads that share K and V have tile masks of their own.

    BLOCK_TAIL: columns of K from FIRST_DIM on are a tile of their own, so wide; 0 where BLOCK_D holds all of K. LATENT:
    V is the tile of the first columns.
    """

    PACKED_Q: bool
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    TRANSFORMED: bool
    PRECISION: str
    INTERPRETED: bool
    PACKED_K: bool = False
    PAGED: bool = False
    PAGE_SIZE: int = 0
    GROUP_SIZE: int = 1
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = False
    HAS_BIAS: bool = False
    HAS_MASK: bool = False
    HAS_ALIBI: bool = False
    HAS_SOFTCAP: bool = False
    HAS_SINKS: bool = False
    HAS_DROPOUT: bool = False
    DROPOUT_ORIGIN: bool = False
    EXACT: bool = False
    FP8: bool = False
    INT8: bool = False
    FP8_Q: bool = False
    HALF: bool = False
    Q_SHARED_ROWS: int = 0
    K_SHARED_ROWS: int = 0
    V_SHARED_ROWS: int = 0
    E4M3_INSTRUCTION: bool = False
    OWN_LISTS: bool = False
    FIRST_DIM: int = 0
    BLOCK_TAIL: int = 0
    LATENT: bool = False


@dataclass(frozen=True, slots=True)
class Along:
    """Which operands have a tangent, in the passes beyond the backward."""

    Q: bool
    K: bool
    V: bool
    BIAS: bool
    SINKS: bool


class Plan(NamedTuple):
    """The launch plan of a problem, shared by all its calls."""

    problem: AttentionProblem
    device: DeviceSpec
    traits: Traits
    sizes: Sizes
    window: Window
    scalars: ScoreScalars
    num_splits: int

    def config(self, direction: Pass) -> Config:
        """The tile of one pass."""
        config = configs.config_of(self.problem, self.device, direction)
        if direction == "decode" and self._cuts_pages:
            return configs.within_pages(config, self.traits.PAGE_SIZE)
        return config

    @property
    def _cuts_pages(self) -> bool:
        return self.traits.HALF and self.traits.PAGED and not self.traits.INT8

    @property
    def fits_decode(self) -> bool:
        """Whether a tile of the decode kernel holds the rows of a sequence and K/V head. A tile mask is read by the
        forward kernel, whose tiles lie in one tile and head of it.
        """
        rows = self.sizes.seqlen_q * self.problem.group_size
        return rows <= MAX_DECODE_ROWS and self.problem.tiles_shape is None

    @property
    def decode_config(self) -> Config:
        """The tile of decoding. Several hold the rows of keys in two parts, otherwise one does."""
        rows = max(1, self.sizes.seqlen_q * self.problem.group_size)
        if self.traits.BLOCK_TAIL:
            config = configs.latent_config(self.problem, self.device, rows)
            return configs.within_pages(config, self.traits.PAGE_SIZE) if self._cuts_pages else config
        config = self.config("decode")
        return replace(config, block_m=max(config.block_m, triton.next_power_of_2(rows)))

    @property
    def row_blocks(self) -> int:
        """Tiles of decoding that hold the rows of the longest sequence and a K/V head."""
        blocks: int = triton.cdiv(self.sizes.seqlen_q * self.problem.group_size, self.decode_config.block_m)
        return blocks

    @property
    def is_unpadded(self) -> bool:
        """Whether tiles are as wide as the heads."""
        problem = self.problem
        return (problem.head_dim, problem.head_dim_v) == (self.traits.BLOCK_D, self.traits.BLOCK_DV)

    @property
    def split_keys(self) -> int:
        """Keys of a split of decoding; 0 where the keys of every sequence are split evenly."""
        return SPLIT_KEYS if self.problem.batch_invariant else 0

    def sizes_streaming(self, config: Config, bytes_per_head: int, group_size: int) -> Sizes:
        """Sizes with the number of heads that run at the same time."""
        heads = config.heads_per_wave or configs.heads_per_wave(self.device, bytes_per_head, group_size)
        return self.sizes._replace(heads_per_wave=heads)


def plan_for(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str = "ieee") -> Plan:
    """The plan for a problem, without tensors."""
    return (_plan.__wrapped__ if problem.is_traced else _plan)(problem, device, packed_q, precision)


@functools.lru_cache(maxsize=4096)
def _plan(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str) -> Plan:
    traits = traits_of(problem, device, packed_q=packed_q, precision=precision, interpreted=interpreted())
    if configs.is_parted(problem):
        traits = _parted(traits, problem)
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
    plan = Plan(problem, device, traits, sizes, window_of(problem), scalars, 0)
    if problem.batch_invariant:
        return plan._replace(num_splits=_fixed_splits(plan))
    few = problem.seqlen_k < MIN_SPLIT_KEYS
    serving = sizes.seqlen_q == 1 and problem.seqlen_k > 0 and not problem.needs_grad
    # Keys in two parts are read by the decode kernel alone.
    if not configs.is_parted(problem) and (not plan.fits_decode or (few and not serving)):
        return plan
    if few:
        return plan._replace(num_splits=1)
    config = plan.decode_config
    itemsize = element_size(problem)
    columns = traits.BLOCK_D + traits.BLOCK_TAIL + (0 if traits.LATENT else traits.BLOCK_DV)
    # Tiles of 64 rows keep queries in shared memory and fill the registers of an SM.
    tall = traits.BLOCK_TAIL > 0 and config.block_m >= MAX_DECODE_ROWS
    programs = 1 if tall else configs.decode_programs(config, device, itemsize, columns)
    tiles = triton.cdiv(problem.seqlen_k, config.block_n)
    rows = problem.batch * problem.num_kv_heads * plan.row_blocks
    return plan._replace(num_splits=configs.num_splits(device, itemsize, programs, rows, tiles))


def _parted(traits: Traits, problem: AttentionProblem) -> Traits:
    """Traits of keys in two parts: the columns of a latent that are values, or the first that fit a tile."""
    first = problem.head_dim_v if problem.latent else configs.MOST_COLUMNS
    least = 2 * MIN_DOT_SIDE if problem.fp8 else MIN_DOT_SIDE
    width, width_v, tail = (max(least, padded(n)) for n in (first, problem.head_dim_v, problem.head_dim - first))
    return replace(traits, FIRST_DIM=first, BLOCK_D=width, BLOCK_DV=width_v, BLOCK_TAIL=tail, LATENT=problem.latent)


def _fixed_splits(plan: Plan) -> int:
    """Splits of SPLIT_KEYS keys, for the longest sequence: where they lie depends on nothing else. 0: no decoding."""
    problem = plan.problem
    if not configs.is_parted(problem) and (not plan.fits_decode or problem.seqlen_k == 0):
        return 0
    seen, left = problem.seqlen_k, problem.band[0]
    if left is not None:  # the first key of a window is rounded down to a tile
        seen = min(seen, left + plan.sizes.seqlen_q + plan.decode_config.block_n)
    splits: int = triton.cdiv(max(seen, 1), SPLIT_KEYS)
    return splits


def traits_of(
    problem: AttentionProblem, device: DeviceSpec, *, packed_q: bool, precision: str, interpreted: bool
) -> Traits:
    """The compile-time facts of `problem` on a device."""
    left, right = problem.band
    width, width_v = tile_widths(problem.head_dim, problem.head_dim_v, halved=bool(problem.fp8))
    q_rows, k_rows, v_rows = (block or 0 for block in problem.scale_blocks)
    return Traits(
        PACKED_Q=packed_q,
        PACKED_K=problem.kind == "varlen",
        PAGED=problem.kind == "paged",
        PAGE_SIZE=problem.page_size or 0,
        GROUP_SIZE=problem.group_size,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=width,
        BLOCK_DV=width_v,
        FIRST_DIM=problem.head_dim,
        TRANSFORMED=is_transformed(problem),
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        HAS_BIAS=problem.bias_shape is not None,
        HAS_MASK=problem.mask_shape is not None,
        HAS_ALIBI=problem.has_alibi,
        HAS_SOFTCAP=problem.softcap is not None,
        HAS_SINKS=problem.has_sinks,
        HAS_DROPOUT=problem.dropout > 0.0,
        DROPOUT_ORIGIN=problem.dropout_origin and problem.dropout > 0.0,
        PRECISION=precision if problem.dtype == torch.float32 else "ieee",
        INTERPRETED=interpreted,
        EXACT=is_exact(problem),
        FP8=bool(problem.fp8),
        INT8=problem.int8,
        FP8_Q="q" in problem.fp8,
        HALF=bool(problem.fp8) and problem.dtype != torch.float32,
        Q_SHARED_ROWS=q_rows,
        K_SHARED_ROWS=k_rows,
        V_SHARED_ROWS=v_rows,
        E4M3_INSTRUCTION=bool(problem.fp8) and not problem.int8 and device.has_fp8,
        OWN_LISTS=problem.tiles_shape is not None and problem.tiles_shape[1] > 1 and problem.group_size > 1,
    )


def of_rows(traits: Traits) -> Traits:
    """The traits for kernels that see only rows of out and their statistics: fewer variants to compile."""
    return Traits(
        PACKED_Q=traits.PACKED_Q,
        HEAD_DIM=traits.HEAD_DIM_V,
        HEAD_DIM_V=traits.HEAD_DIM_V,
        BLOCK_D=traits.BLOCK_DV,
        BLOCK_DV=traits.BLOCK_DV,
        TRANSFORMED=traits.TRANSFORMED,
        PRECISION=traits.PRECISION,
        INTERPRETED=traits.INTERPRETED,
    )
