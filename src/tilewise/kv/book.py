"""The bookkeeping of a paged cache, without its tensors: requests, their page tables, and steps.

A step says which requests get how many new tokens. `PageBook.step` checks everything, then takes the pages, says which
shared pages the caller must copy, and returns the slot of each token. Work for the whole batch is done by NumPy on
arrays indexed by a request's *row*; Python loops run only over requests that need a page.

An exception may come between any two lines: Ctrl-C, or a timeout by signal. So every operation notes how to undo it
before its first change, and removes the note after its last. The next operation that finds a note left behind
undoes what it tells of: requests and their tables are as before, and all else is counted again from these.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem, OutOfPages
from tilewise.kv.pages import PageAllocator
from tilewise.kv.prefix import ID_BYTES, Ids, Key, PrefixIndex, depth_of, hash_page, known_ids, page_of
from tilewise.kv.rows import ALL, Batch, Changes, Ints, Request, Rows, consecutive
from tilewise.units import counted

Tokens = Sequence[int]

# Minimum number of pages that a step enters into the index, and the factor over the average number of pages its
# requests fill: the backlog shrinks while a batch decodes.
LEAST_AT_ONCE, HASTE = 16, 1.25


class Step(NamedTuple):
    """New tokens of a batch: `counts[i]` tokens of the request in table row `rows[i]` after its first `before[i]`.

    `slots` is where each of them goes, counted through all pages. `changed` are the table entries written since the
    previous step. `copies` are the (from, to) pages whose contents must be copied first, all read before any is
    written. `previous` has the slots of the previous step if every request in it has exactly one token more now, and
    nothing was written to the table but pages taken for these tokens: for the other requests, the next slot follows.
    """

    requests: tuple[int, ...]
    rows: Ints
    counts: Ints
    before: Ints
    slots: Ints
    changed: Changes
    copies: list[tuple[int, int]]
    previous: Ints | None = None


@dataclass(slots=True, eq=False)
class Undo:
    """How to undo the operation that runs in `frame`.

    `writes` are arrays of `Rows`, by name, with an index and the values there before. `request` comes or goes: its
    state, if it goes, is `state`.
    """

    frame: FrameType
    writes: Sequence[tuple[str, Any, Any]] = ()
    request: int | None = None
    state: Request | None = None
    was_undone: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the operation goes on: in another thread, or below the signal handler or finalizer that asks."""
        try:
            self.frame.clear()  # refused while it executes
        except RuntimeError:
            return True
        return False


