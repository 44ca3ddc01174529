"""An exception at every line of every operation of a paged cache, as Ctrl-C and timeouts by signal raise them.

Afterwards the operation has not been, or is done; it can be repeated; nobody reads another request's rows, and no page
is lost.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
import tilewise.kv.book
from shadow import LAYERS, Shadow
from tilewise.kv.tables import HostTables, StagedTables

HERE = str(Path(tilewise.kv.book.__file__).parent)
PAGES, SIZE = 28, 4


@contextlib.contextmanager
def interrupted(place: int) -> Iterator[list[int]]:
    """KeyboardInterrupt instead of line number `place` that runs in tilewise.kv. Yields a list that gets the number of
    lines that ran.
    """
    before, seen = sys.gettrace(), [0]

    def lines(_frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == place:
                raise KeyboardInterrupt
        return lines

    sys.settrace(lambda frame, *_: lines if frame.f_code.co_filename.startswith(HERE) else None)
    try:
        yield seen
    finally:
        sys.settrace(before)


class World(Shadow):
    """A cache in the middle of its work, with little room: requests that share prefixes and a last page, one whose
    prompt waits, pages that only the index knows, and pages that wait to be entered.
    """

    def __init__(self, seed: int = 0, **options: Any) -> None:
        tables = options.pop("tables", HostTables)
        super().__init__(SIZE, torch.float32, PAGES, max_seqlen=40, **options)
        self.cache._tables = tables(self.cache.book, torch.device("cpu"))
        self.draw = random.Random(seed)
        self.waiting = self.add(list(range(14)))
        self.first = self.add(list(range(10)))
        gone = self.add([50, *range(51, 60)])
        self.step([self.first, gone])
        self.second = self.add([*range(9), 77])
        self.step([self.second])
        self.cache.free(gone)
        del self.tokens[gone]
        self.decode([self.first, self.second])
        self.decode([self.first, self.second])
        self.third = self.fork(self.first)

    @property
    def decoding(self) -> list[int]:
        return [self.first, self.second, self.third]

    def decode(self, requests: list[int]) -> None:
        self.step(requests, {request: self.draw.randrange(3) for request in requests})

    def lengthen(self, requests: list[int]) -> None:
        """Give requests their next token, unless they have it from an interrupted attempt."""
        for request in requests:
            if len(self.tokens[request]) == self.cache.length(request):
                self.tokens[request].append(self.draw.randrange(3))

    def write(self, requests: list[int], counts: list[int]) -> None:
        """Append all layers of a step, again if need be."""
        for layer in range(LAYERS):
            new = [
                tuple(part[-count:] for part in self.rows(request, layer))
                for request, count in zip(requests, counts, strict=True)
            ]
            self.cache.append(torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), layer=layer)

    def check_rows(self) -> None:
        """Every request finds its own rows in its pages, and each page is held as often as it is used."""
        book, held = self.cache.book, [0] * PAGES
        # Asked first: pages that wait to be entered may be given back by it.
        stats = self.cache.stats()
        for request in self.tokens:
            pages, length = book.pages_of(request), self.cache.length(request)
            for page in pages:
                held[page] += 1
            for layer in range(LAYERS):
                for stored, rows in zip(self.cache.pages(layer), self.rows(request, layer), strict=True):
                    assert torch.equal(stored[pages].flatten(0, 1)[:length], rows)
        assert held == book.pages.references
        assert stats.pages_held == sum(count > 0 for count in held)
        assert stats.pages_free + stats.pages_idle + stats.pages_held == PAGES
        assert sorted(self.tokens) == sorted(self.cache.requests())

    def check_tables(self, requests: list[int]) -> None:
        """Attention is told the pages and lengths of the requests of the step."""
        lengths = [self.cache.length(request) for request in requests]
        assert self.cache.seqlens().tolist() == lengths
        for request, row in zip(requests, self.cache.block_table().tolist(), strict=True):
            pages = self.cache.book.pages_of(request)
            assert row[: len(pages)] == pages

    def live_on(self, attend: bool = False) -> None:
        """Whatever was interrupted: all requests go on, new ones take all pages that are left, and all is freed."""
        self.check_rows()
        ready = [r for r in self.tokens if not self.cache.pending(r) and self.cache.length(r)]
        for _ in range(2):
            self.decode(ready)
            self.check_tables(ready)
        if attend:
            self.check(ready, [1] * len(ready))
        while room := self.cache.available_pages():
            # The ids repeat, and only the last page can be shared: all are taken.
            self.step([self.add([1000 + room] * min(36, SIZE * room))])
        self.check_rows()
        for request in self.draw.sample(list(self.tokens), len(self.tokens)):
            self.cache.free(request)
        assert self.cache.available_pages() == PAGES
        assert self.cache.book.pages.references == [0] * PAGES


@contextlib.contextmanager
def refused_as(words: str) -> Iterator[None]:
    """What is in here may be refused with these words, and in no other way."""
    try:
        yield
    except tw.InvalidProblem as error:
        if words not in str(error):
            raise


class Operation:
    """What runs before, what is interrupted, and what follows: the operation again, if it was not done."""

    def prepare(self, world: World) -> None: ...

    def run(self, world: World) -> None:
        raise NotImplementedError

    def repeat(self, world: World) -> None:
        self.run(world)


class Free(Operation):
    def __init__(self, which: str) -> None:
        self.which = which

    def run(self, world: World) -> None:
        world.cache.free(getattr(world, self.which))

    def repeat(self, world: World) -> None:
        if getattr(world, self.which) in world.cache.requests():
            self.run(world)
        del world.tokens[getattr(world, self.which)]


class Add(Operation):
    def run(self, world: World) -> None:
        world.cache.add([*range(10), 77, 78])

    def repeat(self, world: World) -> None:
        request = world.add([*range(10), 77, 78])
        world.step([request])


class Fork(Operation):
    def run(self, world: World) -> None:
        world.cache.fork(world.second)

    def repeat(self, world: World) -> None:
        world.fork(world.second)


class Reuse(Operation):
    def run(self, world: World) -> None:
        world.cache.reuse(world.waiting)


class Truncate(Operation):
    def __init__(self, length: int) -> None:
        self.length = length

    def run(self, world: World) -> None:
        world.cache.truncate(world.first, self.length)

    def repeat(self, world: World) -> None:
        self.run(world)
        del world.tokens[world.first][self.length :]


class Steps(Operation):
    """The next tokens of some requests: a prompt that waits, and one token of each other."""

    def __init__(self, *which: str, warm: int = 0) -> None:
        self.which, self.warm = which, warm

    def requests(self, world: World) -> list[int]:
        return [getattr(world, name) for name in self.which]

    def prepare(self, world: World) -> None:
        for _ in range(self.warm):
            world.decode(self.requests(world))
        world.lengthen([r for r in self.requests(world) if not world.cache.pending(r)])

    def ids(self, world: World) -> list[int | None]:
        return [None if world.cache.pending(r) else world.tokens[r][-1] for r in self.requests(world)]

    def run(self, world: World) -> None:
        world.cache.step(self.requests(world), tokens=self.ids(world))

    def repeat(self, world: World) -> None:
        requests = self.requests(world)
        world.lengthen([r for r in requests if not world.cache.pending(r)])
        with refused_as("every layer of the step before"):  # it was reserved, and only its answer was lost
            self.run(world)
        world.write(requests, [len(rows) for rows in world.cache.slots().split(self.counts(world))])

    def counts(self, world: World) -> list[int]:
        starts = world.cache.cu_seqlens_q()
        return [1] * len(self.which) if starts is None else starts.diff().tolist()


class Appends(Steps):
    def prepare(self, world: World) -> None:
        super().prepare(world)
        self.run_step(world)

    def run_step(self, world: World) -> None:
        world.cache.step(self.requests(world), tokens=self.ids(world))

    def run(self, world: World) -> None:
        world.write(self.requests(world), self.counts(world))

    def repeat(self, world: World) -> None:
        with refused_as("one of a step whose pages nobody shares yet"):  # all layers were written
            self.run(world)


class Attends(Appends):
    """The hint of shared prefixes is made when it is first asked for."""

    def prepare(self, world: World) -> None:
        super().prepare(world)
        world.write(self.requests(world), self.counts(world))

    def run(self, world: World) -> None:
        world.cache.shared_prefix()

    def repeat(self, world: World) -> None:
        assert world.cache.shared_prefix() is not None
        world.check(self.requests(world), self.counts(world))


class Asks(Operation):
    """Questions enter pages into the index that wait for it."""

    def prepare(self, world: World) -> None:
        for _ in range(SIZE):
            world.decode(world.decoding)

    def run(self, world: World) -> None:
        world.cache.stats()


OPERATIONS: dict[str, Operation] = {
    "free": Free("first"),
    "free another": Free("second"),
    "free a request that waits": Free("waiting"),
    "add": Add(),
    "fork": Fork(),
    "reuse": Reuse(),
    "truncate": Truncate(5),
    "truncate to nothing": Truncate(0),
    "step with a copied page": Steps("first", "second", "third"),
    "step like the one before": Steps("first", "second", "third", warm=1),
    "step that takes pages": Steps("first", "second", "third", warm=3),
    "step of a prompt": Steps("waiting"),
    "step of a prompt and others": Steps("second", "waiting", "third"),
    "append": Appends("second", "waiting", "third"),
    "append that fills pages": Appends("first", "second", "third", warm=3),
    "attention": Attends("first", "second", "third"),
    "stats": Asks(),
}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages wait before they are entered into the index, and ids are moved often."""
    monkeypatch.setattr(tilewise.kv.book, "LEAST_AT_ONCE", 1)
    monkeypatch.setattr(tilewise.kv.rows, "SPREAD", 4)


