"""Sizes of this machine's instruction set (isa.py) as numbers that drivers read."""

from __future__ import annotations

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu.isa import host

LANES, PANEL, BLOCK_N, KEY_STEP = host().lanes, host().panel, host().block_n, host().key_step
SCORE_KEYS, VALUE_ROWS, VALUE_STEP = host().score_keys, host().value_rows, host().value_step
SPLITS_PAIRS = int(host().splits_pairs)
# Tiles of the matrix unit, 0 without one: the elements of a row, and rows.
UNIT = host().matrix
TILE_DEPTH, TILE_ROWS = (UNIT.depth, UNIT.rows) if UNIT is not None else (0, 1)
# Bytes of a field of a panel's row table, and of the table.
FIELD_BYTES = 4 * PANEL
TABLE_BYTES = f.ROW_FIELDS * FIELD_BYTES
