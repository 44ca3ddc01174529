"""What a repeated GPU call makes the device and torch do, counted without a GPU: operators, allocations, launches.

bench/gpu_overhead.py says what calls cost the host on a GPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from fake_cuda import FakeCuda, fake_cuda
from test_gpu_launch import h200
from tilewise import calls, cascade, dispatch, fp8, settings, validation

__all__ = ["fake_cuda", "h200"]

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
GPUS = ("hopper", "triton")


class Cost(NamedTuple):
    """Of one call: operators that torch dispatched, blocks of memory it gave out, kernels."""

    operators: dict[str, int]
    allocations: int
    launches: int


@pytest.fixture
def gpus(h200: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Public calls reach the GPU backends with tensors on the CPU, whose index tensors are not read."""
    for name in GPUS:
        monkeypatch.setattr(type(dispatch.load(name)), "unavailable", lambda _: None)
    monkeypatch.setattr(validation, "reads_contents", lambda *_: False)
    caches = (dispatch._select, calls._family, calls._slot)
    for cache in caches:
        cache.cache_clear()
    yield h200
    for cache in caches:
        cache.cache_clear()


def rows(*shape: int, grad: bool = False) -> list[Tensor]:
    """q, k and v of one shape."""
    return [torch.zeros(shape, dtype=BF16, requires_grad=grad) for _ in range(3)]


