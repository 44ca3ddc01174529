"""The one file that knows how Triton's NVIDIA driver starts a kernel.

`CompiledKernel.__getitem__` is the public way. It looks up the device, wraps metadata for hooks, asks the CUDA driver
about every pointer, encodes every tensor descriptor again in Python, and a C function unpacks some 60 Python objects
into the parameters of cuLaunchKernelEx: 20 to 60 us a kernel. All of that is fixed for a compiled kernel but for the
stream and the addresses. So the parameters are laid out once for each set of those, and calls start the driver's own
function on them: 0.4 us beside what the driver takes. Which parameters a kernel has is known for the releases named
here; on another one kernels start the public way, and `tilewise doctor` says so.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs

from tilewise.backends.gpu.compilation import CONSTANT, types_of
from tilewise.backends.gpu.scratch import Places, remember
from tilewise.backends.gpu.symbols import Address, KernelCall, Multiple, Tile, materialised

__all__ = ["DIRECT_RELEASES", "DirectLaunch", "Filled", "OrdinaryLaunch", "direct_launch", "launch_path", "queued"]

DIRECT_RELEASES = ("3.6.",)
LIBRARY = "libcuda.so.1"
MAP_BYTES = 128
# Every other parameter has a word of its own; the last two point to scratch memory that these kernels do without.
FORMATS = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
POINTER, WORD, NUM_SCRATCH = "Q", 8, 2
# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number.
CONFIG = "7I4xQQI4x"
# CUlaunchAttribute: its number and value; that the kernel may start while the one before it in the stream ends.
ATTRIBUTE, OVERLAPS = "I4xi60x", (6, 1)
WARP = 32
# An address as an argument of a C function: made beforehand, so that a call of four takes 0.3 us instead of 0.6.
POINTER_ARGUMENT = ctypes.c_void_p.from_param


class Filled(NamedTuple):
    """What starts a kernel: the driver's function, which returns 0 if it did, and its arguments; `memory` holds what
    those point to.
    """

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    memory: tuple[Any, ...]


@functools.cache
def is_direct() -> bool:
    """Whether this release's kernels are known from outside."""
    return str(triton.__version__).startswith(DIRECT_RELEASES)


def launch_path() -> str:
    """How kernels are started here, for reports."""
    if not is_direct():
        known = ", ".join(release.rstrip(".") for release in DIRECT_RELEASES)
        why = f"triton {triton.__version__} (the direct one is known for {known})"
    elif _launcher() is None:
        why = f"no cuLaunchKernelEx in a library called {LIBRARY}"
    else:
        return "direct"
    return f"ordinary: {why}, some 50 us more a kernel"


def _launcher() -> Callable[..., int] | None:
    """cuLaunchKernelEx; None where the driver's library has another name (Triton looks further) or is an older one."""
    try:
        return _entry("cuLaunchKernelEx")
    except (OSError, AttributeError):
        return None


@functools.cache
def _entry(name: str) -> Callable[..., int]:
    """A function of the driver; it is called with what POINTER_ARGUMENT makes, and other threads run meanwhile."""
    function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)((name, ctypes.CDLL(LIBRARY)))
    return function


class TensorMaps:
    """The encoded descriptors of one argument by address: they hold no reference, so one serves any tensor there."""

    __slots__ = ("_encode", "_fixed", "_known", "_rest")

    def __init__(self, tile: Tile, meta: Mapping[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        self._encode = triton.runtime.driver.active.utils.fill_tma_descriptor
        self._fixed = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]])
        self._rest = (meta["block_size"], tile.shape, tile.strides, 0)
        self._known: dict[Places, Any] = {}

    def at(self, address: int) -> Any:
        """The tensor map of a tensor that starts at `address`."""
        found = self._known.get((address,))
        if found is None:
            found = self._encode(address, *self._fixed, *self._rest)
            remember(self._known, (address,), found)
        return found


