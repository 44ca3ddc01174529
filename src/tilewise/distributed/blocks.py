"""One piece at a time: forward and backward of rows of two shards with the ordinary backends, and the sum over pieces.

Partial results are merged in fp32 through lse. The backward of a piece gets the lse and out of the whole row, which
makes its probabilities and gradients exactly those of the whole problem restricted to the piece's keys.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import device, dispatch, tracing, validation
from tilewise.canonical import canonical, contiguous_last
from tilewise.distributed.pieces import Piece
from tilewise.operands import Flags, Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

# Keys that share one Philox draw.
KEYS_PER_DRAW = 4


@dataclass(frozen=True, slots=True)
class Call:
    """What all pieces of a call share: flags, to which each piece has its own window. `slopes` are fp32 (heads,), or
    one row per batch entry or packed document; `head` is the number of the first local head, for dropout.
    """

    flags: Flags
    offset: int = 0
    packed: bool = False
    slopes: Tensor | None = None
    seed: Tensor | None = None
    head: int = 0

    def for_heads(self, heads: slice) -> Call:
        """The same call for some of its query heads."""
        return replace(self, slopes=None if self.slopes is None else self.slopes[..., heads], head=heads.start)


class Block(NamedTuple):
    """A piece as a backend takes it. `shift` is added to its lse; the first `hidden` keys are masked."""

    problem: AttentionProblem
    operands: Operands
    shift: Tensor | None
    hidden: int


class Running(NamedTuple):
    """Running sums of rows: out in the accumulator's dtype, and lse; both heads first."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, head_dim_v: int) -> Running:
        """An empty state for heads-first queries."""
        dtype = accumulator(q.dtype)
        out = torch.zeros((*q.shape[:3], head_dim_v), dtype=dtype, device=q.device)
        return cls(out, torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device))

    def for_heads(self, heads: slice) -> Running:
        """The same memory, restricted to some heads."""
        return Running(self.out[:, heads], self.lse[:, heads])

    def rows(self, start: int, stop: int) -> Running:
        """The same memory, restricted to some rows."""
        return Running(self.out[:, :, start:stop], self.lse[:, :, start:stop])

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result over other keys into these rows. An empty row (lse -inf) adds nothing."""
        total, before = self.rows(start, stop)
        after = torch.logaddexp(before, lse)
        top = torch.where(after == -math.inf, 0.0, after)
        total.mul_(torch.exp(before - top).unsqueeze(-1))
        total.addcmul_(out.to(total.dtype), torch.exp(lse - top).unsqueeze(-1))
        before.copy_(after)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add the sink logit of each head to every row, after all keys, as the contract defines."""
        logits = sinks.to(self.lse.dtype).view(1, -1, 1)
        after = torch.logaddexp(self.lse, logits)
        top = torch.where(after == -math.inf, 0.0, after)
        self.out.mul_(torch.exp(self.lse - top).unsqueeze(-1))
        self.lse.copy_(after)


class Saved(NamedTuple):
    """Whole rows over all keys and their cotangents, heads first: the inputs of a backward."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None

    def for_heads(self, heads: slice) -> Saved:
        """Some of the heads."""
        out, lse, dout = (t[:, heads] for t in self[:3])
        return Saved(out, lse, dout, None if self.dlse is None else self.dlse[:, heads])

    def rows_of(self, piece: Piece, shift: Tensor | None) -> Saved:
        """A piece's rows, with lse in the piece's own score units."""
        out, lse, dout = (t[:, :, piece.q_start : piece.q_stop] for t in self[:3])
        dlse = None if self.dlse is None else self.dlse[:, :, piece.q_start : piece.q_stop].contiguous()
        return Saved(out, (lse if shift is None else lse - shift).contiguous(), dout, dlse)

    def packed(self) -> Saved:
        """As packed rows: (rows, heads, dim) and (heads, rows)."""
        out, dout = self.out[0].transpose(0, 1), self.dout[0].transpose(0, 1)
        return Saved(out, self.lse[0], dout, None if self.dlse is None else self.dlse[0])


class Visit(NamedTuple):
    """Keys and values that are here now for some of the query heads, heads first, and what is to be computed with them.

    Their gradients are added to `dk` and `dv`, None if not wanted.
    """

    heads: slice
    pieces: tuple[Piece, ...]
    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which sums of this dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(call: Call, q: Tensor, head_dim_v: int, visits: Iterable[Visit]) -> Running:
    """Partial results of heads-first queries over all keys, merged in the order of the visits."""
    running = Running.empty(q, head_dim_v)
    for visit in visits:
        own, queries, rows = call.for_heads(visit.heads), q[:, visit.heads], running.for_heads(visit.heads)
        for piece in visit.pieces:
            rows.add(piece.q_start, piece.q_stop, *piece_forward(own, piece, queries, visit.k, visit.v))
    return running


def backward(call: Call, q: Tensor, saved: Saved, wanted: Wanted, visits: Iterable[Visit]) -> Tensor | None:
    """The gradient of heads-first queries, in the accumulator's dtype; those of the keys go to the visits."""
    dq = torch.zeros(q.shape, dtype=saved.lse.dtype, device=q.device) if wanted.dq else None
    for visit in visits:
        own, queries, rows = call.for_heads(visit.heads), q[:, visit.heads], saved.for_heads(visit.heads)
        for piece in visit.pieces:
            gradients = piece_backward(own, piece, queries, visit.k, visit.v, rows, wanted)
            if dq is not None and gradients.dq is not None:
                dq[:, visit.heads, piece.q_start : piece.q_stop] += gradients.dq
            for total, part in zip((visit.dk, visit.dv), gradients[1:3], strict=True):
                if total is not None and part is not None:
                    total[:, :, piece.k_start : piece.k_stop] += part
    return dq


