"""What a GPU backend keeps from call to call: tile counters.

Tensors on the CPU stand in for those on a GPU, and streams are numbers.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from concurrently import run_concurrently

CPU = torch.device("cpu")


class FakeStream:
    """The current stream, and what was known of the counters while the host waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle, self.capturing, self.waited = 1, False, 0
        self.while_waiting: Callable[[], None] = lambda: None
        for name, answer in (
            ("_cuda_isCurrentStreamCapturing", lambda: self.capturing),
            ("_cuda_getCurrentRawStream", lambda _: self.handle),
        ):
            monkeypatch.setattr(torch._C, name, answer, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=self.wait))

    def wait(self) -> None:
        self.waited += 1
        self.while_waiting()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    return FakeStream(monkeypatch)


@pytest.fixture
def gpu() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tilewise.backends.gpu.counters")


def test_counters_are_seen_only_once_they_are_zero(gpu: Any, stream: FakeStream) -> None:
    """Another thread must not count, on a stream of its own, before the zeros are written."""
    counters = gpu.Counters(CPU)
    seen: list[Any] = []

    def look() -> None:
        seen.append(counters.pool)
        other = threading.Thread(target=lambda: seen.append(counters.current()))
        other.start()
        other.join(0.1)
        seen.append(other.is_alive())

    stream.while_waiting = look
    mine = counters.current()
    assert seen[:2] == [None, True]
    assert int(mine.sum()) == 0
    assert stream.waited == 1


def test_counters_of_streams_and_graphs(gpu: Any, stream: FakeStream) -> None:
    """One for all calls on a stream, others for every other stream and for every call that is captured."""
    counters = gpu.Counters(CPU)
    first = counters.current()
    assert counters.current().data_ptr() == first.data_ptr()
    taken = [first]
    for handle in (2, 3):
        stream.handle = handle
        taken.append(counters.current(5))
    stream.capturing = True
    taken += [counters.current(3), counters.current(3)]
    ends = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in taken]
    assert all(end <= begin for (_, end), (begin, _) in zip(sorted(ends), sorted(ends)[1:], strict=False))
    assert [len(tensor) for tensor in taken] == [1, 8, 8, 3, 3]


def test_more_counters_than_there_are(gpu: Any, stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are made anew: zero, and kept by the stream; a graph clears its own in every replay."""
    monkeypatch.setattr(gpu, "COUNTERS_PER_DEVICE", 4)
    counters = gpu.Counters(CPU)
    many = counters.current(100)
    assert (len(many), int(many.sum())) == (128, 0)
    assert counters.current(100).data_ptr() == many.data_ptr()
    stream.capturing = True
    assert counters.current(100).data_ptr() != many.data_ptr()


def test_no_more_streams_have_counters_than_allowed(
    gpu: Any, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MAX_STREAMS", 3)
    counters = gpu.Counters(CPU)
    for handle in range(10):
        stream.handle = handle
        counters.current()
    assert list(counters.by_stream) == [7, 8, 9]


def test_threads_take_different_counters(gpu: Any, stream: FakeStream) -> None:
    counters = gpu.Counters(CPU)
    counters.current()
    stream.capturing = True
    taken: list[int] = []
    run_concurrently(lambda: taken.extend([counters.current(2).data_ptr() for _ in range(100)]))
    assert len(set(taken)) == len(taken)
