"""Quantising to e4m3: the bits, the scales, the rotation, and what may not be lost or mixed up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise import InvalidProblem, Unsupported, fp8
from tilewise.fp8.container import E4M3
from tilewise.fp8.rotation import parts, signs

GRANULARITIES = ("tensor", "head", "block")


def e4m3_values() -> torch.Tensor:
    """Every finite number of the format, ascending, from its definition."""
    magnitudes = [m * 2.0**-9 for m in range(8)]
    magnitudes += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([-m for m in reversed(magnitudes[1:])] + magnitudes)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_values_come_back_to_within_half_a_step(granularity: str, rotation: bool, layout: str) -> None:
    shape = (2, 3, 150, 40) if layout == "bhsd" else (2, 150, 3, 40)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = fp8.quantize(x, granularity=granularity, rotation=rotation, layout=layout)  # type: ignore[arg-type]
    exact = fp8.rotate(x) if rotation else x
    back = made.dequantize()
    # Three bits of fraction: half a step is 1/16 of the value, or of the smallest normal number, 2^-6 of the scale.
    smallest = made.scale.amax() * 2.0**-6
    assert bool(((back - exact).abs() <= torch.maximum(exact.abs(), smallest) / 16 * 1.0001).all())
    assert made.scale.shape == (2, 3, 2 if granularity == "block" else 1)


def test_codes_are_the_nearest_ones_ties_to_even() -> None:
    values = e4m3_values()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)]).reshape(1, 1, -1, 1)
    made = fp8.quantize(x, scale=1.0)
    distance = (x.double().reshape(-1, 1) - values.double()).abs()
    best = distance.amin(1, keepdim=True)
    # Codes of neighbours differ by one, and the even one has an even number.
    even = torch.tensor([abs(i - 126) % 2 == 0 for i in range(len(values))])
    choice = torch.where(distance == best, torch.where(even, 2, 1), 0).argmax(1)
    assert torch.equal(made.dequantize().reshape(-1), values[choice])


def test_a_group_s_largest_magnitude_is_448_of_its_scale() -> None:
    x = torch.randn(2, 3, 300, 16, generator=torch.Generator().manual_seed(0)) * 1e3
    made = fp8.quantize(x, granularity="block")
    for block in range(3):
        rows = slice(128 * block, 128 * (block + 1))
        assert torch.equal(made.scale[:, :, block], x[:, :, rows].abs().amax((2, 3)) / 448.0)
    assert float(made.data.float().abs().max()) == 448.0


def test_beyond_a_given_scale_values_saturate() -> None:
    x = torch.tensor([1e30, -1e30, 500.0, 3.0]).reshape(1, 1, 1, 4)
    assert fp8.quantize(x, scale=1.0).dequantize().flatten().tolist() == [448.0, -448.0, 448.0, 3.0]


def test_nan_and_infinities_become_nan_and_leave_the_scale_alone() -> None:
    x = torch.ones(1, 2, 3, 4)
    x[0, 0, 0, 0], x[0, 0, 1, 1], x[0, 0, 2, 2] = torch.nan, torch.inf, -torch.inf
    made = fp8.quantize(x, granularity="tensor")
    assert torch.isnan(made.dequantize()).nonzero()[:, 2:].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert float(made.scale[0, 0, 0]) == pytest.approx(1 / 448.0)
    with pytest.raises(InvalidProblem, match="finite"):
        fp8.quantize(x, nonfinite="raise")


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38])
def test_extreme_magnitudes_stay_finite(value: float) -> None:
    made = fp8.quantize(torch.full((1, 1, 2, 2), value))
    assert torch.isfinite(made.scale).all()
    assert float(made.dequantize()[0, 0, 0, 0]) == pytest.approx(value, rel=1e-5, abs=2.0**-100)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_packed_rows_past_the_end_count_for_nothing(granularity: str) -> None:
    x = torch.randn(150, 2, 8, generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 5, 5, 140], dtype=torch.int32)
    poisoned = x.clone()
    poisoned[140:] = torch.nan
    poisoned[145:] = 1e30
    made = fp8.quantize(poisoned, granularity=granularity, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]
    back = made.dequantize(cu_seqlens)
    assert float((back[:140] - x[:140]).abs().max()) < float(x.abs().max()) / 16
    assert torch.equal(back[140:], torch.zeros(10, 2, 8))
    if granularity == "block":
        # Blocks are counted from each sequence's first row.
        assert torch.equal(made.scale[2, :, 1], x[133:140].abs().amax((0, 2)) / 448.0)
    empty = torch.zeros(2, dtype=torch.int32)
    made = fp8.quantize(poisoned, granularity=granularity, cu_seqlens=empty)  # type: ignore[arg-type]
    assert not made.dequantize(empty).any()


@pytest.mark.parametrize("where", ["cpu", "reference"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_batch_without_sequences_is_attended(granularity: Any, where: str) -> None:
    """Its block scales have no blocks, whatever length a call names."""
    none = torch.zeros(1, dtype=torch.int32)
    q = fp8.quantize(torch.empty(0, 2, 16), granularity=granularity, cu_seqlens=none)
    pages = fp8.quantize_pages(torch.randn(4, 8, 2, 16))
    tables = torch.empty(0, 3, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    for more in ({}, {"cu_seqlens_q": none, "max_seqlen_q": 200}, {"deterministic": "batch"}):
        flags: dict[str, Any] = {"return_lse": True, "return_max_logits": True, "backend": where} | more
        given = torch.empty(0, 2, 16, dtype=torch.bfloat16)
        out, lse, logits = tw.attention_paged(q, pages, pages, *tables, out=given, **flags)
        assert out is given
        assert lse.shape == (2, 0)
        assert bool((logits == -torch.inf).all())
    assert tw.explain(q, pages, pages, block_table=tables[0], seqlens_k=tables[1], device="h200").problem.batch == 0
    bounds: Any = {"max_seqlen_q": 200, "max_seqlen_k": 300}
    assert tw.attention_varlen(q, q, q, none, none, backend=where, **bounds).shape == q.shape


@pytest.mark.parametrize("head_dim", [1, 3, 40, 64, 80, 96, 128, 256])
def test_rotation_keeps_every_product(head_dim: int) -> None:
    q, k = torch.randn(2, 30, head_dim, generator=torch.Generator().manual_seed(0)).double()
    matrix = fp8.rotate(torch.eye(head_dim)).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim).double(), atol=1e-6)
    assert torch.allclose(fp8.rotate(q).double() @ fp8.rotate(k).double().T, q @ k.T, atol=1e-4)
    assert sum(parts(head_dim)) == head_dim
    assert {float(s) for s in signs(head_dim, torch.device("cpu"))} <= {1.0, -1.0}


def with_outliers(*shape: int) -> torch.Tensor:
    """N(0, 1), and in every row one channel around 20."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    where = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    return x.scatter(-1, where, 20.0 + torch.randn((*shape[:-1], 1), generator=generator))


