"""Writes rows of K and V into e4m3 pages: the host side, and the kernel's parameter block (positions below).

Strides are in bytes. The counters of a run follow the block, one per cache line, as in the other programs.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from tilewise.backends.cpu import threads
from tilewise.backends.cpu.cache import program
from tilewise.backends.cpu.emit import BF16, FP16, FP32
from tilewise.backends.cpu.params import COUNTER_FIELDS

__all__ = ["append_quantised"]

# Number of new rows, their slots, page size and heads; then for K and for V: source, its token and head strides, pages,
# their page, slot and head strides, elements of a head, the source's dtype, and scales (pages, heads).
NUM_ROWS, SLOTS, PAGE_SIZE, NUM_HEADS = range(4)
K, V = 4, 14
SOURCE, SOURCE_ROW, SOURCE_HEAD, PAGES, PAGES_PAGE, PAGES_SLOT, PAGES_HEAD, DIM, DTYPE, SCALES = range(10)
BLOCK_FIELDS = 24
# Distance of the item counter from the end of the block.
NEXT_ITEM = 64
# Rows that a thread takes at a time.
ROWS_PER_ITEM = 16
# Quantising this many elements takes about as long as waking another thread.
ELEMENTS_PER_THREAD = 10_000
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def append_quantised(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, slots: Tensor
) -> None:
    """See tilewise.kv.quantised. The last dimension of every tensor is contiguous, scales are fully contiguous."""
    rows, heads, _ = k.shape
    if rows == 0:
        return
    fields = (rows, slots.data_ptr(), k_pages.shape[1], heads, *_fields(k, k_pages, k_scale))
    block = array("q", fields + _fields(v, v_pages, v_scale) + (0,) * COUNTER_FIELDS)
    elements = rows * heads * (k.shape[2] + v.shape[2])
    workers = min(-(-rows // ROWS_PER_ITEM), threads.num_threads(), 1 + elements // ELEMENTS_PER_THREAD)
    threads.run(program("append_quantised").address, block, workers)


def _fields(new: Tensor, pages: Tensor, scale: Tensor) -> tuple[int, ...]:
    item = new.element_size()
    row, head, _ = new.stride()
    return (
        new.data_ptr(), row * item, head * item, pages.data_ptr(), *pages.stride()[:3], new.shape[2],
        DTYPES[new.dtype], scale.data_ptr(),
    )  # fmt: skip
