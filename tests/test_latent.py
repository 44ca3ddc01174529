"""V as a view of K's first columns: what a caller of the public functions sees (tests/backends has the numbers)."""

from __future__ import annotations

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


def test_the_gradient_of_a_latent_is_that_of_keys_and_values() -> None:
    q, latent = latent_of()
    latent.requires_grad_()
    (together,) = torch.autograd.grad(tw.attention(q, latent, latent[..., :64]).square().sum(), latent)
    k, v = latent.detach().clone().requires_grad_(), latent.detach()[..., :64].clone().requires_grad_()
    dk, dv = torch.autograd.grad(tw.attention(q, k, v).square().sum(), (k, v))
    torch.testing.assert_close(together, dk + torch.nn.functional.pad(dv, (0, 16)))


def test_a_latent_in_e4m3() -> None:
    q, latent = latent_of()
    k = fp8.quantize(latent, granularity="head")
    v = k.first_columns(64)
    assert v.data.data_ptr() == k.data.data_ptr()
    exact = k.dequantize()
    torch.testing.assert_close(tw.attention(q, k, v), tw.attention(q, exact, exact[..., :64]))


@pytest.mark.parametrize("count", [0, 81])
def test_columns_that_are_not_there_are_refused(count: int) -> None:
    with pytest.raises(tw.InvalidProblem, match="1 to 80 columns"):
        fp8.quantize(torch.randn(1, 1, 5, 80)).first_columns(count)


def test_rotated_rows_have_no_first_columns() -> None:
    with pytest.raises(tw.InvalidProblem, match="without rotation"):
        fp8.quantize(torch.randn(1, 1, 5, 64), rotation=True).first_columns(32)


def test_latents_are_not_rotated() -> None:
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
    assert tw.explain(q, k, k.first_columns(512), device="h200").bytes_per_token == 576
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
