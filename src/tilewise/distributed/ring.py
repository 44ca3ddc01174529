"""The ring: keys and values travel from rank to rank while every rank computes with what it has.

Two receive buffers alternate: the next block is in flight before the current one is used, and nothing in the loop
blocks the host (with NCCL a wait only orders streams). In the backward the gradients of a block of keys travel with it,
in fp32, one step behind, and end at its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.blocks import Call, Running, Saved, piece_backward, piece_forward
from tilewise.distributed.pieces import Layout, Piece, pieces, ring_steps
from tilewise.distributed.transport import Group, Transfer, rotate
from tilewise.operands import Gradients, Wanted

__all__ = ["Heads", "ring_backward", "ring_forward"]

# From the caller's layout to (batch, heads, rows, dim), as a view.
Heads = Callable[[Tensor], Tensor]


class Visit(NamedTuple):
    """A block of keys that is here now: its owner, the pieces to compute, K and V in the caller's layout."""

    step: int
    pieces: tuple[Piece, ...]
    k: Tensor
    v: Tensor


def ring_forward(call: Call, layout: Layout, q: Tensor, k: Tensor, v: Tensor, heads: Heads, group: Group) -> Running:
    """Partial results of this rank's queries over all keys, merged in the order of the ring."""
    queries = heads(q)
    running = Running.empty(queries, v.shape[-1])
    for visit in visits(layout, k, v, group):
        for piece in visit.pieces:
            part = piece_forward(call, piece, queries, heads(visit.k), heads(visit.v))
            running.add(piece.q_start, piece.q_stop, *part)
    return running


def ring_backward(
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
    queries = heads(q)
    dq = torch.zeros(queries.shape, dtype=saved.lse.dtype, device=q.device) if wanted.dq else None
    travelling = _Travelling(k, v, saved.lse.dtype, wanted, group)
    steps = ring_steps(layout)
    for visit in visits(layout, k, v, group):
        arriving = travelling.expect(steps, visit.step)
        parts = travelling.fresh()
        for piece in visit.pieces:
            gradients = piece_backward(call, piece, queries, heads(visit.k), heads(visit.v), saved, wanted)
            if dq is not None and gradients.dq is not None:
                dq[:, :, piece.q_start : piece.q_stop] += gradients.dq
            for total, part in zip(parts, gradients[1:3], strict=True):
                if total is not None and part is not None:
                    heads(total)[:, :, piece.k_start : piece.k_stop] += part
        travelling.depart(arriving, parts)
    dk, dv = travelling.home(steps)
    return Gradients(dq, dk, dv)


def visits(layout: Layout, k: Tensor, v: Tensor, group: Group) -> Iterator[Visit]:
    """The blocks of keys in order of arrival, this rank's own first. Steps without work are left out."""
    rank, steps = dist.get_rank(group), ring_steps(layout)
    own = layout.q_shard(rank)
    present = [k.contiguous(), v.contiguous()]
    spare: list[list[Tensor]] = []
    for index, step in enumerate(steps):
        transfer: Transfer | None = None
        if index + 1 < len(steps):
            into = spare.pop() if len(spare) else [torch.empty_like(t) for t in present]
            transfer = rotate(present, into, steps[index + 1] - step, group, "passing keys around the ring")
        source = (rank - step) % layout.world
        yield Visit(step, pieces(layout, own, layout.k_shard(source)), present[0], present[1])
        if transfer is not None:
            after = transfer.wait()
            # The caller's own tensors are never received into; the buffer just sent is free again.
            if index > 0:
                spare.append(present)
            present = after


class _Travelling:
    """Gradients of K and V that travel around the ring, one step behind the keys."""

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, wanted: Wanted, group: Group) -> None:
        self.group = group
        self.like = [t if want else None for t, want in ((k, wanted.dk), (v, wanted.dv))]
        self.dtype = dtype
        self.present: list[Tensor | None] = [None, None]

    def fresh(self) -> list[Tensor | None]:
        """Zeros for one block's gradients."""
        return [None if t is None else torch.zeros(t.shape, dtype=self.dtype, device=t.device) for t in self.like]

    def expect(self, steps: Sequence[int], step: int) -> Transfer | None:
        """Send on what the previous step left here and start receiving the current block's gradients so far."""
        index = steps.index(step)
        return None if index == 0 else self._rotate(step - steps[index - 1])

    def depart(self, arriving: Transfer | None, parts: list[Tensor | None]) -> None:
        """Add this rank's parts to what arrived, ready to be sent on."""
        if arriving is not None:
            received = iter(arriving.wait())
            parts = [None if t is None else t.add_(next(received)) for t in parts]
        self.present = parts

    def home(self, steps: Sequence[int]) -> list[Tensor | None]:
        """The gradients of this rank's own keys, from the rank where the last step left them."""
        transfer = self._rotate(-steps[-1]) if steps[-1] else None
        if transfer is not None:
            received = iter(transfer.wait())
            self.present = [None if t is None else next(received) for t in self.present]
        return self.present

    def _rotate(self, shift: int) -> Transfer | None:
        sent = [t for t in self.present if t is not None]
        if not sent:
            return None
        into = [torch.empty_like(t) for t in sent]
        return rotate(sent, into, shift, self.group, "passing the gradients of keys around the ring")
