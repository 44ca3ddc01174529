"""The tables of a batch as tensors. Only changes since the last step go to the device.

On a CPU the host's table is the device's. On a GPU the device holds a mirror; every step sends one small pinned buffer
with the new entries, lengths and slots, asynchronously, and the batch's rows are gathered there. The buffer comes from
torch's pinned allocator, which does not reuse it before the copy is done, so the host never waits.

A fixed step has the same tensors every time: a row for each of `max_requests` seats. They are written in place, on the
current stream, so a CUDA graph captured over them can be replayed step after step. Host times behind the choices of
this file are in bench/results/host-costs.csv, by name.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.cascade import Group, SharedPrefix
from tilewise.kv.book import PageBook, Step
from tilewise.kv.groups import PrefixGroup, Table, find_groups
from tilewise.kv.rows import Changes, Ints, consecutive

# Minimum number of columns. A batch with a shared prefix starts with one own page: without this minimum, every new page
# would change the table's shape, and its gather indices would be sent again.
MIN_COLUMNS = 8
# The slot of a row that must not be written.
NO_SLOT = -1
# An empty array, never written.
NONE: Ints = np.empty(0, np.int64)


class BatchTables(NamedTuple):
    """A step's batch on the device; `cu_seqlens_q` is None if every request has one new token."""

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
    """Rounded up by at most a fourth, so that a growing batch uses few different shapes."""
    step = 1 << max(0, columns.bit_length() - 3)
    return -(-columns // step) * step


def running_totals(counts: Ints) -> Ints:
    """0 and the running sums."""
    return np.concatenate(([0], np.cumsum(counts)))


def same_numbers(a: Ints, b: Ints) -> bool:
    """Whether two arrays are equal. A repeated batch has the same objects, which is much cheaper to test."""
    return a is b or np.array_equal(a, b)


def prefix_parts(counts: Ints, groups: list[PrefixGroup], page_size: int) -> Parts:
    """The parts of a batch with these numbers of queries."""
    order = np.concatenate([group.places for group in groups])
    grouped = counts[order]
    rows = consecutive((np.cumsum(counts) - counts)[order], grouped)
    members = np.add.reduceat(grouped, running_totals(np.array([len(group.places) for group in groups]))[:-1])
    prefix = np.zeros((len(groups), max(group.num_pages for group in groups)), np.int64)
    shift = np.zeros(len(counts), np.int64)
    for number, group in enumerate(groups):
        prefix[number, : group.num_pages] = group.pages
        shift[group.places] = group.num_pages
    lengths = np.array([group.num_pages * page_size for group in groups], np.int64)
    described = tuple(
        Group(len(group.places), count, group.num_pages * page_size)
        for group, count in zip(groups, members.tolist(), strict=True)
    )
    in_order = bool((rows == np.arange(len(rows))).all())
    return Parts(described, prefix, lengths, running_totals(members), None if in_order else rows, shift)


def host_prefix(table: Table, rows: Ints, parts: Parts, own: Ints, columns: int) -> SharedPrefix:
    """The hint in host memory: request i has the pages `table[rows[i]]`, and `own[i]` keys after its prefix."""
    places = np.minimum(parts.shift[:, None] + np.arange(columns), table.shape[1] - 1)
    return SharedPrefix(
        parts.groups,
        _int32(parts.block_table),
        _int32(parts.seqlens_k),
        _int32(parts.cu_seqlens_q),
        None if parts.rows is None else torch.from_numpy(parts.rows.copy()),
        torch.from_numpy(table[rows[:, None], places]),
        _int32(own),
    )


def shared_prefix_of(table: Table, before: Ints, counts: Ints, page_size: int) -> SharedPrefix | None:
    """The hint for engines that keep their own pages: the sequences that start with the same ones, None without such.

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


class _Tables:
    """Makes the tensors of a step."""

    def __init__(self, book: PageBook, device: torch.device) -> None:
        self.book = book
        self.device = device
        # The last step's prefixes: what they were made from, and the parts.
        self._parts: tuple[list[PrefixGroup], Ints, Parts] | None = None

    def columns(self, lengths: Ints) -> int:
        """Columns of a table for sequences of these lengths."""
        longest, width = int(lengths.max(initial=0)), int(self.book.table.shape[1])
        return min(round_columns(max(MIN_COLUMNS, -(-longest // self.book.page_size))), width)

    def parts(self, step: Step, groups: list[PrefixGroup]) -> Parts:
        """Prefixes, the rows of their queries, and how many pages each request omits from its own table."""
        known = self._parts
        if known is None or known[0] is not groups or not same_numbers(known[1], step.counts):
            known = self._parts = groups, step.counts, prefix_parts(step.counts, groups, self.book.page_size)
        return known[2]


class HostTables(_Tables):
    """For a CPU: tensors over the host's own arrays."""

    def __init__(self, book: PageBook, device: torch.device) -> None:
        super().__init__(book, device)
        seats = book.rows.max_requests or 0
        self._lengths, self._slots = np.zeros(seats, np.int32), np.full(seats, NO_SLOT, np.int64)
        self._table = np.zeros((seats, book.table.shape[1]), np.int32)
        self._last: BatchTables | None = None

    def batch(self, step: Step) -> BatchTables:
        """The step's tables, after its changes were applied."""
        after = step.before + step.counts
        packed = len(step.slots) != len(step.counts)
        return BatchTables(
            torch.from_numpy(self.book.table[step.rows, : self.columns(after)]),
            _int32(after),
            _int32(running_totals(step.counts)) if packed else None,
            # A copy, because the next step's slots are computed in the book's own array.
            torch.from_numpy(step.slots.copy()),
        )

    def fixed(self, step: Step) -> BatchTables:
        """The tables of all seats, always the same tensors. Requests that are not in the step have no keys."""
        lengths, slots = self._lengths, self._slots
        lengths[:], slots[:] = 0, NO_SLOT
        lengths[step.rows], slots[step.rows] = step.before + step.counts, step.slots
        # Everything a step reads is rewritten, so that an edit by the user does not outlive a step. New tensors each
        # time, because a copied cache has arrays of its own.
        columns = self.columns(step.before + step.counts)
        self._table[:, :columns] = self.book.table[:, :columns]
        table = torch.from_numpy(self._table)
        # Autograd may have saved tensors of the last fixed step: bump their versions, so that it refuses to use them.
        if self._last is not None:
            torch.autograd.graph.increment_version(self._last.seqlens_k)
        self._last = BatchTables(table, torch.from_numpy(lengths), None, torch.from_numpy(slots))
        return self._last

    def shared(self, step: Step, groups: list[PrefixGroup]) -> SharedPrefix:
        """The hint for the step's groups."""
        parts = self.parts(step, groups)
        own = step.before + step.counts - parts.shift * self.book.page_size
        return host_prefix(self.book.table, step.rows, parts, own, self.columns(own))


def _int32(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


class Kept:
    """A tensor that users hold too and later steps reuse, unless a user wrote to it or to a view of it.

    torch counts the writes, except to tensors made in inference mode: those are never reused.
    """

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, _num_writes(tensor)

    def __deepcopy__(self, _memo: Any) -> Kept:
        # deepcopy separates views from it. Writes through them are not seen here, so the copy is not reused.
        with torch.inference_mode(False):
            copied = Kept(self.tensor.clone())
        copied._version = None
        return copied

    @property
    def is_untouched(self) -> bool:
        """Whether it was not written to."""
        return self._version is not None and self._version == _num_writes(self.tensor)


def _num_writes(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001


class SentPrefixes(NamedTuple):
    """A step's prefixes on the device, in one buffer, and the indices that gather the own tables from the mirror."""

    parts: Parts
    buffer: Kept
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    rows: Tensor
    tokens: Tensor
    places: Tensor


class Sent(NamedTuple):
    """The last step's slots on the host; slots and lengths on the device as of `steps` steps ago, see `_one_more`."""

    slots: Ints
    buffer: Tensor
    steps: int = 0


class StagedTables(_Tables):
    """For a GPU: a mirror on the device, updated by one copy per step."""

    def __init__(self, book: PageBook, device: torch.device) -> None:
        super().__init__(book, device)
        seats = book.rows.max_requests or 0
        # Slots and lengths of all seats, sent by one copy.
        self._stage = Stage((seats,), (seats,))
        # Tensors that are written in place must not be inference tensors, which only inference mode could write.
        with torch.inference_mode(False):
            self._mirror = Kept(torch.from_numpy(book.table).to(device, copy=True))
            self._gathered = Kept(torch.empty(0, dtype=torch.int32, device=device))
            self._seats = torch.empty(self._stage.size, dtype=torch.int64, device=device)
        # The rows of the last step and their table on the device, valid while nothing in the mirror changes.
        self._last_rows: Ints = NONE
        self._lengths = torch.empty(0, dtype=torch.int32, device=device)
        self._last: Sent | None = None
        self._rows: tuple[Ints, Tensor] | None = None
        self._one_more: tuple[int, Tensor] | None = None
        self._prefixes: SentPrefixes | None = None
        # The own tables after the last prefixes, valid for as long.
        self._own: Kept | None = None
        # Changes that the mirror lacks; more than one step's only if a device failed in between.
        self._unsent: list[Changes] = []
        self._load_kernels()

    def batch(self, step: Step) -> BatchTables:
        """The step's tables."""
        follows = self._last is not None and step.previous is self._last.slots and not self._unsent
        if self._last is not None and follows and not len(step.changed.rows) and self._gathered.is_untouched:
            return self._following(step, self._last)
        after = step.before + step.counts
        packed = len(step.slots) != len(step.counts)
        total = running_totals(step.counts) if packed else NONE
        self._unsent.append(step.changed)
        places, pages = self._changes()
        # The rows of a repeated batch are on the device already.
        known = self._rows is not None and self._rows[0] is step.rows
        # Slots and lengths twice, the caller's and those for `_following`: saves the launch of a device copy.
        mine = (NONE, NONE) if packed else (step.slots, after)
        longs, ints = (NONE if known else step.rows, places, step.slots, mine[0]), (mine[1], after, total, pages)
        stage, buffer = self._send(longs, ints)
        (rows, flat, slots, _), (_, lengths, starts, entries) = stage.views(buffer)
        if self._rows is None or not known:
            self._rows = step.rows, rows
        columns = self.columns(after)
        gathered = self._gathered
        same = not len(places) and gathered.tensor.shape[-1] == columns and same_numbers(step.rows, self._last_rows)
        self._enter(flat, entries)
        self._last_rows, self._lengths = step.rows, lengths
        if not (same and gathered.is_untouched):
            with torch.inference_mode(False):
                self._gathered = Kept(self._repaired().narrow(1, 0, columns).index_select(0, self._rows[1]))
        self._last = None if packed else Sent(step.slots, stage.middle(buffer))
        return BatchTables(self._gathered.tensor, lengths, starts if packed else None, slots)

    def _following(self, step: Step, last: Sent) -> BatchTables:
        """The tables of a step with one more token for every request of the last step: nothing is sent."""
        number = len(step.slots)
        if self._one_more is None or self._one_more[0] != number:
            self._one_more = number, torch.from_numpy(_one_more(number)).to(self.device)
        steps = last.steps + 1
        buffer = torch.add(last.buffer, self._one_more[1], alpha=steps)
        slots, lengths = buffer.split_with_sizes(_halves(number))
        self._last, self._lengths = last._replace(slots=step.slots, steps=steps), lengths.view(torch.int32)[:number]
        return BatchTables(self._gathered.tensor, self._lengths, None, slots[:number])

    def fixed(self, step: Step) -> BatchTables:
        """The tables of all seats."""
        self._unsent.append(step.changed)
        places, pages = self._changes()
        if len(places):
            stage, buffer = self._send((places,), (pages,))
            (flat,), (entries,) = stage.views(buffer)
            self._enter(flat, entries)
        self._unsent = []
        seats = len(self.book.lengths)
        slots, lengths = np.full(seats, NO_SLOT), np.zeros(seats, np.int32)
        slots[step.rows], lengths[step.rows] = step.slots, step.before + step.counts
        self._seats.copy_(self._stage.filled((slots,), (lengths,), self._pinned), non_blocking=True)
        (there,), (there_lengths,) = self._stage.views(self._seats)
        return BatchTables(self._repaired(), there_lengths, None, there)

    def shared(self, step: Step, groups: list[PrefixGroup]) -> SharedPrefix:
        """The hint for the step's groups. `batch` of the same step must have been called."""
        parts, sent = self.parts(step, groups), self._prefixes
        own, known = self._own, sent is not None and sent.parts is parts and sent.buffer.is_untouched
        if sent is None or own is None or not (known and own.is_untouched):
            columns = self.columns(step.before + step.counts - parts.shift * self.book.page_size)
            self._own = None  # first: it does not belong to other prefixes
            with torch.inference_mode(False):
                if sent is None or not known or sent.places.shape[1] < columns:
                    # Indices for pages to come are sent too: sending them again for every other page would slow the
                    # longest steps.
                    sent = self._prefixes = self._sent(parts, 1 << (columns - 1).bit_length())
                own = self._own = Kept(self._repaired().view(-1).take(sent.places.narrow(1, 0, columns)))
        return SharedPrefix(
            parts.groups,
            sent.block_table,
            sent.seqlens_k,
            sent.cu_seqlens_q,
            None if parts.rows is None else sent.rows,
            own.tensor,
            self._lengths - sent.tokens,
        )

    def _sent(self, parts: Parts, columns: int) -> SentPrefixes:
        # Computed on the host, because the device would need several launches.
        width = self._mirror.tensor.shape[1]
        wanted = np.minimum(parts.shift[:, None] + np.arange(columns), width - 1) + self._last_rows[:, None] * width
        stage, buffer = self._send(
            (wanted.ravel(), NONE if parts.rows is None else parts.rows),
            (parts.seqlens_k, parts.cu_seqlens_q, parts.block_table.ravel(), parts.shift * self.book.page_size),
        )
        (places, rows), (lengths, starts, prefix, tokens) = stage.views(buffer)
        prefix = prefix.view(parts.block_table.shape)
        return SentPrefixes(parts, Kept(buffer), prefix, lengths, starts, rows, tokens, places.view(wanted.shape))

    def _load_kernels(self) -> None:
        """Launch every kernel once: a GPU loads a kernel on its first launch, which is slow."""
        zeros = np.zeros(2, np.int64)
        stage, buffer = self._send((zeros,), (zeros,))
        (places,), (pages,) = stage.views(buffer)
        table = torch.zeros((2, 2), dtype=torch.int32, device=self.device)
        table.view(-1).scatter_(0, places, pages)
        launched = table.index_select(0, places), table.view(-1).take(places), pages - pages, buffer + buffer
        del launched

    @property
    def _pinned(self) -> bool:
        return self.device.type == "cuda"

    def _changes(self) -> tuple[Ints, Ints]:
        """Flat indices of the mirror that changed, and their new values. The mirror grows with the table."""
        table, old = self.book.table, self._mirror.tensor
        if tuple(old.shape) != table.shape:
            self._prefixes, self._own, self._last_rows = None, None, NONE
            with torch.inference_mode(False):
                grown = torch.zeros(table.shape, dtype=old.dtype, device=self.device)
                grown[: old.shape[0], : old.shape[1]] = old
                self._mirror = Kept(grown)
        changed = Changes.joined(self._unsent)
        return changed.rows * table.shape[1] + changed.columns, table[changed.rows, changed.columns].astype(np.int64)

    def _repaired(self) -> Tensor:
        """The mirror, which fixed steps hand out. A user's writes to it are undone."""
        mirror = self._mirror.tensor
        if not self._mirror.is_untouched:
            mirror.copy_(torch.from_numpy(self.book.table))
            self._mirror = Kept(mirror)
        return mirror

    def _enter(self, places: Tensor, pages: Tensor) -> None:
        """Write into the mirror. An index may appear twice, always with its current value."""
        if places.numel():
            # One kernel; index_put_ takes several and more host time.
            mirror = self._repaired()
            mirror.view(-1).scatter_(0, places, pages)
            self._mirror = Kept(mirror)
            self._last_rows, self._own = NONE, None
        self._unsent = []

    def _send(self, longs: tuple[Ints, ...], ints: tuple[NDArray[np.integer], ...]) -> tuple[Stage, Tensor]:
        """int64 and int32 arrays to the device in one asynchronous copy."""
        stage = _stage(tuple(map(len, longs)), tuple(map(len, ints)))
        return stage, stage.filled(longs, ints, self._pinned).to(self.device, non_blocking=True)


class Stage:
    """int64 and int32 arrays in one buffer of `size` int64, each 16-byte aligned: launches specialise by alignment."""

    def __init__(self, longs: tuple[int, ...], ints: tuple[int, ...]) -> None:
        # The size of each array and of the gap after it, and the slices.
        self._longs = [size for count in longs for size in (count, -count % 2)]
        self._ints = [size for count in ints for size in (count, -count % 4)]
        self._halves = [sum(self._longs), sum(self._ints) // 2]
        self.size = sum(self._halves)
        self._long_places, self._int_places = _places(self._longs, 0), _places(self._ints, 2 * self._halves[0])
        self._cuts = _cuts(self._longs), _cuts(self._ints)

    def filled(self, longs: tuple[Ints, ...], ints: tuple[NDArray[np.integer], ...], pinned: bool) -> Tensor:
        """A host buffer with the arrays in it. If it is pinned, torch keeps it until its copy is done."""
        stage = torch.empty(self.size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        memory = stage.numpy()
        narrow = memory.view(np.int32)
        for place, values in zip(self._long_places, longs, strict=True):
            memory[place] = values
        for place, numbers in zip(self._int_places, ints, strict=True):
            narrow[place] = numbers
        return stage

    def views(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The arrays in such a buffer; all at once, because slicing one by one is slow."""
        longs, ints = buffer.split_with_sizes(self._halves)
        return _arrays(longs, *self._cuts[0]), _arrays(ints.view(torch.int32), *self._cuts[1])

    def middle(self, buffer: Tensor) -> Tensor:
        """The last int64 array and the first int32 array in such a buffer, which are adjacent."""
        longs, ints = sum(self._longs[-2:]), sum(self._ints[:2]) // 2
        return buffer.narrow(0, self._halves[0] - longs, longs + ints)


def _halves(number: int) -> list[int]:
    """The size of that many slots and lengths in a stage, in int64."""
    return [number + number % 2, (number + -number % 4) // 2]


def _one_more(number: int) -> Ints:
    """The increment of slots and lengths of a step, in the layout of a stage, for one more token each."""
    longs, ints = _halves(number)
    return np.concatenate((np.ones(longs, np.int64), np.ones(2 * ints, np.int32).view(np.int64)))


def _cuts(sizes: list[int]) -> tuple[list[int], list[int]]:
    """The nonempty runs of these sizes, and the index among them of every other run (-1: empty)."""
    there = [place for place, size in enumerate(sizes) if size]
    found = [there.index(place) if sizes[place] else -1 for place in range(0, len(sizes), 2)]
    return [sizes[place] for place in there], found


def _arrays(half: Tensor, sizes: list[int], found: list[int]) -> list[Tensor]:
    """The arrays in one half of a buffer: see `_cuts`."""
    parts = half.split_with_sizes(sizes) if sizes else ()
    return [parts[at] if at >= 0 else half[:0] for at in found]


def _places(sizes: list[int], first: int) -> list[slice]:
    """The slices of every other run of these sizes, from `first` on."""
    ends = [first + end for end in itertools.accumulate(sizes)]
    return [slice(end - size, end) for size, end in zip(sizes[::2], ends[::2], strict=True)]


# Steps of a decoding batch send arrays of the same sizes, except when pages are taken.
_stage = functools.lru_cache(maxsize=256)(Stage)

Tables = HostTables | StagedTables
