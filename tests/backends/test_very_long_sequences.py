"""Sequences of up to 2^31 - 1 keys: right, or refused. All keys are one row of memory (stride 0), so none is needed.

With equal scores, lse says how many keys a row sees and how far they are; values that are all 1 give out 1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import device as devices
from tilewise import dispatch
from tilewise.problem import AttentionProblem

SLOPE, LEFT = 0.25, 100
LAST = 2**31 - 1
# Past 2^24 not every position is a number of fp32; 2^31 - 1 is the last int32.
LENGTHS = (2**24 - 5, 2**24 + 2**20 + 3, 2**30 + 77, LAST)
# lse of a row that sees itself and LEFT keys before it.
OF_WINDOW = math.log(LEFT + 1)
OF_ALIBI = math.log(sum(math.exp(-SLOPE * distance) for distance in range(LEFT + 1)))


def rows_of(value: float, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(1, 1, rows, 16) in the memory of one row."""
    return torch.full((1, 1, 1, 16), value, dtype=dtype).expand(1, 1, rows, 16)


def assert_sees(out: torch.Tensor, lse: torch.Tensor, expected: float) -> None:
    torch.testing.assert_close(lse, torch.full_like(lse, expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slope", [0.0, SLOPE], ids=["window", "alibi"])
@pytest.mark.parametrize("keys", LENGTHS)
def test_windows_and_alibi_at_the_end_of_many_keys(keys: int, slope: float, dtype: torch.dtype) -> None:
    slopes = torch.tensor([slope]) if slope else None
    expected = OF_ALIBI if slope else OF_WINDOW
    q = torch.zeros(1, 1, 70, 16, dtype=dtype).requires_grad_()
    k, v = rows_of(0.5, keys, dtype), rows_of(1.0, keys, dtype)
    window = (LEFT, 0)
    out, lse = tw.attention(q, k, v, window=window, alibi_slopes=slopes, return_lse=True, backend="cpu")
    assert_sees(out, lse, expected)
    # All keys are 0.5, so dq is the sum of a row's probabilities times half the scale.
    lse.sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(q.grad, torch.full_like(q, 0.5 / 4.0))


def test_a_window_that_reaches_past_the_last_of_many_keys() -> None:
    keys = 2**30 + 2**29
    k, v = rows_of(0.0, keys), rows_of(1.0, keys)
    # The right side reaches past the last key from every row.
    right = 2**29
    q = torch.zeros(1, 1, 70, 16)
    out, lse = tw.attention(q, k, v, window=(3, right), return_lse=True, backend="cpu")
    seen = 4 + torch.arange(70).flip(0).float()
    torch.testing.assert_close(lse[0, 0], seen.log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("rows", [1, 16])
def test_decoding_with_alibi_behind_many_keys(rows: int) -> None:
    """Few rows are split over keys."""
    keys = 2**24 + 2**20 + 3
    k, v = rows_of(0.0, keys), rows_of(1.0, keys)
    slopes = torch.tensor([SLOPE])
    q = torch.zeros(1, 1, rows, 16)
    out, lse = tw.attention(q, k, v, window=(LEFT, 0), alibi_slopes=slopes, return_lse=True, backend="cpu")
    assert_sees(out, lse, OF_ALIBI)


@pytest.mark.parametrize("kind", ["varlen", "paged"])
def test_packed_and_paged_sequences_of_many_keys(kind: str) -> None:
    keys = LAST
    slopes, cuts = torch.tensor([SLOPE]), torch.tensor([0, 70], dtype=torch.int32)
    flags: dict[str, Any] = {"window": (LEFT, 0), "alibi_slopes": slopes, "return_lse": True, "backend": "cpu"}
    q = torch.zeros(70, 1, 16)
    if kind == "varlen":
        k, v = (rows_of(x, keys)[0].transpose(0, 1) for x in (0.0, 1.0))
        lengths = torch.tensor([0, keys], dtype=torch.int32)
        out, lse = tw.attention_varlen(q, k, v, cuts, lengths, **flags)
    else:
        # One page holds them all.
        k, v = (rows_of(x, keys)[0].transpose(0, 1)[None] for x in (0.0, 1.0))
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
        out, lse = tw.attention_paged(q, k, v, table, lengths, cu_seqlens_q=cuts, **flags)
    assert_sees(out, lse, OF_ALIBI)


def test_longer_sequences_are_refused() -> None:
    q, longer = torch.zeros(1, 1, 70, 16), rows_of(0.0, LAST + 1)
    with pytest.raises(
        tw.InvalidProblem, match=r"seqlen_k: expected at most 2147483647, got 2147483648.*tilewise\.merge"
    ):
        tw.attention(q, longer, longer, window=(LEFT, 0))
    with pytest.raises(tw.InvalidProblem, match="seqlen_q: expected at most 2147483647"):
        tw.attention(longer, q, q)
    packed, cuts = longer[0].transpose(0, 1), torch.tensor([0, 70], dtype=torch.int32)
    with pytest.raises(tw.InvalidProblem, match="total_k: expected at most 2147483647"):
        tw.attention_varlen(q[0].transpose(0, 1), packed, packed, cuts, cuts, max_seqlen_q=70, max_seqlen_k=70)
    pages, table = packed[None, : 2**30], torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(tw.InvalidProblem, match="seqlen_k: expected at most 2147483647, got 2147483648"):
        tw.attention_paged(q[0, :, :1], pages, pages, table, torch.ones(1, dtype=torch.int32))


LONG = AttentionProblem(
    kind="dense", dtype=torch.bfloat16, batch=1, seqlen_q=300, seqlen_k=2**29, total_q=300, total_k=2**29, num_heads=2,
    num_kv_heads=2, head_dim=64, head_dim_v=64, scale=0.1,
)  # fmt: skip


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_gpu_kernels_refuse_what_their_32_bit_positions_do_not_take(name: str) -> None:
    backend, h200 = dispatch.load(name), devices.named("h200")
    assert backend.supports(LONG, h200) is None
    for changes in ({"seqlen_k": 2**29 + 1}, {"seqlen_q": 2**29 + 1}, {"kind": "varlen", "seqlen_k": LAST}):
        assert "32-bit positions" in (backend.supports(dataclasses.replace(LONG, **changes), h200) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_keys_keep_their_digits(dtype: torch.dtype) -> None:
    """All keys but the first weigh 0.3: all roundings have one sign, so that of plain sums out is off by 0.01."""
    keys = 2**22
    bias = torch.full((keys,), -1.2)
    bias[0] = 0.0
    q = torch.zeros(1, 1, 65, 16, dtype=dtype)
    k, v = rows_of(0.0, keys, dtype), rows_of(1.0, keys, dtype)
    out, lse = tw.attention(q, k, v, bias=bias, return_lse=True, backend="cpu")
    expected = torch.logsumexp(bias.double(), 0).float()
    torch.testing.assert_close(lse, expected.expand_as(lse), atol=1e-5, rtol=0)
    # P is rounded to bf16 where a matrix unit multiplies it, 1 to the same side for all.
    torch.testing.assert_close(out.float(), torch.ones_like(out, dtype=torch.float32), atol=2.0**-8, rtol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(out, torch.ones_like(out), atol=3e-4, rtol=0)


def test_chunks_of_many_keys_keep_their_digits() -> None:
    keys = 2**24
    bias = torch.full((keys,), -1.2)
    bias[0] = 0.0
    q, k = torch.zeros(1, 1, 1, 16), rows_of(0.0, keys)
    _, lse = tw.attention(q, k, rows_of(1.0, keys), bias=bias, return_lse=True, backend="cpu")
    assert abs(float(lse) - float(torch.logsumexp(bias.double(), 0))) < 1e-5


def test_totals_over_many_keys_are_right_for_any_scores() -> None:
    """Maxima grow and fall from one run of keys to the next; NaN and
    infinities in what all rows see stay what they are.
    """
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, 32, generator=make) for rows in (90, 9000, 9000))
    k *= torch.linspace(0.1, 20.0, 90).repeat_interleave(100)[:, None]
    v[0, 0, 4200, 3], v[0, 0, 3500, 4], q[0, 0, 7] = torch.inf, torch.nan, torch.nan
    flags: dict[str, Any] = {"causal": True, "sinks": torch.zeros(1), "softcap": 30.0, "return_lse": True}
    for window in (None, (6000, None)):
        found = tw.attention(q, k, v, **flags, window=window, backend="cpu")
        wanted = tw.attention(q, k, v, **flags, window=window, backend="reference")
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-4, rtol=1e-4)
