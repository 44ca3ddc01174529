"""Tensors that tests are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewise.cascade import Group, SharedPrefix
from tilewise.numerics import merge_partials

if TYPE_CHECKING:
    from typer.testing import Result

# The fixture of tests/gpu: a context in which it is an error if the host waits for the device.
NoWaiting = Callable[[], AbstractContextManager[None]]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """N(0, 1) on the CPU; of another shape, other numbers."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def int32(*values: Any) -> Tensor:
    """The numbers, in a row or in rows."""
    return torch.tensor(values, dtype=torch.int32)


def cuda_randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """N(0, 1) on the GPU; tests/gpu seeds every test."""
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def cuda_int32(*values: Any) -> Tensor:
    return int32(*values).cuda()


def invoke(*arguments: str, columns: int = 100) -> Result:
    """What the command line makes of its arguments, in a terminal of so many columns."""
    from typer.testing import CliRunner

    from tilewise.cli import build_app

    return CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": str(columns), "TERM": "dumb"})


class Call(NamedTuple):
    """What a function was given, and gave."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    result: Any


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """The calls of a function from now on."""
    plain, seen = getattr(owner, name), list[Call]()

    @functools.wraps(plain)
    def watching(*args: Any, **named: Any) -> Any:
        seen.append(Call(args, named, plain(*args, **named)))
        return seen[-1].result

    monkeypatch.setattr(owner, name, watching)
    return seen


def prefix_of_all(table: Tensor, lengths: Tensor, keys: int, page_size: int) -> SharedPrefix:
    """The hint for sequences of one query each that all begin with the same keys, whole pages."""
    batch, pages, where = len(table), keys // page_size, table.device
    counts = int32(keys).to(where), int32(0, batch).to(where)
    group = Group(batch, batch, keys)
    return SharedPrefix(
        (group,), table[:1, :pages].contiguous(), *counts, None, table[:, pages:].contiguous(), lengths - keys
    )


def check_merging(merge: Callable[..., Any], dtype: torch.dtype, some: bool) -> None:
    """`merge(out, lse, part, part_lse, rows)` in place is what the contract says of the first rows or of some, and
    leaves the others alone.
    """
    make = torch.Generator().manual_seed(0)
    out, part = (torch.randn(rows, 4, 41, generator=make).to(dtype) for rows in (14, 9))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    lse, part_lse = (10.0 * torch.randn(4, rows, generator=make, dtype=exact) for rows in (14, 9))
    rows = torch.randperm(14, generator=make)[:9] if some else torch.arange(9)
    # One side without keys and with rubbish in it, the other, both; of so little weight that it is 0; and NaN.
    lse[1, rows[0]], out[rows[0], 1] = -torch.inf, torch.nan
    part_lse[2, 1], part[1, 2] = -torch.inf, torch.nan
    lse[0, rows[2]], part_lse[0, 2], out[rows[2], 0], part[2, 0] = -torch.inf, -torch.inf, torch.nan, torch.nan
    lse[2, rows[5]], out[rows[5], 2], part_lse[2, 5] = -900.0, torch.nan, 0.0
    lse[1, rows[6]], part_lse[1, 6], part[6, 1] = 0.0, -900.0, torch.nan
    part_lse[3, 4], part[4, 3] = torch.nan, torch.nan
    want, want_lse = merge_partials(out[rows], lse[:, rows].mT, part, part_lse.mT)
    rest = [row for row in range(14) if row not in rows]
    before = out[rest].clone(), lse[:, rest].clone()
    merge(out, lse, part, part_lse, rows if some else None)
    torch.testing.assert_close(out[rows], want, equal_nan=True)
    torch.testing.assert_close(lse[:, rows], want_lse.mT, equal_nan=True)
    assert torch.equal(out[rest], before[0])
    assert torch.equal(lse[:, rest], before[1])