# A part of 32 channels, as 96 has one, offers fewer codes to move than one of 128.
@pytest.mark.parametrize(("head_dim", "left"), [(64, 0.7), (96, 0.8), (128, 0.6)])
def test_rotated_rows_keep_their_largest_channel(head_dim: int, left: float) -> None:
    x = with_outliers(1, 2, 300, head_dim)
    matrix = fp8.rotate(torch.eye(head_dim)).double()
    rotated, made = fp8.rotate(x), fp8.quantize(x, rotation=True)
    nearest = fp8.quantize(rotated).dequantize()
    channel = x.abs().argmax(-1, keepdim=True)

    def errors(values: torch.Tensor) -> tuple[float, float]:
        """RMS of the largest channels' errors, and of all."""
        found = (values.double() @ matrix.T - x.double()).square()
        return float(found.gather(-1, channel).mean().sqrt()), float(found.mean().sqrt())

    largest, everywhere = errors(made.dequantize())
    plain_largest, plain_everywhere = errors(nearest)
    assert largest < left * plain_largest
    assert everywhere < 1.02 * plain_everywhere


def test_a_rotated_row_of_zeros_or_of_infinities_stays_one() -> None:
    x = with_outliers(1, 1, 3, 64)
    x[0, 0, 0], x[0, 0, 1, 5] = 0.0, torch.inf
    back = fp8.quantize(x, rotation=True).dequantize()[0, 0]
    assert torch.equal(back[0], torch.zeros(64))
    assert torch.isnan(back[1]).all()
    assert torch.isfinite(back[2]).all()


