"""Prefixes attended by the CPU's own pass, which works its rows into those of each sequence's own keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import cascade
from tilewise.backends.cpu import BACKEND
from tilewise.cascade import Group, SharedPrefix
from tilewise.testing.cases import Case
from tilewise.testing.inputs import Inputs
from tilewise.testing.oracle import plain_results, reference_results, summed_terms
from tilewise.testing.results import Results
from tilewise.testing.tolerances import judge, slack_of

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


def inputs(groups: list[int], alone: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], SharedPrefix]:
    """A batch of groups of so many sequences over prefixes of 3, 4, ... pages, in any order among those alone."""
    generator, own = torch.Generator().manual_seed(len(groups)), 2
    total = sum(groups) + alone
    rows = torch.randperm(total, generator=generator)[: sum(groups)]
    num_pages = sum(3 + g for g in range(len(groups))) + own * total
    order = torch.randperm(num_pages, generator=generator).int().tolist()
    prefixes = [[order.pop() for _ in range(3 + g)] for g in range(len(groups))]
    behind = [[order.pop() for _ in range(own)] for _ in range(total)]
    member = [g for g, count in enumerate(groups) for _ in range(count)]
    full = [list(pages) for pages in behind]
    lengths = torch.full((total,), own * PAGE - 5)
    for row, g in zip(rows.tolist(), member, strict=True):
        full[row] = prefixes[g] + behind[row]
        lengths[row] += len(prefixes[g]) * PAGE
    width = max(map(len, full))
    table = torch.tensor([pages + [0] * (width - len(pages)) for pages in full], dtype=torch.int32)
    k, v = (torch.randn(num_pages, PAGE, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(total, HEADS, DIM, generator=generator).to(dtype)
    longest = max(map(len, prefixes))
    hint = SharedPrefix(
        tuple(Group(count, count, len(prefixes[g]) * PAGE) for g, count in enumerate(groups)),
        torch.tensor([pages + [0] * (longest - len(pages)) for pages in prefixes], dtype=torch.int32),
        torch.tensor([len(pages) * PAGE for pages in prefixes], dtype=torch.int32),
        torch.tensor([0, *groups]).cumsum(0).int(),
        rows,
        torch.tensor(behind, dtype=torch.int32),
        torch.full((total,), own * PAGE - 5, dtype=torch.int32),
    )
    return (q, k, v, table, lengths.int()), hint


@pytest.fixture(autouse=True)
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call of the pass; the rule that says where it pays is left out."""
    seen, plain = list[int](), type(BACKEND).attend_prefixes
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)

    def noted(backend: Any, problem: Any, operands: Any, num_rows: int, *rest: Any) -> None:
        seen.append(num_rows)
        plain(backend, problem, operands, num_rows, *rest)

    monkeypatch.setattr(type(BACKEND), "attend_prefixes", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [[2], [9, 3], [40]], ids=["decoded", "two of them", "many rows"])
def test_rows_are_worked_into_their_own(groups: list[int], dtype: torch.dtype, attended: list[int]) -> None:
    tensors, hint = inputs(groups, 3, dtype)
    out, lse = tw.attention_paged(*tensors, shared_prefix=hint, return_lse=True)
    assert attended == [sum(groups)]
    assert faults_of(tensors, {"out": out, "lse": lse}) == []


def faults_of(tensors: tuple[Any, ...], results: Results) -> list[str]:
    """What is wrong with results by the rule of the conformance suite."""
    q, k, v, table, lengths = tensors
    ones, counts = (1,) * len(q), tuple(lengths.tolist())
    case = Case(
        kind="paged", dtype=q.dtype, seqlens_q=ones, seqlens_k=counts, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, head_dim_v=DIM, page_size=PAGE, decode=True, grad_of=(),
    )  # fmt: skip
    given = Inputs(q, k, v, torch.zeros_like(q), torch.zeros(HEADS, len(q)), block_table=table, seqlens_k=lengths)
    exact, plain, terms = (make(case, given) for make in (reference_results, plain_results, summed_terms))
    faults = []
    for name, found in results.items():
        slack = slack_of(exact[name], plain[name], terms[name], found.dtype, torch.float32)
        faults.append(judge(name, found, exact[name], slack))
    return [fault for fault in faults if fault is not None]


def test_a_prefix_that_is_not_a_number_stays_so_and_nothing_else() -> None:
    (q, k, v, table, lengths), hint = inputs([4], 2, torch.float32)
    assert hint.rows is not None
    k[hint.block_table[0, 1].long()] = torch.nan
    out, lse = tw.attention_paged(q, k, v, table, lengths, shared_prefix=hint, return_lse=True)
    members = torch.zeros(len(q), dtype=torch.bool).index_fill(0, hint.rows, True)
    assert bool(out[members].isnan().all())
    assert bool(lse[:, members].isnan().all())
    assert bool(out[~members].isfinite().all())
    # Nor does what is NaN by itself become a number.
    (q, k, v, table, lengths), hint = inputs([4], 2, torch.float32)
    assert hint.rows is not None
    first = int(hint.rows[0])
    k[hint.own_table[first, 0].long()] = torch.nan
    out = tw.attention_paged(q, k, v, table, lengths, shared_prefix=hint)
    assert nan_rows(out) == {first}


def nan_rows(out: Tensor) -> set[int]:
    return set(out.isnan().flatten(1).any(1).nonzero().flatten().tolist())
