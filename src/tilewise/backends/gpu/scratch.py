"""Memory that a stream keeps: what one kernel writes and nobody reads after it need not be made in every call.

Kernels on one stream follow each other, so all of them may use the same bytes, even if several threads queue them. What
one kernel hands to the next lies in bytes of its own with a lock: whoever finds it taken (by a thread that is between
the two kernels) makes memory for itself, so nobody waits. A call that is captured in a CUDA graph gets memory of its
own, too: graphs may be replayed side by side.

What starts kernels at known addresses is remembered by stream, too; `remember` bounds that for all passes together.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.lasting import outside_pools

__all__ = [
    "MAX_KEPT",
    "MAX_STREAMS",
    "STEP",
    "Handed",
    "Places",
    "handed_on",
    "kept_by_stream",
    "made_anew",
    "remember",
]

# An allocation takes 1.3 to 2 us; a kernel that writes more bytes than this takes several times as long.
MAX_KEPT = 8 << 20
# Streams of a device that keep memory: torch hands out 32 of each of two priorities beside the default one, other
# libraries make and destroy theirs.
MAX_STREAMS = 72
# Where parts begin: as good as what a caching allocator hands out.
STEP = 256
# What starts a pass at one set of addresses takes 2.8 KiB of a forward and 6.2 of a backward, a tensor map 0.3: at most
# 50 MiB in all. A caching allocator hands out the same addresses again and again, in training one set for every layer.
MAX_REMEMBERED = 8192

# Addresses, behind the handle of a stream where that matters.
Places = tuple[int, ...]
Remembered = TypeVar("Remembered")


class Handed(NamedTuple):
    """Bytes of a stream through which kernels hand something to the next, and who may use them."""

    parts: list[Tensor]
    lock: threading.Lock


def kept_by_stream(sizes: Sequence[int], index: int, stream: int) -> list[Tensor]:
    """So many bytes each, on the device `index`, whose current stream this is; the same ones for every caller."""
    return _kept("one kernel", sizes, index, stream).parts if sizes else []


def handed_on(sizes: Sequence[int], index: int, stream: int) -> Handed:
    """As `kept_by_stream`, but for those who hold the lock from before their first kernel until after their last."""
    return _kept("several", sizes, index, stream)


def _kept(used_by: str, sizes: Sequence[int], index: int, stream: int) -> Handed:
    padded = [-(-size // STEP) * STEP for size in sizes]
    kept = _kept_on(index, used_by)
    found = kept.get(stream)
    if found is None or found[0].shape[0] < sum(padded):
        # What is replaced was made on this stream, so it is handed out anew only behind the kernels that use it.
        size = 1 << (sum(padded) - 1).bit_length()
        found = kept[stream] = (outside_pools(lambda: _bytes(size, index), _device(index)), threading.Lock())
        for oldest in list(kept)[:-MAX_STREAMS]:
            kept.pop(oldest, None)
            forget(oldest)
    memory, lock = found
    parts = [part[:size] for part, size in zip(memory[: sum(padded)].split(padded), sizes, strict=True)]
    return Handed(parts, lock)


def made_anew(sizes: Sequence[int], index: int) -> list[Tensor]:
    """So many bytes each, for this caller alone."""
    return [_bytes(size, index) for size in sizes]


def remember(known: dict[Places, Remembered], places: Places, value: Remembered) -> None:
    """Keep in `known` what was found for a stream and addresses, until MAX_REMEMBERED others came after it."""
    known[places] = value
    order = _order()
    order.append((known, places))
    while len(order) > MAX_REMEMBERED:
        others, oldest = order.popleft()
        others.pop(oldest, None)


def forget(stream: int) -> None:
    """Drop what was remembered for a stream, and with it the memory it points to."""
    for known, places in _order().copy():
        if places[0] == stream:
            known.pop(places, None)


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def _bytes(size: int, index: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=_device(index))


@functools.cache
def _kept_on(index: int, used_by: str) -> dict[int, tuple[Tensor, threading.Lock]]:
    """By stream, oldest first; any thread may add."""
    del index, used_by
    return {}


@functools.cache
def _order() -> deque[tuple[dict[Places, Any], Places]]:
    """What is remembered and where, oldest first; any thread may add."""
    return deque()
