"""Tile masks of documents and of ranges on a GPU, in two kernels: the same tiles and bits as on a CPU.

The first kernel sorts the tiles into empty, full and partial ones. The host reads how many are partial, which is the
only wait, and the second kernel writes their bits. A program has some neighbouring tiles of a row of tiles.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import tiles
from tilewise.backends.gpu.launching import launch
from tilewise.backends.gpu.symbols import Address, KernelCall

EMPTY, FULL = tl.constexpr(tiles.EMPTY), tl.constexpr(tiles.FULL)
TILE, WORD, WORDS = tl.constexpr(tiles.TILE), tl.constexpr(tiles.WORD), tl.constexpr(tiles.WORDS)
# What the masks are of. Ranges are stored by the side that has them.
DOCUMENTS, RANGES_OF_KEYS, RANGES_OF_QUERIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Tiles of a program.
NEIGHBOURS = tl.constexpr(8)

# No kernel is compiled for some of these numbers.
NUMBERS = ["seqlen_q", "seqlen_k", "ranges", "rows", "columns"]


@triton.jit
def ends_of(first_ptr, last_ptr, at, length, ranges):
    """The least and the largest number that some queries or keys have: of their documents, or in their ranges."""
    low = tl.min(tl.load(first_ptr + at), 0)
    high = tl.max(tl.load(last_ptr + at), 0)
    for index in range(1, ranges):
        low = tl.minimum(low, tl.min(tl.load(first_ptr + index * length.to(tl.int64) + at), 0))
        high = tl.maximum(high, tl.max(tl.load(last_ptr + index * length.to(tl.int64) + at), 0))
    return low, high


@triton.jit
def seen(one_ptr, two_ptr, i, j, seqlen_q, seqlen_k, ranges, KIND: tl.constexpr):
    """Which of the queries i see which of the keys j. Documents: one_ptr and two_ptr are those of queries and keys;
    else where ranges start and end.
    """
    if KIND == DOCUMENTS:
        mine = tl.load(one_ptr + i)[:, None]
        return (mine == tl.load(two_ptr + j)[None, :]) & (mine >= 0)
    elif KIND == RANGES_OF_KEYS:
        inside = (j[None, :] >= tl.load(one_ptr + i)[:, None]) & (j[None, :] < tl.load(two_ptr + i)[:, None])
        for index in range(1, ranges):
            at = index * seqlen_q.to(tl.int64) + i
            inside |= (j[None, :] >= tl.load(one_ptr + at)[:, None]) & (j[None, :] < tl.load(two_ptr + at)[:, None])
        return inside
    else:
        inside = (i[:, None] >= tl.load(one_ptr + j)[None, :]) & (i[:, None] < tl.load(two_ptr + j)[None, :])
        for index in range(1, ranges):
            at = index * seqlen_k.to(tl.int64) + j
            inside |= (i[:, None] >= tl.load(one_ptr + at)[None, :]) & (i[:, None] < tl.load(two_ptr + at)[None, :])
        return inside


@triton.jit
def tiles_of_program(rows, columns):
    """(sequence and head, row of tiles, first column, end of the columns)."""
    groups = tl.cdiv(columns, NEIGHBOURS)
    first = tl.program_id(0) % groups * NEIGHBOURS
    line = tl.program_id(0) // groups
    return (line // rows).to(tl.int64), line % rows, first, tl.minimum(first + NEIGHBOURS, columns)


@triton.jit
def of_item(one_ptr, two_ptr, item, seqlen_q, seqlen_k, ranges, KIND: tl.constexpr):
    """The numbers of a sequence and head."""
    if KIND == DOCUMENTS:
        return one_ptr + item * seqlen_q, two_ptr + item * seqlen_k
    elif KIND == RANGES_OF_KEYS:
        return one_ptr + item * ranges * seqlen_q, two_ptr + item * ranges * seqlen_q
    else:
        return one_ptr + item * ranges * seqlen_k, two_ptr + item * ranges * seqlen_k


@triton.jit(do_not_specialize=NUMBERS)
def sort_tiles_kernel(
    one_ptr, two_ptr, kinds_ptr, seqlen_q, seqlen_k, ranges, rows, columns, KIND: tl.constexpr
):  # fmt: skip
    """EMPTY, FULL, or 0 for partial tiles."""
    item, row, start, stop = tiles_of_program(rows, columns)
    one, two = of_item(one_ptr, two_ptr, item, seqlen_q, seqlen_k, ranges, KIND)
    # Past the length the last one is repeated, which leaves empty and full tiles what they are.
    i = tl.minimum(tl.arange(0, TILE) + row * TILE, seqlen_q - 1)
    kinds = kinds_ptr + (item * rows + row) * columns
    for column in range(start, stop):
        j = tl.minimum(tl.arange(0, TILE) + column * TILE, seqlen_k - 1)
        if KIND == DOCUMENTS:
            low, high = ends_of(one, one, i, seqlen_q, 1)
            first, last = ends_of(two, two, j, seqlen_k, 1)
            meets = tl.minimum(high, last) >= tl.maximum(tl.maximum(low, first), 0)
        elif KIND == RANGES_OF_KEYS:
            low, high = ends_of(one, two, i, seqlen_q, ranges)
            meets = (low <= tl.minimum(column * TILE + (TILE - 1), seqlen_k - 1)) & (high > column * TILE)
        else:
            low, high = ends_of(one, two, j, seqlen_k, ranges)
            meets = (low <= tl.minimum(row * TILE + (TILE - 1), seqlen_q - 1)) & (high > row * TILE)
        kind = column * 0 + EMPTY
        if meets:
            pairs = seen(one, two, i, j, seqlen_q, seqlen_k, ranges, KIND).to(tl.int32)
            some = tl.max(tl.max(pairs, 1), 0)
            every = tl.min(tl.min(pairs, 1), 0)
            kind = tl.where(every > 0, FULL, tl.where(some > 0, 0, EMPTY))
        tl.store(kinds + column, kind)


@triton.jit(do_not_specialize=NUMBERS)
def write_bits_kernel(
    one_ptr, two_ptr, kinds_ptr, seqlen_q, seqlen_k, ranges, rows, columns, upto_ptr, bits_ptr, KIND: tl.constexpr
):  # fmt: skip
    """The bits of partial tiles by queries, and in the map where they are. upto_ptr counts the partial tiles up to each
    tile.
    """
    item, row, start, stop = tiles_of_program(rows, columns)
    one, two = of_item(one_ptr, two_ptr, item, seqlen_q, seqlen_k, ranges, KIND)
    i = tl.minimum(tl.arange(0, TILE) + row * TILE, seqlen_q - 1)
    before = (item * rows + row) * columns
    for column in range(start, stop):
        if tl.load(kinds_ptr + before + column) >= 0:
            index = tl.load(upto_ptr + before + column) - 1
            bits = bits_ptr + index.to(tl.int64) * (TILE * WORDS) + tl.arange(0, TILE)
            tl.store(kinds_ptr + before + column, index)
            for word in tl.static_range(WORDS):
                bit = tl.arange(0, WORD)
                j = tl.minimum(bit + (column * TILE + word * WORD), seqlen_k - 1)
                pairs = seen(one, two, i, j, seqlen_q, seqlen_k, ranges, KIND).to(tl.int32)
                # The sum of different powers of two: the highest is negative, which is its bit.
                tl.store(bits + word * TILE, tl.sum(pairs << bit[None, :], 1))


class Asked(NamedTuple):
    """A mask to make: of sequences and heads, queries and keys, and of how many ranges if it is of ranges."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    ranges: int
    kind: tl.constexpr


