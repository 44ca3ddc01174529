"""Pages in e4m3: rows are quantised as they are appended, with one scale for each (page, head).

A page's scale is a power of two that grows when a row needs more: what the page already holds then moves by whole
exponents, so nothing is rounded twice but numbers that fall below e4m3's smallest normal one, 2^-6 of the new scale.
The first row of a page starts its scale anew. NaN and infinities become NaN, as in tilewise.fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.fp8.container import E4M3_MAX, Fp8Tensor
from tilewise.fp8.quantisation import AMAX_FLOOR, encode

__all__ = ["SOURCES", "as_container", "copy_quantised", "new_scales", "write_quantised"]

SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def new_scales(num_layers: int, num_pages: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """Scales (num_layers, num_pages, num_kv_heads) of pages that hold nothing yet."""
    return torch.full((num_layers, num_pages, num_kv_heads), AMAX_FLOOR, device=device)


def as_container(pages: Tensor, scale: Tensor) -> Fp8Tensor:
    """One layer's pages as `attention_paged` takes them."""
    return Fp8Tensor(pages, scale[..., None], "page", "paged")


@torch.no_grad()
def write_quantised(rows: Tensor, pages: Tensor, scale: Tensor, slots: Tensor) -> None:
    """Row t of `rows` (total, num_kv_heads, dim) into slot `slots[t]` of e4m3 pages, whose scales grow as needed."""
    if not len(slots):
        return
    page_size = pages.shape[1]
    page, place = slots // page_size, slots % page_size
    values = rows.float()
    size = torch.where(torch.isfinite(values), values.abs(), 0.0).amax(-1)
    touched, which = torch.unique(page, return_inverse=True)
    before = scale[touched]
    fresh = torch.zeros(len(touched), dtype=torch.bool, device=slots.device)
    fresh[which[place == 0]] = True
    held = torch.where(fresh[:, None], AMAX_FLOOR, before)
    after = held.scatter_reduce(0, which[:, None].expand_as(size), _power_of_two(size), "amax")
    # Moving codes of pages whose scale stays as it is would change nothing.
    grown = (after > held).any(1).nonzero().flatten()
    if len(grown):
        ratio = (held[grown] / after[grown])[:, None, :, None]
        moved = encode(pages[touched[grown]].float(), ratio)
        pages.view(torch.uint8)[touched[grown]] = moved.view(torch.uint8)
    scale[touched] = after
    codes = encode(values, 1.0 / after[which][..., None])
    pages.view(torch.uint8).index_put_((page, place), codes.view(torch.uint8))


def copy_quantised(pages: Tensor, scale: Tensor, source: Tensor, target: Tensor) -> None:
    """Pages `source` of all layers, with their scales, into pages `target`."""
    for tensor in (pages.view(torch.uint8), scale):
        tensor.index_copy_(1, target, tensor.index_select(1, source))


def _power_of_two(amax: Tensor) -> Tensor:
    """The smallest power of two by which `amax` fits into e4m3, at least AMAX_FLOOR."""
    mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp_min(AMAX_FLOOR))
    return torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
