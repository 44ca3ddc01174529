"""Counters in global memory: tile counters of persistent kernels, and arrival counters of split items."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from tilewise.lasting import outside_pools

# Streams of a device that keep counters. torch has 32 streams of each of two priorities and the default one; other
# libraries create and destroy their own.
MAX_STREAMS = 72
# 4 MiB. Enough for graphs of 32 layers with a batch of 64 and 8 K/V heads, captured for 64 batch sizes.
COUNTERS_PER_DEVICE = 1 << 20


class Counters:
    """The counters of one device. They are zero before and after every launch, so they are cleared only once.

    Kernels on one stream run one after another and share counters. A captured call keeps its own counters forever,
    because graphs may be replayed concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Tensor | None = None
        self.used = 0
        self.lock = threading.Lock()
        self.by_stream: dict[int, Tensor] = {}

    def current(self, number: int, stream: int) -> Tensor:
        """At least `number` counters for a launch on the current stream, whose handle is `stream`."""
        if torch._C._cuda_isCurrentStreamCapturing():  # noqa: SLF001  (torch.cuda's wrapper takes longer than it)
            return self._take(number)
        counters = self.by_stream.get(stream)
        if counters is None or counters.shape[0] < number:
            self._fill()
            size = 1 << (number - 1).bit_length()
            counters = self.by_stream[stream] = outside_pools(lambda: self._take(size), self.device)
            # Counters of a dropped stream are never reused: its last kernels may still be running.
            for oldest in list(self.by_stream)[:-MAX_STREAMS]:
                self.by_stream.pop(oldest, None)
        return counters

    def _fill(self) -> None:
        with self.lock:
            if self.pool is None:
                pool = outside_pools(lambda: self._zeros(COUNTERS_PER_DEVICE), self.device)
                # No other stream, of any thread, may count before the zeros are written.
                torch.cuda.current_stream(self.device).synchronize()
                self.pool = pool

    def _take(self, number: int) -> Tensor:
        with self.lock:
            first = self.used
            if self.pool is not None and first + number <= COUNTERS_PER_DEVICE:
                self.used += number
                return self.pool[first : first + number]
        return self._zeros(number)

    def _zeros(self, number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.int32, device=self.device)


class HostCounters:
    """Counters for Triton's interpreter, which runs kernels one after another on the CPU."""

    def current(self, number: int = 1, stream: int = 0) -> Tensor:
        """Like `Counters.current`."""
        del stream
        return torch.zeros(number, dtype=torch.int32, device="cpu")


@functools.cache
def counters_of(index: int) -> Counters | HostCounters:
    """The counters of a CUDA device or, if the index is negative, of the CPU."""
    return HostCounters() if index < 0 else Counters(torch.device("cuda", index))
