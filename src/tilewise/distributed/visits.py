"""How the keys of all ranks reach this rank's queries: around a ring, or gathered a few heads at a time.

The ring: keys and values travel from rank to rank while every rank computes with what it has. Two receive buffers
alternate: the next block is in flight before the current one is used, and nothing in the loop blocks the host (with
NCCL a wait only orders streams). In the backward the gradients of a block of keys travel with it, in fp32, one step
behind, and end at its owner.

The all-gather: every rank gathers all keys of a few heads at a time. The next group of heads is gathered while the
current one is computed. A group has as many K/V heads as make a gathered block about as large as a shard, so memory
stays O(seqlen / ranks) if there are at least as many K/V heads as ranks. In the backward the keys are gathered again,
and their gradients return to their owners, summed in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.blocks import Visit, accumulator
from tilewise.distributed.pieces import Layout, pieces, ring_steps
from tilewise.distributed.sharding import Chunk, as_shards, in_order
from tilewise.distributed.transport import Group, Transfer, all_to_all, rotate, start_all_gather
from tilewise.operands import Wanted

# From the caller's layout to (batch, heads, rows, dim), as a view.
Heads = Callable[[Tensor], Tensor]
# The gradients of K and V, None if not wanted.
Sums = list[Tensor | None]
NOTHING = Wanted(False, False, False)


class Shards(NamedTuple):
    """This rank's shards in the caller's layout, and how the whole problem is spread over a group."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Heads
    group: Group


def ring(shards: Shards, wanted: Wanted = NOTHING, found: Sums | None = None) -> Iterator[Visit]:
    """The blocks of keys in order of arrival, this rank's own first. Steps without work are left out.

    The gradients of this rank's keys, in the caller's layout, are stored in `found` at the end.
    """
    layout, q, k, v, heads, group = shards
    rank, steps = dist.get_rank(group), ring_steps(layout)
    every, own = slice(0, heads(q).shape[1]), layout.q_shard(rank)
    present = [k.contiguous(), v.contiguous()]
    spare: list[list[Tensor]] = []
    sums: Sums = []
    for index, step in enumerate(steps):
        transfer: Transfer | None = None
        if index + 1 < len(steps):
            into = spare.pop() if spare else [torch.empty_like(t) for t in present]
            transfer = rotate(present, into, steps[index + 1] - step, group, "passing keys around the ring")
        # Send on what the previous step left here, and receive the gradients of the present block so far.
        arriving = _passed_on(sums, step - steps[index - 1], group)
        sums = _zeros((k, v), wanted)
        todo = pieces(layout, own, layout.k_shard((rank - step) % layout.world))
        yield Visit(every, todo, *map(heads, present), *(None if t is None else heads(t) for t in sums))
        if arriving is not None:
            received = iter(arriving.wait())
            sums = [None if t is None else t.add_(next(received)) for t in sums]
        if transfer is not None:
            after = transfer.wait()
            # The caller's own tensors are never received into; the buffer just sent is free again.
            if index > 0:
                spare.append(present)
            present = after
    if steps[-1] and (arriving := _passed_on(sums, -steps[-1], group)) is not None:
        # The last step left the gradients of this rank's keys at another rank.
        received = iter(arriving.wait())
        sums = [None if t is None else next(received) for t in sums]
    if found is not None:
        found[:] = sums


def _passed_on(sums: Sums, shift: int, group: Group) -> Transfer | None:
    sent = [t for t in sums if t is not None]
    if not sent:
        return None
    into = [torch.empty_like(t) for t in sent]
    return rotate(sent, into, shift, group, "passing the gradients of keys around the ring")


def _zeros(like: Iterable[Tensor], wanted: Wanted) -> Sums:
    return [
        torch.zeros(t.shape, dtype=accumulator(t.dtype), device=t.device) if want else None
        for t, want in zip(like, (wanted.dk, wanted.dv), strict=True)
    ]


def gathered(shards: Shards, wanted: Wanted = NOTHING, found: Sums | None = None) -> Iterator[Visit]:
    """All keys of one group of heads after another, with the next group always in flight.

    The gradients of this rank's keys, in the caller's layout, are stored in `found`.
    """
    layout, q, k, v, heads, group = shards
    todo = pieces(layout, layout.q_shard(dist.get_rank(group)), (Chunk(0, layout.seqlen_k, 0),))
    num_kv_heads = heads(k).shape[1]
    per_kv, size = heads(q).shape[1] // num_kv_heads, max(1, num_kv_heads // layout.world)
    targets = _zeros((k, v), wanted)
    following = _start(shards, 0, size)
    for start in range(0, num_kv_heads, size):
        transfers, stop = following, min(start + size, num_kv_heads)
        if stop < num_kv_heads:
            following = _start(shards, stop, size)
        whole = [
            in_order(torch.cat(transfer.wait()[0].unbind(0), 2), 2, layout.world, layout.sharding)
            for transfer in transfers
        ]
        sums = _zeros(whole, wanted)
        yield Visit(slice(start * per_kv, stop * per_kv), todo, whole[0], whole[1], *sums)
        for target, total in zip(targets, sums, strict=True):
            if target is not None and total is not None:
                heads(target)[:, start:stop] = _to_owners(total, layout, group)
    if found is not None:
        found[:] = targets


def _start(shards: Shards, start: int, size: int) -> list[Transfer]:
    parts = (shards.heads(t)[:, start : start + size] for t in (shards.k, shards.v))
    return [start_all_gather(part.contiguous().unsqueeze(0), shards.group) for part in parts]


def _to_owners(total: Tensor, layout: Layout, group: Group) -> Tensor:
    """Rows of a gradient over all keys, summed over ranks and sent to their owners."""
    shards = as_shards(total, 2, layout.world, layout.sharding).chunk(layout.world, 2)
    counts = [1] * layout.world
    received = all_to_all(torch.stack(shards), counts, counts, group)
    summed = received[0]
    for part in received[1:]:
        summed = summed + part
    return summed
