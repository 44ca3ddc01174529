"""Pages, prefixes and requests: the bookkeeping of the paged cache against a dictionary, and step by step."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import tilewise.kv.book
import tilewise.kv.rows
from tilewise.errors import InvalidProblem, OutOfPages
from tilewise.kv import PageBook


def advance(book: PageBook, *args: Any, **kwargs: Any) -> Any:
    step = book.step(*args, **kwargs)
    book.commit()
    return step


class Model:
    """What a cache must be, in dictionaries: the tokens of every request, and what every slot holds for whom."""

    def __init__(self, book: PageBook) -> None:
        self.book = book
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.contents: dict[int, tuple[int, ...]] = {}
        self.batch: list[int] = []
        self.finished = -1
        # Operations that were done, and refusals that were seen to change nothing.
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def add(self, tokens: list[int]) -> int:
        self.done["add"] += 1
        request = self.book.add(tokens)
        self.tokens[request] = tokens
        self.known[request] = self.book.length(request)
        return request

    def fork(self, request: int) -> None:
        self.done["fork"] += 1
        child = self.book.fork(request)
        self.tokens[child], self.known[child] = list(self.tokens[request]), self.known[request]

    def free(self, request: int) -> None:
        self.done["free"] += 1
        self.finished = request
        self.book.free(request)
        del self.tokens[request], self.known[request]

    def truncate(self, request: int, length: int) -> None:
        self.done["truncate"] += 1
        self.book.truncate(request, length)
        del self.tokens[request][length:]
        self.known[request] = length

    def reuse(self, request: int) -> None:
        self.done["reuse"] += 1
        self.known[request] = self.book.reuse(request)

    def refuse(self, name: str, error: type[Exception], call: Callable[[], object]) -> None:
        """A call that raises and changes nothing."""
        before = self.snapshot()
        with pytest.raises(error):
            call()
        assert self.snapshot() == before
        self.refused[name] += 1

    def step(self, counts: dict[int, int], ids: dict[int, int | None]) -> bool:
        """False if the pages do not suffice."""
        requests = list(counts)
        arguments = requests, list(counts.values()), [ids[r] for r in requests]
        try:
            step = self.book.step(*arguments)
        except OutOfPages:
            # Looking closer enters pages that wait to be remembered, so that some come back: not every time.
            if self.done["step"] % 3 == 0:
                self.refuse("out of pages", OutOfPages, lambda: self.book.step(*arguments))
            return False
        self.done["step"] += 1
        size = self.book.page_size
        for _, target in step.copies:
            for slot in range(size):
                self.contents.pop(target * size + slot, None)
        copied = {
            (target, slot): self.contents.get(source * size + slot)
            for source, target in step.copies
            for slot in range(size)
        }
        for (target, slot), content in copied.items():
            if content is not None:
                self.contents[target * size + slot] = content
        slots = iter(step.slots.tolist())
        for request in requests:
            for _ in range(counts[request]):
                if self.known[request] == len(self.tokens[request]):
                    # Two different unknown tokens must never be taken for each other.
                    self.tokens[request].append(-1 - next(self.unknown) if ids[request] is None else ids[request] or 0)
                self.known[request] += 1
                self.contents[next(slots)] = tuple(self.tokens[request][: self.known[request]])
        self.book.commit()
        return True

    unknown = iter(range(10**9))

    def snapshot(self) -> Any:
        book = self.book
        return (
            book.stats(),
            {r: (book.length(r), book.pages_of(r), book.pending(r)) for r in self.tokens},
            list(book.pages.references),
        )

    def check(self) -> None:
        """Every request finds its own tokens in its pages, and the counts add up."""
        book, held = self.book, dict[int, int]()
        # Asked first: pages that wait to be remembered may be given back by it.
        stats = book.stats()
        for request, tokens in self.tokens.items():
            assert book.length(request) == self.known[request]
            pages = book.pages_of(request)
            for page in pages:
                held[page] = held.get(page, 0) + 1
            for position in range(self.known[request]):
                slot = pages[position // book.page_size] * book.page_size + position % book.page_size
                assert self.contents[slot] == tuple(tokens[: position + 1])
        assert [held.get(page, 0) for page in range(book.pages.num_pages)] == book.pages.references
        assert stats.pages_held == len(held)
        assert stats.pages_shared == sum(count > 1 for count in held.values())
        assert stats.pages_free + stats.pages_idle + stats.pages_held == stats.num_pages
        full = {
            page for request in self.tokens for page in book.pages_of(request)[: self.known[request] // book.page_size]
        }
        fill = dict.fromkeys(full, book.page_size)
        for request in self.tokens:
            if self.known[request] % book.page_size:
                last = book.pages_of(request)[-1]
                fill[last] = max(fill.get(last, 0), self.known[request] % book.page_size)
        assert stats.tokens_stored == sum(fill.values())
        assert stats.slots_wasted == len(held) * book.page_size - stats.tokens_stored
        assert len(book.index) >= stats.pages_idle


def play(seed: int, operations: int, *, num_pages: int, page_size: int, sharing: bool, collide: bool) -> Model:
    rng = random.Random(seed)
    # The same in every process, unlike hash().
    key = lambda before, tokens: zlib.crc32(repr((before, tokens)).encode()) % (5 if collide else 2**32)  # noqa: E731
    book = PageBook(num_pages, page_size, max_seqlen=6 * page_size, prefix_sharing=sharing, key=key)
    model = Model(book)
    while (number := model.done.total()) < operations:
        live = list(model.tokens)
        choice = rng.random()
        if len(live) > 30:
            model.free(rng.choice(live))
        elif not live or choice < 0.15:
            # Few different ids: prefixes repeat all the time.
            model.add([rng.randrange(2) for _ in range(rng.randint(1, 5 * page_size))])
        elif choice < 0.22:
            model.fork(rng.choice(live))
        elif choice < 0.27:
            request = rng.choice(live)
            model.truncate(request, rng.randint(0, model.known[request]))
        elif choice < 0.45:
            model.free(rng.choice(live))
        elif choice < 0.5:
            model.reuse(rng.choice(live))
        elif choice < 0.53:
            offend(model, rng, live)
        elif not (decode(model, rng) if choice < 0.77 else step(model, rng, live)):
            model.free(rng.choice(live))
        if number % 32 == 0 or number > operations - 20:
            model.check()
    for request in list(model.tokens):
        model.free(request)
    model.check()
    assert book.pages.available == num_pages
    return model


def offend(model: Model, rng: random.Random, live: list[int]) -> None:
    """What is no request any more, or more than there is room for: beside requests that could go on."""
    book, some = model.book, rng.choice(live)
    known, finished = model.known[some], model.finished
    calls: dict[str, Callable[[], object]] = {
        "double free": lambda: book.free(finished),
        "append to a finished request": lambda: book.step([some, finished]),
        "fork of a finished request": lambda: book.fork(finished),
        "an unknown request": lambda: book.step([some, 10**6]),
        "a request twice": lambda: book.step([some, some]),
        "a prompt too long": lambda: book.add([0] * (book.max_seqlen + 1)),
        "tokens beyond the end": lambda: book.step([some], [book.max_seqlen - known + 1]),
        "truncated upwards": lambda: book.truncate(some, known + 1),
    }
    name = rng.choice(list(calls))
    model.refuse(name, InvalidProblem, calls[name])


def step(model: Model, rng: random.Random, live: list[int]) -> bool:
    counts: dict[int, int] = {}
    ids: dict[int, int | None] = {}
    for request in rng.sample(live, rng.randint(1, min(8, len(live)))):
        pending, room = model.book.pending(request), model.book.max_seqlen - model.known[request]
        if pending == 0 and room == 0:
            continue
        counts[request] = rng.randint(1, min(pending, room)) if pending else 1
        ids[request] = None if pending or rng.random() < 0.2 else rng.randrange(2)
    return not counts or model.step(counts, ids)


def decode(model: Model, rng: random.Random) -> bool:
    """The batch of the time before goes on by a token or several, as long as its requests can."""
    ready = [r for r in model.tokens if not model.book.pending(r) and 0 < model.known[r] < model.book.max_seqlen]
    if not model.batch or not set(model.batch) <= set(ready):
        model.batch = rng.sample(ready, rng.randint(0, min(8, len(ready))))
    some_unknown = rng.random() < 0.2
    for _ in range(rng.randint(1, 6)):
        if not model.batch or any(model.known[request] == model.book.max_seqlen for request in model.batch):
            break
        ids = {r: None if some_unknown and rng.random() < 0.2 else rng.randrange(2) for r in model.batch}
        if not model.step(dict.fromkeys(model.batch, 1), ids):
            return False
    return True


@pytest.mark.parametrize(("page_size", "collide"), [(4, False), (1, True)], ids=["", "hashes collide"])
def test_ten_thousand_operations_against_the_model(
    page_size: int, collide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if more pages were filled in a step than are entered into the index at once.
    monkeypatch.setattr(tilewise.kv.book, "LEAST_AT_ONCE", 1 if collide else 64)
    monkeypatch.setattr(tilewise.kv.rows, "NOTED", 8)
    monkeypatch.setattr(tilewise.kv.rows, "SPREAD", 4)
    model = play(7 * page_size, 10_000, num_pages=40, page_size=page_size, sharing=True, collide=collide)
    stats = model.book.stats()
    assert model.done.total() >= 10_000
    assert min(model.done[name] for name in ("add", "free", "fork", "truncate", "reuse", "step")) > 400
    # Out of pages and eight mistakes, each of which left everything as it was.
    assert len(model.refused) == 9
    assert min(model.refused.values()) >= 20
    assert stats.evictions > (20 if collide else 100)
    assert stats.hit_tokens > 0
    assert page_size == 1 or stats.copies > 100


def test_prefixes_are_shared_but_never_the_last_token() -> None:
    book = PageBook(16, 4)
    first = book.add(range(12))
    advance(book, [first])
    second = book.add(range(12))
    assert book.length(second) == 8
    assert book.pages_of(second) == book.pages_of(first)[:2]
    third = book.add([*range(12), 99])
    assert book.length(third) == 12
    assert book.stats().hit_rate == 20 / 37
    # The second one computed a page that the first has, and gives its own back.
    step = advance(book, [second])
    assert step.slots.tolist() != list(range(8, 12))
    assert book.pages_of(second) == book.pages_of(first)
    assert book.stats().pages_held == 3


def test_equal_prompts_of_one_step_end_up_on_the_same_pages() -> None:
    book = PageBook(64, 4)
    requests = [book.add([*range(20), n]) for n in range(4)]
    advance(book, requests)
    stats = book.stats()
    assert (stats.pages_held, stats.pages_shared) == (5 + 4, 5)
    step = advance(book, requests)
    # The table of the next step tells the device about the pages that were swapped.
    assert len(set(step.changed.rows.tolist())) == 3
    assert step.copies == []
    for request in requests:
        book.free(request)
    assert book.pages.available == 64


def test_freed_prefixes_are_found_until_their_pages_are_needed() -> None:
    book = PageBook(4, 4)
    first = book.add(range(9))
    advance(book, [first])
    book.free(first)
    assert (book.stats().pages_idle, book.stats().pages_free) == (2, 2)
    assert book.pages_for(range(9)) == 3
    again = book.add(range(9))
    assert book.length(again) == 8
    book.free(again)
    other = book.add([7] * 12)
    advance(book, [other])
    # The end of the old prefix went first, its beginning is still there.
    assert book.stats().evictions == 1
    assert book.length(book.add(range(9))) == 4


def test_generated_tokens_are_found_by_their_ids() -> None:
    book = PageBook(16, 2)
    first = book.add([1, 2, 3])
    advance(book, [first])
    advance(book, [first], tokens=[4])
    assert book.length(book.add([1, 2, 3, 4, 5])) == 4
    silent = book.add([9, 9, 9])
    advance(book, [silent])
    advance(book, [silent])
    advance(book, [silent], tokens=[9])
    advance(book, [silent], tokens=[9])
    assert book.length(book.add([9] * 7)) == 2


def test_a_fork_copies_the_page_it_writes_to() -> None:
    book = PageBook(8, 4)
    parent = book.add(range(6))
    advance(book, [parent])
    child = book.fork(parent)
    assert book.pages_of(child) == book.pages_of(parent)
    assert book.stats().pages_shared == 2
    step = advance(book, [parent, child])
    # The first one to write copies, the last holder keeps the page.
    assert [source for source, _ in step.copies] == [1]
    assert book.pages_of(parent)[0] == book.pages_of(child)[0]
    assert book.pages_of(parent)[1] != book.pages_of(child)[1] == 1
    assert book.stats().copies == 1
    assert advance(book, [parent, child]).copies == []


BAD: dict[str, tuple[Callable[[PageBook, int], object], str]] = {
    "unknown request": (lambda book, a: book.step([a, 77]), "request: expected a request that was added"),
    "finished request": (lambda book, _: book.step([0]), "0, which is finished"),
    "double free": (lambda book, _: book.free(0), "which is finished"),
    "fork of nothing": (lambda book, _: book.fork(-1), "request: expected"),
    "twice in a step": (lambda book, a: book.step([a, a]), "requests: expected each request once"),
    "no tokens": (lambda book, _: book.add([]), "got 0. A prompt has at least one token."),
    "prompt too long": (lambda book, _: book.add([1] * 17), "between 1 and max_seqlen = 16 tokens, got 17"),
    "beyond the length": (lambda book, a: book.step([a], [13]), "at most max_seqlen = 16 tokens for request"),
    "beyond any number": (lambda book, a: book.step([a], [2**63 - 1]), "at most max_seqlen = 16 tokens for request 2"),
    "no count": (lambda book, a: book.step([a], [0]), "at least 1 for request"),
    "counts too few": (lambda book, a: book.step([a], []), "counts: expected 1 entry"),
    "ids too many": (lambda book, a: book.step([a], None, [1, 2]), "tokens: expected 1 entry"),
    "no id": (lambda book, a: book.step([a], None, ["7"]), "tokens: expected integer ids"),  # type: ignore[list-item]
    "an id of 65 bits": (lambda book, _: book.add([2**64]), "tokens: expected integer ids of 64 bits"),
    "half an id": (lambda book, _: book.add([1.5]), "tokens: expected integer ids"),  # type: ignore[list-item]
    "half a token": (lambda book, a: book.step([a], [1.5]), "counts: expected integers"),  # type: ignore[list-item]
    "id of many": (lambda book, a: book.step([a], [2], [1]), "tokens: expected None for request"),
    "more than the prompt": (lambda book, _: book.step([1], [6]), "at most 5, the rest of its prompt"),
    "truncated upwards": (lambda book, a: book.truncate(a, 5), "between 0 and 4, the tokens it has"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str) -> None:
    call, message = BAD[name]
    book = PageBook(8, 4, max_seqlen=16)
    book.free(book.add([5]))
    model = Model(book)
    waiting, live = model.add([1] * 5), model.add(list(range(4)))
    assert waiting == 1
    model.step({live: 4}, {live: None})
    before = model.snapshot()
    with pytest.raises(InvalidProblem, match=message):
        call(book, live)
    assert model.snapshot() == before
    model.check()
