"""What the bookkeeping rests on: the allocator of pages, the index of prefixes, groups of requests that share one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tilewise.errors import OutOfPages
from tilewise.kv import PageBook
from tilewise.kv.groups import PrefixGroups, find_groups
from tilewise.kv.pages import PageAllocator
from tilewise.kv.prefix import PrefixIndex, known_ids, page_of


def test_pages_are_taken_given_back_and_counted() -> None:
    told: list[int] = []
    pool = PageAllocator(3, told.extend)
    first, second, third = pool.take(), pool.take(), pool.take()
    with pytest.raises(OutOfPages):
        pool.take()
    pool.hold(first)
    assert (pool.shared, pool.held, pool.available) == (1, 3, 0)
    pool.drop(first)
    pool.drop(first, remembered=True)
    pool.drop(second, remembered=True)
    assert (pool.idle, pool.available, pool.shared) == (2, 2, 0)
    # The page that has been idle longest goes first, and its owner is told.
    assert pool.take() == first
    assert told == [first]
    pool.hold(second)
    assert pool.idle == 0
    pool.drop(third)
    assert pool.take() == third
    assert pool.evictions == 1


def test_a_hash_hit_is_checked_by_tokens_and_predecessor() -> None:
    index = PrefixIndex(2, key=lambda _before, _tokens: 0)
    one_two, three_four = known_ids([1, 2]).tobytes(), known_ids([3, 4]).tobytes()
    entry = index.insert(None, one_two, 5)
    assert entry is not None
    assert [page_of(found) for found in index.follow(known_ids([1, 2, 9]))] == [5]
    assert list(index.follow(known_ids([1, 3]))) == []
    assert index.insert(None, three_four, 6) is None
    assert index.insert(entry, one_two, 7) is None
    assert index.insert(None, one_two, 8) is entry
    index.forget([5, 6])
    assert len(index) == 0
    assert list(index.follow(known_ids([1, 2]))) == []


def test_groups_that_were_found_are_kept_while_they_hold() -> None:
    """Random lives of few requests with few different prefixes: what is kept must be what would be found."""
    rng, book, groups, kept = random.Random(3), PageBook(400, 2), PrefixGroups(), 0
    live = [book.add([rng.randrange(2) for _ in range(rng.randint(1, 12))]) for _ in range(6)]
    for number in range(400):
        choice, victim = rng.random(), rng.randrange(len(live))
        if choice < 0.05 and len(live) > 3:
            book.free(live.pop(victim))
        elif choice < 0.1:
            live.append(book.add([rng.randrange(2) for _ in range(rng.randint(1, 12))]))
        elif choice < 0.13:
            live.append(book.fork(live[victim]))
        elif choice < 0.15:
            book.truncate(live[victim], rng.randint(0, book.length(live[victim])))
        elif choice < 0.2:
            book.reuse(live[victim])
        step = book.step(live, [1] * len(live), [None if book.pending(r) else rng.randrange(2) for r in live])
        book.commit()
        groups.follow(step, book.page_size)
        if number % 3:
            before, found = groups._found, groups.of(book.table, step, book.page_size)
            kept += found is before
            fresh = find_groups(book.table, step.rows, step.before // book.page_size)
            assert [(g.places.tolist(), g.num_pages) for g in found] == [
                (g.places.tolist(), g.num_pages) for g in fresh
            ]
        for request in [r for r in live if book.length(r) > 60]:
            book.free(request)
            live.remove(request)
        live = live or [book.add([0])]
    assert kept > 50


def test_groups_are_cut_where_most_is_saved() -> None:
    table = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 9, 9], [7, 8, 8, 8], [7, 8, 8, 8]], np.int32)
    rows, shareable = np.array([4, 0, 2, 1, 3]), np.array([3, 4, 4, 3, 4])
    groups = find_groups(table, rows, shareable)
    assert [(group.places.tolist(), group.num_pages) for group in groups] == [([1, 3], 3), ([0, 4], 3)]
    # With a short stem after the fork, everybody shares the first page.
    groups = find_groups(table, rows, np.array([0, 2, 2, 2, 0]))
    assert [(group.places.tolist(), group.num_pages) for group in groups] == [([1, 2, 3], 1)]
    assert find_groups(table, np.array([0, 3]), np.array([4, 4])) == []
    assert find_groups(table, np.array([0, 1]), np.array([0, 0])) == []


def test_requests_that_leave_a_stem_one_by_one_are_grouped() -> None:
    count = 700
    table = np.tile(np.arange(count + 1, dtype=np.int32), (count, 1))
    for row in range(count):
        table[row, row + 1 :] = 10_000 + row
    groups = find_groups(table, np.arange(count), np.full(count, count + 1))
    places = np.concatenate([group.places for group in groups])
    assert len(set(places.tolist())) == len(places)
    for group in groups:
        stems = table[group.places, : group.num_pages]
        assert (stems == stems[0]).all()
    assert sum(group.pages_saved for group in groups) > count
