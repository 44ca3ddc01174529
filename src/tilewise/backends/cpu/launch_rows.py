"""Launches the programs on rows without attention: rows of K and V into pages, and partial results into results.

A program's parameter block is short (positions below); strides are in bytes. The counters of a run follow it, one per
cache line, as in the other programs.
"""

from __future__ import annotations

from array import array

from torch import Tensor

from tilewise.backends.cpu import threads
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.launch import DTYPES
from tilewise.backends.cpu.params import COUNTER_FIELDS

# Writing into pages: number of new rows, their slots, page size and heads; then for K and for V: source, its token and
# head strides, pages, their page, slot and head strides, elements of a head (bytes if copied), the source's dtype, and
# scales (pages, heads).
NUM_ROWS, SLOTS, PAGE_SIZE, NUM_HEADS = range(4)
K, V = 4, 14
SOURCE, SOURCE_ROW, SOURCE_HEAD, PAGES, PAGES_PAGE, PAGES_SLOT, PAGES_HEAD, SIZE, DTYPE, SCALES = range(10)
PAGES_FIELDS = 24
# Merging: number of rows, their indices in the result (0: its first rows), heads, elements of a head and their dtype;
# then the result and the partial one, their row and head strides, and lse with the stride of a head.
MERGED_ROWS, MERGED_INDICES, MERGED_HEADS, MERGED_DIM, MERGED_DTYPE = range(5)
OUT, OUT_ROW, OUT_HEAD, LSE, LSE_HEAD = range(5, 10)
PART, PART_ROW, PART_HEAD, PART_LSE, PART_LSE_HEAD = range(10, 15)
MERGED_FIELDS = 15
# Distance of the item counter from the end of the block.
NEXT_ITEM = 64
# Rows that a thread takes at a time.
WRITTEN_AT_ONCE, MERGED_AT_ONCE = 16, 8
# This much work takes about as long as waking another thread.
COPIED_BYTES, QUANTISED_ELEMENTS, MERGED_ELEMENTS = 100_000, 10_000, 40_000


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See tilewise.kv.writing. The last dimension of every tensor is contiguous."""
    size = (k.numel() + v.numel()) * k.element_size()
    fields = (*_written(k, k_pages, None), *_written(v, v_pages, None))
    _write("write_rows", k, k_pages, slots, fields, size // COPIED_BYTES)


def append_quantised(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, slots: Tensor
) -> None:
    """See tilewise.kv.quantised. The last dimension of every tensor is contiguous, scales are fully contiguous."""
    fields = (*_written(k, k_pages, k_scale), *_written(v, v_pages, v_scale))
    _write("append_quantised", k, k_pages, slots, fields, (k.numel() + v.numel()) // QUANTISED_ELEMENTS)


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """See tilewise.cascade. out and part (rows, heads, dim) have one dtype, lse is fp32 (heads, rows), last strides are
    1.
    """
    count, heads, dim = part.shape
    indices = None if rows is None else rows.long().contiguous()
    start = (count, 0 if indices is None else indices.data_ptr(), heads, dim, DTYPES[out.dtype])
    fields = (*start, *_merged(out, lse), *_merged(part, part_lse))
    _run("merge_rows", fields, -(-count // MERGED_AT_ONCE), part.numel() // MERGED_ELEMENTS)


def _write(name: str, k: Tensor, pages: Tensor, slots: Tensor, fields: tuple[int, ...], more_threads: int) -> None:
    rows, heads, _ = k.shape
    start = (rows, slots.data_ptr(), pages.shape[1], heads)
    _run(name, start + fields, -(-rows // WRITTEN_AT_ONCE), more_threads)


def _run(name: str, fields: tuple[int, ...], items: int, more_threads: int) -> None:
    block = array("q", fields + (0,) * COUNTER_FIELDS)
    if items > 0:
        threads.run(program(name).address, block, min(items, threads.num_threads(), 1 + more_threads))


def _written(new: Tensor, pages: Tensor, scale: Tensor | None) -> tuple[int, ...]:
    item, page_item, dim = new.element_size(), pages.element_size(), new.shape[2]
    source = (new.data_ptr(), *(stride * item for stride in new.stride()[:2]))
    target = (pages.data_ptr(), *(stride * page_item for stride in pages.stride()[:3]))
    if scale is None:
        return (*source, *target, dim * item, 0, 0)
    return (*source, *target, dim, DTYPES[new.dtype], scale.data_ptr())


def _merged(out: Tensor, lse: Tensor) -> tuple[int, ...]:
    item = out.element_size()
    return out.data_ptr(), out.stride(0) * item, out.stride(1) * item, lse.data_ptr(), 4 * lse.stride(0)
