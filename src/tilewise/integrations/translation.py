"""The words of flash-attn in those of tilewise; shared by the FA2 and FA3 drop-ins."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem

__all__ = ["Window", "length", "places", "softcap_of", "window_of"]

Window = tuple[int | None, int | None]


def window_of(window_size: tuple[int, int]) -> Window | None:
    """flash-attn's window: a negative side is unbounded."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        fix = "A causal window of the last n keys is (n - 1, 0); -1 is an unbounded side."
        raise InvalidProblem("window_size", "a pair (left, right)", repr(window_size), fix) from None
    if left < 0 and right < 0:
        return None
    return None if left < 0 else left, None if right < 0 else right


def softcap_of(softcap: float) -> float | None:
    """flash-attn's softcap: anything above 0 switches it on."""
    return softcap if softcap > 0.0 else None


def length(value: int | Tensor) -> int:
    """A longest length, which callers also pass as a tensor with one element."""
    return int(value.item()) if isinstance(value, Tensor) else value


def places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every packed row; rows past the last sequence get the sequence number `batch`."""
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    return sequence, rows - cu_seqlens[sequence]
