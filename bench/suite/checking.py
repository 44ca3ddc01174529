"""Whether a result is right, judged by fp64: sampled rows of every head, and the whole of one head's dK and dV.

The tolerance is the conformance suite's: twice the error of plain PyTorch in the case's dtype, and a few ulp. Each
contestant has its own: what FP8 tensor cores round is allowed to those that use them, and to no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from suite.cases import Case
from suite.inputs import Inputs
from tilewise.masks import Band
from tilewise.testing.tolerances import Slack, judge, measure, slack_of

__all__ = ["Checker", "Outcome"]

# Rows of each sequence that are compared, from the first to the last: fewer where there are many sequences and heads.
LEAST_ROWS, MOST_ROWS, MOST_ELEMENTS = 4, 64, 1 << 20
# Rows of one head that are computed at once for dK and dV: 134 MB of fp64 scores at 16,384 keys.
CHUNK = 1024

Results = dict[str, Tensor]


class Outcome(NamedTuple):
    """The largest deviation from fp64, and what is wrong if it is too large."""

    error: float
    complaint: str | None


class Piece(NamedTuple):
    """Sequences of one length, heads first; `where` finds their rows in a packed result."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    where: slice


class Checker:
    """Knows the right result of a case, computed once, and judges those of implementations."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.pieces = list(_pieces(case, inputs))
        self.expected = {name: values.cpu() for name, values in self._expected(torch.float64).items()}
        # By whether sums are those of FP8 tensor cores; made when first asked for.
        self.slacks: dict[bool, dict[str, Slack]] = {}

    def judge(self, results: Results, *, coarse: bool = False) -> Outcome:
        """`results` holds out and, for a backward, dq, dk, dv, in the shapes of the case's inputs; `coarse` allows
        probabilities in e4m3.
        """
        if coarse not in self.slacks:
            self.slacks[coarse] = self._slack(coarse=coarse)
        errors, complaints = [0.0], []
        for name, slack in self.slacks[coarse].items():
            ref, got = self.expected[name], self._sampled(name, results[name].detach()).double().cpu()
            complaint = judge(name, got, ref, slack)
            complaints += [] if complaint is None else [complaint]
            errors.append(measure(got - ref).largest)
        return Outcome(max(errors), "; ".join(complaints) or None)

    def _slack(self, *, coarse: bool) -> dict[str, Slack]:
        dtype, plain = self.case.torch_dtype, self._expected(self.case.torch_dtype, coarse=coarse)
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            name: slack_of(
                self.expected[name], plain[name].cpu(), self.expected[f"|{name}|"], dtype, accumulate, coarse=coarse
            )
            for name in ("out", "dq", "dk", "dv")[: 4 if self.case.measure == "backward" else 1]
        }

    def _expected(self, dtype: torch.dtype, *, coarse: bool = False) -> Results:
        """The sampled results in a dtype, flat; `|x|` are the sums of absolute values behind x."""
        results: dict[str, list[Tensor]] = {}
        for piece in self.pieces:
            band = self.case.band(piece.q.shape[2], piece.k.shape[2])
            rows = _Rows(piece, _sample(piece), band, dtype)
            values = rows.out(coarse=coarse) | (rows.dq() if self.case.measure == "backward" else {})
            for name, value in values.items():
                results.setdefault(name, []).append(value.double().flatten())
        if self.case.measure == "backward":
            for name, value in _keys_of_last_head(self.pieces[0], self.case, dtype).items():
                results[name] = [value.double().flatten()]
        return {name: torch.cat(values) for name, values in results.items()}

    def _sampled(self, name: str, result: Tensor) -> Tensor:
        """The same elements of an implementation's result, in the same order."""
        first = self.pieces[0]
        if name in ("dk", "dv"):
            head = result[first.where, -1] if self.case.kind == "varlen" else result[-1, -1]
            return head.flatten()
        if self.case.kind == "varlen":
            parts = [result[p.where].transpose(0, 1)[:, _sample(p)] for p in self.pieces]
            return torch.cat([p.flatten() for p in parts])
        dense = result.view(first.q.shape) if self.case.kind == "paged" else result
        return dense[:, :, _sample(first)].flatten()


