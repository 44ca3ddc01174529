"""What `serve.py` serves and how: traces of requests, a scheduler for continuous batching, and a simulation of memory.

The scheduler drives anything that keeps requests as `tilewise.PagedKVCache` does. The simulation gives it the
bookkeeping alone (`tilewise.kv.PageBook`, the same code that the cache runs on), or a contiguous reservation per
request for comparison, and counts.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidProblem, OutOfPages
from tilewise.kv import PageBook, PagedKVCache

VOCABULARY = 512
SAMPLE_EVERY = 4
# Room left to grow for each running request when another is admitted: with 32 the default trace preempts 536 times in
# 400 requests (pages of 32), with 96 it does 15 times and runs 48 requests at a time instead of 51.
SPARE_TOKENS = 96
POLICIES = ("contiguous", "paged", "paged + prefix sharing")


@dataclass(frozen=True)
class Request:
    """A prompt that comes at a step and wants so many tokens."""

    arrival: int
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; none is longer than `max_seqlen` with its output."""

    requests: tuple[Request, ...]
    max_seqlen: int

    def __post_init__(self) -> None:
        for n, request in enumerate(self.requests):
            length = len(request.prompt) + request.output
            if request.arrival < 0 or request.output < 1 or not request.prompt or length > self.max_seqlen:
                expected = f"arrival >= 0, a prompt, output >= 1, and at most max_seqlen = {self.max_seqlen} tokens"
                got = f"arrival {request.arrival}, {len(request.prompt)} and {request.output} tokens"
                raise InvalidProblem(f"requests[{n}]", expected, got, "Mend the trace.")


def make_trace(
    requests: int = 400, *, seed: int = 0, gap: float = 4.0, system: int = 256, prompt: int = 150, output: int = 300,
    max_seqlen: int = 2048,
) -> Trace:  # fmt: skip
    """Arrivals `gap` steps apart on average (a Poisson process), a system prompt that all share, and lengths of prompts
    and outputs with the given means (gamma distributed, so that a few are long).
    """
    rng = random.Random(seed)
    shared = tuple(rng.randrange(VOCABULARY) for _ in range(system))
    made, clock = [], 0.0
    for _ in range(requests):
        clock += rng.expovariate(1.0 / gap)
        own = min(max(1, round(rng.gammavariate(2.0, prompt / 2.0))), max_seqlen - system - 1)
        wanted = min(max(1, round(rng.gammavariate(2.0, output / 2.0))), max_seqlen - system - own)
        made.append(Request(int(clock), shared + tuple(rng.randrange(VOCABULARY) for _ in range(own)), wanted))
    return Trace(tuple(made), max_seqlen)


