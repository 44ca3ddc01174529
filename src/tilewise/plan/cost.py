"""The cost of attention in closed form: FLOPs, and elements moved between slow and fast memory.

Every function describes one head of one sequence; `plan` adds heads, sequences and element sizes. The model has two
levels: a fast memory that holds a few tiles and a slow one that holds everything else. What a step needs is loaded, and
what it leaves behind is stored.

    >>> naive_forward(Band(2048, 2048), 64, 64)
    Traffic(reads=8781824, writes=8519680, wide=0)
    >>> tiled_forward(Band(2048, 2048), TileGrid(128, 128), 64, 64).elements
    4456448
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.masks import Band, TileGrid


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements of the inputs' dtype that are read and written, and `wide` ones of the accumulator's dtype.

    Wide elements are the row statistics (lse, delta) and dQ while it is being summed.
    """

    reads: int = 0
    writes: int = 0
    wide: int = 0

    @property
    def elements(self) -> int:
        """Reads and writes in the inputs' dtype together."""
        return self.reads + self.writes

    def bytes(self, itemsize: int, wide_itemsize: int) -> int:
        """The same in bytes."""
        return self.elements * itemsize + self.wide * wide_itemsize

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.reads + other.reads, self.writes + other.writes, self.wide + other.wide)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.reads * times, self.writes * times, self.wide * times)


class Stream(NamedTuple):
    """One tile of queries: its rows, and the keys (and tiles of keys) that stream past them."""

    rows: int
    keys: int
    tiles: int


def streams(band: Band, grid: TileGrid) -> Iterator[Stream]:
    """One entry per tile of queries; only tiles that some query of it sees are streamed."""
    for m_start in range(0, band.seqlen_q, grid.block_m):
        rows = min(grid.block_m, band.seqlen_q - m_start)
        seen = band.keys_seen(m_start, m_start + rows)
        if not seen:
            yield Stream(rows, 0, 0)
            continue
        first, last = seen.start // grid.block_n, -(-seen.stop // grid.block_n)
        keys = min(last * grid.block_n, band.seqlen_k) - first * grid.block_n
        yield Stream(rows, keys, last - first)


def scores_computed(band: Band, grid: TileGrid) -> int:
    """Scores that tiled attention computes: every pair of a visited tile, masked or not."""
    return sum(stream.rows * stream.keys for stream in streams(band, grid))


def forward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """S = Q K^T and O = P V: 4 * pairs * head_dim where V is as wide as K."""
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """S again, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q: 2.5 times the forward where V is as wide as K."""
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def naive_backward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """dV, dP, dQ, dK on a stored P, which saves the product that the tiled backward repeats."""
    return 2 * pairs * (2 * head_dim + 2 * head_dim_v)


def naive_forward(band: Band, head_dim: int, head_dim_v: int) -> Traffic:
    """Three kernels: Q, K -> S; S -> P; P, V -> O. The score matrix crosses four times, masked or not."""
    scores = band.seqlen_q * band.seqlen_k
    reads = band.seqlen_q * head_dim + band.seqlen_k * (head_dim + head_dim_v) + 2 * scores
    return Traffic(reads=reads, writes=2 * scores + band.seqlen_q * head_dim_v)


def naive_backward(band: Band, head_dim: int, head_dim_v: int) -> Traffic:
    """Five kernels on a stored P: P, dO -> dV; dO, V -> dP; P, dP -> dS; dS, K -> dQ; dS, Q -> dK."""
    scores = band.seqlen_q * band.seqlen_k
    q_side, k_side = band.seqlen_q * (head_dim + 2 * head_dim_v), band.seqlen_k * (head_dim + head_dim_v)
    gradients = band.seqlen_q * head_dim + band.seqlen_k * (head_dim + head_dim_v)
    return Traffic(reads=5 * scores + q_side + k_side, writes=2 * scores + gradients)


