"""Causal, window and length arithmetic, once: which key tiles a query tile visits, and whether each needs a mask.

Everything rests on one fact. Row m sees the keys `m + offset - left .. m + offset + right` that exist, where
`offset = seqlen_k - seqlen_q` aligns the last query with the last key. Consecutive rows see overlapping or touching
ranges, so the keys that some row of a tile sees form one range, and so do the keys that every row sees.

    >>> band = Band(seqlen_q=6, seqlen_k=6, left=None, right=0)          # causal
    >>> [(tile.n_block, tile.kind.name) for tile in band.key_tiles(1, TileGrid(2, 2))]
    [(0, 'FULL'), (1, 'PARTIAL')]
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple


class TileKind(enum.Enum):
    """What a tile of the score matrix needs."""

    SKIP = "no query of the tile sees any of its keys: never touched"
    PARTIAL = "some pairs are masked: the tile is masked element by element"
    FULL = "every query sees every key: no mask is evaluated"


class TileGrid(NamedTuple):
    """Rows of queries and of keys in a tile."""

    block_m: int
    block_n: int


class Tile(NamedTuple):
    """A visited tile of one query block (or of one key block, in the backward)."""

    m_block: int
    n_block: int
    kind: TileKind


class TileCounts(NamedTuple):
    """How many tiles of a score matrix are computed without a mask, with a mask, and skipped."""

    full: int
    partial: int
    skipped: int

    @property
    def visited(self) -> int:
        """Tiles that are computed at all."""
        return self.full + self.partial


class Band(NamedTuple):
    """The visible part of one (seqlen_q, seqlen_k) score matrix; `left` and `right` count keys, None is unbounded."""

    seqlen_q: int
    seqlen_k: int
    left: int | None = None
    right: int | None = None

    @property
    def offset(self) -> int:
        """Key index aligned with query 0 (bottom-right alignment)."""
        return self.seqlen_k - self.seqlen_q

    def sees(self, m_idx: int, n_idx: int) -> bool:
        """Whether query m_idx attends to key n_idx. This is the definition; everything else must agree with it."""
        distance = n_idx - (m_idx + self.offset)
        return (
            0 <= m_idx < self.seqlen_q
            and 0 <= n_idx < self.seqlen_k
            and (self.left is None or distance >= -self.left)
            and (self.right is None or distance <= self.right)
        )

    def keys_seen(self, m_start: int, m_stop: int) -> range:
        """The keys that at least one of the queries m_start .. m_stop-1 sees."""
        m_stop = min(m_stop, self.seqlen_q)
        if m_start >= m_stop:
            return range(0)
        start = 0 if self.left is None else max(0, m_start + self.offset - self.left)
        stop = self.seqlen_k if self.right is None else min(self.seqlen_k, m_stop + self.offset + self.right)
        return range(start, max(start, stop))

    def keys_common(self, m_start: int, m_stop: int) -> range:
        """The keys that every one of the queries m_start .. m_stop-1 (within the sequence) sees."""
        m_stop = min(m_stop, self.seqlen_q)
        if m_start >= m_stop:
            return range(0)
        start = 0 if self.left is None else max(0, m_stop - 1 + self.offset - self.left)
        stop = self.seqlen_k if self.right is None else min(self.seqlen_k, m_start + 1 + self.offset + self.right)
        return range(start, max(start, stop))

    def queries_seeing(self, n_start: int, n_stop: int) -> range:
        """The queries that see at least one of the keys n_start .. n_stop-1."""
        n_stop = min(n_stop, self.seqlen_k)
        if n_start >= n_stop:
            return range(0)
        start = 0 if self.right is None else max(0, n_start - self.offset - self.right)
        stop = self.seqlen_q if self.left is None else min(self.seqlen_q, n_stop - self.offset + self.left)
        return range(start, max(start, stop))

    def tile_kind(self, m_block: int, n_block: int, grid: TileGrid) -> TileKind:
        """Skip, partial or full. Past the last key a tile is partial; rows past the last query do not matter."""
        m_start, n_start = m_block * grid.block_m, n_block * grid.block_n
        n_stop = n_start + grid.block_n
        seen = self.keys_seen(m_start, m_start + grid.block_m)
        if max(n_start, seen.start) >= min(n_stop, seen.stop):
            return TileKind.SKIP
        common = self.keys_common(m_start, m_start + grid.block_m)
        return TileKind.FULL if common.start <= n_start and n_stop <= common.stop else TileKind.PARTIAL

    def key_tiles(self, m_block: int, grid: TileGrid) -> Iterator[Tile]:
        """The tiles a query block visits, in key order (the forward's loop)."""
        seen = self.keys_seen(m_block * grid.block_m, (m_block + 1) * grid.block_m)
        for n_block in _blocks_touching(seen, grid.block_n):
            yield Tile(m_block, n_block, self.tile_kind(m_block, n_block, grid))

    def query_tiles(self, n_block: int, grid: TileGrid) -> Iterator[Tile]:
        """The tiles a key block visits, in query order (the loop of dK and dV)."""
        seeing = self.queries_seeing(n_block * grid.block_n, (n_block + 1) * grid.block_n)
        for m_block in _blocks_touching(seeing, grid.block_m):
            yield Tile(m_block, n_block, self.tile_kind(m_block, n_block, grid))

    def count_tiles(self, grid: TileGrid) -> TileCounts:
        """Tiles by kind, in time linear in the number of query blocks."""
        full = visited = 0
        m_blocks = -(-self.seqlen_q // grid.block_m)
        for m_block in range(m_blocks):
            rows = m_block * grid.block_m, (m_block + 1) * grid.block_m
            visited += len(_blocks_touching(self.keys_seen(*rows), grid.block_n))
            full += len(_blocks_within(self.keys_common(*rows), grid.block_n))
        total = m_blocks * -(-self.seqlen_k // grid.block_n)
        return TileCounts(full=full, partial=visited - full, skipped=total - visited)

    def count_pairs(self) -> int:
        """Visible (query, key) pairs, in closed form: what the FLOPs of exact attention are counted from."""
        up_to_right = self._pairs_up_to(self.right)
        return up_to_right if self.left is None else up_to_right - self._pairs_up_to(-self.left - 1)

    def _pairs_up_to(self, distance: int | None) -> int:
        """Pairs with n - (m + offset) <= distance: sum over rows of clamp(m + offset + distance + 1, 0, seqlen_k)."""
        if distance is None:
            return self.seqlen_q * self.seqlen_k
        first = self.offset + distance + 1
        ramp_start = min(max(0, -first), self.seqlen_q)
        ramp_stop = min(max(ramp_start, self.seqlen_k - first), self.seqlen_q)
        ramp = (ramp_stop - ramp_start) * (2 * first + ramp_start + ramp_stop - 1) // 2
        return ramp + (self.seqlen_q - ramp_stop) * self.seqlen_k


def _blocks_touching(indices: range, block: int) -> range:
    if not indices:
        return range(0)
    return range(indices.start // block, -(-indices.stop // block))


def _blocks_within(indices: range, block: int) -> range:
    start, stop = -(-indices.start // block), indices.stop // block
    return range(start, max(start, stop))
