"""Compile a kernel for exactly what its description says, with or without a GPU on this machine.

Triton's own launch path specialises on integers that are 1 or multiples of 16. For elements of a tuple it does so
whatever the decorator says, so every new pattern of lengths would compile again. Here kernels are specialised only on
constants, dtypes, absent arguments and the alignment that the description states (see `symbols`). So one compiled
kernel serves every length, and what runs is what the offline tests compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.backends.gpu.symbols import ALIGNMENT, Address, Fixed, KernelCall, Multiple, Tile
from tilewise.device import DeviceSpec
from tilewise.symbolic import Number, fixed, is_integer

TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}
POINTERS = {dtype: "*" + name for dtype, name in TYPE_NAMES.items()}
CONSTANT, TILE = "constexpr", "tensordesc<"
# Integers from here on are passed as 64 bits.
WIDE = 2**31
# How many kernels' parameter types and launch layouts are cached; a program uses a few dozen.
MAX_COMPILED = 1024

# The position of an argument or of a record's element: (parameter,), (parameter, element) or further in.
Path = tuple[int, ...]
# Constants stand no further in than this: see gpu.records.
OUTER = 2


class Types(NamedTuple):
    """Everything a kernel is compiled for; hashable."""

    signature: tuple[Any, ...]
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]


def types_of(call: KernelCall) -> Types:
    """The types of a call's arguments, the constants among them, and known divisors of numbers and addresses."""
    return typed(call)[0]


def typed(call: KernelCall) -> tuple[Types, list[Any]]:
    """The types of a call, and its run-time arguments in order: numbers, addresses and tiles."""
    found = _Found([], [], [])
    signature: list[Any] = []
    for i, (parameter, argument) in enumerate(zip(call.kernel.params, call.ordered, strict=True)):
        if parameter.is_constexpr:
            found.constants.append(((i,), fixed(argument)))
            signature.append(CONSTANT)
        else:
            signature.append(_kind(argument, (i,), found))
    return Types(tuple(signature), tuple(found.constants), tuple(found.divisors)), found.passed


class _Found(NamedTuple):
    """What `typed` collects."""

    constants: list[tuple[Path, Any]]
    divisors: list[tuple[Path, int]]
    passed: list[Any]


def _kind(argument: Any, path: Path, found: _Found) -> Any:
    """The type of an argument, or of a tuple's elements."""
    kind = argument.__class__
    if kind is int or (kind is Number and is_integer(argument)):
        found.passed.append(argument)
        return "i32" if _is_narrow(argument) else "i64"
    if argument is None or kind is Fixed:
        assert argument is None or len(path) <= OUTER, f"Triton 3.6 loses constants this deep in records: {path}"
        found.constants.append((path, None if argument is None else fixed(argument.value)))
        return CONSTANT
    if isinstance(argument, tuple):
        kinds = [_kind(element, (*path, i), found) for i, element in enumerate(argument)]
        return kind(*kinds) if hasattr(argument, "_fields") else tuple(kinds)
    if kind is Multiple:
        found.divisors.append((path, fixed(argument.of)))
    elif kind is Address and argument.aligned:
        found.divisors.append((path, ALIGNMENT))
    found.passed.append(argument)
    return type_name(argument)


def type_name(argument: Any) -> str:
    """The type of one argument as the compiler spells it."""
    kind = argument.__class__
    if isinstance(argument, float) or (kind is Number and not is_integer(argument)):
        return "fp32"
    if kind is Address:
        return POINTERS[argument.dtype]
    if kind is Tile:
        return _tile_name(TYPE_NAMES[argument.address.dtype], argument.block, argument.layout)
    value, wide = (argument.value, argument.wide) if kind is Multiple else (argument, False)
    return "i32" if _is_narrow(value) and not wide else "i64"


def _is_narrow(value: Any) -> bool:
    """Whether a number takes 32 bits. A traced one that does is not compared again in later calls: the launch refuses
    one that takes more.
    """
    fits = value.__class__ is Number and -WIDE <= value.value < WIDE
    return fits or bool(-WIDE <= value < WIDE)


@functools.lru_cache(maxsize=MAX_COMPILED)
def _tile_name(element: str, block: tuple[int, ...], layout: Any) -> str:
    box = ",".join(map(str, block))
    return f"{TILE}{element}[{box}]{'' if layout is None else f',{layout!r}'}>"


def kinds_of(signature: Iterable[Any]) -> Iterator[str]:
    """The types of a kernel's parameters. Triton passes the sizes and strides of a tile as well."""
    for kind in signature:
        if isinstance(kind, tuple):
            yield from kinds_of(kind)
        elif kind != CONSTANT:
            yield kind
            if kind.startswith(TILE):
                rank = kind[: kind.index("]")].count(",") + 1
                yield from ["i32"] * rank + ["i64"] * rank


def target_of(device: DeviceSpec) -> GPUTarget:
    """The compilation target of a device, which need not be present."""
    assert device.capability is not None
    major, minor = device.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def compile_call(call: KernelCall, device: DeviceSpec, index: int, types: Types | None = None) -> Any:
    """The compiled kernel of a call, cached: for device `index` of this machine (a binary is loaded once for each), or
    for a device that is not present (index -1). `types` are its types_of, if known.

    Nothing is dropped from this cache, because a CUDA graph may hold the kernel: from 3.9 on Triton unloads a kernel
    that nobody refers to. It takes 0.2 to 5 MiB of host memory.
    """
    return _compiled(call.kernel, types or types_of(call), tuple(call.options.items()), target_of(device), index)


@functools.cache
def _compiled(kernel: Any, types: Types, options: tuple[tuple[str, Any], ...], target: GPUTarget, index: int) -> Any:
    del index  # only part of the cache key: a compiled kernel is tied to the device on which it is loaded
    return triton.compile(
        _source_class(kernel)(
            fn=kernel,
            signature=dict(zip(kernel.arg_names, types.signature, strict=True)),
            constexprs=dict(types.constants),
            attrs={path: [["tt.divisibility", divisor]] for path, divisor in types.divisors},
        ),
        target=target,
        options=dict(options),
    )


def forget_compiled() -> None:
    """Drop all compiled kernels."""
    _compiled.cache_clear()


def _source_class(kernel: Any) -> Any:
    if not kernel.is_gluon():
        return ASTSource
    from tilewise.backends.gpu.releases import GluonASTSource

    return GluonASTSource