def sorting_call(asked: Asked, dtype: torch.dtype) -> KernelCall:
    """The kernel that sorts tiles into "kinds", of numbers of this dtype at "one" and "two"."""
    return _call(sort_tiles_kernel, asked, dtype)


def writing_call(asked: Asked, dtype: torch.dtype) -> KernelCall:
    """The kernel that writes "bits" of the partial tiles, which "upto" counts."""
    return _call(write_bits_kernel, asked, dtype)


def _call(kernel: Any, asked: Asked, dtype: torch.dtype) -> KernelCall:
    rows, columns = tiles.num_tiles(asked.seqlen_q), tiles.num_tiles(asked.seqlen_k)
    arguments = {
        "one_ptr": Address("one", dtype, aligned=False),
        "two_ptr": Address("two", dtype, aligned=False),
        **{f"{name}_ptr": Address(name, torch.int32) for name in ("kinds", "upto", "bits")},
        "seqlen_q": asked.seqlen_q,
        "seqlen_k": asked.seqlen_k,
        "ranges": asked.ranges,
        "rows": rows,
        "columns": columns,
        "KIND": asked.kind.value,
    }
    grid = (triton.cdiv(columns, NEIGHBOURS.value) * rows * asked.batch * asked.heads, 1, 1)
    return KernelCall(kernel, grid, {name: arguments[name] for name in kernel.arg_names})


def documents(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Map and bits of TileMask.documents; the ids are (batch, seqlen)."""
    return _made(q, k, Asked(q.shape[0], 1, q.shape[1], k.shape[1], 1, DOCUMENTS))


def ranges(starts: Tensor, ends: Tensor, seqlen: int, *, of_queries: bool) -> tuple[Tensor, Tensor]:
    """Map and bits of TileMask.from_intervals; starts and ends are (batch, heads, ranges, seqlen)."""
    batch, heads, count, own = starts.shape
    lengths = (seqlen, own) if of_queries else (own, seqlen)
    return _made(
        starts, ends, Asked(batch, heads, *lengths, count, RANGES_OF_QUERIES if of_queries else RANGES_OF_KEYS)
    )


def _made(one: Tensor, two: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    shape = asked.batch, asked.heads, tiles.num_tiles(asked.seqlen_q), tiles.num_tiles(asked.seqlen_k)
    found = torch.empty(shape, dtype=torch.int32, device=one.device)
    tensors = {"one": one.contiguous(), "two": two.contiguous(), "kinds": found}
    launch([sorting_call(asked, one.dtype)], tensors)
    upto = (found.view(-1) >= 0).cumsum(0, dtype=torch.int32)
    number = int(upto[-1])
    bits = found.new_empty(number, tiles.WORDS * tiles.TILE)
    if number:
        launch([writing_call(asked, one.dtype)], {**tensors, "upto": upto, "bits": bits})
    return found, bits
