"""A few everyday calls: tilewise, torch's SDPA and the plain formula, checked against fp64 and timed in turn."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewise import api
from tilewise.bench.timing import CpuClock, CudaClock, Entrant, describe, race, summarise
from tilewise.errors import InvalidProblem
from tilewise.testing.tolerances import ulp

# Naive attention is left out beyond this: it would measure the allocator.
MOST_SCORE_BYTES = 1 << 30
# Sequences of different lengths, packed without padding.
RAGGED = (1024, 97, 640, 33, 911, 256, 128, 175)

# A result may deviate from fp64 by this many times the error of the formula in its dtype, plus this many ulp.
PLAIN_FACTOR, ULPS = 2.0, 16.0

Call = Callable[[], Tensor]
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One call. `seqlens` packs sequences; `backward` times the gradients instead of the result."""

    name: str
    device: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    backward: bool = False
    seqlens: tuple[int, ...] = ()

    @property
    def work(self) -> tuple[float, str]:
        """What a rate counts: bytes of K and V for one query, else FLOPs (causal: half; backward: 2.5 times)."""
        if self.seqlen_q == 1:
            size = 2 * self.batch * self.num_kv_heads * self.seqlen_k * self.head_dim * self.dtype.itemsize
            return float(size), "B/s"
        pairs = sum(n * n for n in self.seqlens) or self.batch * self.seqlen_q * self.seqlen_k
        factor = (0.5 if self.causal else 1.0) * (2.5 if self.backward else 1.0)
        return 4.0 * self.num_heads * self.head_dim * pairs * factor, "FLOP/s"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one implementation: median and quartiles of a call's seconds, work per second, and the largest
    deviation from fp64. `fault` says why there is no time: it failed, or its result is wrong.
    """

    implementation: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    rate: float | None = None
    error: float | None = None
    fault: str | None = None


def device_of(asked: str) -> str:
    """The GPU if there is one, unless the CPU is requested."""
    if asked not in ("auto", "cpu", "cuda"):
        raise InvalidProblem("--device", "auto, cpu or cuda", repr(asked), "Name one of these.")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InvalidProblem("--device", "a device that is here", "cuda", "Use --device cpu, or another machine.")
    return "cuda" if torch.cuda.is_available() and asked != "cpu" else "cpu"


def cases(device: str) -> tuple[Case, ...]:
    """Sizes that a CPU does in milliseconds, or that fill a GPU."""
    if device == "cuda":
        heads, dim, dtype = 16, 128, torch.bfloat16
        dense = (device, dtype, 4, heads, heads, 4096, 4096, dim)
        decode = Case("decode", device, dtype, 16, 32, 8, 1, 8192, dim)
    else:
        heads, dim, dtype = 8, 64, torch.float32
        dense = (device, dtype, 1, heads, heads, 1024, 1024, dim)
        decode = Case("decode", device, dtype, 1, 32, 8, 1, 8192, 128)
    rows = sum(RAGGED)
    return (
        Case("forward", *dense),
        Case("forward-causal", *dense, causal=True),
        Case("causal-fp16", device, torch.float16, *dense[2:], causal=True),
        Case("backward", *dense, backward=True),
        Case("backward-causal", *dense, causal=True, backward=True),
        decode,
        Case("packed-causal", device, dtype, 1, heads, heads, rows, rows, dim, causal=True, seqlens=RAGGED),
    )


def select(found: Sequence[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """The cases whose name contains one of the patterns, or matches one with `*` and `?`; all without a pattern."""
    chosen = tuple(c for c in found if not only or any(fnmatch.fnmatchcase(c.name, f"*{p}*") for p in only))
    if not chosen:
        expected = "a part of a case's name: " + ", ".join(c.name for c in found)
        raise InvalidProblem("--only", expected, ", ".join(only), "See --list.")
    return chosen


@contextlib.contextmanager
def threads_of(wanted: int | None) -> Iterator[int]:
    """Sets torch's threads for a run and restores them afterwards."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def run(case: Case, seconds: float) -> list[Measured]:
    """Check every implementation, then time the correct ones in turn for about `seconds` in all."""
    found: dict[str, Measured] = {}
    entrants = []
    with torch.set_grad_enabled(case.backward):
        q, k, v, dout = _inputs(case)
        check = _Check(case, q, k, v, dout)
        for name, prepare in IMPLEMENTATIONS.items():
            try:
                call = prepare(case, q, k, v)
                if call is None:
                    continue
                error, complaint = check(_computed(case, call, (q, k, v), dout))
                entrants.append(Entrant(name, _repeater(_work(case, call, (q, k, v), dout))))
                found[name] = Measured(name, error=error, fault=complaint)
            except Exception as problem:  # a failure is reported, the others go on
                found[name] = Measured(name, fault=describe(problem))
        right = [entrant for entrant in entrants if found[entrant.name].fault is None]
        race(right, CudaClock() if case.device == "cuda" else CpuClock(), seconds)
    return [*(found | {e.name: _timed(case, e, found[e.name].error) for e in right}).values()]


