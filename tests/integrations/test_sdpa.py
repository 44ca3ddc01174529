"""SDPA against torch's own on the CPU: every argument combination, then the ways to route torch to tilewise."""

import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import attention as torch_attention

import tilewise as tw
from tilewise.integrations import sdpa

pytestmark = pytest.mark.slow

MASKS = (None, "bool", "bool keys", "float", "float heads", "-inf row")
LENGTHS = ((6, 6), (4, 9), (9, 4), (1, 7), (5, 1))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_mask(kind: str | None, lead: tuple[int, ...], heads: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "bool":
        return randn(*lead, 1, seqlen_q, seqlen_k, seed=5) > -0.5
    if kind == "bool keys":
        return randn(1, seqlen_k, seed=5) > -0.5
    if kind == "float":
        return randn(seqlen_q, seqlen_k, seed=5)
    if kind == "float heads":
        return randn(heads, seqlen_q, seqlen_k, seed=5)
    mask = torch.zeros(seqlen_q, seqlen_k)
    mask[0] = -torch.inf
    return mask


def arguments() -> Iterator[dict[str, Any]]:
    for lead, (seqlen_q, seqlen_k), mask, causal, scale, kv_heads in itertools.product(
        ((), (2,), (2, 3)), LENGTHS, MASKS, (False, True), (None, 0.3), (4, 2, 1)
    ):
        if mask is None or not causal:
            yield {
                "lead": lead,
                "lengths": (seqlen_q, seqlen_k),
                "mask": mask,
                "causal": causal,
                "scale": scale,
                "kv_heads": kv_heads,
            }


def both(case: dict[str, Any], grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    lead, (seqlen_q, seqlen_k), kv_heads = case["lead"], case["lengths"], case["kv_heads"]
    q = randn(*lead, 4, seqlen_q, 8).requires_grad_(grad)
    k = randn(*lead, kv_heads, seqlen_k, 8, seed=1).requires_grad_(grad)
    v = randn(*lead, kv_heads, seqlen_k, 6, seed=2).requires_grad_(grad)
    mask = make_mask(case["mask"], lead, 4, seqlen_q, seqlen_k)
    results = []
    for function in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(q, k, v, mask, 0.0, case["causal"], scale=case["scale"], enable_gqa=kv_heads != 4)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v)) if grad else ()
        results.append([out, *gradients])
    return results[0], results[1]


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_every_combination_equals_torch(lead: tuple[int, ...]) -> None:
    cases = [case for case in arguments() if case["lead"] == lead]
    assert len(cases) > 100
    for index, case in enumerate(cases):
        mine, torchs = both(case, grad=index % 7 == 0)
        for a, b in zip(mine, torchs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, msg=str(case))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (randn(2, 4, 33, 16, seed=i, dtype=torch.float64).to(dtype) for i in range(3))
    mask = randn(33, 33, seed=3).to(dtype) if masked else None
    mine = sdpa.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)
    wide = None if mask is None else mask.double()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, is_causal=not masked)
    torchs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)
    assert mine.dtype is dtype
    assert (mine - exact).abs().max() <= 2 * (torchs - exact).abs().max() + 4 * torch.finfo(dtype).eps


def test_double_precision() -> None:
    q = randn(2, 4, 33, 16, dtype=torch.float64)
    mine, torchs = (f(q, q, q) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(mine, torchs, atol=1e-14, rtol=1e-13)


def test_leading_dimensions_and_a_single_head_broadcast() -> None:
    q, k = randn(2, 4, 5, 8), randn(1, 1, 7, 8, seed=1)
    mine, torchs = (f(q, k, k) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(mine, torchs)
    q, k = randn(5, 8), randn(7, 8, seed=1)
    mine, torchs = (f(q, k, k) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(mine, torchs)


def test_a_float_mask_has_a_gradient() -> None:
    q = randn(2, 4, 5, 8)
    mask = randn(5, 5, seed=3).requires_grad_()
    mine, torchs = (
        torch.autograd.grad(f(q, q, q, mask).square().sum(), mask)[0]
        for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(mine, torchs, atol=2e-5, rtol=2e-5)


def test_dropout_keeps_the_mean_and_follows_the_seed() -> None:
    q, v = randn(1, 1, 64, 8), torch.ones(1, 1, 64, 8)
    torch.manual_seed(1)
    dropped = sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(dropped, sdpa.scaled_dot_product_attention(q, q, v, dropout_p=0.25))
    assert not torch.equal(dropped, torch.ones_like(dropped))
    assert abs(dropped.mean().item() - 1.0) < 0.1


REJECTED: list[tuple[str, str, dict[str, Any]]] = [
    ("mask and causal", "attn_mask: expected None", {"attn_mask": torch.ones(5, 5), "is_causal": True}),
    ("unequal heads", "enable_gqa=True", {"key": randn(1, 2, 5, 8), "value": randn(1, 2, 5, 8)}),
    ("integer mask", "attn_mask: expected a bool", {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}),
    ("mask of another float", "attn_mask: expected a bool", {"attn_mask": torch.ones(5, 5, dtype=torch.float64)}),
    ("mask of one dimension", "at least 2 dimensions", {"attn_mask": torch.ones(5, dtype=torch.bool)}),
    ("mask of another shape", "attn_mask: expected a shape", {"attn_mask": torch.ones(4, 5)}),
    ("vectors", "at least 2 dimensions", {"query": randn(8)}),
    ("dropout of everything", "dropout_p: expected", {"dropout_p": 1.0}),
]


@pytest.mark.parametrize(("what", "message", "change"), REJECTED, ids=[r[0] for r in REJECTED])
def test_rejections(what: str, message: str, change: dict[str, Any]) -> None:
    call: dict[str, Any] = {"query": randn(1, 4, 5, 8), "key": randn(1, 4, 5, 8), "value": randn(1, 4, 5, 8)}
    with pytest.raises(tw.InvalidProblem, match=message):
        sdpa.scaled_dot_product_attention(**{**call, **change})


def test_routed_sends_torchs_function_to_tilewise_in_this_thread_only() -> None:
    q = randn(2, 4, 50, 8)
    torchs, mine = F.scaled_dot_product_attention(q, q, q), sdpa.scaled_dot_product_attention(q, q, q)
    assert not torch.equal(torchs, mine), "the two must differ in rounding for this test to see anything"
    seen: list[Tensor] = []
    with sdpa.routed():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), mine)
        thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()
        with pytest.raises(tw.InvalidProblem):
            F.scaled_dot_product_attention(q, q, q, torch.ones(50, 50), is_causal=True)
    assert torch.equal(seen[0], torchs)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), torchs)


