"""The rotation of q and k: random signs, then Walsh-Hadamard transforms. It preserves q.k and spreads outliers.

A head of n = 2^k channels is multiplied by diag(signs) H / sqrt(n), an orthogonal matrix, so every score is unchanged
in exact arithmetic. An outlier of one channel is spread over all channels, and the scale that covers it costs the
others fewer bits. Other head dims are cut into descending powers of two (96 = 64 + 32), each rotated by itself: the
matrix is still orthogonal, but a short part spreads less, and a part of 1 stays unchanged.

The order of the additions is part of the definition: butterflies of distance 1, 2, 4, ... in fp32, then one
multiplication. So a CPU and a GPU compute the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tilewise.lasting import outside_pools
from tilewise.numerics import philox_4x32

__all__ = ["directions", "norms", "part_sizes", "parts", "rotate", "signs"]

# The key of the random signs: fixed, so that q and k, and caches written by another process, agree.
SIGN_KEY = (0x7469_6C65, 0x7769_7365)


def _kept(make: Callable[[int, torch.device], Tensor]) -> Callable[[int, torch.device], Tensor]:
    """Caches a tensor, made as an ordinary one. A fake tensor (made under a mode), an inference tensor, or one in a
    graph's memory pool would be useless to later calls.
    """

    @functools.lru_cache(maxsize=256)
    def ordinary(head_dim: int, device: torch.device) -> Tensor:
        return outside_pools(lambda: make(head_dim, device), device)

    @functools.wraps(make)
    def kept(head_dim: int, device: torch.device) -> Tensor:
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        return make(head_dim, device) if watched else ordinary(head_dim, device)

    return kept


def parts(head_dim: int) -> tuple[int, ...]:
    """The powers of two that a head dim is the sum of, largest first.

    >>> parts(128), parts(96), parts(40)
    ((128,), (64, 32), (32, 8))
    """
    return tuple(1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1)


@_kept
def signs(head_dim: int, device: torch.device) -> Tensor:
    """+1 or -1 for every channel, the same in every process."""
    zero = np.zeros(1, np.int64)
    words = philox_4x32((np.arange(head_dim), zero, zero, zero), SIGN_KEY)[0]
    return torch.from_numpy(1.0 - 2.0 * (words & 1).astype(np.float32)).to(device)


@_kept
def part_sizes(head_dim: int, device: torch.device) -> Tensor:
    """The size of the part that each channel belongs to."""
    return torch.tensor([size for size in parts(head_dim) for _ in range(size)], dtype=torch.int32, device=device)


@_kept
def norms(head_dim: int, device: torch.device) -> Tensor:
    """1 / sqrt(size) of each channel's part, in fp32."""
    values = [1.0 / math.sqrt(size) for size in parts(head_dim) for _ in range(size)]
    return torch.tensor(values, dtype=torch.float32, device=device)


@_kept
def directions(head_dim: int, device: torch.device) -> Tensor:
    """bf16 (head_dim, head_dim): the rotated direction of each channel, +-1 up to its own sign, 0 outside its part."""
    blocks = [_hadamard(torch.eye(size, dtype=torch.float32, device="cpu")) for size in parts(head_dim)]
    matrix: Tensor = torch.block_diag(*blocks)
    return matrix.bfloat16().to(device)


def rotate(x: Tensor) -> Tensor:
    """The last dimension in the rotated basis, in fp32. Products of rotated rows equal those of the rows, up to
    rounding.

    >>> x = torch.randn(3, 96)
    >>> torch.allclose(rotate(x).square().sum(-1), x.square().sum(-1), rtol=1e-5)
    True
    """
    head_dim = x.shape[-1]
    signed = x.float() * signs(head_dim, x.device)
    pieces = [_hadamard(piece) for piece in signed.split(parts(head_dim), -1)]
    return torch.cat(pieces, -1) * norms(head_dim, x.device)


def _hadamard(x: Tensor) -> Tensor:
    """The unnormalised transform of a last dimension of 2^k."""
    size = x.shape[-1]
    distance = 1
    while distance < size:
        left, right = x.unflatten(-1, (size // (2 * distance), 2, distance)).unbind(-2)
        x = torch.stack((left + right, left - right), -2).flatten(-3)
        distance *= 2
    return x
