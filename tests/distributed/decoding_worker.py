"""What every rank runs for decoding from pages that are dealt out, compared with one device that has all pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from behaviour import difference, raises
from outcomes import outcomes_of
from torch import Tensor

import tilewise as tw
from tilewise import fp8
from tilewise.distributed import context_parallel_decode, local_seqlens, local_slots
from tilewise.distributed.transport import PeerFailure
from tilewise.kv import append_rotated, rotary_table

HEADS, KV_HEADS, DIM, DIM_V, PAGE_SIZE = 6, 2, 16, 24, 4
# Empty sequences, ranks without keys, pages that just end, and one sequence that is long.
LENGTHS = [0, 1, 3, 4, 5, 8, 12, 13, 40, 129]
# Untyped: much of what is passed here is wrong on purpose.
decode: Any = context_parallel_decode
alone: Any = tw.attention_paged
append: Any = append_rotated


class Whole:
    """A batch in the pages of one device, and the part of this rank; pages lie in another order on every rank."""

    def __init__(self, lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float32, group: Any = None) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        draw = torch.Generator().manual_seed(1)
        self.seqlens = torch.tensor(lengths, dtype=torch.int32)
        width = -(-max(lengths) // PAGE_SIZE) + 1
        count = len(lengths) * width
        self.pages = [torch.randn(count, PAGE_SIZE, KV_HEADS, d, generator=draw).to(dtype) for d in (DIM, DIM_V)]
        self.table = torch.randperm(count, generator=draw).view(len(lengths), width).int()
        self.q = torch.randn(len(lengths), HEADS, DIM, generator=draw).to(dtype)
        # NaN in everything that this rank does not have.
        local = -(-width // self.world)
        order = torch.randperm(len(lengths) * local, generator=torch.Generator().manual_seed(self.rank))
        self.local_table = order.view(len(lengths), local).int()
        self.local_pages = [torch.full((len(order), *p.shape[1:]), torch.nan, dtype=dtype) for p in self.pages]
        for sequence, length in enumerate(lengths):
            for position in range(length):
                page, place = divmod(position, PAGE_SIZE)
                if page % self.world == self.rank:
                    for mine, all_of_them in zip(self.local_pages, self.pages, strict=True):
                        target = int(self.local_table[sequence, page // self.world])
                        mine[target, place] = all_of_them[int(self.table[sequence, page]), place]

    def check(self, q: Tensor | None = None, **flags: Any) -> None:
        q = self.q if q is None else q
        given = {"causal": True} | flags
        whole = alone(q, *self.pages, self.table, self.seqlens, return_lse=True, **given)
        mine = decode(q, *self.local_pages, self.local_table, self.seqlens, return_lse=True, **flags)
        close = 2e-2 if q.dtype == torch.bfloat16 else 5e-6
        for a, b in zip(mine, whole, strict=True):
            torch.testing.assert_close(a, b, atol=close, rtol=close)
        everywhere = [torch.empty_like(mine[0]) for _ in range(self.world)]
        dist.all_gather(everywhere, mine[0].contiguous())
        assert all(torch.equal(part, mine[0]) for part in everywhere), "every rank has the same bits"


def checks(world: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks, by name, in the same order on every rank."""
    yield "slots of tokens", slots_of_tokens
    yield "lengths and slots", lengths_and_slots
    for name, flags in FLAGS.items():
        yield f"one query, {name}", lambda flags=flags: Whole().check(**flags)  # type: ignore[misc]
        yield f"drafts, {name}", lambda flags=flags: drafts(**flags)  # type: ignore[misc]
    yield "bf16", lambda: Whole(dtype=torch.bfloat16).check()
    yield "ranks without a key", lambda: Whole([1, 0, 2]).check(sinks=FLAGS["sinks"]["sinks"])
    yield "no sequence", no_sequence
    yield "e4m3 pages", e4m3_pages
    yield "a growing batch", growing
    yield "bad arguments", bad_arguments
    if world > 1:
        yield "disagreement", disagreement
        yield "a rank with bad arguments", one_bad_rank
        yield "a call that one rank refuses", refused_alone
    if world == 3:
        yield "a sub-group", sub_group


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window": (9, 0)},
    "short window": {"window": (0, 0)},
    "long window": {"window": (1000, None)},
    "window to both sides": {"window": (6, 2), "causal": False},
    "window to the left": {"window": (17, None), "causal": False},
    "softcap and scale": {"softcap": 3.0, "scale": 0.7},
    "sinks": {"sinks": torch.linspace(-2, 4, HEADS), "window": (5, 0)},
}


