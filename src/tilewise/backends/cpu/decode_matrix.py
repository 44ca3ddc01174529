"""Scores of few query rows on a matrix unit (AMX): 16 keys by rows, where they are, times q in pairs.

Each element of a tile of sums is the whole score of one key and one query row, so nothing is summed over lanes. Tiles
of sums and of q have a column for each query row. The keys at the end of a run that do not fill a tile have tiles of
their own, whose height is set when it changes. Nothing is emitted for instruction sets without a matrix unit.
"""

from __future__ import annotations

import functools

from tilewise.backends.cpu.compiler import kernel
from tilewise.backends.cpu.emit import Emitter, Value
from tilewise.backends.cpu.forward_matrix import HALF_BYTES, instruct, pointer, tile, unit_of

# Tile registers: sums and keys, of which the last ones are for the rest of a run, and q.
SUMS, KEYS, QUERIES = (0, 1, 2), (3, 4, 5), (6, 7)
PAIR, ONE, REST = range(3)
# Where a configuration holds the bytes of a tile's rows (16 bits each), and the rows of tiles (8 bits).
WIDTHS, HEIGHTS = 16, 48
REST_BITS = 8 * SUMS[2]


@kernel("i")
def save_tiles(e: Emitter, saved: Value) -> None:
    """Store the thread's tile configuration, 64 bytes."""
    if e.isa.matrix is not None:
        instruct(e, "sttilecfg", pointer(e, saved))


@kernel("i")
def restore_tiles(e: Emitter, saved: Value) -> None:
    """Load a tile configuration."""
    if e.isa.matrix is not None:
        instruct(e, "ldtilecfg", pointer(e, saved))


@kernel("iii")
def set_tiles(e: Emitter, config: Value, num_rows: Value, rest: Value) -> None:
    """Tiles for `num_rows` query rows and for `rest` keys, at least one, that do not fill a tile."""
    if e.isa.matrix is None:
        return
    b, unit = e.b, unit_of(e)
    width = b.mul(num_rows, e.i64(4))
    widths, heights = [width] * 3 + [e.i64(unit.row_bytes)] * 3 + [width] * 2, [e.i64(unit.rows)] * 8
    heights[SUMS[2]] = heights[KEYS[2]] = rest
    content = [e.i64(1)] + [e.i64(0)] * 7
    places = [(WIDTHS + 2 * n, value) for n, value in enumerate(widths)]
    places += [(HEIGHTS + n, value) for n, value in enumerate(heights)]
    for at, value in places:
        content[at // 8] = b.or_(content[at // 8], b.shl(value, e.i64(at % 8 * 8)))
    for n, word in enumerate(content):
        e.store(b.add(config, e.i64(8 * n)), word, align=8)
    instruct(e, "ldtilecfg", pointer(e, config))


@kernel("iiiiiiiiiiiiii")
def tile_scores(
    e: Emitter,
    kind: Value,
    num_keys: Value,
    k: Value,
    k_stride: Value,
    k_next: Value,
    dim: Value,
    q: Value,
    q_stride: Value,
    q_next: Value,
    s: Value,
    s_next: Value,
    ahead: Value,
    ahead_stride: Value,
    ahead_next: Value,
) -> None:
    """s[num_keys][rows of panel] = k[num_keys][dim] . q[dim in pairs][rows]; dim is a multiple of 32, rows at `ahead`
    are prefetched.

    ONE is 16 keys, REST fewer. PAIR is 16 keys, and 16 at the next addresses: a product need not wait for the other.
    """
    if e.isa.matrix is None:
        return
    b, unit, stride = e.b, unit_of(e), e.i64(4 * e.isa.panel)

    def prefetch(first: Value, count: int) -> None:
        for place in e.rows(first, ahead_stride, count):
            e.prefetch(place)

    def block(tiles: list[int], at_once: int) -> None:
        k_places, q_places = e.rows(k, k_next, len(tiles)), e.rows(q, q_next, len(tiles))
        for n in tiles:
            instruct(e, "tilezero", tile(SUMS[n]))

        def step(d: Value) -> None:
            offset = b.mul(d, e.i64(HALF_BYTES))
            pairs = b.mul(b.lshr(d, e.i64(1)), q_stride)
            for n, rows, queries in zip(tiles, k_places, q_places, strict=True):
                query_tile = tile(QUERIES[n % 2])
                instruct(e, "tileloadd64", query_tile, pointer(e, b.add(queries, pairs)), q_stride)
                instruct(e, "tileloadd64", tile(KEYS[n]), pointer(e, b.add(rows, offset)), k_stride)
                instruct(e, "tdpbf16ps", tile(SUMS[n]), tile(KEYS[n]), query_tile)
            for first in e.rows(b.add(ahead, offset), ahead_next, len(tiles)):
                e.loop(
                    num_keys,
                    at_once,
                    (),
                    functools.partial(lambda first, n: prefetch(b.add(first, b.mul(n, ahead_stride)), at_once), first),
                )

        e.loop(dim, unit.depth, (), step)
        for n, place in zip(tiles, e.rows(s, s_next, len(tiles)), strict=True):
            instruct(e, "tilestored64", tile(SUMS[n]), pointer(e, place), stride)

    for number, tiles, at_once in ((PAIR, [0, 1], unit.rows), (ONE, [0], unit.rows), (REST, [2], 1)):
        is_kind = b.icmp_signed("==", kind, e.i64(number))
        e.when(is_kind, functools.partial(block, tiles, at_once))
