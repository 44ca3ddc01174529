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
# Words of a list of `_groups` before its entries.
GROUPS_HEADER = 4


def num_tiles(length: int) -> int:
    """Tiles along so many queries or keys."""
    return -(-length // TILE)


class Sections(NamedTuple):
    """Where `lists_of` puts what, in words: the strides of heads, rows and columns of the first lists and where those
    of columns begin; where the lists of `_groups` begin, and their strides of heads and rows; where the bits begin.
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
    each sequence and head a list of each row, then of each column; then the lists of `_groups`; then the bits with
    queries and keys exchanged (see `sections`). Nothing is read back from the device.

    A list is the number of its entries, a rank, then (tile, kind) of each entry in order, and is as long as if all were
    listed. The rank in list r is the row (column) with the r-th most entries. Of rows that are equal the last comes
    first and of columns the first: these are the longer ones under a causal mask.
    """
    parts = []
    for kinds, last_first in ((tiles, True), (tiles.transpose(2, 3), False)):
        listed = kinds != EMPTY
        order = (~listed).to(torch.int8).argsort(dim=-1, stable=True)
        counts = listed.sum(-1, dtype=torch.int32)
        ranked = (counts.flip(-1) if last_first else counts).argsort(dim=-1, descending=True, stable=True)
        found = tiles.new_empty(*kinds.shape[:-1], 2 + 2 * kinds.shape[-1])
        found[..., 0] = counts
        found[..., 1] = kinds.shape[2] - 1 - ranked if last_first else ranked
        found[..., 2::2] = order
        found[..., 3::2] = kinds.gather(-1, order)
        parts.append(found.flatten(2))
        if last_first:
            groups = _groups(kinds, found[..., 1].long())
    turned = [_turned(some).flatten() for some in bits.split(at_once(bits.device))]
    return torch.cat([torch.cat(parts, -1).flatten(), groups.flatten(), *turned])


def _groups(kinds: Tensor, ranked: Tensor) -> Tensor:
    """Lists of rows, the longest row first, with the tiles that need a mask before the others: tiles with bits, and the
    last tile of keys, which may not be whole. A list is the row, the number of its entries, of those with a mask, and
    0, then (tile, kind) of each entry. Both numbers are at least 1: a row without tiles has an empty one.
    """
    columns = kinds.shape[-1]
    is_last = torch.arange(columns, device=kinds.device) == columns - 1
    listed = kinds != EMPTY
    masked = (kinds >= 0) | (listed & is_last)
    order = (2 - listed.to(torch.int8) - masked.to(torch.int8)).argsort(dim=-1, stable=True)
    found = kinds.new_zeros(*kinds.shape[:-1], GROUPS_HEADER + 2 * columns)
    found[..., 0] = torch.arange(kinds.shape[2], device=kinds.device)
    found[..., 1] = listed.sum(-1).clamp_min(1)
    found[..., 2] = masked.sum(-1).clamp_min(1)
    found[..., GROUPS_HEADER::2] = order
    found[..., GROUPS_HEADER + 1 :: 2] = kinds.gather(-1, order)
    return found.gather(2, ranked[..., None].expand(found.shape))


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
