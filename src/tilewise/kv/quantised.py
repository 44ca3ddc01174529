"""Pages in e4m3 or int8: rows are quantised as they are appended.

int8 pages have one scale for each (token, head), so a row is written once and never touched again:
tilewise.fp8.rounding.encode_rows defines the codes. e4m3 pages have one scale for each (page, head), which grows:

    amax   = the largest finite magnitude of the rows that a step brings to the page
    needed = the smallest power of two, at least 2^-96, with amax / 448 <= needed
    scale  = the larger one of needed and the scale the page has; needed alone if the page's first row is among them
    codes  = e4m3(x / scale)                                       fp32 products, e4m3 to nearest, ties to even

When the scale grows, the page's contents are multiplied by old / new, a power of two, and rounded to e4m3 again:
numbers keep all their bits unless they fall below e4m3's smallest normal one, 2^-6 of the new scale. So finite values
never saturate. NaN and infinities become NaN and do not affect scales, as in tilewise.fp8. A row without a slot (-1) is
ignored.

On an NVIDIA GPU this is one launch for K and V (backends/triton/serving.py); below is the definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import dispatch
from tilewise.backends.base import QuantisedRows
from tilewise.canonical import contiguous_last
from tilewise.fp8.container import E4M3_MAX
from tilewise.fp8.rounding import AMAX_FLOOR, encode, encode_rows
from tilewise.kv.writing import write_rows
from tilewise.memory import LOWEST, check_allocated, touch

__all__ = ["SOURCES", "QuantisedRows", "append_quantised", "new_scales", "write_quantised"]

SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def new_scales(
    num_layers: int, num_pages: int, num_kv_heads: int, device: torch.device, page_size: int | None = None
) -> Tensor:
    """Scales (num_layers, num_pages, num_kv_heads) of empty e4m3 pages; with a page size (num_layers, num_pages,
    num_kv_heads, page_size), of int8 pages.
    """
    shape = (
        (num_layers, num_pages, num_kv_heads) if page_size is None else (num_layers, num_pages, num_kv_heads, page_size)
    )
    return torch.full(shape, AMAX_FLOOR, dtype=torch.float32, device=device)


@torch.no_grad()
def append_quantised(rows: QuantisedRows) -> None:
    """Write rows of K and V (total, num_kv_heads, dim) into slots of e4m3 or int8 pages (num_pages, page_size,
    num_kv_heads, dim), or of latents alone into e4m3 pages. Scales (num_pages, num_kv_heads) of e4m3 grow as needed;
    those of int8 (num_pages, num_kv_heads, page_size), in any strides, are written with their rows.

    The rows of one e4m3 page are next to each other, in consecutive slots.
    """
    k, v, k_pages, v_pages, k_scale, v_scale, slots = rows
    plain = not torch.compiler.is_compiling() and all(
        t is None or (type(t) is Tensor and not t.is_neg()) for t in (k, v)
    )
    # The kernel for CPUs takes contiguous scales.
    strided = slots.device.type == "cpu" and not all(s is None or s.is_contiguous() for s in (k_scale, v_scale))
    backend = dispatch.serving(slots.device.type) if plain and not strided else None
    if backend is not None:
        given = [tensor for tensor in rows if tensor is not None]
        if min(map(Tensor.data_ptr, given)) < LOWEST:  # freed, or no elements
            check_allocated([name for name, t in zip(rows._fields, rows, strict=True) if t is not None], given)
        k, v = contiguous_last(k), None if v is None else contiguous_last(v)
        backend.append_quantised(QuantisedRows(k, v, k_pages, v_pages, k_scale, v_scale, slots.contiguous()))
        touch(*[tensor for tensor in (k_pages, v_pages, k_scale, v_scale) if tensor is not None])
    elif v is None or v_pages is None or v_scale is None:
        write_quantised(k, k_pages, k_scale, slots)
    elif k_pages.dtype == torch.int8:
        k_codes, k_found = encode_rows(k)
        v_codes, v_found = encode_rows(v)
        write_rows(k_codes, v_codes, k_pages, v_pages, slots)
        # A scale is written like a row of one element.
        k_scales, v_scales = (scale.transpose(1, 2)[..., None] for scale in (k_scale, v_scale))
        write_rows(k_found[..., None], v_found[..., None], k_scales, v_scales, slots)
    else:
        write_quantised(k, k_pages, k_scale, slots)
        write_quantised(v, v_pages, v_scale, slots)


def write_quantised(rows: Tensor, pages: Tensor, scale: Tensor, slots: Tensor) -> None:
    """K, or V, into e4m3 pages with torch operations only."""
    has_slot = slots >= 0
    rows, slots = rows[has_slot], slots[has_slot]
    if not len(slots):
        return
    page, place = slots // pages.shape[1], slots % pages.shape[1]
    values = rows.float()
    size = torch.where(torch.isfinite(values), values.abs(), 0.0).amax(-1)
    first = torch.ones_like(page, dtype=torch.bool)
    first[1:] = page[1:] != page[:-1]
    touched, fresh, which = page[first], place[first] == 0, first.cumsum(0) - 1
    held = torch.where(fresh[:, None], AMAX_FLOOR, scale[touched])
    after = held.scatter_reduce(0, which[:, None].expand_as(size), _power_of_two(size), "amax")
    memory = pages.view(torch.uint8)
    grown, heads = ((after > held) & ~fresh[:, None]).nonzero(as_tuple=True)
    if len(grown):
        where = touched[grown], slice(None), heads
        ratio = (held[grown, heads] / after[grown, heads])[:, None, None]
        memory[where] = encode(memory[where].view(pages.dtype).float(), ratio).view(torch.uint8)
    scale[touched] = after
    memory.index_put_((page, place), encode(values, 1.0 / after[which][..., None]).view(torch.uint8))


def _power_of_two(amax: Tensor) -> Tensor:
    """The smallest power of two by which `amax` fits into e4m3, at least AMAX_FLOOR."""
    mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp_min(AMAX_FLOOR))
    return torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
