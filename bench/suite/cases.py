"""What is measured: a case is one problem with its peers and the bars it has to clear."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tilewise.errors import InvalidProblem
from tilewise.masks import Band

__all__ = ["Bar", "Case", "Measure", "select"]

Measure = Literal["forward", "backward", "overhead", "memory", "first-call"]
Metric = Literal["flops", "bytes", "seconds", "memory"]

# The backward pass has five matrix products where the forward has two.
BACKWARD_OVER_FORWARD = 2.5


@dataclass(frozen=True, slots=True)
class Bar:
    """What an implementation (`subject`) must reach in a case.

    With `against`: its speed over that of the fastest of these, at least `limit` (in a memory case: times less memory).
    With `case`: its own figure there, compared `by` "speed" (time) or "rate" (work per second), at least `limit`.
    With neither: its figure `by` "seconds" or "bytes", at most `limit`, or `by` "rate", at least `limit`.

    `machine` restricts the bar to devices whose name contains it: absolute rates make sense on one chip only.
    """

    subject: str
    limit: float
    against: tuple[str, ...] = ()
    case: str | None = None
    by: Literal["speed", "rate", "seconds", "bytes"] = "speed"
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, what to measure of it, and whom; docs/benchmarks.md says how FLOPs and bytes are counted."""

    name: str
    group: str
    measure: Measure
    device: Literal["cpu", "cuda"]
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    kind: Literal["dense", "varlen", "paged"] = "dense"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    page_size: int = 0
    # Keys at the start that all sequences of a paged batch share.
    shared_keys: int = 0
    # K and V have values that e4m3 holds, so that pages in it stand for the same numbers; of dense tensors Q, too.
    e4m3_values: bool = False
    # What the scores look like: "normal", or a kind of inputs.SCORES.
    scores: str = "normal"
    # A forward whose host time is taken with gradients to come, as in training.
    recorded: bool = False
    seqlens: tuple[int, ...] = ()
    # Launched from a CUDA graph, so that the host does not count.
    graph: bool = False
    # Kernels are compiled into an empty cache first (for "first-call").
    cold: bool = False
    quick: bool = False
    implementations: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def needs_grad(self) -> bool:
        """Inputs require gradients: always for the backward, and for a forward of training."""
        training = self.device == "cuda" and self.measure == "forward" and self.metric == "flops" and not self.graph
        return self.measure == "backward" or training or self.recorded

    @property
    def metric(self) -> Metric:
        """What the figure is: work per second, bytes of K and V per second, seconds, or bytes of memory."""
        if self.measure in ("overhead", "first-call"):
            return "seconds"
        if self.measure == "memory":
            return "memory"
        return "bytes" if self.seqlen_q == 1 else "flops"

    @property
    def pairs(self) -> float:
        """Visible pairs of query and key over the batch; causal counts as exactly half, a window as it is."""
        lengths = self.seqlens or (self.seqlen_q,) * self.batch
        keys = self.seqlens or (self.seqlen_k,) * self.batch
        if self.window is not None:
            return float(sum(self.band(m, n).count_pairs() for m, n in zip(lengths, keys, strict=True)))
        return sum(map(math.prod, zip(lengths, keys, strict=True))) * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        """Two products of 2 D FLOPs per pair and head, two and a half times that for the backward."""
        factor = BACKWARD_OVER_FORWARD if self.measure == "backward" else 1.0
        return 4.0 * self.num_heads * self.head_dim * self.pairs * factor

    @property
    def kv_bytes(self) -> float:
        """K and V of every sequence, each read once: keys that sequences share are counted for each of them."""
        return 2.0 * self.batch * self.num_kv_heads * self.seqlen_k * self.head_dim * self.torch_dtype.itemsize

    @property
    def score_bytes(self) -> int:
        """One score matrix for every head, in the dtype: what materialised attention writes and reads."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * self.torch_dtype.itemsize

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        """The visible part of one sequence's score matrix."""
        left, right = self.window or (None, None)
        return Band(seqlen_q, seqlen_k, left, 0 if self.causal else right)

    def rate(self, seconds: float) -> float | None:
        """Work per second, or None where the time itself is the figure."""
        work = {"flops": self.flops, "bytes": self.kv_bytes}.get(self.metric)
        return None if work is None else work / seconds


def select(registry: Sequence[Case], only: Iterable[str] = (), *, quick: bool = False) -> tuple[Case, ...]:
    """The cases that fit one of the patterns: a group, a part of the name, or a pattern with `*` and `?`.

    `quick` keeps the short list. Cases that a bar of a chosen one refers to come along.
    """
    patterns, groups = tuple(only), {c.group for c in registry}
    listed = [c for c in registry if c.quick or not quick]
    chosen = [c for c in listed if not patterns or any(_fits(c, pattern, groups) for pattern in patterns)]
    if not chosen:
        expected = "a part of a case's name, or a group: " + ", ".join(sorted(groups))
        raise InvalidProblem("--only", expected, ", ".join(patterns), "See --list.")
    wanted = {c.name for c in chosen} | {bar.case for c in chosen for bar in c.bars}
    return tuple(c for c in registry if c.name in wanted)


def _fits(case: Case, pattern: str, groups: Collection[str]) -> bool:
    if pattern in groups:
        return case.group == pattern
    glob = pattern if any(ch in pattern for ch in "*?[") else f"*{pattern}*"
    return fnmatch.fnmatchcase(case.name, glob)
