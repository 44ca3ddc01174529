"""From described kernel calls to launches: prepared once for a device, then run with nothing but addresses to fill in.

Nothing here waits for the device (but for the first counters of one), so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gpu.compilation import compile_call
from tilewise.backends.gpu.driver import DirectLaunch, Filled, OrdinaryLaunch, direct_launch, queued
from tilewise.backends.gpu.scratch import MAX_KEPT, STEP, Places, handed_on, kept_by_stream, made_anew, remember
from tilewise.backends.gpu.symbols import ALIGNMENT, KernelCall, addressed_names, aligned_names, materialised
from tilewise.device import DeviceSpec
from tilewise.operands import Operands

__all__ = [
    "BOUND_BACKWARD",
    "MAX_PASSES",
    "Allocation",
    "BoundPass",
    "Launches",
    "RawView",
    "RawViews",
    "View",
    "interpreted",
    "named_views",
    "on_device",
    "raw_views",
]

# Passes that a backend keeps ready, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# In which order a backward pass is given its tensors once it is bound.
BOUND_BACKWARD = ("dout", "dlse", "out", "lse", *Operands._fields)
# Strides, dtype, and whether the address is a multiple of 16 bytes: what launches are prepared for.
RawView = tuple[tuple[int, ...], torch.dtype, bool]
RawViews = tuple[RawView | None, ...]


class View(NamedTuple):
    """What a prepared launch knows of a tensor beside what the problem says."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool


