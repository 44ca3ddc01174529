"""The tables of a batch as tensors: what changed since the last step goes to the device, nothing is rebuilt.

On a CPU the host's table is the device's. On a GPU a mirror of it lives on the device; every step sends one small
pinned buffer with the new entries, lengths and slots, asynchronously, and the batch's rows are gathered there. The
buffer comes from torch's pinned allocator, which does not hand it out again before the copy is done, so the host never
waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.cascade import Group, SharedPrefix
from tilewise.kv.book import PageBook, Span, Step, consecutive
from tilewise.kv.groups import PrefixGroup

__all__ = ["BatchTables", "HostTables", "StagedTables", "Tables", "round_columns"]

Ints = NDArray[np.int64]


class BatchTables(NamedTuple):
    """A step's batch on the device; `cu_seqlens_q` is None where every request has one new token."""

    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor | None
    slots: Tensor


class Parts(NamedTuple):
    """A step's prefixes as host arrays, in the order of `SharedPrefix`."""

    groups: tuple[Group, ...]
    block_table: Ints
    seqlens_k: Ints
    cu_seqlens_q: Ints
    rows: Ints | None
    shift: Ints


def round_columns(columns: int) -> int:
    """Up to a fourth more columns, so that a growing batch asks for few different problems."""
    step = 1 << max(0, columns.bit_length() - 3)
    return -(-columns // step) * step


def running_totals(counts: Ints) -> Ints:
    """0 and the sums of the first entries."""
    return np.concatenate(([0], np.cumsum(counts)))


class Tables:
    """Makes the tensors of a step."""

    def __init__(self, book: PageBook, device: torch.device) -> None:
        self.book = book
        self.device = device

    def batch(self, step: Step) -> BatchTables:
        """The step's tables, after the changes it brought."""
        raise NotImplementedError

    def shared(self, step: Step, groups: list[PrefixGroup]) -> SharedPrefix:
        """The hint for the step's groups."""
        raise NotImplementedError

    def columns(self, lengths: Ints) -> int:
        """Columns of a table for sequences of these lengths."""
        longest, width = int(lengths.max(initial=0)), int(self.book.table.shape[1])
        return min(round_columns(max(1, -(-longest // self.book.page_size))), width)

    def parts(self, step: Step, groups: list[PrefixGroup]) -> Parts:
        """Prefixes, the rows of their queries, and how many pages each place leaves out of its own table."""
        size, table = self.book.page_size, self.book.table
        order = np.concatenate([group.places for group in groups])
        counts = step.counts[order]
        rows = consecutive((np.cumsum(step.counts) - step.counts)[order], counts)
        members = np.add.reduceat(counts, running_totals(np.array([len(group.places) for group in groups]))[:-1])
        prefix = np.zeros((len(groups), max(group.num_pages for group in groups)), np.int64)
        shift = np.zeros(len(step.rows), np.int64)
        for number, group in enumerate(groups):
            prefix[number, : group.num_pages] = table[step.rows[group.places[0]], : group.num_pages]
            shift[group.places] = group.num_pages
        lengths = np.array([group.num_pages * size for group in groups], np.int64)
        described = tuple(
            Group(len(group.places), count, group.num_pages * size)
            for group, count in zip(groups, members.tolist(), strict=True)
        )
        in_order = bool((rows == np.arange(len(rows))).all())
        return Parts(described, prefix, lengths, running_totals(members), None if in_order else rows, shift)


class HostTables(Tables):
    """For a CPU: tensors over the host's own arrays."""

    def batch(self, step: Step) -> BatchTables:
        """The step's tables."""
        after = step.before + step.counts
        packed = len(step.slots) != len(step.counts)
        return BatchTables(
            torch.from_numpy(self.book.table[step.rows, : self.columns(after)]),
            _int32(after),
            _int32(running_totals(step.counts)) if packed else None,
            torch.from_numpy(step.slots),
        )

    def shared(self, step: Step, groups: list[PrefixGroup]) -> SharedPrefix:
        """The hint for the step's groups."""
        parts = self.parts(step, groups)
        own = step.before + step.counts - parts.shift * self.book.page_size
        last = self.book.table.shape[1] - 1
        places = np.minimum(parts.shift[:, None] + np.arange(self.columns(own)), last)
        return SharedPrefix(
            parts.groups,
            _int32(parts.block_table),
            _int32(parts.seqlens_k),
            _int32(parts.cu_seqlens_q),
            None if parts.rows is None else torch.from_numpy(parts.rows),
            torch.from_numpy(self.book.table[step.rows[:, None], places]),
            _int32(own),
        )


def _int32(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


class StagedTables(Tables):
    """For a GPU: a mirror on the device, brought up to date by one copy a step."""

    def __init__(self, book: PageBook, device: torch.device) -> None:
        super().__init__(book, device)
        self._mirror = torch.from_numpy(book.table).to(device, copy=True)
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        # What the mirror does not have yet; more than one step's worth only where a device failed in between.
        self._unsent: list[Span] = []

    def batch(self, step: Step) -> BatchTables:
        """The step's tables."""
        after = step.before + step.counts
        packed = len(step.slots) != len(step.counts)
        total = running_totals(step.counts) if packed else np.empty(0, np.int64)
        self._unsent += step.changed
        places, pages = self._changes()
        (rows, slots, flat), (lengths, starts, entries) = self._send(
            (step.rows, step.slots, places), (after, total, pages)
        )
        if flat.numel():
            self._mirror.view(-1).index_put_((flat,), entries)
        self._unsent = []
        self._rows = rows
        table = self._mirror[:, : self.columns(after)].index_select(0, rows)
        return BatchTables(table, lengths, starts if packed else None, slots)

    def shared(self, step: Step, groups: list[PrefixGroup]) -> SharedPrefix:
        """The hint for the step's groups; `batch` of the same step came before."""
        parts = self.parts(step, groups)
        own = step.before + step.counts - parts.shift * self.book.page_size
        none = np.empty(0, np.int64)
        (shift, rows), (lengths, starts, prefix, own_lengths) = self._send(
            (parts.shift, none if parts.rows is None else parts.rows),
            (parts.seqlens_k, parts.cu_seqlens_q, parts.block_table.ravel(), own),
        )
        width = self._mirror.shape[1]
        columns = torch.arange(self.columns(own), device=self.device) + shift[:, None]
        places = self._rows[:, None] * width + columns.clamp_(max=width - 1)
        return SharedPrefix(
            parts.groups,
            prefix.view(parts.block_table.shape),
            lengths,
            starts,
            None if parts.rows is None else rows,
            self._mirror.view(-1).take(places),
            own_lengths,
        )

    def _changes(self) -> tuple[Ints, Ints]:
        """Flat places of the mirror that changed, and what they are now; a table that grew is sent whole."""
        table = self.book.table
        if tuple(self._mirror.shape) != table.shape:
            (), (whole,) = self._send((), (table.ravel(),))
            self._mirror = whole.view(table.shape).clone()
            return np.empty(0, np.int64), np.empty(0, np.int64)
        spans = [np.arange(first, end) + row * table.shape[1] for row, first, end in self._unsent]
        places = np.concatenate(spans) if spans else np.empty(0, np.int64)
        return places, table.ravel()[places].astype(np.int64)

    def _send(
        self, longs: tuple[Ints, ...], ints: tuple[NDArray[np.integer], ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """int64 and int32 arrays to the device in one copy that the host does not wait for."""
        sizes, half_sizes = [len(part) for part in longs], [len(part) for part in ints]
        # Every part starts at a multiple of 16 bytes: kernels are prepared for aligned tensors and for others.
        starts = running_totals(-(-np.array([*sizes, *(-(-size // 2) for size in half_sizes)], np.int64) // 2) * 2)
        stage = torch.empty(int(starts[-1]), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        memory = stage.numpy()
        narrow, offsets = memory.view(np.int32), starts.tolist()
        for long, start in zip(longs, offsets, strict=False):
            memory[start : start + len(long)] = long
        halves = [2 * start for start in offsets[len(longs) :]]
        for part, start in zip(ints, halves, strict=False):
            narrow[start : start + len(part)] = part
        there = stage.to(self.device, non_blocking=True)
        there_narrow = there.view(torch.int32)
        return (
            [there[start : start + size] for start, size in zip(offsets, sizes, strict=False)],
            [there_narrow[start : start + size] for start, size in zip(halves, half_sizes, strict=False)],
        )
