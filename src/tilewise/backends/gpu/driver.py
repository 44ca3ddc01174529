"""Launch a compiled kernel by calling the CUDA driver directly, with parameters that are laid out here.

Triton's own launch path, `CompiledKernel.__getitem__`, takes tens of microseconds of host time a kernel. It looks up
the device, wraps metadata for hooks, asks the driver about every pointer, encodes every tensor map again, and unpacks
Python objects into the parameters of cuLaunchKernelEx. For a compiled kernel all of this is fixed except the stream,
sizes and addresses. These are words of a plan (tilewise.native), and its operations call the driver.

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
from typing import Any, cast

import torch
from torch import Tensor
from triton import knobs

from tilewise.backends.gpu.compilation import MAX_COMPILED, TILE, compile_call, forget_compiled, kinds_of, typed
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple, Tile, materialised
from tilewise.device import DeviceSpec
from tilewise.native import Frame, Plan
from tilewise.symbolic import Number, smallest

LIBRARY = "libcuda.so.1"
SIZES = {"i32": 4, "fp32": 4}
# The last two parameters point to scratch memory, which these kernels do not use.
WORD, NUM_SCRATCH = 8, 2
# CUlaunchConfig: grid, block, bytes of shared memory, stream; attributes and their number. Words of it.
CONFIG, CONFIG_WORDS, STREAM, ATTRIBUTES = "=7I4xQQI4x", 7, 4, 5
# CUlaunchAttribute: id and value; this one lets the kernel start while the one before it in the stream ends.
ATTRIBUTE, OVERLAPS = "=I4xi60x", (6, 1)
WARP = 32
# The parameters of a kernel in PTX: `.param .u32 name` or, with 128 bytes, `.param .align 64 .b8 name[128]`.
ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,\[]*(?:\[(\d+)\])?")
# CUtensorMap: its size and alignment, the driver's codes of element types, and the constants it is encoded with.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
ELEMENTS = {
    torch.uint8: 0, torch.int8: 0, torch.float8_e4m3fn: 0, torch.uint16: 1, torch.int32: 3, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
# The function that encodes a map, and its arguments.
MAP_WORDS = 13
NO_INTERLEAVING, PROMOTE_128_BYTES, FILL_ZEROS = 0, 2, 0
# Drivers up to this version set a bit in the maps of tensors below 128 KiB that must be cleared.
LAST_WITH_SMALL_BIT, SMALL_BYTES, SMALL_BIT = 13010, 128 << 10, 1 << 21
# Older drivers cannot capture a launch that overlaps the one before it in a CUDA graph.
FIRST_TO_CAPTURE_OVERLAPS = 12030


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


def _address_of(name: str) -> int:
    """The address of a function of the driver; 0 without one."""
    function = _entry(name)
    return 0 if function is None else ctypes.cast(cast("Any", function), ctypes.c_void_p).value or 0


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


def _span(tile: Tile, words: Sequence[Any]) -> Any:
    """Bytes from the first element of a tensor map to behind its last one, or any number from SMALL_BYTES on."""
    rank = len(tile.shape)
    pairs = zip(words[:rank], (tile.address.dtype.itemsize, *words[rank:]), strict=True)
    return sum([smallest(size - 1, SMALL_BYTES) * smallest(stride, SMALL_BYTES) for size, stride in pairs], 1)


def refused(plan: Plan, frame: Frame, call: int) -> RuntimeError:
    """The error of the driver that made no tensor map, where the words of its call begin."""
    error, _, _, rank = plan.peek(frame, call, 4)
    address, *words = plan.peek(frame, call + MAP_WORDS, 2 * rank)
    what = f"shape {tuple(words[:rank][::-1])} and strides of {tuple(words[rank:][::-1])} bytes"
    return RuntimeError(f"the CUDA driver made no tensor map (error {error}) at address {address} with {what}")


def _clears_bit() -> bool:
    """Whether the driver sets a bit that must be cleared."""
    return _driver_version() <= LAST_WITH_SMALL_BIT


class Launch:
    """One kernel call on one device, complete except for stream, sizes and addresses; immutable.

    `compiled` is None for Triton's interpreter. `is_direct`: the driver can launch it from words of a plan, which
    `lay_out` adds; otherwise Triton's own path does (`start`). The grid, the kernel's parameters and its tensor maps
    may be numbers of a trace.
    """

    __slots__ = ("__weakref__", "_function", "_kinds", "_maps", "call", "compiled", "is_direct", "values")

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
        kinds = _kinds(compiled, types.signature)
        if kinds is None:
            return
        self.is_direct, self._kinds = True, kinds
        _ = compiled.run  # loads the binary on the current device
        self._function: int = compiled.function
        metas = iter(_descriptions(compiled))
        for value in passed:
            kind = value.__class__
            if kind is Tile:
                self._maps.append((len(self.values), value, next(metas)))
                self.values += (value.address, *value.shape, *value.strides)
            else:
                self.values.append(value.value if kind is Multiple else value)

    @property
    def described(self) -> tuple[Any, ...]:
        """Everything in which launches of the kernel differ, but the stream and addresses."""
        values = tuple(value.offset if value.__class__ is Address else value for value in self.values)
        maps = [(_encoded(tile), _span(tile, _encoded(tile)) if _clears_bit() else 0) for _, tile, _ in self._maps]
        return (self.call.grid, values, *maps)

    def lay_out(self, plan: Plan, located: Callable[[Address], int], stream: int) -> Callable[[int], None]:
        """Add the launch to a plan. `located` says which word has an address, `stream` is the word of the stream.

        Returns the function that adds the operations of the driver, and takes the number of the launch. They come after
        the operations of all launches: if a number does not fit, nothing is launched.
        """
        parameters = plan.words(*[0] * (len(self.values) + NUM_SCRATCH))
        for i, (value, kind) in enumerate(zip(self.values, self._kinds, strict=True)):
            word = located(value) if value.__class__ is Address else self._number(plan, value, kind)
            plan.point(parameters + i, word)
        for i in range(NUM_SCRATCH):
            plan.point(parameters + len(self.values) + i, plan.word(0))
        config = self._configured(plan, stream)
        maps = [self._map(plan, tile, meta, located, parameters + at) for at, tile, meta in self._maps]
        launch = plan.words(_address_of("cuLaunchKernelEx"), 0, self._function, 0)
        plan.point(launch + 1, config)
        plan.point(launch + 3, parameters)

        def drive(number: int) -> None:
            for encode in maps:
                encode()
            plan.operate("launch", number, launch)

        return drive

    @staticmethod
    def _number(plan: Plan, value: Any, kind: str) -> int:
        """The word of a parameter."""
        if kind != "fp32":
            word = plan.word(value)
            return word if kind != "i32" else plan.operate("narrow", word, word)
        return plan.operate("single", plan.words(0), plan.word(value if value.__class__ is Number else float(value)))

    def _configured(self, plan: Plan, stream: int) -> int:
        """The words of the configuration."""
        about, overlaps = self.compiled.metadata, self.call.overlaps and _driver_version() >= FIRST_TO_CAPTURE_OVERLAPS
        packed = struct.pack(CONFIG, 0, 0, 0, WARP * about.num_warps, 1, 1, about.shared, 0, 0, int(overlaps))
        config = plan.words(*struct.unpack(f"={CONFIG_WORDS}q", packed))
        for axis, size in enumerate(self.call.grid):
            plan.operate("half", 2 * config + axis, plan.word(size))
        plan.operate("move", config + STREAM, stream)
        if overlaps:
            attribute = struct.pack(ATTRIBUTE, *OVERLAPS)
            plan.point(config + ATTRIBUTES, plan.words(*struct.unpack(f"={len(attribute) // WORD}q", attribute)))
        return config

    @staticmethod
    def _map(
        plan: Plan, tile: Tile, meta: Any, located: Callable[[Address], int], parameter: int
    ) -> Callable[[], None]:
        """Add a tensor map, which is what a parameter points to. Returns the function that adds its operations."""
        encoded, rank = _encoded(tile), len(tile.shape)
        place = plan.words(*[0] * (MAP_BYTES // WORD), alignment=MAP_ALIGNMENT // WORD)
        boxes = struct.pack(f"={2 * rank}I", *meta["block_size"][::-1], *[1] * rank)
        box = plan.words(*struct.unpack(f"={rank}q", boxes))
        kinds = (NO_INTERLEAVING, meta["swizzle"], PROMOTE_128_BYTES, FILL_ZEROS)
        encode = _address_of("cuTensorMapEncodeTiled")
        call = plan.words(encode, 0, ELEMENTS[tile.address.dtype], rank, 0, 0, 0, 0, 0, *kinds)
        # The address, sizes and strides; and those of the last time: no tensor is at this address.
        first = plan.words(*[0] * (2 * rank), *[-1] * (2 * rank))
        assert first == call + MAP_WORDS
        plan.operate("move", first, located(tile.address))
        for word, number in enumerate(encoded, first + 1):
            plan.operate("move", word, plan.word(number))
        sizes, steps = first + 1, first + 1 + rank
        for word, target, half in ((1, place, 0), (5, sizes, 0), (6, steps, 0), (7, box, 0), (8, box, rank)):
            plan.point(call + word, target, half)
        plan.point(parameter, place)

        def drive() -> None:
            plan.operate("encode", 2 * rank, call, first)
            if _clears_bit():
                limits = plan.words(SMALL_BYTES, SMALL_BIT)
                plan.operate("clear", place + 1, plan.word(_span(tile, encoded)), limits)

        return drive

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
        _kinds.cache_clear()
        for launch in found:
            launch.compiled = None

    atexit.register(let_go)
    return found


@functools.lru_cache(maxsize=MAX_COMPILED)
def _kinds(compiled: Any, signature: tuple[Any, ...]) -> list[str] | None:
    """The types of a kernel's parameters. None if the driver cannot launch the kernel with these alone: it has others,
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
    return kinds


def _has_parameters(ptx: str, kinds: Iterable[str]) -> bool:
    """Whether the compiled kernel has exactly the parameters that are laid out here."""
    entries = ENTRY.findall(ptx)
    found = [int(bits) // 8 * int(count or 1) for text in entries for bits, count in PARAMETER.findall(text)]
    sizes = [MAP_BYTES if kind.startswith(TILE) else SIZES.get(kind, WORD) for kind in kinds]
    return len(entries) == 1 and found == [*sizes, *[WORD] * NUM_SCRATCH]


def _descriptions(compiled: Any) -> Sequence[Any]:
    """The compiler's descriptions of a kernel's tensor maps, in order."""
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


def is_hooked() -> bool:
    """Whether a profiler has installed launch hooks in Triton, which must see all launches."""
    runtime = knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    if before is not None and getattr(before, "calls", True):
        return True
    return after is not None and bool(getattr(after, "calls", True))
