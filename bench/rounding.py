"""Rounding: the error of out, dq, dk and dv against fp64, over that of FlashAttention 2 (in torch's SDPA), on a GPU.

    PYTHONPATH=src:bench python3 bench/rounding.py [--backends hopper triton] [--scores NAME ...] [--json FILE]

Real heads have sinks, peaks and scores far apart; where one key takes nearly all of a row, its P must be exactly 1. For
each kind of scores the root mean square of ours is divided by FlashAttention 2's. The bars: at most 1.15 for normal
scores, sinks and peaks, 1.5 for the others; where FlashAttention 2 is below 1e-6, ours is below 1e-5.

Layouts: dense; grouped heads; packed sequences of three lengths; a prompt from pages; one query token from pages.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention

import tilewise as tw
from suite.inputs import SCORES
from suite.measuring import store

STRICT = ("normal", "sink20", "sink40", "sink60", "late sink20", "late sink40", "late sink60", "diagonal")
LOOSE = ("spread4", "spread16", "growing", "outliers", "smooth")
BARS = dict.fromkeys(STRICT, 1.15) | dict.fromkeys(LOOSE, 1.5)
# Where FlashAttention 2 has less than the first, ours has less than the second.
NOTHING, LITTLE = 1e-6, 1e-5
PAGE = 64
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One layout, type, head_dim and mask; `lengths` are those of its sequences."""

    layout: str
    head_dim: int
    lengths: tuple[int, ...]
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (4, 4)

    @property
    def has_gradients(self) -> bool:
        """Pages are read, not trained through."""
        return self.layout in ("dense", "packed")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mask = "causal" if self.causal else "full"
        heads = "x".join(map(str, self.heads))
        return f"{self.layout} {dtype} d{self.head_dim} n{max(self.lengths)} {mask} heads {heads}"


def cases() -> Iterator[Case]:
    """All layouts."""
    for head_dim in (64, 128, 256):
        for lengths, causal in (((512,), False), ((4096,), True)):
            yield Case("dense", head_dim, lengths, causal)
            yield Case("dense", head_dim, lengths, causal, torch.float16)
            yield Case("dense", head_dim, lengths, causal, heads=(8, 2))
        for causal in (False, True):
            yield Case("packed", head_dim, (700, 2048, 129), causal)
            yield Case("pages", head_dim, (700, 2048, 129), causal)
        yield Case("decode", head_dim, (700, 4096, 129), causal=True, heads=(8, 2))
        yield Case("decode", head_dim, (4096,), causal=True)


