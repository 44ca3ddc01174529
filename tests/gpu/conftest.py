"""What tests on a real GPU share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_memory() -> Iterator[None]:
    """The same random numbers for every test, and nothing left of it in torch's cache."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
