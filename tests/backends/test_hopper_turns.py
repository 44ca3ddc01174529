"""Which tiles of the forward are computed: key tiles that nobody of 64 rows sees are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from test_hopper_protocol import emulated  # noqa: F401  (a fixture)
from tilewise import masks

pytestmark = pytest.mark.slow

Emulated = Callable[[str], Any]


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