def lengths_and_slots() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    owned = [[p for p in range(n) if p // PAGE_SIZE % world == rank] for n in range(60)]
    assert local_seqlens(torch.arange(60), PAGE_SIZE).tolist() == [len(some) for some in owned]
    table = torch.tensor([[5, 2, 9] + [0] * 20])
    slots = local_slots(
        table, torch.arange(12 * world), PAGE_SIZE, sequences=torch.zeros(12 * world, dtype=torch.int64)
    )
    want = [[5, 2, 9][p // PAGE_SIZE // world] * PAGE_SIZE + p % PAGE_SIZE for p in range(12 * world)]
    mine = [w if p // PAGE_SIZE % world == rank else -1 for p, w in enumerate(want)]
    assert slots.tolist() == mine
    assert slots.dtype == torch.int64


def drafts(**flags: Any) -> None:
    """Up to five queries a sequence, none, and rows past the last one."""
    whole = Whole()
    counts = torch.tensor([0, 1, 2, 3, 0, 5, 1, 4, 5, 2])
    totals = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    q = torch.randn(int(totals[-1]) + 2, HEADS, DIM, generator=torch.Generator().manual_seed(5))
    whole.check(q, cu_seqlens_q=totals, **flags)


def no_sequence() -> None:
    none = torch.empty(0, dtype=torch.int32)
    pages = torch.zeros(2, 3, PAGE_SIZE, KV_HEADS, DIM)
    out = decode(torch.empty(0, HEADS, DIM), *pages, torch.empty(0, 2, dtype=torch.int32), none)
    assert out.shape == (0, HEADS, DIM)
    odd = pages[..., :5].bfloat16()
    lengths, totals, table = (torch.zeros(n, dtype=torch.int32) for n in (1, 2, 1))
    assert decode(odd[0, 0, :0].repeat(1, 2, 1), *odd, table[None], lengths, cu_seqlens_q=totals).shape[0] == 0


def e4m3_pages() -> None:
    whole = Whole()
    made = []
    for pages in (whole.pages, whole.local_pages):
        scale = torch.full((len(pages[0]), KV_HEADS, 1), 0.02)
        codes = [(p.nan_to_num() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn) for p in pages]
        made.append([fp8.Fp8Tensor(c, scale, "page", "paged") for c in codes])
    q = whole.q.bfloat16()
    want = alone(q, *made[0], whole.table, whole.seqlens)
    got = decode(q, *made[1], whole.local_table, whole.seqlens)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def growing() -> None:
    """Prompts and then tokens one by one, each rank writing what is its own."""
    draw = torch.Generator().manual_seed(7)
    world, batch, width = dist.get_world_size(), 3, 8
    lengths, turns = torch.tensor([2, 9, 0]), rotary_table(100, DIM, device="cpu")
    pages = torch.full((2, batch * width, PAGE_SIZE, KV_HEADS, DIM), torch.nan)
    local = torch.full((2, batch * width, PAGE_SIZE, KV_HEADS, DIM), torch.nan)
    table = torch.arange(batch * width).view(batch, width)
    local_table = table[:, : -(-width // world)]
    for step in range(12):
        counts = lengths if step == 0 else torch.tensor([1, 1, 1])
        before = torch.zeros_like(lengths) if step == 0 else lengths
        lengths = before + counts
        sequences = torch.repeat_interleave(torch.arange(batch), counts)
        positions = torch.cat([torch.arange(a, b) for a, b in zip(before.tolist(), lengths.tolist(), strict=True)])
        q, k, v = (torch.randn(len(positions), n, DIM, generator=draw) for n in (HEADS, KV_HEADS, KV_HEADS))
        slots = table[sequences, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        append(q, k, v, *pages, slots, positions, turns)
        mine = local_slots(local_table, positions, PAGE_SIZE, sequences=sequences)
        turned = append(q, k, v, *local, mine, positions, turns)
        totals = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        flags = {"cu_seqlens_q": totals}
        want = alone(turned, *pages, table.int(), lengths.int(), causal=True, **flags)
        got = decode(turned, *local, local_table.int(), lengths.int(), **flags)
        torch.testing.assert_close(got, want, atol=5e-6, rtol=5e-6)


def bad_arguments() -> None:
    """The same mistake on every rank."""
    whole = Whole()
    good = (whole.q, *whole.local_pages, whole.local_table, whole.seqlens)
    raises(tw.InvalidProblem, "one row for each", lambda: decode(whole.q[:3], *good[1:]))
    raises(tw.InvalidProblem, "block_table", lambda: decode(*good[:3], whole.local_table[:3], whole.seqlens))
    raises(tw.InvalidProblem, "seqlens_k", lambda: decode(*good[:3], whole.local_table[:, :1], whole.seqlens))
    raises(tw.InvalidProblem, "seqlens_k", lambda: decode(*good[:4], whole.seqlens.float()))
    raises(tw.InvalidProblem, "seqlens_k", lambda: decode(*good[:4], whole.seqlens - 1))
    raises(tw.InvalidProblem, "cu_seqlens_q", lambda: decode(*good, cu_seqlens_q=torch.tensor([0, 10])))
    falling = torch.tensor([0, 5, 2, *range(3, 11)])
    raises(tw.InvalidProblem, "cu_seqlens_q", lambda: decode(*good, cu_seqlens_q=falling))
    words = "sinks" if dist.get_rank() == 0 else "on rank 0"
    raises(tw.InvalidProblem, words, lambda: decode(*good, dist.new_group(), sinks=torch.ones(5)))
    raises(tw.InvalidProblem, "window", lambda: decode(*good, window=(-1, 0)))
    raises(tw.InvalidProblem, "softcap", lambda: decode(*good, softcap=-1.0))
    far = whole.seqlens * 0 + 10000
    raises(tw.InvalidProblem, "seqlens_k", lambda: decode(*good[:4], far, window=(3, 0)))
    raises(tw.InvalidProblem, "k_pages", lambda: decode(whole.q, [whole.local_pages[0]], *good[2:]))
    raises(tw.InvalidProblem, "k_pages", lambda: decode(whole.q, whole.local_pages[0][0], *good[2:]))
    raises(tw.InvalidProblem, "alibi_slopes", lambda: decode(*good, alibi_slopes=torch.ones(HEADS)))
    raises(tw.Unsupported, "no_grad", lambda: decode(whole.q.clone().requires_grad_(), *good[1:]))
    whole.check()


def disagreement() -> None:
    """In a group of its own: one that has agreed once does not compare again."""
    group, whole, rank = dist.new_group(), Whole(), min(1, dist.get_rank())
    totals = torch.arange(len(LENGTHS) + 1)
    found = {
        "causal": ({"causal": False}, {}, "False", "True"),
        "softcap": ({"softcap": 5.0}, {"softcap": 3.0}, "5.0", "3.0"),
        "scale": ({"scale": 0.5}, {}, "0.5", "None"),
        "window": ({}, {"window": (9, 0)}, "None", "(9, 0)"),
        "sinks": ({}, {"sinks": torch.ones(HEADS)}, "None", f"float32 ({HEADS},)"),
        "cu_seqlens_q": ({}, {"cu_seqlens_q": totals}, "None", f"({len(totals)},)"),
    }
    given = (whole.q, *whole.local_pages, whole.local_table, whole.seqlens, group)
    for name, (*flags, first, others) in found.items():
        words = name + difference(first, others)
        raises(tw.InvalidProblem, words, lambda flags=flags[rank]: decode(*given, **flags))  # type: ignore[misc]
    k_pages, v_pages = whole.local_pages
    width = DIM_V - 8 * rank
    words = "v_pages" + difference(*(f"float32 (num_pages, 4, 2, {n})" for n in (DIM_V, DIM_V - 8)))
    raises(tw.InvalidProblem, words, lambda: decode(whole.q, k_pages, v_pages[..., :width], *given[3:]))


def one_bad_rank() -> None:
    group = dist.new_group()
    whole = Whole()
    q = whole.q[:2] if dist.get_rank() == 1 else whole.q
    words = "one row for each" if dist.get_rank() == 1 else "on rank 1"
    given = (q, *whole.local_pages, whole.local_table, whole.seqlens, group)
    raises(tw.InvalidProblem, words, lambda: decode(*given))


def refused_alone() -> None:
    """One rank refuses a call, the others do not: their results are of different calls from then on."""
    group, whole = dist.new_group(), Whole()
    given = (*whole.local_pages, whole.local_table, whole.seqlens, group)
    decode(whole.q, *given)
    if dist.get_rank() == 1:
        raises(tw.InvalidProblem, "one row for each", lambda: decode(whole.q[:2], *given))
    raises(PeerFailure, "different calls", lambda: decode(whole.q, *given))


def slots_of_tokens() -> None:
    """Padding has no slot, and a position past the table is refused where the page would be this rank's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    table = torch.arange(6).view(2, 3)
    assert local_slots(table, torch.tensor([-1, -PAGE_SIZE]), PAGE_SIZE).tolist() == [-1, -1]
    past = torch.tensor([(3 * world + rank) * PAGE_SIZE, 0])
    raises(tw.InvalidProblem, "positions", lambda: local_slots(table, past, PAGE_SIZE))
    raises(tw.InvalidProblem, "sequences", lambda: local_slots(table, past[1:], PAGE_SIZE, sequences=torch.tensor([2])))
    raises(tw.InvalidProblem, "page_size", lambda: local_slots(table, past, 0))
    one, first = torch.tensor([0]), torch.tensor([rank * PAGE_SIZE] * 2)
    raises(tw.InvalidProblem, "sequences: expected shape", lambda: local_slots(table, first, PAGE_SIZE, sequences=one))
    raises(tw.InvalidProblem, "positions: expected an int32", lambda: local_slots(table, first.float(), PAGE_SIZE))
    raises(tw.InvalidProblem, "block_table: expected a page", lambda: local_slots(table - 9, first, PAGE_SIZE))


def sub_group() -> None:
    """Two of three ranks."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        whole = Whole(group=group)
        want = alone(whole.q, *whole.pages, whole.table, whole.seqlens)
        got = decode(whole.q, *whole.local_pages, whole.local_table, whole.seqlens, group)
        torch.testing.assert_close(got, want, atol=5e-6, rtol=5e-6)


def main(report: Path, place: str, rank: int, world: int) -> None:
    """Run the checks, of which rank 0 writes the report."""
    outcomes = outcomes_of(checks(world), place, rank, world)
    if rank == 0:
        report.write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()
