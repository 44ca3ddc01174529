"""The suite judged: it must pass a correct tiled backend and fail each of the same backend's planted bugs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise import tiles
from tilewise.backends.base import TileShape
from tilewise.backends.reference import ReferenceBackend
from tilewise.device import DeviceSpec
from tilewise.numerics import dropout_keep
from tilewise.operands import Gradients, Operands, Tangents
from tilewise.problem import FEATURES, AttentionProblem
from tilewise.testing import BackendImplementation, Case, Nonconformance, check, check_higher, check_largest, installed
from tilewise.testing.generation import single_cases
from tilewise.testing.special import largest_cases, special_cases

BLOCK_M, BLOCK_N = 32, 16

# Every planted bug, and what goes wrong with it.
BUGS = {
    "causal_off_by_one": "a query sees the key after its own",
    "no_rescale": "the accumulator is not rescaled when the row maximum grows",
    "lse_without_max": "lse is the logarithm of the shifted sum",
    "dropped_tail": "keys of the last, incomplete tile are left out",
    "gqa_interleaved": "query head h reads K/V head h % num_kv_heads",
    "window_exclusive": "the leftmost key of the window is left out",
    "dlse_ignored": "no gradient flows through lse",
    "dropout_unscaled": "what dropout keeps is not divided by 1 - p",
    "dropout_in_denominator": "dropped probabilities are missing in the softmax's sum",
    "dropout_rows_of_tile": "the random counter restarts in every tile",
    "softcap_slope": "the derivative of softcap is left out",
    "alibi_top_left": "distances are not aligned to the bottom right",
    "neighbour_key": "a packed sequence sees the first key of the next one",
    "padding_unwritten": "rows past the last sequence are never written",
    "empty_row_nan": "a row without keys is divided by its sum, 0",
    "dsinks_sign": "the gradient of the sink has the wrong sign",
    "dk_of_last_head": "the gradient of a shared K head is that of one query head, not the sum",
    "mask_inverted": "True hides instead of showing",
    "partial_tile_full": "a tile that is visible in part is computed without its bits",
    "tiles_of_first_head": "every head has the tile mask of the first",
    "bits_transposed": "the bits of a tile are read with queries and keys exchanged",
    "first_tile_skipped": "a row of tiles starts with its second one",
}


class Rows(NamedTuple):
    """One query tile of one sequence: where it is, and its scores' neighbourhood."""

    sequence: int
    start: int
    stop: int
    seqlen_q: int
    seqlen_k: int


class Tile(NamedTuple):
    """Scores of one tile, softcap's derivative at each, and what dropout multiplies each probability with."""

    s: Tensor
    softcap_slope: Tensor | float
    keep: Tensor


