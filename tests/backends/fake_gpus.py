"""Two GPUs that are not there: tensors on the CPU that say which one they are on, over the driver of fake_cuda.

What torch does for a device that is not current (results made on the current one, `torch.cuda.device` as the guard) it
does here as well.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda import STREAMS, FakeCuda
from tilewise import device as devices

CACHES = {
    "gpu.compilation": ("_compiled",),
    "gpu.counters": ("counters_of",),
    "gpu.driver": ("_driver_version", "_entry", "_kinds"),
    "gpu.launching": ("kept",),
}


@contextlib.contextmanager
def nothing_prepared() -> Iterator[None]:
    """Within the block, and nothing of it afterwards; every device is an H200."""

    def forget() -> None:
        for module, names in CACHES.items():
            for name in names:
                getattr(importlib.import_module(f"tilewise.backends.{module}"), name).cache_clear()

    forget()
    with devices.overridden(devices.named("h200")):
        yield
    forget()


class Placed(Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    ordinal: int

    def get_device(self) -> int:
        return self.ordinal

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.ordinal)

    def new_empty_strided(self, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Tensor:  # type: ignore[override]
        return placed(torch.empty_strided(size, stride, **kwargs), self.ordinal)


def placed(tensor: Tensor, index: int) -> Placed:
    """The same memory, said to be on a GPU."""
    found: Placed = tensor.as_subclass(Placed)
    found.ordinal = index
    return found


class FakeGpus:
    """What a test sees and sets of the two devices."""

    def __init__(self, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.streams = {0: STREAMS, 1: 2 * STREAMS}
        for name, answer in (
            ("_cuda_getDevice", driver.device),
            ("_cuda_getCurrentRawStream", self.streams.__getitem__),
            ("_cuda_isCurrentStreamCapturing", lambda: False),
        ):
            monkeypatch.setattr(torch._C, name, answer, raising=False)
        guards: Any = torch._C._dynamo.guards
        monkeypatch.setattr(guards, "_empty_strided_cuda", self._made, raising=False)
        monkeypatch.setattr(torch.cuda, "_exchange_device", driver.exchange_device)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", driver.exchange_device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))

    def _made(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Placed:
        return placed(torch.empty_strided(shape, strides, dtype=dtype), self.driver.device())