def scores(kind: str, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same q and k (1, heads, seqlen, head_dim), as many heads of both, from normal ones."""
    if kind.startswith(("sink", "late sink")):
        at = 0 if kind.startswith("sink") else k.shape[2] * 3 // 5
        nats = float(kind[-2:])
        raised = normalize(k[:, :, at : at + 1], dim=-1) * math.sqrt(nats * math.sqrt(k.shape[-1]))
        # Queries that do not see the sink stay as they are: raised, they would have scores far apart.
        sees = torch.arange(q.shape[2], device=q.device) >= (at if causal else 0)
        return q + raised * sees[:, None], torch.cat([k[:, :, :at], raised, k[:, :, at + 1 :]], 2)
    if kind.startswith("spread"):
        return q * math.sqrt(float(kind[6:])), k * math.sqrt(float(kind[6:]))
    if kind == "smooth":
        # Neighbours are alike, as rotated positions make them.
        count = torch.arange(1, k.shape[2] + 1, device=k.device)[:, None].sqrt()
        return 2.0 * q.cumsum(2) / count, 2.0 * k.cumsum(2) / count
    return (q, k) if kind == "normal" else SCORES[kind](q, k)


def sequences(case: Case, kind: str) -> list[tuple[Tensor, ...]]:
    """q, k, v and dout of each sequence, (1, heads, seqlen, head_dim)."""
    draw = torch.Generator("cuda").manual_seed(5)
    heads, kv_heads = case.heads
    found = []
    for length in case.lengths:
        q, k, v, dout = (torch.randn(1, heads, length, case.head_dim, device="cuda", generator=draw) for _ in NAMES)
        # The heads of a group have the same keys, so each of them has this kind of scores.
        k, v = (x[:, : heads // kv_heads * kv_heads : heads // kv_heads] for x in (k, v))
        q, wide = scores(kind, q, k.repeat_interleave(heads // kv_heads, 1), case.causal)
        k = wide[:, :: heads // kv_heads]
        if case.layout == "decode":
            q, dout = q[:, :, -1:], dout[:, :, -1:]
        found.append(tuple(x.to(case.dtype).contiguous() for x in (q, k, v, dout)))
    return found


def results(case: Case, out: Tensor, leaves: tuple[Tensor, ...], dout: Tensor) -> list[Tensor]:
    """Out and, where the layout has them, the gradients, in fp64."""
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype)) if case.has_gradients else ()
    return [x.detach().double() for x in (out, *grads)]


def exact(case: Case, sequence: tuple[Tensor, ...]) -> list[Tensor]:
    """The textbook formula in fp64."""
    q, k, v = (x.double().requires_grad_() for x in sequence[:3])
    groups = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(case.head_dim)
    if case.causal:
        s = s.masked_fill(
            torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1 + s.shape[-1] - s.shape[-2]), -math.inf
        )
    return results(case, s.softmax(-1) @ v.repeat_interleave(groups, 1), (q, k, v), sequence[3])


def flash(case: Case, sequence: tuple[Tensor, ...]) -> list[Tensor]:
    """FlashAttention 2. One query token at the end sees every key."""
    q, k, v = (x.clone().requires_grad_() for x in sequence[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        causal = case.causal and case.layout != "decode"
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return results(case, out, (q, k, v), sequence[3])


def ours(case: Case, given: list[tuple[Tensor, ...]], backend: str) -> list[list[Tensor]]:
    """All sequences in one call; the results of each."""
    if case.layout == "dense":
        q, k, v = (x.clone().requires_grad_() for x in given[0][:3])
        out = tw.attention(q, k, v, causal=case.causal, backend=backend)
        return [results(case, out, (q, k, v), given[0][3])]
    rows = [[x[0].transpose(0, 1) for x in sequence] for sequence in given]
    q, k, v, dout = (torch.cat(parts).contiguous() for parts in zip(*rows, strict=True))
    lengths = torch.tensor([[len(r[0]) for r in rows], [len(r[1]) for r in rows]], device="cuda")
    totals = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
    most: dict[str, Any] = {"max_seqlen_q": int(lengths[0].max())}
    if case.layout == "packed":
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        most["max_seqlen_k"] = int(lengths[1].max())
        out = tw.attention_varlen(q, k, v, totals[0], totals[1], causal=case.causal, backend=backend, **most)
    else:
        (k_pages, v_pages), table = in_pages([(r[1], r[2]) for r in rows])
        queries: dict[str, Any] = {} if case.layout == "decode" else {"cu_seqlens_q": totals[0], **most}
        out = tw.attention_paged(
            q, k_pages, v_pages, table, lengths[1].int(), causal=case.causal, backend=backend, **queries,
        )  # fmt: skip
    joined = results(case, out, (q, k, v), dout)
    sizes = [lengths[0].tolist(), lengths[0].tolist(), lengths[1].tolist(), lengths[1].tolist()]
    parts = [x.split(size) for x, size in zip(joined, sizes, strict=False)]
    return [[part.transpose(0, 1)[None] for part in each] for each in zip(*parts, strict=True)]


def in_pages(rows: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Keys and values of each sequence in pages in random order, and the table. Rows that nobody has are NaN."""
    needed = [-(-len(k) // PAGE) for k, _ in rows]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1))
    table = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    pages = [rows[0][0].new_full((len(order), PAGE, *rows[0][0].shape[1:]), math.nan) for _ in range(2)]
    for index, (both, mine) in enumerate(zip(rows, order.split(needed), strict=True)):
        table[index, : len(mine)] = mine
        for page, x in zip(pages, both, strict=True):
            filled = x.new_full((len(mine) * PAGE, *x.shape[1:]), math.nan)
            filled[: len(x)] = x
            page[mine.to(x.device)] = filled.view(-1, PAGE, *x.shape[1:])
    return pages, table.to(rows[0][0].device)


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """Root mean square over all sequences."""
    return float(torch.cat([(g - w).flatten() for g, w in zip(got, want, strict=True)]).pow(2).mean().sqrt())


def judged(case: Case, kind: str, backends: list[str]) -> Iterator[dict[str, Any]]:
    """One record a backend: our error, FlashAttention 2's, and the ratios that miss their bar."""
    given = sequences(case, kind)
    want, peer = ([f(case, s) for s in given] for f in (exact, flash))
    for backend in backends:
        got = ours(case, given, backend)
        record: dict[str, Any] = {"case": str(case), "scores": kind, "backend": backend, "missed": []}
        for index, name in enumerate(NAMES[: len(got[0])]):
            mine, theirs = (error([x[index] for x in y], [x[index] for x in want]) for y in (got, peer))
            record[name] = [float(f"{mine:.3g}"), float(f"{theirs:.3g}")]
            good = mine <= LITTLE if theirs < NOTHING else mine <= BARS[kind] * theirs
            if not good:
                record["missed"].append(name)
        yield record


def largest(records: list[dict[str, Any]]) -> float:
    """The largest ratio of errors; those of FlashAttention 2 that are next to nothing do not count."""
    errors = [r[name] for r in records for name in NAMES if name in r]
    return max((mine / theirs for mine, theirs in errors if theirs >= NOTHING), default=0.0)


def main() -> None:
    """Print the largest ratio of each case, and everything that misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    parser.add_argument("--scores", nargs="+", default=list(BARS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    records = []
    for case in cases():
        found = [r for kind in args.scores for r in judged(case, kind, args.backends)]
        for backend in args.backends:
            mine = [r for r in found if r["backend"] == backend]
            worst = [largest([r for r in mine if r["scores"] in kinds]) for kinds in (STRICT, LOOSE)]
            missed = [(r["scores"], n, *r[n]) for r in mine for n in r["missed"]]
            print(f"{case!s:52} {backend:7} strict {worst[0]:5.2f} others {worst[1]:5.2f}", missed or "", flush=True)
        records += found
    if args.json:
        store(args.json, "root mean square of the error against fp64: ours, FlashAttention 2's", records=records)


if __name__ == "__main__":
    main()
