"""Launch a compiled kernel by calling the CUDA driver directly, with parameters that are laid out here.

Triton's own launch path, `CompiledKernel.__getitem__`, takes tens of microseconds of host time a kernel. It looks up
the device, wraps metadata for hooks, asks the driver about every pointer, encodes every tensor map again, and unpacks
Python objects into the parameters of cuLaunchKernelEx. For a compiled kernel all of this is fixed except the stream and
the addresses. So the parameters are laid out once for each set of those, and a launch is one call of the driver.

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
# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number.
CONFIG = "7I4xQQI4x"
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


class Filled(NamedTuple):
    """A launch that is ready to go: the driver's function, which returns 0 on success, and its arguments. `memory` owns
    what the arguments point to. `begin` is its address, `pointers` are those to the kernel's parameters and `maps`
    encode its tensor maps.
    """

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    memory: Any
    begin: int
    pointers: list[int]
    maps: list[TensorMap]


class Measured(NamedTuple):
    """What a launch needs besides addresses, for certain sizes: the grid, and the kernel's parameters in order, in
    which a pointer is the offset from its tensor's address.
    """

    grid: tuple[int, int, int]
    values: tuple[int | float, ...]


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


class TensorMap:
    """Encodes the map of a tile in the memory of a launch, from sizes and an address. The box is what one copy moves.

    `at` is the position of the tile among the parameters of the kernel, where its shape and strides follow. All
    arguments of the driver's function but the tensor's address are converted once, which takes most of a call's time.
    """

    __slots__ = ("_after", "_at", "_before", "_encode", "_item", "_memory", "_numbers", "_rank", "_room", "_word")

    def __init__(self, at: int, tile: Tile, meta: Any, memory: Any, place: int, room: int) -> None:
        """From a tile and the compiler's description of it. The map lies at address `place`; MAP_ROOM bytes of `memory`
        from `room` on are its own. The driver lists dimensions from last to first.
        """
        dtype, rank, begin = tile.address.dtype, len(tile.shape), ctypes.addressof(memory)
        self._at, self._rank, self._item, self._memory, self._room = at, rank, dtype.itemsize, memory, room
        # Shape and strides in words, then box and steps in half words.
        self._numbers = struct.Struct(f"<{2 * rank - 1}Q")
        box = room + self._numbers.size
        struct.pack_into(f"<{2 * rank}I", memory, box, *meta["block_size"][::-1], *[1] * rank)
        places = (begin + room, begin + room + WORD * rank, begin + box, begin + box + WORD // 2 * rank)
        kinds = (NO_INTERLEAVING, meta["swizzle"], PROMOTE_128_BYTES, FILL_ZEROS)
        self._before = (POINTER_ARGUMENT(place), ctypes.c_int(ELEMENTS[dtype]), ctypes.c_uint32(rank))
        self._after = (*map(POINTER_ARGUMENT, places), *map(ctypes.c_int, kinds))
        self._word = ctypes.c_uint64.from_address(place + WORD)
        encode = _entry("cuTensorMapEncodeTiled")
        assert encode is not None
        self._encode = encode

    def write(self, values: Sequence[Any]) -> None:
        """Encode the map; the address of the tensor is `values[at]`."""
        at, rank, item = self._at, self._rank, self._item
        shape, strides = values[at + rank : at : -1], values[at + 2 * rank - 1 : at + rank : -1]
        self._numbers.pack_into(self._memory, self._room, *shape, *[item * stride for stride in strides])
        error = self._encode(*self._before, POINTER_ARGUMENT(values[at]), *self._after)
        if error:
            what = f"shape {tuple(shape[::-1])} and strides {tuple(strides[::-1])}"
            raise RuntimeError(
                f"the CUDA driver made no tensor map (error {error}) at address {values[at]} with {what}"
            )
        if _driver_version() <= LAST_WITH_SMALL_BIT:
            last = shape[0] - 1  # the elements of the last dimension are adjacent
            for size, stride in zip(shape[1:], strides, strict=True):
                last += (size - 1) * stride
            if last * item + 1 < SMALL_BYTES:
                self._word.value &= ~SMALL_BIT


@functools.cache
def _driver_version() -> int:
    version, ask = ctypes.c_int(0), _entry("cuDriverGetVersion")
    if ask is not None:
        ask(ctypes.byref(version))
    return version.value


class Launch:
    """One kernel call on one device, complete except for stream, sizes and addresses; immutable.

    `compiled` is None for Triton's interpreter. `is_direct`: the driver can launch it (`filled`); otherwise Triton's
    own path does (`start`). `measured` may hold numbers of a trace.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_config", "_function", "_layout", "_tiles", "call", "compiled", "is_direct",
        "measured",
    )  # fmt: skip

    def __init__(self, call: KernelCall, device: DeviceSpec | None, index: int) -> None:
        """For device `index`, which is current; a device that is None stands for Triton's interpreter."""
        self.call, self.is_direct = call, False
        self.compiled: Any = None
        self.measured = Measured(call.grid, ())
        _alive().add(self)
        if device is None:
            return
        types, passed = typed(call)
        self.compiled = compiled = compile_call(call, device, index, types)
        layout = _layout(compiled, types.signature)
        if layout is None:
            return
        self.is_direct = True
        _ = compiled.run  # loads the binary on the current device
        self._layout, self._function = layout, POINTER_ARGUMENT(compiled.function)
        self._config = (WARP * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared)
        values: list[Any] = []
        # Positions of pointers among the values, and their tensors.
        self._addresses: list[tuple[int, str]] = []
        self._tiles: list[tuple[int, Tile, Any]] = []
        metas = iter(_descriptions(compiled))
        for value in passed:
            kind = value.__class__
            if kind is Tile:
                self._tiles.append((len(values), value, next(metas)))
                self._addresses.append((len(values), value.address.name))
                values += (value.address.offset, *value.shape, *value.strides)
            elif kind is Address:
                self._addresses.append((len(values), value.name))
                values.append(value.offset)
            else:
                values.append(value.value if kind is Multiple else value)
        self.measured = Measured(call.grid, tuple(values))

    def filled(
        self, stream: int, addresses: Mapping[str, int], measured: Measured, used: Filled | None = None
    ) -> Filled:
        """The launch on a stream, with these sizes and with tensors at these addresses; in the memory of an earlier
        one that is not needed any more, or in new memory.
        """
        values = list(measured.values)
        for at, name in self._addresses:
            values[at] += addresses[name]
        if used is None:
            used = self._new(len(values))
        for tensor_map in used.maps:
            tensor_map.write(values)
        config = used.begin + WORD * (2 * len(values) + NUM_SCRATCH + 1)
        overlaps = self.call.overlaps and _driver_version() >= FIRST_TO_CAPTURE_OVERLAPS
        attributes = (config + struct.calcsize(CONFIG), 1) if overlaps else (0, 0)
        self._layout.pack_into(
            used.memory, 0, *used.pointers, *values, 0, *measured.grid, *self._config, stream, *attributes, *OVERLAPS
        )
        return used

    def _new(self, count: int) -> Filled:
        """Memory for a launch with so many parameters: pointers to these, parameters, configuration, tensor maps, and
        what these are encoded from.
        """
        maps_size = MAP_BYTES * len(self._tiles) + MAP_ALIGNMENT
        memory = ctypes.create_string_buffer(self._layout.size + maps_size + MAP_ROOM * len(self._tiles))
        begin = ctypes.addressof(memory)
        first = begin + WORD * (count + NUM_SCRATCH)
        scratch = first + WORD * count
        pointers = [*range(first, scratch, WORD), scratch, scratch]
        place = -(-(begin + self._layout.size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        maps, room = [], self._layout.size + maps_size
        for at, tile, meta in self._tiles:
            maps.append(TensorMap(at, tile, meta, memory, place, room))
            pointers[at] = place
            place, room = place + MAP_BYTES, room + MAP_ROOM
        function = _entry("cuLaunchKernelEx")
        assert function is not None
        # Configuration, kernel, pointers to parameters, no extra options.
        arguments = (POINTER_ARGUMENT(scratch + WORD), self._function, POINTER_ARGUMENT(begin), NULL_ARGUMENT)
        return Filled(function, arguments, memory, begin, pointers, maps)

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
        _layout.cache_clear()
        for launch in found:
            launch.compiled = None

    atexit.register(let_go)
    return found


@functools.lru_cache(maxsize=MAX_COMPILED)
def _layout(compiled: Any, signature: tuple[Any, ...]) -> struct.Struct | None:
    """The memory of a launch: pointers to all parameters, the parameters, a null pointer for scratch memory, the
    configuration, an attribute. None if the driver cannot launch the kernel with these parameters alone: it has others,
    or needs scratch memory, a cluster or an unknown attribute.
    """
    about, metas, kinds = compiled.metadata, _descriptions(compiled), list(kinds_of(signature))
    tiles = [kind for kind in kinds if kind.startswith(TILE)]
    wants_more = about.global_scratch_size or about.profile_scratch_size or about.launch_cooperative_grid
    is_described = len(metas) == len(tiles) and all(meta.keys() >= {"block_size", "swizzle"} for meta in metas)
    is_open = None not in (_entry("cuLaunchKernelEx"), _entry("cuTensorMapEncodeTiled"))
    alone = about.num_ctas == 1 and not wants_more
    if not (is_open and alone and is_described and _has_parameters(compiled.asm["ptx"], kinds)):
        return None
    formats = "".join(FORMATS.get(kind, POINTER) for kind in kinds)
    return struct.Struct(f"<{len(kinds) + NUM_SCRATCH}{POINTER}{formats}{POINTER}{CONFIG}{ATTRIBUTE}")


def _has_parameters(ptx: str, kinds: Iterable[str]) -> bool:
    """Whether the compiled kernel has exactly the parameters that are laid out here."""
    entries = ENTRY.findall(ptx)
    found = [int(bits) // 8 * int(count or 1) for text in entries for bits, count in PARAMETER.findall(text)]
    sizes = [MAP_BYTES if kind.startswith(TILE) else SIZES.get(kind, WORD) for kind in kinds]
    return len(entries) == 1 and found == [*sizes, *[WORD] * NUM_SCRATCH]


def _descriptions(compiled: Any) -> Sequence[Any]:
    """The compiler's descriptions of a kernel's tensor maps, in order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


def queued(filled: Iterable[Filled]) -> int:
    """Launch kernels in order; returns how many the driver accepted before it refused one.

    Returns 0 if a profiler has installed launch hooks in Triton: they would not see these launches.
    """
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    done = 0
    if (before is not None and getattr(before, "calls", True)) or (after is not None and getattr(after, "calls", True)):
        return done
    for launch in filled:
        if launch[0](*launch[1]):
            break
        done += 1
    return done
