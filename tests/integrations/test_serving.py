"""The serving example: what paging saves in the simulated trace, and an engine that says what the model alone says."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

import serve
import tilewise as tw
from serving import POLICIES, Outcome, Request, Scheduler, Trace, make_trace, simulate
from tilewise.kv import PageBook

# One group: the outcomes are shared.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serving")]

# 16 requests of full length, and all of them.
REQUESTS = 160
SCARCE, AMPLE = 16 * 2048, REQUESTS * 2048


@functools.cache
def outcome(policy: str, capacity: int, page_size: int = 32) -> Outcome:
    return simulate(make_trace(REQUESTS), policy, capacity=capacity, page_size=page_size)


@pytest.mark.parametrize("page_size", [32, 64])
def test_memory_taken_is_memory_used(page_size: int) -> None:
    assert 0.2 <= outcome("contiguous", AMPLE).utilisation <= 0.4
    assert outcome("paged", AMPLE, page_size).utilisation >= 0.9
    assert outcome("paged + prefix sharing", AMPLE, page_size).utilisation >= 0.9


def test_two_to_four_times_the_requests_in_the_same_memory() -> None:
    contiguous, paged, shared = (outcome(policy, SCARCE) for policy in POLICIES)
    assert paged.utilisation >= 0.9
    assert all(sample.waiting for sample in contiguous.steady[len(contiguous.steady) // 2 :]), "memory is what is short"
    assert contiguous.concurrency <= 16
    assert 2 <= paged.concurrency / contiguous.concurrency <= 4
    assert shared.concurrency > paged.concurrency
    assert contiguous.steps > paged.steps > shared.steps
    for result in (contiguous, paged, shared):
        assert max(sample.taken for sample in result.samples) <= SCARCE


def test_a_shared_system_prompt_saves_a_third() -> None:
    paged, shared = outcome("paged", AMPLE), outcome("paged + prefix sharing", AMPLE)
    assert paged.concurrency == shared.concurrency, "the same requests at the same time"
    assert 1 - shared.memory / paged.memory >= 0.3
    assert 0.5 < shared.hit_rate < 0.7
    assert paged.hit_rate == 0.0


def test_a_request_that_never_fits_is_an_error_and_not_a_loop() -> None:
    trace = Trace((Request(0, tuple(range(60)), 1),), max_seqlen=64)
    for policy in POLICIES:
        with pytest.raises(tw.OutOfPages, match="does not fit"):
            simulate(trace, policy, capacity=32, page_size=16)
    with pytest.raises(tw.InvalidProblem, match="policy"):
        simulate(trace, "swapped", capacity=128)


def alone(model: serve.Toy, shape: serve.Shape, request: Request) -> list[int]:
    """What the model says to one request, computed from scratch for every token."""
    tokens = list(request.prompt)
    for _ in range(request.output):
        cache = tw.PagedKVCache(16, 16, shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float64, device="cpu")
        rows = cache.step([cache.add(tokens)])
        logits: Tensor = model(torch.tensor(tokens), torch.arange(rows), torch.tensor([rows - 1]), cache)
        tokens.append(int(logits.argmax()))
    return tokens[len(request.prompt) :]


@functools.cache
def served() -> tuple[serve.Toy, Trace, dict[Request, list[int]]]:
    """A model, some requests, and what it says to each of them alone."""
    torch.manual_seed(0)
    shape = serve.Shape(layers=2, heads=4, kv_heads=2, head_dim=16)
    model = serve.Toy(shape, 128).double()
    trace = make_trace(6, gap=1.0, system=20, prompt=10, output=20, max_seqlen=128)
    return model, trace, {request: alone(model, shape, request) for request in trace.requests}


@pytest.mark.parametrize(("pages", "seats"), [(64, 0), (14, 0), (64, 4), (14, 6)])
@torch.no_grad()
def test_the_engine_says_what_the_model_says_to_each_alone(pages: int, seats: int) -> None:
    """Also with so few pages that requests are preempted and start again, and with seats, for all or some at a time."""
    model, trace, expected = served()
    cache = tw.PagedKVCache(
        pages, 8, 2, 2, 16, dtype=torch.float64, device="cpu", max_seqlen=128, max_requests=seats or None
    )
    engine = serve.Engine(model, cache, token_budget=24, seats=seats)
    engine.scheduler.spare = 1
    with Progress(disable=True) as progress:
        tally = engine.run(trace, progress)
    assert (engine.scheduler.preemptions > 0) == (pages < 64)
    assert cache.stats().pages_held == 0
    assert cache.stats().hit_tokens > 0
    assert tally.produced == sum(request.output for request in trace.requests)
    said = {job.request: job.produced for job in engine.finished}
    assert said == expected


def test_the_budget_bounds_a_step() -> None:
    book = PageBook(64, 8)
    scheduler = Scheduler(book, token_budget=10)
    for n in range(3):
        scheduler.submit(Request(0, tuple(range(n, n + 12)), 4))
    counts = []
    while works := scheduler.step():
        counts.append(sum(work.count for work in works))
        book.commit()
        for work in works:
            if work.yields:
                scheduler.produce(work.job, 7)
    assert max(counts) == 10
    assert sum(counts) == 3 * 12 + 3 * 3, "the last token of each is not fed back"


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert serve.main(["--requests", "3", "--layers", "1", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("a second", "would be needed", "prompt tokens found"))
    pytest.importorskip("matplotlib")
    assert serve.main(["--simulate", "--requests", "20", "--plot", str(tmp_path / "memory.svg")]) == 0
    assert "saved by pages" in capsys.readouterr().out
    assert (tmp_path / "memory.svg").stat().st_size > 1000
    for wrong in (["--simulate", "--plot", "memory.png"], ["--plot", "memory.svg"]):
        assert serve.main(wrong) == 2
        assert "error: plot: expected --simulate, and a name that ends in .svg" in " ".join(
            capsys.readouterr().out.split()
        )
    assert serve.main(["--trace", str(tmp_path / "none.json")]) == 2
    assert "error: trace" in capsys.readouterr().out
