"""Tensors that tests are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """N(0, 1) on the CPU; of another shape, other numbers."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def int32(*values: Any) -> Tensor:
    """The numbers, in a row or in rows."""
    return torch.tensor(values, dtype=torch.int32)
