"""What a kernel is compiled for: everything about a problem that changes the code.

`Traits` is passed to the kernels as one constexpr. Lengths, strides, scale, window sizes and the dropout rate are not
in it, so a new sequence length never compiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = [
    "Band",
    "Box",
    "Grid4",
    "Lengths",
    "Listed",
    "Rows",
    "ScoreScalars",
    "Sizes",
    "Tail",
    "Traits",
    "element_size",
    "is_exact",
    "is_plain",
    "is_rich",
    "of_rows",
    "padded",
    "tile_widths",
    "traits_of",
]

# tl.dot takes no inner dimension below this. The sides of a tile are powers of two.
MIN_DOT_SIDE = 16
# Keys in the largest tile of the tables. Pages of a multiple of it are never gathered row by row.
LARGEST_TILE = 128


class Rows(NamedTuple):
    """A tensor of token rows: pointer and the strides of (sequence or page, head, token), as in gpu.symbols."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any


class Box(NamedTuple):
    """Position of a head's rows in the 2-D matrix of a tensor descriptor: row and column steps."""

    rows_per_batch: int
    rows_per_head: int
    cols_per_head: int


class Grid4(NamedTuple):
    """A (batch, head, query, key) tensor: pointer and strides, 0 where it is broadcast."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any


class Lengths(NamedTuple):
    """The index tensors of packed and paged problems; None where the problem has none."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    block_table: Any
    seqlens_k: Any
    table_stride: int | None


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


class Band(NamedTuple):
    """The window with causality folded in: keys from `i + diagonal - left` to `i + diagonal + right`."""

    left: int
    right: int


class ScoreScalars(NamedTuple):
    """Run-time numbers of the score function."""

    scale: float
    softcap: float
    keep_scale: float
    drop_below: int


# From this scale on, one multiply-add per score is not exact enough: from scores of 1.5e9 on, the rounding error of the
# product passes 128, and 2 to that power overflows. The slower EXACT path subtracts the maximum first.
LARGE_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Traits:
    """Compile-time facts of a problem.

    BLOCK_D and BLOCK_DV are the head dims padded to what the matrix units take. TRANSFORMED: scores are more than scale
    * q.k, so they are kept in natural units instead of log2 units. A scale of 0 or less counts as that, because the
    fast path masks and takes the maximum before it scales. EXACT: plain scores may be so large that the maximum must be
    subtracted before scaling, which gives an exact 0 for the largest.

    FP8: K and V are e4m3 (see quantised.py), multiplied in fp16 if HALF, else in fp32. FP8_Q: q is e4m3 too.
    *_SHARED_ROWS rows share a scale, 0 means all rows of a head. E4M3_INSTRUCTION: the device has a conversion
    instruction.
    """

    PACKED_Q: bool
    PACKED_K: bool
    PAGED: bool
    PAGE_SIZE: int
    GROUP_SIZE: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int
    BLOCK_DV: int
    TRANSFORMED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_BIAS: bool
    HAS_MASK: bool
    HAS_ALIBI: bool
    HAS_SOFTCAP: bool
    HAS_SINKS: bool
    HAS_DROPOUT: bool
    DROPOUT_ORIGIN: bool
    PRECISION: str
    INTERPRETED: bool
    EXACT: bool = False
    FP8: bool = False
    FP8_Q: bool = False
    HALF: bool = False
    Q_SHARED_ROWS: int = 0
    K_SHARED_ROWS: int = 0
    V_SHARED_ROWS: int = 0
    E4M3_INSTRUCTION: bool = False


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
        FP8_Q="q" in problem.fp8,
        HALF=bool(problem.fp8) and problem.dtype != torch.float32,
        Q_SHARED_ROWS=q_rows,
        K_SHARED_ROWS=k_rows,
        V_SHARED_ROWS=v_rows,
        E4M3_INSTRUCTION=bool(problem.fp8) and device.has_fp8,
    )


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


def of_rows(traits: Traits) -> Traits:
    """The traits for kernels that see only rows of out and their statistics: fewer variants to compile."""
    return replace(
        traits,
        PACKED_K=False,
        PAGED=False,
        PAGE_SIZE=0,
        GROUP_SIZE=1,
        HEAD_DIM=traits.HEAD_DIM_V,
        BLOCK_D=traits.BLOCK_DV,
        HAS_LEFT=False,
        HAS_RIGHT=False,
        HAS_BIAS=False,
        HAS_MASK=False,
        HAS_ALIBI=False,
        HAS_SOFTCAP=False,
        HAS_SINKS=False,
        HAS_DROPOUT=False,
        DROPOUT_ORIGIN=False,
        EXACT=False,
        FP8=False,
        FP8_Q=False,
        HALF=False,
        Q_SHARED_ROWS=0,
        K_SHARED_ROWS=0,
        V_SHARED_ROWS=0,
        E4M3_INSTRUCTION=False,
    )


def element_size(problem: AttentionProblem) -> int:
    """Bytes of an element of K and V in a tile. e4m3 that is multiplied in fp32 counts as fp32."""
    return 1 if problem.fp8 and problem.dtype != torch.float32 else problem.dtype.itemsize


def is_rich(problem: AttentionProblem, direction: str) -> bool:
    """Whether a tile holds more than K, V and plain scores, and must be smaller: bias, mask, dropout bits, softcap.

    In the backward a pointer for each row of small pages counts too. The forward looks pages up one tile ahead and
    keeps the larger tile, which is faster.
    """
    extras = (problem.bias_shape, problem.mask_shape, problem.softcap)
    small_pages = direction != "forward" and problem.page_size is not None and problem.page_size % LARGEST_TILE != 0
    return problem.dropout > 0.0 or small_pages or any(extra is not None for extra in extras)
