"""Memory as the emulator's kernels see it: pointers and tensor maps into global memory, views of shared memory."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Descriptor", "Memory", "Pointer", "pointed"]


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

    def addresses(self, corner: list[Any]) -> tuple[Tensor, Tensor]:
        """(element offsets, which of them lie inside) of a box."""
        inside = torch.ones(self.block_shape, dtype=torch.bool)
        offsets = torch.zeros(self.block_shape, dtype=torch.int64)
        start = 0
        for dim, (first, size, stride, extent) in enumerate(
            zip(map(int, corner), self.block_shape, self.strides, self.shape, strict=True)
        ):
            view = [-1 if d == dim else 1 for d in range(len(corner))]
            index = torch.arange(first, first + size)
            inside &= ((index >= 0) & (index < extent)).view(view)
            offsets += (torch.arange(size) * stride).view(view) if size > 1 else 0
            start += first * stride
        return offsets + start % (2**64 // self.base.element_size()) if start else offsets, inside
