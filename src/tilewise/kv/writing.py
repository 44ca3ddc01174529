"""New rows of K and V into the slots of pages, in place.

On a CPU and an NVIDIA GPU one kernel scatters K and V together; where torch records what is done (torch.compile,
tensor subclasses) or the device is another one, indexed assignment does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.canonical import contiguous_last

__all__ = ["copy_pages", "write_rows"]

# The backend whose kernel writes on a device.
WRITERS = {"cpu": "cpu", "cuda": "triton"}


@torch.no_grad()
def write_rows(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Row t of k and v (total, num_kv_heads, dim) becomes slot `slots[t]` of the pages, counted through all of them.

    Pages (num_pages, page_size, num_kv_heads, dim) of the same dtype and device; slots int64 (total,), each within
    the pages. No two rows have the same slot.
    """
    writer = WRITERS.get(k.device.type)
    plain = not torch.compiler.is_compiling() and all(type(t) is Tensor for t in (k, v, k_pages, v_pages))
    if (
        writer is not None
        and plain
        and k_pages.stride(-1) == v_pages.stride(-1) == 1
        and dispatch.load(writer).unavailable() is None
    ):
        write = dispatch.load(writer).write_rows  # type: ignore[attr-defined]
        write(contiguous_last(k), contiguous_last(v), k_pages, v_pages, slots.contiguous())
        return
    places = slots // k_pages.shape[1], slots % k_pages.shape[1]
    k_pages.index_put_(places, k)
    v_pages.index_put_(places, v)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Pages `source` of (num_layers, num_pages, ...) into pages `target`; all are read before any is written."""
    pages.index_copy_(1, target, pages.index_select(1, source))
