"""Derivatives that torch takes of a call in other ways than one backward pass: many at once, and forward ones."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw

Recorded = tuple[Sequence[Tensor], Sequence[Tensor]]


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def leaves(*, num_kv_heads: int = 2, head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q = randn(2, 4, 5, head_dim)
    k, v = (randn(2, num_kv_heads, 7, head_dim, seed=seed) for seed in (1, 2))
    return q, k, v


def dense(**flags: object) -> Recorded:
    qkv = leaves()
    return [tw.attention(*qkv, **flags)], qkv  # type: ignore[call-overload]


def with_lse(*, both: bool, **flags: object) -> Recorded:
    qkv = leaves()
    extra = [flag for flag in flags.values() if isinstance(flag, Tensor)]
    results = tw.attention(*qkv, return_lse=True, **flags)  # type: ignore[call-overload]
    # Values have no part in lse.
    return (results, [*qkv, *extra]) if both else (results[1:], qkv[:2])


def unaligned() -> Recorded:
    """Columns that no kernel takes as they lie."""
    qkv = leaves(head_dim=17)
    return [tw.attention(*(t[..., 1:] for t in qkv))], qkv


def packed() -> Recorded:
    q, k, v = randn(9, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    cu_seqlens_q, cu_seqlens_k = int32(0, 4, 4, 9), int32(0, 5, 6, 11)
    return tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, return_lse=True), (q, k, v)


def paged() -> Recorded:
    q, pages = randn(2, 4, 16), randn(4, 8, 2, 16, grad=False)
    return [tw.attention_paged(q, pages, pages, int32(0, 1, 2, 3).view(2, 2), int32(9, 12))], (q,)


def checkpointed() -> Recorded:
    qkv = leaves()
    return [checkpoint(tw.attention, *qkv, use_reentrant=False)], qkv


def merged() -> Recorded:
    q, k, v = leaves()
    first, second = (tw.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(3), slice(3, 7)))
    return tw.merge(*first, *second), (q, k, v)


RECORDED: dict[str, Callable[[], Recorded]] = {
    "dense": dense,
    "causal, softcap": lambda: dense(causal=True, softcap=3.0),
    "dropout": lambda: dense(dropout=0.3, seed=3),
    "reference": lambda: dense(backend="reference"),
    "window": lambda: dense(window=(3, 1)),
    "lse alone": lambda: with_lse(both=False),
    "bias, sinks, lse": lambda: with_lse(both=True, bias=randn(4, 5, 7, seed=3), sinks=randn(4, seed=4)),
    "unaligned": unaligned,
    "packed": packed,
    "paged": paged,
    "checkpoint": checkpointed,
    "merge": merged,
}


@pytest.mark.parametrize("name", RECORDED)
def test_gradients_of_many_results_at_once_are_those_of_a_loop(name: str) -> None:
    results, inputs = RECORDED[name]()
    cotangents = [randn(3, *result.shape, seed=5 + i, grad=False) for i, result in enumerate(results)]

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, inputs, given, retain_graph=True)

    loop = [torch.stack(each) for each in zip(*map(gradients, *cotangents), strict=True)]
    batched = torch.autograd.grad(results, inputs, cotangents, retain_graph=True, is_grads_batched=True)
    for mine in (batched, torch.vmap(gradients)(*cotangents)):
        for one, other in zip(mine, loop, strict=True):
            assert torch.equal(one, other)
    # And one backward pass afterwards is what it was before.
    assert all(map(torch.equal, gradients(*(c[0] for c in cotangents)), (each[0] for each in loop)))


def test_vectorised_jacobian_is_the_plain_one() -> None:
    q, k, v = (randn(1, heads, 3, 4, seed=heads) for heads in (2, 1, 1))

    def call(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention(*qkv, return_lse=True)

    plain = torch.autograd.functional.jacobian(call, (q, k, v))
    vectorised = torch.autograd.functional.jacobian(call, (q, k, v), vectorize=True)
    for row, expected in zip(vectorised, plain, strict=True):
        assert all(map(torch.equal, row, expected))
