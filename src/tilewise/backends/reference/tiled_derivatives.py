"""Tangents and second derivatives tile by tile: one head, plain torch, for reading. The companion of tiled.py.

    tangent          for each tile of Q:  for each tile of K:  the online softmax, with S' next to S
    second_gradient  for each tile of K:  for each tile of Q:  P from lse, then the gradients of sum(dout * out')

A prime is a derivative along the tangents q', k', v'. Neither holds more than a few tiles of scores, so memory is
linear in the sequence lengths. docs/derivatives.md derives the formulas; kernels compute the same with every feature.

    >>> q = k = v = torch.ones(4, 8)
    >>> out, lse, dot_out, dot_lse = tangent((q, k, v), (q, k, v), band=Band(4, 4, right=0))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.reference.tiled import DEFAULT_GRID, accumulator, finite, nonzero, scores
from tilewise.masks import Band, TileGrid

Three = tuple[Tensor, Tensor, Tensor]


def tangent(
    operands: Three, tangents: Three, *, band: Band, grid: TileGrid = DEFAULT_GRID, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, out', lse') in one pass over the keys."""
    (q, k, v), (dot_q, dot_k, dot_v) = operands, tangents
    factor = 1.0 / math.sqrt(q.shape[1]) if scale is None else scale
    out, dot_out = q.new_empty(band.seqlen_q, v.shape[1]), q.new_empty(band.seqlen_q, v.shape[1])
    lse, dot_lse = accumulator(q, band.seqlen_q), accumulator(q, band.seqlen_q)
    for m_block in range(-(-band.seqlen_q // grid.block_m)):
        m = slice(m_block * grid.block_m, (m_block + 1) * grid.block_m)
        rows = len(q[m])
        acc, dot_acc = accumulator(q, rows, v.shape[1]), accumulator(q, rows, v.shape[1])
        row_max = accumulator(q, rows).fill_(-math.inf)
        # The sums of P and of P S'.
        row_sum, dot_sum = accumulator(q, rows), accumulator(q, rows)

        for tile in band.key_tiles(m_block, grid):
            n = slice(tile.n_block * grid.block_n, (tile.n_block + 1) * grid.block_n)
            s = scores(q[m], k[n], scale, band, tile, grid)
            dot_s = factor * (dot_q[m] @ k[n].T + q[m] @ dot_k[n].T)

            new_max = torch.maximum(row_max, s.amax(1))
            p = torch.exp(s - finite(new_max)[:, None])
            alpha = torch.exp(row_max - finite(new_max))
            row_sum = alpha * row_sum + p.sum(1)
            dot_sum = alpha * dot_sum + (p * dot_s).sum(1)
            acc = alpha[:, None] * acc + p @ v[n]
            dot_acc = alpha[:, None] * dot_acc + (p * dot_s) @ v[n] + p @ dot_v[n]
            row_max = new_max

        out[m] = acc / nonzero(row_sum)[:, None]
        lse[m] = row_max + torch.log(row_sum)
        # lse' = sum of P S' once P is divided by its sum, and it is subtracted from every S'.
        dot_lse[m] = dot_sum / nonzero(row_sum)
        dot_out[m] = dot_acc / nonzero(row_sum)[:, None] - dot_lse[m][:, None] * out[m]
    return out, lse, dot_out, dot_lse


def second_gradient(
    operands: Three,
    tangents: Three,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor],
    *,
    band: Band,
    grid: TileGrid = DEFAULT_GRID,
    scale: float | None = None,
) -> Three:
    """The gradients of sum(out' * dout) + sum(lse' * dlse) with respect to q, k and v; `results` are `tangent`'s."""
    (q, k, v), (dot_q, dot_k, dot_v) = operands, tangents
    (out, lse, dot_out, dot_lse), (dout, dlse) = results, cotangents
    factor = 1.0 / math.sqrt(q.shape[1]) if scale is None else scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Two numbers a row: what the softmax subtracts from X and, along the tangents, from Y.
    delta, rate = (dout * out).sum(1) - dlse, (dout * dot_out).sum(1)
    for n_block in range(-(-band.seqlen_k // grid.block_n)):
        n = slice(n_block * grid.block_n, (n_block + 1) * grid.block_n)
        for tile in band.query_tiles(n_block, grid):
            m = slice(tile.m_block * grid.block_m, (tile.m_block + 1) * grid.block_m)
            p = torch.exp(scores(q[m], k[n], scale, band, tile, grid) - finite(lse[m])[:, None])
            dot_s = factor * (dot_q[m] @ k[n].T + q[m] @ dot_k[n].T)
            x, y = dout[m] @ v[n].T, dout[m] @ dot_v[n].T

            centred = p * (dot_s - dot_lse[m][:, None])
            pull = x - delta[m][:, None]
            # The gradients with respect to S' (the ordinary dS) and to S.
            u, w = p * pull, centred * pull + p * (y - rate[m][:, None])
            dq[m] += factor * (w @ k[n] + u @ dot_k[n])
            dk[n] += factor * (w.T @ q[m] + u.T @ dot_q[m])
            dv[n] += centred.T @ dout[m]
    return dq, dk, dv
