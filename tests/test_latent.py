"""V as a view of K's first columns: what a caller of the public functions sees (tests/backends has the numbers)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import fp8


def latent_of(seqlen_k: int = 70, width: int = 80) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_k)
    q = torch.randn(2, 6, 3, width, generator=generator)
    return q, torch.randn(2, 1, seqlen_k, width, generator=generator)


def test_a_view_gives_the_bits_of_a_copy() -> None:
    q, latent = latent_of()
    view = tw.attention(q, latent, latent[..., :64], causal=True)
    copied = tw.attention(q, latent, latent[..., :64].clone(), causal=True)
    torch.testing.assert_close(view, copied, rtol=0, atol=0)


def test_calls_with_views_and_copies_do_not_share_a_plan() -> None:
    """The strides of a view, and of a tensor of its own, alternate in calls that are otherwise the same."""
    q, latent = latent_of()
    other = torch.randn_like(latent)
    for _ in range(3):
        for v in (latent[..., :64], other[..., :64]):
            expected = tw.attention(q, latent, v, backend="reference")
            torch.testing.assert_close(tw.attention(q, latent, v), expected)


@pytest.mark.parametrize(("width", "values"), [(80, 64), (576, 512), (512, 448)])
def test_the_gradient_of_a_latent_is_that_of_keys_and_values(width: int, values: int) -> None:
    """The sum of both uses, against fp64 and against tensors of their own."""
    q, latent = latent_of(width=width)
    q.requires_grad_()
    latent.requires_grad_()
    out = tw.attention(q, latent, latent[..., :values], causal=True, backend="cpu")
    found = torch.autograd.grad(out.square().sum(), (q, latent))
    exact = [t.detach().double().requires_grad_() for t in (q, latent)]
    out = tw.attention(exact[0], exact[1], exact[1][..., :values], causal=True, backend="reference")
    for mine, theirs in zip(found, torch.autograd.grad(out.square().sum(), exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
    k, v = latent.detach().clone().requires_grad_(), latent.detach()[..., :values].clone().requires_grad_()
    dk, dv = torch.autograd.grad(tw.attention(q, k, v, causal=True).square().sum(), (k, v))
    torch.testing.assert_close(found[1], dk + torch.nn.functional.pad(dv, (0, width - values)))


def test_the_gradient_of_pages_of_latents() -> None:
    q, pages = torch.randn(3, 6, 576), torch.randn(5, 16, 1, 576, requires_grad=True)
    table, used = (
        torch.tensor([[4, 1], [0, 2], [3, 3]], dtype=torch.int32),
        torch.tensor([30, 17, 5], dtype=torch.int32),
    )
    (found,) = torch.autograd.grad(tw.attention_paged(q, pages, pages[..., :512], table, used).square().sum(), pages)
    exact = pages.detach().double().requires_grad_()
    out = tw.attention_paged(q.double(), exact, exact[..., :512], table, used, backend="reference")
    (expected,) = torch.autograd.grad(out.square().sum(), exact)
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert not found[3, 5:].any()


@pytest.mark.parametrize("width", [512, 576])
def test_scores_of_wide_rows_lose_no_digits(width: int) -> None:
    """A row with one key has its score as lse. Products that are all added one by one are off by 0.3 ulp of 1 each."""
    generator = torch.Generator().manual_seed(width)
    q, k = torch.randn(8, 1, 512, width, generator=generator), torch.randn(8, 1, 1, width, generator=generator)
    _, lse = tw.attention(q, k, k[..., :64], scale=1.0, return_lse=True, backend="cpu")
    error = (lse - (q.double() @ k.double().mT)[..., 0]).square().mean().sqrt()
    assert float(error) < 0.2 * width * 2**-24


def test_a_gpu_refuses_gradients_of_wide_latents_with_a_reason() -> None:
    q = torch.empty(1, 16, 4, 576, device="meta", dtype=torch.bfloat16, requires_grad=True)
    latent = torch.empty(1, 1, 64, 576, device="meta", dtype=torch.bfloat16)
    plan = tw.explain(q, latent, latent[..., :512], device="h200")
    assert plan.backend is None
    reason = "gradients take head_dim up to 512, not 576: expand latents into keys and values of each head"
    assert ("triton", reason) in [tuple(one) for one in plan.rejected]
    # Narrower ones have gradients.
    narrow = tw.explain(q[..., :512], latent[..., :512], latent[..., :448], device="h200")
    assert narrow.backend == "hopper"


def test_a_latent_in_e4m3() -> None:
    q, latent = latent_of()
    k = fp8.quantize(latent, granularity="head")
    v = k.first_columns(64)
    assert v.data.data_ptr() == k.data.data_ptr()
    exact = k.dequantize()
    torch.testing.assert_close(tw.attention(q, k, v), tw.attention(q, exact, exact[..., :64]))


@pytest.mark.parametrize("count", [0, 81, None, "64", 2.5, True, [1], torch.tensor([1, 2])], ids=str)
def test_columns_that_are_not_there_are_refused(count: Any) -> None:
    with pytest.raises(tw.InvalidProblem, match="1 to 80, the columns of a row"):
        fp8.quantize(torch.randn(1, 1, 5, 80)).first_columns(count)


def test_rotation_and_latents_exclude_each_other() -> None:
    with pytest.raises(tw.InvalidProblem, match="without rotation"):
        fp8.quantize(torch.randn(1, 1, 5, 64), rotation=True).first_columns(32)
    with pytest.raises(tw.InvalidProblem, match="False for rows of more than 512 columns"):
        fp8.quantize(torch.randn(1, 1, 5, 576), rotation=True)


@pytest.mark.parametrize(("widths", "name"), [((577, 512), "head_dim"), ((576, 513), "head_dim_v")])
def test_wider_heads_are_refused(widths: tuple[int, int], name: str) -> None:
    q, k = torch.randn(2, 1, 2, 5, widths[0])
    with pytest.raises(tw.InvalidProblem, match=f"^{name}: "):
        tw.attention(q, k, torch.randn(1, 2, 5, widths[1]))


def test_explain_names_a_latent_and_counts_it_once() -> None:
    for device in ("cpu", "meta"):
        q, latent = torch.empty(2, 16, 1, 576, device=device), torch.empty(2, 1, 4096, 576, device=device)
        view = tw.explain(q, latent, latent[..., :512], device="h200")
        own = tw.explain(q, latent, torch.empty(2, 1, 4096, 512, device=device), device="h200")
        assert "latent" in view.problem.features
        assert "latent" not in own.problem.features
        assert own.memory.inputs - view.memory.inputs == 2 * 4096 * 512 * 4


def test_explain_says_what_a_token_of_a_latent_takes() -> None:
    q, latent = torch.empty(2, 128, 1, 576).bfloat16(), torch.empty(2, 1, 64, 576).bfloat16()
    plan = tw.explain(q, latent, latent[..., :512], device="h200")
    report = " ".join(str(plan).split())
    assert plan.to_dict()["bytes_per_token"] == 1152
    assert "a token has 1,152 bytes: 576 columns, of which 512 are values too, read for 128 query heads" in report
    assert "stored apart would have 2,176 bytes" in report
    k = fp8.quantize(latent)
    narrow = tw.explain(q, k, k.first_columns(512), device="h200")
    assert narrow.bytes_per_token == 576
    assert plan.tiled.bytes_from_memory - narrow.tiled.bytes_from_memory == 2 * 64 * 576
    own = tw.explain(q, latent, latent[..., :512].clone(), device="h200")
    assert own.bytes_per_token == 2176
    assert "a token has" not in str(own)


def test_the_same_tensor_twice_stands_for_two_in_a_forecast() -> None:
    k = torch.empty(2, 1, 4096, 64, device="meta")
    assert tw.explain(k, k, k, device="h200").memory.inputs == 3 * k.nbytes


def test_compiled_graphs_take_views() -> None:
    q, latent = latent_of()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, latent: Tensor) -> Tensor:
        return tw.attention(q, latent, latent[..., :64], causal=True)

    torch.testing.assert_close(attend(q, latent), tw.attention(q, latent, latent[..., :64], causal=True))