def _timed(case: Case, entrant: Entrant, error: float | None) -> Measured:
    if entrant.failure is not None:
        return Measured(entrant.name, error=error, fault=entrant.failure)
    summary = summarise(entrant)
    return Measured(entrant.name, summary.median, summary.low, summary.high, case.work[0] / summary.median, error)


def _inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k, v and the gradient of the result: heads first, or packed with tokens first."""
    generator = torch.Generator(case.device).manual_seed(0)

    def normal(heads: int, rows: int) -> Tensor:
        shape = (rows, heads, case.head_dim) if case.seqlens else (case.batch, heads, rows, case.head_dim)
        return torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32).to(case.dtype)

    q, dout = (normal(case.num_heads, case.seqlen_q) for _ in range(2))
    k, v = (normal(case.num_kv_heads, case.seqlen_k) for _ in range(2))
    q, k, v = (t.requires_grad_(case.backward) for t in (q, k, v))
    return q, k, v, dout


def _tilewise(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if not case.seqlens:
        return lambda: api.attention(q, k, v, causal=case.causal)
    cu, longest = torch.tensor((0, *case.seqlens)).cumsum(0).to(case.device, torch.int32), max(case.seqlens)
    return lambda: api.attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=case.causal)


def _sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Packed sequences are padded to the longest and masked; the padding itself is not timed."""
    gqa = case.num_heads != case.num_kv_heads
    if not case.seqlens:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)
    rows_q, rows_k, rows_v = (
        torch.nn.utils.rnn.pad_sequence(list(t.split(list(case.seqlens))), batch_first=True).transpose(1, 2)
        for t in (q, k, v)
    )
    keys = torch.arange(max(case.seqlens), device=case.device)
    mask = keys < torch.tensor(case.seqlens, device=case.device)[:, None, None, None]
    mask = mask & (keys <= keys[:, None]) if case.causal else mask
    return lambda: scaled_dot_product_attention(rows_q, rows_k, rows_v, attn_mask=mask, enable_gqa=gqa)


def _naive(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """The formula as written, if its score matrices fit and torch is not slow at products of that dtype."""
    score_bytes = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k * case.dtype.itemsize
    slow = case.device == "cpu" and case.dtype != torch.float32
    if case.seqlens or slow or score_bytes > MOST_SCORE_BYTES:
        return None
    return lambda: formula(q, k, v, case.causal)


IMPLEMENTATIONS: Mapping[str, Callable[[Case, Tensor, Tensor, Tensor], Call | None]] = {
    "tilewise": _tilewise,
    "torch": _sdpa,
    "naive": _naive,
}


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with the whole score matrix."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.mT
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    return torch.softmax(s, -1) @ v


def _computed(case: Case, call: Call, leaves: Tensors, dout: Tensor) -> tuple[Tensor, ...]:
    """The result, or the gradients if the case times those."""
    out = call()
    return torch.autograd.grad(out, leaves, dout) if case.backward else (out,)


def _work(case: Case, call: Call, leaves: Tensors, dout: Tensor) -> Callable[[], object]:
    """The timed function: the call, or the backward of a result made here."""
    if not case.backward:
        return call
    out = call()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _repeater(work: Callable[[], object]) -> Callable[[int], Callable[[], object]]:
    def batch_of(calls: int) -> Callable[[], object]:
        def batch() -> None:
            for _ in range(calls):
                work()

        return batch

    return batch_of


class _Check:
    """The first sequence and its first K/V head, with all queries that share it, against the formula in fp64."""

    def __init__(self, case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self.case = case
        self.expected = self._by_formula(torch.float64, q, k, v, dout)
        plain = self._by_formula(case.dtype, q, k, v, dout)
        self.allowed = [
            PLAIN_FACTOR * _largest(p.double() - e) + ULPS * ulp(_largest(e), case.dtype)
            for p, e in zip(plain, self.expected, strict=True)
        ]

    def __call__(self, results: tuple[Tensor, ...]) -> tuple[float, str | None]:
        """The largest deviation, and what is wrong if one is too large."""
        errors = [_largest(self._part(r).double() - e) for r, e in zip(results, self.expected, strict=True)]
        wrong = [f"{e:.1e} (allowed {a:.1e})" for e, a in zip(errors, self.allowed, strict=True) if not e <= a]
        return max(errors), f"wrong: deviates from fp64 by {', '.join(wrong)}" if wrong else None

    def _by_formula(self, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, dout = (self._part(t).to(dtype) for t in tensors)
        q, k, v = (t.requires_grad_(self.case.backward) for t in (q, k, v))
        return _computed(self.case, lambda: formula(q, k, v, self.case.causal), (q, k, v), dout)

    def _part(self, tensor: Tensor) -> Tensor:
        """Heads first; a packed tensor has three dimensions, the longest sequence is its first."""
        tensor = tensor.detach()
        if tensor.ndim == 3:
            tensor = tensor[: self.case.seqlens[0]].transpose(0, 1)[None]
        kv_heads = self.case.num_kv_heads
        return tensor[:1, : max(1, tensor.shape[1] // kv_heads)].clone()


def _largest(values: Tensor) -> float:
    """NaN if there is one: a comparison with it fails."""
    return float(values.abs().max())
