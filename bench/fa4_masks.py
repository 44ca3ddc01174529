"""Tile masks by FlashAttention 4 (flash_attn.cute): its lists of blocks, and mask functions that it compiles in.

Imported only where that package is. A mask function gets one pair at a time, as vectors of one element, and tensors of
the caller. It is asked in partial blocks only.
"""

# Device code of another package, which has no types here.
# mypy: disable-error-code="import-not-found,no-any-return,no-untyped-def,untyped-decorator"
# ruff: noqa: ARG001

from collections.abc import Callable

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, flash_attn_func
from torch import Tensor

from tilewise.tiles import FULL, TILE


@cute.jit
def in_range(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Query i sees the keys aux_tensors[0][i] .. aux_tensors[1][i] - 1."""
    start = utils.scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
    end = utils.scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
    return (n_idx >= start) & (n_idx < end)


def near(width: int, window: int) -> Callable[..., object]:
    """On a grid with rows of `width`: query i sees `window` rows and columns from aux_tensors[0][i] and [1][i] on."""

    @cute.jit
    def in_square(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        columns = utils.scalar_to_ssa(width, cutlass.Int32)
        size = utils.scalar_to_ssa(window, cutlass.Int32)
        top = utils.scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
        left = utils.scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
        row = n_idx // columns
        column = n_idx % columns
        return (row >= top) & (row < top + size) & (column >= left) & (column < left + size)

    return in_square


def thirds(first: int) -> Callable[..., object]:
    """Keys whose index modulo 3 is `first` or more."""

    @cute.jit
    def in_thirds(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        three = utils.scalar_to_ssa(3, cutlass.Int32)
        return n_idx % three >= utils.scalar_to_ssa(first, cutlass.Int32)

    return in_thirds


def blocks(tiles: Tensor) -> BlockSparseTensorsTorch:
    """The lists of a map (batch or 1, heads or 1, rows, columns): of each row, partial blocks and full ones."""
    lists = []
    for listed in (tiles >= 0, tiles == FULL):
        order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        lists += [listed.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()]
    return BlockSparseTensorsTorch(*lists, block_size=(TILE, TILE))


class Attention:
    """The passes for a map of tiles and a function of pairs; tensors and results have heads first. The backward is the
    one that autograd calls, without a forward before it, which would be compiled too.
    """

    def __init__(self, tiles: Tensor, seen: Callable[..., object], tensors: tuple[Tensor, ...]) -> None:
        self.by_rows, self.by_columns = blocks(tiles), blocks(tiles.transpose(2, 3))
        given = [t.to(torch.int32).contiguous() for t in tensors] or None
        self.flags = {"mask_mod": seen, "aux_tensors": given}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output."""
        inputs = (t.transpose(1, 2) for t in (q, k, v))
        found = flash_attn_func(*inputs, block_sparse_tensors=self.by_rows, **self.flags)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv."""
        inputs = (t.transpose(1, 2) for t in (q, k, v, out, dout))
        found = _flash_attn_bwd(*inputs, lse, block_sparse_tensors=self.by_columns, **self.flags)
        dq, dk, dv = (t.transpose(1, 2) for t in found)
        return dq, dk, dv
