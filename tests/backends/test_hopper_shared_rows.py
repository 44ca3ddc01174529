"""Heads or sequences that share their keys, strides of 0: the forward reads them as they lie, the backward copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_emulator import MODE
from test_hopper_protocol import PACKED, Case, expected

pytestmark = pytest.mark.slow

DENSE = Case(128, batch=2, heads=(2, 2), seqlens=(70, 200), causal=True)
CASES = {"heads": (DENSE, 1), "sequences": (DENSE, 0), "packed heads": (replace(DENSE, lengths=PACKED, padding=2), 1)}


@pytest.mark.parametrize(("case", "dim"), CASES.values(), ids=CASES.keys())
def test_forward(case: Case, dim: int, emulated: Callable[[str], Any]) -> None:
    """Nothing is copied on the way."""
    MODE.late_loads = False
    given = case.inputs()
    k, v = (t.narrow(dim, 0, 1).expand(t.shape) for t in (given.k, given.v))
    assert 0 in k.stride()
    shared = given._replace(k=k, v=v)
    assert emulated("launch").bind_forward(case.problem, shared, want_lse=True).copied == {}
    out, lse = emulated("launch").run_forward(case.problem, shared)
    ref, ref_lse = expected(case, shared)
    torch.testing.assert_close(out.double(), ref, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5)
