"""masks.Band against brute force, for every small size."""

import itertools

import pytest

from tilewise.masks import Band, TileGrid, TileKind

SIDES = (None, 0, 1, 3)


def bands(longest: int) -> list[Band]:
    sizes = range(longest + 1)
    return [Band(*b) for b in itertools.product(sizes, sizes, SIDES, SIDES)]


def pairs(band: Band) -> set[tuple[int, int]]:
    return {(m, n) for m in range(band.seqlen_q) for n in range(band.seqlen_k) if band.sees(m, n)}


def brute_kind(band: Band, rows: range, cols: range) -> TileKind:
    real_rows = [m for m in rows if m < band.seqlen_q]
    seen = [band.sees(m, n) for m in real_rows for n in cols]
    if not any(seen):
        return TileKind.SKIP
    return TileKind.FULL if all(seen) else TileKind.PARTIAL


@pytest.mark.parametrize("grid", [TileGrid(1, 1), TileGrid(2, 3), TileGrid(3, 2), TileGrid(4, 4)])
def test_every_tile_kind_equals_brute_force(grid: TileGrid) -> None:
    for band in bands(6):
        for m_block, n_block in itertools.product(range(-(-6 // grid.block_m)), range(-(-6 // grid.block_n))):
            rows = range(m_block * grid.block_m, (m_block + 1) * grid.block_m)
            cols = range(n_block * grid.block_n, (n_block + 1) * grid.block_n)
            assert band.tile_kind(m_block, n_block, grid) is brute_kind(band, rows, cols), (band, m_block, n_block)


@pytest.mark.parametrize("grid", [TileGrid(1, 1), TileGrid(2, 3), TileGrid(4, 2), TileGrid(8, 8)])
def test_loops_and_counts_visit_exactly_the_tiles_that_are_not_skipped(grid: TileGrid) -> None:
    for band in bands(7):
        m_blocks, n_blocks = -(-band.seqlen_q // grid.block_m), -(-band.seqlen_k // grid.block_n)
        kinds = {(m, n): band.tile_kind(m, n, grid) for m, n in itertools.product(range(m_blocks), range(n_blocks))}
        visited = {tile: kind for tile, kind in kinds.items() if kind is not TileKind.SKIP}
        by_rows = {(t.m_block, t.n_block): t.kind for m in range(m_blocks) for t in band.key_tiles(m, grid)}
        by_cols = {(t.m_block, t.n_block): t.kind for n in range(n_blocks) for t in band.query_tiles(n, grid)}
        assert by_rows == visited, band
        assert by_cols == visited, band
        counts = band.count_tiles(grid)
        tally = list(kinds.values())
        assert counts.full == tally.count(TileKind.FULL), band
        assert counts.partial == tally.count(TileKind.PARTIAL), band
        assert counts.skipped == tally.count(TileKind.SKIP), band
        assert counts.visited == len(visited)


def test_pairs_in_closed_form() -> None:
    for band in bands(8):
        assert band.count_pairs() == len(pairs(band)), band


def test_ranges_are_what_rows_and_keys_see() -> None:
    for band in bands(5):
        visible = pairs(band)
        for start, stop in itertools.combinations(range(7), 2):
            rows = range(start, min(stop, band.seqlen_q))
            seen = {n for m, n in visible if m in rows}
            common = {n for n in range(band.seqlen_k) if rows and all((m, n) in visible for m in rows)}
            seeing = {m for m, n in visible if start <= n < stop}
            assert set(band.keys_seen(start, stop)) == seen, (band, start, stop)
            assert set(band.keys_common(start, stop)) == common, (band, start, stop)
            assert set(band.queries_seeing(start, stop)) == seeing, (band, start, stop)


def test_causal_visits_about_half() -> None:
    counts = Band(4096, 4096, None, 0).count_tiles(TileGrid(128, 128))
    assert (counts.full, counts.partial, counts.skipped) == (496, 32, 496)
