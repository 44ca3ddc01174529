"""Hints of shared prefixes that nobody's cache made, and who merges what."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise import cascade
from tilewise.numerics import merge_partials

BATCH, HEADS, KV_HEADS, DIM, SIZE, SHARED, OWN = 4, 4, 2, 16, 8, 3, 2


class Call:
    """Four sequences with three pages in common and two of their own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        make = torch.Generator().manual_seed(0)
        pages = SHARED + BATCH * OWN
        self.k, self.v = torch.randn(2, pages, SIZE, KV_HEADS, DIM, generator=make).to(dtype)
        self.q = torch.randn(BATCH, HEADS, DIM, generator=make).to(dtype)
        own = torch.arange(SHARED, pages, dtype=torch.int32).view(BATCH, OWN)
        prefix = torch.arange(SHARED, dtype=torch.int32)[None]
        self.table = torch.cat((prefix.expand(BATCH, -1), own), 1)
        self.lengths = torch.full((BATCH,), (SHARED + OWN) * SIZE - 3, dtype=torch.int32)
        self.hint = cascade.SharedPrefix(
            (cascade.Group(BATCH, BATCH, SHARED * SIZE),), prefix, torch.tensor([SHARED * SIZE], dtype=torch.int32),
            torch.tensor([0, BATCH], dtype=torch.int32), None, own, self.lengths - SHARED * SIZE,
        )  # fmt: skip

    def attend(self, **flags: Any) -> Tensor:
        out: Tensor = tw.attention_paged(self.q, self.k, self.v, self.table, self.lengths, **flags)
        return out


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cascade at any size."""
    monkeypatch.setattr(cascade, "price_seconds", lambda *_: 0.0)


def test_a_group_without_rows_changes_nothing() -> None:
    call = Call()
    hint = call.hint
    table = torch.cat((hint.block_table, hint.block_table))
    more = hint._replace(
        groups=(*hint.groups, cascade.Group(0, 0, SHARED * SIZE)), block_table=table,
        seqlens_k=hint.seqlens_k.expand(2).contiguous(),
        cu_seqlens_q=torch.tensor([0, BATCH, BATCH], dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(call.attend(shared_prefix=more), call.attend())
    nobody = hint._replace(groups=(cascade.Group(0, 0, SHARED * SIZE),), cu_seqlens_q=hint.cu_seqlens_q * 0)
    torch.testing.assert_close(call.attend(shared_prefix=nobody), call.attend())


def test_fake_tensors_leave_nothing_behind() -> None:
    """Under a mode torch's own operations merge, and later calls with real tensors do not meet what it made."""
    real = Call()
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = Call()
            assert type(fake.q) is not Tensor
            assert fake.attend(shared_prefix=fake.hint).shape == real.q.shape
            del mode
        torch.testing.assert_close(real.attend(shared_prefix=real.hint), real.attend())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "half a row": ({"groups": (cascade.Group(4, 4, cast("Any", 24.0)),)}, "shared_prefix.groups: expected integers"),
    "fewer than none": ({"groups": (cascade.Group(4, 4, -1),)}, "shared_prefix.groups: expected integers of at least"),
    "totals past the rows": (
        {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)},
        "shared_prefix.cu_seqlens_q: expected 2 running totals up to 4, the rows of the groups, got [0, 9]",
    ),
    "no totals": ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, "shared_prefix.cu_seqlens_q: expected 2"),
    "a row past q": ({"rows": torch.tensor([0, 1, 2, 4])}, "shared_prefix.rows: expected distinct rows of q"),
    "a negative row": ({"rows": torch.tensor([0, 1, 2, -1])}, "shared_prefix.rows: expected distinct rows of q"),
    "a row twice": ({"rows": torch.tensor([0, 1, 2, 2])}, "shared_prefix.rows: expected distinct rows of q"),
    "rows of floats": ({"rows": torch.arange(4.0)}, "shared_prefix.rows: expected distinct rows of q"),
    "no groups": ({"groups": (3,)}, "shared_prefix.groups: expected a tuple of tilewise.cascade.Group"),
    "a list": ({"groups": [cascade.Group(4, 4, 24)]}, "shared_prefix.groups: expected a tuple"),
    "more rows than queries": ({"groups": (cascade.Group(4, 5, 24),)}, "shared_prefix.groups: expected rows of q"),
    "rows without a name": ({"rows": torch.arange(3)}, "shared_prefix.groups: expected rows of q, which has 4, got 4"),
    "no table": ({"block_table": None}, "shared_prefix.block_table: expected a torch.Tensor, got NoneType"),
    "a group without a table": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        "shared_prefix.block_table: expected a table row for each of 1 groups, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_hints_that_make_no_sense_are_refused(name: str) -> None:
    call = Call()
    changes, message = BAD[name]
    with pytest.raises(tw.InvalidProblem, match=re.escape(message)):
        call.attend(shared_prefix=call.hint._replace(**changes))


@pytest.mark.parametrize("some", [False, True], ids=["first rows", "named rows"])
def test_what_no_kernel_merges_is_merged_by_the_contract(some: bool) -> None:
    make = torch.Generator().manual_seed(0)
    out, part = (torch.randn(rows, 4, 8, generator=make, dtype=torch.float64) for rows in (7, 5))
    lse, part_lse = (torch.randn(4, rows, generator=make, dtype=torch.float64) for rows in (7, 5))
    rows = torch.tensor([6, 0, 3, 2, 5]) if some else torch.arange(5)
    # Rubbish without weight, NaN with some, and nothing on either side.
    lse[1, rows[0]], out[rows[0], 1] = -torch.inf, torch.nan
    part_lse[2, 1], part[1, 2] = -900.0, torch.nan
    part_lse[3, 4], part[4, 3] = torch.nan, torch.nan
    lse[0, rows[2]], part_lse[0, 2] = -torch.inf, -torch.inf
    want, want_lse = merge_partials(out[rows], lse[:, rows].mT, part, part_lse.mT)
    cascade._merged(out, lse, part, part_lse, rows if some else None)
    torch.testing.assert_close(out[rows], want, equal_nan=True)
    torch.testing.assert_close(lse[:, rows], want_lse.mT, equal_nan=True)
