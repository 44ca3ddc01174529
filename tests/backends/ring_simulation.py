"""Who waits for whom in the backward that prepares and finishes heads beside itself, without what they compute.

Programs run as their roles do (backward.py, preparing.py, finishing.py): a producer that takes numbers from one counter
and is at most one tile ahead of the warpgroups that multiply, and a preparer that makes a share of a later head and
finishes one of an earlier head for every number. Only `slots` programs run at a time; which, and who takes the next
step, is drawn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Deadlock", "Simulation", "items_of", "tiles_by_item"]

# What a role waits for before its next step.
Role = Iterator[Callable[[], bool]]


class Deadlock(Exception):
    """Nobody can take a step, and not all are done."""


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


class Mailbox:
    """One number at a time, for two readers."""

    def __init__(self) -> None:
        self.number, self.unread = 0, set[str]()

    def send(self, number: int) -> None:
        self.number, self.unread = number, {"consumers", "preparer"}


class Simulation:
    """One launch of the main kernel of a plan (backward_plan.BackwardPlan)."""

    def __init__(self, plan: Any, slots: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.slots, self.sizes = slots, plan.key_sizes
        self.programs, self.lag = plan.key_grid[0], plan.lag
        self.front, self.ring, self.finished = plan.front_items, plan.ring_items, plan.finished_items
        self.item, self.number = items_of(self.sizes), 0
        # Shares made for a head, warpgroups' tiles of a head that are done, shares of a head that are finished.
        self.made, self.done, self.cleared = Counter[int](), Counter[int](), Counter[int]()

    def run(self) -> None:
        """Until all programs have ended; Deadlock if they cannot."""
        waiting = list(range(self.programs))
        self.draw.shuffle(waiting)
        running: list[list[tuple[Role, Callable[[], bool]]]] = []
        while running or waiting:
            while waiting and len(running) < self.slots:
                waiting.pop()
                running.append([(role, next(role)) for role in self._roles()])
            moved = [self._step(program) for program in running]
            if not any(moved):
                raise Deadlock(f"after {self.number} of {self.sizes.num_tiles} numbers")
            running = [program for program in running if program]
            self.draw.shuffle(running)

    def _step(self, program: list[tuple[Role, Callable[[], bool]]]) -> bool:
        """Let the roles of a program that can take some steps; whether one did."""
        moved = False
        for at in range(len(program) - 1, -1, -1):
            role, is_ready = program[at]
            for _ in range(self.draw.randint(1, 4)):
                if not is_ready():
                    break
                moved = True
                following = next(role, None)
                if following is None:
                    del program[at]
                    break
                is_ready = following
                program[at] = (role, is_ready)
        return moved

    def _roles(self) -> list[Role]:
        box, loaded = Mailbox(), list[int]()
        return [self._producer(box, loaded), self._consumers(box, loaded), self._preparer(box)]

    def _take(self) -> int:
        self.number += 1
        return self.number - 1

    def _is_prepared(self, item: int) -> bool:
        shares: int = self.sizes.num_blocks * ((item >= self.front) + (item >= self.ring))
        return self.made[item] >= shares

    def _producer(self, box: Mailbox, loaded: list[int]) -> Role:
        tile = -1
        while tile < self.sizes.num_tiles:
            if tile >= 0:
                item = self.item[tile]
                yield lambda item=item: self._is_prepared(item)  # type: ignore[misc]
                yield lambda: not loaded
                loaded.append(tile)
            tile = self._take()
            yield lambda: not box.unread
            box.send(tile)

    def _consumers(self, box: Mailbox, loaded: list[int]) -> Role:
        while True:
            yield lambda: "consumers" in box.unread
            tile = box.number
            box.unread.remove("consumers")
            if tile >= self.sizes.num_tiles:
                return
            yield lambda: bool(loaded)
            item = self.item[loaded.pop()]
            before = item - self.ring
            assert before < 0 or self.cleared[before] == self.sizes.num_blocks, "a place in the ring is still in use"
            self.done[item] += 1

    def _preparer(self, box: Mailbox) -> Role:
        sizes, tile = self.sizes, -1
        while tile < sizes.num_tiles:
            yield lambda: "preparer" in box.unread
            tile = box.number
            box.unread.remove("preparer")
            share = tile + self.front * sizes.num_blocks
            if share < sizes.num_tiles:
                self.made[self.item[share]] += 1
            if tile < self.lag or self.item[tile - self.lag] >= self.finished:
                continue
            item = self.item[tile - self.lag]
            yield lambda item=item: self.done[item] == sizes.num_blocks  # type: ignore[misc]
            self.cleared[item] += 1
            self.made[item + self.ring] += 1
