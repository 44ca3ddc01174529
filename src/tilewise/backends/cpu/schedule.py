"""Block sizes and the list of work items: a pure function of the problem and its sequence lengths.

An entry is (batch, first row, number of rows, chunk of keys, number of chunks). Each is done for every unit (a query
head, or a K/V head with all heads of its group). Entries with most keys come first, so that the last items to finish
are short. Measurements behind the constants are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.backends.cpu.isa import host
from tilewise.problem import AttentionProblem

Lengths = NDArray[np.int64]

# Sequences with few query rows are split over keys in chunks. The chunk depends on the problem only, so results do not
# depend on threads. Longer chunks balance worse; shorter ones are started and merged too often.
CHUNK = 1024
CHUNK_ROWS = 64
# Keys that are summed directly in fp32 where they are not split. Longer sums are folded into compensated totals.
FOLD = 4096
# Up to this many rows a unit takes the decode kernel: vectors along the head dim beat a mostly empty panel of queries.
DECODE_ROWS = 8
# Limit on the row bytes of K/V heads that are decoded together, so that the rows in flight fit the second-level cache.
TOGETHER_BYTES = 4096
# With fewer items per thread than this, fewer heads are decoded together.
ITEMS_PER_THREAD = 2
# The same for blocks of rows that see all keys. More, because they differ in cost where there is a band.
BLOCKS_PER_THREAD = 4


class Schedule(NamedTuple):
    """Work items of a pass. `chunk` is the number of keys in a chunk, `split` whether any entry has several."""

    entries: Tensor
    units: int
    heads_per_unit: int
    block_m: int
    chunk: int = 0
    split: bool = False


def round_up(number: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-number // step) * step


def kv_item(problem: AttentionProblem) -> int:
    """Bytes of an element of K or V."""
    return 1 if problem.fp8 else problem.dtype.itemsize


def decodes(problem: AttentionProblem) -> bool:
    """Whether a problem takes the decode path."""
    return problem.seqlen_q * problem.group_size <= DECODE_ROWS and problem.tiles_shape is None


def divided(problem: AttentionProblem, q_lengths: Lengths) -> list[tuple[AttentionProblem, Lengths]]:
    """The problem of sequences with many query rows and that of sequences with few, where there are any, each with the
    query lengths of its own sequences and 0 for others. What a sequence takes depends on its own length: decoding
    beside prompts stays fast.
    """
    if problem.kind == "dense" or problem.tiles_shape is not None or decodes(problem):
        return [(problem, q_lengths)]
    few = q_lengths * problem.group_size <= DECODE_ROWS
    many, short = np.where(few, 0, q_lengths), np.where(few, q_lengths, 0)
    # The bound of the many stays the caller's: it decides on chunks of keys, and so on bits.
    bounds = (many, problem.seqlen_q), (short, int(short.max(initial=0)))
    parts = ((replace(problem, batch=int((rows > 0).sum()), seqlen_q=most), rows) for rows, most in bounds)
    return [(part, rows) for part, rows in parts if part.batch]


def shares_panels(problem: AttentionProblem) -> bool:
    """Whether a GQA group is computed together: its rows fit a block, so K and V are packed once.

    Not under a tile mask, whose panels lie in one tile of one head.
    """
    if problem.tiles_shape is not None:
        return False
    return problem.group_size > 1 and problem.seqlen_q * problem.group_size <= host().block_m


def splits_keys(problem: AttentionProblem) -> bool:
    """Whether long sequences are split over their keys."""
    return problem.seqlen_q <= CHUNK_ROWS


def rows_per_unit(problem: AttentionProblem) -> int:
    """Query rows of one sequence in one unit of work."""
    return problem.seqlen_q * (problem.group_size if shares_panels(problem) else 1)


def block_rows(problem: AttentionProblem, threads: int) -> int:
    """Query rows of a work item: fewer if threads would be idle. Results do not depend on it."""
    panel = host().panel
    if decodes(problem):
        return round_up(max(1, rows_per_unit(problem)), host().lanes)
    total, heads = max(1, rows_per_unit(problem)), problem.group_size if shares_panels(problem) else 1
    units = max(1, problem.batch) * problem.num_heads // heads * int(_chunks(problem, np.array([problem.seqlen_k]))[0])
    # Packing K and V costs as much as tens of rows, so chunks of keys are divided less eagerly.
    wanted = threads if splits_keys(problem) else BLOCKS_PER_THREAD * threads
    rows = min(host().block_m, round_up(total, panel))
    while rows > panel and units * -(-total // rows) < wanted:
        rows = round_up(rows // 2, panel)
    return rows


def heads_per_unit(problem: AttentionProblem, k_lengths: Lengths, threads: int) -> int:
    """Query heads of a work item: a group that shares panels, several groups in decode. Bits stay the same."""
    if not decodes(problem):
        return problem.group_size if shares_panels(problem) else 1
    kv_heads, bytes_per_head = problem.num_kv_heads, problem.head_dim * kv_item(problem)
    most = min(host().panel // max(1, problem.seqlen_q * problem.group_size), TOGETHER_BYTES // bytes_per_head)
    chunks = int(_chunks(problem, k_lengths).sum())
    fitting = (n for n in range(max(1, most), 0, -1) if kv_heads % n == 0)
    together = next((n for n in fitting if chunks * kv_heads // n >= ITEMS_PER_THREAD * threads), 1)
    return together * problem.group_size


def dense_lengths(problem: AttentionProblem) -> tuple[Lengths, Lengths]:
    """Query and key lengths of sequences of equal length."""
    return np.full(problem.batch, problem.seqlen_q), np.full(problem.batch, problem.seqlen_k)


def forward_schedule(problem: AttentionProblem, q_lengths: Lengths, k_lengths: Lengths, threads: int) -> Schedule:
    """Entries for sequences of these lengths."""
    heads = heads_per_unit(problem, k_lengths[q_lengths > 0], threads)
    block = (
        round_up(max(1, problem.seqlen_q * heads), host().lanes) if decodes(problem) else block_rows(problem, threads)
    )
    rows = q_lengths * heads
    counts = -(-rows // block)
    batch = np.repeat(np.arange(len(rows)), counts)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * block
    size = np.minimum(block, rows[batch] - first)
    # The rows of a unit continue from head to head.
    end_row = (first + size - 1) % q_lengths[batch] + 1
    order = np.argsort(-keys_seen(problem, end_row, q_lengths[batch], k_lengths[batch]), kind="stable")
    batch, first, size = batch[order], first[order], size[order]
    chunks = _chunks(problem, k_lengths[batch])
    chunk = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    columns = [np.repeat(column, chunks) for column in (batch, first, size)] + [chunk, np.repeat(chunks, chunks)]
    entries = torch.from_numpy(np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int64))
    return Schedule(
        entries, problem.num_heads // heads, heads, block, chunk_keys(), len(chunks) > 0 and int(chunks.max()) > 1
    )


def chunk_keys() -> int:
    """Keys in a chunk: whole tiles."""
    return round_up(CHUNK, host().block_n)


def fold_keys() -> int:
    """Keys between two additions to totals: whole tiles."""
    return round_up(FOLD, host().block_n)


def folds(problem: AttentionProblem) -> bool:
    """Whether blocks need totals: their keys are many and not split into chunks."""
    return not splits_keys(problem) and problem.seqlen_k > fold_keys()


def keys_seen(problem: AttentionProblem, end_row: Lengths, q_lengths: Lengths, k_lengths: Lengths) -> Lengths:
    """How many keys the last row of each entry sees, roughly the cost of the entry."""
    left, right = problem.band
    last = k_lengths if right is None else np.minimum(k_lengths, end_row + k_lengths - q_lengths + right)
    first = np.zeros_like(last) if left is None else np.maximum(0, end_row + k_lengths - q_lengths - left)
    return np.maximum(0, last - first)


def _chunks(problem: AttentionProblem, k_lengths: Lengths) -> Lengths:
    """Chunks of keys per entry: more than one only for few rows and many keys."""
    if not splits_keys(problem):
        return np.ones_like(k_lengths)
    return np.maximum(1, -(-k_lengths // chunk_keys()))
