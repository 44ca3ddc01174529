"""The container: e4m3 data with its scales, or int8 pages with theirs.

A value is `data * scale`. For every granularity, `scale` has one entry per (batch entry, head, block of rows), with
stride 0 along dimensions that share a scale, so that readers need not know how it was chosen.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.memory import check_allocated
from tilewise.subclasses import check_class

__all__ = ["BLOCK", "E4M3", "E4M3_MAX", "INT8_MAX", "Fp8Layout", "Fp8Tensor", "Granularity"]

E4M3 = torch.float8_e4m3fn
# The largest e4m3 number: 1.75 * 2^8. There is no infinity; 0x7F and 0xFF are NaN.
E4M3_MAX = 448.0
# The largest int8 code in use: -128 is not, so codes are symmetric.
INT8_MAX = 127.0
# Rows that share a scale with granularity "block": the key tile of the Hopper kernel.
BLOCK = 128

Granularity = Literal["tensor", "head", "block", "page", "token"]
Fp8Layout = Literal["bhsd", "bshd", "packed", "paged"]

# The dimensions of heads and rows, by layout; a page is a batch entry of its own.
_DIMS: dict[str, tuple[int, int | None, int]] = {
    # layout: (rank, rows, heads)
    "bhsd": (4, 2, 1),
    "bshd": (4, 1, 2),
    "packed": (3, 0, 1),
    "paged": (4, 1, 2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Tensor:
    """q, k or v in e4m3, or int8 pages, made by `quantize` and `quantize_pages`: pass it to `attention` and friends
    instead of a tensor.

    data   e4m3 in the shape of the tensor it was made from; of pages e4m3 or int8
    scale  fp32 (batch, heads, blocks), of packed rows (sequences, heads, blocks), of e4m3 pages (pages, heads, 1), of
           int8 pages (pages, heads, page_size)
    block  rows that share a scale (blocks are counted from each sequence's first row), None where all rows do; 1 with
           granularity "token", that of int8 pages
    layout "bhsd", "bshd", "packed" or "paged": how `data` is to be read
    dtype  what it was made from, and what a result comes back in: bfloat16 or float16
    rotated  whether the rows are in the rotated basis (see `rotate`); q and k must agree

        >>> q = quantize(torch.randn(1, 2, 300, 64), granularity="block")
        >>> q.data.dtype, tuple(q.scale.shape)
        (torch.float8_e4m3fn, (1, 2, 3))
    """

    data: Tensor
    scale: Tensor
    granularity: Granularity
    layout: Fp8Layout
    block: int | None = None
    rotated: bool = False
    dtype: torch.dtype = torch.bfloat16
    # The part of the call signature besides the tensors, built once; types included, because 1 equals True.
    about: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)
        about = (self.layout, self.block, type(self.block), self.rotated, type(self.rotated), self.dtype)
        object.__setattr__(self, "about", about)

    @property
    def shape(self) -> torch.Size:
        """Shape of the data."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of data and scales."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Memory of the data and of the stored scales."""
        stored = math.prod(n for n, s in zip(self.scale.shape, self.scale.stride(), strict=True) if s or n == 0)
        return self.data.nbytes + stored * self.scale.element_size()

    def to(self, device: torch.device | str) -> Fp8Tensor:
        """The container on another device. Stored scales are copied once, however many rows share them."""
        strides = self.scale.stride()
        stored = self.scale[tuple(slice(None) if s else slice(0, 1) for s in strides)]
        return replace(self, data=self.data.to(device), scale=stored.to(device).expand(self.scale.shape))

    def first_columns(self, count: int) -> Fp8Tensor:
        """The first columns of every row, in the same memory and with the same scales: the values of a latent.

        >>> quantize(torch.randn(1, 1, 300, 80)).first_columns(64).shape
        torch.Size([1, 1, 300, 64])
        """
        try:
            wanted = 0 if isinstance(count, bool) else operator.index(count)
        except (TypeError, RuntimeError):
            wanted = 0
        if not 1 <= wanted <= self.shape[-1]:
            raise InvalidProblem(
                "count", f"1 to {self.shape[-1]}, the columns of a row", repr(count), "Rows have so many columns."
            )
        if self.rotated:
            fix = "Quantise a latent without rotation."
            raise InvalidProblem("first_columns", "rows that are not rotated", "rotated rows", fix)
        return replace(self, data=self.data[..., :wanted])

    def dequantize(self, cu_seqlens: Tensor | None = None) -> Tensor:
        """The fp32 tensor it represents, still rotated if it is. Packed rows with several scales need cu_seqlens."""
        check_allocated(("Fp8Tensor.data", "Fp8Tensor.scale", "cu_seqlens"), (self.data, self.scale, cu_seqlens))
        return self.data.float() * row_scales(self, cu_seqlens)


def row_scales(tensor: Fp8Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The scale of every row, broadcastable to the data; 1 for packed rows of no sequence."""
    if tensor.layout == "paged":
        return tensor.scale.transpose(1, 2)[..., None]
    if tensor.layout == "packed":
        return _packed_row_scales(tensor, cu_seqlens)
    _, rows, _ = _DIMS[tensor.layout]
    length = tensor.shape[rows or 0]
    index = torch.arange(length, device=tensor.device) // (tensor.block or max(length, 1))
    scale = tensor.scale[:, :, index, None]
    return scale.transpose(1, 2) if tensor.layout == "bshd" else scale


def _packed_row_scales(tensor: Fp8Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        if tensor.granularity != "tensor":
            fix = "Pass the cu_seqlens it was quantised with."
            raise InvalidProblem("cu_seqlens", f"running totals, as scales are per {tensor.granularity}", None, fix)
        return tensor.scale[:1, :, :1].transpose(0, 1).reshape(1, -1, 1)[:, :1]
    row = torch.arange(tensor.shape[0], device=tensor.device)
    bounds = cu_seqlens.to(tensor.device).long()
    sequence = (torch.bucketize(row, bounds, right=True) - 1).clamp(0, max(tensor.scale.shape[0] - 1, 0))
    inside = row < bounds[-1]
    if not tensor.scale.numel():
        return torch.ones(tensor.shape[0], 1, 1, dtype=torch.float32, device=tensor.device)
    block = torch.zeros_like(row) if tensor.block is None else (row - bounds[sequence]) // tensor.block
    block = torch.where(inside, block, 0)
    return torch.where(inside[:, None], tensor.scale[sequence, :, block], 1.0)[..., None]


def _check(tensor: Fp8Tensor) -> None:
    """Checks everything that does not depend on the call."""
    parts: tuple[tuple[str, Any, tuple[torch.dtype, ...]], ...] = (
        ("data", tensor.data, (E4M3, torch.int8) if tensor.layout == "paged" else (E4M3,)),
        ("scale", tensor.scale, (torch.float32,)),
    )
    for name, value, dtypes in parts:
        if not isinstance(value, Tensor) or value.dtype not in dtypes:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            expected, fix = " or ".join(map(str, dtypes)), "Make it with tilewise.fp8.quantize; int8 is for pages only."
            raise InvalidProblem(f"Fp8Tensor.{name}", f"a tensor of {expected}", got, fix)
        check_class(f"Fp8Tensor.{name}", value)
    if tensor.layout not in _DIMS:
        raise InvalidProblem("Fp8Tensor.layout", "one of " + ", ".join(_DIMS), repr(tensor.layout), "See quantize.")
    rank, rows, heads = _DIMS[tensor.layout]
    if tensor.data.dim() != rank:
        fix = "Layouts say how the dimensions are read."
        raise InvalidProblem("Fp8Tensor.data", f"{rank} dimensions in layout {tensor.layout}", tensor.data.dim(), fix)
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidProblem("Fp8Tensor.dtype", "bfloat16 or float16", tensor.dtype, "Results come back in it.")
    if not _fits(tensor.granularity, tensor.block):
        fix = 'A number of rows belongs to granularity "block"; it is 1 for "token" and None for the others.'
        raise InvalidProblem("Fp8Tensor.block", f"what granularity {tensor.granularity!r} needs", tensor.block, fix)
    of_pages = {E4M3: "page", torch.int8: "token"}[tensor.data.dtype]
    if tensor.layout == "paged" and tensor.granularity != of_pages:
        expected = f"{of_pages!r} for pages of {tensor.data.dtype}"
        raise InvalidProblem("Fp8Tensor.granularity", expected, repr(tensor.granularity), "See quantize_pages.")
    if tensor.layout != "paged" and tensor.granularity in ("page", "token"):
        raise InvalidProblem("Fp8Tensor.granularity", '"page" for pages only', tensor.granularity, "See quantize.")
    _check_scale(tensor, tensor.shape[heads], tensor.shape[rows or 0])


def _fits(granularity: str, block: int | None) -> bool:
    if granularity == "token":
        return block == 1
    return (block is None) if granularity != "block" else (block is not None and block >= 1)


def _check_scale(tensor: Fp8Tensor, heads: int, length: int) -> None:
    blocks: Any = 1
    if tensor.block is not None and tensor.layout != "packed":
        blocks = -(-length // tensor.block)
    outer = tensor.scale.shape[0] if tensor.layout == "packed" else tensor.shape[0]
    expected = (outer, heads, tensor.scale.shape[-1] if tensor.layout == "packed" and tensor.block else blocks)
    if tensor.scale.dim() != 3 or tuple(tensor.scale.shape) != expected:
        fix = "Scales belong to the tensor they were computed for; make both with fp8.quantize or fp8.quantize_pages."
        raise InvalidProblem("Fp8Tensor.scale", f"shape {expected}", tuple(tensor.scale.shape), fix)
    if tensor.scale.requires_grad and torch.is_grad_enabled():
        fix = "Scales get no gradient: pass scale.detach()."
        raise InvalidProblem("Fp8Tensor.scale", "a tensor that requires no gradient", "one that does", fix)
    if tensor.scale.device != tensor.data.device:
        fix = "Move the container with .to(device), which moves both."
        raise InvalidProblem("Fp8Tensor.scale", f"a tensor on {tensor.data.device}", tensor.scale.device, fix)
