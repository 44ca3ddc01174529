"""The registry of backends in order of preference: those of this package and those registered from outside.

Each package here exposes `BACKEND`, a `base.Backend`. An outside backend is one too, or any object with its abstract
methods. It is given to `tilewise.register_backend` or named by another distribution's entry point in the group
`tilewise.backends`; its code is loaded when it is first asked. This package is callable: `tilewise.backends()` lists
all backends.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
import types
import warnings
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.backends.base import Backend, Differentiating
from tilewise.errors import InvalidProblem

__all__ = ["GROUP", "NAMES", "Status", "load", "names", "register", "statuses", "unregister"]

# The backends of this package, in order of preference: `backend="auto"` takes the first that supports the problem.
NAMES = ("hopper", "triton", "cpu", "reference")
# Outside backends come before this one unless they say otherwise.
LAST = "reference"
# The entry-point group of other distributions.
GROUP = "tilewise.backends"


class Status(NamedTuple):
    """A backend and whether it can run here: `reason` is None if so."""

    name: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'available'}"


class _Outside(NamedTuple):
    """An outside backend: how to load it, and before which backend it is asked."""

    load: Callable[[], Backend]
    before: str


# Filled when names are first needed, which reads the entry points.
_outside: dict[str, _Outside] | None = None


@functools.cache
def names() -> tuple[str, ...]:
    """The name of every backend, in order of preference."""
    ordered = list(NAMES)
    for name, outside in _registered().items():
        ordered.insert(ordered.index(outside.before), name)
    return tuple(ordered)


@functools.cache
def load(name: str) -> Backend:
    """The backend of that name. Its compiler is not loaded yet."""
    outside = _registered().get(name)
    if outside is not None:
        return outside.load()
    backend: Backend = importlib.import_module(f"tilewise.backends.{name}").BACKEND
    return backend


def statuses() -> tuple[Status, ...]:
    """Every backend in order of preference, with the reason why it cannot run on this machine, if any."""
    return tuple(Status(name, load(name).unavailable()) for name in names())


def register(given: object, before: str = LAST) -> None:
    """Add an outside backend, asked just before the one named."""
    backend, known = _completed(given), names()
    if backend.name in known:
        fix = "Give yours another name; a name stands for one backend."
        raise InvalidProblem("backend", "a name that is free", f"{backend.name!r}, which is taken", fix)
    if before not in known:
        raise InvalidProblem("before", "one of " + ", ".join(known), repr(before), "Name a backend that is there.")
    _registered()[backend.name] = _Outside(lambda: backend, before)
    names.cache_clear()


def unregister(name: str) -> None:
    """Remove an outside backend. Backends registered before it take over its position."""
    outside = _registered()
    if name not in outside:
        expected = "a registered backend (" + (", ".join(outside) or "there is none") + ")"
        raise InvalidProblem("name", expected, repr(name), "The backends of tilewise itself stay.")
    gone = outside.pop(name)
    for other, entry in outside.items():
        if entry.before == name:
            outside[other] = entry._replace(before=gone.before)
    names.cache_clear()
    load.cache_clear()


def _completed(backend: Any) -> Backend:
    """The backend, checked. If it does not inherit `Backend`, one with its methods and the defaults for the others."""
    _check(backend)
    if isinstance(backend, Backend):
        return backend
    kind: ABCMeta = Backend if _missing(backend, Differentiating) else Differentiating
    own = {name: getattr(backend, name) for name in dir(kind) if name[0] != "_" and hasattr(backend, name)}
    own |= {name: staticmethod(method) for name, method in own.items() if callable(method)}
    completed: Backend = type(type(backend).__name__, (kind,), own | {"name": backend.name})()
    return completed


def _missing(backend: Any, kind: ABCMeta) -> list[str]:
    return [method for method in sorted(kind.__abstractmethods__) if not callable(getattr(backend, method, None))]


def _check(backend: Any) -> None:
    fix = "tilewise/backends/base.py says what a backend is."
    if isinstance(backend, type):
        raise InvalidProblem("backend", "an object", f"the class {backend.__name__}", f"Pass {backend.__name__}().")
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name == "auto":
        raise InvalidProblem("backend", "a name that is an identifier, and not 'auto'", repr(name), fix)
    if missing := _missing(backend, Backend):
        got, needed = f"{type(backend).__name__} without {', '.join(missing)}", sorted(Backend.__abstractmethods__)
        raise InvalidProblem("backend", f"the methods {', '.join(needed)}", got, fix)


def _registered() -> dict[str, _Outside]:
    """The outside backends in order of registration. Entry points come first, sorted by name."""
    global _outside
    if _outside is None:
        found: dict[str, _Outside] = {}
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
            if point.name in (*NAMES, "auto") or point.name in found:
                warnings.warn(
                    f"the backend {point.name!r} of the entry point {point.value!r} (group {GROUP}) is left out: "
                    "that name is taken",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                found[point.name] = _Outside(functools.partial(_loaded, point), LAST)
        _outside = found
    return _outside


def _loaded(point: importlib.metadata.EntryPoint) -> Backend:
    """The backend an entry point names, or one that reports why it cannot be loaded: others stay usable."""
    said = f"the entry point {point.value!r} (group {GROUP})"
    try:
        backend = _completed(point.load())
    except Exception as error:  # foreign code may raise anything
        return _Broken(point.name, f"{said} cannot be loaded: {type(error).__name__}: {error}")
    if backend.name != point.name:
        return _Broken(point.name, f"{said} names another backend: its name is {backend.name!r}")
    return backend


class _Broken(Backend):
    """A backend that cannot be loaded."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def unavailable(self) -> str | None:
        """The reason."""
        return self.reason

    def supports(self, *_: Any, **__: Any) -> str | None:
        """Always refuses."""
        return self.reason

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(self.reason)

    tile_shape = forward = backward = _refuse


class _Package(types.ModuleType):
    """The type of this package, which makes it the public function `tilewise.backends()` too.

    A plain function of that name would hide the package: `import tilewise.backends.cpu as cpu` would fail.
    """

    def __call__(self) -> tuple[Status, ...]:
        """The backends in order of preference, each with "available" or the reason why it cannot run."""
        return statuses()


sys.modules[__name__].__class__ = _Package
