"""The largest score of each head on a real GPU: every kernel that finds it, again and again, in graphs, in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from making import cuda_randn as rows

pytestmark = pytest.mark.hopper

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True, "causal": True},
    "large scores": {"scale": 30.0, "causal": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("chosen", ["hopper", "triton"])
def test_dense(chosen: str, head_dim: int, name: str) -> None:
    """Scores grow towards the first keys, so that maxima are found late; then towards the last."""
    flags = dict(CASES[name])
    if flags.pop("sinks", False):
        flags["sinks"] = torch.full((4,), 40.0, device="cuda")
    for first, last in ((8.0, 0.1), (0.1, 8.0)):
        q, v = rows(2, 4, 700, head_dim), rows(2, 2, 900, head_dim)
        k = rows(2, 2, 900, head_dim) * torch.linspace(first, last, 900, device="cuda")[:, None].bfloat16()
        expected = tw.attention(q, k, v, return_max_logits=True, backend="reference", **flags)[1]
        plain = tw.attention(q, k, v, backend=chosen, **flags)
        for _ in range(3):
            out, largest = tw.attention(q, k, v, return_max_logits=True, backend=chosen, **flags)
            torch.testing.assert_close(largest, expected, atol=2e-3 if "softcap" in flags else 1e-4, rtol=1e-5)
            torch.testing.assert_close(out, plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("chosen", ["hopper", "triton"])
def test_packed_and_paged(chosen: str) -> None:
    cu = torch.tensor([0, 130, 130, 500], dtype=torch.int32, device="cuda")
    q, k, v = rows(520, 4, 128), rows(520, 2, 128), rows(520, 2, 128)
    lengths: Any = {"max_seqlen_q": 370, "max_seqlen_k": 370}
    k[500:], q[500:] = 1e4, 1e4  # rows of no sequence
    for flags in ({"causal": True}, {}):
        given: Any = {"return_max_logits": True, **lengths, **flags}
        _, expected = tw.attention_varlen(q, k, v, cu, cu, backend="reference", **given)
        _, largest = tw.attention_varlen(q, k, v, cu, cu, backend=chosen, **given)
        torch.testing.assert_close(largest, expected, atol=1e-4, rtol=1e-5)
    pages = rows(40, 64, 2, 128), rows(40, 64, 2, 128)
    table = torch.randperm(40, device="cuda").int().view(4, 10)
    seqlens = torch.tensor([640, 1, 300, 77], dtype=torch.int32, device="cuda")
    starts = torch.arange(0, 401, 100, dtype=torch.int32, device="cuda")
    chunk: Any = {"cu_seqlens_q": starts, "max_seqlen_q": 100, "return_max_logits": True}
    _, expected = tw.attention_paged(q[:400], *pages, table, seqlens, backend="reference", **chunk)
    _, largest = tw.attention_paged(q[:400], *pages, table, seqlens, backend=chosen, **chunk)
    torch.testing.assert_close(largest, expected, atol=1e-4, rtol=1e-5)


def test_decoding_is_computed_by_triton() -> None:
    q, k, v = rows(8, 8, 1, 128), rows(8, 2, 4000, 128), rows(8, 2, 4000, 128)
    _, expected = tw.attention(q, k, v, return_max_logits=True, backend="reference")
    _, largest = tw.attention(q, k, v, return_max_logits=True)
    torch.testing.assert_close(largest, expected, atol=1e-4, rtol=1e-5)


def test_training_step_and_graph() -> None:
    q, k, v = (rows(2, 4, 1024, 128).requires_grad_() for _ in range(3))
    tw.attention(q, k, v, causal=True).sum().backward()
    plain = [t.grad for t in (q, k, v)]
    q.grad = k.grad = v.grad = None
    out, largest = tw.attention(q, k, v, causal=True, return_max_logits=True)
    out.sum().backward()
    for a, t in zip(plain, (q, k, v), strict=True):
        torch.testing.assert_close(t.grad, a, atol=2e-2, rtol=2e-2)
    graph, kept = torch.cuda.CUDAGraph(), [t.detach() for t in (q, k, v)]
    tw.attention(*kept, causal=True, return_max_logits=True)
    with torch.cuda.graph(graph):
        _, again = tw.attention(*kept, causal=True, return_max_logits=True)
    for _ in range(2):
        again.fill_(7.0)
        graph.replay()
        torch.testing.assert_close(again, largest)
