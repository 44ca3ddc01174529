"""Launch a compiled kernel by calling the CUDA driver directly, with parameters that are laid out here.

Triton's own launch path, `CompiledKernel.__getitem__`, takes tens of microseconds of host time a kernel. It looks up
the device, wraps metadata for hooks, asks the driver about every pointer, encodes every tensor map again, and unpacks
Python objects into the parameters of cuLaunchKernelEx. For a compiled kernel all of this is fixed except the stream and
the addresses. So the parameters are laid out once, a call writes those into them, and a launch is one driver call.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tilewise.backends.gpu.compilation import CONSTANT, forget_compiled, types_of
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple, Tile, materialised

LIBRARY = "libcuda.so.1"
# Types not listed here take a word. The last two parameters point to scratch memory, which these kernels do not use.
FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}
POINTER, WORD, NUM_SCRATCH = "<Q", 8, 2
# CUlaunchConfig: grid, block, bytes of shared memory, stream (in this word), attributes and their number.
CONFIG, STREAM_WORD = struct.Struct("<7I4xQQI4x"), 4
# CUlaunchAttribute: id and value; this one lets the kernel start while the one before it in the stream ends.
ATTRIBUTE, OVERLAPS = struct.Struct("<I4xi60x"), (6, 1)
WARP = 32
# Converts an address to a C argument. Done beforehand, because it takes as long as the call itself.
POINTER_ARGUMENT = ctypes.c_void_p.from_param
# The parameters of a kernel in PTX: `.param .u32 name` or, with 128 bytes, `.param .align 64 .b8 name[128]`.
ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?")
# Tensor maps that all passes together cache, one for each tensor and address: about 3 MiB.
MAX_MAPS = 8192
# CUtensorMap: its size and alignment, the driver's codes of element types, and the constants it is encoded with.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
ELEMENTS = {
    torch.uint8: 0, torch.float8_e4m3fn: 0, torch.uint16: 1, torch.int32: 3, torch.int64: 5, torch.float16: 6,
    torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
NO_INTERLEAVING, PROMOTE_128_BYTES, FILL_ZEROS = 0, 2, 0
# Drivers up to this version set a bit in the maps of tensors below 128 KiB that must be cleared.
LAST_WITH_SMALL_BIT, SMALL_BYTES, SMALL_BIT = 13010, 128 << 10, 1 << 21


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
    """A TMA tensor map without its address. The driver lists dimensions from last to first."""

    __slots__ = ("_numbers", "is_small", "tile")

    def __init__(self, tile: Tile, meta: Any) -> None:
        self.tile, rank, size = tile, len(tile.shape), tile.address.dtype.itemsize
        last = sum((count - 1) * stride for count, stride in zip(tile.shape, tile.strides, strict=True))
        self.is_small = last * size + 1 < SMALL_BYTES
        lists = ((ctypes.c_uint64, tile.shape[::-1]), (ctypes.c_uint64, [size * s for s in tile.strides[-2::-1]]),
                 (ctypes.c_uint32, meta["block_size"][::-1]), (ctypes.c_uint32, [1] * rank))  # fmt: skip
        constants = map(ctypes.c_int, (NO_INTERLEAVING, meta["swizzle"], PROMOTE_128_BYTES, FILL_ZEROS))
        self._numbers = (*[(kind * rank)(*numbers) for kind, numbers in lists], *constants)

    # A caching allocator hands out the same addresses again and again, in training one set for every layer.
    @functools.lru_cache(maxsize=MAX_MAPS)  # noqa: B019  (a bounded number of maps outlives its pass)
    def at(self, address: int) -> tuple[int, ctypes.Array[ctypes.c_char]]:
        """The map of a tensor at `address`: where it begins, and the memory that holds it."""
        memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        begin = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        element, rank = ELEMENTS[self.tile.address.dtype], len(self.tile.shape)
        encode = _entry("cuTensorMapEncodeTiled")
        assert encode is not None
        head = (ctypes.c_void_p(begin), ctypes.c_int(element), ctypes.c_int(rank), ctypes.c_void_p(address))
        error = encode(*head, *self._numbers)
        if error:
            raise RuntimeError(f"the CUDA driver made no tensor map (error {error}) at address {address}: {self.tile}")
        if self.is_small and _driver_version() <= LAST_WITH_SMALL_BIT:
            word = ctypes.c_uint64.from_address(begin + WORD)
            word.value &= ~SMALL_BIT
        return begin, memory


@functools.cache
def _driver_version() -> int:
    version, ask = ctypes.c_int(0), _entry("cuDriverGetVersion")
    if ask is not None:
        ask(ctypes.byref(version))
    return version.value


class Launch:
    """One kernel call on one device. `compiled` is None for Triton's interpreter. `is_direct`: the driver can launch it
    (see `Arguments`); otherwise Triton's own path does (`start`).
    """

    __slots__ = ("__weakref__", "call", "compiled", "is_direct")

    def __init__(self, call: KernelCall, compiled: Any) -> None:
        self.call, self.compiled = call, compiled
        _alive().add(self)
        self.is_direct = compiled is not None and _is_direct(call, compiled)
        if self.is_direct:
            _ = compiled.run  # loads the binary on the current device

    def start(self, stream: int, tensors: Mapping[str, Tensor]) -> None:
        """Launch by Triton's own path, which calls hooks and reports errors; or interpret the kernel."""
        call = self.call
        arguments = {name: materialised(call.arguments[name], tensors) for name in call.kernel.arg_names}
        if self.compiled is None:
            call.kernel[call.grid](**arguments, **call.options)
        else:
            self.compiled[call.grid](*arguments.values(), stream=stream)


