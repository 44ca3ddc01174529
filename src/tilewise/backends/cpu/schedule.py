"""Block sizes and the list of work items: a pure function of what a problem means and of its sequence lengths, in plain
integers, because it runs in every call with new lengths.

An entry is (batch, first row, chunk of keys, number of chunks). Each is done for every unit (a query head, or a K/V
head with all heads of its group). Entries with most keys come first, so that the last items to finish
are short. Measurements behind the constants are in bench/results/cpu-choices.csv, by name.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tilewise.backends.cpu.isa import host
from tilewise.problem import AttentionProblem
from tilewise.symbolic import largest, smallest

Lengths = Sequence[int]
# Rows and keys of all sequences; how many sequences there are, and the most rows and keys that one has.
BothLengths = tuple[Lengths, Lengths]
Bounds = tuple[int, int, int]
Numbers: TypeAlias = "array[int]"
# Fields of an entry.
ENTRY_FIELDS = 4

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

    entries: Numbers
    num_entries: int
    units: int
    heads_per_unit: int
    block_m: int
    chunk: int = 0
    split: bool = False


class Division(NamedTuple):
    """What decides, besides lengths, how a problem is divided into work items. `shared_heads` are the query heads that
    are always computed together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    kv_item: int
    left: int | None
    right: int | None
    decodes: bool
    splits_keys: bool
    folds: bool
    shared_heads: int

    @classmethod
    def of(cls, problem: AttentionProblem, *, few: bool | None = None) -> Division:
        """That of a problem, whose sizes may be numbers of a trace; `few` for its sequences with few rows."""
        few = decodes(problem) if few is None else few
        return cls(
            problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.head_dim_v, kv_item(problem),
            *problem.band, few, few or splits_keys(problem), not few and folds(problem),
            problem.group_size if few or shares_panels(problem) else 1,
        )  # fmt: skip

    def chunks(self, keys: int) -> int:
        """Chunks of an entry with so many keys: more than one only for few rows and many keys."""
        return largest(1, -(-keys // chunk_keys())) if self.splits_keys else 1


def bounds_of(problem: AttentionProblem) -> Bounds:
    """Those of a problem, which may be numbers of a trace."""
    return problem.batch, problem.seqlen_q, problem.seqlen_k


def round_up(number: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-number // step) * step


def kv_item(problem: AttentionProblem) -> int:
    """Bytes of an element of K or V."""
    return 1 if problem.fp8 else problem.dtype.itemsize


def decodes(problem: AttentionProblem) -> bool:
    """Whether a problem takes the decode path."""
    return problem.seqlen_q * problem.group_size <= DECODE_ROWS and problem.tiles_shape is None


def divided(group_size: int, bounds: Bounds, lengths: BothLengths) -> list[tuple[bool, Bounds, BothLengths]]:
    """Sequences with many query rows and those with few, where there are any: whether they are few, their bounds, and
    lengths with 0 rows for the others. What a sequence takes depends on its own length: decoding beside prompts stays
    fast.
    """
    (rows, keys), (_, longest_of_all, most_keys) = lengths, bounds
    most = DECODE_ROWS // group_size
    many, few = ([n if (n <= most) is short else 0 for n in rows] for short in (False, True))
    # The bound of the many stays the caller's: it decides on chunks of keys, and so on bits.
    parts = (False, many, longest_of_all), (True, few, max(few, default=0))
    return [
        (is_few, (len(part) - part.count(0), longest, most_keys), (part, keys))
        for is_few, part, longest in parts
        if any(part)
    ]


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


def block_rows(division: Division, bounds: Bounds, threads: int) -> int:
    """Query rows of a work item: fewer if threads would be idle. Results do not depend on it."""
    heads, (batch, seqlen_q, seqlen_k) = division.shared_heads, bounds
    if division.decodes:
        return round_up(max(1, seqlen_q * heads), host().lanes)
    panel, total = host().panel, largest(1, seqlen_q * heads)
    units = largest(1, batch) * division.num_heads // heads * division.chunks(seqlen_k)
    # Packing K and V costs as much as tens of rows, so chunks of keys are divided less eagerly.
    wanted = threads if division.splits_keys else BLOCKS_PER_THREAD * threads
    share = -(-total // -(-wanted // units))
    return smallest(host().block_m, round_up(share, panel))


def heads_per_unit(division: Division, seqlen_q: int, chunks: int, threads: int) -> int:
    """Query heads of a work item: a group that shares panels, several groups in decode. Bits stay the same."""
    group = division.shared_heads
    if not division.decodes:
        return group
    kv_heads, bytes_per_head = division.num_kv_heads, division.head_dim * division.kv_item
    most = min(host().panel // max(1, seqlen_q * group), TOGETHER_BYTES // bytes_per_head)
    for together in range(min(most, kv_heads), 1, -1):
        if kv_heads % together == 0 and chunks * kv_heads // together >= ITEMS_PER_THREAD * threads:
            return together * group
    return group


class Blocks(NamedTuple):
    """What entries depend on where all sequences are equally long: their number, blocks of rows and chunks of keys in
    each, heads that are computed together, and rows of a block. May be numbers of a trace.
    """

    batch: int
    blocks: int
    chunks: int
    heads: int
    block: int

    @classmethod
    def of(cls, division: Division, bounds: Bounds, threads: int) -> Blocks:
        """For these lengths."""
        batch, seqlen_q, seqlen_k = bounds
        chunks = division.chunks(seqlen_k)
        heads, block = item_size(division, bounds, batch * chunks, threads)
        return cls(batch, -(-seqlen_q * heads // block), chunks, heads, block)


def item_size(division: Division, bounds: Bounds, chunks: int, threads: int) -> tuple[int, int]:
    """(heads of a unit, rows of a block) where the sequences have so many chunks together."""
    if not division.decodes:
        return division.shared_heads, block_rows(division, bounds, threads)
    heads = heads_per_unit(division, bounds[1], chunks, threads)
    return heads, round_up(max(1, bounds[1] * heads), host().lanes)


def equal_schedule(division: Division, sizes: Blocks) -> Schedule:
    """Entries for sequences that are equally long."""
    batch, blocks, chunks, heads, block = sizes
    if division.right is None and division.left is None:  # blocks of a sequence one after the other: they read its keys
        order = [(one, number) for one in range(batch) for number in range(blocks)]
    else:
        numbers = range(blocks) if division.right is None else range(blocks)[::-1]
        order = [(one, number) for number in numbers for one in range(batch)]
    entries = [x for one, number in order for chunk in range(chunks) for x in (one, number * block, chunk, chunks)]
    return _schedule(division, entries, heads, block, chunks > 1)


def forward_schedule(division: Division, bounds: Bounds, lengths: BothLengths, threads: int) -> Schedule:
    """Entries for sequences of these query and key lengths."""
    chunks = [division.chunks(n) if m else 0 for m, n in zip(*lengths, strict=True)]
    heads, block = item_size(division, bounds, sum(chunks), threads)
    return _schedule(
        division, _entries(division, lengths, chunks, heads, block), heads, block, max(chunks, default=0) > 1
    )


def _schedule(division: Division, entries: Sequence[int], heads: int, block: int, split: bool) -> Schedule:
    units = division.num_heads // heads
    return Schedule(table(entries), len(entries) // ENTRY_FIELDS, units, heads, block, chunk_keys(), split)


def items_of(division: Division, lengths: BothLengths) -> tuple[tuple[int, ...], ...]:
    """What the entries of a pass over few rows depend on: rows and chunks of each sequence, and which has most keys."""
    rows, keys = lengths
    order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    return tuple(rows), tuple([division.chunks(n) for n in keys]), tuple(order)


def _entries(division: Division, lengths: BothLengths, chunks: Lengths, heads: int, block: int) -> list[int]:
    blocks: list[tuple[int, int, int]] = []
    for batch, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        rows = queries * heads
        for first in range(0, rows, block):
            # The rows of a unit continue from head to head.
            end_row = (min(first + block, rows) - 1) % queries + 1
            blocks.append((keys_seen(division.left, division.right, end_row, queries, keys), batch, first))
    blocks.sort(key=operator.itemgetter(0), reverse=True)
    entries: list[int] = []
    for _, batch, first in blocks:
        count = chunks[batch]
        for chunk in range(count):
            entries += (batch, first, chunk, count)
    return entries


def table(numbers: Sequence[int]) -> Numbers:
    """Memory with these numbers, which kernels read as int64."""
    return array("q", numbers)


def chunk_keys() -> int:
    """Keys in a chunk: whole tiles."""
    return round_up(CHUNK, host().block_n)


def fold_keys() -> int:
    """Keys between two additions to totals: whole tiles."""
    return round_up(FOLD, host().block_n)


def folds(problem: AttentionProblem) -> bool:
    """Whether blocks need totals: their keys are many and not split into chunks."""
    return not splits_keys(problem) and problem.seqlen_k > fold_keys()


def keys_seen(left: int | None, right: int | None, end_row: int, queries: int, keys: int) -> int:
    """How many keys the last row of an entry sees, roughly the cost of the entry."""
    last = keys if right is None else min(keys, end_row + keys - queries + right)
    first = 0 if left is None else max(0, end_row + keys - queries - left)
    return max(0, last - first)