def load_trace(path: Path, *, seed: int = 0) -> Trace:
    """A trace in JSON: {"max_seqlen": 2048, "requests": [{"arrival": 0, "prompt": 120, "output": 64, "shared": 256}]}.

    `arrival` counts steps, `prompt` the tokens of the request's own, `shared` (default 0) those of the system prompt
    before them, of which all requests have the beginning in common.
    """
    rng = random.Random(seed)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        entries = [
            (int(e["arrival"]), int(e["prompt"]), int(e["output"]), int(e.get("shared", 0))) for e in read["requests"]
        ]
        max_seqlen = int(read["max_seqlen"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        expected = 'JSON as {"max_seqlen": 2048, "requests": [{"arrival": 0, "prompt": 9, "output": 9, "shared": 0}]}'
        raise InvalidProblem(
            "trace", expected, f"{path}: {error!r}", "See load_trace in examples/serving.py."
        ) from error
    system = [rng.randrange(VOCABULARY) for _ in range(max((shared for *_, shared in entries), default=0))]
    made = [
        Request(arrival, tuple(system[:shared] + [rng.randrange(VOCABULARY) for _ in range(prompt)]), output)
        for arrival, prompt, output, shared in sorted(entries)
    ]
    return Trace(tuple(made), max_seqlen)


class Reservation:
    """The memory of engines without pages: room for `max_seqlen` tokens, taken when a request starts.

    To the scheduler it is a store with one page a request.
    """

    def __init__(self, capacity: int, max_seqlen: int) -> None:
        self.capacity, self.max_seqlen = capacity, max_seqlen
        self.lengths: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.count = 0

    def add(self, tokens: Sequence[int], /) -> int:
        """Reserve, or OutOfPages."""
        if not self.available_pages():
            raise OutOfPages("no room is left for another request")
        self.count += 1
        self.lengths[self.count], self.prompts[self.count] = 0, len(tokens)
        return self.count

    def reuse(self, request: int, /) -> int:
        """Nothing is ever found."""
        return self.lengths[request]

    def free(self, request: int, /) -> None:
        """Give everything back."""
        del self.lengths[request], self.prompts[request]

    def length(self, request: int, /) -> int:
        """Tokens stored."""
        return self.lengths[request]

    def pending(self, request: int, /) -> int:
        """Tokens of the prompt still to come."""
        return max(0, self.prompts[request] - self.lengths[request])

    def pages_for(self, tokens: Sequence[int], /) -> int:
        """One reservation, whatever its length."""
        del tokens
        return 1

    def available_pages(self) -> int:
        """Requests that could start now."""
        return self.capacity // self.max_seqlen - len(self.lengths)

    def step(self, requests: Sequence[int], counts: Sequence[int], tokens: Sequence[int | None]) -> None:
        """Always room: it was reserved."""
        del tokens
        for request, count in zip(requests, counts, strict=True):
            self.lengths[request] += count


Store = PagedKVCache | PageBook | Reservation


@dataclass
class Job:
    """A request on its way: `number` is its number in the store while it runs."""

    request: Request
    number: int | None = None
    produced: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Everything known of it: the prompt, and what came out so far."""
        return [*self.request.prompt, *self.produced]


@dataclass(frozen=True)
class Work:
    """One request's part of a step: tokens `start` to `start + count - 1`, and whether the next one comes out.

    `token` is the id of a token that is not of the prompt.
    """

    job: Job
    number: int
    start: int
    count: int
    yields: bool
    token: int | None = None


class Scheduler:
    """Continuous batching: every step takes one token of each running request, then prompts while the budget lasts.

    A request is admitted when its prompt fits and `spare` more pages are left for each running one. When pages run
    out all the same, the youngest request gives its own back and starts again later from what it has. With `fixed`,
    steps with one token for each of their requests are fixed steps of a cache with seats.
    """

    def __init__(
        self, store: Store, *, token_budget: int = 512, max_running: int = 256, spare: int = 1, fixed: bool = False
    ) -> None:
        self.store, self.fixed = store, fixed
        self.token_budget, self.max_running, self.spare = token_budget, max_running, spare
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = 0

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(Job(request))

    def step(self) -> list[Work]:
        """Make room for the next step; its parts in order, none when there is nothing to do."""
        self._admit()
        works = self._plan()
        while works and not self._make_room(works):
            self._preempt()
            works = self._plan()
        return works

    def is_fixed(self, works: list[Work]) -> bool:
        """Whether a step is a fixed one."""
        return self.fixed and all(work.count == 1 for work in works)

    def produce(self, job: Job, token: int) -> bool:
        """The next token of a request; True when that was the last."""
        job.produced.append(token)
        if len(job.produced) < job.request.output:
            return False
        self._leave(job)
        return True

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            job = self.waiting[0]
            if self.store.pages_for(job.tokens) > self.store.available_pages() - self.spare * len(self.running):
                return
            job.number = self.store.add(job.tokens)
            self.running.append(self.waiting.popleft())

    def _plan(self) -> list[Work]:
        works: list[Work] = []
        prompts: list[tuple[Job, int]] = []
        for job in self.running:
            number = _running(job)
            if self.store.pending(number):
                prompts.append((job, number))
            else:
                works.append(Work(job, number, self.store.length(number), 1, True, job.produced[-1]))
        budget = self.token_budget - len(works)
        for job, number in prompts:
            if budget <= 0:
                break
            start, pending = self.store.reuse(number), self.store.pending(number)
            count = min(budget, pending)
            works.append(Work(job, number, start, count, count == pending))
            budget -= count
        return works

    def _make_room(self, works: list[Work]) -> bool:
        numbers, counts, tokens = zip(*((w.number, w.count, w.token) for w in works), strict=True)
        try:
            if isinstance(self.store, PagedKVCache):
                self.store.step(numbers, counts, tokens=tokens, fixed=self.is_fixed(works))
            else:
                self.store.step(numbers, counts, tokens=tokens)
        except OutOfPages:
            return False
        return True

    def _preempt(self) -> None:
        if len(self.running) < 2:
            raise OutOfPages("one request alone does not fit; make the cache larger")
        job = self.running[-1]
        self._leave(job)
        self.waiting.appendleft(job)
        self.preemptions += 1

    def _leave(self, job: Job) -> None:
        self.store.free(_running(job))
        self.running.remove(job)
        job.number = None


def _running(job: Job) -> int:
    if job.number is None:
        raise InvalidProblem("job", "a running request", "one that waits", "Only the scheduler moves requests.")
    return job.number


@dataclass(frozen=True)
class Sample:
    """Memory at one step, in tokens: `taken` from the pool, `stored` in it, `asked` for by all requests together."""

    step: int
    taken: int
    stored: int
    asked: int
    running: int
    waiting: int


@dataclass(frozen=True)
class Outcome:
    """One policy over one trace; `steady` holds the samples between a quarter of the arrivals and the last one."""

    policy: str
    samples: tuple[Sample, ...]
    steady: tuple[Sample, ...]
    steps: int
    preemptions: int
    hit_rate: float

    @property
    def utilisation(self) -> float:
        """Share of the memory taken that holds tokens, in the steady part."""
        return sum(s.stored for s in self.steady) / sum(s.taken for s in self.steady)

    @property
    def concurrency(self) -> float:
        """Requests running at a time, in the steady part."""
        return sum(s.running for s in self.steady) / len(self.steady)

    @property
    def memory(self) -> float:
        """Tokens of memory taken on average, in the steady part."""
        return sum(s.taken for s in self.steady) / len(self.steady)


def simulate(
    trace: Trace, policy: str, *, capacity: int, page_size: int = 32, seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Serve a trace out of `capacity` tokens of memory, without a model. `advance` is called per finished request."""
    if policy not in POLICIES:
        raise InvalidProblem("policy", f"one of {POLICIES}", policy, "Pick one.")
    store: Any
    if policy == "contiguous":
        store = Reservation(capacity, trace.max_seqlen)
    else:
        store = PageBook(
            capacity // page_size, page_size, prefix_sharing=policy != "paged", max_seqlen=trace.max_seqlen
        )
    scheduler = Scheduler(
        store,
        max_running=10**6,
        token_budget=4096,
        spare=0 if policy == "contiguous" else -(-SPARE_TOKENS // page_size),
    )
    rng = random.Random(seed)
    samples = []
    for step in _clock(trace, scheduler):
        for work in scheduler.step():
            if work.yields and scheduler.produce(work.job, rng.randrange(VOCABULARY)):
                advance()
        if policy != "contiguous":
            store.commit()
        if step % SAMPLE_EVERY == 0:
            samples.append(_sample(step, scheduler))
    arrivals = [request.arrival for request in trace.requests]
    first, last = arrivals[len(arrivals) // 4], arrivals[-1]
    steady = tuple(s for s in samples if first <= s.step <= last and s.running)
    hit_rate = 0.0 if policy == "contiguous" else store.stats().hit_rate
    return Outcome(policy, tuple(samples), steady, step, scheduler.preemptions, hit_rate)


def _clock(trace: Trace, scheduler: Scheduler) -> Iterator[int]:
    """Steps until everything is served, submitting what arrives; at least one request moves on in each."""
    coming = deque(trace.requests)
    step = 0
    while coming or scheduler.waiting or scheduler.running:
        if coming and not (scheduler.waiting or scheduler.running):
            step = max(step, coming[0].arrival)
        while coming and coming[0].arrival <= step:
            scheduler.submit(coming.popleft())
        yield step
        if scheduler.waiting and not scheduler.running:
            raise OutOfPages("the request at the head of the queue does not fit into an empty cache; make it larger")
        step += 1


def _sample(step: int, scheduler: Scheduler) -> Sample:
    store: Any = scheduler.store
    asked = sum(store.length(_running(job)) for job in scheduler.running)
    if isinstance(store, Reservation):
        taken, stored = len(store.lengths) * store.max_seqlen, asked
    else:
        stats = store.stats()
        taken, stored = stats.pages_held * store.page_size, stats.tokens_stored
    return Sample(step, taken, stored, asked, len(scheduler.running), len(scheduler.waiting))


def draw(ample: Sequence[Outcome], scarce: Sequence[Outcome], capacity: int) -> str:
    """Memory over time where there is enough of it, and requests over time where there is not, as SVG."""
    from tilewise.figures import INK, OTHERS, OURS, render

    colours = dict(zip(POLICIES, (OTHERS[0], OURS[0], OURS[1]), strict=True))

    def put(figure: Any) -> None:
        memory, requests = figure.subplots(1, 2)
        for outcome in ample:
            steps = [s.step for s in outcome.samples]
            memory.plot(steps, [s.taken / 1024 for s in outcome.samples], color=colours[outcome.policy])
        steps = [s.step for s in ample[0].samples]
        memory.plot(steps, [s.asked / 1024 for s in ample[0].samples], ":", color=INK, label="tokens there are")
        memory.set(title="memory taken, enough for all", xlabel="step", ylabel="K and V of 1024 tokens", ylim=0)
        for outcome in scarce:
            steps = [s.step for s in outcome.samples]
            running = [s.running for s in outcome.samples]
            requests.plot(steps, running, color=colours[outcome.policy], label=outcome.policy)
        requests.set(title=f"requests at a time in {capacity // 1024} K tokens", xlabel="step", ylim=0)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)

    return render(put, 10.0, 3.6)