class ToyBackend:
    """FA-2 in plain torch, one tile at a time, right unless a bug is planted."""

    honours = FEATURES

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.name = f"toy_{bug or 'correct'}"

    def unavailable(self) -> str | None:
        return None

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        del device
        if self.bug == "neighbour_key" and (problem.bias_shape or problem.mask_shape or problem.tiles_shape):
            return "the extra key has no bias and no mask"
        return "the toy has no pages" if problem.kind == "paged" else None

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        del problem, device
        return TileShape(BLOCK_M, BLOCK_N)

    def skips_tiles(self, problem: AttentionProblem) -> str:
        del problem
        return "nothing is skipped"

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        out = torch.empty(problem.out_shape, dtype=problem.dtype)
        out = out.transpose(1, 2) if problem.layout == "bshd" else out
        lse = torch.empty(problem.lse_shape, dtype=problem.accumulate_dtype)
        if problem.kind == "varlen" and self.bug != "padding_unwritten":
            out.zero_()
            lse.fill_(-math.inf)
        for index, q, k, v, to_q, _ in self._sequences(problem, operands):
            for start in range(0, q.shape[1], BLOCK_M):
                rows = Rows(index, start, min(start + BLOCK_M, q.shape[1]), q.shape[1], k.shape[1])
                tile_out, tile_lse = self._forward_tile(problem, operands, rows, q, k, v)
                to_q(out)[:, rows.start : rows.stop] = tile_out.to(problem.dtype)
                self._lse_of(problem, operands, lse, index)[:, rows.start : rows.stop] = tile_lse
        return out, lse

    def _forward_tile(
        self, problem: AttentionProblem, operands: Operands, rows: Rows, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        heads, count = problem.num_heads, rows.stop - rows.start
        row_max = q.new_full((heads, count), -math.inf)
        row_sum, acc = q.new_zeros(heads, count), q.new_zeros(heads, count, problem.head_dim_v)
        for n_start, n_stop in self._key_tiles(rows.seqlen_k):
            s, _, keep = self._tile(problem, operands, rows, q, k, n_start, n_stop)
            if operands.max_logits is not None:
                self._raise(operands, s)
            new_max = torch.maximum(row_max, s.amax(-1))
            shift = torch.where(new_max == -math.inf, 0.0, new_max)
            alpha, p = torch.exp(row_max - shift), torch.exp(s - shift[..., None])
            summed = p * (keep > 0) if self.bug == "dropout_in_denominator" else p
            row_sum = row_sum * alpha + summed.sum(-1)
            acc = acc if self.bug == "no_rescale" else acc * alpha[..., None]
            acc = acc + self._rounded(problem, p * keep) @ v[:, n_start:n_stop]
            row_max = new_max
        shift = torch.where(row_max == -math.inf, 0.0, row_max)
        lse = torch.log(row_sum) + (0.0 if self.bug == "lse_without_max" else shift)
        if operands.sinks is not None:
            lse = torch.logaddexp(lse, operands.sinks.to(lse.dtype)[:, None].expand_as(lse))
        if self.bug == "empty_row_nan":
            return acc * torch.exp(shift - lse)[..., None] * (row_sum / row_sum)[..., None], lse
        whole = torch.where(lse == -math.inf, 0.0, lse if self.bug != "lse_without_max" else lse + shift)
        return acc * torch.exp(shift - whole)[..., None], lse

    def _raise(self, operands: Operands, s: Tensor) -> None:
        assert operands.max_logits is not None
        largest = s.amax((1, 2))
        if self.bug == "largest_of_sizes":
            largest = s.masked_fill(s == -math.inf, 0.0).abs().amax((1, 2))
        if self.bug == "largest_of_last_tile":
            operands.max_logits.fill_(-math.inf)
        if self.bug == "largest_with_sinks" and operands.sinks is not None:
            largest = torch.maximum(largest, operands.sinks.to(largest.dtype))
        operands.max_logits.copy_(torch.maximum(operands.max_logits, largest))

    def backward(self, problem: AttentionProblem, operands: Operands, *given: Any) -> Gradients:
        out, lse, dout, dlse, _wanted = given
        acc = problem.accumulate_dtype
        dq, dk, dv = (torch.zeros_like(t, dtype=acc) for t in operands[:3])
        dbias = None if problem.bias_shape is None else torch.zeros(problem.bias_shape, dtype=acc)
        totals = Gradients(dq, dk, dv, dbias=dbias, dsinks=torch.zeros(problem.num_heads, dtype=acc))
        for index, q, k, v, to_q, to_k in self._sequences(problem, operands):
            do, o = (to_q(t).to(acc) for t in (dout, out))
            row_lse = self._lse_of(problem, operands, lse, index)
            shift = torch.where(row_lse == -math.inf, 0.0, row_lse)
            pull = (do * o).sum(-1)
            if dlse is not None and self.bug != "dlse_ignored":
                pull = pull - self._lse_of(problem, operands, dlse, index)
            if operands.sinks is not None and totals.dsinks is not None:
                sink_p = torch.exp(operands.sinks.to(acc)[:, None] - shift)
                totals.dsinks.add_((sink_p * pull).sum(-1), alpha=1 if self.bug == "dsinks_sign" else -1)
            for start in range(0, q.shape[1], BLOCK_M):
                rows = Rows(index, start, min(start + BLOCK_M, q.shape[1]), q.shape[1], k.shape[1])
                for n_start, n_stop in self._key_tiles(rows.seqlen_k):
                    tile = self._tile(problem, operands, rows, q, k, n_start, n_stop)
                    m, n = slice(rows.start, rows.stop), slice(n_start, n_stop)
                    part = self._backward_tile(
                        problem, tile, q[:, m], k[:, n], v[:, n], do[:, m], shift[:, m], pull[:, m]
                    )
                    _add(totals, part, to_q, to_k, index, m, n)
        return Gradients(
            dq.to(problem.dtype),
            dk.to(problem.dtype),
            dv.to(problem.dtype),
            dbias=None if totals.dbias is None else totals.dbias.to(problem.bias_dtype),
            dsinks=None if operands.sinks is None or totals.dsinks is None else totals.dsinks.to(operands.sinks.dtype),
        )

    def _backward_tile(self, problem: AttentionProblem, tile: Tile, *given: Tensor) -> Gradients:
        q, k, v, do, lse, pull = given
        p = torch.exp(tile.s - lse[..., None])
        dp = do @ v.transpose(1, 2) * tile.keep
        ds = p * (dp - pull[..., None])
        dqk = self._rounded(problem, ds * tile.softcap_slope)
        dv = self._rounded(problem, p * tile.keep).transpose(1, 2) @ do
        dk = problem.scale * (dqk.transpose(1, 2) @ q)
        grouped = dk.unflatten(0, (problem.num_kv_heads, problem.group_size))
        return Gradients(
            dq=problem.scale * (dqk @ k),
            dk=grouped[:, -1] if self.bug == "dk_of_last_head" else grouped.sum(1),
            dv=dv.unflatten(0, (problem.num_kv_heads, problem.group_size)).sum(1),
            dbias=ds,
        )

    def _tile(
        self, problem: AttentionProblem, operands: Operands, rows: Rows, q: Tensor, k: Tensor, n_start: int, n_stop: int
    ) -> Tile:
        s = problem.scale * (q[:, rows.start : rows.stop] @ k[:, n_start:n_stop].transpose(1, 2))
        slope: Tensor | float = 1.0
        if problem.softcap is not None:
            capped = torch.tanh(s / problem.softcap)
            s, slope = problem.softcap * capped, 1.0 - capped**2
            slope = 1.0 if self.bug == "softcap_slope" else slope
        m_idx = torch.arange(rows.start, rows.stop)[:, None]
        n_idx = torch.arange(n_start, n_stop)[None, :]
        distance = n_idx - m_idx - (rows.seqlen_k - rows.seqlen_q)
        if operands.alibi_slopes is not None:
            away = n_idx - m_idx if self.bug == "alibi_top_left" else distance
            s = s - operands.alibi_slopes[rows.sequence].to(s.dtype)[:, None, None] * away.abs()
        inside = (rows.sequence, slice(None), slice(rows.start, rows.stop), slice(n_start, n_stop))
        if operands.bias is not None:
            s = s + operands.bias[inside].to(s.dtype)
        left, right = problem.band
        visible = torch.ones_like(distance, dtype=torch.bool)
        if right is not None:
            visible &= distance <= right + (self.bug == "causal_off_by_one")
        if left is not None:
            visible &= distance >= -left + (self.bug == "window_exclusive")
        if operands.mask is not None:
            visible = visible & (operands.mask[inside] ^ (self.bug == "mask_inverted"))
        if operands.tiles is not None and operands.tile_bits is not None:
            shown = self._tiles(operands.tiles, operands.tile_bits, rows)
            visible = visible & shown[:, rows.start : rows.stop, n_start:n_stop]
        return Tile(s.masked_fill(~visible, -math.inf), slope, self._keep(problem, operands, rows, n_start, n_stop))

    def _tiles(self, kinds: Tensor, bits: Tensor, rows: Rows) -> Tensor:
        """What the tile mask shows of one sequence."""
        kinds = kinds[rows.sequence].clone()
        if self.bug == "partial_tile_full":
            kinds[kinds >= 0] = tiles.FULL
        if self.bug == "tiles_of_first_head":
            kinds = kinds[:1].expand_as(kinds)
        if self.bug == "bits_transposed":
            bits = tiles.packed(tiles.unpacked(bits).mT.contiguous())
        if self.bug == "first_tile_skipped":
            kinds[:, :, :1] = tiles.EMPTY
        return tiles.visible(kinds, bits, rows.seqlen_q, rows.seqlen_k)

    def _keep(self, problem: AttentionProblem, operands: Operands, rows: Rows, n_start: int, n_stop: int) -> Tensor:
        if problem.dropout == 0.0 or operands.seed is None:
            return torch.ones(())
        m_idx, n_idx = np.arange(rows.start, rows.stop), np.arange(n_start, n_stop)
        m_idx = m_idx - rows.start if self.bug == "dropout_rows_of_tile" else m_idx
        seed = int(operands.seed)
        kept = [dropout_keep(seed, problem.dropout, rows.sequence, h, m_idx, n_idx) for h in range(problem.num_heads)]
        scale = 1.0 if self.bug == "dropout_unscaled" else 1.0 / (1.0 - problem.dropout)
        return torch.from_numpy(np.stack(kept)).to(problem.accumulate_dtype) * scale

    def _key_tiles(self, seqlen_k: int) -> list[tuple[int, int]]:
        starts = range(0, seqlen_k, BLOCK_N)
        tiles = [(start, min(start + BLOCK_N, seqlen_k)) for start in starts]
        if self.bug == "dropped_tail":
            tiles = [(start, stop) for start, stop in tiles if stop - start == BLOCK_N or start == 0]
        return tiles

    def _sequences(
        self, problem: AttentionProblem, operands: Operands
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor, _View, _View]]:
        """Every sequence with K/V heads repeated, and the views of its part of a tensor like q or like k."""
        acc, group = problem.accumulate_dtype, problem.group_size
        for index in range(problem.batch):
            to_q = _View(problem, operands.cu_seqlens_q, index)
            to_k = _View(problem, operands.cu_seqlens_k, index, self.bug == "neighbour_key")
            heads = torch.arange(problem.num_heads) // group
            heads = torch.arange(problem.num_heads) % problem.num_kv_heads if self.bug == "gqa_interleaved" else heads
            k, v = (to_k(t).to(acc)[heads] for t in (operands.k, operands.v))
            yield index, to_q(operands.q).to(acc), k, v, to_q, to_k

    def _lse_of(self, problem: AttentionProblem, operands: Operands, lse: Tensor, index: int) -> Tensor:
        if problem.kind == "dense" or operands.cu_seqlens_q is None:
            return lse[index]
        start, stop = operands.cu_seqlens_q[index : index + 2].tolist()
        return lse[:, start:stop]

    def _rounded(self, problem: AttentionProblem, values: Tensor) -> Tensor:
        """What a matrix unit takes is in the dtype of the inputs."""
        return values.to(problem.dtype).to(problem.accumulate_dtype)


