"""From described kernel calls to launches: prepared once for a device, then run with nothing but addresses to fill in.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.driver import DirectLaunch, Filled, OrdinaryLaunch, is_hooked, launch_of
from tilewise.backends.gpu.symbols import ALIGNMENT, KernelCall, addressed_names, materialised
from tilewise.device import DeviceSpec
from tilewise.operands import Operands

__all__ = [
    "BOUND_BACKWARD",
    "MAX_PASSES",
    "Allocation",
    "BoundPass",
    "Launches",
    "RawView",
    "View",
    "interpreted",
    "on_device",
    "raw_views",
]

# Passes that a backend keeps ready, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# Argument lists kept for each pass, some 2 KiB each: a caching allocator hands out the same addresses again and again,
# in training one set for every layer.
MAX_FILLED = 128
# In which order a backward pass is given its tensors once it is bound.
BOUND_BACKWARD = ("dout", "dlse", "out", "lse", *Operands._fields)
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

    def in_layout(self, layout: str) -> Allocation:
        """Heads-first rows in the order of dimensions that a caller with this layout sees."""
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
    """Kernel calls of one pass, in order, ready to run on one device.

    Immutable but for the filled argument lists, which any thread may add to.
    """

    __slots__ = ("_filled", "_index", "_pick", "_starts", "calls", "used")

    def __init__(self, calls: Iterable[KernelCall], names: Sequence[str], device: DeviceSpec, index: int) -> None:
        """Compile what is not compiled yet. `names` says which tensor stands where in `run`."""
        self.calls = tuple(call for call in calls if 0 not in call.grid)
        # Of some 20 tensors that a pass may have a call has 5: only their addresses are asked for.
        self.used = addressed_names(self.calls)
        self._pick = picker([names.index(name) for name in self.used])
        self._index = index
        self._starts: list[DirectLaunch | OrdinaryLaunch | InterpretedLaunch] = [
            InterpretedLaunch(call, self.used)
            if interpreted()
            else launch_of(call, compile_call(call, device, index), self.used)
            for call in self.calls
        ]
        self._filled: dict[tuple[int, ...], list[Filled]] = {}

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Queue all of them on the current stream."""
        self.start(self._pick(tensors))

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Queue all of them on the current stream; tensors in the order of `used`."""
        index = self._index
        # The raw call is what triton itself uses; a CPU, where kernels are interpreted, has stream 0.
        stream: int = 0 if index < 0 else torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001
        places = (stream, *[tensor.data_ptr() for tensor in tensors])
        filled = self._filled.get(places)
        if filled is None:
            filled = self._fill(places)
        if filled and not is_hooked():
            for function, arguments in filled:
                function(*arguments)
            return
        for start in self._starts:
            start(stream, places[1:], tensors)

    def _fill(self, places: tuple[int, ...]) -> list[Filled]:
        """The argument lists for these addresses, if the kernels are started directly: else none."""
        stream, *addresses = places
        direct = [start for start in self._starts if isinstance(start, DirectLaunch)]
        if len(direct) < len(self._starts):
            return []
        if len(self._filled) >= MAX_FILLED:
            self._filled.clear()
        filled = self._filled[places] = [start.filled(stream, addresses) for start in direct]
        return filled


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """What takes these out of a sequence, as a tuple; a pass that has nothing to launch takes none."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


class BoundPass:
    """A pass for tensors of known shapes, strides, alignment and device: called with them, it makes the results and
    launches.

    `given` names the tensors of a call in order (the last ones may be left out), `made` what is made for it, and
    `counter`, where kernels count, what gives them the tensor called `counter_name`. Immutable: any thread may call it.
    """

    __slots__ = ("_counter", "_index", "_launches", "_made", "_pick", "made")

    def __init__(
        self,
        launches: Launches,
        given: Sequence[str],
        made: Mapping[str, Allocation | None],
        index: int,
        counter: Callable[[], Tensor] | None = None,
        counter_name: str = "counter",
    ) -> None:
        self._made = [allocation for allocation in made.values() if allocation is not None]
        self.made = tuple(name for name, allocation in made.items() if allocation is not None)
        self._launches, self._index, self._counter = launches, index, counter
        # From the back where they are made, since not all that may be given is.
        behind = self.made if counter is None else (*self.made, counter_name)
        places = [behind.index(n) - len(behind) if n in behind else given.index(n) for n in launches.used]
        self._pick = picker(places)

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """What was made, in the order of `made`."""
        index = self._index
        if index >= 0 and index != torch._C._cuda_getDevice():  # noqa: SLF001  (a guard takes microseconds)
            with torch.cuda.device(index):
                return self(tensors)
        # What inductor's code calls: past the dispatcher, without keywords, 1.3 us where new_empty_strided takes 2.8.
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        allocate = guards._empty_strided_cpu if index < 0 else guards._empty_strided_cuda  # noqa: SLF001
        made = [allocate(shape, strides, dtype) for shape, strides, dtype in self._made]
        counter = self._counter
        behind = made if counter is None else (*made, counter())
        self._launches.start(self._pick((*tensors, *behind)))
        return made


def on_device(index: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call with the CUDA device `index` current; switching costs microseconds, so only where another one is."""
    if index < 0 or index == torch._C._cuda_getDevice():  # noqa: SLF001  (torch.cuda's wrapper checks for CUDA first)
        return function(*args)
    with torch.cuda.device(index):
        return function(*args)
