"""Checks before a cache is written: positions and pages must exist, and no two rows may share memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import settings
from tilewise.errors import InvalidProblem

__all__ = ["Bound", "check_apart", "check_bounds"]

# (stride, least index, largest index) of a dimension, in bytes.
Dim = tuple[int, int, int]
# K and V.
Pair = tuple[Tensor, Tensor]


class Bound(NamedTuple):
    """The values of an argument must be at least 0 and less than `bound`."""

    name: str
    numbers: Tensor
    bound: int
    what: str
    fix: str


def check_bounds(*bounds: Bound, read: bool = False) -> bool:
    """Refuse values outside their bounds. Returns whether they were read.

    They are read on a CPU, where it is free, and with TILEWISE_CHECK_VALUES=1. On a GPU reading synchronises, once for
    all of them: with `read` it is done nevertheless, except while a CUDA graph is captured.
    """
    there = [each for each in bounds if each.numbers.numel()]
    if not there:
        return True
    if torch.compiler.is_compiling() or any(type(each.numbers) is not Tensor or each.numbers.is_meta for each in there):
        return False
    if there[0].numbers.device.type != "cpu" and not settings.current().check_values:
        captured = there[0].numbers.is_cuda and torch.cuda.is_current_stream_capturing()
        if not read or captured:
            return False
    ends = torch.stack([end.long() for each in there for end in each.numbers.aminmax()]).tolist()
    for (name, _, bound, what, fix), first, last in zip(there, ends[::2], ends[1::2], strict=True):
        if first < 0 or last >= bound:
            raise InvalidProblem(name, f"positions below {bound}, the {what}", first if first < 0 else last, fix)
    return True


def check_apart(caches: Pair, new: Pair, rows: int | None) -> None:
    """Refuse caches of K and V in which two elements share memory; only the first `rows` if given.

    V may be a part of K, if the new rows are too: then both writes store the same values. Tensors without memory of
    their own (fake, traced) are not checked.
    """
    if torch.compiler.is_compiling() or any(type(t) is not Tensor or t.is_meta for t in (*caches, *new)):
        return
    layouts = [(t.shape if rows is None else (min(rows, len(t)), *t.shape[1:]), t.stride()) for t in caches]
    for name, layout in zip(("k_cache", "v_cache"), layouts, strict=True):
        if _overlaps_itself(*layout):
            fix = "New tokens would overwrite one another. Pass a copy (.contiguous()) and keep that."
            raise InvalidProblem(name, "rows that share no memory", f"shape {layout[0]}, strides {layout[1]}", fix)
    k, v = caches
    apart = k.device != v.device or not _overlap(_distance(caches), k.element_size(), v.element_size(), *layouts)
    if not apart and not _is_part(caches, new):
        fix = "Appending v would overwrite k: give each its own memory, or write the cache and call without k and v."
        raise InvalidProblem("v_cache", "memory that k_cache does not use", "a view of the same", fix)


def _distance(pair: Pair) -> int:
    """Bytes from the first to the second."""
    return pair[1].data_ptr() - pair[0].data_ptr()


def _is_part(caches: Pair, new: Pair) -> bool:
    """Whether V is the same part of K in the cache and in the new rows."""
    (k, v), begin = caches, _distance(caches)
    inside = 0 <= begin <= (k.shape[-1] - v.shape[-1]) * k.element_size()
    alike = all(a.dtype == b.dtype and a.stride() == b.stride() for a, b in (caches, new))
    return inside and alike and k.stride(-1) == new[0].stride(-1) == 1 and begin == _distance(new)


@functools.lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two indices may address the same element: not if each stride exceeds the extent of all smaller ones."""
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


Layout = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(maxsize=1024)
def _overlap(distance: int, k_size: int, v_size: int, k: Layout, v: Layout) -> bool:
    """Whether an element of k and one of v, which begins `distance` bytes after k, share a byte."""
    if 0 in k[0] or 0 in v[0]:
        return False
    dims = [(stride * k_size, 0, size - 1) for size, stride in zip(*k, strict=True)]
    dims += [(stride * v_size, 1 - size, 0) for size, stride in zip(*v, strict=True)]
    # The bytes of an element.
    dims.append((1, 1 - v_size, k_size - 1))
    return _meets(distance, sorted(dims, reverse=True))


def _meets(distance: int, dims: list[Dim]) -> bool:
    """Whether indices within the bounds reach `distance` exactly. Larger strides come first and leave few
    choices each.
    """
    if not dims:
        return distance == 0
    (stride, low, high), *rest = dims
    least, most = (sum(each[0] * each[end] for each in rest) for end in (1, 2))
    if stride == 0:
        return least <= distance <= most and _meets(distance, rest)
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_meets(distance - stride * index, rest) for index in range(first, last + 1))
