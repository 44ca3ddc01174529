"""Makes a backend under development selectable by name, so that it is tested through the public API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilewise import api
from tilewise.backends.base import Backend

__all__ = ["installed"]


@contextlib.contextmanager
def installed(backend: Backend) -> Iterator[str]:
    """Within the block `backend=<its name>` runs this object: yields the name."""
    api.register_backend(backend)
    try:
        yield backend.name
    finally:
        api.unregister_backend(backend.name)
