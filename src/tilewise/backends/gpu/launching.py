"""A pass: the launch plan of a sequence of kernel calls, prepared once for a device, then run with addresses alone.

Nothing here waits for the device (except when a device's first counters are made), so calls can be captured in a CUDA
graph. Figures: bench/results/gpu-host-choices.csv.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.counters import counters_of
from tilewise.backends.gpu.driver import Filled, Launch, queued
from tilewise.backends.gpu.symbols import ALIGNMENT, KernelCall, aligned_names
from tilewise.device import DeviceSpec
from tilewise.operands import Operands

__all__ = [
    "BACKWARD_GIVEN",
    "HEADS_FIRST",
    "MAX_PASSES",
    "Allocation",
    "Pass",
    "Places",
    "RawView",
    "RawViews",
    "View",
    "Wish",
    "interpreted",
    "named_views",
    "pass_of",
    "raw_views",
]

# Passes that a backend caches, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# Laid-out launches that all passes together cache, one for each set of addresses: at most 50 MiB. A caching allocator
# hands out the same addresses again and again, in training one set for every layer.
MAX_FILLED = 8192
# Alignment of tensors that share a block, about that of a caching allocator; and the name of the block.
STEP, BLOCK = 256, "block"
# The order of the tensors that a backward pass is given.
BACKWARD_GIVEN = ("dout", "dlse", "out", "lse", *Operands._fields)
# Tensors that a pass allocates for its caller; others are workspace.
RESULTS = ("out", "dq", "dk", "dv", "dbias", "dk_pages", "dv_pages")
# Strides, dtype, and whether the address is a multiple of 16 bytes: part of the cache key.
RawView = tuple[tuple[int, ...], torch.dtype, bool]
RawViews = tuple[RawView | None, ...]
# A stream's handle and addresses.
Places = tuple[int, ...]


class View(NamedTuple):
    """What a launch plan knows of a tensor in addition to the problem."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool


