"""Differences between Triton releases, from 3.6 on. No other module asks for a version.

The upper half answers questions without importing Triton. The names in the lower half are resolved when they are
imported (`from tilewise.backends.gpu.releases import async_load`), so that a kernel is written once for all releases.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, dataclass_transform

if TYPE_CHECKING:  # what a class of device values looks like to a type checker

    @dataclass_transform()
    def aggregate(cls: Any) -> Any:
        """See `_names`."""


# Releases on which all tests ran.
OLDEST, NEWEST = (3, 6), (3, 9)
FIRST_WITH_STABLE_NAMES = (3, 8)


@functools.cache
def installed() -> str:
    """The version of the installed Triton; "" if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _release() -> tuple[int, ...]:
    numbers = [part for part in installed().split("+")[0].split(".")[:2] if part.isdecimal()]
    return tuple(map(int, numbers))


def missing() -> str | None:
    """Why no kernel can be compiled here; None if kernels can."""
    if not installed() or importlib.util.find_spec("triton") is None:
        return "the triton package is not installed (pip install triton)"
    return outdated()


def outdated() -> str | None:
    """Why the installed release is too old to compile the kernels; None if it is not, or if there is none."""
    if not installed() or _release() >= OLDEST:
        return None
    return f"triton {installed()} is older than {'.'.join(map(str, OLDEST))} (pip install --upgrade triton)"


def is_known() -> bool:
    """Whether all tests ran on this release; a newer one must pass a trial first (see trial.py)."""
    return _release() <= NEWEST


def ptxas(capability: int) -> str:
    """The path of the ptxas that assembles the PTX of this release."""
    compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
    return str(compiler.get_ptxas(capability).path)


def assembler_options(kernel: Any) -> str | None:
    """What ptxas is told beyond what Triton tells it.

    From 3.7 on Triton lowers the level of register allocation for all kernels. Hopper's kernels fill the registers, and
    ptxas 13 then spills hundreds of bytes; at the level that ptxas itself takes it spills few or none.
    """
    if not (hasattr(kernel, "is_gluon") and kernel.is_gluon()):
        return None
    import triton

    return " ".join(filter(None, (triton.knobs.nvidia.ptxas_options, "--regAllocOptLevel=4")))


def name_in_order(kernel: Any) -> None:
    """Give a kernel the name under which Triton's cache on disk has it.

    Up to 3.7 the name of a function depends on which functions that it calls were named before, so that a process would
    compile again what another one, `tilewise warmup` say, has compiled. Here those it calls always come first.
    """
    if getattr(kernel, "hash", "") is None and _release() < FIRST_WITH_STABLE_NAMES:
        for function in _callees_first(kernel, set()):
            function.cache_key  # noqa: B018  (made when it is asked for)


def _callees_first(function: Any, met: set[int]) -> Iterator[Any]:
    """A function of the device after all that it calls. They are told apart by `id`: their hash is the name."""
    from triton.runtime.jit import JITCallable

    met.add(id(function))
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    found = [known.get(name) for name in names]
    found += [vars(value).get(name) for value in found if isinstance(value, ModuleType) for name in names]
    for value in found:
        for called in (value, *getattr(value, "hash_attrs", ())):
            if isinstance(called, JITCallable) and id(called) not in met:
                yield from _callees_first(called, met)
    yield function


@functools.cache
def _names() -> dict[str, Any]:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import tma
    from triton.language import core

    @builtin
    def reinterpreted(buffer, dtype, shape, layout, _semantic=None):
        """The shared memory of a buffer, viewed with another type, shape and layout."""
        method = getattr(type(buffer), "reinterpret", None) or type(buffer)._reinterpret  # noqa: SLF001
        return method(buffer, dtype, shape, layout, _semantic=_semantic)

    @builtin
    def reduce_add(desc, coord, source, _semantic=None):
        """global[coord] += shared tile, asynchronously, like a TMA store; fp32 additions in no fixed order."""
        from triton._C.libtriton import ir

        coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)

    wrapped = _first(gluon, "aggregate") or core._aggregate  # noqa: SLF001

    def aggregate(cls):
        """A class of device values. Its constructor takes the annotated fields in order."""
        fields = tuple(cls.__annotations__)

        def __init__(self, *values):  # noqa: N807
            for name, value in zip(fields, values, strict=True):
                setattr(self, name, value)

        setattr(__init__, "__triton_builtin__", True)  # noqa: B010
        cls.__init__ = __init__
        return wrapped(cls)

    return {
        "GluonASTSource": GluonASTSource,
        "aggregate": aggregate,
        "async_load": _first(tma, "async_load", "async_copy_global_to_shared"),
        "async_store": _first(tma, "async_store", "async_copy_shared_to_global"),
        "barrier": _first(gl, "barrier", "thread_barrier"),
        "reduce_add": _first(tma, "async_atomic_add") or reduce_add,
        "reinterpreted": reinterpreted,
    }


def _first(module: Any, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def __getattr__(name: str) -> Any:
    """One of the names above, as the installed Triton provides it."""
    if not name.startswith("_") and name in (names := _names()):
        return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
