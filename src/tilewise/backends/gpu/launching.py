"""A pass: a sequence of kernel calls prepared once for a problem, strides, alignment and device, then called with
tensors. It allocates the results and launches the kernels.

Nothing here waits for the device (except when a device's first counters are made), so calls can be captured in a CUDA
graph. Figures: bench/results/gpu-host-choices.csv.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.gpu.counters import counters_of
from tilewise.backends.gpu.driver import Block, Launch, queued
from tilewise.backends.gpu.symbols import ALIGNMENT, Address, KernelCall, aligned_names
from tilewise.device import DeviceSpec
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Number, Trace, code, function, numbers_in, unpacked

# Passes that a backend caches, one for each combination of problem, strides and alignment: about 20 KiB each.
MAX_PASSES = 512
# Laid-out launches that are cached for the same sizes, one for each set of addresses: some 2 KiB each. A caching
# allocator hands out the same addresses again and again, in training one set for every layer.
MAX_LAID_OUT = 128
# Alignment of tensors that share a block, about that of a caching allocator; and the name of the block.
STEP, BLOCK = 256, "block"
# The operands that are read, and the order of the tensors that a backward pass is given.
INPUTS = Operands._fields[: Operands._fields.index("out")]
BACKWARD_GIVEN = ("dout", "dlse", "out", "lse", *INPUTS)
# Strides, dtype, and whether the address is a multiple of 16 bytes: part of the cache key.
RawView = tuple[tuple[int, ...], torch.dtype, bool]
RawViews = tuple[RawView | None, ...]


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


class Sized(NamedTuple):
    """The numbers that a pass needs for certain sizes, and its launches by stream and addresses: None for addresses,
    or sizes, that were met only once.
    """

    numbers: tuple[int | float, ...]
    laid_out: dict[tuple[int, ...], Sequence[Block] | None] | None

    def kept(self) -> Sized:
        """The same for sizes that come again: launches are cached."""
        return self._replace(laid_out={})


class Pass:
    """The kernels of a call in order. Calling it with the tensors allocates the results and launches the kernels.

    `given` names the tensors of a call in order (the last ones may be left out, and the same ones are None in every
    call). `made` are the tensors that it allocates; those that the caller does not `read` share one block, because
    every allocation costs host time. Those in `copied` the kernels cannot address: a contiguous copy of this dtype is
    made first, of a canonical tensor. Kernels find at least `num_counters` zeros in the tensor "counter".

    Sizes may be numbers of a trace: after `open` the pass serves other sizes too, which `sized` computes.
    """

    __slots__ = (
        "_allocate", "_counters", "_given", "_index", "_is_direct", "_is_open", "_launches", "_lay_out", "_make",
        "_names", "_parts", "_sized", "_spare", "allocations", "captured", "copied", "described", "device", "made",
        "num_counters",
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
        # The names of a call's tensors and of those that it makes, in the order of their addresses.
        self._names: list[str] | None = None
        self._launches = _prepared([call for call in calls if 0 not in call.grid], device, index)
        self._is_direct = all(launch.is_direct for launch in self._launches)
        # Everything in which calls of the pass may differ, but addresses and stream.
        self.described = (
            tuple(tuple(a) for a in [*[self.allocations[name] for name in self.made], *block]),
            tuple(begin for begin, _ in self._parts.values()),
            num_counters,
            tuple(launch.described for launch in self._launches),
        )
        # The functions that make the tensors, and that lay the launches out; the first call tells for which tensors.
        self._make: Any = self._made_alike
        self._lay_out: Any = None
        self._sized = Sized((), {})
        # Blocks of launches that later ones may use.
        self._spare: deque[Sequence[Block]] = deque()
        self._is_open = False
        # A pass that CUDA graphs capture instead, if any: kernels chosen without regard to host time.
        self.captured: Pass | None = None

    @property
    def calls(self) -> list[KernelCall]:
        """Its kernels, in order."""
        return [launch.call for launch in self._launches]

    def open(self, trace: Trace) -> Callable[..., Sized | None]:
        """From now on the pass serves all sizes to which its trace applies. Returns the function that computes what it
        needs for given tensors (those that are not None), or None where it does not apply.
        """
        self._is_open = True
        numbers = self._numbers()
        made = [f"allocate({code(shape)}, {code(strides)}, {dtype})" for shape, strides, dtype in self.described[0]]
        lines = [*unpacked(numbers, "numbers"), f"made = [{', '.join(made)}]"]
        used = "made" if self._counters is None else f"[*made, current({code(self.num_counters)}, stream)]"
        names = {"allocate": self._allocate, "torch": torch, "current": self._counters and self._counters.current}
        self._make = function("numbers, stream", [*lines, f"return made, {used}"], names)
        measure: Callable[..., Sized | None] = trace.function(
            [f"return Sized({code(numbers)}, None)"], {"Sized": Sized}
        )
        return measure

    def _made_alike(self, _numbers: Any, stream: int) -> tuple[list[Tensor], list[Tensor]]:
        """(the tensors of a pass that is not open, these and counters)."""
        made = [self._allocate(shape, strides, dtype) for shape, strides, dtype in self.described[0]]
        return made, made if self._counters is None else [*made, self._counters.current(self.num_counters, stream)]

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, sized: Sized | None = None
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
        if places is None:
            places = tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])
        numbers, known = self._sized if sized is None else sized
        made, used = self._make(numbers, stream)
        key = (stream, *places, *[tensor.data_ptr() for tensor in used])
        blocks, is_spare = None if known is None else known.get(key), False
        if blocks is None:
            # Addresses that are met for the first time may never come again.
            is_spare = known is None or key not in known
            blocks = self._laid_out(numbers, key, tensors, is_spare=is_spare)
            if blocks is None:
                return None
            if known is not None:
                known[key] = None if is_spare else blocks
                if len(known) > MAX_LAID_OUT:
                    with contextlib.suppress(RuntimeError):  # another thread has just changed it, too
                        known.pop(next(iter(known)), None)
        done = queued(blocks)
        if done < len(self._launches):  # the driver refused the others, or hooks must see them
            if self._is_open:  # the kernels are described with numbers
                return None
            self._start(done, stream, tensors, used)
        elif is_spare:
            self._spare.append(blocks)
        return made  # type: ignore[no-any-return]

    def _laid_out(
        self, numbers: tuple[Any, ...], key: tuple[int, ...], tensors: Sequence[Tensor | None], *, is_spare: bool
    ) -> Sequence[Block] | None:
        """The launches of a call. `is_spare`: their memory is lent until they have started."""
        if self._lay_out is None:
            numbers = self._write(self._named(tensors)) or numbers
        blocks: Sequence[Block] = []
        if is_spare:
            try:
                blocks = self._spare.pop()
            except IndexError:  # all are lent
                blocks = []
        if not blocks and self._is_direct:
            blocks = [launch.block() for launch in self._launches]
        try:
            fits = self._lay_out(numbers, key, blocks)
        except struct.error:  # a number takes more bits than in the calls for which the kernels were compiled
            return None
        return blocks if fits else None

    def _numbers(self) -> tuple[Number, ...]:
        """The numbers of a trace that its calls differ in."""
        found = {number.at: number for number in numbers_in(self.described)}
        return tuple(found[at] for at in sorted(found))

    def _write(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Write the function that lays the launches out, for tensors with these names. A pass that is not open takes
        all its numbers as arguments, so that others share the compiled code; they are returned.
        """
        numbers: list[Any] = []

        def spelled(value: Any) -> str:
            if self._is_open:
                return code(value)
            numbers.append(value)
            return f"n{len(numbers) - 1}"

        def located(address: Address) -> str:
            offset, place = address.offset, places[address.name]
            return place if offset.__class__ is int and not offset else f"{place} + {spelled(offset)}"

        places = {name: f"at_{name}" for name in names}
        before = f"stream, {', '.join(places.values())}, = key"
        places |= {name: f"at_{BLOCK} + {spelled(begin)}" for name, (begin, _) in self._parts.items()}
        aligned = sorted(aligned_names([argument for call in self.calls for argument in call.arguments.values()]))
        lines = (
            [f"if ({' | '.join([places[name] for name in aligned])}) % {ALIGNMENT}: return False"] if aligned else []
        )
        refers: dict[str, Any] = {}
        for at, launch in enumerate(self._launches if self._is_direct else ()):
            lines += launch.lines(at, spelled, located, refers)
        unpacking = unpacked(self._numbers(), "numbers") if self._is_open else unpacked(numbers, "numbers")
        self._lay_out = function("numbers, key, blocks", [*unpacking, before, *lines, "return True"], refers)
        if not self._is_open:
            self._sized = Sized(tuple(numbers), self._sized.laid_out)
        return tuple(numbers)

    def _start(self, done: int, stream: int, tensors: Sequence[Tensor | None], used: Sequence[Tensor]) -> None:
        """Launch the kernels from number `done` on by Triton's own path."""
        given = [tensor for tensor in tensors if tensor is not None]
        named = dict(zip(self._named(tensors), [*given, *used], strict=True))
        for name, (begin, (shape, strides, dtype)) in self._parts.items():
            end = begin + math.prod(shape) * dtype.itemsize
            named[name] = named[BLOCK][begin:end].view(dtype).as_strided(shape, strides)
        for launch in self._launches[done:]:
            launch.start(stream, named)

    def _named(self, tensors: Sequence[Tensor | None]) -> list[str]:
        """The names of a call's tensors, which are the same in every call, then of those that it makes."""
        if self._names is None:
            given = [name for name, tensor in zip(self._given, tensors, strict=False) if tensor is not None]
            block, counter = [BLOCK] if self._parts else [], [] if self._counters is None else ["counter"]
            self._names = [*given, *self.made, *block, *counter]
        return self._names

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
