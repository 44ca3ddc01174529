"""A call whose tensors are on a GPU that is not the current one: where its kernels start, what they use, what is left.

The GPUs are not there (fake_gpus). Both hold their operands at the same addresses, so that whatever is remembered for
one of them and found for the other shows: the driver takes no kernel that was loaded on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda import FakeCuda, fake_cuda
from fake_gpus import FakeGpus, nothing_prepared, placed
from tilewise import validation
from tilewise.backends.gpu import compilation
from tilewise.backends.hopper import BACKEND as HOPPER
from tilewise.backends.triton import BACKEND as TRITON
from tilewise.operands import Flags, Operands, Wanted

__all__ = ["fake_cuda"]

pytest.importorskip("triton", minversion="3.6")
pytestmark = pytest.mark.slow
counters = pytest.importorskip("tilewise.backends.gpu.counters")
BF16 = torch.bfloat16
# Kernels of a call: forward, backward (statistics, dK and dV, dQ) and decoding, whose parts Triton merges in a second.
KERNELS = {"forward": (1, 1), "backward": (3, 3), "decode": (2, 1)}


@pytest.fixture(params=["streams of their own", "default streams"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda) -> Iterator[FakeGpus]:
    """Two H200s, nothing prepared, the first one current. The handle of the default stream is 0 on both."""
    found = FakeGpus(fake_cuda, monkeypatch)
    if request.param == "default streams":
        found.streams |= {0: 0, 1: 0}
    monkeypatch.setattr(counters, "outside_pools", lambda make, _: make())
    monkeypatch.setattr(counters, "COUNTERS_PER_DEVICE", 64)
    zeros = lambda of, n: placed(torch.zeros(n, dtype=torch.int32), of.device.index)  # noqa: E731
    monkeypatch.setattr(counters.Counters, "_zeros", zeros)
    fake_cuda.exchange_device(0)
    with nothing_prepared():
        yield found
    fake_cuda.exchange_device(0)


def calls_at(gpu: Any, kind: str, memory: list[Tensor], index: int) -> list[Callable[[], list[Tensor]]]:
    """The ordinary call and the bound one, of tensors in this memory said to be on a device; they give results back."""
    tensors = [placed(tensor, index) for tensor in memory]
    operands = Operands(*tensors[:3])
    training = kind == "backward"
    problem = validation.problem_of("dense", Operands(*memory[:3]), Flags(causal=kind != "decode", needs_grad=training))
    if training:
        given = (*tensors[3:], None, Wanted())
        bound = gpu.bind_backward(problem, operands, *given)
        in_order: tuple[Tensor | None, ...] = (tensors[5], None, *tensors[3:5], *operands)
        return [lambda: present(gpu.backward(problem, operands, *given)), lambda: present(bound(in_order))]
    bound = gpu.bind_forward(problem, operands, want_lse=False)
    return [lambda: present(gpu.forward(problem, operands)), lambda: present(bound(operands[:3]))]


def present(results: Any) -> list[Tensor]:
    return [tensor for tensor in results if tensor is not None]


def memory_of(kind: str) -> list[Tensor]:
    """What a call is given: q, k, v, and out, lse and dout of a backward."""
    if kind == "decode":
        keys = torch.zeros(1, 2, 4096, 64, dtype=BF16)
        return [torch.zeros(1, 8, 1, 64, dtype=BF16), keys, torch.zeros_like(keys)]
    rows = [torch.zeros(1, 2, 300, 64, dtype=BF16) for _ in range(5)]
    return [*rows[:4], torch.zeros(1, 2, 300), rows[4]] if kind == "backward" else rows[:3]


BACKENDS = pytest.mark.parametrize("gpu", [TRITON, HOPPER], ids=["triton", "hopper"])
KINDS = pytest.mark.parametrize("kind", ["forward", "backward", "decode"])


@BACKENDS
@KINDS
def test_kernels_start_where_the_tensors_are(gpu: Any, kind: str, gpus: FakeGpus) -> None:
    """On the device and the current stream of it, whichever device is current, and that one is current again after."""
    driver, memory, count = gpus.driver, memory_of(kind), KERNELS[kind][gpu is HOPPER]
    calls = {}
    for index in (1, 0):
        driver.exchange_device(1 - index)
        calls[index] = calls_at(gpu, kind, memory, index)
        assert driver.device() == 1 - index
    for current in (0, 1, 0):
        for index in (1, 0, 1):
            for call in calls[index]:
                driver.exchange_device(current)
                driver.expect()
                made = call()
                assert driver.launched_on() == [(index, gpus.streams[index])] * count
                assert driver.device() == current
                assert {tensor.get_device() for tensor in made} == {index}


def shared_prefix_at(gpu: Any, memory: list[Tensor], index: int) -> tuple[Any, tuple[Tensor | None, ...]]:
    """The pass of a batch whose sequences share a prefix, bound as tilewise.cascade does, and what it is given."""

    def of_both(tensors: list[Any]) -> tuple[Operands, Operands]:
        q, pages, table, lengths, prefix, keys, starts, *_ = tensors
        own = Operands(q, pages, pages, block_table=table, seqlens_k=lengths)
        return own, Operands(q, pages, pages, cu_seqlens_q=starts, block_table=prefix, seqlens_k=keys)

    own, groups = (validation.problem_of("paged", operands, Flags()) for operands in of_both(memory))
    there = [placed(tensor, index) for tensor in memory]
    given, shared = of_both(there)
    q, _, table, lengths, prefix, keys, starts, out, lse = there
    first: Any = gpu.bind_forward(own, given, want_lse=True)
    attend: Any = TRITON.bind_prefixes(groups, shared, len(q), None, out, lse)
    compilation._compiled.cache_clear()  # the kernels of a pass may be forgotten, and are loaded again
    both: Any = TRITON.bind_after(first, attend, 7, ("lse",), own)
    tensors = (*given[:7], prefix, keys, starts, None, table, lengths)
    return both, tensors


def prefix_memory(batch: int) -> list[Tensor]:
    """Of one group, 8 heads on 2."""
    own, shared = 16, 8
    memory = [torch.zeros(batch, 8, 64, dtype=BF16), torch.zeros(64, 64, 2, 64, dtype=BF16)]
    memory += [torch.zeros(shape, dtype=torch.int32) for shape in ((batch, own), (batch,), (1, shared), (1,), (2,))]
    memory[-1][1] = batch
    return [*memory, torch.zeros(batch, 8, 64, dtype=BF16), torch.zeros(8, batch)]


@BACKENDS
def test_prefixes_are_attended_where_the_tensors_are(gpu: Any, gpus: FakeGpus) -> None:
    """All kernels of the pass, those behind the own keys' as well, are loaded on the tensors' device."""
    memory, calls = prefix_memory(16), {}
    for index in (1, 0):
        gpus.driver.exchange_device(1 - index)
        calls[index] = shared_prefix_at(gpu, memory, index)
        assert gpus.driver.device() == 1 - index
    for current, index in ((0, 1), (1, 1), (1, 0), (0, 0), (0, 1)):
        gpus.driver.exchange_device(current)
        gpus.driver.expect()
        both, tensors = calls[index]
        made = present(both(tensors))
        assert gpus.driver.launched_on() == [(index, gpus.streams[index])] * (3 if gpu is HOPPER else 4)
        assert gpus.driver.device() == current
        assert {tensor.get_device() for tensor in made} == {index}


@BACKENDS
@KINDS
def test_the_current_device_is_restored_after_an_error(gpu: Any, kind: str, gpus: FakeGpus) -> None:
    for call in calls_at(gpu, kind, memory_of(kind), 1):
        gpus.driver.refuse(2)  # the direct launch and the ordinary one after it
        with pytest.raises(RuntimeError, match="fake"):
            call()
        assert gpus.driver.device() == 0
        call()
