"""The last round of a backward without a mask, cut along its queries: every query tile once, parts joined in order.

The stand-in's chip has 3 SMs, so 5 key tiles are a round and two that are cut. Everything that is not written is NaN
(test_hopper_protocol.poisoned).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_emulator import MODE
from sampling import sampled
from test_hopper_protocol import LATE_FIRST, Case, backward_inputs, check_backward, run_backward
from tilewise import device

pytestmark = pytest.mark.slow

CASES = {
    "d64, a tile left": Case(batch=2, heads=(2, 2), seqlens=(700, 128)),
    "d128, two tiles left, few queries": Case(128, heads=(1, 1), seqlens=(300, 640)),
    "d128, two tiles of two heads": Case(128, batch=2, heads=(2, 2), seqlens=(260, 256)),
    "d96, deterministic": Case(96, heads=(1, 1), seqlens=(333, 640), deterministic=True),
    "d64 / d128, two tiles left": Case(64, 128, heads=(1, 1), seqlens=(330, 640), deterministic=True),
}


@pytest.fixture
def cut(emulated: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Whatever is to be gained, and pieces of any length."""
    prepared = emulated("launch").backward_pass
    monkeypatch.setattr(emulated("configs"), "prepares_ahead", lambda _: False)
    monkeypatch.setattr(emulated("backward_plan"), "cuts_last_round", lambda _: True)
    monkeypatch.setattr(emulated("backward_plan"), "PIECES_GAIN", 1)
    monkeypatch.setattr(emulated("backward_plan"), "PIECE_TILES", 1)
    prepared.cache_clear()
    yield emulated
    prepared.cache_clear()


def plan_of(case: Case, backend: Callable[[str], Any], sms: int | None = None) -> Any:
    spec = device.of(torch.device("cpu"))
    return backend("backward_plan").backward_plan(case.problem, spec if sms is None else replace(spec, num_sms=sms))


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize("case", sampled(CASES, (*CASES,)[::2]))
def test_pieces(case: Case, late_loads: bool, cut: Callable[[str], Any]) -> None:
    MODE.late_loads = late_loads
    line = plan_of(case, cut).line
    assert line is not None
    assert line.programs > 1
    check_backward(case, cut)


def test_pieces_of_a_deterministic_backward_repeat(cut: Callable[[str], Any]) -> None:
    case = CASES["d96, deterministic"]
    operands = case.inputs()
    given = backward_inputs(case, operands)
    runs = []
    for late_loads in (False, True):
        MODE.late_loads = late_loads
        runs.append(run_backward(case, operands, given, cut))
    for first, second in zip(runs[0][:3], runs[1][:3], strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
