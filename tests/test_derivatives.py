"""Tangents and second derivatives: against finite differences, plain torch, and one another."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from making import int32
from tilewise import dispatch, fp8
from tilewise.testing.threads import one_thread

# Of torch's own rules for forward derivatives, and of its linearize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*get_attr Node.*:UserWarning"),
]

Attend = Callable[..., tuple[Tensor, Tensor]]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=dtype)
    return values.requires_grad_() if grad else values


def dense(**flags: Any) -> tuple[Attend, tuple[Tensor, ...]]:
    """The call, and what is differentiated: q, k, v, then the bias and sinks among the flags."""
    names = [name for name in ("bias", "sinks") if name in flags]
    inputs = randn(1, 2, 3, 4), randn(1, 1, 4, 4, seed=1), randn(1, 1, 4, 2, seed=2), *[flags[name] for name in names]

    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        named: dict[str, Any] = flags | dict(zip(names, others, strict=True))
        return tw.attention(q, k, v, return_lse=True, **named)

    return attend, inputs


def packed(**flags: Any) -> tuple[Attend, tuple[Tensor, ...]]:
    cu_seqlens_q, cu_seqlens_k = int32(0, 2, 2, 4), int32(0, 3, 4, 4)
    # Two rows belong to no sequence, and the last sequence has no keys.
    inputs = randn(6, 2, 3), randn(5, 2, 3, seed=1), randn(5, 2, 3, seed=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **flags)

    return attend, inputs


def paged() -> tuple[Attend, tuple[Tensor, ...]]:
    table, seqlens = int32(1, 0, 1, 2).view(2, 2), int32(3, 4)  # the first page is shared
    inputs = randn(2, 2, 3), randn(3, 2, 1, 3, seed=1), randn(3, 2, 1, 3, seed=2)
    return lambda q, k, v: tw.attention_paged(q, k, v, table, seqlens, return_lse=True), inputs


PROBLEMS: dict[str, Callable[[], tuple[Attend, tuple[Tensor, ...]]]] = {
    "plain": dense,
    "causal": lambda: dense(causal=True),
    "window": lambda: dense(window=(1, 0)),
    "softcap": lambda: dense(softcap=0.8),
    "alibi": lambda: dense(alibi_slopes=torch.tensor([0.3, 0.1])),
    "bias of heads": lambda: dense(bias=randn(2, 1, 4, seed=3)),
    "bias, sinks, softcap": lambda: dense(bias=randn(3, 4, seed=3), sinks=randn(2, seed=4), softcap=1.5, causal=True),
    "sinks": lambda: dense(sinks=randn(2, seed=4)),
    "mask with an empty row": lambda: dense(mask=torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]]).bool()),
    "mask with an empty row, sinks": lambda: dense(mask=torch.eye(4)[1:4].bool().roll(1, 0), sinks=randn(2, seed=4)),
    "dropout": lambda: dense(dropout=0.4, seed=5),
    "scale": lambda: dense(scale=-0.7),
    "packed": packed,
    "packed, causal, softcap": lambda: packed(causal=True, softcap=1.1),
    "paged": paged,
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_derivatives_are_those_of_finite_differences(name: str) -> None:
    """Forward and reverse mode, and second derivatives both ways, in fp64."""
    attend, inputs = PROBLEMS[name]()

    def finite(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(*inputs)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    with one_thread():
        assert gradcheck(finite, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
        assert gradgradcheck(finite, inputs, check_fwd_over_rev=True, check_batched_grad=True, fast_mode=True)


def unaligned() -> tuple[Attend, tuple[Tensor, ...]]:
    """Columns that no kernel takes as they lie."""
    inputs = tuple(randn(2, heads, n, 17, seed=n) for heads, n in ((4, 5), (2, 7), (2, 8)))
    return lambda q, k, v: tw.attention(q[..., 1:], k[..., 1:], v[:, :, :7, 1:], return_lse=True), inputs


def merged() -> tuple[Attend, tuple[Tensor, ...]]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        halves = (tw.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(3), slice(3, 4)))
        first, second = halves
        return tw.merge(*first, *second)

    return attend, dense()[1]


def checkpointed() -> tuple[Attend, tuple[Tensor, ...]]:
    attend, inputs = dense()
    return lambda *given: checkpoint(attend, *given, use_reentrant=False), inputs


AT_ONCE = PROBLEMS | {
    "by the reference": lambda: dense(backend="reference"),
    "unaligned": unaligned,
    "merge": merged,
    "checkpoint": checkpointed,
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_gradients_of_many_results_at_once_are_those_of_a_loop(name: str) -> None:
    """In fp32, to the bit."""
    attend, wide = AT_ONCE[name]()
    inputs = [t.detach().float().requires_grad_() for t in wide]
    results = attend(*inputs)
    cotangents = [randn(3, *r.shape, seed=5 + i, grad=False).float() for i, r in enumerate(results)]

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, inputs, given, retain_graph=True)

    loop = [torch.stack(each) for each in zip(*map(gradients, *cotangents), strict=True)]
    batched = torch.autograd.grad(results, inputs, cotangents, retain_graph=True, is_grads_batched=True)
    for mine in (batched, torch.vmap(gradients)(*cotangents)):
        assert all(map(torch.equal, mine, loop))
    # And one backward pass afterwards is what it was before.
    assert all(map(torch.equal, gradients(*(c[0] for c in cotangents)), (each[0] for each in loop)))


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, softcap: float = 2.0) -> tuple[Tensor, Tensor]:
    """Attention by torch's own operators, which torch differentiates in every way."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = softcap * torch.tanh(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) / softcap) + bias
    logits = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    p = torch.softmax(logits, -1)
    # From the sink's share, because tangents of torch.logsumexp cannot be recorded.
    return p[..., :-1] @ v, sinks[:, None] - p[..., -1].log()


