"""What the emulator knows of order in global memory: who wrote an element, and whether a reader is sure to see it.

Every role has a vector clock. Its writes are of the time on its own clock; barriers and atomics carry clocks from role
to role as the memory model lets them: a role's threads are only one behind a barrier of theirs, an atomic publishes
what came before it if it releases, and shows what others published at its address if it acquires. A read of an element
that another role wrote at a time the reader does not know of is an error, however the threads happened to run.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from emulated_memory import Box

__all__ = ["Clock", "Written", "later"]

ACQUIRING, RELEASING = ("acquire", "acq_rel"), ("release", "acq_rel")
# Of a storage: its address and the size of its elements. One is never seen as elements of two sizes.
Key = tuple[int, int]


def later(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """The times that one or the other knows of."""
    return {role: max(a.get(role, 0), b.get(role, 0)) for role in a.keys() | b.keys()}


@dataclass
class Clock:
    """Of a role: what it knows of others, the time of its next write, and up to when all of its threads wrote."""

    role: int
    known: dict[int, int] = field(default_factory=dict)
    now: int = 1
    settled: int = 0

    def meet(self) -> None:
        """A barrier of the role's threads."""
        self.settled = self.now
        self.now += 1

    def published(self) -> dict[int, int]:
        """What somebody knows who hears from this role."""
        return later(self.known, {self.role: self.settled})

    def hear(self, times: dict[int, int]) -> None:
        """Know what another one published."""
        self.known = later(self.known, times)


class Written:
    """Who wrote what in one launch, and what was published where."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.marks: dict[Key, tuple[Tensor, Tensor]] = {}
        self.added: dict[Key, Tensor] = {}
        self.published: dict[tuple[Key, int], dict[int, int]] = {}
        self.roles = 0

    def clock(self, of: Clock | None) -> Clock:
        """Of a new role that another one starts."""
        with self.lock:
            self.roles += 1
            return Clock(self.roles, {} if of is None else of.published())

    def write(self, clock: Clock, tensor: Tensor, places: Tensor, *, adds: bool = False) -> None:
        """Elements `places` of the tensor's storage, counted from the tensor, are written now, or added to.

        Additions have no order among each other, but come after whatever else wrote there.
        """
        key, size = _storage(tensor)
        with self.lock:
            if key not in self.marks:
                self.marks[key] = (torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32))
                self.added[key] = torch.zeros(size, dtype=torch.bool)
            where = places + tensor.storage_offset()
            if adds:
                self.read(clock, tensor, places[~self.added[key][where]])
            writers, times = self.marks[key]
            writers[where] = clock.role
            times[where] = clock.now
            self.added[key][where] = adds

    def read(self, clock: Clock, tensor: Tensor, places: Tensor | Box) -> None:
        """Check that whoever wrote these elements did it before, for the reader too."""
        key, _ = _storage(tensor)
        if key not in self.marks:
            return
        if isinstance(places, Box):
            places = places.places
        with self.lock:
            writers, times = (mark[places + tensor.storage_offset()].reshape(-1) for mark in self.marks[key])
        for role in writers.unique().tolist():
            if role in (0, clock.role):
                continue
            latest = int(times[writers == role].max())
            assert latest <= clock.known.get(role, 0), (
                f"role {clock.role} reads what role {role} wrote, and no release and acquire order the two"
            )

    def atomic(self, clock: Clock, tensor: Tensor, place: int, sem: str) -> None:
        """An atomic by thread 0 of a role, whose result all of its threads get."""
        assert sem in ("relaxed", *ACQUIRING, *RELEASING), sem
        where = (_storage(tensor)[0], place + int(tensor.storage_offset()))
        with self.lock:
            before = self.published.get(where, {})
            if sem in ACQUIRING:
                clock.hear(before)
            if sem in RELEASING:
                self.published[where] = later(before, clock.published())
        clock.meet()


def _storage(tensor: Any) -> tuple[Key, int]:
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), tensor.element_size()), storage.nbytes() // tensor.element_size()
