"""What only a real GPU can show of the Triton backend.

The conformance suite runs there with `pytest tests/backends/test_conformance.py --backend triton --device cuda`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from making import cuda_randn as randn
from tilewise.backends.gpu import driver, releases, trial

triton = pytest.importorskip("triton")

BF16 = torch.bfloat16


def attend(q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> Tensor:
    out = tw.attention(q, k, v, backend="triton", **flags)
    assert isinstance(out, Tensor)
    return out


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **flags: Any) -> tuple[Tensor, ...]:
    out = attend(q, k, v, **flags)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    out: Tensor = scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v.float()
    return out


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_offsets_beyond_two_to_the_31(layout: str) -> None:
    heads, length, dim, window, tail = 132, 131072, 128, 63, 256
    shape = (1, heads, length, dim) if layout == "bhsd" else (1, length, heads, dim)
    q, k, v = (randn(*shape, grad=True) for _ in range(3))
    assert q.numel() > 2**31
    dout = torch.randn(shape, device="cuda", dtype=BF16)
    out, dq, dk, dv = gradients(q, k, v, dout, causal=True, window=(window, 0), layout=layout)

    def last(t: Tensor) -> Tensor:
        rows = t[0, -1, -tail:] if layout == "bhsd" else t[0, -tail:, -1]
        return rows.detach().float().requires_grad_()

    i = torch.arange(tail, device="cuda")
    keep = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - window)
    small = last(q), last(k), last(v)
    want = plain(small[0], small[1], small[2], keep)
    want_grads = torch.autograd.grad(want, small, last(dout).detach())
    # The first `window` rows of the slice see keys before it, so neither they nor their keys can be compared.
    inner = slice(window, None)
    for got, ref in zip((out, dq, dk, dv), (want.detach(), *want_grads), strict=True):
        torch.testing.assert_close(last(got).detach()[inner], ref[inner], atol=2e-2, rtol=2e-2)


def test_five_hundred_runs_give_the_same_bits() -> None:
    q, k, v = randn(2, 8, 777, 64, grad=True), randn(2, 2, 777, 64, grad=True), randn(2, 2, 777, 64, grad=True)
    dout = torch.randn_like(q)
    first = gradients(q, k, v, dout, causal=True)
    for _ in range(500):
        for a, b in zip(first, gradients(q, k, v, dout, causal=True), strict=True):
            assert torch.equal(a, b)


def test_decode_gives_the_same_bits_every_time() -> None:
    q, k, v = randn(3, 8, 1, 128), randn(3, 2, 5001, 128), randn(3, 2, 5001, 128)
    first = attend(q, k, v)
    assert all(torch.equal(first, attend(q, k, v)) for _ in range(200))


def test_cuda_graph_captures_the_backward() -> None:
    q, k, v = (randn(2, 4, 300, 64, grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradients(q, k, v, dout, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(q, k, v, dout, causal=True)
    dout.copy_(torch.randn_like(dout))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, gradients(q, k, v, dout, causal=True), strict=True):
        assert torch.equal(got, want)


def test_memory_is_linear_in_sequence_length() -> None:
    heads, length, dim = 8, 65536, 128
    q, k, v = (randn(1, heads, length, dim, grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    tensor = q.numel() * q.element_size()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attend(q, k, v, causal=True)
    forward_peak = torch.cuda.max_memory_allocated() - before
    # q, k, v were there before; out is the only thing of that size the forward may add.
    assert forward_peak + 3 * tensor < 1.2 * 4 * tensor
    torch.autograd.grad(out, (q, k, v), dout)
    backward_peak = torch.cuda.max_memory_allocated() - before
    assert backward_peak + 4 * tensor < 1.2 * 8 * tensor


@pytest.mark.parametrize("taker", [pytest.param("hopper", marks=pytest.mark.hopper), "triton"])
def test_kernels_start_directly(taker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the release: its kernels have the parameters that are laid out."""
    assert driver.launch_path() == "direct"
    assert releases.installed() in trial.report(taker)
    q, k, v = (randn(1, 2, 256, 64) for _ in range(3))
    tw.attention(q, k, v, backend=taker)
    started: list[int] = []
    monkeypatch.setattr(driver.Launch, "start", lambda *_: started.append(1))
    tw.attention(q, k, v, backend=taker)
    assert not started