def test_routed_reaches_torchs_modules_and_their_gradients() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    x = randn(2, 7, 16).requires_grad_()
    plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
    with sdpa.routed():
        routed = torch.autograd.grad(layer(x).square().sum(), x)[0]
    torch.testing.assert_close(plain, routed, atol=1e-5, rtol=1e-4)


def test_routed_under_compile() -> None:
    torch._dynamo.reset()
    q = randn(2, 4, 9, 8)

    def inside(q: Tensor) -> Tensor:
        with sdpa.routed():
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    expected = sdpa.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(q), expected)
    outside = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager")
    with sdpa.routed():
        assert torch.equal(outside(q), expected)


@pytest.mark.skipif(not hasattr(torch_attention, "register_flash_attention_impl"), reason="this torch has no registry")
def test_register_offers_and_activation_replaces_the_flash_kernels() -> None:
    q, k = randn(2, 4, 9, 8).requires_grad_(), randn(2, 4, 5, 8, seed=1).requires_grad_()
    mask = randn(9, 5, seed=2)

    def run() -> list[Tensor]:
        results = []
        for flags in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.2}):
            out = F.scaled_dot_product_attention(q, k, k, **flags)
            results += [out, *torch.autograd.grad(out.square().sum(), (q, k))]
        short = F.scaled_dot_product_attention(k, q, q, is_causal=True)
        return [*results, short, *torch.autograd.grad(short.square().sum(), (q, k))]

    before = run()
    sdpa.register()
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True)), "registering must activate nothing"
    torch_attention.activate_flash_attention_impl("tilewise")
    try:
        assert torch_attention.current_flash_attention_impl() == "tilewise"
        active = run()
    finally:
        torch_attention.restore_flash_attention_impl()
    assert not all(torch.equal(a, b) for a, b in zip(active, before, strict=True))
    for a, b in zip(active, before, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        assert a.stride() == b.stride()
    assert all(torch.equal(a, b) for a, b in zip(run(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.zeros(3, 5)}, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": torch.ones(3, 5, dtype=torch.bool)}, "attn_mask: expected a shape that broadcasts"),
        ({"attn_mask": [[True]]}, "attn_mask: expected a torch.Tensor, got list"),
        ({"dropout_p": 2.0}, "dropout_p: expected a probability"),
        ({"is_causal": "no"}, "is_causal: expected True or False, got 'no'"),
        ({"key": torch.zeros(1, 4, 8, 9)}, "key: expected head_dim 16"),
        ({"value": None}, "value: expected a torch.Tensor, got NoneType"),
        ({"query": torch.zeros(2, 4, 8, 16), "key": torch.zeros(3, 4, 8, 16)}, "leading dimensions that broadcast"),
    ],
)
def test_errors_name_the_arguments_of_torch(arguments: dict[str, Any], message: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 4, 8, 16)) | arguments
    with pytest.raises(tw.InvalidProblem, match=re.escape(message)):
        sdpa.scaled_dot_product_attention(**given)


def test_a_scale_of_numpy() -> None:
    q = torch.randn(1, 2, 4, 8)
    found = sdpa.scaled_dot_product_attention(q, q, q, scale=np.float32(0.5))  # type: ignore[arg-type]
    assert torch.equal(found, sdpa.scaled_dot_product_attention(q, q, q, scale=0.5))