def raw_views(tensors: Sequence[Tensor | None]) -> RawViews:
    """The cache key of tensors: plain tuples, because this runs on every call that is not bound."""
    return tuple([None if t is None else (t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors])


def named_views(names: Sequence[str], raw: RawViews) -> dict[str, View]:
    """The views by name, without the absent tensors."""
    return {name: View(*view) for name, view in zip(names, raw, strict=False) if view is not None}


class Allocation(NamedTuple):
    """A tensor that a pass allocates on every call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """A contiguous one."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return cls(shape, tuple(reversed(strides)), dtype)

    @property
    def view(self) -> View:
        """The view that kernels get; a caching allocator aligns everything."""
        return View(self.strides, self.dtype, aligned=True)

    def in_layout(self, layout: str) -> Allocation:
        """The same memory with dimensions in the order of the caller's layout."""
        if layout != "bshd":
            return self
        return Allocation(_swapped(self.shape), _swapped(self.strides), self.dtype)


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    batch, heads, rows, columns = sizes
    return batch, rows, heads, columns


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


class Pass:
    """The kernels of a call in order, for tensors of known shapes, strides, alignment and device. Calling it with the
    tensors allocates the results and launches the kernels.

    `given` names the tensors of a call in order (the last ones may be left out, and the same ones are None in every
    call). `made` are the tensors that it allocates. Those that the caller does not read (`unread`) share one block,
    because every allocation costs host time. Kernels find at least `num_counters` zeros in the tensor "counter".

    Immutable except for the cache of launches by stream and addresses, to which any thread may add.
    """

    __slots__ = (
        "_aligned", "_allocate", "_counters", "_filled", "_given", "_index", "_launches", "_made", "_parts",
        "allocations", "captured", "device", "made", "num_counters",
    )  # fmt: skip

    def __init__(
        self,
        calls: Iterable[KernelCall],
        given: Sequence[str],
        made: Mapping[str, Allocation | None],
        device: DeviceSpec,
        index: int,
        *,
        num_counters: int = 0,
        unread: Sequence[str] = (),
    ) -> None:
        """Compile kernels that are not compiled yet."""
        self._given, self._index, self.device, self.num_counters = given, index, device, num_counters
        self.allocations = {name: allocation for name, allocation in made.items() if allocation is not None}
        read = {name: allocation for name, allocation in self.allocations.items() if name not in unread}
        self.made, self._parts, size = tuple(read), dict[str, tuple[int, Allocation]](), 0
        for name, allocation in self.allocations.items():
            if name not in read:
                self._parts[name] = (size, allocation)
                size += -(-math.prod(allocation.shape) * allocation.dtype.itemsize // STEP) * STEP
        self._made = [*read.values(), *([Allocation((size,), (1,), torch.uint8)] if self._parts else [])]
        # The function that inductor's code calls: it skips the dispatcher and takes half of new_empty_strided's time.
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        self._allocate = guards._empty_strided_cpu if index < 0 else guards._empty_strided_cuda  # noqa: SLF001
        self._counters = counters_of(index) if num_counters else None
        kept = [call for call in calls if 0 not in call.grid]
        self._launches: tuple[Launch, ...] = _on_device(index, _prepared, kept, device, index)
        self._aligned = aligned_names(self.calls)
        self._filled: dict[Places, Sequence[Filled]] = {}
        # A pass that CUDA graphs capture instead, if any: kernels chosen without regard to host time.
        self.captured: Pass | None = None

    @property
    def calls(self) -> list[KernelCall]:
        """Its kernels, in order."""
        return [launch.call for launch in self._launches]

    def __call__(self, tensors: Sequence[Tensor | None], places: Places | None = None) -> list[Tensor] | None:
        """The allocated tensors in the order of `made`, followed by workspace that is not the caller's; None if an
        address lacks the alignment that the kernels need.

        `places`: the addresses of the tensors that are not None, if the caller knows them.
        """
        index, stream, allocate = self._index, 0, self._allocate
        if index >= 0:
            if index != _current_device():  # a guard takes microseconds
                with torch.cuda.device(index):
                    return self(tensors, places)
            stream = _current_stream(index)
            if self.captured is not None and _is_capturing():
                return self.captured(tensors, places)
        if places is None:
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        made = [allocate(shape, strides, dtype) for shape, strides, dtype in self._made]
        used = made if self._counters is None else [*made, self._counters.current(self.num_counters)]
        everywhere = (stream, *places, *[tensor.data_ptr() for tensor in used])
        filled = self._filled.get(everywhere)
        if filled is None:
            addresses = {name: tensor.data_ptr() for name, tensor in self._named(tensors, used).items()}
            for name, (begin, _) in self._parts.items():
                addresses[name] = addresses[BLOCK] + begin
            if any(addresses[name] % ALIGNMENT for name in self._aligned):
                return None
            direct = all(launch.is_direct for launch in self._launches)
            filled = [launch.filled(stream, addresses) for launch in self._launches] if direct else []
            _remember(self._filled, everywhere, filled)
        done = queued(filled)
        if done < len(self._launches):  # the driver refused the others, or hooks must see them
            named = self._named(tensors, used)
            for name, (begin, (shape, strides, dtype)) in self._parts.items():
                end = begin + math.prod(shape) * dtype.itemsize
                named[name] = named[BLOCK][begin:end].view(dtype).as_strided(shape, strides)
            for launch in self._launches[done:]:
                launch.start(stream, named)
        return made

    def run(self, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The allocated tensors by name; the pass must have been prepared for the alignment of these tensors."""
        made = self(tensors)
        assert made is not None
        return dict(zip(self.made, made, strict=False))

    def _named(self, tensors: Sequence[Tensor | None], used: Sequence[Tensor]) -> dict[str, Tensor]:
        """All tensors of a call by name: given, allocated, the shared block, and the counters."""
        named = {name: tensor for name, tensor in zip(self._given, tensors, strict=False) if tensor is not None}
        names = (*self.made, *([BLOCK] if self._parts else []), *([] if self._counters is None else ["counter"]))
        return named | dict(zip(names, used, strict=True))

    def followed_by(
        self, other: Pass, renamed: Iterable[KernelCall], given: Sequence[str], made: dict[str, Allocation],
        unread: Sequence[str],
    ) -> Pass:  # fmt: skip
        """One pass of these kernels followed by those of another; `given` and `unread` are of both."""
        counters = max(self.num_counters, other.num_counters)
        calls, made = (*self.calls, *renamed), self.allocations | made
        return type(self)(calls, given, made, self.device, self._index, num_counters=counters, unread=unread)


class Wish(NamedTuple):
    """What a caller reads: results in its own layout or heads first, and which other tensors (`also`)."""

    in_layout: bool = False
    also: tuple[str, ...] = ("lse",)


# What a backend's own functions read.
HEADS_FIRST = Wish()


def pass_of(
    layout: str, calls: Iterable[KernelCall], given: Sequence[str], made: Mapping[str, Allocation | None],
    device: DeviceSpec, index: int, wish: Wish, *, num_counters: int = 0, kind: type[Pass] = Pass,
) -> Pass:  # fmt: skip
    """A pass that allocates what the caller reads; all else that is no result shares one block."""
    unread = [name for name in made if name not in (*RESULTS, *wish.also)]
    if wish.in_layout:
        made = {n: a.in_layout(layout) if a is not None and n in RESULTS else a for n, a in made.items()}
    return kind(calls, given, made, device, index, num_counters=num_counters, unread=unread)


def _prepared(calls: Iterable[KernelCall], device: DeviceSpec, index: int) -> tuple[Launch, ...]:
    plain = interpreted()
    return tuple(Launch(call, None if plain else compile_call(call, device, index)) for call in calls)


# The functions behind torch's own wrappers, which take longer.
def _current_device() -> int:
    found: int = torch._C._cuda_getDevice()  # noqa: SLF001
    return found


def _current_stream(index: int) -> int:
    found: int = torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001
    return found


def _is_capturing() -> bool:
    return bool(torch._C._cuda_isCurrentStreamCapturing())  # noqa: SLF001


def _remember(known: dict[Places, Sequence[Filled]], places: Places, filled: Sequence[Filled]) -> None:
    """Cache the launches of a stream and addresses until MAX_FILLED newer ones, of all passes, have been added."""
    known[places] = filled
    order = _order()
    order.append((known, places))
    while len(order) > MAX_FILLED:
        others, oldest = order.popleft()
        others.pop(oldest, None)


@functools.cache
def _order() -> deque[tuple[dict[Places, Any], Places]]:
    """The cached entries of all passes, oldest first; any thread may add."""
    return deque()


def _on_device(index: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with CUDA device `index` current, because kernels are loaded there."""
    if index < 0 or index == _current_device():
        return function(*args)
    with torch.cuda.device(index):
        return function(*args)
