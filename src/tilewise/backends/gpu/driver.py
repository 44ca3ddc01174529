"""The one file that knows how Triton's NVIDIA driver starts a kernel.

`CompiledKernel.__getitem__` is the public way. It looks up the device, wraps metadata for hooks, asks the CUDA driver
about every pointer and encodes every tensor descriptor again in Python: 20 to 60 us a kernel. The launcher behind it is
a C function whose arguments are fixed for a compiled kernel but for the stream and the addresses; called directly it
takes a few. Its parameters are those of the releases named here; on another one kernels start the public way, and
`tilewise doctor` says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
from torch import Tensor

from tilewise.backends.gpu.symbols import Address, Fixed, KernelCall, Multiple, Tile, materialised

__all__ = [
    "DIRECT_RELEASES",
    "DirectLaunch",
    "Filled",
    "OrdinaryLaunch",
    "is_direct",
    "is_hooked",
    "launch_of",
    "launch_path",
]

DIRECT_RELEASES = ("3.6.",)
# Tensor maps kept for each descriptor argument, some 300 bytes each: a caching allocator hands out the same addresses
# again and again, in training one for every layer.
MAX_MAPS = 128
# In the argument list of the C launcher: grid, stream, function, two flags, two scratch buffers, metadata, hooks.
STREAM, METADATA, ENTER_HOOK, EXIT_HOOK, NUM_FIXED = 3, 10, 11, 12, 13

# A C launcher and all its arguments.
Filled = tuple[Callable[..., None], tuple[Any, ...]]


@functools.cache
def is_direct() -> bool:
    """Whether this release's launcher is known."""
    return str(triton.__version__).startswith(DIRECT_RELEASES)


def launch_path() -> str:
    """How kernels are started here, for reports."""
    if is_direct():
        return "direct"
    known = ", ".join(release.rstrip(".") for release in DIRECT_RELEASES)
    return f"ordinary: triton {triton.__version__} (the direct one is known for {known}), some 50 us more a kernel"


class TensorMaps:
    """The encoded descriptors of one argument by address: they hold no reference, so one serves any tensor there."""

    __slots__ = ("_encode", "_fixed", "_known", "_rest")

    def __init__(self, tile: Tile, meta: Mapping[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        self._encode = triton.runtime.driver.active.utils.fill_tma_descriptor
        self._fixed = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]])
        self._rest = (meta["block_size"], tile.shape, tile.strides, 0)
        self._known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        """The tensor map of a tensor that starts at `address`."""
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= MAX_MAPS:
                self._known.clear()
            found = self._known[address] = self._encode(address, *self._fixed, *self._rest)
        return found


class DirectLaunch:
    """One kernel call with everything there but stream and addresses.

    Immutable but for the tensor maps, which any thread may add to; `filled` works on its own copy of the list.
    """

    __slots__ = ("_compiled", "_function", "_grid", "_maps", "_pointers", "_rows", "_template", "_tuples")

    def __init__(self, call: KernelCall, compiled: Any, names: Sequence[str]) -> None:
        run = compiled.run  # loads the binary on the current device
        self._compiled, self._function, self._grid = compiled, _c_launcher(run), call.grid
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        hooks = (None, None, None)
        self._template: list[Any] = [
            *call.grid, None, compiled.function, *flags, None, None, compiled.packed_metadata, *hooks,
        ]  # fmt: skip
        self._pointers: list[tuple[int, int, int]] = []
        self._rows: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self._tuples: list[tuple[int, list[Any]]] = []
        self._maps: list[tuple[int, int, int, TensorMaps]] = []
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for parameter, argument in zip(call.kernel.params, call.ordered, strict=True):
            self._append(None if parameter.is_constexpr else argument, list(names), metas)

    def _append(self, argument: Any, names: list[str], metas: Any) -> None:
        """Put one argument into the template, and note where addresses belong."""
        at = len(self._template)
        if isinstance(argument, Tile):
            self._maps.append((at, names.index(argument.address.name), argument.address.offset,
                               TensorMaps(argument, next(metas))))  # fmt: skip
            self._template += [None, *argument.shape, *argument.strides]
            return
        if isinstance(argument, Address):
            self._pointers.append((at, names.index(argument.name), argument.offset))
        elif isinstance(argument, tuple):
            parts = [_part(element, names) for element in argument]
            moving = [i for i, part in enumerate(parts) if isinstance(part, tuple)]
            if moving == [0]:
                self._rows.append((at, *parts[0], tuple(parts[1:])))
            elif moving:
                self._tuples.append((at, parts))
            argument = tuple(None if isinstance(part, tuple) else part for part in parts)
        self._template.append(None if isinstance(argument, Address) else argument)

    def filled(self, stream: int, addresses: Sequence[int]) -> Filled:
        """The C function and its arguments; addresses in the order of the names."""
        arguments = self._template.copy()
        arguments[STREAM] = stream
        for at, which, offset in self._pointers:
            arguments[at] = addresses[which] + offset
        for at, which, offset, rest in self._rows:
            arguments[at] = (addresses[which] + offset, *rest)
        for at, which, offset, maps in self._maps:
            arguments[at] = maps.at(addresses[which] + offset)
        for at, parts in self._tuples:
            arguments[at] = tuple([addresses[p[0]] + p[1] if isinstance(p, tuple) else p for p in parts])
        return self._function, tuple(arguments)

    def __call__(self, stream: int, addresses: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Queue the kernel and show it to the hooks."""
        del tensors
        function, filled = self.filled(stream, addresses)
        arguments, runtime = list(filled), triton.knobs.runtime
        arguments[METADATA] = self._compiled.launch_metadata(self._grid, stream, *arguments[NUM_FIXED:])
        arguments[ENTER_HOOK], arguments[EXIT_HOOK] = runtime.launch_enter_hook, runtime.launch_exit_hook
        function(*arguments)


def _part(element: Any, names: list[str]) -> Any:
    """An element of a tuple argument: a number, None, or (which address, offset)."""
    if isinstance(element, Address):
        return names.index(element.name), element.offset
    if isinstance(element, Multiple):
        return element.value
    return None if isinstance(element, Fixed) else element


def is_hooked() -> bool:
    """Whether a profiler has put anything into Triton's chains of hooks (or, in their place, one hook)."""
    runtime = triton.knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (before is not None and getattr(before, "calls", True)) or (after is not None and getattr(after, "calls", True))
    )


def _c_launcher(run: Any) -> Any:
    """The C function; behind a wrapper that encodes descriptors if the kernel takes any."""
    if inspect.isbuiltin(run.launch):
        return run.launch
    return inspect.getclosurevars(run.launch).nonlocals["launcher"]


class OrdinaryLaunch:
    """The same call through Triton's public interface."""

    __slots__ = ("_call", "_compiled", "_names")

    def __init__(self, call: KernelCall, compiled: Any, names: Sequence[str]) -> None:
        self._call, self._compiled, self._names = call, compiled, names

    def __call__(self, stream: int, addresses: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Queue the kernel; tensors in the order of the names."""
        del addresses
        named = dict(zip(self._names, tensors, strict=False))
        arguments = [materialised(argument, named) for argument in self._call.ordered]
        self._compiled[self._call.grid](*arguments, stream=stream)


def launch_of(call: KernelCall, compiled: Any, names: Sequence[str]) -> DirectLaunch | OrdinaryLaunch:
    """The fastest way to start a compiled kernel that is open here."""
    scratch = compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size
    if is_direct() and not scratch:
        return DirectLaunch(call, compiled, names)
    return OrdinaryLaunch(call, compiled, names)
