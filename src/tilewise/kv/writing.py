"""Writes new rows of K and V into slots of pages, in place.

On a CPU and an NVIDIA GPU one kernel scatters K and V together. Where torch records operations (torch.compile, tensor
subclasses), and on other devices, indexed assignment does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import calls, dispatch
from tilewise.canonical import contiguous_last
from tilewise.errors import InvalidProblem
from tilewise.memory import check_allocated, touch

__all__ = ["copy_pages", "write_rows"]

# Dtypes that the kernels take. Codes are moved as bytes.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
CODES = (torch.float8_e4m3fn, torch.int8)


def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write row t of k and v (total, num_kv_heads, dim) into slot `slots[t]` of the pages, counted through all of them.

    Pages (num_pages, page_size, num_kv_heads, dim) have the same dtype and device. slots is int64 (total,), each within
    the pages, or negative for a row that is skipped. No two rows have the same slot.
    """
    if k.dtype in CODES and k.dtype == v.dtype == k_pages.dtype == v_pages.dtype:
        k, v, k_pages, v_pages = (t.view(torch.uint8) for t in (k, v, k_pages, v_pages))
    given = (k, v, k_pages, v_pages, slots)
    slot, places, *_ = calls.slot_of(given, ("write",))
    if slot is not None and slot.call is not None:
        slot.call(given, places)
        touch(k_pages, v_pages)
    else:
        _write(*given, slot)


@torch.no_grad()
def _write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, slot: calls.Slot | None) -> None:
    """Check and write; later calls with this signature only write."""
    given = (k, v, k_pages, v_pages, slots)
    check_allocated(("k", "v", "k_pages", "v_pages", "slots"), given)
    if not k.dtype == v.dtype == k_pages.dtype == v_pages.dtype:
        dtypes = ", ".join(str(t.dtype) for t in given[:4])
        raise InvalidProblem("k, v, k_pages, v_pages", "one dtype", dtypes, "Convert k and v to that of the pages.")
    if slots.dtype != torch.int64:
        raise InvalidProblem("slots", "an int64 tensor", slots.dtype, "Convert it with .long().")
    backend = dispatch.serving(k.device.type) if _takes(k, v, k_pages, v_pages) else None
    if backend is not None:
        ready = (contiguous_last(k), contiguous_last(v), k_pages, v_pages, slots.contiguous())
        backend.write_rows(*ready)
        touch(k_pages, v_pages)
        if slot is not None and all(a is b for a, b in zip(given, ready, strict=True)):
            slot.call = backend.bind_write(*ready)
        return
    if len(slots):
        _write_indexed(k, v, k_pages, v_pages, slots)


def _write_indexed(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """The same with torch operations only, without shapes that depend on values."""
    has_slot = slots >= 0
    # A row without a slot repeats another row's write, or rewrites the current contents if none has a slot.
    rows = torch.where(has_slot, torch.arange(len(slots), device=slots.device), has_slot.int().argmax())
    slots = slots[rows].clamp(min=0)
    places = slots // k_pages.shape[1], slots % k_pages.shape[1]
    for new, pages in ((k, k_pages), (v, v_pages)):
        pages.index_put_(places, torch.where(has_slot.any(), new[rows], pages[places]))


def _takes(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether a kernel can take these tensors."""
    if torch.compiler.is_compiling() or k.dtype not in DTYPES:
        return False
    # Kernels read memory, which a negated view and zeros of autograd do not hold.
    plain = all(type(t) is Tensor and not (t.is_neg() or t._is_zerotensor()) for t in (k, v, k_pages, v_pages))  # noqa: SLF001
    return plain and k_pages.stride(-1) == v_pages.stride(-1) == 1


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy pages `source` of (num_layers, num_pages, ...) into pages `target`; all are read before any is written."""
    pages = pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages
    pages.index_copy_(1, target, pages.index_select(1, source))
