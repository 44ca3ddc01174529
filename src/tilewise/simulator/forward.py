"""Schedules of the forward: naive, FA-1 order, FA-2 order, and split-KV decoding from contiguous or paged keys."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.masks import TileGrid, TileKind
from tilewise.simulator.events import ArraySpec, Span, Workload
from tilewise.simulator.tape import Tape, key_blocks, length_of, row_blocks


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

    def scores(m_block: int, rows: Span) -> None:
        kind = work.visible.tile_kind(m_block, 0, TileGrid(work.block_m, work.seqlen_k))
        _scores(tape, rows, keys, masked=kind is not TileKind.FULL)

    def softmax(_: int, rows: Span) -> None:
        tape.compute("softmax", "p", ("s",), (length_of(rows), work.seqlen_k), replaces="s")

    def values(_: int, rows: Span) -> None:
        tape.compute("product", "acc", ("p", "v"), (length_of(rows), work.head_dim_v), inner=work.seqlen_k)

    tape.kernel("scores", ("q",), scores, "s", ("q", "s"), resident="k")
    tape.kernel("softmax", ("s",), softmax, "p", ("p",))
    tape.kernel("values", ("p",), values, "acc", ("p", "acc"), resident="v", array="out")


def fa1(tape: Tape) -> None:
    """K/V outside: the running state of a tile of rows is read and written back once per tile of keys it sees."""
    work = tape.workload
    for n_block, keys in key_blocks(work):
        seen = bool(work.visible.queries_seeing(*keys))
        if seen:
            tape.at("setup", n_block=n_block)
            tape.load("k", keys)
            tape.load("v", keys)
        for m_block, rows in row_blocks(work):
            kind = work.visible.tile_kind(m_block, n_block, work.grid)
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
    for m_block, rows in row_blocks(tape.workload):
        _query_tile(tape, m_block, rows, key_blocks(tape.workload), None)


def decode(tape: Tape) -> None:
    """The tiles of keys are split among workers, each of which does FA-2; the partial results are then merged."""
    work, every = tape.workload, key_blocks(tape.workload)
    for part in range(work.num_splits):
        own = every[part * len(every) // work.num_splits : (part + 1) * len(every) // work.num_splits]
        for m_block, rows in row_blocks(work):
            _query_tile(tape, m_block, rows, own, part)
    if work.num_splits > 1:
        for m_block, rows in row_blocks(work):
            _merge(tape, m_block, rows)


def _query_tile(tape: Tape, m_block: int, rows: Span, n_blocks: Sequence[tuple[int, Span]], part: int | None) -> None:
    """FA-2 for one tile of rows over some tiles of keys, which may be a split."""
    work = tape.workload
    tape.at("setup", m_block, part=part)
    tape.load("q", rows)
    _init_state(tape, rows)
    for n_block, keys in n_blocks:
        kind = work.visible.tile_kind(m_block, n_block, work.grid)
        if kind is TileKind.SKIP:
            tape.skip(m_block, n_block, rows, keys, part=part)
        else:
            _fa2_tile(tape, (m_block, n_block, part), rows, keys, masked=kind is TileKind.PARTIAL)
    tape.at("finish", m_block, part=part)
    _finish(tape, rows, part)
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


def _merge(tape: Tape, m_block: int, rows: Span) -> None:
    """The partial results of all splits: an online softmax whose scores are their lse and whose values their out."""
    work = tape.workload
    tape.at("setup", m_block)
    _init_state(tape, rows)
    for part in range(work.num_splits):
        partial = rows[0] + part * work.seqlen_q, rows[1] + part * work.seqlen_q
        tape.at("merge", m_block, part=part)
        tape.load("out_partial", partial)
        tape.load("lse_partial", partial)
        tape.compute("row_max", "new_max", ("row_max", "lse_partial"), (length_of(rows), 1))
        tape.rescale("acc", "row_sum")
        tape.update("merge", "acc", ("out_partial", "lse_partial", "row_max"), (length_of(rows), work.head_dim_v))
        tape.update("merge_sum", "row_sum", ("lse_partial", "row_max"), (length_of(rows), 1))
        tape.free("out_partial", "lse_partial")
    tape.at("finish", m_block)
    _finish(tape, rows, None)
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


def _finish(tape: Tape, rows: Span, part: int | None) -> None:
    """Normalise once, and write out and lse once: as results, or as partial ones of a split."""
    work, there, suffix = tape.workload, rows, ""
    if part is not None and work.num_splits > 1:
        there, suffix = (rows[0] + part * work.seqlen_q, rows[1] + part * work.seqlen_q), "_partial"
    tape.update("normalise", "acc", ("row_sum",), (length_of(rows), work.head_dim_v))
    tape.compute("lse", "lse", ("row_sum", "row_max"), (length_of(rows), 1), replaces="row_sum")
    tape.store("acc", there, array=f"out{suffix}")
    tape.store("lse", there, array=f"lse{suffix}")