def tiled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return tw.attention(q, k, v, bias=bias, sinks=sinks, softcap=2.0, return_lse=True)


def operands(dtype: torch.dtype = torch.float64, *, grad: bool = False) -> tuple[Tensor, ...]:
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), (4, 5, 7), (4,)
    return tuple(randn(*shape, seed=i, dtype=dtype, grad=grad) for i, shape in enumerate(shapes))


def directions(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(randn(*t.shape, seed=10 + i, dtype=dtype, grad=False) for i, t in enumerate(operands(dtype)))


def energy(attend: Attend) -> Callable[..., Tensor]:
    def total(*inputs: Tensor) -> Tensor:
        out, lse = attend(*inputs)
        return out.square().sum() + (lse * lse).sin().sum()

    return total


def by_dual(attend: Attend) -> object:
    with forward_ad.dual_level():
        results = attend(*map(forward_ad.make_dual, operands(), directions()))
        return [forward_ad.unpack_dual(result) for result in results]


def by_dual_gradient(attend: Attend) -> object:
    """The derivative of a gradient along a direction: forward over reverse."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(operands(grad=True), directions(), strict=True)]
        gradients = torch.autograd.grad(energy(attend)(*duals), duals)
        return [tuple(forward_ad.unpack_dual(gradient)) for gradient in gradients]


def penalty(attend: Attend) -> object:
    inputs = operands(grad=True)
    gradients = torch.autograd.grad(energy(attend)(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)  # type: ignore[arg-type]


def checkpointed_penalty(attend: Attend) -> object:
    return penalty(lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False))


def jvp_under_vmap(attend: Attend) -> object:
    """Tangents of three directions at one point, then of three points along one direction."""
    inputs, along = operands(), directions()
    many = [torch.stack([t, 2.0 * t, t.sin()]) for t in along]
    one = torch.vmap(lambda *t: torch.func.jvp(attend, inputs, t))(*many)
    return one, torch.vmap(lambda *x: torch.func.jvp(attend, x, along))(*many)


WAYS: dict[str, Callable[[Attend], object]] = {
    "dual": by_dual,
    "jvp": lambda attend: torch.func.jvp(attend, operands(), directions()),
    "jvp of some": lambda attend: torch.func.jvp(
        lambda k, sinks: attend(operands()[0], k, *operands()[2:4], sinks), operands()[1::3], directions()[1::3]
    ),
    "linearize": lambda attend: torch.func.linearize(attend, *operands())[1](*directions()),
    "jacfwd": lambda attend: torch.func.jacfwd(attend, argnums=(0, 3, 4))(*operands()),
    "jacobian": lambda attend: torch.autograd.functional.jacobian(
        attend, operands(), vectorize=True, strategy="forward-mode"
    ),
    "vmap": jvp_under_vmap,
    "grad of jvp": lambda attend: torch.func.grad(
        lambda *x: energy(lambda *y: torch.func.jvp(attend, y, directions())[1])(*x), argnums=(0, 1, 2, 3, 4)
    )(*operands()),
    "jvp of grad": lambda attend: torch.func.jvp(
        torch.func.grad(energy(attend), argnums=(0, 1, 2, 3, 4)), operands(), directions()
    ),
    "grad of grad": lambda attend: torch.func.grad(
        lambda *x: sum(g.sin().sum() for g in torch.func.grad(energy(attend), argnums=(0, 1, 2, 3, 4))(*x)),
        argnums=(0, 1, 2, 3, 4),
    )(*operands()),
    "dual gradient": by_dual_gradient,
    "hessian": lambda attend: torch.func.hessian(energy(attend), argnums=(0, 4))(*operands()),
    "jacrev of jacfwd": lambda attend: torch.func.jacrev(torch.func.jacfwd(energy(attend), argnums=4), argnums=4)(
        *operands()
    ),
    "vhp": lambda attend: torch.autograd.functional.vhp(energy(attend), operands(), directions()),
    "penalty": penalty,
    "penalty of a checkpoint": checkpointed_penalty,
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_ask_gives_what_plain_torch_gives(name: str) -> None:
    with one_thread():
        mine, expected = (torch.utils._pytree.tree_leaves(WAYS[name](attend)) for attend in (tiled, plain))
    assert len(mine) == len(expected) > 0
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert all(float(one.detach().abs().max()) > 1e-3 for one in mine[:1])


def weighed(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.sin() * t).sum() for x, t in zip(primals, tangents, strict=True)]).sum()


@pytest.mark.parametrize("inside", [False, True], ids=["after the level", "at its level"])
def test_recorded_tangents_have_gradients(inside: bool) -> None:
    """Reverse over forward with dual tensors: of the operands and of the direction. Torch cannot record its own
    softmax that way, so torch.func is the judge.
    """

    def expected(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> Tensor:
        return weighed(*torch.func.jvp(plain, x, t))

    inputs, along = operands(grad=True), tuple(t.requires_grad_() for t in directions())
    with forward_ad.dual_level():
        duals = [forward_ad.unpack_dual(r) for r in tiled(*map(forward_ad.make_dual, inputs, along))]
        loss = weighed([dual.primal for dual in duals], [dual.tangent for dual in duals])
        found = torch.autograd.grad(loss, (*inputs, *along), retain_graph=True)
        mine = [forward_ad.unpack_dual(t).primal.detach() for t in found]
    if not inside:
        mine = list(torch.autograd.grad(loss, (*inputs, *along)))
    wanted = torch.func.grad(expected, argnums=(0, 1))(operands(), directions())
    torch.testing.assert_close(mine, [*wanted[0], *wanted[1]], rtol=1e-9, atol=1e-11)


def test_a_constant_tangent_of_dout_reaches_the_gradient() -> None:
    """The derivative of a gradient along a direction of the cotangent alone."""
    q = randn(1, 2, 3, 4)
    out = tw.attention(q, q, q)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), out.detach().clone())
        gradient = forward_ad.unpack_dual(torch.autograd.grad(out, q, dout, retain_graph=True)[0])
    torch.testing.assert_close(gradient.primal, torch.autograd.grad(out.sum(), q, retain_graph=True)[0])
    torch.testing.assert_close(gradient.tangent, torch.autograd.grad(out, q, out.detach())[0])


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_have_no_tangent(sinks: bool) -> None:
    q, k = randn(1, 2, 4, 3), randn(1, 2, 2, 3, seed=1)
    flags: dict[str, Any] = {"sinks": randn(2, seed=3)} if sinks else {}

    def attend(q: Tensor, k: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        # With fewer keys than queries the first two rows see none.
        named: dict[str, Any] = dict(zip(flags, sinks, strict=True))
        return tw.attention(q, k, k, causal=True, return_lse=True, **named)

    inputs = (q, k, *flags.values())
    found = torch.func.jvp(attend, inputs, tuple(torch.ones_like(t) for t in inputs))
    (out, lse), (dot_out, dot_lse) = found[0], found[1]
    assert (out[:, :, :2] == 0.0).all()
    assert (dot_out[:, :, :2] == 0.0).all()
    # Alone in its row, a sink is the whole lse.
    assert (dot_lse[:, :, :2] == (1.0 if sinks else 0.0)).all()
    assert not dot_out.isnan().any()
    assert lse[:, :, :2].isinf().all() != sinks
    penalised = torch.autograd.grad(
        torch.autograd.grad(attend(*inputs)[0].square().sum(), q, create_graph=True)[0].square().sum(), inputs
    )
    assert all(bool(g.isfinite().all()) for g in penalised)
    assert (penalised[0][:, :, :2] == 0.0).all()


def third(q: Tensor) -> object:
    hessian = torch.func.hessian(lambda q: tw.attention(q, q, q).square().sum())
    return torch.func.jacrev(hessian)(q)


def third_recorded(q: Tensor) -> object:
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(tw.attention(leaf, leaf, leaf).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    return torch.autograd.grad(second.square().sum(), leaf)


def forward_twice(q: Tensor) -> object:
    return torch.func.jacfwd(torch.func.jacfwd(lambda q: tw.attention(q, q, q).sum()))(q)


def forward_over_vmap(q: Tensor) -> object:
    def attend(q: Tensor) -> Tensor:
        return tw.attention(q, q, q)

    return torch.func.jvp(torch.vmap(attend), (q[None],), (q[None],))


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (third, "third derivatives"),
        (third_recorded, "third derivatives"),
        (lambda q: torch.autograd.functional.hvp(lambda q: tw.attention(q, q, q).sin().sum(), q, q), "hvp.*take vhp"),
        (forward_twice, r"jvp of jvp.*take jvp of grad"),
        (forward_over_vmap, r"jvp of vmap.*take vmap of jvp"),
        (
            lambda q: torch.func.jvp(
                lambda s: tw.attention(q, q, q, alibi_slopes=s), (torch.ones(2),), (torch.ones(2),)
            ),
            r"alibi_slopes.*as a bias",
        ),
    ],
)
def test_what_is_not_computed_is_refused(ask: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(tw.Unsupported, match=reason):
        ask(randn(1, 2, 3, 4, dtype=torch.float32, grad=False))


def test_fp8_is_refused() -> None:
    k = randn(1, 2, 64, 32, dtype=torch.float32, grad=False)
    small = fp8.quantize(k)
    with pytest.raises(tw.Unsupported, match="FP8"):
        torch.func.jvp(lambda q: tw.attention(q, small, small), (k,), (k,))


def test_a_shared_prefix_and_a_cache_lose_no_tangent() -> None:
    cache = tw.PagedKVCache(8, 4, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu")
    requests = [cache.add(list(range(9))), cache.add(list(range(9)))]
    cache.step(requests)
    k = randn(18, 1, 8, dtype=torch.float32, grad=False)
    with forward_ad.dual_level(), pytest.raises(tw.Unsupported, match="forward-mode"):
        cache.append(forward_ad.make_dual(k, k), k)
    cache.append(k, k)
    q = randn(18, 2, 8, dtype=torch.float32, grad=False)
    tangent = torch.func.jvp(cache.attention, (q,), (q,))[1]
    assert float(tangent.abs().max()) > 1e-2


def test_a_compiled_function_may_take_a_tangent_inside() -> None:
    q = randn(1, 2, 3, 4, dtype=torch.float32, grad=False)

    def pushed(q: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.func.jvp(lambda q: tw.attention(q, q, q, causal=True), (q,), (along,))
        return found[0], found[1]

    compiled = torch.compile(pushed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, q.sin()), pushed(q, q.sin()))


def test_a_compiled_function_never_loses_the_tangents_of_dual_tensors() -> None:
    q = randn(1, 2, 3, 4, dtype=torch.float32, grad=False)
    compiled = torch.compile(lambda q: tw.attention(q, q, q), fullgraph=True, backend="aot_eager")
    with forward_ad.dual_level(), pytest.raises((tw.Unsupported, torch._dynamo.exc.Unsupported)):
        compiled(forward_ad.make_dual(q, q))


def test_a_backend_without_these_derivatives_is_passed_over_with_a_reason() -> None:
    methods = ("unavailable", "supports", "tile_shape", "forward", "backward")
    plain: Any = SimpleNamespace(name="plain", **{name: getattr(dispatch.load("reference"), name) for name in methods})
    q = randn(1, 1, 3, 4)
    tw.register_backend(plain, before="hopper")
    try:
        assert tw.explain(q, q, q).backend == "plain"
        higher = tw.explain(q, q, q).higher
        assert higher.backend == "reference"
        assert ("plain", "has no tangents (jvp) and no second derivatives") in [tuple(r) for r in higher.rejected]
        assert "not plain" in str(tw.explain(q, q, q))
        torch.func.jvp(lambda q: tw.attention(q, q, q), (q,), (q,))
    finally:
        tw.unregister_backend("plain")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "computed_by", "reason"),
    [
        (128, torch.bfloat16, "triton", ("hopper", "the Triton backend computes them")),
        (512, torch.bfloat16, None, ("triton", "head_dim up to 256, not 512")),
        (256, torch.float32, None, ("triton", "head_dim up to 128, not 256")),
    ],
)
def test_who_computes_them_on_a_gpu(
    head_dim: int, dtype: torch.dtype, computed_by: str | None, reason: tuple[str, str]
) -> None:
    pytest.importorskip("triton")
    q = torch.empty(1, 2, 1024, head_dim, dtype=dtype, device="meta", requires_grad=True)
    backend, rejected = tw.explain(q, q, q, device="h200").higher
    assert backend == computed_by
    name, text = reason
    assert text in dict(rejected)[name]


def test_an_op_of_gradients_that_is_called_by_name_has_derivatives() -> None:
    """In a process in which nothing else was called, as of a graph that another process made."""
    code = """
import torch
import tilewise
q, k, v, dout = (torch.randn(1, 2, 8, 16) for _ in range(4))
ops, flags = torch.ops.tilewise, tilewise.operands.Flags()
out, lse = ops.dense.default(q, k, v, *(None,) * (len(tilewise.derivatives.operand_names("dense")) - 3), *flags)
leaves = [t.requires_grad_() for t in (q, dout)]
rest = (None,) * (len(tilewise.derivatives.operand_names("dense")) - 3)
found = ops.dense_backward.default(dout, None, out, lse, [True, True, True, False, False], q, k, v, *rest, *flags)
(found[0].square().sum() + found[1].square().sum()).backward()
print(*(bool(t.grad.abs().sum() > 0) for t in leaves))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
