"""Which rank holds which tokens: a sequence is cut into equal chunks; each rank holds one (contiguous) or two (zigzag).

Zigzag gives rank r the chunks r and 2 * world - 1 - r, an early and a late one, so that every rank has the same causal
work. The last chunks may be padding: every shard has the same number of rows, so that all exchanges have one size.

    >>> [[(c.start, c.stop) for c in shard_of(rank, 2, 4, 7, "zigzag")] for rank in range(2)]
    [[(0, 2), (6, 7)], [(2, 4), (4, 6)]]
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.transport import MeshOrGroup, all_gather, group_of
from tilewise.errors import InvalidProblem
from tilewise.subclasses import check_class

Sharding = Literal["zigzag", "contiguous"]

# Chunks made by `shard` are multiples of four rows, because one Philox draw serves four keys.
ROWS_MULTIPLE = 4


class Chunk(NamedTuple):
    """Tokens start .. stop-1 of the sequence, from row `row` of a shard on, without padding."""

    start: int
    stop: int
    row: int


Shard = tuple[Chunk, ...]


def chunks_per_rank(sharding: str) -> int:
    """Chunks in a shard."""
    return 2 if sharding == "zigzag" else 1


def chunk_order(world: int, sharding: str) -> list[int]:
    """The chunks of all ranks, in the order of the concatenated shards."""
    if sharding == "contiguous":
        return list(range(world))
    return [chunk for rank in range(world) for chunk in (rank, 2 * world - 1 - rank)]


def _chunks_of(rank: int, world: int, sharding: str) -> list[int]:
    count = chunks_per_rank(sharding)
    return chunk_order(world, sharding)[rank * count : (rank + 1) * count]


def shard_of(rank: int, world: int, rows: int, seqlen: int, sharding: str) -> Shard:
    """A rank's part of a sequence of `seqlen` tokens in shards of `rows` rows. A chunk of padding is left out."""
    size = rows // chunks_per_rank(sharding)
    return tuple(
        Chunk(chunk * size, min(chunk * size + size, seqlen), index * size)
        for index, chunk in enumerate(_chunks_of(rank, world, sharding))
        if chunk * size < seqlen
    )


def shard(tensor: Tensor, mesh_or_group: MeshOrGroup = None, *, dim: int = 2, sharding: Sharding = "zigzag") -> Tensor:
    """This rank's part of a tensor that every rank has whole, cut along `dim` and padded with zeros to equal shards.

    `dim` is 2 for (batch, heads, seqlen, dim), 1 for layout "bshd" or token ids (batch, seqlen), 0 for packed rows.
    Differentiable: the gradient is this rank's part, the rest is zero.
    """
    group = group_of(mesh_or_group)
    dim = _checked_dim(tensor, dim, sharding)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    seqlen = tensor.shape[dim]
    size = -(-seqlen // (world * chunks_per_rank(sharding) * ROWS_MULTIPLE)) * ROWS_MULTIPLE
    parts = []
    for chunk in _chunks_of(rank, world, sharding):
        start, stop = (min(at * size, seqlen) for at in (chunk, chunk + 1))
        part = tensor.narrow(dim, start, stop - start)
        missing = part.new_zeros([*part.shape[:dim], size - part.shape[dim], *part.shape[dim + 1 :]])
        parts += [part, missing] if missing.shape[dim] else [part]
    return torch.cat(parts, dim)


def unshard(
    tensor: Tensor,
    mesh_or_group: MeshOrGroup = None,
    *,
    dim: int = 2,
    seqlen: int | None = None,
    sharding: Sharding = "zigzag",
) -> Tensor:
    """The whole tensor on every rank, from the shards of all: the inverse of `shard`. Not differentiable.

    `seqlen` is the length without padding; None keeps every row.
    """
    group = group_of(mesh_or_group)
    dim = _checked_dim(tensor, dim, sharding)
    _check_rows("tensor", tensor.shape[dim], sharding)
    world = dist.get_world_size(group)
    parts = all_gather(tensor.detach().contiguous(), group).view(world, *tensor.shape).unbind(0)
    whole = in_order(torch.cat(parts, dim), dim, world, sharding)
    return whole if seqlen is None else whole.narrow(dim, 0, seqlen)


def position_ids(
    rows: int,
    mesh_or_group: MeshOrGroup = None,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of this rank's `rows` rows in the sequence, int64; for rotary embeddings and the like.

    With the documents' `cu_seqlens`, the position within the document. Rows of padding continue the count.
    """
    group = group_of(mesh_or_group)
    _check_sharding(sharding)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    _check_rows("rows", rows, sharding)
    size, chunks = rows // chunks_per_rank(sharding), _chunks_of(rank, world, sharding)
    positions = torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device or "cpu") for chunk in chunks])
    if cu_seqlens is None:
        return positions
    borders = cu_seqlens.to(device=positions.device, dtype=torch.int64)
    document = torch.searchsorted(borders, positions, right=True) - 1
    return positions - borders[document]


def in_order(tensor: Tensor, dim: int, world: int, sharding: str) -> Tensor:
    """Concatenated shards along `dim`, as one sequence."""
    if sharding == "contiguous" or world == 1:
        return tensor
    pieces = tensor.chunk(2 * world, dim)
    order = chunk_order(world, sharding)
    return torch.cat([pieces[order.index(chunk)] for chunk in range(2 * world)], dim)


def as_shards(tensor: Tensor, dim: int, world: int, sharding: str) -> Tensor:
    """One sequence, as concatenated shards along `dim`: the inverse of `in_order`."""
    if sharding == "contiguous" or world == 1:
        return tensor
    pieces = tensor.chunk(2 * world, dim)
    return torch.cat([pieces[chunk] for chunk in chunk_order(world, sharding)], dim)


def _check_sharding(sharding: str) -> None:
    if sharding not in ("zigzag", "contiguous"):
        raise InvalidProblem("sharding", "'zigzag' or 'contiguous'", repr(sharding), "zigzag balances causal work.")


def _check_rows(name: str, rows: int, sharding: str) -> None:
    if rows % chunks_per_rank(sharding):
        expected, fix = "an even number of rows in zigzag shards", "Pad the shard, as `shard` does."
        raise InvalidProblem(name, expected, rows, fix)


def _checked_dim(tensor: Tensor, dim: int, sharding: str) -> int:
    check_class("tensor", tensor)
    _check_sharding(sharding)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidProblem(
            "dim", f"a dimension of the tensor {tuple(tensor.shape)}", dim, "Name the token dimension."
        )
    return dim % tensor.dim()
