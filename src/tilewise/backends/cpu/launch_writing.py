"""Writes rows of K and V into slots of pages: the host side, and the kernel's parameter block (positions below).

Strides are in bytes. The counters of a run follow the block, one per cache line, as in the other programs.
"""

from __future__ import annotations

from array import array

from torch import Tensor

from tilewise.backends.cpu import threads
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.params import COUNTER_FIELDS

__all__ = ["write_rows"]

# Number of new rows, their slots, page size and heads; then for K and for V: source, its token and head strides, pages,
# their page, slot and head strides, bytes of a head.
NUM_ROWS, SLOTS, PAGE_SIZE, NUM_HEADS = range(4)
K, V = 4, 12
SOURCE, SOURCE_ROW, SOURCE_HEAD, PAGES, PAGES_PAGE, PAGES_SLOT, PAGES_HEAD, HEAD_BYTES = range(8)
BLOCK_FIELDS = 20
# Distance of the item counter from the end of the block.
NEXT_ITEM = 64
# Rows that a thread takes at a time.
ROWS_PER_ITEM = 16
# Copying this many bytes takes about as long as waking another thread.
BYTES_PER_THREAD = 100_000


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """See tilewise.kv.writing. The last dimension of every tensor is contiguous."""
    rows, heads, _ = k.shape
    if rows == 0:
        return
    fields = (rows, slots.data_ptr(), k_pages.shape[1], heads, *_fields(k, k_pages), *_fields(v, v_pages))
    block = array("q", fields + (0,) * COUNTER_FIELDS)
    size = rows * heads * (k.shape[2] + v.shape[2]) * k.element_size()
    items = -(-rows // ROWS_PER_ITEM)
    threads.run(program("write_rows").address, block, min(items, threads.num_threads(), 1 + size // BYTES_PER_THREAD))


def _fields(new: Tensor, pages: Tensor) -> tuple[int, ...]:
    item = new.element_size()
    row, head, _ = new.stride()
    page, slot, page_head, _ = pages.stride()
    return (
        new.data_ptr(), row * item, head * item, pages.data_ptr(), page * item, slot * item, page_head * item,
        new.shape[2] * item,
    )  # fmt: skip
