"""The head-parallel variant (all-to-all, known as Ulysses): every rank gets the whole sequence for some of the heads.

Two exchanges replace the ring, with one plain attention call between them, so every feature of that call works. Heads
need not divide evenly; a K/V head that several ranks need is sent to each of them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise import ops
from tilewise.distributed.operators import Settings, Tensors, agreed, exchange_heads, heads_of
from tilewise.distributed.sharding import as_shards, in_order
from tilewise.distributed.transport import Group
from tilewise.operands import Operands


class Assignment(NamedTuple):
    """The heads of one rank: query heads first .. last-1, and the K/V head for each group of them."""

    first: int
    last: int
    kv_heads: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.last - self.first


def assign(rank: int, world: int, num_heads: int, num_kv_heads: int) -> Assignment:
    """Consecutive query heads, evenly. Each K/V head once if all serve equally many, else one per query head."""
    first, last = num_heads * rank // world, num_heads * (rank + 1) // world
    served = [head * num_kv_heads // num_heads for head in range(first, last)]
    distinct = sorted(set(served))
    even = len({served.count(kv_head) for kv_head in distinct}) <= 1
    return Assignment(first, last, tuple(distinct if even else served))


class _Together(torch.autograd.Function):
    """out and lse as they are, of which the backward takes both or none: every rank then runs the same exchanges in the
    backward, also if the loss of one of them does not depend on lse.
    """

    @staticmethod
    def forward(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return dout, dlse


def heads_attention(
    tensors: Tensors, settings: Settings, group: Group, seqlens: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows, computed on whole sequences; differentiable. `seqlens` are `whole_lengths`."""
    heads = heads_of(settings.layout)
    q, k, v = (heads(t) for t in tensors[:3])
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    checked = agreed(tensors, settings)
    every = [assign(r, world, q.shape[1], k.shape[1]) for r in range(world)]
    own = every[rank]
    queries, keys = [list(range(a.first, a.last)) for a in every], [list(a.kv_heads) for a in every]
    whole = [
        _to_sequences(t, some, rank, settings, length, checked)
        for t, some, length in ((q, queries, seqlens[0]), (k, keys, seqlens[1]), (v, keys, seqlens[1]))
    ]
    out, lse = _attention(whole, tensors, settings, own)
    counts = [a.num_heads for a in every]
    out = _to_shards(out, counts, rank, settings, q.shape[2], 0.0)
    lse = _to_shards(lse.unsqueeze(-1), counts, rank, settings, q.shape[2], float("-inf")).squeeze(-1)
    if settings.return_lse and any(settings.grads):
        out, lse = _Together.apply(out, lse)  # type: ignore[no-untyped-call]
    if settings.layout == "bshd":
        return out.transpose(1, 2), lse
    return (out[0].transpose(0, 1), lse[0]) if settings.layout == "packed" else (out, lse)


def _attention(whole: list[Tensor], tensors: Tensors, settings: Settings, own: Assignment) -> tuple[Tensor, Tensor]:
    """The plain call on whole sequences (batch, some heads, seqlen, dim)."""
    mine = slice(own.first, own.last)
    slopes, sinks, seed = tensors.alibi_slopes, tensors.sinks, tensors.seed
    if seed is not None:
        seed = torch.cat([seed.reshape(1), seed.new_zeros(1), seed.new_full((1,), own.first), seed.new_zeros(2)])
    slopes, sinks = (None if t is None else t[..., mine] for t in (slopes, sinks))
    q, k, v = whole
    if tensors.cu_seqlens is None:
        operands = Operands(q, k, v, alibi_slopes=slopes, sinks=sinks, seed=seed)
        return ops.attention("dense", operands, settings.flags())
    documents = tensors.cu_seqlens.to(device=q.device, dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1) for t in whole)
    operands = Operands(q, k, v, documents, documents, alibi_slopes=slopes, sinks=sinks, seed=seed)
    out, lse = ops.attention("varlen", operands, settings.flags())
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def _to_sequences(
    tensor: Tensor, heads: list[list[int]], rank: int, settings: Settings, seqlen: int, checked: Tensor | None
) -> Tensor:
    """(batch, all heads, own rows, dim) to (batch, own heads, all tokens, dim)."""
    world, count = len(heads), len(heads[rank])
    sent = _selected(tensor.transpose(0, 1), [head for some in heads for head in some])
    received = exchange_heads(sent, [len(some) for some in heads], [count] * world, settings.group, checked)
    rows = received.unflatten(0, (world, count)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    return in_order(rows, 2, world, settings.sharding).narrow(2, 0, seqlen)


def _selected(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads in this order, by slices: an index tensor would be copied to the device and block the host."""
    if heads == list(range(tensor.shape[0])):
        return tensor
    cuts = [0, *(i for i in range(1, len(heads)) if heads[i] != heads[i - 1] + 1), len(heads)]
    return torch.cat([tensor[heads[a] : heads[b - 1] + 1] for a, b in itertools.pairwise(cuts)])


def _to_shards(tensor: Tensor, counts: list[int], rank: int, settings: Settings, rows: int, padding: float) -> Tensor:
    """(batch, own heads, all tokens, dim) to (batch, all heads, own rows, dim)."""
    world = len(counts)
    missing = world * rows - tensor.shape[2]
    if missing:
        empty = tensor.new_full((*tensor.shape[:2], missing, tensor.shape[3]), padding)
        tensor = torch.cat([tensor, empty], 2)
    shards = as_shards(tensor, 2, world, settings.sharding).unflatten(2, (world, rows))
    sent = shards.permute(2, 1, 0, 3, 4).flatten(0, 1)
    received = exchange_heads(sent, [counts[rank]] * world, counts, settings.group)
    return received.transpose(0, 1)
