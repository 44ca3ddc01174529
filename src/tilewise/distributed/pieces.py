"""Which rows of one shard meet which rows of another, and under which mask: pure arithmetic, the same on every rank.

Every pair of chunks is cut into pieces. A piece is a rectangle of scores that one plain attention call computes: masks
are bands along the diagonal, so removing the keys that no row sees and the rows that see no key leaves a band that is
again causal or windowed, aligned at the bottom right (docs/distributed.md has the derivation).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tilewise.distributed.sharding import Chunk, Shard, chunk_order, chunks_per_rank, shard_of
from tilewise.masks import Band

# Where the keys of a piece are: around the diagonal, before every query, or after.
Side = Literal["aligned", "past", "future"]


class Layout(NamedTuple):
    """How a whole problem is spread over ranks. Rows count padding, lengths do not. Hashable, equal on every rank.

    `documents` are the running totals of packed documents, None for a dense sequence. `tilted` (ALiBi) needs pieces on
    one side of the diagonal, `random` (dropout) needs the position of each piece.
    """

    world: int
    sharding: str
    rows_q: int
    rows_k: int
    seqlen_q: int
    seqlen_k: int
    left: int | None
    right: int | None
    documents: tuple[int, ...] | None = None
    tilted: bool = False
    random: bool = False

    @property
    def offset(self) -> int:
        """Aligns the last query with the last key."""
        return self.seqlen_k - self.seqlen_q

    def q_shard(self, rank: int) -> Shard:
        """The queries of a rank."""
        return shard_of(rank, self.world, self.rows_q, self.seqlen_q, self.sharding)

    def k_shard(self, rank: int) -> Shard:
        """The keys of a rank."""
        return shard_of(rank, self.world, self.rows_k, self.seqlen_k, self.sharding)


class Rectangle(NamedTuple):
    """Queries q0 .. q1-1 against keys k0 .. k1-1 of one document, positions counted from its first token."""

    q0: int
    q1: int
    k0: int
    k1: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One attention call: rows of the queries' shard, rows of the keys' shard, and the band between them.

    `left` and `right` are the window of the call, None if unbounded. `side` is the position of the keys: around the
    diagonal ("aligned": distances are those of the call itself), before every query ("past") or after ("future").
    Consecutive whole documents are one piece with their lengths in `cu_seqlens`.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None
    right: int | None
    side: Side
    where: Rectangle
    document: int = 0
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def num_q(self) -> int:
        """Rows of queries."""
        return self.q_stop - self.q_start

    @property
    def num_k(self) -> int:
        """Rows of keys."""
        return self.k_stop - self.k_start

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key, in any order."""
        return self.left is None and self.right is None and self.cu_seqlens is None


@functools.lru_cache(maxsize=4096)
def pieces(layout: Layout, q_shard: Shard, k_shard: Shard) -> tuple[Piece, ...]:
    """The pieces of a shard of queries against a shard of keys, in a fixed order; empty if nothing is seen."""
    found = [piece for q_chunk in q_shard for k_chunk in k_shard for piece in _chunk_pieces(layout, q_chunk, k_chunk)]
    return tuple(found if layout.tilted or layout.random else _joined(found))


