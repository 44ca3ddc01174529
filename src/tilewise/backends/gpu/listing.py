"""The lists of a tile mask on a GPU, in two kernels: the same as tiles.lists_of, which takes some 70 launches.

Programs: the lines (rows, then columns) of every map. The first kernel counts and lists the tiles of a line, the second
ranks the line among the others and writes its list in groups. tiles.sections says where each list lies.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import tiles
from tilewise.backends.gpu.launching import launch
from tilewise.backends.gpu.symbols import Address, KernelCall

EMPTY = tl.constexpr(tiles.EMPTY)
HEADER, GROUPS_HEADER = tl.constexpr(2), tl.constexpr(tiles.GROUPS_HEADER)
# Tiles of a line, and lines, that a program reads at a time.
BLOCK = tl.constexpr(128)


# What a program gets: the map, its lists, the map's strides of sequences, heads, rows and columns, and its sizes. No
# kernel is compiled for some of these numbers.
NUMBERS = ["stride_batch", "stride_head", "stride_row", "stride_column", "heads", "rows", "columns", "items"]


@triton.jit
def line_of(tiles_ptr, stride_batch, stride_head, stride_row, stride_column, heads, rows, columns):
    """(sequence and head, is a row, number among the rows or columns, tiles, the first one, stride to the next) of a
    program's line.
    """
    item = tl.program_id(0) // (rows + columns)
    line = tl.program_id(0) % (rows + columns)
    is_row = line < rows
    number = tl.where(is_row, line, line - rows)
    length = tl.where(is_row, columns, rows)
    step = tl.where(is_row, stride_column, stride_row).to(tl.int64)
    first = tiles_ptr + number * tl.where(is_row, stride_row, stride_column).to(tl.int64)
    first += (item // heads).to(tl.int64) * stride_batch + (item % heads).to(tl.int64) * stride_head
    return item, is_row, number, length, first, step


@triton.jit
def first_list(lists_ptr, item, is_row, rows, columns):
    """(the first list of a head's rows or columns, words of one): see tiles.sections."""
    row = tl.cast(2 * columns + HEADER, tl.int64)
    column = tl.cast(2 * rows + HEADER, tl.int64)
    lists = lists_ptr + item * (rows * row + columns * column) + tl.where(is_row, 0, rows * row)
    return lists, tl.where(is_row, row, column)


@triton.jit
def first_group(lists_ptr, item, is_row, items, rows, columns):
    """The same of the lists in groups."""
    row = tl.cast(2 * columns + GROUPS_HEADER, tl.int64)
    column = tl.cast(2 * rows + GROUPS_HEADER, tl.int64)
    groups = first_list(lists_ptr, items, True, rows, columns)[0]
    lists = groups + tl.where(is_row, item * (rows * row), items * (rows * row) + item * (columns * column))
    return lists, tl.where(is_row, row, column)


@triton.jit
def put(entries, at, tile, kind, inside):
    """Write entries of a list."""
    tl.store(entries + 2 * at, tile, mask=inside)
    tl.store(entries + 2 * at + 1, kind, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def list_tiles_kernel(tiles_ptr, lists_ptr, stride_batch, stride_head, stride_row, stride_column, heads, rows, columns):
    """The tiles of a line that are not empty, in order, then the others; and how many there are."""
    item, is_row, number, length, first, step = line_of(
        tiles_ptr, stride_batch, stride_head, stride_row, stride_column, heads, rows, columns
    )
    count = length * 0
    for begin in range(0, length, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(first + tile * step, mask=tile < length, other=EMPTY)
        count += tl.sum((kind != EMPTY).to(tl.int32), 0)
    lists, words = first_list(lists_ptr, item, is_row, rows, columns)
    entries = lists + number * words
    tl.store(entries, count)
    before = length * 0
    for begin in range(0, length, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(first + tile * step, mask=tile < length, other=EMPTY)
        is_listed = kind != EMPTY
        upto = before + tl.cumsum(is_listed.to(tl.int32), 0)
        put(entries + HEADER, tl.where(is_listed, upto - 1, count + tile - upto), tile, kind, tile < length)
        before += tl.sum(is_listed.to(tl.int32), 0)


@triton.jit(do_not_specialize=NUMBERS)
def group_tiles_kernel(
    tiles_ptr, lists_ptr, stride_batch, stride_head, stride_row, stride_column, heads, rows, columns, items
):
    """The rank of a line, and its tiles in groups: those that need a mask, the others, the empty ones."""
    item, is_row, number, length, first, step = line_of(
        tiles_ptr, stride_batch, stride_head, stride_row, stride_column, heads, rows, columns
    )
    lists, words = first_list(lists_ptr, item, is_row, rows, columns)
    count = tl.load(lists + number * words)
    lines = tl.where(is_row, rows, columns)
    rank = number * 0
    for begin in range(0, lines, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        others = tl.load(lists + other * words, mask=other < lines, other=-1)
        sooner = tl.where(is_row, other > number, other < number)
        rank += tl.sum(((others > count) | ((others == count) & sooner)).to(tl.int32), 0)
    tl.store(lists + rank * words + 1, number)

    masked = length * 0
    for begin in range(0, length, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(first + tile * step, mask=tile < length, other=EMPTY)
        masked += tl.sum(needs_mask(kind, tile, length, is_row).to(tl.int32), 0)
    groups, group_words = first_group(lists_ptr, item, is_row, items, rows, columns)
    # Lists of rows are in the order of ranks. Those of columns are not: the first word of one is the column of a rank.
    entries = groups + tl.where(is_row, rank, number) * group_words
    tl.store(groups + rank * group_words, number)
    nothing = tl.where(is_row & (count == 0), 1, 0)
    tl.store(entries + 1, count + nothing)
    tl.store(entries + 2, masked + nothing)
    tl.store(entries + 3, 0)
    before = length * 0
    masked_before = length * 0
    for begin in range(0, length, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        kind = tl.load(first + tile * step, mask=tile < length, other=EMPTY)
        is_listed = kind != EMPTY
        is_masked = needs_mask(kind, tile, length, is_row)
        upto = before + tl.cumsum(is_listed.to(tl.int32), 0)
        masked_upto = masked_before + tl.cumsum(is_masked.to(tl.int32), 0)
        at = tl.where(is_listed, masked + upto - masked_upto - 1, count + tile - upto)
        at = tl.where(is_masked, masked_upto - 1, at)
        # What a row without tiles visits is past the last one, where nothing is read.
        shown = tl.where((nothing == 1) & (at == 0), length, tile)
        put(entries + GROUPS_HEADER, at, shown, kind, tile < length)
        before += tl.sum(is_listed.to(tl.int32), 0)
        masked_before += tl.sum(is_masked.to(tl.int32), 0)


@triton.jit
def needs_mask(kind, tile, length, is_row):
    """Whether a tile has bits or, in a row, is the last one of the keys, which may not be whole."""
    return (kind >= 0) | (is_row & (tile == length - 1) & (kind != EMPTY))


def listing_calls(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[KernelCall]:
    """The kernels that list the tiles of a map with this shape and these strides, at "tiles", into "lists"."""
    batch, heads, rows, columns = shape
    grid = (batch * heads * (rows + columns), 1, 1)
    given = Address("tiles", torch.int32, aligned=False), Address("lists", torch.int32), *strides, heads, rows, columns
    kernels = (list_tiles_kernel, given), (group_tiles_kernel, (*given, batch * heads))
    return [KernelCall(kernel, grid, dict(zip(kernel.arg_names, values, strict=True))) for kernel, values in kernels]


def listed(tile_map: Tensor) -> Tensor:
    """What tiles.lists_of returns."""
    if tile_map.numel() == 0:
        return tiles.lists_of(tile_map)
    batch, heads, rows, columns = tile_map.shape
    found = tile_map.new_empty(tiles.sections((batch, heads, rows, columns)).words)
    launch(listing_calls(tile_map.shape, tile_map.stride()), {"tiles": tile_map, "lists": found})
    return found
