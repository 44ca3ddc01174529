"""The arithmetic of shards and pieces against brute force, and how even the work is."""

from __future__ import annotations

import itertools
import random

import pytest

from tilewise.distributed.heads import assign
from tilewise.distributed.pieces import Layout, Piece, pairs_of, pieces, ring_steps
from tilewise.distributed.sharding import Chunk


def global_index(shard: tuple[Chunk, ...], row: int) -> int:
    chunk = next(c for c in shard if c.row <= row < c.row + c.stop - c.start)
    return chunk.start + row - chunk.row


def scores(piece: Piece) -> list[tuple[int, int, int]]:
    """(query row, key row, distance by the call's own count) of every score a piece computes."""
    borders = piece.cu_seqlens or (0,)
    spans = list(itertools.pairwise(borders)) or [(0, 0)]
    found = []
    for start, stop in spans if piece.cu_seqlens else [(0, 0)]:
        num_q, num_k = (stop - start,) * 2 if piece.cu_seqlens else (piece.num_q, piece.num_k)
        for i, j in itertools.product(range(num_q), range(num_k)):
            distance = i + num_k - num_q - j
            if (piece.left is None or distance <= piece.left) and (piece.right is None or -distance <= piece.right):
                found.append((piece.q_start + start + i, piece.k_start + start + j, distance))
    return found


def expected(layout: Layout) -> dict[tuple[int, int], int]:
    """Every pair that one device would compute, and its distance."""
    borders = layout.documents or (0, max(layout.seqlen_q, layout.seqlen_k))
    owner = [d for d, (a, b) in enumerate(itertools.pairwise(borders)) for _ in range(a, b)]
    found = {}
    for i, j in itertools.product(range(layout.seqlen_q), range(layout.seqlen_k)):
        distance = i + layout.offset - j
        if layout.documents is not None and owner[i] != owner[j]:
            continue
        if (layout.left is None or distance <= layout.left) and (layout.right is None or -distance <= layout.right):
            found[i, j] = distance
    return found


def layouts() -> list[Layout]:
    draw = random.Random(1)
    found = []
    for index in range(120):
        world, sharding = draw.choice((1, 2, 3, 4)), draw.choice(("zigzag", "contiguous"))
        packed = index % 3 == 0
        seqlen_q = draw.randint(1, 30)
        seqlen_k = seqlen_q if packed or draw.random() < 0.5 else draw.randint(1, 30)
        rows_q, rows_k = (2 * -(-n // (2 * world)) + draw.choice((0, 2)) for n in (seqlen_q, seqlen_k))
        borders = sorted(draw.randint(0, seqlen_q) for _ in range(draw.randint(0, 4)))
        documents = (0, *borders, seqlen_q) if packed else None
        rows_k = rows_q if packed else rows_k
        left, right = (draw.choice((None, 0, 2, 9)) for _ in range(2))
        tilted, rand = draw.random() < 0.5, draw.random() < 0.3
        found.append(Layout(world, sharding, rows_q, rows_k, seqlen_q, seqlen_k, left, right, documents, tilted, rand))
    return found


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_pieces_cover_every_pair_once(layout: Layout) -> None:
    found: dict[tuple[int, int], int] = {}
    for rank, step in itertools.product(range(layout.world), range(layout.world)):
        q_shard, k_shard = layout.q_shard(rank), layout.k_shard((rank - step) % layout.world)
        todo = pieces(layout, q_shard, k_shard)
        for piece in todo:
            computed = scores(piece)
            assert pairs_of(piece) == len(computed)
            for row, key, distance in computed:
                pair = global_index(q_shard, row), global_index(k_shard, key)
                assert pair not in found
                found[pair] = distance if piece.side == "aligned" else pair[0] + layout.offset - pair[1]
                one_side = {"past": found[pair] > 0, "future": found[pair] < 0, "aligned": True}
                assert one_side[piece.side] or not layout.tilted
    shards = [(layout.q_shard(rank), layout.k_shard(rank)) for rank in range(layout.world)]
    steps = {
        s for s in range(layout.world) for r in range(layout.world) if pieces(layout, shards[r][0], shards[r - s][1])
    }
    assert ring_steps(layout) == tuple(sorted(steps | {0}))
    want = expected(layout)
    assert found.keys() == want.keys()
    if layout.tilted:
        assert found == want


def work(layout: Layout) -> list[int]:
    """Pairs per rank."""
    return [
        sum(
            pairs_of(p)
            for other in range(layout.world)
            for p in pieces(layout, layout.q_shard(rank), layout.k_shard(other))
        )
        for rank in range(layout.world)
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("seqlen", [8192, 16384, 100_000])
def test_zigzag_causal_work_is_even(world: int, seqlen: int) -> None:
    rows = 8 * -(-seqlen // (8 * world))
    even = work(Layout(world, "zigzag", rows, rows, seqlen, seqlen, None, 0))
    assert max(even) <= 1.05 * sum(even) / world
    uneven = work(Layout(world, "contiguous", rows, rows, seqlen, seqlen, None, 0))
    assert max(uneven) > 1.3 * sum(uneven) / world
    assert sum(even) == sum(uneven) == seqlen * (seqlen + 1) // 2


def test_a_window_shortens_the_ring() -> None:
    def steps(sharding: str, window: int) -> tuple[int, ...]:
        return ring_steps(Layout(8, sharding, 128, 128, 1024, 1024, window, 0))

    assert steps("contiguous", 100) == (0, 1)
    assert steps("contiguous", 200) == (0, 1, 2)
    assert steps("zigzag", 50) == (0, 1, 7)
    assert steps("contiguous", 1023) == tuple(range(8))


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads"), [(2, 4, 2), (4, 8, 2), (3, 8, 2), (4, 6, 3), (3, 3, 1), (2, 5, 5)]
)
def test_heads_are_assigned_once_with_their_keys(world: int, heads: int, kv_heads: int) -> None:
    every = [assign(rank, world, heads, kv_heads) for rank in range(world)]
    assert [head for a in every for head in range(a.first, a.last)] == list(range(heads))
    for a in every:
        per_kv = a.num_heads // len(a.kv_heads)
        served = [kv for kv in a.kv_heads for _ in range(per_kv)]
        assert served == [head * kv_heads // heads for head in range(a.first, a.last)]
