"""Schedules of the forward: naive, FA-1 order, FA-2 order, and split-KV decoding from contiguous or paged keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewise.masks import TileGrid, TileKind
from tilewise.simulator.events import ArraySpec, Span, Workload
from tilewise.simulator.tape import Tape, blocks, length_of, span

__all__ = ["attention_arrays", "decode", "decode_arrays", "fa1", "fa1_arrays", "fa2", "naive", "naive_arrays"]


def attention_arrays(work: Workload) -> dict[str, ArraySpec]:
    """q, k, v in; out and lse out."""
    return {
        "q": ArraySpec(work.seqlen_q, work.head_dim),
        "k": ArraySpec(work.seqlen_k, work.head_dim),
        "v": ArraySpec(work.seqlen_k, work.head_dim_v),
        "out": ArraySpec(work.seqlen_q, work.head_dim_v, fill="empty"),
        "lse": ArraySpec(work.seqlen_q, 1, wide=True, fill="empty"),
    }


def naive_arrays(work: Workload) -> dict[str, ArraySpec]:
    """The score matrix and its softmax lie in slow memory; there is no lse."""
    matrix = ArraySpec(work.seqlen_q, work.seqlen_k, fill="empty")
    arrays = attention_arrays(work) | {"s": matrix, "p": matrix}
    del arrays["lse"]
    return arrays


def fa1_arrays(work: Workload) -> dict[str, ArraySpec]:
    """The running state of every row lies in slow memory, filled beforehand."""
    arrays = attention_arrays(work)
    del arrays["lse"]
    return arrays | {
        "out": ArraySpec(work.seqlen_q, work.head_dim_v, fill="zero"),
        "row_max": ArraySpec(work.seqlen_q, 1, wide=True, fill="minus_infinity"),
        "row_sum": ArraySpec(work.seqlen_q, 1, wide=True, fill="zero"),
    }


def decode_arrays(work: Workload) -> dict[str, ArraySpec]:
    """Partial results per split where there are several; pages instead of k and v where there is a table."""
    arrays = attention_arrays(work)
    if work.num_splits > 1:
        rows = work.num_splits * work.seqlen_q
        arrays["out_partial"] = ArraySpec(rows, work.head_dim_v, wide=True, fill="empty")
        arrays["lse_partial"] = ArraySpec(rows, 1, wide=True, fill="empty")
    if work.block_table is not None:
        slots = (max(work.block_table) + 1) * work.block_n
        arrays["k_pages"], arrays["v_pages"] = ArraySpec(slots, work.head_dim), ArraySpec(slots, work.head_dim_v)
        del arrays["k"], arrays["v"]
    return arrays


def naive(tape: Tape) -> None:
    """Three kernels; the score matrix is written, read, written and read again."""
    work, keys = tape.workload, (0, tape.workload.seqlen_k)
    whole_rows = TileGrid(work.block_m, work.seqlen_k)
    row_blocks = [
        (m_block, span(m_block, work.block_m, work.seqlen_q)) for m_block in blocks(work.seqlen_q, work.block_m)
    ]
    tape.at("scores")
    tape.load("k", keys)
    for m_block, rows in row_blocks:
        tape.at("scores", m_block, 0)
        tape.load("q", rows)
        masked = work.band.tile_kind(m_block, 0, whole_rows) is not TileKind.FULL
        _scores(tape, rows, keys, masked=masked)
        tape.store("s", rows)
        tape.free("q", "s")
    tape.at("scores")
    tape.free("k")
    for m_block, rows in row_blocks:
        tape.at("softmax", m_block, 0)
        tape.load("s", rows)
        tape.compute("softmax", "p", ("s",), (length_of(rows), work.seqlen_k), replaces="s")
        tape.store("p", rows)
        tape.free("p")
    tape.at("values")
    tape.load("v", keys)
    for m_block, rows in row_blocks:
        tape.at("values", m_block, 0)
        tape.load("p", rows)
        tape.compute("product", "acc", ("p", "v"), (length_of(rows), work.head_dim_v), inner=work.seqlen_k)
        tape.store("acc", rows, array="out")
        tape.free("p", "acc")
    tape.at("values")
    tape.free("v")


def fa1(tape: Tape) -> None:
    """K/V outside: the running state of a tile of rows is read and written back once per tile of keys it sees."""
    work = tape.workload
    for n_block in blocks(work.seqlen_k, work.block_n):
        keys = span(n_block, work.block_n, work.seqlen_k)
        seen = bool(work.band.queries_seeing(*keys))
        if seen:
            tape.at("setup", n_block=n_block)
            tape.load("k", keys)
            tape.load("v", keys)
        for m_block in blocks(work.seqlen_q, work.block_m):
            rows = span(m_block, work.block_m, work.seqlen_q)
            kind = work.band.tile_kind(m_block, n_block, work.grid)
            if kind is TileKind.SKIP:
                tape.skip(m_block, n_block, rows, keys)
            else:
                _fa1_tile(tape, m_block, n_block, rows, keys, masked=kind is TileKind.PARTIAL)
        if seen:
            tape.at("finish", n_block=n_block)
            tape.free("k", "v")


def _fa1_tile(tape: Tape, m_block: int, n_block: int, rows: Span, keys: Span, *, masked: bool) -> None:
    shape = length_of(rows), tape.workload.head_dim_v
    tape.at("scores", m_block, n_block)
    tape.load("q", rows)
    tape.load("acc", rows, array="out")
    tape.load("row_max", rows)
    tape.load("row_sum", rows)
    _scores(tape, rows, keys, masked=masked)
    tape.at("softmax", m_block, n_block)
    _online_softmax(tape, rows, keys, normalised=True)
    tape.at("values", m_block, n_block)
    tape.update("values", "acc", ("p", "v"), shape, inner=length_of(keys))
    tape.update("normalise", "acc", ("row_sum",), shape)
    tape.store("acc", rows, array="out")
    tape.store("row_max", rows)
    tape.store("row_sum", rows)
    tape.free("p", "q", "acc", "row_max", "row_sum")


def fa2(tape: Tape) -> None:
    """Q outside: the state of a tile of rows stays in fast memory and is normalised and written once."""
    work = tape.workload
    for m_block in blocks(work.seqlen_q, work.block_m):
        _query_tile(tape, m_block, blocks(work.seqlen_k, work.block_n), _Split(None, "out", "lse", 0))


@dataclass(frozen=True, slots=True)
class _Split:
    """Which split this is, and where its result goes: arrays and the first row."""

    part: int | None
    out: str
    lse: str
    first_row: int


def decode(tape: Tape) -> None:
    """The tiles of keys are split among workers, each of which does FA-2; the partial results are then merged."""
    work = tape.workload
    n_blocks = blocks(work.seqlen_k, work.block_n)
    for part in range(work.num_splits):
        own = n_blocks[part * len(n_blocks) // work.num_splits : (part + 1) * len(n_blocks) // work.num_splits]
        split = _Split(part, "out", "lse", 0)
        if work.num_splits > 1:
            split = _Split(part, "out_partial", "lse_partial", part * work.seqlen_q)
        for m_block in blocks(work.seqlen_q, work.block_m):
            _query_tile(tape, m_block, own, split)
    if work.num_splits > 1:
        for m_block in blocks(work.seqlen_q, work.block_m):
            _merge(tape, m_block)


def _query_tile(tape: Tape, m_block: int, n_blocks: Iterable[int], split: _Split) -> None:
    """FA-2 for one tile of rows over some tiles of keys."""
    work = tape.workload
    rows = span(m_block, work.block_m, work.seqlen_q)
    tape.at("setup", m_block, part=split.part)
    tape.load("q", rows)
    _init_state(tape, rows)
    for n_block in n_blocks:
        keys = span(n_block, work.block_n, work.seqlen_k)
        kind = work.band.tile_kind(m_block, n_block, work.grid)
        if kind is TileKind.SKIP:
            tape.skip(m_block, n_block, rows, keys, part=split.part)
        else:
            _fa2_tile(tape, (m_block, n_block, split.part), rows, keys, masked=kind is TileKind.PARTIAL)
    tape.at("finish", m_block, part=split.part)
    _finish(tape, rows, split)
    tape.free("q", "acc", "row_max", "lse")


def _fa2_tile(tape: Tape, place: tuple[int, int, int | None], rows: Span, keys: Span, *, masked: bool) -> None:
    work = tape.workload
    m_block, n_block, part = place
    tape.at("scores", m_block, n_block, part=part)
    if work.block_table is None:
        tape.load("k", keys)
        tape.load("v", keys)
    else:
        first = work.block_table[n_block] * work.block_n
        slots = first, first + length_of(keys)
        tape.load("k", slots, array="k_pages")
        tape.load("v", slots, array="v_pages")
    _scores(tape, rows, keys, masked=masked)
    tape.at("softmax", m_block, n_block, part=part)
    _online_softmax(tape, rows, keys)
    tape.at("values", m_block, n_block, part=part)
    tape.update("values", "acc", ("p", "v"), (length_of(rows), work.head_dim_v), inner=length_of(keys))
    tape.free("p", "k", "v")


def _merge(tape: Tape, m_block: int) -> None:
    """The partial results of all splits: an online softmax whose scores are their lse and whose values their out."""
    work = tape.workload
    start, stop = rows = span(m_block, work.block_m, work.seqlen_q)
    tape.at("setup", m_block)
    _init_state(tape, rows)
    for part in range(work.num_splits):
        partial = start + part * work.seqlen_q, stop + part * work.seqlen_q
        tape.at("merge", m_block, part=part)
        tape.load("out_partial", partial)
        tape.load("lse_partial", partial)
        tape.compute("row_max", "new_max", ("row_max", "lse_partial"), (length_of(rows), 1))
        tape.rescale("acc", "row_sum")
        tape.update("merge", "acc", ("out_partial", "lse_partial", "row_max"), (length_of(rows), work.head_dim_v))
        tape.update("merge_sum", "row_sum", ("lse_partial", "row_max"), (length_of(rows), 1))
        tape.free("out_partial", "lse_partial")
    tape.at("finish", m_block)
    _finish(tape, rows, _Split(None, "out", "lse", 0))
    tape.free("acc", "row_max", "lse")


def _init_state(tape: Tape, rows: Span) -> None:
    tape.compute("init", "acc", (), (length_of(rows), tape.workload.head_dim_v))
    tape.compute("init", "row_max", (), (length_of(rows), 1))
    tape.compute("init", "row_sum", (), (length_of(rows), 1))


def _scores(tape: Tape, rows: Span, keys: Span, *, masked: bool) -> None:
    shape = length_of(rows), length_of(keys)
    tape.compute("scores", "s", ("q", "k"), shape, inner=tape.workload.head_dim)
    if masked:
        tape.compute("mask", "s", ("s",), shape, replaces="s", tokens=(rows, keys))


def _online_softmax(tape: Tape, rows: Span, keys: Span, *, normalised: bool = False) -> None:
    tape.compute("row_max", "new_max", ("row_max", "s"), (length_of(rows), 1))
    tape.compute("exp", "p", ("s", "new_max"), (length_of(rows), length_of(keys)), replaces="s")
    tape.rescale("acc", "row_sum", normalised=normalised)
    tape.update("row_sum", "row_sum", ("p",), (length_of(rows), 1))


def _finish(tape: Tape, rows: Span, split: _Split) -> None:
    """Normalise once, and write out and lse once."""
    there = rows[0] + split.first_row, rows[1] + split.first_row
    tape.update("normalise", "acc", ("row_sum",), (length_of(rows), tape.workload.head_dim_v))
    tape.compute("lse", "lse", ("row_sum", "row_max"), (length_of(rows), 1), replaces="row_sum")
    tape.store("acc", there, array=split.out)
    tape.store("lse", there, array=split.lse)