class DirectLaunch:
    """One kernel call with everything there but stream and addresses.

    Immutable but for the tensor maps, which any thread may add to.
    """

    __slots__ = ("_addresses", "_config", "_first", "_function", "_launch", "_layout", "_maps", "_overlaps", "_values")

    def __init__(self, call: KernelCall, compiled: Any, names: Sequence[str], launch: Callable[..., int]) -> None:
        self._launch = launch
        compiled._init_handles()  # noqa: SLF001  (loads the binary on the current device)
        num_warps, _, shared = compiled.packed_metadata
        self._function: int = compiled.function
        self._config = (*call.grid, WARP * num_warps, 1, 1, shared)
        self._overlaps = call.overlaps
        self._values: list[int | float] = []
        self._addresses: list[tuple[int, int, int]] = []
        self._maps: list[tuple[int, int, int, TensorMaps]] = []
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        formats = []
        for at, (kind, value) in enumerate(_parameters(types_of(call).signature, call.ordered)):
            number = value.value if isinstance(value, Multiple) else value
            if isinstance(value, Tile):
                place = (names.index(value.address.name), value.address.offset)
                self._maps.append((at, *place, TensorMaps(value, next(metas))))
                number = 0
            elif isinstance(value, Address):
                self._addresses.append((at, names.index(value.name), value.offset))
                number = 0
            self._values.append(number)
            formats.append(FORMATS.get(kind, POINTER))
        count = len(formats) + NUM_SCRATCH
        self._first = count * WORD
        self._layout = struct.Struct(f"<{count}{POINTER}{''.join(formats)}{POINTER}{CONFIG}{ATTRIBUTE}")

    def filled(self, stream: int, addresses: Sequence[int]) -> Filled:
        """What starts the kernel on a stream; addresses in the order of the names."""
        values = self._values.copy()
        for at, which, offset in self._addresses:
            values[at] = addresses[which] + offset
        # Pointers to all parameters, the parameters, a word for scratch memory that is not there, the configuration, an
        # attribute.
        memory = bytearray(self._layout.size)
        held = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(held)
        first = begin + self._first
        scratch = first + WORD * len(values)
        pointers = [*range(first, scratch, WORD), scratch, scratch]
        maps = []
        for at, which, offset, known in self._maps:
            found = known.at(addresses[which] + offset)
            # The last field of the object.
            pointers[at] = id(found) + type(found).__basicsize__ - MAP_BYTES
            maps.append(found)
        config = scratch + WORD
        attributes = (config + struct.calcsize(CONFIG), 1) if self._overlaps else (0, 0)
        self._layout.pack_into(memory, 0, *pointers, *values, 0, *self._config, stream, *attributes, *OVERLAPS)
        # Configuration, kernel, pointers to parameters, nothing.
        arguments = tuple(map(POINTER_ARGUMENT, (config, self._function, begin, 0)))
        return Filled(self._launch, arguments, (held, maps))


def _parameters(kinds: Sequence[Any], arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(type, number or symbol) of all that a kernel is handed, in order: what is compiled in is not."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _parameters(kind, argument)
        elif kind != CONSTANT:
            yield kind, argument
        if isinstance(argument, Tile):
            yield from [("i32", size) for size in argument.shape]
            yield from [("i64", stride) for stride in argument.strides]


def queued(filled: Iterable[Filled]) -> int:
    """Start kernels; how many of them the driver took before it refused one.

    None if a profiler has put anything into Triton's chains of hooks (or, in their place, one hook).
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


class OrdinaryLaunch:
    """A call through Triton's public interface, which shows it to hooks and has words for errors."""

    __slots__ = ("_call", "_compiled", "_names")

    def __init__(self, call: KernelCall, compiled: Any, names: Sequence[str]) -> None:
        self._call, self._compiled, self._names = call, compiled, names

    def __call__(self, stream: int, tensors: Sequence[Tensor | None]) -> None:
        """Queue the kernel; tensors in the order of the names."""
        named = dict(zip(self._names, tensors, strict=False))
        arguments = [materialised(argument, named) for argument in self._call.ordered]
        self._compiled[self._call.grid](*arguments, stream=stream)


def direct_launch(call: KernelCall, compiled: Any, names: Sequence[str]) -> DirectLaunch | None:
    """The fastest way to start a compiled kernel; None if it is not open here or the kernel needs more than parameters:
    scratch memory, a cluster, an attribute that is not known here.
    """
    _describe_shares(call, compiled)
    about = compiled.metadata
    scratch = about.global_scratch_size or about.profile_scratch_size
    if not is_direct() or scratch or about.num_ctas != 1 or about.launch_cooperative_grid:
        return None
    launch = _launcher()
    return None if launch is None else DirectLaunch(call, compiled, names, launch)


def _describe_shares(call: KernelCall, compiled: Any) -> None:
    """Correct what Triton 3.6 says of tiles whose rows it deals out, for both ways to start a kernel: it copies shares
    but describes whole tiles, and a tensor map of those would write over the next share.
    """
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    tiles = [value for _, value in _parameters(types_of(call).signature, call.ordered) if isinstance(value, Tile)]
    for tile, meta in zip(tiles, metas, strict=False):
        if tile.shares > 1:
            meta["block_size"] = [tile.block[0] // tile.shares, *meta["block_size"][1:]]
