"""Which bytes tensors share, what small ones hold, and which were written."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Shape and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Reader:
    """The contents of CPU tensors of one shape, strides and dtype, as bytes.

    The view of the last address is kept: making one takes ten times as long as copying a few numbers. It keeps no
    memory alive, and is read only for a tensor that lies there.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[int, Any] | None = None

    def read(self, tensor: Tensor, columns: int | None = None) -> bytes:
        """All of it, or the first columns of a matrix."""
        place, last = tensor.data_ptr(), self._last
        if not place:  # no elements
            return b""
        if last is None or last[0] != place:
            self._last = last = place, _view(tensor)
        view = last[1] if columns is None else last[1][:, :columns]
        contents: bytes = view.tobytes()
        return contents


def _view(tensor: Tensor) -> Any:
    """An array over the memory of a CPU tensor, which it does not own."""
    size = tensor.element_size()
    strides = tuple([size * stride for stride in tensor.stride()])
    memory = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__=memory | {"typestr": f"|V{size}", "version": 3}))


def touch(*tensors: Tensor) -> None:
    """Tell autograd that kernels changed the contents: what was saved for a backward before must not be used after."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def extent(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory: not if each stride exceeds the extent of all smaller ones.

    Sizes may be symbolic, which have no hash for a cache.
    """
    if 0 in tensor.shape:
        return False
    reach = 0
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in sides if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one and an element of the other share a byte: exact, whatever the strides."""
    layouts = [(tuple(t.shape), t.stride()) for t in (a, b)]
    return _overlap(b.data_ptr() - a.data_ptr(), a.element_size(), b.element_size(), *layouts)


@functools.lru_cache(maxsize=1024)
def _overlap(distance: int, a_size: int, b_size: int, a: Layout, b: Layout) -> bool:
    """`overlap` of layouts of which the second begins `distance` bytes after the first."""
    if 0 in a[0] or 0 in b[0]:
        return False
    # How far the indices of both reach, by stride in bytes. Of a stride of 1: the bytes of an element.
    reach = {1: [1 - b_size, a_size - 1]}
    for (shape, strides), size, end, way in ((a, a_size, 1, 1), (b, b_size, 0, -1)):
        for length, stride in zip(shape, strides, strict=True):
            reach.setdefault(stride * size, [0, 0])[end] += way * (length - 1)
    return _meets(distance, [(stride, low, high) for stride, (low, high) in sorted(reach.items(), reverse=True)])


def _meets(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether indices within the bounds reach `distance` exactly. Larger strides come first: they leave few choices."""
    if not dims:
        return distance == 0
    (stride, low, high), *rest = dims
    least, most = (sum(each[0] * each[end] for each in rest) for end in (1, 2))
    if stride == 0:
        return least <= distance <= most and _meets(distance, rest)
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_meets(distance - stride * index, rest) for index in range(first, last + 1))
