"""`flash_attn_with_kvcache` refuses before it writes: a call that raises leaves the cache as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.kv.writing import write_rows


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


OFFSETS: dict[str, tuple[Tensor, str]] = {
    "fractions": (torch.tensor([0.0, 2.0, 4.0]), "a tensor of integers of shape"),
    "another batch": (int32([0, 4]), "a tensor of integers of shape"),
    "a late start": (int32([1, 2, 4]), "0 as its first entry"),
    "before the first": (int32([0, -1, 4]), "entries that never decrease"),
    "decreasing": (int32([0, 3, 2]), "entries that never decrease"),
    "past the end": (int32([0, 2, 9]), "a last entry of at most 4"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_of_new_tokens(name: str) -> None:
    offsets, message = OFFSETS[name]
    k_cache, v_cache = torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16)
    new = torch.ones(4, 2, 16)
    with pytest.raises(tw.InvalidProblem, match=f"cu_seqlens_k_new: expected {message}"):
        fa3.flash_attn_with_kvcache(
            torch.zeros(2, 1, 4, 16), k_cache, v_cache, new, new, cache_seqlens=int32([3, 5]), cu_seqlens_k_new=offsets
        )
    assert not k_cache.any()
    assert not v_cache.any()


def test_slots_of_another_dtype_are_refused() -> None:
    pages, rows = torch.zeros(1, 4, 2, 16), torch.ones(2, 2, 16)
    with pytest.raises(tw.InvalidProblem, match="slots: expected an int64 tensor"):
        write_rows(rows, rows, pages, pages, int32([0, 1]))
    assert not pages.any()
