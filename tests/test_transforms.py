"""Derivatives that torch takes of a call in other ways than one backward pass: many at once, and forward ones."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from making import int32
from tilewise.distributed import context_parallel_attention

# Of torch's own rules for forward derivatives, and of its linearize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*get_attr Node.*:UserWarning"),
]

Recorded = tuple[Sequence[Tensor], Sequence[Tensor]]


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


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


def own(q: Tensor) -> Tensor:
    return tw.attention(q, q, q)


def dual(call: Callable[[Tensor], Tensor], q: Tensor) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(q, torch.ones_like(q)))).tangent


def of_packed(q: Tensor) -> object:
    rows, cu_seqlens = q[0].transpose(0, 1), int32(0, 3)
    return dual(lambda rows: tw.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens), rows)


def of_gradient(q: Tensor) -> object:
    """The derivative of a gradient along a direction of the cotangent."""
    leaf = q.clone().requires_grad_()
    out = own(leaf)
    return dual(lambda dout: torch.autograd.grad(out, leaf, dout, retain_graph=True)[0], torch.ones_like(out))


FORWARD: dict[str, Callable[[Tensor], object]] = {
    "dual": lambda q: dual(own, q),
    "dual and recorded": lambda q: dual(own, q.clone().requires_grad_()),
    "packed": of_packed,
    "gradient": of_gradient,
    "jvp": lambda q: torch.func.jvp(own, (q,), (q,)),
    "jacfwd": lambda q: torch.func.jacfwd(own)(q),
    "linearize": lambda q: torch.func.linearize(own, q)[1](q),
    "jacobian": lambda q: torch.autograd.functional.jacobian(own, q, vectorize=True, strategy="forward-mode"),
    "hessian": lambda q: torch.func.hessian(lambda q: own(q).sum())(q),
}


@pytest.mark.parametrize("name", FORWARD)
def test_derivatives_along_a_direction_are_not_dropped_by_cached_calls(name: str) -> None:
    q = randn(1, 2, 3, 4, grad=False)
    leaf = q.clone().requires_grad_()
    torch.autograd.grad(own(leaf), leaf, torch.ones_like(q))
    expected = torch.utils._pytree.tree_leaves(FORWARD[name](q.double()))
    for _ in range(2):
        own(q)
        mine = torch.utils._pytree.tree_leaves(FORWARD[name](q))
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
            assert float(one.detach().abs().max()) > 1e-3


def test_a_dual_level_alone_changes_nothing() -> None:
    q = randn(1, 2, 3, 4, grad=False)
    with forward_ad.dual_level():
        assert torch.equal(own(q), own(q.clone()))


def test_ranks_refuse_derivatives_along_a_direction(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(tw.Unsupported, match="forward-mode derivatives"):
            dual(lambda q: context_parallel_attention(q, q, q), randn(1, 2, 4, 4, grad=False))
    finally:
        dist.destroy_process_group()


TRACED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@TRACED
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["first", "repeated"])
def test_jit_trace_is_refused(known: bool, grad: bool) -> None:
    """Traced graphs would hold this call's results as constants, whatever they are run with."""
    q = torch.randn(1, 2, 5 + known, 8, requires_grad=grad)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    packed = q.detach()[0].transpose(0, 1).contiguous()
    calls: dict[str, tuple[Any, Any]] = {
        "dense": (lambda q: tw.attention(q, q, q, causal=True), q),
        "packed": (lambda x: tw.attention_varlen(x, x, x, cu, cu, max_seqlen_q=5, max_seqlen_k=5), packed),
    }
    for call, given in calls.values():
        if known:
            call(given), call(given)
        for _ in range(2):
            with pytest.raises(tw.Unsupported, match=r"torch.jit.trace cannot record attention.*torch.compile"):
                torch.jit.trace(call, (given,))
        call(given)  # and nothing of it stays
