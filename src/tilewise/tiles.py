"""The storage of tile masks, once: tiles of 128 x 128 pairs, and one bit a pair for those that are visible in part.

A map has one int32 per tile of 128 queries and 128 keys: EMPTY, FULL, or the index of the tile's bits. Bits are int32
(number, 4, 128): word [w, j] holds key j of the tile for the queries 32 w .. 32 w + 31, the first in the lowest bit.
Pairs past the lengths may have any bit: kernels hide them by the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "EMPTY",
    "FULL",
    "GROUPS_HEADER",
    "TILE",
    "WORD",
    "WORDS",
    "Sections",
    "at_once",
    "is_visible",
    "lists_of",
    "num_tiles",
    "packed",
    "sections",
    "unpacked",
    "visible",
]

TILE = 128
EMPTY, FULL = -2, -1
# Queries whose bits share a word, and words of a key.
WORD = 32
WORDS = TILE // WORD
# Words of a list of groups before its entries.
GROUPS_HEADER = 4


def num_tiles(length: int) -> int:
    """Tiles along so many queries or keys."""
    return -(-length // TILE)


class Sections(NamedTuple):
    """Where `lists_of` puts what, in words: the strides of heads, rows and columns of the first lists and where those
    of columns begin; where the lists of groups begin, and their strides of heads and rows; where the bits begin.
    """

    head: int
    row: int
    column: int
    columns: int
    groups: int
    groups_head: int
    groups_row: int
    bits: int


def sections(shape: tuple[int, int, int, int]) -> Sections:
    """The sections of the lists of a map of such a shape."""
    batch, heads, rows, columns = shape
    row, column, groups_row = 2 + 2 * columns, 2 + 2 * rows, GROUPS_HEADER + 2 * columns
    head, groups_head = rows * row + columns * column, rows * groups_row
    groups = batch * heads * head
    return Sections(
        head, row, column, rows * row, groups, groups_head, groups_row, groups + batch * heads * groups_head
    )


def at_once(device: torch.device) -> int:
    """Tiles whose pairs are evaluated or unpacked at once: 4 million pairs, or 16 million where launches take longer
    than the work.
    """
    return 256 if device.type == "cpu" else 1024


def lists_of(tiles: Tensor, bits: Tensor) -> Tensor:
    """What GPU kernels walk, in one dimension: the tiles of a map (batch, heads, rows, columns) that are not empty, for
    each sequence and head a list of each row, then of each column; then lists of rows in groups; then the bits with
    queries and keys exchanged (see `sections`). Nothing is read back from the device.

    A list is the number of its entries, a rank, then (tile, kind) of each entry in order, and is as long as if all were
    listed. The rank in list r is the row (column) with the r-th most entries. Of rows that are equal the last comes
    first and of columns the first: these are the longer ones under a causal mask.

    The lists of groups have the longest row first, and the tiles that need a mask before the others: tiles with bits,
    and the last tile of keys, which may not be whole. Such a list is the row, the number of its entries, of those with
    a mask, and 0, then (tile, kind) of each entry. Both numbers are at least 1: a row without tiles has an empty one.

    Launches take longer than the work, so pairs of words are written as numbers of 64 bits, and nothing that has the
    size of the map is sorted.
    """
    batch, heads, rows, columns = tiles.shape
    parts = sections((batch, heads, rows, columns))
    found = tiles.new_empty(parts.bits + bits.numel())
    pairs = found[: parts.bits].view(torch.int64)
    lists, groups = pairs.split((parts.groups // 2, (parts.bits - parts.groups) // 2))
    by_head = lists.view(batch, heads, parts.head // 2)
    by_row = by_head[..., : parts.columns // 2].unflatten(-1, (rows, parts.row // 2))
    by_column = by_head[..., parts.columns // 2 :].unflatten(-1, (columns, parts.column // 2))
    # Of a square map the two directions have the same numbers.
    places = torch.arange(max(rows, columns), dtype=torch.int64, device=tiles.device)
    high = tiles.to(torch.int64) << WORD
    listed = tiles != EMPTY
    for kinds, entries, is_row in ((listed, by_row, True), (listed.transpose(2, 3), by_column, False)):
        number, length = kinds.shape[2:]
        at, line = places[:length], places[:number]
        upto = kinds.cumsum(-1)
        counts = upto[..., -1] if length else upto.sum(-1)
        # Of the entries that are not listed each has a place too, after the others.
        after = counts[..., None] + at - upto
        values = high + at if is_row else high.transpose(2, 3) + at
        entries[..., 1:].scatter_(-1, torch.where(kinds, upto - 1, after), values)
        tie = line if is_row else number - 1 - line
        ranked = (counts * number + tie).argsort(dim=-1, descending=True)
        entries[..., 0] = counts + (ranked << WORD)
        if is_row and tiles.numel():
            _put_groups(groups.view(batch, heads, rows, -1), tiles, kinds, upto, after, values, ranked)
    offset = parts.bits
    for some in bits.split(at_once(bits.device)) if len(bits) else ():
        found[offset : offset + some.numel()].view(some.shape).copy_(_turned(some).reshape(some.shape))
        offset += some.numel()
    return found


def _put_groups(
    groups: Tensor, tiles: Tensor, listed: Tensor, upto: Tensor, after: Tensor, values: Tensor, ranked: Tensor
) -> None:
    """Write the lists of groups (see lists_of). `upto` counts the listed tiles up to each, `after` are the places of
    those that are not listed.
    """
    masked = tiles >= 0
    masked[..., -1] |= listed[..., -1]
    masked_upto = masked.cumsum(-1)
    counts = masked_upto[..., -1:]
    # Listed tiles without a mask follow those with one.
    unmasked = counts + upto - masked_upto
    at = torch.where(masked, masked_upto, torch.where(listed, unmasked, after + 1)) - 1
    ordered = torch.empty_like(groups)
    ordered[..., 2:].scatter_(-1, at, values)
    ordered[..., 0] = upto[..., -1].clamp_min(1) << WORD
    ordered[..., 1] = counts[..., 0].clamp_min(1)
    groups.copy_(ordered.gather(2, ranked[..., None].expand(groups.shape)))
    groups[..., 0] += ranked


def _turned(bits: Tensor) -> Tensor:
    """Bits of tiles with queries and keys exchanged: word [w, i] holds query i for the keys 32 w .. 32 w + 31."""
    places = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    # (number, words of queries, words of keys, queries, keys)
    pairs = (bits.view(-1, WORDS, WORDS, 1, WORD) >> places[:, None]) & 1
    # The sum of different powers of two: the highest is negative, which is its bit.
    return (pairs << places).sum(-1, dtype=torch.int32).transpose(1, 2)


def packed(pairs: Tensor) -> Tensor:
    """The bits of boolean tiles (number, 128, 128)."""
    if pairs.device.type == "cpu":
        octets = np.packbits(pairs.numpy().reshape(-1, WORDS, WORD, TILE), axis=2, bitorder="little")
        words = np.ascontiguousarray(octets.transpose(0, 1, 3, 2)).view("<i4").astype(np.int32)
        return torch.from_numpy(words[..., 0])
    places = torch.arange(WORD, dtype=torch.int32, device=pairs.device)[:, None]
    # The sum of different powers of two: the highest is negative, which is its bit.
    return (pairs.reshape(-1, WORDS, WORD, TILE).to(torch.int32) << places).sum(2, dtype=torch.int32)


def unpacked(bits: Tensor) -> Tensor:
    """The boolean tiles (number, 128, 128) of bits."""
    places = torch.arange(WORD, dtype=torch.int32, device=bits.device)[:, None]
    return ((bits[:, :, None, :] >> places) & 1).bool().view(-1, TILE, TILE)


def visible(tiles: Tensor, bits: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dense mask (..., seqlen_q, seqlen_k) of a map (..., tiles of queries, tiles of keys)."""
    *some, rows, cols = tiles.shape
    pairs = (tiles == FULL)[..., None, None].expand(*tiles.shape, TILE, TILE).clone()
    partial = tiles >= 0
    pairs[partial] = unpacked(bits[tiles[partial].long()])
    whole = pairs.transpose(-3, -2).reshape(*some, rows * TILE, cols * TILE)
    return whole[..., :seqlen_q, :seqlen_k]


def is_visible(tiles: Tensor, bits: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i sees key j, of index tensors that broadcast; the map is (batch, heads, rows, columns)."""
    kinds = tiles[b, h, i // TILE, j // TILE]
    if len(bits) == 0:
        return kinds == FULL
    words = bits[kinds.clamp_min(0).long(), i % TILE // WORD, j % TILE]
    return (kinds == FULL) | ((kinds >= 0) & ((words >> (i % WORD).int()) & 1).bool())
