"""The bookkeeping of a paged cache, without its tensors: requests, their page tables, and steps.

A step says which requests get how many new tokens. `PageBook.step` checks everything, then takes the pages, copies
where a page is shared (the copies themselves are the caller's), and answers where each token goes. Work for the whole
batch is done by NumPy on arrays indexed by a request's *row*; Python loops only over requests that need a page.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidProblem, OutOfPages
from tilewise.kv.pages import PageAllocator
from tilewise.kv.prefix import Entry, Key, PrefixIndex, hash_page

__all__ = ["CacheStats", "PageBook", "Step"]

Ints = NDArray[np.int64]
Tokens = Sequence[int]
Span = tuple[int, int, int]

FIRST_ROWS, FIRST_COLUMNS = 16, 16


def consecutive(first: Ints, counts: Ints) -> Ints:
    """`counts[i]` numbers from `first[i]` on, one run after another."""
    return np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)


def require_sizes(**sizes: object) -> None:
    """Rejects what is no positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InvalidProblem(name, "an integer of at least 1", size, "A cache has pages, and pages have slots.")


def known_ids(tokens: Tokens) -> list[int]:
    """Ids as plain integers; 1.5 and "1" are none."""
    try:
        return list(map(operator.index, tokens))
    except TypeError as problem:
        raise InvalidProblem("tokens", "integer ids", problem, "Give what a tokenizer gives, as a list.") from None