class _View:
    """Part of a tensor that belongs to one sequence, heads first."""

    def __init__(
        self, problem: AttentionProblem, cu_seqlens: Tensor | None, index: int, one_more: bool = False
    ) -> None:
        self.index = index
        self.rows: slice | None = None
        if cu_seqlens is not None:
            start, stop = cu_seqlens[index : index + 2].tolist()
            last = index == problem.batch - 1
            self.rows = slice(start, stop + 1 if one_more and not last else stop)

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor[self.index] if self.rows is None else tensor[self.rows].transpose(0, 1)


def _add(totals: Gradients, part: Gradients, to_q: _View, to_k: _View, index: int, rows: slice, cols: slice) -> None:
    """Add one tile's gradients where they belong."""
    for total, add, view, at in zip(totals[:3], part[:3], (to_q, to_k, to_k), (rows, cols, cols), strict=True):
        if total is not None and add is not None:
            view(total)[:, at] += add
    ds, dbias = part.dbias, totals.dbias
    if dbias is None or ds is None:
        return
    for dim, size in enumerate(dbias.shape[1:]):
        ds = ds.sum(dim, keepdim=True) if size == 1 else ds
    at_m, at_n = (slice(None) if size == 1 else at for size, at in zip(dbias.shape[2:], (rows, cols), strict=True))
    dbias[index if dbias.shape[0] > 1 else 0, :, at_m, at_n] += ds


