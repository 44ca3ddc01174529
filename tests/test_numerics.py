"""Merging, the empty row, and the dropout bits."""

import math

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.numerics import dropout_keep, dropout_threshold, merge_partials, philox_4x32

# Known answers published with Random123 for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([c]) for c in counter)
    words = philox_4x32((c0, c1, c2, c3), key)
    assert tuple(int(w[0]) for w in words) == expected


def test_dropout_bits_do_not_depend_on_the_tile() -> None:
    rows, cols = np.arange(9), np.arange(13)
    whole = dropout_keep(1234567890123, 0.3, 2, 5, rows, cols)
    for r, c in ((slice(0, 4), slice(3, 9)), (slice(8, 9), slice(12, 13)), (slice(2, 7), slice(0, 1))):
        assert np.array_equal(whole[r, c], dropout_keep(1234567890123, 0.3, 2, 5, rows[r], cols[c]))


def test_dropout_bits_depend_on_everything_they_are_counted_by() -> None:
    rows, cols = np.arange(32), np.arange(32)
    base = dropout_keep(7, 0.5, 0, 0, rows, cols)
    for seed, batch, head in ((8, 0, 0), (7 + (1 << 32), 0, 0), (7, 1, 0), (7, 0, 1)):
        assert not np.array_equal(base, dropout_keep(seed, 0.5, batch, head, rows, cols))
    assert not np.array_equal(base[:16], base[16:])
    assert not np.array_equal(base[:, :16], base[:, 16:])


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share(dropout: float) -> None:
    kept = dropout_keep(99, dropout, 0, 0, np.arange(256), np.arange(256)).mean()
    # Five standard deviations of the mean of 65536 Bernoulli draws.
    assert abs(kept - (1 - dropout)) <= 5 * math.sqrt(dropout * (1 - dropout) / 65536)
    assert dropout_threshold(dropout) < 2**32


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = tw.attention(q, k, v, return_lse=True, backend="reference")
    return out, lse


def test_merge_of_parts_is_the_whole_with_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    out, lse = attend(q, k, v)
    merged = tw.merge(*attend(q, k[:, :, :3], v[:, :, :3]), *attend(q, k[:, :, 3:], v[:, :, 3:]))
    torch.testing.assert_close(merged[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged[1], lse, rtol=1e-12, atol=1e-12)
    whole = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    parts = torch.autograd.grad(merged[0].square().sum() + merged[1].sum(), (q, k, v))
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_empty_row_is_neutral_and_its_gradient_finite() -> None:
    out = torch.randn(2, 5, 3, requires_grad=True)
    lse = torch.randn(2, 5, requires_grad=True)
    nothing, never = torch.full((2, 5, 3), math.nan), torch.full((2, 5), -math.inf, requires_grad=True)
    merged, merged_lse = merge_partials(out, lse, nothing, never)
    assert torch.equal(merged, out)
    torch.testing.assert_close(merged_lse, lse)
    both, both_lse = merge_partials(nothing, never, nothing, never)
    assert torch.equal(both, torch.zeros_like(both))
    assert torch.equal(both_lse, never)
    (gradient,) = torch.autograd.grad(both.sum() + torch.where(both_lse == -math.inf, 0.0, both_lse).sum(), never)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge_follows_the_layout_even_where_shapes_are_ambiguous(layout: str) -> None:
    q = torch.randn(2, 4, 4, 8)
    k, v = torch.randn(2, 2, 4, 4, 8).unbind(0)
    a = tw.attention(q, k, v, layout=layout, return_lse=True)
    merged, lse = tw.merge(*a, *a, layout=layout)
    torch.testing.assert_close(merged, a[0])
    torch.testing.assert_close(lse, a[1] + math.log(2))


def test_merge_of_packed_results() -> None:
    q, k, v = torch.randn(3, 5, 2, 8).unbind(0)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    a = tw.attention_varlen(q, k, v, cu, cu, return_lse=True)
    merged, lse = tw.merge(*a, *a)
    torch.testing.assert_close(merged, a[0])
    torch.testing.assert_close(lse, a[1] + math.log(2))


def test_merge_refuses_what_does_not_fit() -> None:
    with pytest.raises(tw.InvalidProblem, match="lse_b"):
        tw.merge(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4))


def test_merge_refuses_what_has_no_fractions_or_lies_elsewhere() -> None:
    out, lse = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)
    for wrong in (out.int(), out.to("meta"), out.to(torch.float8_e4m3fn), out.to(torch.float8_e5m2)):
        with pytest.raises(tw.InvalidProblem, match=r"out_b: expected a tensor of float16, bfloat16, .* on cpu"):
            tw.merge(out, lse, wrong, lse)
    with pytest.raises(tw.InvalidProblem, match=r"lse_a: expected a tensor of float16, .* got torch.float8_e4m3fn"):
        tw.merge(out, lse.to(torch.float8_e4m3fn), out, lse)
    with pytest.raises(tw.InvalidProblem, match="lse_a: expected an lse that fits out of shape"):
        tw.merge(*[torch.tensor(1.0)] * 4)
