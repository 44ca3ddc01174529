"""What the bookkeeping rests on: the allocator of pages, the index of prefixes, groups of requests that share one."""

from __future__ import annotations

import random

from tilewise.kv import PageBook
from tilewise.kv.groups import PrefixGroups, find_groups
from tilewise.kv.prefix import PrefixIndex, known_ids, page_of


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
