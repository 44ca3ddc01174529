"""What torch does to a call besides one backward pass: forward derivatives of calls that were made before, tracing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilewise as tw
from making import int32
from tilewise.distributed import context_parallel_attention

# Of torch's own rules for forward derivatives, and of its linearize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*get_attr Node.*:UserWarning"),
]


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


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


@pytest.mark.usefixtures("one_rank")
def test_ranks_refuse_derivatives_along_a_direction() -> None:
    with pytest.raises(tw.Unsupported, match="forward-mode derivatives"):
        dual(lambda q: context_parallel_attention(q, q, q, seqlen=4), randn(1, 2, 4, 4, grad=False))


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
            with pytest.raises(tw.Unsupported, match=r"torch.jit.trace cannot record.*torch.export. ONNX has no"):
                torch.jit.trace(call, (given,))
        call(given)  # and nothing of it stays