def piece_forward(call: Call, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a piece's rows, heads first. q, k and v are whole shards, heads first."""
    block = _block(call, piece, q, k, v)
    problem = block.problem
    backend = dispatch.select(problem, device.of(q.device), call.flags.backend).backend
    with tracing.span(tracing.FORWARD, block.operands, backend.name, problem):
        out, lse = backend.forward(problem, canonical(problem, block.operands))
    if problem.kind == "varlen":
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    return out, lse if block.shift is None else lse + block.shift


def piece_backward(
    call: Call, piece: Piece, q: Tensor, k: Tensor, v: Tensor, saved: Saved, wanted: Wanted
) -> Gradients:
    """A piece's part of dq, dk, dv, heads first, for its rows only. `saved` are whole rows over all keys."""
    block = _block(call, piece, q, k, v)
    problem = block.problem
    rows = saved.rows_of(piece, block.shift)
    if problem.kind == "varlen":
        rows = rows.packed()
    backend = dispatch.select(problem, device.of(q.device), call.flags.backend).backend
    operands = canonical(problem, block.operands)
    if backend.name == "reference":
        rows = _as_of_the_piece(*backend.forward(problem, operands), rows)
    dout = contiguous_last(rows.dout)
    asked = Wanted(wanted.dq, wanted.dk, wanted.dv)
    with tracing.span(tracing.BACKWARD, block.operands, backend.name, problem):
        dq, dk, dv = backend.backward(problem, operands, rows.out, rows.lse, dout, rows.dlse, asked)[:3]
    if problem.kind == "varlen":
        dq, dk, dv = (None if g is None else g.transpose(0, 1).unsqueeze(0) for g in (dq, dk, dv))
    if block.hidden:
        dk, dv = (None if g is None else g[:, :, block.hidden :] for g in (dk, dv))
    return Gradients(dq, dk, dv)


def _as_of_the_piece(part: Tensor, part_lse: Tensor, rows: Saved) -> Saved:
    """The cotangents of a piece's own results, for the reference, which recomputes lse instead of taking it.

    By the chain rule of merging: with the piece's share w = exp(part_lse - lse) of a row, dout becomes w dout and dlse
    w (dout . (part - out) + dlse).
    """
    heads_last = part.dim() == 3
    share = torch.exp(part_lse - torch.where(rows.lse == -math.inf, 0.0, rows.lse))
    pull = (rows.dout * (part - rows.out)).sum(-1)
    dlse = share * ((pull.t() if heads_last else pull) + (0.0 if rows.dlse is None else rows.dlse))
    weight = share.t() if heads_last else share
    return Saved(part, part_lse, rows.dout * weight.unsqueeze(-1), dlse)


def sink_gradient(sinks: Tensor, saved: Saved) -> Tensor:
    """This rank's rows' part: the sum over rows of exp(sink - lse) * (dlse - rowsum(dout * out))."""
    out, lse, dout, dlse = saved
    wide = torch.float64
    delta = (out.to(wide) * dout.to(wide)).sum(-1)
    pull = -delta if dlse is None else dlse.to(wide) - delta
    share = torch.exp(sinks.to(wide).view(1, -1, 1) - lse.to(wide)) * pull
    # Rows of padding have lse -inf and arbitrary values in dout.
    return torch.where(lse == -math.inf, 0.0, share).sum((0, 2)).to(sinks.dtype)


def _block(call: Call, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Block:
    q = q[:, :, piece.q_start : piece.q_stop]
    k, v = (t[:, :, piece.k_start : piece.k_stop] for t in (k, v))
    if piece.cu_seqlens is not None:
        return _packed_block(call, piece, *(t[0].transpose(0, 1) for t in (q, k, v)))
    hidden = piece.where.k0 % KEYS_PER_DRAW if call.flags.dropout > 0.0 else 0
    mask = None
    if hidden:
        k, v = (torch.cat([t.new_zeros((*t.shape[:2], hidden, t.shape[3])), t], 2) for t in (k, v))
        mask = (torch.arange(k.shape[2], device=k.device) >= hidden).view(1, 1, 1, -1)
    slopes, bias, shift = _tilt(call, piece, hidden, q.device)
    operands = Operands(q, k, v, bias=bias, mask=mask, alibi_slopes=slopes, seed=_seed(call, piece, hidden))
    return Block(_problem(call, piece, operands), operands, shift, hidden)


def _packed_block(call: Call, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Block:
    assert piece.cu_seqlens is not None
    cu_seqlens = _index_tensor(piece.cu_seqlens, torch.int32, q.device)
    slopes = call.slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[piece.document : piece.document + len(piece.cu_seqlens) - 1]
    operands = Operands(q, k, v, cu_seqlens, cu_seqlens, alibi_slopes=slopes, seed=_seed(call, piece, 0))
    return Block(_problem(call, piece, operands), operands, None, 0)


def _index_tensor(values: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    """Numbers of a piece on its device, made once per stream, which copies them before it reads them.

    Under graph capture they are filled at replay and belong to the graph's pool, so they are not cached.
    """
    if where.type != "cuda":
        return _kept_index_tensor(values, dtype, where, 0)
    if torch.cuda.is_current_stream_capturing():
        return _new_index_tensor(values, dtype, where)
    return _kept_index_tensor(values, dtype, where, torch.cuda.current_stream(where).cuda_stream)


@functools.lru_cache(maxsize=1024)
def _kept_index_tensor(values: tuple[int, ...], dtype: torch.dtype, where: torch.device, stream: int) -> Tensor:
    del stream
    return _new_index_tensor(values, dtype, where)


def _new_index_tensor(values: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    """Through pinned memory, because a plain copy would block the host."""
    if where.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=where)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(where, non_blocking=True)


def _tilt(
    call: Call, piece: Piece, hidden: int, where: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """ALiBi as (slopes, bias, shift): by the call's own distances where they are right, else split in two.

    With all keys on one side of the queries, the distance is a term of the key plus a term of the row. The key's term
    is a bias (0 for the nearest key); the row's term does not change the softmax and shifts lse.
    """
    slopes = call.slopes
    if slopes is None:
        return None, None, None
    if slopes.dim() == 2 and call.packed:
        slopes = slopes[piece.document : piece.document + 1]
    if piece.side == "aligned":
        return slopes, None, None
    slope = slopes.reshape(-1, slopes.shape[-1], 1)
    q0, _, k0, k1 = piece.where
    rows = torch.arange(piece.num_q, device=where) + (q0 + call.offset)
    keys = torch.arange(-hidden, piece.num_k, device=where)
    if piece.side == "past":
        beyond, nearest = piece.num_k - 1 - keys, rows - (k1 - 1)
    else:
        beyond, nearest = keys, k0 - rows
    return None, (-slope * beyond).unsqueeze(2), -slope * nearest


def _seed(call: Call, piece: Piece, hidden: int) -> Tensor | None:
    """The seed, followed by the origin of the piece's random counters: batch, head, row and key."""
    if call.seed is None or call.flags.dropout == 0.0:
        return None
    origin = (piece.document, call.head, piece.where.q0, piece.where.k0 - hidden)
    return torch.cat([call.seed.reshape(1), _index_tensor(origin, torch.int64, call.seed.device)])


def _problem(call: Call, piece: Piece, operands: Operands) -> AttentionProblem:
    causal, right = piece.right == 0, piece.right or None
    flags = call.flags._replace(causal=causal, window_left=piece.left, window_right=right)
    if piece.cu_seqlens is None:
        return validation.problem_of("dense", operands, flags)
    longest = max(b - a for a, b in itertools.pairwise(piece.cu_seqlens))
    return validation.problem_of("varlen", operands, flags._replace(max_seqlen_q=longest, max_seqlen_k=longest))