class CacheStats(NamedTuple):
    """What a cache holds now, and what it has done so far.

    `slots_wasted` are slots of held pages without a token; `utilisation` is the share of slots with one. `hit_rate` is
    the share of prompt tokens that were found in the cache when their request came.
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


class Step(NamedTuple):
    """New tokens of a batch: `counts[i]` tokens of the request in table row `rows[i]` after its first `before[i]`.

    `slots` is where each of them goes, counted through all pages. `changed` are the (row, first column, end column)
    pieces of the table that were written since the step before, `copies` the (from, to) pages whose contents must be
    copied first, all read before any is written.
    """

    requests: tuple[int, ...]
    rows: Ints
    counts: Ints
    before: Ints
    slots: Ints
    changed: list[Span]
    copies: list[tuple[int, int]]


class _Request:
    """The part of a request that has no place in an array: its known tokens, and how far the index knows them."""

    __slots__ = ("entry", "prompt", "row", "tokens", "traceable")

    def __init__(self, row: int, tokens: list[int]) -> None:
        self.row = row
        self.tokens = tokens
        self.prompt = len(tokens)
        self.entry: Entry | None = None
        # False from the first token whose id is not known, or where the index cannot follow.
        self.traceable = True


class PageBook:
    """Requests over a pool of pages. Every method either does all it is asked or raises and changes nothing.

    `table[row]` names the pages of a request in order, `lengths[row]` counts its tokens. Rejects unknown and finished
    requests, more tokens than `max_seqlen`, and with OutOfPages what does not fit.

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
        prefix_sharing: bool = True,
        key: Key = hash_page,
    ) -> None:
        self.page_size = page_size
        self.max_seqlen = num_pages * page_size if max_seqlen is None else max_seqlen
        require_sizes(num_pages=num_pages, page_size=page_size, max_seqlen=self.max_seqlen)
        self.prefix_sharing = prefix_sharing
        self.index = PrefixIndex(page_size, key)
        self.pages = PageAllocator(num_pages, self.index.forget)
        self.table: NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_COLUMNS), np.int32)
        self.lengths: Ints = np.zeros(FIRST_ROWS, np.int64)
        # Whether somebody else may hold the last, partly filled page of a row.
        self._tail_shared: NDArray[np.bool_] = np.zeros(FIRST_ROWS, np.bool_)
        self._requests: dict[int, _Request] = {}
        self._rows_free = list(range(FIRST_ROWS - 1, -1, -1))
        self._next_request = 0
        self._prompt_tokens = self._hit_tokens = self._copies = 0
        self._changed: list[Span] = []
        self._filled: list[tuple[int, int, int]] = []

    # Requests

    def add(self, tokens: Tokens) -> int:
        """A new request with its prompt. Known pages of the prompt are shared at once, all but its last token."""
        prompt = known_ids(tokens)
        if not 1 <= len(prompt) <= self.max_seqlen:
            expected = f"between 1 and max_seqlen = {self.max_seqlen} tokens"
            raise InvalidProblem("tokens", expected, len(prompt), "Cut the prompt, or make the cache for longer ones.")
        request = self._new_request(prompt)
        self._prompt_tokens += len(prompt)
        self.reuse(request)
        return request

    def reuse(self, request: int) -> int:
        """Share pages of the prompt that became known since `add`; returns how many tokens the request now has.

        Worth a call before the first step of a request that waited while others with the same prefix were computed.
        """
        state = self._state(request)
        row, size = state.row, self.page_size
        length, known = int(self.lengths[row]), 0 if state.entry is None else state.entry.depth
        if not (self.prefix_sharing and state.traceable and length == known * size):
            return length
        # The last token is always computed: its query has to be answered.
        found = list(self.index.follow(state.tokens[: state.prompt - 1], state.entry))
        if not found:
            return length
        for entry in found:
            self.pages.hold(entry.page)
        state.entry = found[-1]
        self._write(row, known, [entry.page for entry in found])
        self.lengths[row] = state.entry.depth * size
        self._hit_tokens += size * len(found)
        return state.entry.depth * size

    def fork(self, request: int) -> int:
        """A request with the same tokens over the same pages; whoever appends to a shared page first copies it."""
        parent = self._state(request)
        row, used = parent.row, self.num_pages_of(request)
        child = self._new_request(list(parent.tokens))
        state = self._requests[child]
        state.prompt, state.entry, state.traceable = parent.prompt, parent.entry, parent.traceable
        pages = self.table[row, :used].tolist()
        for page in pages:
            self.pages.hold(page)
        self._write(state.row, 0, pages)
        self.lengths[state.row] = self.lengths[row]
        self._tail_shared[[row, state.row]] = True
        return child

    def free(self, request: int) -> None:
        """The request is finished: its pages go back at once, those the index knows stay remembered until needed."""
        row, used = self._state(request).row, self.num_pages_of(request)
        # From the end: a page must not be forgotten before the ones that follow it.
        for page in self.table[row, :used][::-1].tolist():
            self.pages.drop(page, remembered=page in self.index)
        del self._requests[request]
        self.lengths[row] = 0
        self._tail_shared[row] = False
        self._rows_free.append(row)

    def truncate(self, request: int, length: int) -> None:
        """Drop tokens from the end (a rejected draft, the rest of a prompt); pages that become empty go back."""
        state, used = self._state(request), self.num_pages_of(request)
        if not 0 <= length <= self.lengths[state.row]:
            expected = f"between 0 and {self.lengths[state.row]}, the tokens it has"
            raise InvalidProblem("length", expected, length, "Tokens can be dropped, not made up.")
        keep = -(-length // self.page_size)
        for page in self.table[state.row, keep:used][::-1].tolist():
            self.pages.drop(page, remembered=page in self.index)
        while state.entry is not None and state.entry.depth > length // self.page_size:
            state.entry = state.entry.parent
        self.lengths[state.row] = length
        # The last page may now be one that others hold, or that the index knows as full.
        self._tail_shared[state.row] = True
        del state.tokens[length:]
        state.prompt = min(state.prompt, length)

    # Steps

    def step(
        self, requests: Sequence[int], counts: Sequence[int] | None = None, tokens: Sequence[int | None] | None = None
    ) -> Step:
        """Make room for the next tokens of some requests: see `PagedKVCache.step`."""
        states = [self._state(request) for request in requests]
        if len(set(requests)) < len(requests):
            twice = [r for n, r in enumerate(requests) if r in requests[:n]]
            raise InvalidProblem("requests", "each request once", f"{twice[0]} twice", "Give it a larger count.")
        rows = np.fromiter((state.row for state in states), np.int64, len(states))
        before = self.lengths[rows]
        new = self._counted(requests, states, before, counts)
        ids = self._checked_tokens(requests, states, before, new, tokens)
        after = before + new
        owned, needed = -(-before // self.page_size), -(-after // self.page_size)
        copied = self._tails_to_copy(rows, before)
        self._check_room(requests, after, int((needed - owned).sum()) + len(copied))
        copies = self._take(rows, owned, needed, copied)
        self.lengths[rows] = after
        for state, token, length in zip(states, ids, before.tolist(), strict=False):
            # An id after unknown ones says nothing about the page.
            if token is not None and len(state.tokens) == length:
                state.tokens.append(token)
        changed, self._changed = self._changed, []
        crossing = np.nonzero(after // self.page_size > before // self.page_size)[0].tolist()
        self._filled = [(requests[n], int(before[n]), int(after[n])) for n in crossing]
        return Step(tuple(requests), rows, new, before, self._slots(rows, before, new), changed, copies)

    def commit(self) -> None:
        """The K and V of the last step are written: its full pages may be shared from now on.

        A page that another request filled with the same tokens first, in this step or before, is given back for it:
        equal prompts that come together end up on the same pages. The pages given back stay as they are until the
        next step.
        """
        if self.prefix_sharing:
            for request, before, after in self._filled:
                state = self._requests.get(request)
                if state is not None:
                    self._remember(state, before // self.page_size, after // self.page_size)
        self._filled = []

    # Questions

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def length(self, request: int) -> int:
        """Tokens of a request that the cache holds."""
        return int(self.lengths[self._state(request).row])

    def pending(self, request: int) -> int:
        """Tokens of the prompt that are not in the cache yet."""
        state = self._state(request)
        return max(0, state.prompt - int(self.lengths[state.row]))

    def num_pages_of(self, request: int) -> int:
        """Pages in a request's table."""
        return -(-self.length(request) // self.page_size)

    def pages_of(self, request: int) -> list[int]:
        """A request's pages, in order."""
        pages: list[int] = self.table[self._state(request).row, : self.num_pages_of(request)].tolist()
        return pages

    def pages_for(self, tokens: Tokens) -> int:
        """How many available pages a prompt would take: its new pages, and the idle ones it would share."""
        prompt = known_ids(tokens)
        known = list(self.index.follow(prompt[:-1])) if self.prefix_sharing else []
        return -(-len(prompt) // self.page_size) - sum(not self.pages.is_idle(entry.page) for entry in known)

    def stats(self) -> CacheStats:
        """Counted now, over the pages of all requests."""
        held, wasted = self.pages.held, sum(self.page_size - filled for filled in self._partly_filled().values())
        return CacheStats(
            num_pages=self.pages.num_pages, pages_free=self.pages.available - self.pages.idle,
            pages_idle=self.pages.idle, pages_held=held, pages_shared=self.pages.shared, requests=len(self._requests),
            tokens_stored=held * self.page_size - wasted, slots_wasted=wasted, prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens, evictions=self.pages.evictions, copies=self._copies,
        )  # fmt: skip

    # Inside

    def _partly_filled(self) -> dict[int, int]:
        """Slots in use of every page that no request has filled."""
        tails: dict[int, int] = {}
        for state in self._requests.values():
            length = int(self.lengths[state.row])
            if length % self.page_size:
                page = int(self.table[state.row, length // self.page_size])
                tails[page] = max(tails.get(page, 0), length % self.page_size)
        # After `truncate` a page may be the end of one request and full in another.
        if any(self.pages.references[page] > 1 for page in tails):
            for state in self._requests.values():
                for page in self.table[state.row, : self.lengths[state.row] // self.page_size].tolist():
                    tails.pop(page, None)
        return tails

    def _state(self, request: int) -> _Request:
        state = self._requests.get(request)
        if state is None:
            seen = 0 <= request < self._next_request
            got = f"{request!r}, which is finished" if seen else repr(request)
            raise InvalidProblem("request", "a request that was added and not freed", got, "add() returns its number.")
        return state

    def _new_request(self, tokens: list[int]) -> int:
        if not self._rows_free:
            rows = len(self.lengths)
            self.table = np.concatenate((self.table, np.zeros_like(self.table)))
            self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)))
            self._tail_shared = np.concatenate((self._tail_shared, np.zeros_like(self._tail_shared)))
            self._rows_free = list(range(2 * rows - 1, rows - 1, -1))
        request, self._next_request = self._next_request, self._next_request + 1
        self._requests[request] = _Request(self._rows_free.pop(), tokens)
        return request

    def _grow_columns(self, columns: int) -> None:
        width = self.table.shape[1]
        if columns > width:
            wider = max(columns, 2 * width)
            self.table = np.pad(self.table, ((0, 0), (0, wider - width)))

    def _write(self, row: int, column: int, pages: list[int]) -> None:
        """Name pages in a row of the table, from a column on."""
        end = column + len(pages)
        self._grow_columns(end)
        self.table[row, column:end] = pages
        self._changed.append((row, column, end))

    def _checked_tokens(
        self,
        requests: Sequence[int],
        states: list[_Request],
        before: Ints,
        new: Ints,
        tokens: Sequence[int | None] | None,
    ) -> list[int | None]:
        if tokens is None:
            return []
        if len(tokens) != len(states):
            fix = "One id a request, None where the prompt goes on."
            raise InvalidProblem("tokens", f"{len(states)} entries, one a request", len(tokens), fix)
        given = np.fromiter((token is not None for token in tokens), np.bool_, len(states))
        prompts = np.fromiter((state.prompt for state in states), np.int64, len(states))
        bad = np.nonzero(given & ((before < prompts) | (new != 1)))[0]
        if bad.size:
            place = int(bad[0])
            fix = "An id names one token behind the prompt; the prompt's own ids are known."
            raise InvalidProblem("tokens", f"None for request {requests[place]}", tokens[place], fix)
        known = iter(known_ids([token for token in tokens if token is not None]))
        return [next(known) if is_given else None for is_given in given.tolist()]

    def _counted(
        self, requests: Sequence[int], states: list[_Request], before: Ints, counts: Sequence[int] | None
    ) -> Ints:
        """Tokens to append for each request; without `counts` the rest of the prompt, or one."""
        prompts = np.fromiter((state.prompt for state in states), np.int64, len(states))
        left = prompts - before
        if counts is None:
            return left.clip(min=1)
        new = np.asarray(counts)
        if new.size and new.dtype.kind not in "iu":
            raise InvalidProblem("counts", "integers", new.dtype, "Count tokens.")
        new = new.astype(np.int64)
        if new.shape != left.shape:
            raise InvalidProblem("counts", f"{len(states)} entries, one a request", new.shape, "Count every request.")
        bad = np.nonzero((new < 1) | ((left > 0) & (new > left)))[0]
        if bad.size:
            first = int(bad[0])
            most = f" and at most {left[first]}, the rest of its prompt" if left[first] > 0 else ""
            expected = f"at least 1{most} for request {requests[first]}"
            raise InvalidProblem("counts", expected, int(new[first]), "Leave out requests that do not move on.")
        return new

    def _tails_to_copy(self, rows: Ints, before: Ints) -> list[int]:
        """Places in the batch whose last page is partly filled and also held, or known as full, elsewhere."""
        suspects = np.nonzero(self._tail_shared[rows] & (before % self.page_size > 0))[0].tolist()
        shared = []
        waiting: dict[int, int] = {}
        for place in suspects:
            page = int(self.table[rows[place], before[place] // self.page_size])
            # Of several holders in one step the last one keeps the page, unless the index knows it.
            left = waiting.setdefault(page, self.pages.references[page])
            if left > 1 or page in self.index:
                shared.append(place)
                waiting[page] = left - 1
        return shared

    def _check_room(self, requests: Sequence[int], after: Ints, pages: int) -> None:
        if len(after) and int(after.max()) > self.max_seqlen:
            request = requests[int(after.argmax())]
            expected = f"at most max_seqlen = {self.max_seqlen} tokens for request {request}"
            raise InvalidProblem("counts", expected, int(after.max()), "Finish the request, or make a longer cache.")
        if pages > self.pages.available:
            raise OutOfPages(
                f"the step takes {pages} pages and {self.pages.available} of {self.pages.num_pages} are available: "
                "free requests, step fewer of them, or make the cache larger"
            )

    def _take(self, rows: Ints, owned: Ints, needed: Ints, copied: list[int]) -> list[tuple[int, int]]:
        """Pages for the step, and those to copy; nothing can fail here."""
        copies: list[tuple[int, int]] = []
        for place in copied:
            row, column = int(rows[place]), int(owned[place]) - 1
            page, own = int(self.table[row, column]), self.pages.take()
            copies.append((page, own))
            self._write(row, column, [own])
            self.pages.drop(page, remembered=page in self.index)
        self._copies += len(copies)
        self._tail_shared[rows] = False
        for place in np.nonzero(needed > owned)[0].tolist():
            count = int(needed[place] - owned[place])
            self._write(int(rows[place]), int(owned[place]), [self.pages.take() for _ in range(count)])
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

    def _remember(self, state: _Request, first: int, end: int) -> None:
        """Enter pages first .. end - 1 of a request into the index, as far as their tokens are known."""
        for number in range(first, end):
            stop = (number + 1) * self.page_size
            known = 0 if state.entry is None else state.entry.depth
            if not state.traceable or known != number or len(state.tokens) < stop:
                state.traceable = False
                return
            content, page = tuple(state.tokens[stop - self.page_size : stop]), int(self.table[state.row, number])
            entry = self.index.insert(state.entry, content, page)
            if entry is None:
                state.traceable = False
                return
            state.entry = entry
            if entry.page != page:
                self.pages.hold(entry.page)
                self._write(state.row, number, [entry.page])
                self.pages.drop(page)
