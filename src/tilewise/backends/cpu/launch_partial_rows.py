"""Merges rows of a partial result into a result: the host side, and the kernel's parameter block (positions below).

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

__all__ = ["merge_rows"]

# Number of rows, their indices in the result (0: its first rows), heads, elements of a head and their dtype; then the
# result and the partial one, their row and head strides, and lse with the stride of a head.
NUM_ROWS, ROWS, NUM_HEADS, DIM, DTYPE = range(5)
OUT, OUT_ROW, OUT_HEAD, LSE, LSE_HEAD = range(5, 10)
PART, PART_ROW, PART_HEAD, PART_LSE, PART_LSE_HEAD = range(10, 15)
BLOCK_FIELDS = 15
# Distance of the item counter from the end of the block.
NEXT_ITEM = 64
# Rows that a thread takes at a time.
ROWS_PER_ITEM = 8
# Merging this many elements takes about as long as waking another thread.
ELEMENTS_PER_THREAD = 40_000
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """See tilewise.cascade. out and part (rows, heads, dim) have one dtype, lse is fp32 (heads, rows), last strides are
    1.
    """
    count, heads, dim = part.shape
    names = None if rows is None else rows.to(torch.int64).contiguous()
    block = array(
        "q",
        (count, 0 if names is None else names.data_ptr(), heads, dim, DTYPES[out.dtype], *_fields(out, lse),
         *_fields(part, part_lse), *(0,) * COUNTER_FIELDS),
    )  # fmt: skip
    workers = min(-(-count // ROWS_PER_ITEM), threads.num_threads(), 1 + part.numel() // ELEMENTS_PER_THREAD)
    if count:
        threads.run(program("merge_rows").address, block, workers)


def _fields(out: Tensor, lse: Tensor) -> tuple[int, ...]:
    item = out.element_size()
    return out.data_ptr(), out.stride(0) * item, out.stride(1) * item, lse.data_ptr(), 4 * lse.stride(0)