def tiled_forward(band: Band, grid: TileGrid, head_dim: int, head_dim_v: int, share: float = 1.0) -> Traffic:
    """FA-2: each tile of Q is read once and its O and lse written once, while the keys it sees stream past it, or the
    `share` of them that a tile mask leaves.
    """
    keys = round(share * sum(stream.keys for stream in streams(band, grid)))
    reads = band.seqlen_q * head_dim + keys * (head_dim + head_dim_v)
    return Traffic(reads=reads, writes=band.seqlen_q * head_dim_v, wide=band.seqlen_q)


def fa1_forward(band: Band, grid: TileGrid, head_dim: int, head_dim_v: int) -> Traffic:
    """FA-1: each tile of K, V that some query sees is read once, while Q and the running O, row_max, row_sum of every
    tile of rows that sees it are read, and the state written back.
    """
    starts = range(0, band.seqlen_k, grid.block_n)
    keys = sum(
        min(grid.block_n, band.seqlen_k - start) for start in starts if band.queries_seeing(start, start + grid.block_n)
    )
    rows = sum(stream.rows * stream.tiles for stream in streams(band, grid))
    reads = (keys + rows) * (head_dim + head_dim_v)
    return Traffic(reads=reads, writes=rows * head_dim_v, wide=4 * rows)


def split_forward(band: Band, grid: TileGrid, num_splits: int, head_dim: int, head_dim_v: int) -> Traffic:
    """Split-KV: every split reads Q; with several of them their partial out and lse go to slow memory and back."""
    once = tiled_forward(band, grid, head_dim, head_dim_v)
    if num_splits == 1:
        return once
    more_q = Traffic(reads=(num_splits - 1) * band.seqlen_q * head_dim)
    return once + more_q + Traffic(wide=2 * num_splits * band.seqlen_q * (head_dim_v + 1))


def fast_memory_bytes(grid: TileGrid, head_dim: int, head_dim_v: int, itemsize: int, wide_itemsize: int) -> int:
    """Peak fast memory of FA-2: tiles of Q, K, V; and wide, O, three statistics (the new maximum too) and S."""
    tiles = grid.block_m * head_dim + grid.block_n * (head_dim + head_dim_v)
    wide = grid.block_m * (head_dim_v + 3 + grid.block_n)
    return tiles * itemsize + wide * wide_itemsize


def naive_matmul(rows: int, cols: int, inner: int) -> Traffic:
    """Each element of the product reads a row and a column."""
    return Traffic(reads=2 * rows * cols * inner, writes=rows * cols)


def tiled_matmul(rows: int, cols: int, inner: int, grid: TileGrid) -> Traffic:
    """Each tile of the product reads the rows and columns it needs once; the inner tile size does not matter."""
    row_blocks, col_blocks = -(-rows // grid.block_m), -(-cols // grid.block_n)
    return Traffic(reads=inner * (rows * col_blocks + cols * row_blocks), writes=rows * cols)


def tiled_backward(band: Band, grid: TileGrid, head_dim: int, head_dim_v: int, share: float = 1.0) -> Traffic:
    """FA-2: delta from O and dO first; then each tile of K, V is read once and its dK, dV written once, while the
    queries that see it stream past with dO, lse, delta, and their dQ is summed up in the accumulator's dtype. A tile
    mask leaves a `share` of that stream.
    """
    rows = round(share * sum(stream.rows * stream.tiles for stream in streams(band, grid)))
    k_side = band.seqlen_k * (head_dim + head_dim_v)
    delta = Traffic(reads=2 * band.seqlen_q * head_dim_v, wide=band.seqlen_q)
    loop = Traffic(reads=k_side + rows * (head_dim + head_dim_v), writes=k_side, wide=rows * (2 * head_dim + 2))
    round_dq = Traffic(writes=band.seqlen_q * head_dim, wide=band.seqlen_q * head_dim)
    return delta + loop + round_dq
