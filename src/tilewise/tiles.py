"""The storage of tile masks, once: tiles of 128 x 128 pairs, and one bit a pair for those that are visible in part.

A map has one int32 per tile of 128 queries and 128 keys: EMPTY, FULL, or the index of the tile's bits. Bits are int32,
in one of two orders, which their shape tells:

    (number, 4, 128)  by keys, on a CPU: word [w, j] holds key j of the tile for the queries 32 w .. 32 w + 31
    (number, 512)     by queries, elsewhere: word 128 w + i holds query i for the keys 32 w .. 32 w + 31

The first query or key is in the lowest bit. Pairs past the lengths may have any bit: kernels hide them by the lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidProblem

TILE = 128
EMPTY, FULL = -2, -1
# Queries whose bits share a word, and words of a key.
WORD = 32
WORDS = TILE // WORD
# The bits 56, 49, ... 7: see _packed_by_queries.
GATHER = 0x0102040810204080
# Words of a list of groups before its entries.
GROUPS_HEADER = 4


def num_tiles(length: int) -> int:
    """Tiles along so many queries or keys."""
    return -(-length // TILE)


class Sections(NamedTuple):
    """Where `lists_of` puts what, in words: the strides of heads, rows and columns of the first lists and where those
    of columns begin; where the lists of groups begin, those of rows and those of columns, each with the strides of
    heads and of lists; all words.
    """

    head: int
    row: int
    column: int
    columns: int
    groups: int
    groups_head: int
    groups_row: int
    column_groups: int
    column_groups_head: int
    column_groups_column: int
    words: int


def sections(shape: tuple[int, int, int, int]) -> Sections:
    """The sections of the lists of a map of such a shape."""
    batch, heads, rows, columns = shape
    row, column = 2 + 2 * columns, 2 + 2 * rows
    groups_row, groups_column = GROUPS_HEADER + 2 * columns, GROUPS_HEADER + 2 * rows
    head, groups_head, column_groups_head = rows * row + columns * column, rows * groups_row, columns * groups_column
    groups = batch * heads * head
    column_groups = groups + batch * heads * groups_head
    return Sections(
        head=head,
        row=row,
        column=column,
        columns=rows * row,
        groups=groups,
        groups_head=groups_head,
        groups_row=groups_row,
        column_groups=column_groups,
        column_groups_head=column_groups_head,
        column_groups_column=groups_column,
        words=column_groups + batch * heads * column_groups_head,
    )


def at_once(device: torch.device) -> int:
    """Tiles whose pairs are evaluated or unpacked at once: 4 million pairs, or 16 million where launches take longer
    than the work.
    """
    return 256 if device.type == "cpu" else 1024


def lists_of(tiles: Tensor) -> Tensor:
    """What GPU kernels walk, in one dimension: the tiles of a map (batch, heads, rows, columns) that are not empty, for
    each sequence and head a list of each row, then of each column; then lists of rows in groups, and of columns (see
    `sections`). Nothing is read back from the device.

    A list is the number of its entries, a rank, then (tile, kind) of each entry in order, and is as long as if all were
    listed. The rank in list r is the row (column) with the r-th most entries. Of rows that are equal the last comes
    first and of columns the first: these are the longer ones under a causal mask.

    The lists of groups have the longest row first, and the tiles that need a mask before the others: tiles with bits,
    and the last tile of keys, which may not be whole. Such a list is the row, the number of its entries, of those with
    a mask, and 0, then (tile, kind) of each entry. A row without tiles has an empty one
    past the last, with a mask.
    Those of columns are in the order of the columns and have a rank instead of the row; only tiles with bits are
    masked, and a column may have none.

    Launches take longer than the work, so pairs of words are written as numbers of 64 bits, and nothing that has the
    size of the map is sorted.
    """
    batch, heads, rows, columns = tiles.shape
    parts = sections((batch, heads, rows, columns))
    found = tiles.new_empty(parts.words)
    if tiles.numel() == 0:  # lists without entries; every row or column has a rank all the same
        lines = torch.arange(max(rows, columns), dtype=torch.int32, device=tiles.device)
        found.zero_()[: parts.groups].view(batch, heads, len(lines), 2)[..., 1] = lines
        found[parts.groups :].view(batch, heads, len(lines), GROUPS_HEADER)[..., 0] = lines
        return found
    cuts = parts.groups // 2, (parts.column_groups - parts.groups) // 2, (parts.words - parts.column_groups) // 2
    lists, row_groups, column_groups = found.view(torch.int64).split(cuts)
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
        counts = upto[..., -1]
        # Of the entries that are not listed each has a place too, after the others.
        after = counts[..., None] + at - upto
        values = high + at if is_row else high.transpose(2, 3) + at
        entries[..., 1:].scatter_(-1, torch.where(kinds, upto - 1, after), values)
        tie = line if is_row else number - 1 - line
        ranked = (counts * number + tie).argsort(dim=-1, descending=True)
        entries[..., 0] = counts + (ranked << WORD)
        if is_row:
            masked = tiles >= 0
            masked[..., -1:] |= listed[..., -1:]
            grouped = row_groups.view(batch, heads, rows, parts.groups_row // 2)
            _put_groups(grouped, kinds, masked, upto, after, values)
            nothing = (counts == 0).to(torch.int64)
            grouped[..., 0] += nothing << WORD
            grouped[..., 1] += nothing
            grouped[..., 2] += nothing * columns
            grouped.copy_(grouped.gather(2, ranked[..., None].expand(grouped.shape)))
        else:
            grouped = column_groups.view(batch, heads, columns, parts.column_groups_column // 2)
            _put_groups(grouped, kinds, tiles.transpose(2, 3) >= 0, upto, after, values)
        grouped[..., 0] += ranked
    return found


def _put_groups(groups: Tensor, listed: Tensor, masked: Tensor, upto: Tensor, after: Tensor, values: Tensor) -> None:
    """Write the lists of groups (see lists_of), in order and without the first word. `upto` counts the listed tiles up
    to each, `after` are the places of those that are not listed.
    """
    masked_upto = masked.cumsum(-1)
    counts = masked_upto[..., -1]
    # Listed tiles without a mask follow those with one.
    unmasked = counts[..., None] + upto - masked_upto
    at = torch.where(masked, masked_upto, torch.where(listed, unmasked, after + 1)) - 1
    groups[..., 2:].scatter_(-1, at, values)
    groups[..., 0] = upto[..., -1] << WORD
    groups[..., 1] = counts


def no_bits(device: torch.device) -> Tensor:
    """The bits of no tile, in the order of a device."""
    return torch.zeros(
        (0, WORDS, TILE) if device.type == "cpu" else (0, WORDS * TILE), dtype=torch.int32, device=device
    )


def bits_by_keys(bits: Tensor) -> Tensor:
    """The same bits by keys."""
    return bits if bits.dim() == 3 else _reordered(bits, _packed_by_keys, (0, WORDS, TILE))


def bits_by_queries(bits: Tensor) -> Tensor:
    """The same bits by queries."""
    return bits if bits.dim() == 2 else _reordered(bits, _packed_by_queries, (0, WORDS * TILE))


def _reordered(bits: Tensor, pack: Callable[[Tensor], Tensor], nothing: tuple[int, ...]) -> Tensor:
    if len(bits) == 0:
        return bits.new_empty(nothing)
    return torch.cat([pack(unpacked(some)) for some in bits.split(at_once(bits.device))])


def unwrapped(name: str, tensor: Tensor) -> Tensor:
    """What a mask is made of, without the wrappers in which `torch.func.grad` and `jvp` put every tensor: a mask has no
    derivative. One that vmap maps has no value yet, and is refused.
    """
    if torch.compiler.is_compiling():
        return tensor
    functorch = torch._C._functorch  # noqa: SLF001
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        fix = "Make the mask before, or pass a boolean tensor as mask=."
        raise InvalidProblem(name, "what torch.vmap does not map, to make a tile mask", "a mapped tensor", fix)
    return tensor


def packed(pairs: Tensor) -> Tensor:
    """The bits of boolean tiles (number, 128, 128), in the order of their device."""
    pairs = unwrapped("mask", pairs)
    return _packed_by_keys(pairs) if pairs.device.type == "cpu" else _packed_by_queries(pairs)


def _packed_by_keys(pairs: Tensor) -> Tensor:
    # Under torch.func no tensor becomes an array.
    if pairs.device.type == "cpu" and not torch._C._are_functorch_transforms_active():  # noqa: SLF001
        octets = np.packbits(pairs.numpy().reshape(-1, WORDS, WORD, TILE), axis=2, bitorder="little")
        # torch.compile can trace this dtype, but none that names a byte order.
        words = np.ascontiguousarray(octets.transpose(0, 1, 3, 2)).view(np.int32)
        return torch.from_numpy((words if sys.byteorder == "little" else words.byteswap())[..., 0])
    places = torch.arange(WORD, dtype=torch.int32, device=pairs.device)[:, None]
    # The sum of different powers of two: the highest is negative, which is its bit.
    return (pairs.reshape(-1, WORDS, WORD, TILE).to(torch.int32) << places).sum(2, dtype=torch.int32)


def _packed_by_queries(pairs: Tensor) -> Tensor:
    # A bool may be any byte but 0; as a number it is 1. Eight of them times GATHER: side by side in the highest byte.
    numbers = pairs.to(torch.uint8, memory_format=torch.contiguous_format)
    octets = (numbers.view(torch.int64) * GATHER).view(torch.uint8)[..., 7::8]
    words = octets.reshape(-1, TILE, WORDS, WORD // 8).transpose(1, 2).contiguous()
    return words.view(torch.int32).view(-1, WORDS * TILE)


def unpacked(bits: Tensor) -> Tensor:
    """The boolean tiles (number, 128, 128) of bits."""
    places = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    if bits.dim() == 2:
        words = bits.view(-1, WORDS, TILE).transpose(1, 2)
        return ((words[..., None] >> places) & 1).bool().reshape(-1, TILE, TILE)
    return ((bits[:, :, None, :] >> places[:, None]) & 1).bool().view(-1, TILE, TILE)


def visible(tiles: Tensor, bits: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dense mask (..., seqlen_q, seqlen_k) of a map (..., tiles of queries, tiles of keys). As in kernels, a tile
    that names no bits is empty.
    """
    *some, rows, cols = tiles.shape
    pairs = (tiles == FULL)[..., None, None].expand(*tiles.shape, TILE, TILE).clone()
    partial = (tiles >= 0) & (tiles < len(bits))
    pairs[partial] = unpacked(bits[tiles[partial].long()])
    whole = pairs.transpose(-3, -2).reshape(*some, rows * TILE, cols * TILE)
    return whole[..., :seqlen_q, :seqlen_k]


def is_visible(tiles: Tensor, bits: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether query i sees key j, of index tensors that broadcast; the map is (batch, heads, rows, columns)."""
    kinds = tiles[b, h, i // TILE, j // TILE]
    if len(bits) == 0:
        return kinds == FULL
    # The words of a tile, and the side that shares them.
    at, shared = (i, j) if bits.dim() == 2 else (j, i)
    has_bits = (kinds >= 0) & (kinds < len(bits))
    named = torch.where(has_bits, kinds, 0).long()
    words = bits.view(-1, WORDS, TILE)[named, shared % TILE // WORD, at % TILE]
    return (kinds == FULL) | (has_bits & ((words >> (shared % WORD).int()) & 1).bool())
