"""The hint for cascade attention from any block table in host memory: for engines that keep their own pages."""

from __future__ import annotations

import numpy as np

from tilewise.cascade import SharedPrefix
from tilewise.kv.groups import Table, find_groups
from tilewise.kv.rows import Ints
from tilewise.kv.tables import host_prefix, prefix_parts, round_columns


def shared_prefix_of(table: Table, before: Ints, counts: Ints, page_size: int) -> SharedPrefix | None:
    """The sequences that start with the same pages, or None if there are none.

    `table[i]` are the pages of sequence i, whose `counts[i]` queries come after `before[i]` keys. Pages past these keys
    are not compared.
    """
    before, counts = before.astype(np.int64), counts.astype(np.int64)
    rows = np.arange(len(before))
    groups = find_groups(table, rows, before // page_size)
    if not groups:
        return None
    parts = prefix_parts(counts, groups, page_size)
    own = before + counts - parts.shift * page_size
    columns = min(round_columns(max(1, -(-int(own.max()) // page_size))), table.shape[1])
    return host_prefix(table, rows, parts, own, columns)
