"""Compiles drivers and micro-kernels to machine code.

A program is an entry point, which is a driver (language.py), with all drivers and kernels it calls. A kernel is a
Python function that emits LLVM IR itself. `compile_object` collects them into one module and optimises it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, overload

from llvmlite import ir

from tilewise import machine_code
from tilewise.backends.cpu.emit import F32, I64, Emitter, Value
from tilewise.backends.cpu.isa import Isa, host
from tilewise.backends.cpu.language import Translator, names_in, signature_of

LLVM_TYPES = {"i": I64, "f": F32, "v": ir.VoidType()}
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Part(NamedTuple):
    """One function of a program: symbol, C-like type, and the Python function to translate or that emits."""

    symbol: str
    kind: ir.FunctionType
    function: Callable[..., Any]
    is_driver: bool

    def __call__(self, *_arguments: Any) -> Any:
        """Drivers call parts by name, but they are translated, never called from Python."""
        raise TypeError(f"{self.symbol} is compiled code: launch it through tilewise.backends.cpu.launch")


def part_of(named: Any) -> Part:
    """The part behind a decorated function."""
    assert isinstance(named, Part)
    return named


@overload
def kernel(arguments: str) -> Callable[[Callable[..., None]], Callable[..., None]]: ...
@overload
def kernel(arguments: str, result: Literal["i"]) -> Callable[[Callable[..., Value]], Callable[..., int]]: ...
@overload
def kernel(arguments: str, result: Literal["f"]) -> Callable[[Callable[..., Value]], Callable[..., float]]: ...
def kernel(arguments: str, result: str = "v") -> Callable[[Callable[..., Value]], Any]:
    """Make `emit(e, *arguments)` callable from drivers; "i" is an int64, "f" an fp32 number and "v" nothing."""

    def decorate(emit: Callable[..., Value]) -> Any:
        kind = ir.FunctionType(LLVM_TYPES[result], [LLVM_TYPES[a] for a in arguments])
        return Part(f"tilewise_kernel_{emit.__name__}", kind, emit, is_driver=False)

    return decorate


def driver(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a Python function of ints and floats part of compiled programs. It may call parts that a function around it
    was given: loops that several programs share are made so.
    """
    return named(function.__name__, function)


def named(name: str, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A driver with another name than its function, which several programs share."""
    part = Part(f"tilewise_{name}", signature_of(function), function, is_driver=True)
    return cast("Callable[Arguments, Result]", part)


def _called(function: Callable[..., Any]) -> Iterator[tuple[str, Part]]:
    names = names_in(function)
    for name in (*function.__code__.co_names, *function.__code__.co_freevars):
        if isinstance(found := names.get(name), Part):
            yield name, found


def reached(entry: Part) -> list[Part]:
    """The entry point and every part reachable from it."""
    found: dict[str, Part] = {}
    waiting = [entry]
    while waiting:
        part = waiting.pop()
        if part.symbol not in found:
            found[part.symbol] = part
            if part.is_driver:
                waiting += [called for _, called in _called(part.function)]
    return list(found.values())


def build_module(parts: list[Part], isa: Isa, exported: frozenset[str]) -> ir.Module:
    """The LLVM IR of some parts for an instruction set. Only `exported` symbols are visible."""
    module = ir.Module("tilewise")
    functions = {part.symbol: ir.Function(module, part.kind, part.symbol) for part in parts}
    for part in parts:
        function = functions[part.symbol]
        function.linkage = "external" if part.symbol in exported else "internal"
        if part.is_driver:
            names = {name: functions[called.symbol] for name, called in _called(part.function)}
            Translator(part.function, function, names.get)
            continue
        emitter = Emitter(ir.IRBuilder(function.append_basic_block("entry")), isa)
        returned = part.function(emitter, *function.args)
        if isinstance(part.kind.return_type, ir.VoidType):
            emitter.b.ret_void()
        else:
            emitter.b.ret(returned)
    return module


def compile_object(entry: Any) -> bytes:
    """The machine code of an entry point and all it calls, as an object file for this processor."""
    part = part_of(entry)
    return machine_code.object_of(build_module(reached(part), host(), frozenset({part.symbol})))
