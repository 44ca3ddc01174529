"""What tests on a real GPU share: where they run, and in which state."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tilewise.backends.gpu.counters import Counters, counters_of

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """The processes of pytest-xdist share the cores, on which many references are computed."""
    if hasattr(config, "workerinput") and torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.workerinput["workercount"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a GPU and Triton; those with the mark `hopper`, an H100 or H200."""
    here = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    is_hopper = here and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not here:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and Triton"))
            elif not is_hopper and item.get_closest_marker("hopper") is not None:
                item.add_marker(pytest.mark.skip(reason="needs an H100 or H200"))


@pytest.fixture(autouse=True)
def clean_memory() -> Iterator[None]:
    """The same random numbers for every test, and nothing left of it: in torch's cache, or in a counter, from which the
    next launch would count on and leave out tiles.
    """
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels on other streams count, too
        torch.cuda.empty_cache()
        counters = counters_of(torch.cuda.current_device())
        if isinstance(counters, Counters) and counters.pool is not None:
            left = counters.pool.nonzero().flatten()
            values = counters.pool[left].tolist()
            counters.pool[left] = 0
            assert values == [], f"counters {left[:8].tolist()} hold {values[:8]}"


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # torch says every time that this does not find everything; the mode is set before it does.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which it is an error if the host waits for the device."""
    return _no_waiting
