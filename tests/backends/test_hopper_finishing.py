"""dQ leaves its sums beside the kernel that adds to them: complete, once, and the ring of sums is used again in time.

With 3 SMs and one K/V head a wave, most heads here are finished by the preparers and share places in the ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gluon_emulator
from gluon_emulator import MODE
from test_hopper_preparing import CASES, waves_of_one  # noqa: F401  (a fixture)
from test_hopper_protocol import LATE_FIRST, Case, check_backward, emulated  # noqa: F401  (a fixture)
from tilewise import device

pytestmark = pytest.mark.slow

# Of 256 keys: two tiles a head, so that a head's tiles are done at different times.
CASE = Case(batch=5, heads=(2, 2), seqlens=(200, 256))


@pytest.fixture
def short_ring(waves_of_one: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:  # noqa: F811
    """DQ is finished in the main kernel, with as few places in the ring as there may be."""
    monkeypatch.setattr(waves_of_one("configs"), "finishes_inside", lambda _: True)
    monkeypatch.setattr(waves_of_one("backward_plan"), "FINISH_ROUNDS", 0)
    monkeypatch.setattr(waves_of_one("backward_plan"), "REUSE_ROUNDS", 0)
    return waves_of_one


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize("name", ["d64 causal", "d128, few queries", "d96 window, sinks"])
def test_places_are_used_again(name: str, late_loads: bool, short_ring: Callable[[str], Any]) -> None:
    MODE.late_loads = late_loads
    case = CASES[name]
    plan = short_ring("backward_plan").backward_plan(case.problem, device.of(torch.device("cpu")))
    assert plan.ring_items < plan.finished_items
    check_backward(case, short_ring)


@pytest.mark.parametrize("missing", ["await_writes", "load_acquire", "publish"])
def test_a_missing_signal_is_found(
    missing: str, short_ring: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added has not arrived yet; a head is finished before its tiles are done; zeros are not told of."""
    MODE.late_loads = False
    finishing = short_ring("finishing")
    count = finishing.count_done.function

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        count(*args)

    monkeypatch.setattr(short_ring("backward"), "count_done", slowly)
    enough = torch.tensor(1 << 20)
    monkeypatch.setattr(finishing, missing, (lambda *_: enough) if missing == "load_acquire" else lambda *_: None)
    with pytest.raises(AssertionError):
        check_backward(CASE, short_ring)


def test_too_short_a_ring_is_a_deadlock(short_ring: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All CTAs have tiles that wait for the head which had their place before; its shares would go to later tiles."""
    MODE.late_loads = False
    monkeypatch.setattr(short_ring("backward_plan"), "FINISH_ROUNDS", 2)
    monkeypatch.setattr(short_ring("backward_plan").BackwardPlan, "ring_items", property(lambda _: 1))
    monkeypatch.setattr(gluon_emulator, "DEADLOCK_S", 1.0)
    with pytest.raises(RuntimeError, match="deadlock"):
        check_backward(CASE, short_ring)
