"""Pages are taken and given back in a time that does not depend on how many there are; bench/serving_cost.py measures
whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tilewise.kv.pages import PageAllocator

ROUNDS, FEW, MANY = 300, 10**2, 10**6


def free_pages(pool: PageAllocator) -> None:
    """Taken one by one and several at once, held twice, and given back."""
    page, others = pool.take(), pool.take_many(7).tolist()
    pool.hold(page)
    for each in (page, page, *others):
        pool.drop(each)


def idle_pages(pool: PageAllocator) -> None:
    """The pool has no free page: those idle longest are given away, and become idle again."""
    for page in (pool.take(), *pool.take_many(7).tolist()):
        pool.drop(page, remembered=True)
        assert pool.is_idle(page)
    assert pool.available == pool.idle


def seconds_of(operation: Callable[[PageAllocator], None], num_pages: int) -> float:
    """Of so many rounds, the best of several."""
    pool = PageAllocator(num_pages)
    if operation is idle_pages:
        for page in pool.take_many(num_pages).tolist()[: num_pages // 2]:
            pool.drop(page, remembered=True)
    times = []
    for _ in range(7):
        start = time.thread_time()
        for _ in range(ROUNDS):
            operation(pool)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("operation", [free_pages, idle_pages])
def test_pages_are_taken_and_given_back_in_constant_time(operation: Callable[[PageAllocator], None]) -> None:
    """A pass over all pages would take a thousand times as long; caches that are too small cost a little."""
    assert seconds_of(operation, MANY) < 10 * seconds_of(operation, FEW)
