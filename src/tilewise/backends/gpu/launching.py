"""A pass: a sequence of kernel calls prepared once for a problem, strides, alignment and device, or, after `open`, for
all sizes that its trace takes. Called with tensors, it allocates the results and launches the kernels.

Nothing here waits for the device (except when a device's first counters are made), so calls can be captured in a CUDA
graph. Figures: bench/results/gpu-host-choices.csv.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.counters import counters_of
from tilewise.backends.gpu.driver import Launch, is_hooked, refused
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, addresses_in, aligned_names
from tilewise.device import DeviceSpec
from tilewise.native import WORD, Frame, Plan
from tilewise.operands import Operands
from tilewise.operations import ASK, NO, YES
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Trace, numbers_in

# Passes that a backend caches, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# Alignment of tensors that share a block, about that of a caching allocator; and the name of the block.
STEP, BLOCK = 256, "block"
# The operands that are read, and the order of the tensors that a backward pass is given.
INPUTS = Operands._fields[: Operands._fields.index("out")]
BACKWARD_GIVEN = ("dout", "dlse", "out", "lse", *INPUTS)
# Strides, dtype, and whether the address is a multiple of 16 bytes: part of the cache key.
RawView = tuple[tuple[int, ...], torch.dtype, bool]
RawViews = tuple[RawView | None, ...]
_address = Tensor.data_ptr


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

    @classmethod
    def rows(
        cls, problem: AttentionProblem, heads: int, seqlen: int, total: int, dim: int, dtype: torch.dtype
    ) -> Allocation:
        """A tensor of token rows: heads first, in the memory order of the problem's layout."""
        if problem.kind != "dense":
            return cls.contiguous((total, heads, dim), dtype)
        if problem.layout == "bshd":
            return cls.contiguous((problem.batch, seqlen, heads, dim), dtype).swapped()
        return cls.contiguous((problem.batch, heads, seqlen, dim), dtype)

    @property
    def view(self) -> View:
        """The view that kernels get; a caching allocator aligns everything."""
        return View(self.strides, self.dtype, aligned=True)

    def swapped(self) -> Allocation:
        """The same memory with heads and rows exchanged."""
        shape, strides = ((sizes[0], sizes[2], sizes[1], sizes[3]) for sizes in (self.shape, self.strides))
        return Allocation(shape, strides, self.dtype)


def heads_first(problem: AttentionProblem, tensor: Tensor) -> Tensor:
    """A result that a pass made in the caller's layout, as backends return it."""
    return tensor.transpose(1, 2) if problem.layout == "bshd" else tensor


def are_adjacent(problem: AttentionProblem, out: Tensor) -> bool:
    """Whether kernels that take `out` by pointers can write into a given one. Rows past the last packed sequence are
    cleared as contiguous memory.
    """
    if problem.kind != "dense":
        return out.is_contiguous()
    return out.stride(-1) == 1 or problem.head_dim_v == 1


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


