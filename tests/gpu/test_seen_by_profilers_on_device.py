"""On a GPU: profilers see bound calls with their backend, NVTX ranges are made, int64 index tensors stop nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from making import NoWaiting
from tilewise import settings


def qkv(grad: bool) -> list[Any]:
    return [torch.randn(1, 4, 512, 64, dtype=torch.bfloat16, device="cuda", requires_grad=grad) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("by", ["hopper", "triton"])
@pytest.mark.parametrize("grad", [False, True])
def test_repeated_calls_show_backend_and_shapes(by: str, grad: bool) -> None:
    if reason := dict(tw.backends())[by]:
        pytest.skip(reason)
    tensors = qkv(grad)

    def call() -> None:
        out = tw.attention(*tensors, causal=True, backend=by)
        if grad:
            out.backward(torch.ones_like(out))

    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as seen:
        call()
        torch.cuda.synchronize()
    events = list(seen.events() or ())
    for name, count in (("tilewise::attention", 1), ("tilewise::attention_backward", int(grad))):
        found = [event for event in events if event.name == name and event.device_type.name == "CPU"]
        assert len(found) == count
        for event in found:
            assert event.kwinputs["backend"] == by
            assert event.input_shapes[:3] == [[1, 4, 512, 64]] * 3


def test_nvtx_ranges_are_taken() -> None:
    tensors = qkv(grad=True)
    expected = tw.attention(*tensors)
    with settings.overridden(nvtx=True):
        for _ in range(3):
            out = tw.attention(*tensors)
            out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("by", ["hopper", "triton"])
def test_index_tensors_of_int64_without_a_wait(by: str, no_waiting: NoWaiting) -> None:
    if reason := dict(tw.backends())[by]:
        pytest.skip(reason)
    pages = torch.randn(64, 64, 2, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(64, device="cuda").view(4, 16)
    lengths = torch.tensor([1000, 1, 0, 517], device="cuda")
    q = torch.randn(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    expected = tw.attention_paged(q, pages, pages, table.int(), lengths.int(), backend=by)
    tw.attention_paged(q, pages, pages, table, lengths, backend=by)
    with no_waiting():
        results = [tw.attention_paged(q, pages, pages, table, lengths, backend=by) for _ in range(3)]
    for out in results:
        assert torch.equal(out, expected)
