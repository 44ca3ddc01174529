"""Launch a compiled kernel by calling the CUDA driver directly, with parameters that are laid out here.

Triton's own launch path, `CompiledKernel.__getitem__`, takes tens of microseconds of host time a kernel. It looks up
the device, wraps metadata for hooks, asks the driver about every pointer, encodes every tensor map again, and unpacks
Python objects into the parameters of cuLaunchKernelEx. For a compiled kernel all of this is fixed except the stream,
sizes and addresses. So straight-line code lays these out, and a launch is one call of the driver.

The parameters of a kernel are read from its PTX. If they differ from what is laid out here, whatever release of Triton
compiled it, the kernel is launched by Triton's own path. Figures: bench/results/gpu-host-choices.csv.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from tilewise.backends.gpu.compilation import MAX_COMPILED, TILE, compile_call, forget_compiled, kinds_of, typed
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple, Tile, materialised
from tilewise.device import DeviceSpec

LIBRARY = "libcuda.so.1"
# Types not listed here take a word. The last two parameters point to scratch memory, which these kernels do not use.
FORMATS = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
SIZES = {"i32": 4, "fp32": 4}
POINTER, WORD, NUM_SCRATCH = "Q", 8, 2
# CUlaunchConfig: grid, block, bytes of shared memory, stream; attributes and their number.
CONFIG, REST = "7I4xQ", "QI4x"
# CUlaunchAttribute: id and value; this one lets the kernel start while the one before it in the stream ends.
ATTRIBUTE, OVERLAPS = "I4xi60x", (6, 1)
WARP = 32
# Converts an address to a C argument. Done beforehand, because it takes as long as the call itself.
POINTER_ARGUMENT = ctypes.c_void_p.from_param
NULL_ARGUMENT = POINTER_ARGUMENT(0)
# The parameters of a kernel in PTX: `.param .u32 name` or, with 128 bytes, `.param .align 64 .b8 name[128]`.
ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?")
# CUtensorMap: its size and alignment, the driver's codes of element types, and the constants it is encoded with.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# Bytes of the numbers that a map of the highest rank, 5, is encoded from.
MAP_ROOM = 9 * WORD + 10 * 4
ELEMENTS = {
    torch.uint8: 0, torch.int8: 0, torch.float8_e4m3fn: 0, torch.uint16: 1, torch.int32: 3, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
NO_INTERLEAVING, PROMOTE_128_BYTES, FILL_ZEROS = 0, 2, 0
# Drivers up to this version set a bit in the maps of tensors below 128 KiB that must be cleared.
LAST_WITH_SMALL_BIT, SMALL_BYTES, SMALL_BIT = 13010, 128 << 10, 1 << 21
# Older drivers cannot capture a launch that overlaps the one before it in a CUDA graph.
FIRST_TO_CAPTURE_OVERLAPS = 12030


class Map(NamedTuple):
    """One tensor map of a launch: the driver's arguments, one of which is `address`, that of the tensor; the others
    were converted beforehand, because that takes most of a call's time. SMALL_BIT lies in `word`.
    """

    arguments: tuple[Any, ...]
    address: Any
    word: Any


class Block(NamedTuple):
    """The memory of a launch. `function` and `arguments` start what was laid out in it."""

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    memory: Any
    maps: tuple[Map, ...]


def launch_path() -> str:
    """How kernels are launched on this machine, for reports."""
    if _entry("cuLaunchKernelEx") is None:
        return f"Triton's, some 50 us more a kernel: no cuLaunchKernelEx in a library called {LIBRARY}"
    return "direct"


@functools.cache
def _entry(name: str) -> Callable[..., int] | None:
    """A function of the driver, which releases the GIL while it runs; None if the driver's library has another name
    (Triton searches further) or is too old.
    """
    try:
        function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)((name, ctypes.CDLL(LIBRARY)))
    except (OSError, AttributeError):
        return None
    return function


@functools.cache
def _driver_version() -> int:
    version, ask = ctypes.c_int(0), _entry("cuDriverGetVersion")
    if ask is not None:
        ask(ctypes.byref(version))
    return version.value


def _encoded(tile: Tile) -> tuple[Any, ...]:
    """What a tensor map is encoded from: sizes and strides in bytes, from the last dimension to the first, without the
    last stride: these elements are adjacent.
    """
    item = tile.address.dtype.itemsize
    return (*tile.shape[::-1], *[item * stride for stride in tile.strides[-2::-1]])


def _span(tile: Tile, words: Sequence[str]) -> str:
    """Code of the bytes from the first element of a tensor map to behind its last one."""
    rank = len(tile.shape)
    pairs = zip(words[:rank], (str(tile.address.dtype.itemsize), *words[rank:]), strict=True)
    return " + ".join(["1", *[f"({size} - 1) * {stride}" for size, stride in pairs]])


def _map(tile: Tile, meta: Any, memory: Any, place: int, room: int) -> Map:
    """The map at address `place`, encoded from numbers in `memory` from `room` on: sizes and strides in words, then box
    (what one copy moves) and steps in half words, all from the last dimension to the first.
    """
    rank, begin = len(tile.shape), ctypes.addressof(memory)
    box = room + WORD * (2 * rank - 1)
    struct.pack_into(f"<{2 * rank}I", memory, box, *meta["block_size"][::-1], *[1] * rank)
    places = (begin + room, begin + room + WORD * rank, begin + box, begin + box + WORD // 2 * rank)
    kinds = (NO_INTERLEAVING, meta["swizzle"], PROMOTE_128_BYTES, FILL_ZEROS)
    # Integers are passed like pointers, which ctypes does in half the time.
    before = map(POINTER_ARGUMENT, (place, ELEMENTS[tile.address.dtype], rank))
    address, after = ctypes.c_void_p(), map(POINTER_ARGUMENT, (*places, *kinds))
    return Map((*before, address, *after), address, ctypes.c_uint64.from_address(place + WORD))


def _refused(error: int, address: int, words: tuple[int, ...]) -> RuntimeError:
    rank = len(words) // 2 + 1
    what = f"shape {words[rank - 1 :: -1]} and strides of {words[: rank - 1 : -1]} bytes"
    return RuntimeError(f"the CUDA driver made no tensor map (error {error}) at address {address} with {what}")


class Launch:
    """One kernel call on one device, complete except for stream, sizes and addresses; immutable.

    `compiled` is None for Triton's interpreter. `is_direct`: the driver can launch it from a `Block`; otherwise
    Triton's own path does (`start`). The grid, the kernel's parameters and its tensor maps, for code that lays them
    out (`lines`), may be numbers of a trace.
    """

    __slots__ = ("__weakref__", "_function", "_maps", "_scratch", "call", "compiled", "is_direct", "packing", "values")

    def __init__(self, call: KernelCall, device: DeviceSpec | None, index: int) -> None:
        """For device `index`, which is current; a device that is None stands for Triton's interpreter."""
        self.call, self.is_direct = call, False
        self.compiled: Any = None
        # The kernel's parameters in order: numbers and addresses.
        self.values: list[Any] = []
        # Their positions, tiles and the compiler's description of these.
        self._maps: list[tuple[int, Tile, Any]] = []
        _alive().add(self)
        if device is None:
            return
        types, passed = typed(call)
        self.compiled = compiled = compile_call(call, device, index, types)
        formats = _formats(compiled, types.signature)
        if formats is None:
            return
        self.is_direct = True
        _ = compiled.run  # loads the binary on the current device
        self._function = POINTER_ARGUMENT(compiled.function)
        # What a launch changes: parameters, a null pointer for scratch memory, the configuration up to the stream.
        self.packing = struct.Struct(f"<{formats}{POINTER}{CONFIG}")
        metas = iter(_descriptions(compiled))
        for value in passed:
            kind = value.__class__
            if kind is Tile:
                self._maps.append((len(self.values), value, next(metas)))
                self.values += (value.address, *value.shape, *value.strides)
            else:
                self.values.append(value.value if kind is Multiple else value)
        self._scratch = struct.calcsize(f"<{formats}")

    @property
    def described(self) -> tuple[Any, ...]:
        """Everything in which launches of the kernel differ, but the stream and addresses."""
        values = tuple(value.offset if value.__class__ is Address else value for value in self.values)
        return (self.call.grid, values, *[_encoded(tile) for _, tile, _ in self._maps])

    def lines(
        self, at: int, spelled: Callable[[Any], str], located: Callable[[Address], str], names: dict[str, Any]
    ) -> list[str]:
        """Code that lays the launch out in `blocks[at]`; `spelled` and `located` are the code of a number and of an
        address. What the code refers to is added to `names`.
        """
        begin = WORD * (len(self.values) + NUM_SCRATCH)
        names |= {f"pack{at}": self.packing.pack_into, "encode": _entry("cuTensorMapEncodeTiled"), "refused": _refused}
        lines = [f"_, _, memory, maps = blocks[{at}]"]
        room = self._room
        for number, (_, tile, _) in enumerate(self._maps):
            words = [spelled(word) for word in _encoded(tile)]
            names[f"pack{at}_{number}"] = struct.Struct(f"<{len(words)}Q").pack_into
            address = located(tile.address)
            lines += [
                f"pack{at}_{number}(memory, {room}, {', '.join(words)})",
                f"arguments, address, word = maps[{number}]",
                f"address.value = {address}",
                "error = encode(*arguments)",
                f"if error: raise refused(error, {address}, ({', '.join(words)}))",
            ]
            if _driver_version() <= LAST_WITH_SMALL_BIT:
                small = f"{_span(tile, words)} < {SMALL_BYTES}"
                lines.append(f"if word.value & {SMALL_BIT} and {small}: word.value &= {~SMALL_BIT}")
            room += MAP_ROOM
        values = [located(value) if value.__class__ is Address else spelled(value) for value in self.values]
        about = self.compiled.metadata
        config = (*map(spelled, self.call.grid), WARP * about.num_warps, 1, 1, about.shared)
        lines.append(f"pack{at}(memory, {begin}, {', '.join(values)}, 0, {', '.join(map(str, config))}, stream)")
        return lines

    @property
    def _room(self) -> int:
        """Where in a block the numbers begin that tensor maps are encoded from; the maps lie before."""
        laid_out = WORD * (len(self.values) + NUM_SCRATCH) + self.packing.size + struct.calcsize(f"<{REST}{ATTRIBUTE}")
        return laid_out + MAP_BYTES * len(self._maps) + MAP_ALIGNMENT

    def block(self) -> Block:
        """New memory: pointers to the parameters, parameters, configuration, attribute, tensor maps, and what these are
        encoded from.
        """
        count, room = len(self.values), self._room
        memory = ctypes.create_string_buffer(room + MAP_ROOM * len(self._maps))
        begin = ctypes.addressof(memory)
        first = begin + WORD * (count + NUM_SCRATCH)
        scratch = first + self._scratch
        end = WORD * (count + NUM_SCRATCH) + self.packing.size
        pointers = [*range(first, scratch, WORD), scratch, scratch]
        attribute = begin + end + struct.calcsize(f"<{REST}")
        place = -(-(attribute + struct.calcsize(f"<{ATTRIBUTE}")) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        maps = []
        for at, tile, meta in self._maps:
            maps.append(_map(tile, meta, memory, place, room))
            pointers[at] = place
            place, room = place + MAP_BYTES, room + MAP_ROOM
        overlaps = self.call.overlaps and _driver_version() >= FIRST_TO_CAPTURE_OVERLAPS
        struct.pack_into(f"<{len(pointers)}{POINTER}", memory, 0, *pointers)
        struct.pack_into(f"<{REST}{ATTRIBUTE}", memory, end, *((attribute, 1) if overlaps else (0, 0)), *OVERLAPS)
        function = _entry("cuLaunchKernelEx")
        assert function is not None
        # Configuration, kernel, pointers to parameters, no extra options.
        arguments = (POINTER_ARGUMENT(scratch + WORD), self._function, POINTER_ARGUMENT(begin), NULL_ARGUMENT)
        return Block(function, arguments, memory, tuple(maps))

    def start(self, stream: int, tensors: Mapping[str, Tensor]) -> None:
        """Launch by Triton's own path, which calls hooks and reports errors; or interpret the kernel."""
        call = self.call
        arguments = {name: materialised(call.arguments[name], tensors) for name in call.kernel.arg_names}
        if self.compiled is None:
            call.kernel[call.grid](**arguments, **call.options)
        else:
            self.compiled[call.grid](*arguments.values(), stream=stream)


@functools.cache
def _alive() -> weakref.WeakSet[Launch]:
    """All launches. Their kernels are dropped before Python exits: Triton's kernels unload themselves, and report an
    error if that happens too late.
    """
    found = weakref.WeakSet[Launch]()

    def let_go() -> None:
        forget_compiled()
        _formats.cache_clear()
        for launch in found:
            launch.compiled = None

    atexit.register(let_go)
    return found


@functools.lru_cache(maxsize=MAX_COMPILED)
def _formats(compiled: Any, signature: tuple[Any, ...]) -> str | None:
    """The parameters of a kernel in memory. None if the driver cannot launch the kernel with these alone: it has
    others, or needs scratch memory, a cluster or an unknown attribute.
    """
    about, metas, kinds = compiled.metadata, _descriptions(compiled), list(kinds_of(signature))
    tiles = [kind for kind in kinds if kind.startswith(TILE)]
    wants_more = about.global_scratch_size or about.profile_scratch_size or about.launch_cooperative_grid
    is_described = len(metas) == len(tiles) and all(meta.keys() >= {"block_size", "swizzle"} for meta in metas)
    is_open = None not in (_entry("cuLaunchKernelEx"), _entry("cuTensorMapEncodeTiled"))
    alone = about.num_ctas == 1 and not wants_more
    if not (is_open and alone and is_described and _has_parameters(compiled.asm["ptx"], kinds)):
        return None
    return formats_of(kinds)


def formats_of(kinds: Iterable[str]) -> str:
    """Parameters of these types in memory, a word each; packing refuses a number that does not fit into 32 bits."""
    return "".join(FORMATS.get(kind, POINTER) for kind in kinds)


def _has_parameters(ptx: str, kinds: Iterable[str]) -> bool:
    """Whether the compiled kernel has exactly the parameters that are laid out here."""
    entries = ENTRY.findall(ptx)
    found = [int(bits) // 8 * int(count or 1) for text in entries for bits, count in PARAMETER.findall(text)]
    sizes = [MAP_BYTES if kind.startswith(TILE) else SIZES.get(kind, WORD) for kind in kinds]
    return len(entries) == 1 and found == [*sizes, *[WORD] * NUM_SCRATCH]


def _descriptions(compiled: Any) -> Sequence[Any]:
    """The compiler's descriptions of a kernel's tensor maps, in order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


def queued(blocks: Iterable[Block]) -> int:
    """Launch kernels in order; returns how many the driver accepted before it refused one.

    Returns 0 if a profiler has installed launch hooks in Triton: they would not see these launches.
    """
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    done = 0
    if (before is not None and getattr(before, "calls", True)) or (after is not None and getattr(after, "calls", True)):
        return done
    for block in blocks:
        if block[0](*block[1]):
            break
        done += 1
    return done
