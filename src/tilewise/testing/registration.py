"""Making a backend under development selectable by name, so that it is judged through the public API."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from tilewise import dispatch
from tilewise.backends.base import Backend

__all__ = ["installed"]


@contextlib.contextmanager
def installed(backend: Backend) -> Iterator[str]:
    """Within the block `backend=<its name>` runs this object: yields the name.

    Selections are remembered by name, so a name stands for one object for the life of the process.
    """
    path = f"tilewise.backends.{backend.name}"
    module = types.ModuleType(path)
    module.BACKEND = backend  # type: ignore[attr-defined]
    package = sys.modules["tilewise.backends"]
    names = package.NAMES
    if backend.name in names:
        raise ValueError(f"a backend named {backend.name!r} is there already; give yours another name")
    sys.modules[path] = module
    package.NAMES = (*names, backend.name)  # type: ignore[attr-defined]
    try:
        if dispatch.load(backend.name) is not backend:
            raise ValueError(f"the name {backend.name!r} stood for another object before; use a new one")
        yield backend.name
    finally:
        package.NAMES = names  # type: ignore[attr-defined]
        del sys.modules[path]
