"""From described kernel calls to launches: prepared once for a device, then run with nothing but addresses to fill in.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.driver import DirectLaunch, OrdinaryLaunch, launch_of
from tilewise.backends.gpu.symbols import ALIGNMENT, KernelCall, materialised
from tilewise.device import DeviceSpec

__all__ = ["MAX_PASSES", "Allocation", "Launches", "RawView", "View", "interpreted", "on_device", "raw_views"]

# Passes that a backend keeps ready, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# Strides, dtype, and whether the address is a multiple of 16 bytes: what launches are prepared for.
RawView = tuple[tuple[int, ...], torch.dtype, bool]


class View(NamedTuple):
    """What a prepared launch knows of a tensor beside what the problem says."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool


def raw_views(tensors: Sequence[Tensor | None]) -> tuple[RawView | None, ...]:
    """The tensors as a key: plain tuples, because this runs on every call."""
    return tuple([None if t is None else (t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors])


class Allocation(NamedTuple):
    """A tensor that a pass makes on every call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """One without gaps."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return cls(shape, tuple(reversed(strides)), dtype)

    @property
    def view(self) -> View:
        """As kernels see it; a caching allocator aligns everything."""
        return View(self.strides, self.dtype, aligned=True)

    def new(self, like: Tensor) -> Tensor:
        """Uninitialised, on the device of `like`."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


class InterpretedLaunch:
    """A call in Triton's interpreter."""

    __slots__ = ("_call", "_names")

    def __init__(self, call: KernelCall, names: Sequence[str]) -> None:
        self._call, self._names = call, names

    def __call__(self, stream: int, addresses: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Run the kernel on CPU tensors in the order of the names."""
        del stream, addresses
        named = dict(zip(self._names, tensors, strict=False))
        call = self._call
        arguments = {name: materialised(call.arguments[name], named) for name in call.kernel.arg_names}
        call.kernel[call.grid](**arguments, **call.options)


class Launches:
    """Kernel calls of one pass, in order, ready to run on one device."""

    __slots__ = ("_index", "_starts", "calls")

    def __init__(self, calls: Iterable[KernelCall], names: Sequence[str], device: DeviceSpec, index: int) -> None:
        """Compile what is not compiled yet. `names` says which tensor stands where in `run`."""
        self.calls = tuple(call for call in calls if 0 not in call.grid)
        self._index = index
        self._starts: list[DirectLaunch | OrdinaryLaunch | InterpretedLaunch] = [
            InterpretedLaunch(call, names)
            if interpreted()
            else launch_of(call, compile_call(call, device, index), names)
            for call in self.calls
        ]

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Queue all of them on the current stream."""
        stream = current_stream(self._index)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        for start in self._starts:
            start(stream, addresses, tensors)


def current_stream(index: int) -> int:
    """The handle of a device's current stream: 0 for a CPU, where kernels are interpreted."""
    if index < 0:
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001  (what triton itself calls)
    return stream


def on_device(index: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call with the CUDA device `index` current; switching costs microseconds, so only where another one is."""
    if index < 0 or index == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(index):
        return function(*args)
