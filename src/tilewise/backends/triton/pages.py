"""Gradients of paged K and V: sums one row per (sequence, key) into pages, which several sequences may share.

Table entries are sorted by page, so the program of a (page, head) adds the contributions of all sequences that read it
in a fixed order. Pages that no sequence reads become 0.
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_kv_heads", "max_pages"])
def gather_pages_kernel(
    rows, pages, order, page_ends, seqlens_k, num_kv_heads, max_pages,
    PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the rows of every table entry that names this page. Grid: page * num_kv_heads. `rows` is fp32 (batch, head,
    key, dim).
    """
    head = tl.program_id(0) % num_kv_heads
    page = tl.program_id(0) // num_kv_heads
    begin = tl.load(page_ends + page - 1, mask=page > 0, other=0)
    end = tl.load(page_ends + page)
    d_idx = tl.arange(0, BLOCK_D)[None, :]
    for slot in tl.range(0, PAGE_SIZE, BLOCK_S):
        slots = slot + tl.arange(0, BLOCK_S)[:, None]
        acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        for i in tl.range(begin, end):
            entry = tl.load(order + i)
            batch_idx = entry // max_pages
            n_idx = entry % max_pages * PAGE_SIZE + slots
            base = rows.ptr + batch_idx * rows.stride_batch + tl.cast(head, tl.int64) * rows.stride_head
            ok = (slots < PAGE_SIZE) & (n_idx < tl.load(seqlens_k + batch_idx)) & (d_idx < DIM)
            acc += tl.load(base + n_idx * rows.stride_row + d_idx, mask=ok, other=0.0)
        base = pages.ptr + tl.cast(page, tl.int64) * pages.stride_batch + tl.cast(head, tl.int64) * pages.stride_head
        at = base + slots * pages.stride_row + d_idx
        tl.store(at, acc.to(pages.ptr.dtype.element_ty), mask=(slots < PAGE_SIZE) & (d_idx < DIM))


def entries_by_page(block_table: Tensor, seqlens_k: Tensor, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(order, page_ends): flat table entries in use, sorted by page, and where each page's entries end. Does not
    synchronise.
    """
    max_pages = block_table.shape[1]
    first_key = torch.arange(max_pages, device=block_table.device) * page_size
    used = first_key[None, :] < seqlens_k[:, None]
    pages, order = torch.where(used, block_table, num_pages).flatten().sort(stable=True)
    ends = torch.searchsorted(pages, torch.arange(num_pages, device=pages.device, dtype=pages.dtype), right=True)
    return order, ends
