"""`deterministic="batch"` on a real GPU: bits of a sequence alone and in random batches, by every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.testing.conformance import same_bits
from tilewise.testing.invariance import Sequences, check_invariant

pytestmark = pytest.mark.hopper

LENGTHS = (1, 700, 33, 4096, 9000, 64, 4097, 128)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["dense", "varlen", "paged", "decode"])
def test_random_batches(kind: str, dtype: torch.dtype, head_dim: int) -> None:
    flags: dict[str, Any] = {} if kind == "decode" else {"causal": True}
    check_invariant(Sequences(kind, dtype, LENGTHS, 64, "cuda", head_dim), rounds=25, **flags)


@pytest.mark.parametrize("flags", [{"window": (1000, 0)}, {"softcap": 20.0}, {"causal": True, "scale": 0.5}])
@pytest.mark.parametrize("kind", ["varlen", "paged", "decode"])
def test_features(kind: str, flags: dict[str, Any]) -> None:
    check_invariant(Sequences(kind, torch.bfloat16, LENGTHS, 16, "cuda", 128), rounds=25, **flags)


@pytest.mark.parametrize("batch", [1, 3, 16, 64, 200])
def test_decoding_in_batches_of_any_size(batch: int) -> None:
    """A batch of 200 needs no splits, one of 1 as many as there are: the same ones are made."""
    torch.manual_seed(1)
    sides = ((8, 1), (2, 9000), (2, 9000))
    q, k, v = (torch.randn(200, heads, n, 128, device="cuda", dtype=torch.bfloat16) for heads, n in sides)
    whole = tw.attention(q, k, v, deterministic="batch")
    assert same_bits(tw.attention(q[:batch], k[:batch], v[:batch], deterministic="batch"), whole[:batch])


def test_the_width_of_the_table_changes_no_bit_of_decoding() -> None:
    q = torch.randn(4, 8, 128, device="cuda").bfloat16()
    k, v = torch.randn(2, 300, 64, 2, 128, device="cuda").bfloat16()
    table = torch.randperm(300, device="cuda")[:280].int().view(4, 70)
    lengths = torch.tensor([4480, 1, 4096, 300], dtype=torch.int32, device="cuda")
    tables = [torch.nn.functional.pad(table, (0, more)) for more in (0, 10, 3000)]
    made = [tw.attention_paged(q, k, v, wide, lengths, deterministic="batch") for wide in tables]
    assert same_bits(made[0], made[1])
    assert same_bits(made[0], made[2])
