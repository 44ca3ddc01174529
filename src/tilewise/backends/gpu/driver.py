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
ELEMENTS = {
    torch.uint8: 0, torch.int8: 0, torch.float8_e4m3fn: 0, torch.uint16: 1, torch.int32: 3, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
NO_INTERLEAVING, PROMOTE_128_BYTES, FILL_ZEROS = 0, 2, 0
# Arguments of cuTensorMapEncodeTiled: map, element, rank, address, shape, strides, box, steps, and four constants.
ENCODE_TYPES = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
)  # fmt: skip
# Drivers up to this version set a bit in the maps of tensors below 128 KiB that must be cleared.
LAST_WITH_SMALL_BIT, SMALL_BYTES, SMALL_BIT = 13010, 128 << 10, 1 << 21
# Older drivers cannot capture a launch that overlaps the one before it in a CUDA graph.
FIRST_TO_CAPTURE_OVERLAPS = 12030


class Filled(NamedTuple):
    """A launch that is ready to go: the driver's function, which returns 0 on success, and its arguments. `memory` owns
    what the arguments point to.
    """

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    memory: Any


def launch_path() -> str:
    """How kernels are launched on this machine, for reports."""
    if _entry("cuLaunchKernelEx") is None:
        return f"Triton's, some 50 us more a kernel: no cuLaunchKernelEx in a library called {LIBRARY}"
    return "direct"


@functools.cache
def _entry(name: str, *types: Any) -> Callable[..., int] | None:
    """A function of the driver, which releases the GIL while it runs; None if the driver's library has another name
    (Triton searches further) or is too old.
    """
    try:
        function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int, *types)((name, ctypes.CDLL(LIBRARY)))
    except (OSError, AttributeError):
        return None
    return function


class TensorMap:
    """A tensor map without its address: the box is what one copy moves."""

    __slots__ = ("_encode", "_head", "_is_small", "_numbers", "_tail", "_tile")

    def __init__(self, tile: Tile, meta: Any) -> None:
        """From a tile and the compiler's description of it. The driver lists dimensions from last to first."""
        dtype, rank = tile.address.dtype, len(tile.shape)
        item = dtype.itemsize
        last = sum([(size - 1) * stride for size, stride in zip(tile.shape, tile.strides, strict=True)])
        self._is_small = last * item + 1 < SMALL_BYTES
        strides = [item * stride for stride in tile.strides[-2::-1]]
        self._tile, self._head = tile, (ELEMENTS[dtype], rank)
        # Shape and strides in words, then box and steps in half words.
        packed = struct.pack(
            f"{2 * rank - 1}Q{2 * rank}I", *tile.shape[::-1], *strides, *meta["block_size"][::-1], *[1] * rank
        )
        self._numbers = ctypes.create_string_buffer(packed, len(packed))
        begin = ctypes.addressof(self._numbers)
        box = begin + WORD * (2 * rank - 1)
        places = (begin, begin + WORD * rank, box, box + WORD // 2 * rank)
        self._tail = (*places, NO_INTERLEAVING, meta["swizzle"], PROMOTE_128_BYTES, FILL_ZEROS)
        self._encode = _entry("cuTensorMapEncodeTiled", *ENCODE_TYPES)

    def write(self, place: int, address: int) -> None:
        """Write the map of a tensor at `address` to `place`, a multiple of MAP_ALIGNMENT."""
        assert self._encode is not None
        error = self._encode(place, *self._head, address, *self._tail)
        if error:
            tile = self._tile
            what = f"shape {tile.shape}, strides {tile.strides} and box {tile.block}"
            raise RuntimeError(f"the CUDA driver made no tensor map (error {error}) at address {address} with {what}")
        if self._is_small and _driver_version() <= LAST_WITH_SMALL_BIT:
            word = ctypes.c_uint64.from_address(place + WORD)
            word.value &= ~SMALL_BIT


@functools.cache
def _driver_version() -> int:
    version, ask = ctypes.c_int(0), _entry("cuDriverGetVersion")
    if ask is not None:
        ask(ctypes.byref(version))
    return version.value


class Launch:
    """One kernel call on one device, complete except for stream and addresses; immutable.

    `compiled` is None for Triton's interpreter. `is_direct`: the driver can launch it (`filled`); otherwise Triton's
    own path does (`start`).
    """

    __slots__ = (
        "__weakref__", "_addresses", "_config", "_function", "_layout", "_maps", "_size", "_values", "call", "compiled",
        "is_direct",
    )  # fmt: skip

    def __init__(self, call: KernelCall, device: DeviceSpec | None, index: int) -> None:
        """For device `index`, which is current; a device that is None stands for Triton's interpreter."""
        self.call, self.is_direct = call, False
        self.compiled: Any = None
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
        self._config = (*call.grid, WARP * compiled.metadata.num_warps, 1, 1, compiled.metadata.shared)
        self._values: list[int | float] = []
        self._addresses: list[tuple[int, str, int]] = []
        self._maps: list[tuple[int, str, int, TensorMap]] = []
        metas, values = iter(_descriptions(compiled)), self._values
        for value in passed:
            kind = value.__class__
            if kind is Tile:
                address = value.address
                self._maps.append((len(values), address.name, address.offset, TensorMap(value, next(metas))))
                values += (0, *value.shape, *value.strides)
            elif kind is Address:
                self._addresses.append((len(values), value.name, value.offset))
                values.append(0)
            else:
                values.append(value.value if kind is Multiple else value)
        self._size = layout.size + MAP_BYTES * len(self._maps) + MAP_ALIGNMENT

    def filled(self, stream: int, addresses: Mapping[str, int]) -> Filled:
        """The launch on a stream, with tensors at these addresses."""
        values = self._values.copy()
        for at, name, offset in self._addresses:
            values[at] = addresses[name] + offset
        memory = ctypes.create_string_buffer(self._size)  # parameters, then tensor maps
        begin = ctypes.addressof(memory)
        first = begin + WORD * (len(values) + NUM_SCRATCH)
        scratch = first + WORD * len(values)
        pointers = [*range(first, scratch, WORD), scratch, scratch]
        place = -(-(begin + self._layout.size) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        for at, name, offset, tensor_map in self._maps:
            tensor_map.write(place, addresses[name] + offset)
            pointers[at] = place
            place += MAP_BYTES
        config = scratch + WORD
        overlaps = self.call.overlaps and _driver_version() >= FIRST_TO_CAPTURE_OVERLAPS
        attributes = (config + struct.calcsize(CONFIG), 1) if overlaps else (0, 0)
        self._layout.pack_into(memory, 0, *pointers, *values, 0, *self._config, stream, *attributes, *OVERLAPS)
        function = _entry("cuLaunchKernelEx")
        assert function is not None
        # Configuration, kernel, pointers to parameters, no extra options.
        arguments = (POINTER_ARGUMENT(config), self._function, POINTER_ARGUMENT(begin), NULL_ARGUMENT)
        return Filled(function, arguments, memory)

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
    is_open = None not in (_entry("cuLaunchKernelEx"), _entry("cuTensorMapEncodeTiled", *ENCODE_TYPES))
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
    for function, arguments, _ in filled:
        if function(*arguments):
            break
        done += 1
    return done