CORRECT = ToyBackend()


def num_scores(case: Case) -> int:
    return case.num_heads * sum(q * k for q, k in zip(case.seqlens_q, case.seqlens_k, strict=True))


# Real backends take all cases; of those that take the toy seconds it takes none.
SOME = [case for case in single_cases() + special_cases() if num_scores(case) < 500_000][::4]


def fault_of(backend: ToyBackend, case: Case) -> Nonconformance | None:
    """What the suite says about the backend on one case; nothing if the backend refuses it."""
    with installed(backend) as name:
        implementation = BackendImplementation(name)
        if implementation.supports(case) is None:
            try:
                check(case, implementation)
            except Nonconformance as fault:
                return fault
    return None


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_correct_backend_passes(case: Case) -> None:
    assert fault_of(CORRECT, case) is None


# What a case must have to show a bug: without it the mutant computes what the correct backend does.
NEEDED: dict[str, Callable[[Case], object]] = {
    "causal_off_by_one": lambda case: case.causal or case.window,
    "window_exclusive": lambda case: case.window,
    "gqa_interleaved": lambda case: case.num_heads > case.num_kv_heads,
    "dk_of_last_head": lambda case: case.num_heads > case.num_kv_heads,
    "alibi_top_left": lambda case: case.alibi,
    "softcap_slope": lambda case: case.softcap,
    "dsinks_sign": lambda case: case.sinks,
    "mask_inverted": lambda case: case.mask,
    **dict.fromkeys((bug for bug in BUGS if "dropout" in bug), lambda case: case.dropout),
    **dict.fromkeys(("neighbour_key", "padding_unwritten"), lambda case: case.kind == "varlen"),
    **dict.fromkeys(("partial_tile_full", "tiles_of_first_head", "bits_transposed", "first_tile_skipped"),
                    lambda case: case.tiles),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    """By one case of the suite at least; small ones are asked first."""
    mutant = ToyBackend(bug)
    cases = filter(NEEDED.get(bug, lambda _: True), sorted(special_cases() + single_cases(), key=num_scores))
    assert any(fault_of(mutant, case) for case in cases), BUGS[bug]


# Planted in the largest scores: what is found instead.
LARGEST_BUGS = {
    "largest_of_sizes": "the largest magnitude",
    "largest_of_last_tile": "the largest of the last tile",
    "largest_with_sinks": "the largest of scores and sink",
}


@pytest.mark.parametrize("bug", ["", *LARGEST_BUGS])
def test_wrong_largest_scores_are_found(bug: str) -> None:
    cases = [case for case in largest_cases() if case.kind != "paged" and not case.fp8]
    if not bug:
        cases = cases[::3]

    def is_wrong(case: Case) -> bool:
        try:
            check_largest(case.forward_only(), BackendImplementation(name))
        except Nonconformance:
            return True
        return False

    with installed(ToyBackend(bug)) as name:
        assert any(map(is_wrong, cases)) == bool(bug)


# Planted in tangents and second derivatives of the reference, and a case that shows each.
HIGHER_BUGS: dict[str, Case] = {
    "tangent_of_v_ignored": Case(),
    "tangent_of_bias_ignored": Case(bias="bhqk"),
    "tangent_of_sinks_ignored": Case(sinks=True),
    "lse_tangent_kept": Case(causal=True),
    "dlse_ignored": Case(),
    "second_derivative_of_softcap": Case(softcap=1.5),
    "dropout_forgotten": Case(dropout=0.3),
    "dsinks_sign": Case(sinks=True),
}


class WrongHigher(ReferenceBackend):
    """The reference, right unless a bug is planted in its higher derivatives."""

    def __init__(self, bug: str = "") -> None:
        self.bug = bug
        self.name = f"higher_{bug or 'correct'}"

    def forward_tangent(
        self, problem: AttentionProblem, operands: Operands, tangents: Tangents, known: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, lse, dot_out, dot_lse = super().forward_tangent(problem, operands, self._bent(tangents), known)
        if self.bug == "lse_tangent_kept":
            dot_out = dot_out + dot_lse[..., None] * out
        return out, lse, dot_out, dot_lse

    def backward_twice(
        self, problem: AttentionProblem, operands: Operands, tangents: Tangents, results: Any, *given: Any
    ) -> Gradients:
        dout, dlse, wanted = given
        if self.bug == "dlse_ignored":
            dlse = None
        if self.bug == "dropout_forgotten":
            problem = dataclasses.replace(problem, dropout=0.0)
        tangents = self._bent(tangents)
        found = super().backward_twice(problem, operands, tangents, results, dout, dlse, wanted)
        if self.bug == "dsinks_sign" and found.dsinks is not None:
            return found._replace(dsinks=-found.dsinks)
        if self.bug == "second_derivative_of_softcap":
            # What is left out of dq: -2 dS raw' slope tanh / c, which a tangent of q alone shows.
            straight = dataclasses.replace(problem, softcap=None)
            other = super().backward_twice(straight, operands, tangents, results, dout, dlse, wanted)
            return found._replace(dq=other.dq)
        return found

    def _bent(self, tangents: Tangents) -> Tangents:
        ignored = self.bug.removeprefix("tangent_of_").removesuffix("_ignored")
        return tangents._replace(**{ignored: None}) if ignored in Tangents._fields else tangents


@pytest.mark.parametrize("bug", ["", *HIGHER_BUGS])
def test_the_suite_finds_bugs_in_higher_derivatives(bug: str) -> None:
    cases = [HIGHER_BUGS[bug]] if bug else list(HIGHER_BUGS.values())
    backend = WrongHigher(bug)
    with installed(backend):
        implementation = BackendImplementation(backend.name)
        for case in cases:
            if not bug:
                check_higher(case, implementation)
                continue
            with pytest.raises(Nonconformance):
                check_higher(case, implementation)