class Pass:
    """The kernels of a call in order. Calling it with the tensors allocates the results and launches the kernels.

    `given` names the tensors of a call in order; the last ones may be left out, and the same ones are None in every
    call. `made` are the tensors that it allocates; those that the caller does not `read` share one block, because
    every allocation costs host time. Those in `copied` the kernels cannot address: a contiguous copy of this dtype is
    made first, of a canonical tensor. Kernels find at least `num_counters` zeros in the tensor "counter".

    Sizes may be numbers of a trace: after `open` the pass serves other sizes too.
    """

    __slots__ = (
        "_allocate", "_counters", "_given", "_index", "_is_direct", "_laid_out", "_launches", "_parts", "allocations",
        "captured", "copied", "described", "device", "made", "num_counters",
    )  # fmt: skip

    def __init__(
        self,
        calls: Iterable[KernelCall],
        given: Sequence[str],
        made: Mapping[str, Allocation | None],
        device: DeviceSpec,
        index: int,
        *,
        read: Collection[str] = (),
        copied: Mapping[str, torch.dtype] | None = None,
        num_counters: int = 0,
    ) -> None:
        """Compile kernels that are not compiled yet. An allocation that is None is left out."""
        self._given, self._index, self.device, self.num_counters = given, index, device, num_counters
        self.copied = copied or {}
        self.allocations = {name: allocation for name, allocation in made.items() if allocation is not None}
        self.made = tuple(name for name in self.allocations if name in read)
        self._parts, size = dict[str, tuple[int, Allocation]](), 0
        for name, allocation in self.allocations.items():
            if name not in self.made:
                self._parts[name] = (size, allocation)
                size += -(-math.prod(allocation.shape) * allocation.dtype.itemsize // STEP) * STEP
        block = [Allocation((size,), (1,), torch.uint8)] if self._parts else []
        # The function that inductor's code calls: it skips the dispatcher and takes half of new_empty_strided's time.
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001
        self._allocate = guards._empty_strided_cpu if index < 0 else guards._empty_strided_cuda  # noqa: SLF001
        self._counters = counters_of(index) if num_counters.__class__ is not int or num_counters else None
        self._launches = _prepared([call for call in calls if 0 not in call.grid], device, index)
        self._is_direct = all(launch.is_direct for launch in self._launches)
        # Everything in which calls of the pass may differ, but addresses and stream.
        self.described = (
            tuple(tuple(a) for a in [*[self.allocations[name] for name in self.made], *block]),
            tuple(begin for begin, _ in self._parts.values()),
            num_counters,
            tuple(launch.described for launch in self._launches),
        )
        # Made by `open`, or by the first call, which tells for which tensors.
        self._laid_out: _LaidOut | None = None
        # A pass that CUDA graphs capture instead, if any: kernels chosen without regard to host time.
        self.captured: Pass | None = None

    @property
    def calls(self) -> list[KernelCall]:
        """Its kernels, in order."""
        return [launch.call for launch in self._launches]

    def open(self, trace: Trace) -> Callable[..., Frame | None]:
        """From now on the pass serves all sizes to which its trace applies. Returns the function that computes what it
        needs for given tensors (those that are not None) and lengths, or None where it does not apply.
        """
        used = {address.name for call in self.calls for address in addresses_in(call.arguments.values())}
        # The trace has no addresses of copies, nor of a result that the call makes for the kernels.
        lacking = used - trace.tensors.keys() - self.allocations.keys() | self.copied.keys()
        self._laid_out = self._lay_out(trace, [name for name in self._given if name in lacking])
        return self._laid_out.plan.measure

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, sized: Frame | None = None
    ) -> list[Tensor] | None:
        """The allocated tensors in the order of `made`, followed by workspace that is not the caller's; None if an
        address lacks the alignment that the kernels need, or a number does not fit.

        `places`: the addresses of the tensors that are not None, if the caller knows them. `sized`: what `open`'s
        function returned for these tensors.
        """
        index, stream = self._index, 0
        if index >= 0:
            if index != torch._C._cuda_getDevice():  # noqa: SLF001  (a guard takes microseconds)
                with torch.cuda.device(index):
                    return self(tensors, places, sized)
            stream = torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001
            if self.captured is not None and torch._C._cuda_isCurrentStreamCapturing():  # noqa: SLF001
                return self.captured(tensors, places)
        if self.copied:
            tensors, places = self._copies(tensors), None
        found = self._laid_out
        if found is None:
            given = [name for name, tensor in zip(self._given, tensors, strict=False) if tensor is not None]
            found = self._laid_out = self._lay_out(None, given)
        plan, allocate, counters = found.plan, self._allocate, self.num_counters
        if found.is_open:
            if sized is None:
                return None
            frame, numbers = sized, plan.read(sized)
            counters = numbers[-1]
            made = [allocate(numbers[shape], numbers[strides], dtype) for shape, strides, dtype in found.made]
            places = tuple([tensors[i].data_ptr() for i in found.read]) if found.read else ()  # type: ignore[union-attr]
        else:
            frame = plan.frame()
            made = [allocate(shape, strides, dtype) for shape, strides, dtype in found.made]
            if places is None:
                places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        used = made
        if self._counters is not None:
            used = [*made, self._counters.current(counters, stream)]
        found.put(frame.words, found.first, stream, is_hooked(), *places, *map(_address, used))
        status = plan.start(*frame.starting)
        if status >= ASK:  # what this frame has is no map
            raise refused(plan, frame, status - ASK)
        plan.release(frame)
        if status == NO:
            return None
        if status != YES or not self._is_direct:  # the driver refused a launch, or hooks must see all
            if found.is_open:  # the kernels are described with numbers
                return None
            self._start(max(-1 - status, 0), stream, tensors, used)
        return made

    def _lay_out(self, trace: Trace | None, read: Sequence[str]) -> _LaidOut:
        """The plan of a pass whose calls read the addresses of these tensors; those of others the trace has."""
        made, outputs = list[Any](self.described[0]), list[Any]()
        for at, (shape, strides, dtype) in enumerate(made if trace is not None else ()):
            begin, middle, end = len(outputs), len(outputs) + len(shape), len(outputs) + 2 * len(shape)
            made[at] = slice(begin, middle), slice(middle, end), dtype
            outputs += (*shape, *strides)
        plan = Plan(trace, (*outputs, self.num_counters), numbers_in(self.described))
        block, counter = [BLOCK] if self._parts else [], [] if self._counters is None else ["counter"]
        names = [*read, *self.made, *block, *counter]
        stream = plan.words(*[0] * (2 + len(names)))
        words = plan.addresses | {name: stream + 2 + i for i, name in enumerate(names)}
        for name, (begin, _) in self._parts.items():
            words[name] = self._offset(plan, words[BLOCK], begin)
        aligned = sorted(aligned_names([argument for call in self.calls for argument in call.arguments.values()]))
        if aligned:
            every, *others = [words[name] for name in aligned]
            for word in others:
                every = plan.operate("|", plan.words(0), every, word)
            plan.operate("==", 1, plan.operate("%", plan.words(0), every, plan.word(ALIGNMENT)), plan.word(0))

        def located(address: Address) -> int:
            return self._offset(plan, words[address.name], address.offset)

        direct = self._launches if self._is_direct else ()
        drives = [launch.lay_out(plan, located, stream) for launch in direct]
        plan.operate("watched", 0, stream + 1)
        for number, drive in enumerate(drives):
            drive(number)
        put, indices = struct.Struct(f"={2 + len(names)}q").pack_into, [self._given.index(name) for name in read]
        return _LaidOut(plan.finish(), trace is not None, made, indices, names, put, WORD * stream)

    @staticmethod
    def _offset(plan: Plan, word: int, offset: Any) -> int:
        """The word with an address and some bytes more."""
        if offset.__class__ is int and not offset:
            return word
        return plan.operate("+", plan.words(0), word, plan.word(offset))

    def _start(self, done: int, stream: int, tensors: Sequence[Tensor | None], used: Sequence[Tensor]) -> None:
        """Launch the kernels from number `done` on by Triton's own path."""
        named: dict[str, Any] = dict(zip(self._given, tensors, strict=False))
        made = [*self.made, *([BLOCK] if self._parts else []), *([] if self._counters is None else ["counter"])]
        named |= zip(made, used, strict=True)
        for name, (begin, (shape, strides, dtype)) in self._parts.items():
            end = begin + math.prod(shape) * dtype.itemsize
            named[name] = named[BLOCK][begin:end].view(dtype).as_strided(shape, strides)
        for launch in self._launches[done:]:
            launch.start(stream, named)

    def run(self, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """The allocated tensors by name; the pass must have been prepared for the alignment of these tensors."""
        made = self(tensors)
        assert made is not None
        return dict(zip(self.made, made, strict=False))

    def _copies(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        names, whole = zip(self._given, tensors, strict=False), torch.contiguous_format
        return [
            t if t is None or name not in self.copied else t.to(self.copied[name], copy=True, memory_format=whole)
            for name, t in names
        ]

    def followed_by(
        self,
        other: Pass,
        renamed: Iterable[KernelCall],
        given: Sequence[str],
        made: dict[str, Allocation],
        read: Collection[str],
    ) -> Pass:
        """One pass of these kernels followed by those of another; `given` and `read` are of both."""
        counters = max(self.num_counters, other.num_counters)
        calls, made = (*self.calls, *renamed), self.allocations | made
        return type(self)(calls, given, made, self.device, self._index, read=read, num_counters=counters)


class _LaidOut(NamedTuple):
    """A pass as a plan. `made` are shapes, strides and dtypes; of an open pass, where the plan puts these sizes out.
    `put` packs the stream, whether launches are watched, and the addresses of `names` from byte `first` on: of tensors
    number `read` of a call, and of what is made.
    """

    plan: Plan
    is_open: bool
    made: list[tuple[Any, Any, torch.dtype]]
    read: list[int]
    names: list[str]
    put: Callable[..., None]
    first: int


def bound_to(
    prepare: Callable[..., Pass], problem: AttentionProblem, tensors: Sequence[Tensor | None], q: Tensor, *wish: Any
) -> Pass:
    """The pass of a problem for tensors with these strides, alignment and device. See the `*_pass` functions."""
    given = problem, devices.of(q.device), q.get_device(), raw_views(tensors), *wish
    # A problem with numbers of a trace is no key.
    return prepare(*given) if problem.is_traced else kept(prepare, *given)


@functools.lru_cache(maxsize=MAX_PASSES)
def kept(prepare: Callable[..., Pass], *given: Any) -> Pass:
    """What `prepare` makes. The one cache of passes for exact sizes, for calls that no plan of all sizes serves:
    without it each of them would prepare its launches anew, which takes ten times as long as launching.
    """
    return prepare(*given)


def described(
    describe: Callable[[Any, RawViews], Iterable[KernelCall]],
    names: tuple[str, ...],
    sizes: Any,
    tensors: Sequence[Tensor | None],
) -> Pass:
    """The calls that `describe` makes of sizes and views; they write into given tensors, the first of which is not
    None. The pass is cached.
    """
    assert tensors[0] is not None
    return kept(_described, describe, names, sizes, raw_views(tensors), tensors[0].device)


def _described(describe: Any, names: tuple[str, ...], sizes: Any, views: RawViews, device: torch.device) -> Pass:
    index = device.index if device.type == "cuda" else -1
    return Pass(describe(sizes, views), names, {}, devices.of(device), index)


def launch(calls: Iterable[KernelCall], tensors: Mapping[str, Tensor]) -> None:
    """Launch calls once, on the device of these tensors, into which they write. No plan is cached: this is for kernels
    that run rarely.
    """
    device = next(iter(tensors.values())).device
    index = device.index if device.type == "cuda" else -1
    once = Pass(calls, tuple(tensors), {}, devices.of(device), index)
    launched = once(tuple(tensors.values()))
    assert launched is not None


def in_layout(problem: AttentionProblem, made: Mapping[str, Allocation | None]) -> dict[str, Allocation | None]:
    """What a pass makes, with results in the caller's layout."""
    if problem.layout != "bshd":
        return dict(made)
    results = ("out", "dot_out", "dq", "dk", "dv")
    return {name: a.swapped() if a is not None and name in results else a for name, a in made.items()}


def _prepared(calls: Iterable[KernelCall], device: DeviceSpec, index: int) -> tuple[Launch, ...]:
    """The launches of calls. Kernels are loaded on the current device, which is made `index`."""
    if index >= 0 and index != torch._C._cuda_getDevice():  # noqa: SLF001
        with torch.cuda.device(index):
            return _prepared(calls, device, index)
    return tuple(Launch(call, None if interpreted() else device, index) for call in calls)
