"""Which rank holds which tokens: a sequence is cut into equal chunks; each rank holds one (contiguous) or two (zigzag).

Zigzag gives rank r the chunks r and 2 * world - 1 - r, an early and a late one, so that every rank has the same causal
work. Every shard has the same number of rows, so that all exchanges have one size; the last chunks may be padding.

    >>> [[(c.start, c.stop) for c in shard_of(rank, 2, 4, 7, "zigzag")] for rank in range(2)]
    [[(0, 2), (6, 7)], [(2, 4), (4, 6)]]
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import settings, validation
from tilewise.distributed.agreement import agree, refuse
from tilewise.distributed.transport import MeshOrGroup, all_gather, group_of
from tilewise.errors import InvalidProblem, TilewiseError
from tilewise.memory import check_allocated
from tilewise.totals import check_totals
from tilewise.units import counted

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


def chunk_size(seqlen: int, world: int, sharding: str) -> int:
    """Rows of a chunk that `shard` makes: the fewest that hold the sequence."""
    return -(-seqlen // (world * chunks_per_rank(sharding) * ROWS_MULTIPLE)) * ROWS_MULTIPLE


def shard(
    tensor: Tensor,
    mesh_or_group: MeshOrGroup = None,
    *,
    dim: int = 2,
    sharding: Sharding = "zigzag",
    pad: float | None = None,
) -> Tensor:
    """This rank's part of a tensor that every rank has whole, cut along `dim` into equal shards.

    `dim` is 2 for (batch, heads, seqlen, dim), 1 for layout "bshd" or token ids (batch, seqlen), 0 for packed rows.
    Shards are equal if the length is a multiple of 4 * ranks (contiguous) or 8 * ranks (zigzag). Any other length is
    refused unless `pad` names a value to fill up with, such as a token id, or the index that a loss ignores in targets.
    Differentiable: the gradient is this rank's part, the rest is zero.
    """
    group = group_of(mesh_or_group)
    dim = _checked_dim(tensor, dim, sharding)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    seqlen = tensor.shape[dim]
    size = chunk_size(seqlen, world, sharding)
    if pad is None and (shards := world * chunks_per_rank(sharding)) * size != seqlen:
        expected = f"a multiple of {shards * ROWS_MULTIPLE} along dim {dim}, for equal {sharding} shards"
        fix = (
            "Name a value to pad with (pad=0 for token ids, the loss's ignored index for targets), and pass "
            f"seqlen={seqlen} to context_parallel_attention and unshard."
        )
        raise InvalidProblem("tensor", f"{expected} on {counted(world, 'rank')}", seqlen, fix)
    if pad is not None and not isinstance(pad, (int, float) if tensor.is_floating_point() else int):
        raise InvalidProblem("pad", f"None or a number that {tensor.dtype} holds", repr(pad), "It fills up shards.")
    parts = []
    for chunk in _chunks_of(rank, world, sharding):
        start, stop = (min(at * size, seqlen) for at in (chunk, chunk + 1))
        part = tensor.narrow(dim, start, stop - start)
        parts.append(part)
        if pad is not None and size > stop - start:
            parts.append(part.new_full([*part.shape[:dim], size - (stop - start), *part.shape[dim + 1 :]], pad))
    return torch.cat(parts, dim)


def unshard(
    tensor: Tensor, mesh_or_group: MeshOrGroup = None, *, dim: int = 2, seqlen: int, sharding: Sharding = "zigzag"
) -> Tensor:
    """The whole tensor on every rank, from the shards of all: the inverse of `shard`. Not differentiable.

    `seqlen` is the length of the whole sequence; rows of padding behind it are left out. Raises if shapes or arguments
    differ between ranks.
    """
    group = group_of(mesh_or_group)
    world = dist.get_world_size(group)
    try:
        dim = _checked_dim(tensor, dim, sharding)
        _check_rows("tensor", tensor.shape[dim], sharding)
        most = world * tensor.shape[dim]
        if not is_count(seqlen) or seqlen > most:
            fix = "Pass the length that the tensor had before `shard`."
            raise InvalidProblem("seqlen", f"an integer from 0 to {most}, the rows of all ranks", repr(seqlen), fix)
    except TilewiseError as error:
        refuse(error, group, getattr(tensor, "device", torch.device("cpu")))
    about = {"call": "unshard", "tensor": in_words(tensor), "dim": dim, "seqlen": seqlen, "sharding": sharding}
    agree(tuple((name, str(value)) for name, value in about.items()), group, tensor.device)
    parts = all_gather(tensor.detach().contiguous(), group).view(world, *tensor.shape).unbind(0)
    return in_order(torch.cat(parts, dim), dim, world, sharding).narrow(dim, 0, seqlen)


def position_ids(
    rows: int,
    mesh_or_group: MeshOrGroup = None,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of this rank's `rows` rows in the sequence, int64; for rotary embeddings and the like.

    `rows` is the length of this rank's shard. With the documents' `cu_seqlens`, the position within the document. Rows
    of padding continue the count.
    """
    group = group_of(mesh_or_group)
    _check_sharding(sharding)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    _check_rows("rows", rows, sharding)
    size, chunks = rows // chunks_per_rank(sharding), _chunks_of(rank, world, sharding)
    positions = torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device or "cpu") for chunk in chunks])
    if cu_seqlens is None:
        return positions
    check_documents(cu_seqlens)
    if cu_seqlens.device.type == "cpu" or settings.current().check_values:
        check_totals("cu_seqlens", cu_seqlens.tolist(), world * rows)
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


def in_words(tensor: Tensor | None) -> str:
    """Dtype and shape, for messages."""
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def check_documents(cu_seqlens: Tensor) -> None:
    """Raise unless it can hold running totals; their values are not read."""
    validation.require_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or not len(cu_seqlens):
        fix = "Pass the running totals of the lengths of all documents, from 0 on, the same on every rank."
        expected = "an int32 or int64 tensor of shape (documents + 1,)"
        raise InvalidProblem("cu_seqlens", expected, in_words(cu_seqlens), fix)


def is_count(length: Any) -> bool:
    """Whether something is an integer from 0 on."""
    return isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool) and length >= 0


def _check_sharding(sharding: str) -> None:
    if sharding not in ("zigzag", "contiguous"):
        raise InvalidProblem("sharding", "'zigzag' or 'contiguous'", repr(sharding), "zigzag balances causal work.")


def _check_rows(name: str, rows: int, sharding: str) -> None:
    if rows % chunks_per_rank(sharding):
        expected, fix = "an even number of rows in zigzag shards", "Pad the shard, as `shard` does."
        raise InvalidProblem(name, expected, rows, fix)


def _checked_dim(tensor: Tensor, dim: int, sharding: str) -> int:
    validation.require_tensors(tensor=tensor)
    check_allocated(("tensor",), (tensor,))
    _check_sharding(sharding)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidProblem(
            "dim", f"a dimension of the tensor {tuple(tensor.shape)}", dim, "Name the token dimension."
        )
    return dim % tensor.dim()
