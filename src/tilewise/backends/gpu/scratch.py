"""Memory that a stream keeps: what one kernel writes and nobody reads after it need not be made in every call.

Kernels on one stream follow each other, so all of them may use the same bytes, even if several threads queue them; what
one kernel hands to the next may not lie there. A call that is captured in a CUDA graph gets memory of its own: graphs
may be replayed side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.lasting import outside_pools

__all__ = ["MAX_KEPT", "kept_by_stream", "made_anew"]

# An allocation takes 1.3 to 2 us; a kernel that writes more bytes than this takes several times as long.
MAX_KEPT = 8 << 20
# Where parts begin: as good as what a caching allocator hands out.
STEP = 256


def kept_by_stream(sizes: Sequence[int], index: int, stream: int) -> list[Tensor]:
    """So many bytes each, on the device `index`, whose current stream this is; the same ones for every caller."""
    if not sizes:
        return []
    padded = [-(-size // STEP) * STEP for size in sizes]
    kept = _kept_on(index)
    memory = kept.get(stream)
    if memory is None or memory.shape[0] < sum(padded):
        # What is replaced was made on this stream, so it is handed out anew only behind the kernels that use it.
        size = 1 << (sum(padded) - 1).bit_length()
        memory = kept[stream] = outside_pools(lambda: _bytes(size, index), _device(index))
    return [part[:size] for part, size in zip(memory[: sum(padded)].split(padded), sizes, strict=True)]


def made_anew(sizes: Sequence[int], index: int) -> list[Tensor]:
    """So many bytes each, for this caller alone."""
    return [_bytes(size, index) for size in sizes]


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _bytes(size: int, index: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=_device(index))


@functools.cache
def _kept_on(index: int) -> dict[int, Tensor]:
    """By stream; any thread may add."""
    del index
    return {}
