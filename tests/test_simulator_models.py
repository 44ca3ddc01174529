"""The two small models: one row's softmax in blocks, and pages against contiguous reservation."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.simulator import Workload, count, schedule
from tilewise.simulator.online import online_softmax
from tilewise.simulator.paging import ContiguousPool, PageEvent, PagePool


@pytest.mark.parametrize("module", ["", ".scheduling", ".online", ".paging"])
def test_docstring_examples(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"tilewise.simulator{module}"))
    assert results.attempted > 0
    assert results.failed == 0


# --- online softmax


@hypothesis_settings(max_examples=50, deadline=None)
@given(row=st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=12), block=st.integers(1, 5))
def test_any_blocks_give_the_softmax(row: list[float], block: int) -> None:
    found = online_softmax(row, block)
    assert sum(len(state.scores) for state in found.states) == len(row)
    if max(row) == -math.inf:
        assert set(found.probabilities) == {0.0}
        return
    terms = [math.exp(score - max(row)) for score in row]
    assert found.states[-1].row_sum == pytest.approx(math.fsum(terms), rel=1e-13)
    assert found.probabilities == pytest.approx([term / math.fsum(terms) for term in terms], rel=1e-12)


@pytest.mark.parametrize(("row", "block"), [([], 2), ([1.0, math.nan], 2), ([math.inf], 1), ([1.0], 0)])
def test_rows_without_a_softmax_are_refused(row: list[float], block: int) -> None:
    with pytest.raises(tw.InvalidProblem):
        online_softmax(row, block)


# --- pages: 20 of 4 tokens; requests of 5, 14, 3 and 8 tokens, at most 16 each

REQUESTS = {"A": 5, "B": 14, "C": 3, "D": 8}


def test_contiguous_reservation_wastes_pages_and_refuses_the_fifth_request() -> None:
    pool = ContiguousPool(num_pages=20, page_size=4, max_tokens=16, slots=4)
    assert all(pool.arrive(name, tokens) for name, tokens in REQUESTS.items())
    assert (pool.reserved_pages, pool.used_pages, pool.wasted_pages) == (16, 9, 7)
    assert not pool.arrive("E", 2)
    assert pool.events[-1] == PageEvent("refuse", "E")
    assert pool.utilisation == 30 / 64
    pool.finish("C")
    assert pool.arrive("E", 2)
    assert pool.slots == ["A", "B", "E", "D"]


def test_pages_go_out_on_demand_and_the_page_of_c_is_reused_by_e() -> None:
    pool = PagePool(num_pages=20, page_size=4)
    assert all(pool.arrive(name, tokens) for name, tokens in REQUESTS.items())
    assert {name: len(table) for name, table in pool.tables.items()} == {"A": 2, "B": 4, "C": 1, "D": 2}
    assert pool.reserved_pages == pool.used_pages == 9
    assert pool.utilisation == 30 / 36
    (page_of_c,) = pool.tables["C"]
    pool.finish("C")
    assert pool.arrive("E", 2)
    assert pool.tables["E"] == [page_of_c]
    assert pool.events[-2:] == [PageEvent("free", "C", page_of_c), PageEvent("take", "E", page_of_c)]


def test_shared_pages_are_copied_before_a_write() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    pool.arrive("A", 6)
    pool.fork("A", "B")
    assert (pool.reserved_pages, pool.tables["B"]) == (2, [0, 1])
    assert pool.append("B")
    assert pool.events[-1] == PageEvent("copy", "B", 2, source=1)
    assert (pool.tables["A"], pool.tables["B"]) == ([0, 1], [0, 2])
    pool.append("A")
    assert pool.tables["A"] == [0, 1]
    pool.finish("A")
    assert (pool.reserved_pages, pool.holders[0]) == (2, 1)
    pool.finish("B")
    assert pool.reserved_pages == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: PagePool(0, 4),
        lambda: PagePool(4, 4).append("A"),
        lambda: PagePool(4, 4).finish("A"),
        lambda: PagePool(4, 4).arrive("A", 0),
        lambda: ContiguousPool(20, 4, 16, slots=6),
        lambda: ContiguousPool(20, 4, 16).finish("A"),
    ],
)
def test_misuse_is_refused(misuse: object) -> None:
    assert callable(misuse)
    with pytest.raises(tw.InvalidProblem):
        misuse()


# --- the page about it

PAGE = (Path(__file__).parent.parent / "docs" / "explain.md").read_text()


def test_the_traffic_that_the_page_states() -> None:
    (stated,) = re.findall(r"N = 4096, naive attention moves .*", PAGE)
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{6,}\d", stated)]
    work = Workload(4096, 4096, 64, 64, block_m=128, block_n=128)
    traces = [schedule(algorithm, work) for algorithm in ("naive", "fa1", "fa2")]
    traces.append(schedule("fa2", dataclasses.replace(work, right=0)))
    assert [count(trace).traffic.elements for trace in traces] == numbers
