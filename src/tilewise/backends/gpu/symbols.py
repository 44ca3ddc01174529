"""Kernel arguments without addresses: everything that is known before a call.

A kernel call is described once, with these symbols instead of tensors. From the description come its types (for the
compiler), the driver's argument list (into which a call fills addresses) or, for Triton's interpreter and for releases
with an unknown launch interface, ordinary arguments with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.gpu import releases

# The alignment in bytes that 128-bit vectors, cp.async and TMA need.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Address:
    """The address of tensor `name` plus `offset` bytes; `aligned` if that is a multiple of 16 bytes."""

    name: str
    dtype: torch.dtype
    aligned: bool = True
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number in a tuple that is compiled into the kernel."""

    value: int


@dataclass(frozen=True, slots=True)
class Multiple:
    """A run-time number that is a multiple of `of` in every call with the same compiled kernel; `wide`: passed as 64
    bits, because products with it need them.
    """

    value: int
    of: int
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """A TMA tensor map: blocks of a strided tensor at `address`; `layout` is Gluon's shared-memory layout, if any."""

    address: Address
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel and everything it is launched with except addresses; `arguments` by parameter name.

    `fused` False: the compiler fuses no multiplication with an addition, so results have the bits of separate
    operations. `overlaps`: the kernel may start while the one before it in the stream ends, and waits for it itself.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int | None = None
    max_registers: int | None = None
    fused: bool = True
    overlaps: bool = False

    def __post_init__(self) -> None:
        releases.name_in_order(self.kernel)

    @property
    def ordered(self) -> list[Any]:
        """The arguments in the order of the kernel's parameters."""
        return [self.arguments[name] for name in self.kernel.arg_names]

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of the call."""
        found: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }
        found["enable_fp_fusion"] = self.fused
        found["launch_pdl"] = self.overlaps or None
        found["ptx_options"] = releases.assembler_options(self.kernel)
        return {name: value for name, value in found.items() if value is not None}


def addresses_in(arguments: Iterable[Any]) -> list[Address]:
    """The addresses among arguments."""
    found = []
    for argument in arguments:
        if argument.__class__ is Address:
            found.append(argument)
        elif argument.__class__ is Tile:
            found.append(argument.address)
        elif isinstance(argument, tuple):
            found += addresses_in(argument)
    return found


def aligned_names(arguments: Iterable[Any]) -> set[str]:
    """The tensors whose addresses these arguments assume to be multiples of 16 bytes."""
    return {address.name for address in addresses_in(arguments) if address.aligned}


def renamed(call: KernelCall, names: Mapping[str, str]) -> KernelCall:
    """The same call with its tensors renamed; `names` maps old names to new ones."""
    return replace(call, arguments={name: _renamed(value, names) for name, value in call.arguments.items()})


def _renamed(argument: Any, names: Mapping[str, str]) -> Any:
    if isinstance(argument, Address):
        return replace(argument, name=names.get(argument.name, argument.name))
    if isinstance(argument, Tile):
        return replace(argument, address=_renamed(argument.address, names))
    if isinstance(argument, tuple):
        elements = [_renamed(element, names) for element in argument]
        return type(argument)(*elements) if hasattr(argument, "_fields") else tuple(elements)
    return argument


def materialised(argument: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    """The argument in the form that Triton's own launch path takes."""
    if isinstance(argument, (Fixed, Multiple)):
        return argument.value
    if isinstance(argument, Address):
        return _tensor_at(argument, tensors)
    if isinstance(argument, Tile):
        return _descriptor(argument, _tensor_at(argument.address, tensors))
    if isinstance(argument, tuple):
        elements = [materialised(element, tensors) for element in argument]
        return type(argument)(*elements) if hasattr(argument, "_fields") else tuple(elements)
    return argument


def _tensor_at(address: Address, tensors: Mapping[str, Tensor | None]) -> Tensor:
    tensor = tensors[address.name]
    assert tensor is not None
    if tensor.dtype != address.dtype:  # a boolean mask is read as bytes
        tensor = tensor.view(address.dtype)
    return tensor[address.offset // tensor.element_size() :] if address.offset else tensor


def _descriptor(tile: Tile, base: Tensor) -> Any:
    shape, strides, block = list(tile.shape), list(tile.strides), list(tile.block)
    if tile.layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, shape, strides, block)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(base, shape, strides, block, tile.layout)