def cost_of(run: Callable[[], Any], gpu: FakeCuda) -> Cost:
    """Of a call after some that looked the same; each count is of a call of its own."""
    for _ in range(3):
        run()
    gpu.expect()
    run()
    launches = gpu.seen().launches
    activities = [torch.profiler.ProfilerActivity.CPU]
    with settings.quiet_profiler(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    operators = Counter(event.name() for event in events if event.name().startswith("aten::"))
    given_out = [event for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return Cost(dict(operators), len(given_out), launches)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_forward_call(gpu: str, layout: str, gpus: FakeCuda) -> None:
    """out, and lse, which nobody asked for; one kernel, no view of anything in any layout."""
    q, k, v = rows(1, 128, 128, 64)
    cost = cost_of(lambda: tilewise.attention(q, k, v, causal=True, layout=layout, backend=gpu), gpus)
    assert cost == ({}, 2, 1)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_training_call(gpu: str, gpus: FakeCuda) -> None:
    """out, lse; dq, dk, dv, a workspace; four kernels."""
    q, k, v = rows(1, 4, 256, 64, grad=True)
    dout = torch.zeros(1, 4, 256, 64, dtype=BF16)

    def run() -> Any:
        return torch.autograd.grad(tilewise.attention(q, k, v, causal=True, backend=gpu), (q, k, v), dout)

    cost = cost_of(run, gpus)
    assert cost == ({}, 6, 4)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_packed_call(gpu: str, gpus: FakeCuda) -> None:
    """Blocks are listed on the device first, by one kernel more; its list and lse share a block of memory."""
    q, k, v = rows(256, 4, 64)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32)

    def run() -> Any:
        return tilewise.attention_varlen(q, k, v, cu, cu, max_seqlen_q=156, max_seqlen_k=156, backend=gpu)

    cost = cost_of(run, gpus)
    assert cost == ({}, 2, 2)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_packed_training_call(gpu: str, gpus: FakeCuda) -> None:
    """No operator beside the kernels either."""
    q, k, v = rows(256, 4, 64, grad=True)
    cu, dout = torch.tensor([0, 100, 256], dtype=torch.int32), torch.zeros(256, 4, 64, dtype=BF16)

    def run() -> Any:
        out = tilewise.attention_varlen(q, k, v, cu, cu, max_seqlen_q=156, max_seqlen_k=156, backend=gpu)
        return torch.autograd.grad(out, (q, k, v), dout)

    cost = cost_of(run, gpus)
    assert cost.operators == {}


@pytest.mark.parametrize(("gpu", "allocations", "kernels"), [("hopper", 2, 1), ("triton", 2, 2)])
def test_decode_calls(gpu: str, allocations: int, kernels: int, gpus: FakeCuda) -> None:
    """Of dense and of paged keys: out; lse, and the parts for a second kernel, share a block of memory."""
    q, (k, v, _) = torch.zeros(1, 32, 1, 128, dtype=BF16), rows(1, 8, 2048, 128)
    new, (k_pages, v_pages, _) = torch.zeros(1, 32, 128, dtype=BF16), rows(40, 64, 8, 128)
    table, lengths = torch.zeros(1, 32, dtype=torch.int32), torch.tensor([2000], dtype=torch.int32)
    for run in (
        lambda: tilewise.attention(q, k, v, backend=gpu),
        lambda: tilewise.attention_paged(new, k_pages, v_pages, table, lengths, backend=gpu),
    ):
        cost = cost_of(run, gpus)
        assert cost == ({}, allocations, kernels)


@pytest.mark.parametrize(("gpu", "kernels"), [("hopper", 1), ("triton", 2)])
def test_index_tensors_of_int64_cost_their_conversion(gpu: str, kernels: int, gpus: FakeCuda) -> None:
    q, (k, v, _) = torch.zeros(1, 32, 128, dtype=BF16), rows(40, 64, 8, 128)
    table, lengths = torch.zeros(1, 32, dtype=torch.int64), torch.tensor([2000])
    cost = cost_of(lambda: tilewise.attention_paged(q, k, v, table, lengths, backend=gpu), gpus)
    assert cost.operators == dict.fromkeys(("aten::to", "aten::_to_copy", "aten::empty_strided", "aten::copy_"), 2)
    assert (cost.allocations, cost.launches) == (4, kernels)


@pytest.mark.parametrize(("gpu", "made", "kernels"), [("hopper", 2, 2), ("triton", 2, 1)])
def test_fp8_calls(gpu: str, made: int, kernels: int, gpus: FakeCuda) -> None:
    """Containers are taken apart, then it is a call like any other; on Hopper V is transposed into scratch first."""
    q, k, v = (fp8.quantize(x, granularity="block") for x in rows(1, 8, 1024, 128))
    dense = cost_of(lambda: tilewise.attention(q, k, v, causal=True, backend=gpu), gpus)
    assert dense == ({}, made, kernels)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32)
    q8, k8, v8 = (fp8.quantize(x, cu_seqlens=cu) for x in rows(256, 4, 64))

    def run() -> Any:
        return tilewise.attention_varlen(q8, k8, v8, cu, cu, max_seqlen_q=156, max_seqlen_k=156, backend=gpu)

    varlen = cost_of(run, gpus)
    assert varlen.operators == {}
    assert varlen.launches == kernels + 1