def test_quantising_what_needs_a_gradient_is_refused() -> None:
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(Unsupported, match="no gradient"):
        fp8.quantize(x)
    with torch.no_grad():
        assert not fp8.quantize(x).data.requires_grad


def test_scales_that_do_not_belong_are_refused() -> None:
    x = torch.randn(1, 2, 300, 8)
    made, other = (fp8.quantize(t, granularity="block") for t in (x, x[:, :, :100]))
    with pytest.raises(InvalidProblem, match="scale"):
        fp8.Fp8Tensor(made.data, other.scale, "block", "bhsd", 128)
    with pytest.raises(InvalidProblem, match="data"):
        fp8.Fp8Tensor(x, made.scale, "block", "bhsd", 128)
    with pytest.raises(InvalidProblem, match="block"):
        fp8.Fp8Tensor(made.data, made.scale, "head", "bhsd", 128)
    with pytest.raises(InvalidProblem, match="dimensions"):
        fp8.Fp8Tensor(made.data, made.scale, "block", "packed", 128)


@pytest.mark.parametrize("bad", [{"granularity": "row"}, {"layout": "sbhd"}, {"block": 64}, {"nonfinite": "zero"}])
def test_bad_arguments_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidProblem, match=next(iter(bad))):
        fp8.quantize(torch.randn(1, 1, 4, 4), **bad)  # type: ignore[arg-type]


def totals(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32)


PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"cu_seqlens": [0, 6]}, "cu_seqlens: expected a tensor, got list"),
    "of floats": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens: expected integers"),
    "two dimensions": ({"cu_seqlens": totals(0, 6)[None]}, "cu_seqlens: expected integers"),
    "no entry": ({"cu_seqlens": totals()}, "cu_seqlens: expected integers"),
    "on another device": ({"cu_seqlens": totals(0, 6).to("meta")}, "cu_seqlens: expected a tensor on cpu"),
    "not from 0": ({"cu_seqlens": totals(1, 6)}, "cu_seqlens: expected 0 as its first entry, got 1"),
    "decreasing": ({"cu_seqlens": totals(0, 4, 2)}, "cu_seqlens: expected entries that never decrease"),
    "past the rows": ({"cu_seqlens": totals(0, 9)}, "cu_seqlens: expected a last entry of at most 6"),
    "past 2^32": ({"cu_seqlens": torch.tensor([0, 2**32 + 6])}, "cu_seqlens: expected a last entry of at most 6"),
    "a short max_seqlen": ({"cu_seqlens": totals(0, 2, 6), "max_seqlen": 3}, "max_seqlen: expected at least 4"),
    "a negative max_seqlen": ({"cu_seqlens": totals(0, 6), "max_seqlen": -1}, "max_seqlen: expected None or an int"),
    "max_seqlen of a float": ({"cu_seqlens": totals(0, 6), "max_seqlen": 6.0}, "max_seqlen: expected None or an int"),
}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", PACKED)
def test_quantize_judges_running_totals_as_attention_does(name: str, granularity: Any) -> None:
    given, message = PACKED[name]
    with pytest.raises(InvalidProblem, match=message):
        fp8.quantize(torch.randn(6, 2, 16), granularity=granularity, **given)


