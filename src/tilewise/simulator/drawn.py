"""A mask pair by pair, such as one that was drawn: what schedules ask of a `Band`, answered by a table."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.masks import TileGrid, TileKind


class Drawn(NamedTuple):
    """`rows` has one text a query: "1" for a key that it sees, "0" for one that is hidden."""

    rows: tuple[str, ...]

    def sees(self, m_idx: int, n_idx: int) -> bool:
        """Whether query m_idx attends to key n_idx."""
        return self.rows[m_idx][n_idx] == "1"

    def queries_seeing(self, n_start: int, n_stop: int) -> list[int]:
        """The queries that see at least one of the keys n_start .. n_stop-1."""
        return [m_idx for m_idx, row in enumerate(self.rows) if "1" in row[n_start:n_stop]]

    def tile_kind(self, m_block: int, n_block: int, grid: TileGrid) -> TileKind:
        """What a tile needs; as under a `Band`, one that reaches past the last key is never full."""
        rows = self.rows[m_block * grid.block_m : (m_block + 1) * grid.block_m]
        start, stop = n_block * grid.block_n, (n_block + 1) * grid.block_n
        parts = [row[start:stop] for row in rows]
        if not any("1" in part for part in parts):
            return TileKind.SKIP
        return TileKind.FULL if all(part == "1" * grid.block_n for part in parts) else TileKind.PARTIAL