def interrupt(operation: Operation, place: int, **options: Any) -> bool:
    """Interrupt an operation at a line, then live on. False if it has fewer lines."""
    world = World(**options)
    operation.prepare(world)
    with interrupted(place) as seen, contextlib.suppress(KeyboardInterrupt):
        operation.run(world)
    if seen[0] < place:
        return False
    for request in set(world.cache.requests()) - set(world.tokens):
        world.cache.free(request)  # its number never came back
    operation.repeat(world)
    world.live_on(attend=place % 10 == 0)
    return True


@pytest.mark.parametrize("tables", [HostTables, StagedTables])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_interrupt_at_some_lines(name: str, tables: Any) -> None:
    """A fifth of the lines: of the two sorts of tables, others."""
    first = 1 if tables is HostTables else 3
    assert not all(interrupt(OPERATIONS[name], place, tables=tables) for place in range(first, 5000, 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tables", [HostTables, StagedTables])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_interrupt_at_any_line(name: str, tables: Any) -> None:
    assert not all(interrupt(OPERATIONS[name], place, tables=tables) for place in range(1, 5000))


@pytest.mark.parametrize("place", range(1, 200, 4))
def test_an_interrupt_of_a_fixed_step(place: int) -> None:
    """The tables of all seats are written in place."""
    world = World(max_requests=8)
    world.lengthen(world.decoding)
    ids: Any = {"tokens": [world.tokens[request][-1] for request in world.decoding], "fixed": True}
    with interrupted(place), contextlib.suppress(KeyboardInterrupt):
        world.cache.step(world.decoding, **ids)
    with contextlib.suppress(tw.InvalidProblem):  # it was done, and waits for its rows
        world.cache.step(world.decoding, **ids)
    seats = world.cache.seats(world.decoding)
    lengths, slots = world.cache.seqlens(), world.cache.slots()
    assert [int(lengths[seat]) for seat in seats] == [world.cache.length(request) for request in world.decoding]
    assert sorted(set(range(8)) - set(seats)) == (slots < 0).nonzero().flatten().tolist()
    for layer in range(LAYERS):
        rows = torch.zeros(8, 2, 40)
        for seat, request in zip(seats, world.decoding, strict=True):
            rows[seat] = torch.cat([part[-1] for part in world.rows(request, layer)], -1)
        world.cache.append(*rows.split([16, 24], -1), layer=layer)
    world.live_on()


def test_interrupts_by_signals() -> None:
    """A timer's, at random moments of operations that repeat, as a server's timeouts come."""
    world, draw = World(), random.Random(0)
    ended = time.monotonic() + 2.0

    def timeout(*_: object) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, timeout)
    try:
        while time.monotonic() < ended:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-5, 3e-4))
                request = world.cache.add([*range(9), draw.randrange(5)])
                world.cache.fork(draw.choice(world.decoding))
                world.cache.step([request])
                time.sleep(1.0)
            except TimeoutError:
                pass
            for other in set(world.cache.requests()) - set(world.tokens):
                with contextlib.suppress(TimeoutError):
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 5e-5))
                    world.cache.free(other)
                    signal.setitimer(signal.ITIMER_REAL, 0.0)
                if other in world.cache.requests():
                    world.cache.free(other)
            world.check_rows()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
    world.live_on(attend=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_an_interrupted_cache_is_copied(copied: Callable[[Any], Any]) -> None:
    for place in (60, 100, 150):
        world = World()
        Steps("first", "second", "third").prepare(world)
        with interrupted(place), contextlib.suppress(KeyboardInterrupt):
            world.cache.step(world.decoding)
        world.cache = copied(world.cache)
        Steps("first", "second", "third").repeat(world)
        world.live_on()


def keyboard_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_rescaled_pages_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending to e4m3 pages rescales the rows that are there. Half done, it cannot be repeated."""
    cache = tw.PagedKVCache(8, 4, 1, 1, 16, dtype=torch.float8_e4m3fn, device="cpu")
    request, other = cache.add([1, 2, 3]), cache.add([4, 5])
    cache.step([request, other])
    cache.append(torch.ones(5, 1, 16), torch.ones(5, 1, 16))
    kept = [page.clone() for page in cache.pages()]
    # What is refused before anything is written leaves the step as it was.
    cache.step([request])
    with pytest.raises(tw.InvalidProblem, match="k: expected"):
        cache.append(torch.ones(2, 1, 16), torch.ones(2, 1, 16))
    monkeypatch.setattr("tilewise.kv.cache.append_quantised", keyboard_interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.append(torch.ones(1, 1, 16), torch.ones(1, 1, 16))
    monkeypatch.undo()
    calls: list[Callable[[], object]] = [
        lambda: cache.append(torch.ones(1, 1, 16), torch.ones(1, 1, 16)),
        lambda: cache.attention(torch.ones(1, 1, 16)),
        lambda: cache.step([request]),
        lambda: cache.fork(request),
    ]
    for call in calls:
        with pytest.raises(tw.InvalidProblem, match=r"interrupted in layer 0.*Free the requests of the step: \[0\]"):
            call()
    cache.free(request)
    cache.step([other])
    cache.append(torch.ones(1, 1, 16), torch.ones(1, 1, 16))
    page = cache.book.pages_of(other)[0]
    assert torch.equal(cache.pages()[0][page, :2].float(), kept[0][page, :2].float())


def test_calls_in_the_middle_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a signal handler, a finalizer or another thread: questions are answered, changes are refused, and the
    operation goes on.
    """
    world = World()
    cache = world.cache
    batch = cache._tables.batch
    questions: list[Callable[[], Any]] = [
        cache.requests,
        cache.stats,
        cache.available_pages,
        lambda: cache.length(world.second),
        lambda: repr(cache),
    ]
    changes: list[Callable[[], Any]] = [
        lambda: cache.free(world.second),
        lambda: cache.add([1]),
        lambda: cache.fork(world.second),
        lambda: cache.reuse(world.waiting),
        lambda: cache.truncate(world.second, 2),
        lambda: cache.book.step([world.waiting]),
        cache.book.commit,
    ]

    def ask(answers: list[Any]) -> None:
        answers += [question() for question in questions]
        for change in changes:
            with pytest.raises(tw.InvalidProblem, match="one operation at a time"):
                change()

    def asked(step: Any) -> Any:
        mine, others = list[Any](), list[Any]()
        ask(mine)
        thread = threading.Thread(target=ask, args=(others,))
        thread.start()
        thread.join()
        assert mine == others
        assert mine[0] == sorted(world.tokens)
        return batch(step)

    monkeypatch.setattr(cache._tables, "batch", asked)
    world.decode(world.decoding)
    world.decode(world.decoding)
    monkeypatch.undo()
    world.live_on(attend=True)
