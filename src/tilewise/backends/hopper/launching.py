"""Starting kernels with little overhead: tile counters, descriptors, and kernels called without the JIT's binder."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.backends.hopper.compilation import compile_for
from tilewise.backends.hopper.layouts import smem_layout, tile_box

__all__ = ["Launcher", "counter_for", "describe", "describe_flat", "tma_ready"]

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# TMA takes addresses and strides that are multiples of this.
TMA_BYTES = 16
TMA_ELEMENTS = TMA_BYTES // 2
# The extra dimensions of a packed descriptor, see layouts.tile_at: any coordinate is inside, and 2^30 steps of 2^34
# elements are a multiple of 2^64 bytes.
PACKED_EXTENT, PACKED_ROWS, PACKED_STRIDE = 0x7FFF0000, 1 << 30, 1 << 34
COUNTERS_PER_DEVICE = 4096


class Launcher:
    """One kernel in one configuration, compiled by the first call; later ones skip the JIT's argument binder.

    Sound because compilation.py specialises on nothing but the configuration, the dtypes and the absence of arguments,
    which belong to the key under which a launcher is cached.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Queue the kernel on the current stream of the current device; args in the order of its parameters."""
        if self.compiled is None:
            self.compiled = compile_for(self.kernel, args)
        self.compiled[grid](*args)


def tma_ready(tensor: Tensor) -> Tensor:
    """The 16-bit tensor, or a copy if TMA cannot address it: base or stride no multiple of 16 bytes, or stride 0."""
    addressable = tensor.data_ptr() % TMA_BYTES == 0
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        addressable = addressable and (size == 1 or (stride > 0 and stride % TMA_ELEMENTS == 0))
    return tensor if addressable else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def _box(rows: int, columns: int, packed: bool, dtype: torch.dtype) -> tuple[list[int], Any]:
    box = tile_box(rows, columns, packed=packed)
    return box, smem_layout(box, GLUON_DTYPES[dtype])


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor for tiles of a (batch, head, row, column) tensor, or of packed (row, head, column) rows."""
    packed = tensor.dim() == 3
    box, layout = _box(rows, columns, packed, tensor.dtype)
    shape, strides = list(tensor.shape), list(tensor.stride())
    if packed:
        (_, heads, width), (row, head, _) = shape, strides
        shape = [PACKED_EXTENT, PACKED_EXTENT, heads, PACKED_ROWS, width]
        strides = [PACKED_STRIDE - row, row, head, row, 1]
    if 1 in shape:  # the stride of a dimension of size 1 is never used, but TMA checks it
        strides = [TMA_BYTES if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        strides[-1] = 1
    return _unchecked(tensor, shape, strides, box, layout)


def _unchecked(tensor: Tensor, shape: list[int], strides: list[int], box: list[int], layout: Any) -> TensorDescriptor:
    """A descriptor without the checks of its constructor, which `tma_ready` has made; they cost 10 us a call."""
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(base=tensor, shape=shape, strides=strides, block_shape=box, layout=layout, padding="zero")
    return descriptor


def describe_flat(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor for blocks of a contiguous scratch tensor."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), box, smem_layout(box, GLUON_DTYPES[tensor.dtype])
    )


class Counters:
    """The tile counters of one device: zero before and after every launch, so that they are cleared only once.

    Kernels on one stream follow each other and share a counter. A call that is being captured gets one for good:
    graphs may be replayed side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Tensor | None = None
        self.unused = itertools.count()
        self.by_stream: dict[int, Tensor] = {}

    def current(self) -> Tensor:
        """The counter for a launch on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return self._take()
        stream: int = torch._C._cuda_getCurrentRawStream(self.device.index)  # noqa: SLF001
        counter = self.by_stream.get(stream)
        if counter is None:
            self._fill()
            counter = self.by_stream[stream] = self._take()
        return counter

    def _fill(self) -> None:
        if self.pool is None:
            self.pool = torch.zeros(COUNTERS_PER_DEVICE, dtype=torch.int32, device=self.device)
            # Other streams must not count before the zeros are there.
            torch.cuda.current_stream(self.device).synchronize()

    def _take(self) -> Tensor:
        index = next(self.unused) if self.pool is not None else COUNTERS_PER_DEVICE
        if self.pool is None or index >= COUNTERS_PER_DEVICE:
            return torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.pool[index : index + 1]


@functools.cache
def _counters(device: torch.device) -> Counters:
    return Counters(device)


def counter_for(tensor: Tensor) -> Tensor:
    """A zeroed tile counter for a kernel on the current stream of the tensor's device."""
    return _counters(tensor.device).current()
