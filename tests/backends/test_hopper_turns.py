"""Who computes which tiles of the forward: blocks are taken late, and key tiles that nobody of 64 rows sees are not."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from gluon_emulator import MODE
from test_hopper_protocol import Case, check_forward, emulated  # noqa: F401  (emulated: a fixture)
from tilewise import masks

pytestmark = pytest.mark.slow

Emulated = Callable[[str], Any]


def test_the_next_block_is_taken_behind_all_keys_of_this_one(
    emulated: Emulated,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken at its start, the next one waits for its end: D=256, causal, 16384, 1620 us instead of 1497."""
    forward = emulated("forward")
    plain_keys, plain_take, plain_count = forward.load_keys, forward.take_tile, forward.key_tiles
    left: defaultdict[int, int] = defaultdict(int)  # key tiles of this block that a producer has not asked for yet
    taken = []

    def count_tiles(*args: Any) -> Any:
        last, count = plain_count(*args)
        left[threading.get_ident()] = int(count)
        return last, count

    def load(*args: Any) -> Any:
        left[threading.get_ident()] -= 1
        return plain_keys(*args)

    def take(*args: Any) -> Any:
        taken.append(left[threading.get_ident()])
        return plain_take(*args)

    MODE.late_loads = False
    emulated("launch").forward_pass.cache_clear()
    for name, wrapped in (("load_keys", load), ("take_tile", take), ("key_tiles", count_tiles)):
        monkeypatch.setattr(forward, name, wrapped)
    check_forward(Case(256, seqlens=(600, 600), heads=(1, 1), causal=True), emulated)
    assert taken
    assert set(taken) == {0}


SHAPES = list(itertools.product((64, 128, 256), (1024, 4096, 16384)))


@pytest.mark.parametrize(("head_dim", "seqlen"), SHAPES, ids=str)
def test_light_blocks_come_last(head_dim: int, seqlen: int, emulated: Emulated) -> None:  # noqa: F811
    """Blocks handed out in their order to 132 SMs that are free keep these busy 95 % of the time.

    A block is counted as two key tiles more than it has, for its beginning and end.
    """
    schedule, launch = emulated("schedule"), emulated("launch")
    case = Case(head_dim, batch=16384 // seqlen, heads=(2048 // head_dim,) * 2, seqlens=(seqlen, seqlen), causal=True)
    config = emulated("configs").forward_config(case.problem)
    sizes = launch.sizes_of(case.problem, config, 2)
    busy = [0] * (132 * config.CTAS_PER_SM)
    for tile in range(sizes.num_tiles):
        block, _ = schedule.place_of(tile, sizes, True)
        heapq.heapreplace(busy, busy[0] + 2 + int(schedule.key_tiles(block, seqlen, seqlen, sizes, config)[1]))
    assert sum(busy) >= 0.95 * len(busy) * max(busy)


@pytest.mark.parametrize("band", [(None, 0), (0, 0), (70, 0), (3, 40), (None, 33), (200, 200)], ids=str)
@pytest.mark.parametrize(("warpgroups", "block_n"), [(2, 64), (3, 128)])
def test_hidden_tiles_are_seen_by_no_row(
    band: tuple[int | None, int], warpgroups: int, block_n: int, emulated: Emulated  # noqa: F811
) -> None:  # fmt: skip
    """Nor is a tile that is seen passed over; the masked tiles follow, at least one of them."""
    schedule, configs = emulated("schedule"), emulated("configs")
    left, right = band
    for seqlen_q, seqlen_k in itertools.product((1, 63, 130, 400), (1, 64, 129, 300, 513)):
        shown = masks.Band(seqlen_q, seqlen_k, left, right)
        sizes = schedule.Sizes(*[0] * 10, window_left=left or 0, window_right=right)
        flags = {"HAS_LEFT": left is not None, "HAS_RIGHT": True, "IS_CAUSAL": right == 0}
        config = configs.ForwardConfig(NUM_WARPGROUPS=warpgroups, BLOCK_N=block_n, IS_LAZY=True, **flags)
        for row in range(0, seqlen_q, 64):
            block = row // (64 * warpgroups)
            last, count = (int(x) for x in schedule.key_tiles(block, seqlen_q, seqlen_k, sizes, config))
            steps = (row, last, count, seqlen_q, seqlen_k, sizes, config)
            hidden, begin = int(schedule.hidden_tiles(*steps)), int(schedule.whole_tiles(*steps, True)[0])
            stop = shown.keys_seen(row, min(row + 64, seqlen_q)).stop
            assert 0 <= hidden < begin <= count
            assert hidden == 0 or stop <= (last + 1 - hidden) * block_n
            assert hidden == count - 1 or stop > (last - hidden) * block_n or row + 64 > seqlen_q
