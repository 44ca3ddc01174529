"""Triton's kernels with other tiles, for tests and experiments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

from tilewise import calls

if TYPE_CHECKING:
    from tilewise.backends.triton.configs import Config, Pass


@contextlib.contextmanager
def overridden(configs: Mapping[Pass, Config]) -> Iterator[None]:
    """Replace the configurations of some passes within a block, in every thread: autograd runs a backward in its own.
    What was planned before the block, or within it, is forgotten.
    """
    from tilewise.backends.gpu import launching
    from tilewise.backends.triton import configs as tables
    from tilewise.backends.triton import planning

    kept: list[Any] = [planning._plan, launching.kept]  # noqa: SLF001
    config_of, latent_config = tables.config_of, tables.latent_config

    def forget() -> None:
        calls.forget()
        for cache in kept:
            cache.cache_clear()

    def of_pass(problem: Any, device: Any, direction: Pass) -> Config:
        return configs[direction] if direction in configs else config_of(problem, device, direction)

    def of_latents(problem: Any, device: Any, rows: int) -> Config:
        return configs["latent"] if "latent" in configs else latent_config(problem, device, rows)

    def as_given(config: Config, page_size: int) -> Config:
        del page_size
        return config

    forget()
    try:
        with mock.patch.multiple(tables, config_of=of_pass, latent_config=of_latents, within_pages=as_given):
            yield
    finally:
        forget()