def _pieces(case: Case, inputs: Inputs) -> Iterator[Piece]:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    if case.kind != "varlen":
        yield Piece(*tensors, slice(None))
        return
    start = 0
    for length in case.seqlens:
        where = slice(start, start + length)
        q, k, v, dout = (t[where].transpose(0, 1)[None] for t in tensors)
        yield Piece(q, k, v, dout, where)
        start += length


def _sample(piece: Piece) -> Tensor:
    batch, heads, length, head_dim = piece.q.shape
    rows = max(LEAST_ROWS, min(MOST_ROWS, MOST_ELEMENTS // (batch * heads * head_dim)))
    return torch.linspace(0, length - 1, min(length, rows), device=piece.q.device).round().long()


class _Rows:
    """Attention of some rows as the textbook has it, in one dtype; `|x|` are the sums of absolute values behind x."""

    def __init__(self, piece: Piece, rows: Tensor, band: Band, dtype: torch.dtype) -> None:
        groups = piece.q.shape[1] // piece.k.shape[1]
        self.q, self.dout = (t[:, :, rows].to(dtype).unflatten(1, (-1, groups)) for t in (piece.q, piece.dout))
        self.k, self.v = (t.to(dtype)[:, :, None] for t in (piece.k, piece.v))
        self.scale = 1.0 / math.sqrt(piece.q.shape[-1])
        s = (self.q @ self.k.mT) * self.scale
        self.p = torch.softmax(s.masked_fill_(~_visible(band, rows), -math.inf), -1)

    def out(self, *, coarse: bool = False) -> Results:
        """The rows of out; `coarse` rounds probabilities to e4m3, relative to the row's largest one times 2^8."""
        p = self.p
        if coarse:
            unit = p.float().amax(-1, keepdim=True) / 2.0**8
            p = ((p.float() / unit).to(torch.float8_e4m3fn).float() * unit).to(p.dtype)
        return {"out": (p @ self.v).flatten(1, 2), "|out|": (self.p @ self.v.abs()).flatten(1, 2)}

    def _ds(self) -> tuple[Tensor, Tensor]:
        dp = self.dout @ self.v.mT
        delta = (self.p * dp).sum(-1, keepdim=True)
        return self.p * (dp - delta), self.p * (dp.abs() + delta.abs())

    def dq(self) -> Results:
        """The rows of dq."""
        ds, bound = self._ds()
        dq, terms = ds @ self.k, bound @ self.k.abs()
        return {"dq": (dq * self.scale).flatten(1, 2), "|dq|": (terms * self.scale).flatten(1, 2)}

    def dkv(self) -> Results:
        """What these rows add to dk and dv."""
        ds, bound = self._ds()
        return {
            "dk": (ds.mT @ self.q).sum(2) * self.scale,
            "dv": (self.p.mT @ self.dout).sum(2),
            "|dk|": (bound.mT @ self.q.abs()).sum(2) * self.scale,
            "|dv|": (self.p.mT @ self.dout.abs()).sum(2),
        }


def _visible(band: Band, rows: Tensor) -> Tensor:
    distance = torch.arange(band.seqlen_k, device=rows.device) - (rows[:, None] + band.offset)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        visible &= distance >= -band.left
    if band.right is not None:
        visible &= distance <= band.right
    return visible


def _keys_of_last_head(piece: Piece, case: Case, dtype: torch.dtype) -> Results:
    """Gradients dK and dV of the last K/V head of the last sequence, which need every row; sums are kept in fp64."""
    groups = piece.q.shape[1] // piece.k.shape[1]
    q, dout = (t[-1:, -groups:] for t in (piece.q, piece.dout))
    last = Piece(q, piece.k[-1:, -1:], piece.v[-1:, -1:], dout, piece.where)
    length = q.shape[2]
    band = case.band(length, piece.k.shape[2])
    totals: Results = {}
    for start in range(0, length, CHUNK):
        rows = torch.arange(start, min(start + CHUNK, length), device=q.device)
        for name, part in _Rows(last, rows, band, dtype).dkv().items():
            totals[name] = totals.get(name, 0.0) + part.double()
    return {name: total.to(dtype) for name, total in totals.items()}
