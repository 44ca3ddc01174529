"""FlashAttention in forty lines, twice: one head, plain torch, for reading.

Both walk over tiles of the score matrix, keep a running maximum and sum per row (the online softmax), and never hold
more than one tile of scores. They differ in which loop is outside:

    FA-1  for each tile of K, V:  for each tile of Q:   O, m, l are read and written back once per pair of tiles
    FA-2  for each tile of Q:     for each tile of K:   they stay put, and O is divided by l once at the end

q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v) -> out (seqlen_q, head_dim_v), lse (seqlen_q,).
`band` says which keys a query sees; tiles it sees nothing of are never touched, and a row that sees no key gives 0.

    >>> q = k = v = torch.ones(4, 8)
    >>> out, lse = fa2(q, k, v, band=Band(4, 4, right=0))     # causal
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.masks import Band, Tile, TileGrid, TileKind

DEFAULT_GRID = TileGrid(128, 128)


def fa1(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, grid: TileGrid = DEFAULT_GRID, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """K/V outside: every tile of K and V is loaded once, and the state of every row once per tile."""
    out = accumulator(q, band.seqlen_q, v.shape[1])
    row_max = accumulator(q, band.seqlen_q).fill_(-math.inf)
    row_sum = accumulator(q, band.seqlen_q)
    for n_block in range(-(-band.seqlen_k // grid.block_n)):
        n = slice(n_block * grid.block_n, (n_block + 1) * grid.block_n)
        k_tile, v_tile = k[n].to(out.dtype), v[n].to(out.dtype)

        for tile in band.query_tiles(n_block, grid):
            m = slice(tile.m_block * grid.block_m, (tile.m_block + 1) * grid.block_m)
            s = scores(q[m].to(out.dtype), k_tile, scale, band, tile, grid)

            new_max = torch.maximum(row_max[m], s.amax(1))
            p = torch.exp(s - finite(new_max)[:, None])
            alpha = torch.exp(row_max[m] - finite(new_max))
            new_sum = alpha * row_sum[m] + p.sum(1)
            # O is kept normalised, so each step undoes the old division and does the new one.
            weighted = (alpha * row_sum[m])[:, None] * out[m] + p @ v_tile
            out[m] = weighted / nonzero(new_sum)[:, None]
            row_max[m], row_sum[m] = new_max, new_sum

    return out.to(q.dtype), row_max + torch.log(row_sum)


def fa2(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, grid: TileGrid = DEFAULT_GRID, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Q outside: the state of a tile of rows stays in fast memory, and its output is normalised and written once."""
    out = q.new_empty(band.seqlen_q, v.shape[1])
    lse = accumulator(q, band.seqlen_q)
    for m_block in range(-(-band.seqlen_q // grid.block_m)):
        m = slice(m_block * grid.block_m, (m_block + 1) * grid.block_m)
        q_tile = q[m].to(lse.dtype)
        acc = accumulator(q, len(q_tile), v.shape[1])
        row_max = accumulator(q, len(q_tile)).fill_(-math.inf)
        row_sum = accumulator(q, len(q_tile))

        for tile in band.key_tiles(m_block, grid):
            n = slice(tile.n_block * grid.block_n, (tile.n_block + 1) * grid.block_n)
            s = scores(q_tile, k[n].to(acc.dtype), scale, band, tile, grid)

            new_max = torch.maximum(row_max, s.amax(1))
            p = torch.exp(s - finite(new_max)[:, None])
            alpha = torch.exp(row_max - finite(new_max))
            row_sum = alpha * row_sum + p.sum(1)
            acc = alpha[:, None] * acc + p @ v[n].to(acc.dtype)
            row_max = new_max

        out[m] = (acc / nonzero(row_sum)[:, None]).to(out.dtype)
        lse[m] = row_max + torch.log(row_sum)
    return out, lse


def scores(q_tile: Tensor, k_tile: Tensor, scale: float | None, band: Band, tile: Tile, grid: TileGrid) -> Tensor:
    """One tile of scores; only a partial tile is masked, element by element."""
    s = q_tile @ k_tile.T * (1.0 / math.sqrt(q_tile.shape[1]) if scale is None else scale)
    if tile.kind is TileKind.FULL:
        return s
    m_idx = tile.m_block * grid.block_m + torch.arange(s.shape[0], device=s.device)[:, None]
    n_idx = tile.n_block * grid.block_n + torch.arange(s.shape[1], device=s.device)[None, :]
    distance = n_idx - (m_idx + band.offset)
    hidden = torch.zeros_like(s, dtype=torch.bool)
    if band.left is not None:
        hidden |= distance < -band.left
    if band.right is not None:
        hidden |= distance > band.right
    return s.masked_fill(hidden, -math.inf)


def accumulator(like: Tensor, *shape: int) -> Tensor:
    """Zeros in the dtype softmax and sums are computed in."""
    return like.new_zeros(shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


def finite(row_max: Tensor) -> Tensor:
    """A row that has seen no key yet has maximum -inf; subtracting 0 instead keeps exp(-inf - ...) at 0, not NaN."""
    return torch.where(row_max == -math.inf, 0.0, row_max)


def nonzero(row_sum: Tensor) -> Tensor:
    """A row that saw no key has sum 0 and output 0: divide by 1."""
    return torch.where(row_sum == 0.0, 1.0, row_sum)
