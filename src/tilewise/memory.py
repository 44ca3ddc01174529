"""Which bytes tensors have and share, and which were written."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.units import counted

# Shape and strides.
Layout = tuple[tuple[int, ...], tuple[int, ...]]
# The address of a view of freed storage is its offset in bytes, which is below this. Few allocators return such low
# addresses; of those that do, storages are looked at in every call.
LOWEST = 2**38


def touch(*tensors: Tensor) -> None:
    """Tell autograd that kernels changed the contents: what was saved for a backward before must not be used after."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def extent(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_allocated(tensor: Tensor) -> bool:
    """Whether the storage holds all elements. Not if it was freed or cut by `untyped_storage().resize_()`."""
    try:
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # a wrapper of torch.func: the tensor inside is checked
        return True
    # Unlike `extent`, nbytes takes no time.
    size = tensor.nbytes if tensor.is_contiguous() else extent(tensor)
    if tensor.storage_offset() * tensor.element_size() + size <= held:
        return True
    return tensor.numel() == 0 or tensor._is_zerotensor()  # noqa: SLF001


def are_there(tensors: Iterable[Tensor], places: Sequence[int]) -> bool:
    """Whether no tensor's storage was freed, by their addresses: cheaper than `is_allocated`, which also finds storage
    that was cut.
    """
    return min(places, default=LOWEST) >= LOWEST or all(
        place >= LOWEST or is_allocated(tensor) for tensor, place in zip(tensors, places, strict=True)
    )


def check_there(names: Iterable[str], tensors: Sequence[Tensor | None]) -> None:
    """`check_allocated` if an address says that storage was freed. For calls that are validated every time."""
    if min([tensor.data_ptr() for tensor in tensors if tensor is not None], default=LOWEST) < LOWEST:
        check_allocated(names, tensors)


def check_allocated(names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Raise for the first tensor whose storage does not hold all of its elements. While a compiler traces there is no
    storage to look at. Names past the last tensor are ignored.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is not None and not is_allocated(tensor):
            size, held = tensor.storage_offset() * tensor.element_size() + extent(tensor), tensor.untyped_storage()
            fix = (
                "untyped_storage().resize_() freed or cut it, as FSDP does between uses: allocate it (FSDP: unshard "
                "the parameters) before the call."
            )
            raise InvalidProblem(
                name, f"a storage of {counted(int(size), 'byte')} or more", f"one of {held.nbytes()}", fix
            )


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
