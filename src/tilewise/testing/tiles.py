"""Triton's kernels with other tiles, for tests and experiments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tilewise import calls

if TYPE_CHECKING:
    from tilewise.backends.triton.configs import Config, Pass


@contextlib.contextmanager
def overridden(configs: Mapping[Pass, Config]) -> Iterator[None]:
    """Replace the configurations of some passes within a block, in every thread. What was planned before the block, or
    within it, is forgotten.
    """
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import configs as tables
    from tilewise.backends.triton import planning

    kept: list[Any] = [planning._plan, launching.kept]  # noqa: SLF001

    def forget() -> None:
        calls.forget()
        for cache in kept:
            cache.cache_clear()

    tables._overrides.append(configs)  # noqa: SLF001
    forget()
    try:
        yield
    finally:
        tables._overrides.pop()  # noqa: SLF001
        forget()
