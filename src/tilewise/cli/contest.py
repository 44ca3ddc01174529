"""The comparison that `demo` runs: one problem size after another, naive against tiled, measured the same way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.backends.reference.tiled import fa2
from tilewise.bench.memory import peak_extra_memory
from tilewise.cli.measure import LEAST_CALLS, TIMING_SECONDS, best_seconds
from tilewise.masks import Band
from tilewise.plan import explain

__all__ = ["TEXTBOOK", "Limits", "Measurement", "Round", "implementation", "play", "steps"]

TEXTBOOK = "textbook"
SMALLEST = 256
# Rows of each head that are compared with fp64; all of them up to this many tokens.
CHECKED_ROWS = 256
# Time and memory of naive attention grow with the square of N, and a little more once it leaves the caches.
GROWTH = 4.5

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the comparison: longest sequence, total seconds, and seconds and bytes for naive attention."""

    max_seqlen: int
    seconds: float
    naive_seconds: float
    naive_memory: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One implementation at one size: best time, memory beyond the inputs, largest deviation from fp64."""

    seconds: float
    extra_memory: int
    error: float


@dataclass(frozen=True, slots=True)
class Round:
    """One size. Naive attention is None if it would exceed the limits; `naive_needs` says what it would take."""

    seqlen: int
    causal: bool
    naive: Measurement | None
    tiled: Measurement
    naive_needs: int


def implementation(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    """What runs for tilewise: the backend that a plain call gets, or the textbook if only the reference takes it."""
    batch, heads, head_dim = shape
    q = torch.empty(batch, heads, SMALLEST, head_dim, dtype=dtype, device="meta")
    backend = explain(q, q, q, device=torch.device("cpu")).backend
    return TEXTBOOK if backend in (None, "reference") else str(backend)


def steps(limits: Limits) -> int:
    """The maximum number of measurements."""
    return 1 + 4 * len(_seqlens(limits))


def play(
    shape: tuple[int, int, int], dtype: torch.dtype, player: str, limits: Limits, announce: Callable[[str], None]
) -> Iterator[Round]:
    """Rounds of growing length, full and causal, until naive attention has exceeded the limits for one length."""
    deadline = time.monotonic() + limits.seconds
    tiled = _textbook if player == TEXTBOOK else _library
    announce("first call (compiles where needed)")
    for causal in (False, True):
        tiled(*_inputs(shape, SMALLEST, dtype), causal)
    before: dict[bool, Round] = {}
    with torch.no_grad():
        for seqlen in _seqlens(limits):
            if before and _expected(before.values(), limits) > deadline - time.monotonic():
                return
            for causal in (False, True):
                q, k, v = _inputs(shape, seqlen, dtype)
                needs = explain(q, k, v, causal=causal).naive.extra_memory
                naive = None
                if _sensible(before.get(causal), needs, limits):
                    announce(f"naive attention, {seqlen} tokens")
                    naive = _measure(_naive, q, k, v, causal)
                announce(f"tilewise ({player}), {seqlen} tokens")
                before[causal] = Round(seqlen, causal, naive, _measure(tiled, q, k, v, causal), needs)
                yield before[causal]
            if all(played.naive is None for played in before.values()):
                return


def _seqlens(limits: Limits) -> list[int]:
    count = max(0, int(math.log2(max(1, limits.max_seqlen) / SMALLEST))) + 1
    return [SMALLEST << index for index in range(count)]


def _expected(last: Iterable[Round], limits: Limits) -> float:
    """Estimated seconds of the next length, from the last one; its score matrices are four times as large."""
    calls = [played.tiled.seconds for played in last]
    calls += [p.naive.seconds for p in last if p.naive and _sensible(p, 4 * p.naive_needs, limits)]
    return sum(max(LEAST_CALLS * GROWTH * seconds, TIMING_SECONDS) + GROWTH * seconds for seconds in calls)


def _sensible(last: Round | None, needs: int, limits: Limits) -> bool:
    if last is None:
        return True
    if last.naive is None or needs > limits.naive_memory:
        return False
    return GROWTH * last.naive.seconds <= limits.naive_seconds


def _inputs(shape: tuple[int, int, int], seqlen: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seqlen)
    q, k, v = (torch.randn(batch, heads, seqlen, head_dim, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


def _naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula as written: the whole score matrix, its softmax, and their product with v."""
    s = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu_(1), -math.inf)
    return torch.softmax(s, -1) @ v


def _library(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = attention(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


def _textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = torch.empty_like(q)
    band = Band(q.shape[2], k.shape[2], None, 0 if causal else None)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            out[batch, head] = fa2(q[batch, head], k[batch, head], v[batch, head], band=band)[0]
    return out


def _measure(compute: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Measurement:
    seconds = best_seconds(lambda: compute(q, k, v, causal))
    kept: list[Tensor] = []
    memory = peak_extra_memory(lambda: kept.append(compute(q, k, v, causal)))
    return Measurement(seconds, memory, _error(kept[0], q, k, v, causal))


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Largest deviation from the fp64 specification over up to CHECKED_ROWS rows, spread from the first to the last."""
    seqlen = q.shape[2]
    rows = torch.linspace(0, seqlen - 1, min(seqlen, CHECKED_ROWS)).round().long()
    visible = torch.arange(seqlen)[None, :] <= rows[:, None] if causal else None
    exact = attention(q[:, :, rows].double(), k.double(), v.double(), mask=visible, backend="reference")
    assert isinstance(exact, Tensor)
    return float((out[:, :, rows].double() - exact).abs().max())
