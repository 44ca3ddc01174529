"""The ring of dQ's sums cannot stop the backward: who waits for whom, over all numbers of SMs.

Numbers come from one counter, so whoever has a number runs, and so do all who have smaller ones. Where everybody waits
for smaller numbers only, nobody waits for ever, whichever programs get an SM and when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.problem import AttentionProblem

pytest.importorskip("triton", minversion="3.6")
backward_plan = pytest.importorskip("tilewise.backends.hopper.backward_plan")
configs = pytest.importorskip("tilewise.backends.hopper.configs")

pytestmark = pytest.mark.slow

H200 = device.named("h200")
# The lengths that are finished beside the main kernel (more than 4096 keys) and, made to be, short ones. Of so many
# queries 8, 7, 5, 4, 2 and 1 heads are a wave.
KEYS = (128, 256, 1024, 4224, 5120, 8192, 12800, 16384)
QUERIES = (2, 64, 1024, 2340, 3200, 4000, 8192, 16384)
ITEMS = (*range(1, 20), 31, 32, 33, 64, 65, 100)


@pytest.fixture(autouse=True)
def always_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """DQ is finished in the main kernel, also of short sequences."""
    monkeypatch.setattr(configs, "finishes_inside", lambda _: True)


def plan_of(seqlen_q: int, seqlen_k: int, items: int, num_sms: int) -> Any:
    """Causal, head_dim 128, so many heads, on a chip of so many SMs."""
    problem = AttentionProblem(
        kind="dense", dtype=torch.bfloat16, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=seqlen_q,
        total_k=seqlen_k, num_heads=items, num_kv_heads=items, head_dim=128, head_dim_v=128, scale=0.1, causal=True,
        needs_grad=True,
    )  # fmt: skip
    plan = backward_plan.backward_plan(problem, dataclasses.replace(H200, num_sms=num_sms))
    assert plan.config.FINISHES
    return plan


def items_of(sizes: Any) -> list[int]:
    """The K/V head of every tile, in the order of schedule.place_of."""
    found: list[int] = []
    for first in range(0, sizes.num_items, sizes.items_per_wave):
        wave = range(first, min(first + sizes.items_per_wave, sizes.num_items))
        found += list(wave) * sizes.num_blocks
    return found


def tiles_by_item(sizes: Any) -> list[list[int]]:
    """The tiles of every K/V head."""
    tiles: list[list[int]] = [[] for _ in range(sizes.num_items)]
    for tile, item in enumerate(items_of(sizes)):
        tiles[item].append(tile)
    return tiles


def later_numbers(plan: Any) -> Iterator[str]:
    """Whoever waits for a number that is not smaller than its own, or for one that nobody takes."""
    sizes, lag, blocks = plan.key_sizes, plan.lag, plan.key_sizes.num_blocks
    tiles, front = tiles_by_item(sizes), plan.front_items * blocks
    numbers = sizes.num_tiles + plan.key_grid[0]
    for item, of in enumerate(tiles):
        first, last = of[0], of[-1]
        if item >= plan.front_items and not 0 <= first - front <= last - front < first:
            yield f"head {item}: tile {first} waits for preparers of {last - front}"
        if item < plan.finished_items and last >= first + lag:
            yield f"head {item}: the share of number {first + lag} waits for tile {last}"
        if item < plan.finished_items and last + lag >= numbers:
            yield f"head {item}: nobody takes number {last + lag}"
        if item >= plan.ring_items:
            before = item - plan.ring_items
            if before >= plan.finished_items or tiles[before][-1] + lag >= first:
                yield f"head {item}: tile {first} waits for the share of number {tiles[before][-1] + lag}"


def test_the_order_of_tiles_is_the_kernels(emulated: Any) -> None:
    for queries, keys, items in ((1024, 4224, 11), (8192, 256, 5), (64, 1024, 3)):
        sizes = plan_of(queries, keys, items, 7).key_sizes
        places = [emulated("schedule").place_of(tile, sizes, False) for tile in range(sizes.num_tiles)]
        assert [int(item) for _, item in places] == items_of(sizes)


@pytest.mark.parametrize(
    "share", [pytest.param(16, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
def test_everybody_waits_for_smaller_numbers(share: int) -> None:
    """On chips of 1 to 132 SMs; of the grid of lengths and heads every 16th, others for every number of SMs."""
    waves = set()
    grid = [(queries, keys, items) for queries in QUERIES for keys in KEYS for items in ITEMS]
    for num_sms in range(1, 133):
        for queries, keys, items in grid[num_sms % share :: 8 * share]:
            plan = plan_of(queries, keys, items, num_sms)
            waves.add(plan.key_sizes.items_per_wave)
            assert list(later_numbers(plan)) == [], (queries, keys, items, num_sms)
    assert waves >= {1, 2, 4, 5, 7, 8}


def test_a_ring_of_part_of_a_wave_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: room for a wave and the lag, but not for whole waves of heads. Of 132 SMs enough went on to take the
    numbers that the others waited for, of 78 none.
    """

    def part_of_a_wave(plan: Any) -> int:
        tiles = plan.wave_tiles + plan.lag + int(backward_plan.REUSE_ROUNDS * plan.key_grid[0])
        return int(min(-(-tiles // plan.key_sizes.num_blocks), plan.key_sizes.num_items))

    monkeypatch.setattr(backward_plan.BackwardPlan, "ring_items", property(part_of_a_wave))
    for num_sms in (78, 132):
        plan = plan_of(1024, 16384, 64, num_sms)
        assert plan.key_sizes.items_per_wave == 8
        assert any("waits for the share" in complaint for complaint in later_numbers(plan))


def test_a_short_lag_and_a_short_front_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(1024, 4224, 40, 132)
    for name, complaint in (("lag", "waits for tile"), ("front_items", "waits for preparers")):
        with monkeypatch.context() as patch:
            patch.setattr(backward_plan.BackwardPlan, name, property(lambda _: 1))
            assert any(complaint in found for found in later_numbers(plan))
