"""The benchmark times fairly: rounds, turns, and who drops out."""

from __future__ import annotations

from collections.abc import Callable

from tilewise.bench.timing import Clock, Entrant, race, summarise


class FakeClock(Clock):
    """A batch returns the seconds it would take."""

    sample_seconds = 1.0

    def __call__(self, batch: Callable[[], object], lead_in: Callable[[], object]) -> float:  # noqa: ARG002
        seconds = batch()
        assert isinstance(seconds, float)
        return seconds


def noting(order: list[str], name: str, seconds: float) -> Entrant:
    """An entrant that takes so long and writes down when it is called."""

    def repeat(calls: int) -> Callable[[], float]:
        def batch() -> float:
            order.append(name)
            return seconds * calls

        return batch

    return Entrant(name, repeat)


def test_rounds_are_interleaved_and_slow_entrants_sampled_less() -> None:
    order: list[str] = []
    fast, other, slow = (noting(order, *who) for who in (("fast", 0.25), ("other", 0.5), ("slow", 30.0)))
    race([fast, other, slow], FakeClock(), seconds=60.0)
    assert (fast.calls, other.calls, slow.calls) == (4, 2, 1)
    assert len(fast.samples) == len(other.samples) == 5
    assert len(slow.samples) == 2
    assert summarise(fast).median == 0.25
    timed = order[order.index("slow") + 2 :]
    # The same ones meet in another order; the slow one sits out every round but the first and the fourth.
    rounds = [["fast", "other", "slow"], ["fast", "other"], ["other", "fast"], ["other", "slow", "fast"]]
    assert timed == [name for names in rounds for name in names] + ["fast", "other"]


def test_an_entrant_that_fails_drops_out() -> None:
    def broken(calls: int) -> Callable[[], float]:
        if calls > 1:
            raise ValueError("no batches")
        return lambda: 0.1

    bad, good = Entrant("bad", broken), Entrant("good", lambda calls: lambda: 0.1 * calls)
    race([bad, good], FakeClock(), seconds=100.0)
    assert bad.failure == "ValueError: no batches"
    assert good.failure is None
    assert len(good.samples) >= 5
