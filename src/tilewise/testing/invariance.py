"""Checks bit by bit that a sequence's results do not depend on its batch: `deterministic="batch"`."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import api
from tilewise.testing.conformance import same_bits

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
# Query rows of a sequence in calls that are not decoding.
MOST_QUERIES = 96


class Sequences(NamedTuple):
    """Sequences of some numbers of keys. `kind` is a kind of problem; in pages also "decode" for one query a sequence,
    or "mixed" for one query in every second sequence.
    """

    kind: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    page_size: int = 16
    device: str = "cpu"
    head_dim: int = HEAD_DIM


class _Sequence(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def check_invariant(sequences: Sequences, rounds: int, *, planted: bool = False, **flags: Any) -> None:
    """Raise AssertionError unless each sequence has the same bits alone and in random batches.

    Dense sequences all have the last length. `planted` scales a sequence by its place in the batch, for testing this
    function.
    """
    draw = random.Random(0)
    drawn = [_drawn(sequences, number) for number in range(len(sequences.lengths))]
    alone = [_attend(sequences, drawn, [number], planted, flags)[0] for number in range(len(drawn))]
    for _ in range(rounds):
        batch = [draw.randrange(len(drawn)) for _ in range(draw.randint(2, 9))]
        for (out, lse), number in zip(_attend(sequences, drawn, batch, planted, flags), batch, strict=True):
            if not (same_bits(out, alone[number][0]) and same_bits(lse, alone[number][1])):
                raise AssertionError(f"sequence {number} has other bits in the batch {batch} of {sequences} {flags}")


def _drawn(sequences: Sequences, number: int) -> _Sequence:
    generator = torch.Generator().manual_seed(number)
    keys = sequences.lengths[-1 if sequences.kind == "dense" else number]
    decodes = sequences.kind == "decode" or (sequences.kind == "mixed" and number % 2 == 0)
    queries = 1 if decodes else min(keys, MOST_QUERIES)

    def rows(count: int, heads: int) -> Tensor:
        made = torch.randn(count, heads, sequences.head_dim, generator=generator)
        return made.to(sequences.device, sequences.dtype)

    return _Sequence(rows(queries, NUM_HEADS), rows(keys, NUM_KV_HEADS), rows(keys, NUM_KV_HEADS))


def _attend(
    sequences: Sequences, drawn: list[_Sequence], batch: list[int], planted: bool, flags: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each sequence of a batch, (queries, heads, dim) and (heads, queries)."""
    chosen = [drawn[number] for number in batch]
    if planted:
        chosen = [one._replace(q=one.q * (1 + place)) for place, one in enumerate(chosen)]
    given: dict[str, Any] = {"deterministic": "batch", "return_lse": True, **flags}
    longest = max(len(one.k) for one in drawn)
    if sequences.kind == "dense":
        q, k, v = (torch.stack([one[i].transpose(0, 1) for one in chosen]) for i in range(3))
        out, lse = api.attention(q, k, v, **given)
        return [(o.transpose(0, 1), rows) for o, rows in zip(out, lse, strict=True)]
    queries = [len(one.q) for one in chosen]
    q = torch.cat([one.q for one in chosen])
    if sequences.kind == "varlen":
        k, v = (torch.cat([one[i] for one in chosen]) for i in (1, 2))
        totals = (_totals(queries, q), _totals([len(one.k) for one in chosen], q))
        out, lse = api.attention_varlen(q, k, v, *totals, max_seqlen_q=MOST_QUERIES, max_seqlen_k=longest, **given)
    else:
        k, v, table, lengths = _paged(sequences, chosen, longest)
        if sequences.kind != "decode":
            given |= {"cu_seqlens_q": _totals(queries, q), "max_seqlen_q": MOST_QUERIES}
        out, lse = api.attention_paged(q, k, v, table, lengths, **given)
    return list(zip(out.split(queries), lse.split(queries, 1), strict=True))


def _totals(lengths: list[int], like: Tensor) -> Tensor:
    totals = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    return torch.tensor(totals, dtype=torch.int32, device=like.device)


def _paged(sequences: Sequences, chosen: list[_Sequence], longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pages in another order in every batch; the rest of them is NaN."""
    size = sequences.page_size
    counts = [-(-len(one.k) // size) for one in chosen]
    width, device = -(-longest // size), sequences.device
    shape = (sum(counts) + 1, size, NUM_KV_HEADS, sequences.head_dim)
    pages = [torch.full(shape, torch.nan, dtype=sequences.dtype, device=device) for _ in range(2)]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(len(chosen))).tolist()
    table = torch.zeros(len(chosen), width, dtype=torch.int32)
    for place, one in enumerate(chosen):
        for column in range(counts[place]):
            table[place, column] = page = order.pop()
            for stored, rows in zip(pages, one[1:], strict=True):
                part = rows[column * size : (column + 1) * size]
                stored[page, : len(part)] = part
    lengths = torch.tensor([len(one.k) for one in chosen], dtype=torch.int32, device=device)
    return pages[0], pages[1], table.to(device), lengths