def test_quantize_takes_totals_of_int64() -> None:
    x, cu = torch.randn(6, 2, 16), totals(0, 2, 6)
    wide, narrow = (fp8.quantize(x, cu_seqlens=t, granularity="block", block=2) for t in (cu.long(), cu))
    assert torch.equal(wide.data.view(torch.uint8), narrow.data.view(torch.uint8))
    assert torch.equal(wide.scale, narrow.scale)


SCALES: dict[str, tuple[Any, type[Exception], str]] = {
    **{
        f"{number}": (number, InvalidProblem, "scale: expected a tensor or a number")
        for number in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e38, True, "1", [1.0])
    },
    "zeros": (torch.zeros(2, 3, 1), InvalidProblem, "scale: expected each from 1e-37 to"),
    "one nan": (torch.tensor([1.0, float("nan"), 1.0])[:, None], InvalidProblem, "scale: expected each from 1e-37"),
    "another shape": (torch.ones(5), InvalidProblem, r"scale: expected a shape that broadcasts to .* = \(2, 3, 1\)"),
    "four dimensions": (torch.ones(1, 1, 1, 1), InvalidProblem, "scale: expected a shape that broadcasts to"),
    "bf16": (torch.ones(1).bfloat16(), InvalidProblem, "scale: expected a dense float32 tensor on cpu"),
    "integers": (torch.ones(1, dtype=torch.int32), InvalidProblem, "scale: expected a dense float32 tensor on cpu"),
    "sparse": (torch.ones(2, 3, 1).to_sparse(), InvalidProblem, "scale: expected a dense float32 tensor on cpu"),
    "elsewhere": (torch.ones(1, device="meta"), InvalidProblem, "scale: expected a dense float32 tensor on cpu"),
    "with a gradient": (torch.ones(1, requires_grad=True), Unsupported, "no gradient"),
}


@pytest.mark.parametrize("name", SCALES)
def test_quantize_judges_given_scales(name: str) -> None:
    scale, error, message = SCALES[name]
    with pytest.raises(error, match=message):
        fp8.quantize(torch.randn(2, 3, 6, 16), scale=scale)


@pytest.mark.parametrize("scale", [2, 2.0, np.float64(2.0), torch.tensor(2.0), torch.full((3, 1), 2.0)], ids=repr)
def test_quantize_takes_scales_of_every_spelling(scale: Any) -> None:
    x = torch.randn(2, 3, 6, 16)
    assert torch.equal(fp8.quantize(x, scale=scale).dequantize(), fp8.quantize(x, scale=2.0).dequantize())


def test_quantize_refuses_what_is_no_dense_tensor_of_numbers() -> None:
    x = torch.randn(2, 3, 6, 16)
    jagged = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    for wrong in (x.to_sparse(), jagged):
        with pytest.raises(InvalidProblem, match="x: expected a dense tensor"):
            fp8.quantize(wrong)
    with pytest.raises(InvalidProblem, match="x: expected a head_dim of at least 1"):
        fp8.quantize(x[..., :0], rotation=True)
    with pytest.raises(InvalidProblem, match="pages: expected a tensor of float32"):
        fp8.quantize_pages([x])  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="no gradient"):
        fp8.quantize_pages(x.requires_grad_())
    for block in (True, 2.0, 0):
        with pytest.raises(InvalidProblem, match="block: expected a positive number of rows"):
            fp8.quantize(x.detach(), granularity="block", block=block)  # type: ignore[arg-type]


def test_the_container_moves_and_counts_its_bytes() -> None:
    made = fp8.quantize(torch.randn(2, 3, 300, 8), granularity="tensor")
    assert made.nbytes == 2 * 3 * 300 * 8 + 4
    assert made.to("meta").scale.shape == (2, 3, 1)
    assert made.data.dtype == E4M3


def small(**options: Any) -> tuple[fp8.Fp8Tensor, fp8.Fp8Tensor, fp8.Fp8Tensor]:
    """q, k and v of a little problem."""
    q, k, v = torch.randn(3, 1, 2, 20, 16, generator=torch.Generator().manual_seed(0))
    return fp8.quantize(q, **options), fp8.quantize(k, **options), fp8.quantize(v)


