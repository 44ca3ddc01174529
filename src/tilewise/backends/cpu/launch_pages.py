"""Launches the programs that write rows of K and V into pages.

Their parameter block is short (positions below); strides are in bytes. The counters of a run follow it, one per cache
line, as in the other programs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewise.backends.base import QuantisedRows
from tilewise.backends.cpu import threads
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.launch import DTYPES
from tilewise.backends.cpu.params import COUNTER_FIELDS
from tilewise.errors import InvalidProblem

# Number of new rows, their slots, page size and heads; then for K and for V: source, its token and head strides, pages,
# their page, slot and head strides, elements of a head (bytes if copied), the source's dtype, scales: (pages, heads) of
# e4m3, (pages, heads, page size) of int8. Without V, its fields are 0.
NUM_ROWS, SLOTS, PAGE_SIZE, NUM_HEADS = range(4)
K, V = 4, 14
SOURCE, SOURCE_ROW, SOURCE_HEAD, PAGES, PAGES_PAGE, PAGES_SLOT, PAGES_HEAD, SIZE, DTYPE, SCALES = range(10)
BLOCK_FIELDS = 24
# Distance of the item counter from the end of the block.
NEXT_ITEM = 64
# Rows that a thread takes at a time.
ROWS_PER_ITEM = 16
# This much work takes about as long as waking another thread.
COPIED_BYTES, QUANTISED_ELEMENTS = 100_000, 10_000


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See tilewise.kv.writing. The last dimension of every tensor is contiguous."""
    size = (k.numel() + v.numel()) * k.element_size()
    fields = (*_written(k, k_pages, None), *_written(v, v_pages, None))
    _write("write_rows", k, k_pages, slots, fields, size // COPIED_BYTES)


def bind_write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor
) -> Callable[[Sequence[Tensor], tuple[int, ...] | None], None]:
    """`write_rows` for tensors of one signature, of which only addresses and slots change."""
    rows, heads, _ = k.shape
    page_size, end = k_pages.shape[1], k_pages.shape[0] * k_pages.shape[1]
    fields = (*_written(k, k_pages, None), *_written(v, v_pages, None))
    block = array("q", (rows, 0, page_size, heads, *fields, *(0,) * COUNTER_FIELDS))
    more = (k.numel() + v.numel()) * k.element_size() // COPIED_BYTES
    most = min(-(-rows // ROWS_PER_ITEM), 1 + more)

    def write(tensors: Sequence[Tensor], places: tuple[int, ...] | None) -> None:
        values = block[:]
        places = places or tuple([tensor.data_ptr() for tensor in tensors])
        values[K + SOURCE], values[V + SOURCE], values[K + PAGES], values[V + PAGES], values[SLOTS] = places
        if rows:
            _check_slots(tensors[4], end)
            threads.run(program("write_rows"), values, min(most, threads.num_threads()))

    return write


def append_quantised(rows: QuantisedRows) -> None:
    """See tilewise.kv.quantised. The last dimension of every tensor is contiguous, scales are fully contiguous."""
    k, v, k_pages, v_pages, k_scale, v_scale, slots = rows
    of_v = (0,) * (BLOCK_FIELDS - V) if v is None or v_pages is None else _written(v, v_pages, v_scale)
    elements = k.numel() + (0 if v is None else v.numel())
    fields = (*_written(k, k_pages, k_scale), *of_v)
    name = "append_int8" if k_pages.dtype == torch.int8 else "append_quantised"
    _write(name, k, k_pages, slots, fields, elements // QUANTISED_ELEMENTS)


def _write(name: str, k: Tensor, pages: Tensor, slots: Tensor, fields: tuple[int, ...], more_threads: int) -> None:
    rows, heads, _ = k.shape
    if len(slots):
        _check_slots(slots, pages.shape[0] * pages.shape[1])
    block = array("q", (rows, slots.data_ptr(), pages.shape[1], heads, *fields, *(0,) * COUNTER_FIELDS))
    if rows > 0:
        items = -(-rows // ROWS_PER_ITEM)
        threads.run(program(name), block, min(items, threads.num_threads(), 1 + more_threads))


def _check_slots(slots: Tensor, end: int) -> None:
    last = int(slots.max())
    if last >= end:
        fix = "Slots are counted through all pages; a negative one skips its row."
        raise InvalidProblem("slots", f"numbers below {end}, the slots of the pages", last, fix)


def _written(new: Tensor, pages: Tensor, scale: Tensor | None) -> tuple[int, ...]:
    item, page_item, dim = new.element_size(), pages.element_size(), new.shape[2]
    source = (new.data_ptr(), *(stride * item for stride in new.stride()[:2]))
    target = (pages.data_ptr(), *(stride * page_item for stride in pages.stride()[:3]))
    if scale is None:
        return (*source, *target, dim * item, 0, 0)
    return (*source, *target, dim, DTYPES[new.dtype], scale.data_ptr())
