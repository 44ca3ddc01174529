"""The all-gather variant: every rank gathers all keys of a few heads at a time and attends its queries to them.

The next group of heads is gathered while the current one is computed. A group has as many K/V heads as make a gathered
block about as large as a shard, so memory stays O(seqlen / ranks) if there are at least as many K/V heads as ranks. In
the backward the keys are gathered again, and their gradients return to their owners, summed in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.blocks import Call, Running, Saved, piece_backward, piece_forward
from tilewise.distributed.pieces import Layout, Piece, pieces
from tilewise.distributed.ring import Heads
from tilewise.distributed.sharding import Chunk, as_shards, in_order
from tilewise.distributed.transport import Group, Transfer, all_to_all, start_all_gather
from tilewise.operands import Gradients, Wanted

__all__ = ["gather_backward", "gather_forward"]


class Gathered(NamedTuple):
    """All keys and values of some K/V heads, heads first, in the order of the sequence; and the query heads' range."""

    kv_heads: slice
    heads: slice
    k: Tensor
    v: Tensor


def gather_forward(call: Call, layout: Layout, q: Tensor, k: Tensor, v: Tensor, heads: Heads, group: Group) -> Running:
    """This rank's queries over all keys, one group of heads after another."""
    queries = heads(q)
    running = Running.empty(queries, v.shape[-1])
    todo = _pieces(layout, group)
    for some in _groups(layout, queries.shape[1], heads(k), heads(v), group):
        own, part = call.for_heads(some.heads.start, some.heads.stop), queries[:, some.heads]
        rows = running.for_heads(some.heads.start, some.heads.stop)
        for piece in todo:
            rows.add(piece.q_start, piece.q_stop, *piece_forward(own, piece, part, some.k, some.v))
    return running


def gather_backward(
    call: Call,
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    wanted: Wanted,
    heads: Heads,
    group: Group,
) -> Gradients:
    """The gradients of this rank's queries (heads first) and keys (in the caller's layout), in the
    accumulator's dtype.
    """
    queries, dtype = heads(q), saved.lse.dtype
    todo = _pieces(layout, group)
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=dtype, device=t.device) if want else None
        for t, want in ((q, wanted.dq), (k, wanted.dk), (v, wanted.dv))
    )
    for some in _groups(layout, queries.shape[1], heads(k), heads(v), group):
        own = call.for_heads(some.heads.start, some.heads.stop)
        rows = saved.for_heads(some.heads.start, some.heads.stop)
        totals = [
            None if total is None else torch.zeros(t.shape, dtype=dtype, device=t.device)
            for total, t in ((dk, some.k), (dv, some.v))
        ]
        for piece in todo:
            gradients = piece_backward(own, piece, queries[:, some.heads], some.k, some.v, rows, wanted)
            if dq is not None and gradients.dq is not None:
                heads(dq)[:, some.heads, piece.q_start : piece.q_stop] += gradients.dq
            for total, part in zip(totals, gradients[1:3], strict=True):
                if total is not None and part is not None:
                    total[:, :, piece.k_start : piece.k_stop] += part
        for target, total in ((dk, totals[0]), (dv, totals[1])):
            if target is not None and total is not None:
                heads(target)[:, some.kv_heads] = _to_owners(total, layout, group)
    return Gradients(None if dq is None else heads(dq), dk, dv)


def _pieces(layout: Layout, group: Group) -> tuple[Piece, ...]:
    return pieces(layout, layout.q_shard(dist.get_rank(group)), (Chunk(0, layout.seqlen_k, 0),))


def _groups(layout: Layout, num_heads: int, k: Tensor, v: Tensor, group: Group) -> Iterator[Gathered]:
    """Gathered groups of heads, with the next one always in flight."""
    num_kv_heads = k.shape[1]
    size = max(1, num_kv_heads // layout.world)
    starts = range(0, num_kv_heads, size)
    following = _start(k, v, starts[0], size, group)
    for start in starts:
        transfers = following
        if start + size < num_kv_heads:
            following = _start(k, v, start + size, size, group)
        stop = min(start + size, num_kv_heads)
        whole = [_whole(transfer, layout) for transfer in transfers]
        per_kv = num_heads // num_kv_heads
        yield Gathered(slice(start, stop), slice(start * per_kv, stop * per_kv), whole[0], whole[1])


def _start(k: Tensor, v: Tensor, start: int, size: int, group: Group) -> list[Transfer]:
    return [start_all_gather(t[:, start : start + size].contiguous().unsqueeze(0), group) for t in (k, v)]


def _whole(transfer: Transfer, layout: Layout) -> Tensor:
    shards = transfer.wait()[0].unbind(0)
    return in_order(torch.cat(shards, 2), 2, layout.world, layout.sharding)


def _to_owners(total: Tensor, layout: Layout, group: Group) -> Tensor:
    """Rows of a gradient over all keys, summed over ranks and sent to their owners."""
    shards = as_shards(total, 2, layout.world, layout.sharding).chunk(layout.world, 2)
    counts = [1] * layout.world
    received = all_to_all(torch.stack(shards), counts, counts, group)
    summed = received[0]
    for part in received[1:]:
        summed = summed + part
    return summed