def test_results_come_back_in_the_dtype_that_q_was_made_from() -> None:
    q, k, v = small()
    half = fp8.quantize(q.dequantize().half())
    assert tw.attention(q, k, v, backend="reference").dtype == torch.bfloat16
    assert tw.attention(half, k, v, backend="reference").dtype == torch.float16
    assert tw.attention(torch.randn(1, 2, 20, 16), k, v, backend="reference").dtype == torch.float32


def test_mixed_up_operands_are_refused() -> None:
    q, k, v = small()
    plain = v.dequantize()
    turned = fp8.quantize(k.dequantize(), rotation=True)
    last = fp8.quantize(torch.randn(1, 20, 2, 16), layout="bshd")
    mistakes: dict[tuple[Any, Any, Any], str] = {
        (q, k, plain): "neither of them",
        (q, plain, v): "neither of them",
        (q, turned, v): "same rotation",
        (plain, turned, v): "same rotation",
        (turned, turned, turned): "no rotation",
        (q, last, v): "layout",
        (q.data, k.data, v.data): "comes with its scales",
    }
    for arguments, words in mistakes.items():
        with pytest.raises(InvalidProblem, match=words):
            tw.attention(*arguments)


def test_gradients_through_fp8_are_refused_with_the_reason() -> None:
    _, k, v = small()
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    with pytest.raises(Unsupported, match="gradients through FP8"):
        tw.attention(q, k, v)
    with torch.no_grad():
        tw.attention(q, k, v, backend="reference")
    learned = k.scale.clone().requires_grad_()
    with pytest.raises(InvalidProblem, match=r"pass scale\.detach\(\)"):
        dataclasses.replace(k, scale=learned)


def test_nan_reaches_the_rows_that_see_it_and_no_others() -> None:
    x = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0, 7, 3] = torch.inf
    q = fp8.quantize(torch.randn(1, 1, 20, 16))
    out = tw.attention(q, fp8.quantize(x), fp8.quantize(torch.ones_like(x)), causal=True, backend="reference")
    assert torch.isnan(out).any(-1).flatten().tolist() == [row >= 7 for row in range(20)]


def test_autocast_leaves_e4m3_alone() -> None:
    q, k, v = small()
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(tw.attention(q, k, v, backend="reference"), tw.attention(*small(), backend="reference"))


def test_explain_and_compile_know_fp8() -> None:
    q, k, v = small(granularity="block", rotation=True)
    plan = tw.explain(q, k, v, device="h200")
    assert plan.problem.fp8 == ("q", "k", "v")
    assert plan.problem.scale_blocks == (128, 128, None)
    assert "fp8" in str(plan)
    by_triton = tw.explain(q, k, v, device="a100")
    assert by_triton.backend == "triton"
    assert by_triton.quantised is not None
    assert "widened to fp16 in registers" in by_triton.quantised
    assert "widened to fp16" in str(by_triton)
    odd = [fp8.quantize(torch.randn(1, 2, 20, 15)) for _ in range(3)]
    assert "odd head_dim" in str(tw.explain(*odd, device="a100"))
    assert "dequantised" in str(tw.explain(q, k, v, backend="reference"))
    assert tw.explain(*(t.dequantize() for t in (q, k, v))).quantised is None
    compiled = torch.compile(lambda *qkv: tw.attention(*qkv, backend="reference"), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), tw.attention(q, k, v, backend="reference"))


def test_tables_of_the_rotation_are_made_for_every_call() -> None:
    """Whoever asks first: made fake or in inference mode, the next call could not compute or record with them."""
    x = torch.randn(3, 56)
    with FakeTensorMode(), torch.inference_mode():
        assert fp8.rotate(torch.empty(3, 56)).shape == x.shape
    with torch.inference_mode():
        fp8.rotate(x)
    x.requires_grad_()
    fp8.rotate(x).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach(), atol=1e-5, rtol=1e-5)
