"""Memory as the emulator's kernels see it: pointers and tensor maps into global memory, views of shared memory."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Box", "Descriptor", "Memory", "Pointer", "pointed"]


@dataclass
class Pointer:
    """Elements of a tensor's storage, starting at the tensor."""

    tensor: Tensor
    offset: Any = 0

    @property
    def flat(self) -> Tensor:
        t = self.tensor
        return t.as_strided((t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,))

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.tensor.dtype)

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + steps)


def pointed(argument: Any) -> Any:
    """An argument as kernels see it: pointers in the place of tensors, also inside a tuple."""
    if isinstance(argument, tuple):
        inside = map(pointed, argument)
        return type(argument)(*inside) if hasattr(argument, "_fields") else tuple(inside)
    return Pointer(argument) if isinstance(argument, Tensor) else argument


class Memory:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, list(data.shape)

    def index(self, i: Any) -> Memory:
        return Memory(self.data[int(i)])

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.data.view(*shape))

    def permute(self, order: list[int]) -> Memory:
        return Memory(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.data.narrow(dim, int(start), length))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: Any) -> Tensor:
        del layout
        return self.data.clone()

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        del layout
        return Memory(self.data.view(-1).view(dtype)[: math.prod(shape)].view(shape))


@dataclass
class Descriptor:
    """A tensor map: any shape and strides, addresses modulo 2^64 bytes, as TMA computes them."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=math.prod(self.block_shape) * self.base.element_size())

    def box(self, corner: list[Any]) -> Box:
        """The elements of the box at a corner that exist."""
        sizes, inside, start, first = [], [], 0, 0
        for at, size, stride, extent in zip(map(int, corner), self.block_shape, self.strides, self.shape, strict=True):
            begin = max(-at, 0)
            end = max(min(extent - at, size), begin)
            sizes.append(end - begin)
            inside.append(slice(begin, end))
            start += at * stride
            first += begin * stride if size > 1 else 0
        # The stride of one element takes nobody anywhere, and may be of any size.
        strides = [stride if size > 1 else 0 for size, stride in zip(self.block_shape, self.strides, strict=True)]
        start %= 2**64 // self.base.element_size()
        return Box(self.base, tuple(inside), sizes, strides, start + first)


class Box(NamedTuple):
    """Elements of a tensor's storage, counted from the tensor, and where in the block of the tensor map they are."""

    base: Tensor
    inside: tuple[slice, ...]
    sizes: list[int]
    strides: list[int]
    start: int

    @property
    def values(self) -> Tensor:
        return self.base.as_strided(self.sizes, self.strides, self.base.storage_offset() + self.start)

    @property
    def places(self) -> Tensor:
        found = torch.tensor(self.start)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = found[..., None] + torch.arange(size) * stride
        return found