class Arguments:
    """The memory of one direct launch: pointers to the parameters, the parameters, the configuration, an attribute.

    All of it is fixed except the stream and the addresses, which `fill` writes.
    """

    __slots__ = ("_addresses", "_held", "_maps", "_stream", "_words", "given")

    def __init__(self, launch: Launch, positions: Mapping[str, tuple[int, int]]) -> None:
        """`positions`: of each tensor, the index of its address in what `fill` is given, and an offset in bytes."""
        call, about, parameters = launch.call, launch.compiled.metadata, list(_parameters(launch.call))
        count = len(parameters) + NUM_SCRATCH
        config, attribute = 2 * count, 2 * count + CONFIG.size // WORD
        self._words = words = (ctypes.c_uint64 * (attribute + ATTRIBUTE.size // WORD))()
        self._stream, begin = config + STREAM_WORD, ctypes.addressof(words)
        self._addresses: list[tuple[int, int, int]] = []
        self._maps: list[tuple[int, int, int, TensorMap]] = []
        metas = iter(_descriptions(launch.compiled))
        # The last parameters, pointers to scratch memory, stay null.
        words[:count] = list(range(begin + WORD * count, begin + WORD * 2 * count, WORD))
        for i, (kind, value) in enumerate(parameters):
            address = value.address if isinstance(value, Tile) else value
            if not isinstance(address, Address):
                number = value.value if isinstance(value, Multiple) else value
                struct.pack_into(FORMATS.get(kind, POINTER), words, WORD * (count + i), number)
                continue
            at, offset = positions[address.name]
            if isinstance(value, Tile):
                self._maps.append((i, at, offset + address.offset, TensorMap(value, next(metas))))
            else:
                self._addresses.append((count + i, at, offset + address.offset))
        overlaps = (begin + WORD * attribute, 1) if call.overlaps else (0, 0)
        CONFIG.pack_into(words, WORD * config, *call.grid, WARP * about.num_warps, 1, 1, about.shared, 0, *overlaps)
        ATTRIBUTE.pack_into(words, WORD * attribute, *OVERLAPS)
        self._held: list[Any] = [None] * len(self._maps)
        # What the driver is given: configuration, kernel, pointers to parameters, no extra options.
        self.given = tuple(map(POINTER_ARGUMENT, (begin + WORD * config, launch.compiled.function, begin, 0)))

    def fill(self, places: Sequence[int]) -> None:
        """Write the stream, which comes first in `places`, and the addresses."""
        words = self._words
        words[self._stream] = places[0]
        for word, at, offset in self._addresses:
            words[word] = places[at] + offset
        for i, (word, at, offset, tensor_map) in enumerate(self._maps):
            words[word], self._held[i] = tensor_map.at(places[at] + offset)


@functools.cache
def _alive() -> weakref.WeakSet[Launch]:
    """All launches. Their kernels are dropped before Python exits: Triton's kernels unload themselves, and report an
    error if that happens too late.
    """
    found = weakref.WeakSet[Launch]()

    def let_go() -> None:
        forget_compiled()
        for launch in found:
            launch.compiled = None

    atexit.register(let_go)
    return found


def _is_direct(call: KernelCall, compiled: Any) -> bool:
    """Whether the driver can launch the kernel with the parameters laid out here: it has no others, and needs no
    scratch memory, cluster or unknown attribute.
    """
    about, metas = compiled.metadata, _descriptions(compiled)
    tiles = [value for _, value in _parameters(call) if isinstance(value, Tile)]
    wants_more = about.global_scratch_size or about.profile_scratch_size or about.launch_cooperative_grid
    is_described = len(metas) == len(tiles) and all(meta.keys() >= {"block_size", "swizzle"} for meta in metas)
    is_open = None not in (_entry("cuLaunchKernelEx"), _entry("cuTensorMapEncodeTiled"))
    alone = about.num_ctas == 1 and not wants_more
    return is_open and alone and is_described and has_parameters(compiled.asm["ptx"], call)


def _descriptions(compiled: Any) -> Sequence[Any]:
    """The compiler's descriptions of a kernel's tensor maps, in order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


def _parameters(call: KernelCall) -> Iterator[tuple[str, Any]]:
    """(type, number or symbol) of all run-time parameters of a kernel, in order; compiled-in constants are left out."""

    def flat(kinds: Iterable[Any], arguments: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for kind, argument in zip(kinds, arguments, strict=True):
            if isinstance(kind, tuple):
                yield from flat(kind, argument)
            elif kind != CONSTANT:
                yield kind, argument
            if isinstance(argument, Tile):
                yield from [("i32", size) for size in argument.shape]
                yield from [("i64", stride) for stride in argument.strides]

    return flat(types_of(call).signature, call.ordered)


def has_parameters(ptx: str, call: KernelCall) -> bool:
    """Whether the compiled kernel has exactly the parameters that are laid out here for the call."""
    entries = ENTRY.findall(ptx)
    found = [int(bits) // 8 * int(count or 1) for text in entries for bits, count in PARAMETER.findall(text)]
    formats = [f"{MAP_BYTES}x" if isinstance(v, Tile) else FORMATS.get(kind, POINTER) for kind, v in _parameters(call)]
    sizes = list(map(struct.calcsize, formats))
    return len(entries) == 1 and found == [*sizes, *[WORD] * NUM_SCRATCH]


def launched(arguments: Iterable[Arguments]) -> int:
    """Launch kernels in order; returns how many the driver accepted before it refused one.

    Returns 0 if a profiler has installed launch hooks in Triton: they would not see these launches.
    """
    runtime, launch = knobs.runtime, _entry("cuLaunchKernelEx")
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    done = 0
    if (before is not None and getattr(before, "calls", True)) or (after is not None and getattr(after, "calls", True)):
        return done
    for one in arguments:
        if launch(*one.given):  # type: ignore[misc]
            break
        done += 1
    return done
