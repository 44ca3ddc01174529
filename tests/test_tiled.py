"""The textbook algorithms against the specification, and the tiles they must not touch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.backends.reference.tiled import fa1, fa2
from tilewise.backends.reference.tiled_derivatives import second_gradient, tangent
from tilewise.masks import Band, TileGrid
from tilewise.plan.cost import forward_flops, scores_computed

# Of torch's own rules for forward derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

Textbook = Callable[..., tuple[Tensor, Tensor]]
BOTH = pytest.mark.parametrize("algorithm", [fa1, fa2])
BANDS = {"full": (None, None), "causal": (None, 0), "window": (5, 3), "causal window": (4, 0), "left only": (2, None)}


def inputs(seqlen_q: int, seqlen_k: int, head_dim: int = 8, head_dim_v: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def specified(
    q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    given = (t[None, None] for t in (q, k, v))
    out, lse = tw.attention(*given, window=(left, right), scale=scale, backend="reference", return_lse=True)
    return out[0, 0], lse[0, 0]


@BOTH
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (7, 7), (16, 16), (33, 33), (5, 29), (29, 5), (1, 40), (0, 4), (4, 0)]
)
def test_equals_the_specification(algorithm: Textbook, name: str, seqlen_q: int, seqlen_k: int) -> None:
    left, right = BANDS[name]
    q, k, v = inputs(seqlen_q, seqlen_k)
    out, lse = algorithm(q, k, v, band=Band(seqlen_q, seqlen_k, left, right), grid=TileGrid(8, 4))
    expected_out, expected_lse = specified(q, k, v, left, right)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-14)


@BOTH
@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (64, 2), (2, 64), (128, 128)])
def test_tile_shape_and_value_width_do_not_matter(algorithm: Textbook, grid: tuple[int, int]) -> None:
    q, k, v = inputs(23, 31, head_dim=5, head_dim_v=11)
    out, lse = algorithm(q, k, v, band=Band(23, 31, None, 0), grid=TileGrid(*grid), scale=0.7)
    expected_out, expected_lse = specified(q, k, v, None, 0, scale=0.7)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-14)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_accumulates_in_fp32(algorithm: Textbook, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in inputs(100, 100))
    out, lse = algorithm(q, k, v, band=Band(100, 100, None, 0), grid=TileGrid(32, 16))
    expected_out, expected_lse = specified(q.double(), k.double(), v.double(), None, 0)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # Rounding the result once is all that may be lost beyond fp32 accumulation.
    allowed = torch.finfo(dtype).eps * expected_out.abs().max() + 1e-6
    assert (out.double() - expected_out).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@BOTH
def test_huge_scores_do_not_overflow(algorithm: Textbook) -> None:
    q, k, v = inputs(12, 12)
    out, lse = algorithm(q * 1e3, k * 1e3, v, band=Band(12, 12), grid=TileGrid(4, 4))
    expected_out, expected_lse = specified(q * 1e3, k * 1e3, v, None, None)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@BOTH
@pytest.mark.parametrize("name", BANDS)
def test_computes_exactly_the_visited_tiles(algorithm: Textbook, name: str) -> None:
    left, right = BANDS[name]
    band, grid = Band(40, 40, left, right), TileGrid(8, 8)
    q, k, v = inputs(40, 40, head_dim=8, head_dim_v=4)
    with FlopCounterMode(display=False) as counter:
        algorithm(q, k, v, band=band, grid=grid)
    assert counter.get_total_flops() == forward_flops(scores_computed(band, grid), 8, 4)


@BOTH
def test_a_poisoned_tile_reaches_only_the_queries_that_visit_it(algorithm: Textbook) -> None:
    q, k, v = inputs(24, 24)
    k[16:], v[16:] = torch.nan, torch.nan
    out, lse = algorithm(q, k, v, band=Band(24, 24, None, 0), grid=TileGrid(8, 8))
    assert out[:16].isfinite().all()
    assert lse[:16].isfinite().all()
    assert out[16:].isnan().all()


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(13, 13), (7, 19), (19, 7)])
def test_tiled_derivatives_are_those_of_the_specification(name: str, seqlen_q: int, seqlen_k: int) -> None:
    left, right = BANDS[name]
    operands, band, grid = inputs(seqlen_q, seqlen_k), Band(seqlen_q, seqlen_k, left, right), TileGrid(4, 5)
    tangents = tuple(t.roll(1, 0).sin() for t in operands)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return specified(q, k, v, left, right)

    expected = torch.func.jvp(attend, operands, tangents)
    results = tangent(operands, tangents, band=band, grid=grid)  # type: ignore[arg-type]
    torch.testing.assert_close(results, (*expected[0], *expected[1]))

    dout, dlse = results[0].cos(), results[3].cos()

    def pulled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dot_out, dot_lse = torch.func.jvp(attend, (q, k, v), tangents)[1]
        total: Tensor = (dot_out * dout).sum() + (dot_lse * dlse).sum()
        return total

    mine = second_gradient(operands, tangents, results, (dout, dlse), band=band, grid=grid)  # type: ignore[arg-type]
    torch.testing.assert_close(mine, torch.func.grad(pulled, argnums=(0, 1, 2))(*operands))