@functools.lru_cache(maxsize=256)
def ring_steps(layout: Layout) -> tuple[int, ...]:
    """The distances around the ring at which some rank has work; a window makes them few. 0 is always among them.

    Computed from the reach of each chunk of queries, because trying all pairs of ranks is too slow: packed batches
    bring new documents every step.
    """
    count = chunks_per_rank(layout.sharding)
    size = layout.rows_k // count
    owners = [0] * (layout.world * count)
    for place, chunk in enumerate(chunk_order(layout.world, layout.sharding)):
        owners[chunk] = place // count
    steps = {0}
    # Late ranks first: in a causal problem the last one reaches all others.
    for rank in reversed(range(layout.world)):
        for k0, k1 in (span for chunk in layout.q_shard(rank) for span in _reach(layout, chunk)):
            steps.update((rank - owner) % layout.world for owner in owners[k0 // size : -(-k1 // size)])
        if len(steps) == layout.world:
            break
    return tuple(sorted(steps))


def _reach(layout: Layout, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """The ranges of keys k0 .. k1-1 that some query of a chunk sees, without documents wholly inside it."""
    exact = layout._replace(random=False)
    whole = [(0, Rectangle(chunk.start, chunk.stop, 0, layout.seqlen_k))]
    borders = layout.documents
    if borders is not None:
        ends = {bisect.bisect_right(borders, position) - 1 for position in (chunk.start, chunk.stop - 1)}
        documents = [borders[document : document + 2] for document in ends if document < len(borders) - 1]
        whole = [(start, _within(start, stop, chunk, Chunk(start, stop, 0))) for start, stop in documents]
    for start, where in whole:
        seen = _trimmed(exact, where)
        if seen is not None:
            yield start + seen.k0, start + seen.k1


def pairs_of(piece: Piece) -> int:
    """Scores that a piece computes."""
    if piece.cu_seqlens is None:
        return Band(piece.num_q, piece.num_k, piece.left, piece.right).count_pairs()
    lengths = (b - a for a, b in itertools.pairwise(piece.cu_seqlens))
    return sum(Band(n, n, piece.left, piece.right).count_pairs() for n in lengths)


def _chunk_pieces(layout: Layout, q_chunk: Chunk, k_chunk: Chunk) -> Iterator[Piece]:
    if layout.documents is None:
        where = Rectangle(q_chunk.start, q_chunk.stop, k_chunk.start, k_chunk.stop)
        yield from _rectangle_pieces(layout, where, q_chunk.row - q_chunk.start, k_chunk.row - k_chunk.start, 0)
        return
    borders = layout.documents
    begin, end = max(q_chunk.start, k_chunk.start), min(q_chunk.stop, k_chunk.stop)
    # The documents that reach into both chunks. Those wholly inside both become one piece.
    first = max(0, bisect.bisect_right(borders, begin) - 1)
    whole: list[int] = []
    for document in range(first, len(borders) - 1):
        start, stop = borders[document], borders[document + 1]
        if start >= min(q_chunk.stop, k_chunk.stop):
            break
        if begin <= start and stop <= end:
            whole.append(document)
            continue
        if whole:
            yield _whole_documents(layout, whole, q_chunk, k_chunk)
            whole = []
        q_row, k_row = (chunk.row - chunk.start + start for chunk in (q_chunk, k_chunk))
        yield from _rectangle_pieces(layout, _within(start, stop, q_chunk, k_chunk), q_row, k_row, document)
    if whole:
        yield _whole_documents(layout, whole, q_chunk, k_chunk)


def _within(start: int, stop: int, q_chunk: Chunk, k_chunk: Chunk) -> Rectangle:
    """The parts of a document that two chunks hold, counted from its start."""
    q0, q1 = max(start, q_chunk.start) - start, min(stop, q_chunk.stop) - start
    k0, k1 = max(start, k_chunk.start) - start, min(stop, k_chunk.stop) - start
    return Rectangle(q0, max(q0, q1), k0, max(k0, k1))


def _whole_documents(layout: Layout, documents: list[int], q_chunk: Chunk, k_chunk: Chunk) -> Piece:
    borders = layout.documents
    assert borders is not None
    start, stop = borders[documents[0]], borders[documents[-1] + 1]
    cu_seqlens = tuple(borders[document] - start for document in (*documents, documents[-1] + 1))
    q_row, k_row = q_chunk.row + start - q_chunk.start, k_chunk.row + start - k_chunk.start
    size = stop - start
    where = Rectangle(0, size, 0, size)
    rows = (q_row, q_row + size, k_row, k_row + size)
    return Piece(*rows, layout.left, layout.right, "aligned", where, documents[0], cu_seqlens)


def _rectangle_pieces(layout: Layout, where: Rectangle, q_row: int, k_row: int, document: int) -> Iterator[Piece]:
    """One rectangle, trimmed to its band; `q_row` and `k_row` are the rows of position 0."""
    trimmed = _trimmed(layout, where)
    if trimmed is None:
        return
    q0, q1, k0, k1 = trimmed
    first, last = q0 + layout.offset, q1 + layout.offset
    if layout.tilted and k1 != last and k0 < last and first < k1:
        # Across the diagonal with unequal ends: rows past the last key, keys past the last row, and the aligned rest.
        cut = min(last, k1) - layout.offset
        parts = [Rectangle(cut, q1, k0, k1), Rectangle(q0, cut, k0, cut + layout.offset)]
        parts.append(Rectangle(q0, cut, cut + layout.offset, k1))
        for part in parts:
            yield from _rectangle_pieces(layout, part, q_row, k_row, document)
        return
    excess = k1 - last
    left = None if layout.left is None or layout.left + excess >= k1 - k0 - 1 else layout.left + excess
    right = None if layout.right is None or layout.right - excess >= q1 - q0 - 1 else layout.right - excess
    side: Side = "past" if k1 <= first else "future" if k0 >= last else "aligned"
    yield Piece(q0 + q_row, q1 + q_row, k0 + k_row, k1 + k_row, left, right, side, trimmed, document)


def _trimmed(layout: Layout, where: Rectangle) -> Rectangle | None:
    """The rectangle without keys that no row sees and rows that see no key; None if nothing is left."""
    q0, q1, k0, k1 = where
    left, right, offset = layout.left, layout.right, layout.offset
    if q0 >= q1 or k0 >= k1:
        return None
    if left is not None:
        k0 = max(k0, q0 + offset - left)
    if right is not None:
        k1 = min(k1, q1 + offset + right)
    if k0 >= k1:
        return None
    if right is not None:
        q0 = max(q0, k0 - offset - right)
    if left is not None:
        q1 = min(q1, k1 - offset + left)
    if layout.random:
        # Whole draws of four keys; the window still hides the extra ones.
        k0 = max(where.k0, k0 // 4 * 4)
    return Rectangle(q0, q1, k0, k1) if q0 < q1 else None


def _joined(found: list[Piece]) -> list[Piece]:
    """Join full pieces that share their keys or queries and are adjacent: half the calls in zigzag."""
    joined: list[Piece] = []
    for piece in found:
        before = joined[-1] if joined else None
        if before is not None and before.is_full and piece.is_full:
            same_k = (before.k_start, before.k_stop) == (piece.k_start, piece.k_stop)
            same_q = (before.q_start, before.q_stop) == (piece.q_start, piece.q_stop)
            if same_k and before.q_stop == piece.q_start:
                joined[-1] = replace(before, q_stop=piece.q_stop)
                continue
            if same_q and before.k_stop == piece.k_start:
                joined[-1] = replace(before, k_stop=piece.k_stop)
                continue
        joined.append(piece)
    return joined
