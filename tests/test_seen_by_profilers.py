"""torch.profiler and NVTX show each call as `tilewise::attention`, each backward as `tilewise::attention_backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from making import int32
from tilewise import settings
from tilewise.fp8 import quantize

FORWARD, BACKWARD = "tilewise::attention", "tilewise::attention_backward"
Q, KV = [1, 4, 16, 8], [1, 2, 16, 8]


def dense(*, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(Q, requires_grad=grad), torch.randn(KV, requires_grad=grad), torch.randn(KV, requires_grad=grad)


def recorded(call: Callable[[], Any], *, shapes: bool = True, warm: bool = True) -> list[Any]:
    """The events of ours that a call made; the first one of its kind is made before, as it compiles kernels."""
    if warm:
        call()
    with settings.quiet_profiler(), profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as seen:
        call()
    return [event for event in seen.events() or () if event.name.startswith("tilewise::")]


def named(events: list[Any], name: str) -> list[Any]:
    return [event for event in events if event.name == name]


@pytest.mark.parametrize("warm", [True, False], ids=["repeated", "first"])
@pytest.mark.parametrize("grad", [False, True])
def test_eager_calls_show_backend_and_shapes(grad: bool, warm: bool) -> None:
    q, k, v = dense(grad=grad)

    def call() -> None:
        out = tw.attention(q, k, v, causal=True, backend="cpu")
        if grad:
            out.sum().backward()

    events = recorded(call, warm=warm)
    (forward,) = named(events, FORWARD)
    assert forward.input_shapes[:3] == [Q, KV, KV]
    assert forward.kwinputs["backend"] == "cpu"
    assert forward.kwinputs["kind"] == "dense"
    assert forward.kwinputs["features"] == "causal, gqa"
    backward = named(events, BACKWARD)
    assert len(backward) == grad
    for event in backward:
        assert event.input_shapes[:3] == [Q, KV, KV]
        assert event.kwinputs["backend"] == "cpu"


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_calls_show_backend_and_shapes(grad: bool) -> None:
    compiled = torch.compile(
        lambda q, k, v: tw.attention(q, k, v, causal=True, backend="reference"), fullgraph=True, backend="aot_eager"
    )
    q, k, v = dense(grad=grad)

    def call() -> None:
        out = compiled(q, k, v)
        if grad:
            out.sum().backward()

    events = recorded(call)
    (forward,) = named(events, FORWARD)
    assert (forward.input_shapes[:3], forward.kwinputs["backend"]) == ([Q, KV, KV], "reference")
    assert [event.kwinputs["backend"] for event in named(events, BACKWARD)] == ["reference"] * grad


def packed() -> Callable[[], Any]:
    q, cu = torch.randn(5, 2, 8), int32(0, 2, 5)
    return lambda: tw.attention_varlen(q, q, q, cu, cu, backend="cpu")


def paged() -> Callable[[], Any]:
    q, pages, table = torch.randn(1, 2, 8), torch.randn(3, 4, 2, 8), torch.tensor([[2, 0]], dtype=torch.int32)
    return lambda: tw.attention_paged(q, pages, pages, table, int32(5), backend="cpu")


def quantised() -> Callable[[], Any]:
    q = quantize(torch.randn(1, 2, 16, 16))
    return lambda: tw.attention(q, q, q, backend="cpu")


@pytest.mark.parametrize("make", [packed, paged, quantised])
def test_every_kind_of_call_shows(make: Callable[[], Callable[[], Any]]) -> None:
    (event,) = named(recorded(make()), FORWARD)
    assert event.kwinputs["backend"] == "cpu"
    assert event.kwinputs["kind"] == {packed: "varlen", paged: "paged", quantised: "dense"}[make]


class Ranges:
    """What is pushed, and how deep it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.depth = 0
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self.push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", self.pop)

    def push(self, name: str) -> None:
        self.names.append(name)
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1


def test_nvtx_ranges_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges(monkeypatch)
    q, k, v = dense(grad=True)

    def call() -> None:
        tw.attention(q, k, v, causal=True, backend="cpu").sum().backward()

    call()
    assert ranges.names == []
    for _ in range(2):
        with settings.overridden(nvtx=True):
            call()
    assert ranges.depth == 0
    assert ranges.names == 2 * [
        f"{FORWARD} cpu dense [causal, gqa] float32 (1, 4, 16, 8) (1, 2, 16, 8) (1, 2, 16, 8)",
        f"{BACKWARD} cpu dense [causal, gqa] float32 (1, 4, 16, 8) (1, 2, 16, 8) (1, 2, 16, 8)",
    ]
    call()
    assert len(ranges.names) == 4


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has NVTX")
def test_nvtx_without_cuda_is_refused() -> None:
    with settings.overridden(nvtx=True), pytest.raises(tw.Unsupported, match="TILEWISE_NVTX"):
        tw.attention(*dense())