def raw_views(tensors: Sequence[Tensor | None]) -> RawViews:
    """The tensors as a key: plain tuples, because this runs on every call."""
    return tuple([None if t is None else (t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors])


def named_views(names: Sequence[str], raw: RawViews) -> dict[str, View]:
    """What is there of the tensors called so."""
    return {name: View(*view) for name, view in zip(names, raw, strict=True) if view is not None}


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
    def nbytes(self) -> int:
        """Of a tensor without gaps."""
        return math.prod(self.shape) * self.dtype.itemsize

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

    def __call__(self, stream: int, tensors: Sequence[Tensor | None]) -> None:
        """Run the kernel on CPU tensors in the order of the names."""
        del stream
        named = dict(zip(self._names, tensors, strict=False))
        call = self._call
        arguments = {name: materialised(call.arguments[name], named) for name in call.kernel.arg_names}
        call.kernel[call.grid](**arguments, **call.options)


class Launches:
    """Kernel calls of one pass, in order, ready to run on one device.

    Immutable but for what is remembered by stream and addresses, which any thread may add to.
    """

    __slots__ = ("_device", "_direct", "_filled", "_index", "_ordinary", "_pick", "calls", "used")

    def __init__(self, calls: Iterable[KernelCall], names: Sequence[str], device: DeviceSpec, index: int) -> None:
        """Compile what is not compiled yet. `names` says which tensor stands where in `run`."""
        self.calls = tuple(call for call in calls if 0 not in call.grid)
        # Of some 20 tensors that a pass may have a call has 5: only their addresses are asked for.
        self.used = addressed_names(self.calls)
        self._pick = picker([names.index(name) for name in self.used])
        self._device, self._index = device, index
        self._ordinary: list[OrdinaryLaunch | InterpretedLaunch] = []
        direct: list[DirectLaunch | None] = []
        for call in self.calls:
            if interpreted():
                self._ordinary.append(InterpretedLaunch(call, self.used))
            else:
                compiled = compile_call(call, device, index)
                direct.append(direct_launch(call, compiled, self.used))
                self._ordinary.append(OrdinaryLaunch(call, compiled, self.used))
        self._direct = [launch for launch in direct if launch is not None]
        self._filled: dict[Places, list[Filled]] = {}

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Queue all of them on the current stream."""
        self.start(self._pick(tensors))

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Queue all of them on the current stream; tensors in the order of `used`."""
        # The raw call is what triton itself uses; a CPU, where kernels are interpreted, has stream 0.
        stream: int = 0 if self._index < 0 else torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001
        places = (stream, *map(Tensor.data_ptr, tensors))
        filled = self._filled.get(places)
        if filled is None:
            filled = self.filled(stream, places[1:])
            remember(self._filled, places, filled)
        done = queued(filled)
        if done < len(self.calls):
            self.start_ordinarily(stream, tensors, done)

    def followed_by(self, calls: Iterable[KernelCall], names: Sequence[str]) -> Launches:
        """These and more behind them; the tensors of all have other `names`."""
        return Launches((*self.calls, *calls), names, self._device, self._index)

    def filled(self, stream: int, addresses: Sequence[int]) -> list[Filled]:
        """What starts the kernels at addresses in the order of `used`; nothing where not all start directly."""
        if len(self._direct) < len(self._ordinary):
            return []
        return [launch.filled(stream, addresses) for launch in self._direct]

    def start_ordinarily(self, stream: int, tensors: Sequence[Tensor], done: int) -> None:
        """Queue all but the first ones, which the driver has: the others it refused, or hooks are to see them."""
        for start in self._ordinary[done:]:
            start(stream, tensors)


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """What takes these out of a sequence, as a tuple; a pass that has nothing to launch takes none."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


class Cuda(NamedTuple):
    """What a call asks torch, without the wrappers, which take longer."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    is_capturing: Callable[[], bool]


def _cuda() -> Cuda:
    found: Any = torch._C  # noqa: SLF001
    return Cuda(found._cuda_getDevice, found._cuda_getCurrentRawStream, found._cuda_isCurrentStreamCapturing)  # noqa: SLF001


class Behind(NamedTuple):
    """What kernels use beside the tensors of a call: of this, what is handed from one to the next has a lock."""

    tensors: list[Tensor]
    lock: threading.Lock | None


class Started(NamedTuple):
    """What starts the kernels of a pass on a stream at known addresses, and what they use beside the tensors there."""

    filled: list[Filled]
    behind: list[Tensor]
    lock: threading.Lock | None


class BoundPass:
    """A pass for tensors of known shapes, strides and device: called with them, it makes the results and launches.

    `given` names the tensors of a call in order (the last ones may be left out, and the same ones are None in every
    call), `made` what is made for it, and `counter`, where kernels count, what gives them the tensor called "counter".
    Those of `made` that are `unread` by the caller lie in memory that the stream keeps if they are small (see scratch),
    else they share one block: every allocation takes the host 1.3 to 2.2 us.

    Immutable but for what is remembered by stream and addresses, which any thread may add to.
    """

    __slots__ = (
        "_aligned", "_allocate", "_behind", "_cuda", "_handed", "_index", "_kept", "_launches", "_made",
        "_num_launches", "_order", "_parts", "_pick", "_started", "allocations", "captured", "counter", "made",
    )  # fmt: skip

    def __init__(
        self,
        launches: Launches,
        given: Sequence[str],
        made: Mapping[str, Allocation | None],
        index: int,
        counter: Callable[[], Tensor] | None = None,
        unread: Sequence[str] = (),
    ) -> None:
        self.allocations = {name: allocation for name, allocation in made.items() if allocation is not None}
        present = dict(self.allocations)
        hidden = {name: present.pop(name) for name in unread if name in present}
        kept = {n: a.nbytes for n, a in hidden.items() if is_keepable(a, n, launches.calls)}
        others = {n: a.nbytes for n, a in hidden.items() if n not in kept}
        handed = others if sum(others.values()) <= MAX_KEPT else {}
        self._parts, size = _in_a_block({} if handed else others)
        self.made, self._kept, self._handed = tuple(present), [*kept.values()], [*handed.values()]
        self._made = [*present.values(), *([Allocation((size,), (1,), torch.uint8)] if self._parts else [])]
        self._launches, self._index, self.counter = launches, index, counter
        self._num_launches = len(launches.calls)
        # What inductor's code calls: past the dispatcher, without keywords, 1.3 us where new_empty_strided takes 2.8.
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        self._allocate = guards._empty_strided_cpu if index < 0 else guards._empty_strided_cuda  # noqa: SLF001
        self._cuda = None if index < 0 else _cuda()
        behind = (*self._parts, *kept, *handed, *(() if counter is None else ("counter",)))
        outside = [name for name in launches.used if name not in behind]
        # From the back where they are made, since not all that may be given is.
        places = {name: at - len(self._made) for at, name in enumerate(self.made)}
        self._pick = picker([places[name] if name in places else given.index(name) for name in outside])
        self._order = picker([(*outside, *behind).index(name) for name in launches.used])
        aligned = aligned_names(launches.calls)
        self._aligned = [at for at, name in enumerate(outside) if name in aligned]
        # What a CUDA graph captures instead, if anything: kernels for which the host's time does not count.
        self.captured: BoundPass | None = None
        self._started: dict[Places, Started] = {}
        self._behind: dict[Places, Behind] = {}

    def __call__(self, tensors: Sequence[Tensor | None], places: Places | None = None) -> list[Tensor] | None:
        """What was made, in the order of `made`; None if an address is not aligned that the kernels want so.

        `places` are the addresses of the tensors that are there, if the caller knows them.
        """
        cuda, stream, capturing, allocate = self._cuda, 0, False, self._allocate
        if cuda is not None:
            index, (current_device, current_stream, is_capturing) = self._index, cuda
            if index != current_device():  # a guard takes microseconds
                with torch.cuda.device(index):
                    return self(tensors, places)
            stream, capturing = current_stream(index), is_capturing()
            if capturing and self.captured is not None:
                return self.captured(tensors, places)
        if places is None:
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        made = [allocate(shape, strides, dtype) for shape, strides, dtype in self._made]
        everywhere = (stream, *places, *[tensor.data_ptr() for tensor in made])
        known = self._started.get(everywhere)
        if known is None or (capturing and known.behind):
            known = self._start(everywhere, tensors, made)
            if known is None:
                return None
        lock = known.lock
        if lock is not None and not lock.acquire(False):
            known, lock = self._start(everywhere, tensors, made, alone=True), None
            assert known is not None
        try:
            done = queued(known.filled)
            if done < self._num_launches:
                self._launches.start_ordinarily(stream, self.used(tensors, made, known), done)
        finally:
            if lock is not None:
                lock.release()
        return made

    def _start(
        self, everywhere: Places, tensors: Sequence[Tensor | None], made: list[Tensor], *, alone: bool = False
    ) -> Started | None:
        """For a stream and addresses that are new, or by a graph that is being captured, or where another thread hands
        something on: these two get memory of their own (`alone`).
        """
        stream = everywhere[0]
        addresses = [tensor.data_ptr() for tensor in self._pick((*tensors, *made))]
        for at in self._aligned:
            if addresses[at] % ALIGNMENT:
                return None
        alone = alone or (self._cuda is not None and self._cuda.is_capturing())
        behind = None if alone else self._behind.get((stream,))
        if behind is None:
            behind = self._behind_on(stream, alone=alone)
            if not alone:
                remember(self._behind, (stream,), behind)
        addresses += [made[-1].data_ptr() + part.start for part in self._parts.values()]
        addresses += [tensor.data_ptr() for tensor in behind.tensors]
        started = Started(self._launches.filled(stream, self._order(addresses)), *behind)
        if not alone:
            remember(self._started, everywhere, started)
        return started

    def _behind_on(self, stream: int, *, alone: bool) -> Behind:
        index, lock = self._index, None
        if alone:
            tensors = made_anew((*self._kept, *self._handed), index)
        else:
            tensors = kept_by_stream(self._kept, index, stream)
            if self._handed:
                parts, lock = handed_on(self._handed, index, stream)
                tensors += parts
        return Behind(tensors if self.counter is None else [*tensors, self.counter()], lock)

    def used(self, tensors: Sequence[Tensor | None], made: list[Tensor], known: Started) -> tuple[Tensor, ...]:
        """The tensors of a call in the order of its launches."""
        parts = [made[-1][part] for part in self._parts.values()]
        ordered: tuple[Tensor, ...] = self._order((*self._pick((*tensors, *made)), *parts, *known.behind))
        return ordered

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """Its kernels, in order."""
        return self._launches.calls

    def followed_by(
        self,
        calls: Iterable[KernelCall],
        given: Sequence[str],
        made: dict[str, Allocation],
        unread: Sequence[str],
        counter: Callable[[], Tensor] | None,
    ) -> BoundPass:
        """This pass and more kernels behind it as one; `given`, `made`, `unread` and `counter` are of both."""
        # Kernels are loaded on the device that is current.
        names = (*given, *self.allocations, *made, "counter")
        launches = on_device(self._index, self._launches.followed_by, calls, names)
        return type(self)(launches, given, self.allocations | made, self._index, counter, unread)


def _in_a_block(sizes: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Where tensors of so many bytes begin and end that share a block, and its size."""
    parts, end = dict[str, slice](), 0
    for name, size in sizes.items():
        parts[name] = slice(end, end + size)
        end += -(-size // STEP) * STEP
    return parts, end


def is_keepable(allocation: Allocation, name: str, calls: Iterable[KernelCall]) -> bool:
    """Whether a tensor that no caller reads may lie in memory that all kernels of the stream use."""
    return allocation.nbytes <= MAX_KEPT and sum(name in addressed_names([call]) for call in calls) == 1


def on_device(index: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call with the CUDA device `index` current; switching costs microseconds, so only where another one is."""
    if index < 0 or index == torch._C._cuda_getDevice():  # noqa: SLF001  (torch.cuda's wrapper checks for CUDA first)
        return function(*args)
    with torch.cuda.device(index):
        return function(*args)