@pytest.mark.parametrize("gpu", ["auto", "triton"])
@pytest.mark.parametrize("e4m3", [False, True])
def test_a_call_with_a_shared_prefix(gpu: str, e4m3: bool, gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for the own keys and the prefix, whose last programs merge; out and one block are made."""
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)
    monkeypatch.setattr(dispatch, "SERVING", {"cpu": "triton"})
    batch, shared, own = 64, 8, 2
    q, (k, v, _) = torch.zeros(batch, 32, 128, dtype=BF16), rows(shared + batch * own, 64, 8, 128)
    pages: tuple[Any, Any] = (fp8.quantize_pages(k), fp8.quantize_pages(v)) if e4m3 else (k, v)
    numbers = torch.arange(shared + batch * own, dtype=torch.int32)
    prefix, alone = numbers[None, :shared].clone(), numbers[shared:].view(batch, own).clone()
    lengths = torch.full((batch,), 64 * own, dtype=torch.int32)
    starts, keys = (torch.tensor(n, dtype=torch.int32) for n in ([0, batch], [64 * shared]))
    groups = (cascade.Group(batch, batch, 64 * shared),)
    hint = cascade.SharedPrefix(groups, prefix, keys, starts, None, alone, lengths)
    table, whole = torch.cat([prefix.expand(batch, -1), alone], 1), lengths + 64 * shared

    def run() -> Any:
        return tilewise.attention_paged(q, *pages, table, whole, shared_prefix=hint, backend=gpu)

    cost = cost_of(run, gpus)
    assert cost == ({}, 2, 2)
    # Numbers of int64 are converted before the kernels read them.
    hint = hint._replace(own_table=alone.long(), own_seqlens=lengths.long())
    assert cost_of(run, gpus).operators["aten::_to_copy"] == 2
    hint = hint._replace(block_table=prefix.long(), seqlens_k=keys.long())
    assert cost_of(run, gpus).operators["aten::_to_copy"] == 4


@pytest.mark.parametrize("rows_q", [0, 3])
def test_nothing_to_launch(rows_q: int, gpus: FakeCuda) -> None:
    """Calls without queries, without keys or without sequences have results all the same."""
    q, (k, v, _) = torch.zeros(rows_q, 4, 64, dtype=BF16, requires_grad=True), rows(0, 4, 64)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (rows_q, 0))
    for _ in range(2):
        out = tilewise.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=3, max_seqlen_k=3)
        (dq,) = torch.autograd.grad(out, q, torch.zeros_like(out))
        assert out.shape == dq.shape == q.shape
    empty = torch.zeros(0, 2, 8, 64, dtype=BF16)
    for _ in range(2):
        assert tilewise.attention(empty, empty, empty).shape == empty.shape


def test_what_lies_otherwise_is_prepared_anew(gpus: FakeCuda) -> None:
    """Equal shapes with other strides or another alignment are another call; results have the layout asked for."""
    q, k, v = rows(1, 128, 128, 64)
    memory = torch.zeros(2 * q.numel() + 64, dtype=BF16)
    wide = memory[: 2 * q.numel()].view(1, 128, 128, 128)[..., :64]
    shifted = memory[1 : 1 + q.numel()].view(q.shape)
    for gpu, layout, other in itertools.product(GPUS, ("bhsd", "bshd"), (q, q.transpose(1, 2), wide, shifted)):
        out, lse = tilewise.attention(other, k, v, layout=layout, backend=gpu, return_lse=True)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert lse.shape == (1, 128, 128)


def test_tiles_of_an_experiment_are_taken(gpus: FakeCuda) -> None:
    """Also by a call that was bound before."""
    configs = pytest.importorskip("tilewise.backends.triton.configs")
    q, k, v = rows(1, 4, 256, 64)

    def grid() -> tuple[int, int, int]:
        gpus.expect()
        tilewise.attention(q, k, v, backend="triton")
        return gpus.seen().grid

    before = grid()
    with configs.overridden({"forward": configs.Config(32, 32, 4, 1)}):
        assert grid() == (256 // 32 * 4, 1, 1) != before
    assert grid() == before


def test_gradients_that_lie_otherwise(gpus: FakeCuda) -> None:
    """However the gradient of the result lies, and also through lse, the backward runs; the passes are few."""
    q, k, v = rows(1, 4, 256, 64, grad=True)
    plain = torch.zeros(1, 4, 256, 64, dtype=BF16)
    heads_last = torch.zeros(1, 256, 4, 64, dtype=BF16).transpose(1, 2)
    for gpu, dout in itertools.product(GPUS, (plain, heads_last, plain[:, :1].expand(plain.shape), plain.mT.mT, plain)):
        out, lse = tilewise.attention(q, k, v, backend=gpu, return_lse=True)
        for dlse in (None, torch.zeros_like(lse)):
            gpus.expect()
            results, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
            found = torch.autograd.grad(results, (q, k, v), given, retain_graph=True)
            assert [g.shape for g in found] == [q.shape] * 3
            assert gpus.seen().launches == 3  # statistics, dK and dV, dQ
        (dk,) = torch.autograd.grad(out, k, dout)
        assert dk.shape == k.shape