class CacheStats(NamedTuple):
    """What a cache holds now, and its totals so far.

    `slots_wasted` are slots of held pages without a token; `utilisation` is the share of slots with one. `hit_rate` is
    the share of prompt tokens that were found in the cache when their request was added.
    """

    num_pages: int
    pages_free: int
    pages_idle: int
    pages_held: int
    pages_shared: int
    requests: int
    tokens_stored: int
    slots_wasted: int
    prompt_tokens: int
    hit_tokens: int
    evictions: int
    copies: int

    @property
    def hit_rate(self) -> float:
        """0 before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def utilisation(self) -> float:
        """1 where no page is held."""
        slots = self.tokens_stored + self.slots_wasted
        return self.tokens_stored / slots if slots else 1.0


class PageBook:
    """Requests over a pool of pages. Every method either does all it is asked or raises and changes nothing.

    `table[row]` names the pages of a request in order, `lengths[row]` counts its tokens. Raises for unknown and
    finished requests, for more than `max_requests` of them and for more tokens than `max_seqlen`; raises OutOfPages if
    pages do not suffice. A method that is interrupted has changed nothing either, except that prefixes known so far
    are not found any more. While one runs, others of other threads, signal handlers and finalizers are refused.

    >>> book = PageBook(num_pages=8, page_size=4)
    >>> a = book.add([1, 2, 3, 4, 5])
    >>> book.step([a]).slots.tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        max_seqlen: int | None = None,
        max_requests: int | None = None,
        prefix_sharing: bool = True,
        key: Key = hash_page,
    ) -> None:
        num_pages, self.page_size = sizes_of(num_pages=num_pages, page_size=page_size)
        page_size = self.page_size
        (self.max_seqlen,) = sizes_of(max_seqlen=num_pages * page_size if max_seqlen is None else max_seqlen)
        if max_requests is not None:
            (max_requests,) = sizes_of(max_requests=max_requests)
        self.prefix_sharing = prefix_sharing
        self.index = PrefixIndex(page_size, key)
        self.pages = PageAllocator(num_pages, self.index.forget)
        self.rows = Rows(max_requests, -(-self.max_seqlen // page_size))
        self._requests: dict[int, Request] = {}
        self._next_request = 0
        self._prompt_tokens = self._hit_tokens = self._copies = 0
        self._filled: _Full | None = None
        # The batch of the last step, if none of its requests was freed.
        self._batch: Batch | None = None
        self._written = _WrittenPages(self.index, self.pages, self.rows)
        # Requests of the last step, and the pages that it took if it only decoded.
        self._work = 0, 0
        # Set while an operation runs, and after it if it was interrupted.
        self.undo: Undo | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__

    @property
    def table(self) -> NDArray[np.int32]:
        """The pages of every row."""
        return self.rows.table

    @property
    def lengths(self) -> Ints:
        """The tokens of every row."""
        return self.rows.lengths

    # Requests

    def add(self, tokens: Tokens) -> int:
        """A new request with its prompt. Known pages of the prompt are shared at once, except for its last token."""
        self._refuse_concurrent()
        self._enter_written()
        prompt = known_ids(tokens)
        if not 1 <= len(prompt) <= self.max_seqlen:
            expected = f"between 1 and max_seqlen = {counted(self.max_seqlen, 'token')}"
            fix = "Cut the prompt, or make the cache for longer ones."
            raise InvalidProblem("tokens", expected, len(prompt), fix if prompt else "A prompt has at least one token.")
        self.rows.refuse_another()
        self._note(request=self._next_request)
        request = self._new_request(len(prompt), prompt)
        self._prompt_tokens += len(prompt)
        self._reuse(self._requests[request])
        self.undo = None
        return request

    def reuse(self, request: int) -> int:
        """Share pages of the prompt that became known since `add`; returns how many tokens the request now has.

        Useful before the first step of a request that waited while others with the same prefix were computed.
        """
        self._refuse_concurrent()
        self._enter_written()
        state = self._state(request)
        length = int(self.lengths[state.row])
        self._note(("lengths", state.row, length))
        length = self._reuse(state)
        self.undo = None
        return length

    def fork(self, request: int) -> int:
        """A request with the same tokens over the same pages. The first one to append to a shared page copies it."""
        self._refuse_concurrent()
        self._enter_written()
        parent = self._state(request)
        row, used = parent.row, self.num_pages_of(request)
        self.rows.refuse_another()
        self._note(request=self._next_request)
        child = self._new_request(int(self.rows.prompts[row]), self._ids_of(parent)[:])
        self._next_is_other()
        state = self._requests[child]
        state.entry, state.traceable = parent.entry, parent.traceable
        pages = self.table[row, :used].tolist()
        for page in pages:
            self.pages.hold(page)
        self.rows.write(state.row, 0, pages)
        self.lengths[state.row] = self.lengths[row]
        self.rows.forget_ids(state.row, len(state.tokens))
        self.rows.tail_shared[[row, state.row]] = True
        self.undo = None
        return child

    def free(self, request: int) -> None:
        """Finish a request: its pages go back at once. Those in the index stay cached until they are needed."""
        self._refuse_concurrent()
        self._enter_written()
        state, used = self._state(request), self.num_pages_of(request)
        length = int(self.lengths[state.row])
        self._note(("lengths", state.row, length), request=request, state=state)
        # From the end: a page must not be evicted before the ones that follow it.
        for page in self.table[state.row, :used][::-1].tolist():
            self.pages.drop(page, remembered=page in self.index)
        del self._requests[request]
        self._batch = None
        self.rows.release(state.row)
        # A page that the running step fills for it must not be shared.
        state.traceable = False
        self.undo = None

    def truncate(self, request: int, length: int) -> None:
        """Drop tokens from the end (a rejected draft, the rest of a prompt). Pages that become empty go back."""
        self._refuse_concurrent()
        self._enter_written()
        state, used, rows = self._state(request), self.num_pages_of(request), self.rows
        before, prompt = int(self.lengths[state.row]), int(rows.prompts[state.row])
        if (left := within(length, before)) is None:
            expected = f"an integer between 0 and {before}, the tokens it has"
            raise InvalidProblem("length", expected, length, "Tokens can be dropped, not made up.")
        length = left
        self._note(("lengths", state.row, before), ("prompts", state.row, prompt))
        keep = -(-length // self.page_size)
        for page in self.table[state.row, keep:used][::-1].tolist():
            self.pages.drop(page, remembered=page in self.index)
        while state.entry is not None and depth_of(state.entry) > length // self.page_size:
            state.entry = self.index.parent(state.entry)
        del self._ids_of(state)[length:]
        rows.lengths[state.row], rows.prompts[state.row] = length, min(prompt, length)
        rows.forget_ids(state.row, len(state.tokens))
        # The last page may now be held by others, or be in the index as full.
        rows.tail_shared[state.row] = True
        self._next_is_other()
        self.undo = None

    # Steps

    def step(
        self, requests: Sequence[int], counts: Sequence[int] | None = None, tokens: Sequence[int | None] | None = None
    ) -> Step:
        """Reserve slots for the next tokens of some requests: see `PagedKVCache.step`."""
        step = self.begin(requests, counts, tokens)
        self.undo = None
        return step

    def begin(
        self, requests: Sequence[int], counts: Sequence[int] | None = None, tokens: Sequence[int | None] | None = None
    ) -> Step:
        """`step` for a caller that has more to do: it counts once the caller sets `undo` to None. If the caller ends
        before, it is undone.
        """
        self._refuse_concurrent()
        batch = self._batch_of(requests)
        if batch.slots is not None and (counts is None or _are_ones(counts, len(batch.rows))):
            return self._decode(batch, batch.slots, tokens)
        rows = batch.rows
        before = self.lengths[rows]
        new = self._counted(batch.requests, rows, before, counts)
        ids, given = self._checked_tokens(batch.requests, rows, before, new, tokens)
        after = before + new
        owned, needed = -(-before // self.page_size), -(-after // self.page_size)
        copied = self._tails_to_copy(rows, before)
        self._check_room(batch.requests, before, new, int((needed - owned).sum()) + len(copied))
        tails = rows[copied], owned[copied] - 1
        self._note(("lengths", rows, before), ("table", tails, self.table[tails]), up=1)
        copies = self._take(rows, owned, needed, copied)
        self.lengths[rows] = after
        self._note_ids(batch, before, ids, given)
        first = before // self.page_size
        full = after // self.page_size - first
        places = np.repeat(np.arange(len(rows)), full)
        self._filled = _Full(batch, places, consecutive(first, full)) if len(places) else None
        slots, self._work = self._slots(rows, before, new), (len(rows), 0)
        if bool((after >= self.rows.prompts[rows]).all()):
            batch.slots = slots if len(slots) == len(rows) else slots[np.cumsum(new) - 1]
        return Step(batch.requests, rows, new, before, slots, self.rows.taken_changes(), copies)

    def commit(self) -> None:
        """Marks the K and V of the last step as written: its full pages may be shared from now on.

        If another request filled a page with the same tokens first, in this step or earlier, that page is used and this
        one is given back. Pages given back keep their contents until the next step. If there are many pages, some are
        entered later, at the latest when a method depends on them.
        """
        self._refuse_concurrent()
        self._note()
        filled, self._filled = self._filled, None
        if filled is not None and self.prefix_sharing:
            self._written.add(filled)
        self._written.enter_some(*self._work)
        self.undo = None

    # Questions

    def owns(self, step: Step) -> bool:
        """Whether the slots of a step still belong to its requests, and no other request reads their pages."""
        self._enter_written()
        if not all(request in self for request in step.requests):
            return False
        rows, first = np.repeat(step.rows, step.counts), np.cumsum(step.counts) - step.counts
        position = np.arange(len(rows)) + np.repeat(step.before - first, step.counts)
        pages = self.table[rows, position // self.page_size]
        mine = pages * self.page_size + position % self.page_size == step.slots
        return bool(mine.all()) and all(self.pages.holders(page) == 1 for page in np.unique(pages).tolist())

    def __contains__(self, request: int) -> bool:
        self.settle()
        return request in self._requests

    def row(self, request: int) -> int:
        """A request's row, the same from `add` to `free`."""
        return self._state(request).row

    def length(self, request: int) -> int:
        """Tokens of a request that the cache holds."""
        row = self._state(request).row
        return int(self.lengths[row])

    def pending(self, request: int) -> int:
        """Tokens of the prompt that are not in the cache yet."""
        row = self._state(request).row
        return max(0, int(self.rows.prompts[row] - self.lengths[row]))

    def num_pages_of(self, request: int) -> int:
        """Pages in a request's table."""
        return -(-self.length(request) // self.page_size)

    def pages_of(self, request: int) -> list[int]:
        """A request's pages, in order."""
        row = self._state(request).row
        pages: list[int] = self.table[row, : self.num_pages_of(request)].tolist()
        return pages

    def pages_for(self, tokens: Tokens) -> int:
        """How many available pages a prompt would take: its new pages, and the idle ones it would share."""
        self._enter_written()
        prompt = known_ids(tokens)
        known = self.index.follow(prompt[:-1]) if self.prefix_sharing else ()
        return -(-len(prompt) // self.page_size) - sum(not self.pages.is_idle(page_of(entry)) for entry in known)

    def available_pages(self) -> int:
        """Pages that could be taken now."""
        self._enter_written()
        return self.pages.available

    @property
    def num_requests(self) -> int:
        """How many requests are active."""
        return len(self.requests())

    def requests(self) -> list[int]:
        """The active requests. After an interrupt, one that `add` or `fork` could not return any more may be there."""
        self.settle()
        return list(self._requests)

    def stats(self) -> CacheStats:
        """Counted over the pages of all requests."""
        self._enter_written()
        pages, held = self.pages, self.pages.held
        wasted = sum(self.page_size - filled for filled in self._partly_filled().values())
        pool = (pages.num_pages, pages.available - pages.idle, pages.idle, held, pages.shared)
        tokens = (held * self.page_size - wasted, wasted, self._prompt_tokens, self._hit_tokens)
        return CacheStats(*pool, len(self._requests), *tokens, pages.evictions, self._copies)

    # Interrupts

    def _note(
        self, *writes: tuple[str, Any, Any], request: int | None = None, state: Request | None = None, up: int = 0
    ) -> None:
        """An operation begins, its first change comes next. It runs as long as the caller, or the one `up` above that.
        The note is removed after the last change.
        """
        self.undo = Undo(sys._getframe(1 + up), writes, request, state)  # noqa: SLF001

    def settle(self) -> None:
        """Undo an operation that was interrupted. May be interrupted itself."""
        undo = self.undo
        if undo is None or undo.is_running:
            return
        if undo.request is not None and undo.state is None:
            self._requests.pop(undo.request, None)
        elif undo.request is not None and undo.state is not None:
            self._requests[undo.request] = undo.state
        for name, index, values in undo.writes:
            getattr(self.rows, name)[index] = values
        self._batch, self._filled, self._work = None, None, (0, 0)
        # The index may be half-written, and a request's last pages may be without their contents.
        self.index.clear()
        self._written = _WrittenPages(self.index, self.pages, self.rows)
        states = list(self._requests.values())
        for state in states:
            state.entry, state.traceable = None, False
        rows = np.array([state.row for state in states], np.int64)
        self.pages.recount(self.rows.recount(rows, -(-self.lengths[rows] // self.page_size)))
        undo.was_undone = True
        self.undo = None

    def _refuse_concurrent(self) -> None:
        """Before a change: undo what was interrupted, and refuse if an operation runs."""
        self.settle()
        if self.undo is not None:
            fix = "Threads need a lock around the cache; signal handlers and finalizers must not change it."
            raise InvalidProblem("cache", "one operation at a time", "one in the middle of another", fix)

    def _enter_written(self) -> None:
        """Enter all pages into the index that wait for it: before what depends on the index or on who holds a page."""
        self.settle()
        if self.undo is None and self._written:
            self._note()
            self._written.enter()
            self.undo = None

    # Inside

    def _reuse(self, state: Request) -> int:
        """Share the pages of a prompt that are known; returns how many tokens the request now has."""
        row, size = state.row, self.page_size
        length, known = int(self.lengths[row]), depth_of(state.entry)
        if not (self.prefix_sharing and state.traceable and length == known * size):
            return length
        # The last token is always computed, because its query needs an answer.
        if not (found := list(self.index.follow(state.tokens[: int(self.rows.prompts[row]) - 1], state.entry))):
            return length
        pages = [page_of(entry) for entry in found]
        for page in pages:
            self.pages.hold(page)
        state.entry = found[-1]
        self._next_is_other()
        self.rows.write(row, known, pages)
        self.lengths[row] = length = depth_of(state.entry) * size
        self._hit_tokens += size * len(found)
        return length

    def _partly_filled(self) -> dict[int, int]:
        """Slots in use of every page that no request has filled."""
        tails: dict[int, int] = {}
        for state in self._requests.values():
            length = int(self.lengths[state.row])
            if length % self.page_size:
                page = int(self.table[state.row, length // self.page_size])
                tails[page] = max(tails.get(page, 0), length % self.page_size)
        # After `truncate`, a page may be the end of one request and full in another.
        if any(self.pages.holders(page) > 1 for page in tails):
            for state in self._requests.values():
                for page in self.table[state.row, : self.lengths[state.row] // self.page_size].tolist():
                    tails.pop(page, None)
        return tails

    def _state(self, request: Any) -> Request:
        self.settle()
        try:
            state = self._requests.get(request)
        except TypeError:
            state = None
        if state is None:
            seen = isinstance(request, int | np.integer) and within(request, self._next_request - 1) is not None
            got = f"{request!r}, which is finished" if seen else repr(request)
            raise InvalidProblem("request", "a request that was added and not freed", got, "add() returns its number.")
        return state

    def _batch_of(self, requests: Sequence[int]) -> Batch:
        """A step's requests, each at most once. Decoding batches repeat, so the last one is cached."""
        known = self._batch
        try:
            if known is not None and known.hashed == hash(given := tuple(requests)) and known.requests == given:
                return known
            states = list(map(self._requests.__getitem__, requests))
        except (KeyError, TypeError):
            states = [self._state(request) for request in requests]
        if len(set(requests)) < len(requests):
            twice = [r for n, r in enumerate(requests) if r in requests[:n]]
            raise InvalidProblem("requests", "each request once", f"{twice[0]} twice", "Give it a larger count.")
        self._batch = batch = Batch(requests, states)
        return batch

    def _next_is_other(self) -> None:
        """The next step is not just one more token for every request."""
        if self._batch is not None:
            self._batch.slots = None

    def _decode(self, batch: Batch, last: Ints, tokens: Sequence[int | None] | None) -> Step:
        """The next token of requests whose last ones are in slots `last`: the same as `step`, with fewer operations."""
        rows, size = batch.rows, self.page_size
        before = self.lengths[rows]
        ids, given = self._checked_ids(batch, before, tokens)
        after, out = before + 1, np.nonzero(before % size == 0)[0]
        self._check_room(batch.requests, before, batch.ones, len(out))
        self._note(("lengths", rows, before), up=2)
        slots, previous = last + 1, None if self.rows.is_changed else last
        if len(out):
            pages = self.pages.take_many(len(out))
            self.rows.write_each(rows[out], before[out] // size, pages)
            slots[out] = pages * size
        self.lengths[rows] = after
        self._note_ids(batch, before, ids, given)
        full = np.nonzero(after % size == 0)[0]
        self._filled = _Full(batch, full, after[full] // size - 1) if len(full) else None
        batch.slots, self._work = slots, (len(rows), len(out))
        return Step(batch.requests, rows, batch.ones, before, slots, self.rows.taken_changes(), [], previous)

    def _new_request(self, prompt: int, tokens: Ids[int]) -> int:
        state = Request(self.rows.claim(prompt), tokens)
        request, self._next_request = self._next_request, self._next_request + 1
        self._requests[request] = state
        return request

    def _checked_tokens(
        self, requests: Sequence[int], rows: Ints, before: Ints, new: Ints, tokens: Sequence[int | None] | None
    ) -> tuple[Ints, NDArray[np.bool_] | None]:
        """The given ids, and their indices in the batch; None for all of them."""
        if tokens is None:
            return np.empty(0, np.int64), np.zeros(len(rows), np.bool_)
        fix = "One id a request, None where the prompt goes on."
        if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | np.ndarray):
            raise InvalidProblem("tokens", "a list of ids", repr(tokens), fix)
        if len(tokens) != len(rows):
            raise InvalidProblem("tokens", f"{counted(len(rows), 'entry', 'entries')}, one a request", len(tokens), fix)
        bad = (before < self.rows.prompts[rows]) | (new != 1)
        given = None
        if None in tokens:
            given = np.fromiter((token is not None for token in tokens), np.bool_, len(rows))
            bad &= given
        if bad.any():
            place = int(bad.argmax())
            fix = "An id names one token behind the prompt; the prompt's own ids are known."
            raise InvalidProblem("tokens", f"None for request {requests[place]}", tokens[place], fix)
        return np.array(known_ids(token for token in tokens if token is not None), np.int64), given

    def _checked_ids(
        self, batch: Batch, before: Ints, tokens: Sequence[int | None] | None
    ) -> tuple[Ints, NDArray[np.bool_] | None]:
        """`_checked_tokens` for a batch that only decodes."""
        if isinstance(tokens, list) and len(tokens) == len(batch.rows):
            try:
                # Converting all at once is several times faster than one by one, which is only needed to find None and
                # non-ids.
                return np.frombuffer(array("q", tokens), np.int64), None
            except (TypeError, OverflowError):
                pass
        return self._checked_tokens(batch.requests, batch.rows, before, batch.ones, tokens)

    def _note_ids(self, batch: Batch, before: Ints, ids: Ints, given: NDArray[np.bool_] | None) -> None:
        """Tokens after the prompt, as long as all ids before them are known: after unknown ones an id is useless."""
        rows = batch.rows
        follows = self.rows.known[rows] == ALL
        if given is not None:
            unknown = ~given & (before >= self.rows.prompts[rows])
            self.rows.known[rows[unknown]] = np.minimum(self.rows.known[rows[unknown]], before[unknown])
            ids, follows = ids[follows[given]], follows & given
        elif not follows.all():
            ids = ids[follows]
        places = np.nonzero(follows)[0]
        for place in places[self.rows.note(rows[places], before[places], ids)].tolist():
            self._ids_of(batch.states[place])

    def _ids_of(self, state: Request) -> Ids[int]:
        """All ids that are known of a request."""
        return self.rows.moved_ids(state.row, state.tokens)

    def _counted(self, requests: Sequence[int], rows: Ints, before: Ints, counts: Sequence[int] | None) -> Ints:
        """Tokens to append for each request; without `counts` the rest of the prompt, or one."""
        left: Ints = self.rows.prompts[rows] - before
        if counts is None:
            return left.clip(min=1)
        new = _integers_of("counts", counts)
        if new.shape != left.shape:
            raise InvalidProblem(
                "counts", f"{counted(len(rows), 'entry', 'entries')}, one a request", new.shape, "Count every request."
            )
        bad = np.nonzero((new < 1) | ((left > 0) & (new > left)))[0]
        if bad.size:
            first = int(bad[0])
            most = f" and at most {left[first]}, the rest of its prompt" if left[first] > 0 else ""
            expected = f"at least 1{most} for request {requests[first]}"
            raise InvalidProblem("counts", expected, int(new[first]), "Leave out requests that do not move on.")
        return new

    def _tails_to_copy(self, rows: Ints, before: Ints) -> list[int]:
        """Indices in the batch whose last page is partly filled and also held, or known as full, elsewhere."""
        suspects = np.nonzero(self.rows.tail_shared[rows] & (before % self.page_size > 0))[0].tolist()
        shared, waiting = list[int](), dict[int, int]()
        for place in suspects:
            page = int(self.table[rows[place], before[place] // self.page_size])
            # Of several holders in one step the last one keeps the page, unless it is in the index.
            left = waiting.setdefault(page, self.pages.holders(page))
            if left > 1 or page in self.index:
                shared.append(place)
                waiting[page] = left - 1
        return shared

    def _check_room(self, requests: Sequence[int], before: Ints, new: Ints, pages: int) -> None:
        # Their sum could overflow int64.
        over = new > self.max_seqlen - before
        if over.any():
            place = int(over.argmax())
            expected = f"at most max_seqlen = {counted(self.max_seqlen, 'token')} for request {requests[place]}"
            fix = "Finish the request, or make a longer cache."
            raise InvalidProblem("counts", expected, int(before[place]) + int(new[place]), fix)
        if pages > self.pages.available and pages > self.available_pages():
            raise OutOfPages(
                f"the step takes {counted(pages, 'page')}, and {self.pages.available} of {self.pages.num_pages} are "
                "available: "
                "free requests, step fewer of them, or make the cache larger"
            )

    def _take(self, rows: Ints, owned: Ints, needed: Ints, copied: list[int]) -> list[tuple[int, int]]:
        """Take the pages for the step, including the copies. Nothing can fail here."""
        copies: list[tuple[int, int]] = []
        for place in copied:
            row, column = int(rows[place]), int(owned[place]) - 1
            page, own = int(self.table[row, column]), self.pages.take()
            copies.append((page, own))
            self.rows.write(row, column, [own])
            self.pages.drop(page, remembered=page in self.index)
        self._copies += len(copies)
        self.rows.tail_shared[rows] = False
        more = needed - owned
        if more.any():
            taken = self.pages.take_many(int(more.sum()))
            self.rows.write_each(np.repeat(rows, more), consecutive(owned, more), taken)
        return copies

    def _slots(self, rows: Ints, before: Ints, counts: Ints) -> Ints:
        """The slot of every new token, sequence by sequence."""
        if len(counts) == int(counts.sum()):
            row, position = rows, before
        else:
            row, position = np.repeat(rows, counts), consecutive(before, counts)
        pages = self.table[row, position // self.page_size].astype(np.int64)
        slots: Ints = pages * self.page_size + position % self.page_size
        return slots


class _Full(NamedTuple):
    """Pages that a step fills: page number `numbers[i]` of request `places[i]` of its batch.

    Arrays, because a prompt has many pages, and the garbage collector walks through lists.
    """

    batch: Batch
    places: Ints
    numbers: Ints

    @property
    def rows(self) -> Ints:
        """The rows of their requests."""
        return self.batch.rows[self.places]

    def part(self, begin: int, end: int) -> _Full:
        """A slice of them."""
        return _Full(self.batch, self.places[begin:end], self.numbers[begin:end])


class _WrittenPages:
    """Full pages waiting to be entered into the index, a limited number per step.

    If another request filled a page with the same tokens first, that page is used and this one is given back: equal
    prompts that come together end up on the same pages.
    """

    def __init__(self, index: PrefixIndex, pages: PageAllocator, rows: Rows) -> None:
        self._index, self._pages, self._rows = index, pages, rows
        # One entry per step, and how many of the first step's pages are entered.
        self._queue: deque[_Full] = deque()
        self._entered = self._waiting = 0

    def __bool__(self) -> bool:
        return self._waiting > 0

    def add(self, full: _Full) -> None:
        """Queue pages that are written."""
        self._queue.append(full)
        self._waiting += len(full.places)

    def enter_some(self, requests: int, taken: int) -> None:
        """Enter a step's share of the waiting pages; none if the step itself took many pages."""
        share = max(LEAST_AT_ONCE, int(HASTE * requests / self._index.page_size))
        if taken <= 2 * share:
            self.enter(share)

    def enter(self, most: int | None = None) -> None:
        """Enter all waiting pages, or the first `most`."""
        left = self._waiting if most is None else min(most, self._waiting)
        self._waiting -= left
        while left:
            first, full = self._entered, self._queue[0]
            self._entered = last = min(first + left, len(full.places))
            self._enter(full.part(first, last))
            left -= last - first
            if last == len(full.places):
                self._queue.popleft()
                self._entered = 0

    def _enter(self, full: _Full) -> None:
        """Enter pages whose tokens are known and whose predecessors are in the index."""
        pages, insert = self._rows.table[full.rows, full.numbers].tolist(), self._index.insert
        states = [full.batch.states[place] for place in full.places.tolist()]
        for state, number, page, content in zip(
            states, full.numbers.tolist(), pages, self._contents(full, states), strict=True
        ):
            follows = content and state.traceable and depth_of(state.entry) == number
            entry = insert(state.entry, content, page) if follows else None
            if entry is None:
                state.traceable = False
                continue
            state.entry = entry
            if (known := page_of(entry)) != page:
                self._pages.hold(known)
                self._rows.write(state.row, number, [known])
                self._pages.drop(page)

    def _contents(self, full: _Full, states: list[Request]) -> list[bytes]:
        """The ids of each page; empty if one is unknown."""
        size = self._index.page_size
        first = full.numbers * size
        noted, there = self._rows.noted_ids(full.rows, first, size)
        contents = [noted[at : at + ID_BYTES * size] for at in range(0, len(noted), ID_BYTES * size)]
        for place in np.nonzero(~there)[0].tolist():
            state, begin = states[place], int(first[place])
            ids = state.tokens if len(state.tokens) >= begin + size else self._rows.moved_ids(state.row, state.tokens)
            contents[place] = ids[begin : begin + size].tobytes() if len(ids) >= begin + size else b""
        return contents


def sizes_of(**sizes: Any) -> list[int]:
    """Positive integers. Raises for anything else, True included."""
    found: list[int] = []
    for name, size in sizes.items():
        number = None if isinstance(size, bool) else within(size, 2**63 - 1)
        if not number:
            raise InvalidProblem(name, "an integer of at least 1", size, "A cache has pages, and pages have slots.")
        found.append(number)
    return found


def within(number: Any, last: int) -> int | None:
    """An integer from 0 to `last`, also of NumPy or torch; None if it is not one."""
    try:
        index = operator.index(number)
    except (TypeError, RuntimeError):
        return None
    return index if 0 <= index <= last else None


def _integers_of(name: str, numbers: Any) -> NDArray[np.int64]:
    """The numbers as an array. Raises for fractions and for what has no shape."""
    try:
        found = np.asarray(numbers)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(name, "integers", repr(numbers), "Count tokens.") from None
    if found.size and found.dtype.kind not in "iu":
        raise InvalidProblem(name, "integers", found.dtype, "Count tokens.")
    return found.astype(np.int64)


def _are_ones(counts: object, number: int) -> bool:
    """Whether these are `number` ones."""
    if isinstance(counts, np.ndarray):
        return counts.dtype.kind in "iu" and counts.shape == (number,) and bool((counts == 1).all())
    if not isinstance(counts, list | tuple):
        return False
    return len(counts) == number == counts.count(1) and {*map(type, counts)} <= {int}
