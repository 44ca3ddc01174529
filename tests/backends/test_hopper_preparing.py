"""Row statistics and zeros are made beside the kernel that needs them: never late, and without waiting in a circle.

With 3 SMs and one K/V head a wave, two of the heads here come from the row kernel, all others from the preparers.
Everything that is not written is NaN (test_hopper_protocol.poisoned).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gluon_emulator import MODE
from sampling import sampled
from test_hopper_protocol import LATE_FIRST, Case, check_backward
from tilewise import device

pytestmark = pytest.mark.slow

CASES = {
    "d64 causal": Case(batch=3, heads=(4, 2), seqlens=(200, 300), causal=True),
    "d64 deterministic": Case(batch=5, heads=(1, 1), seqlens=(300, 260), deterministic=True),
    "d128 causal, deterministic": Case(128, batch=5, heads=(1, 1), seqlens=(200, 300), causal=True, deterministic=True),
    "d128, few queries": Case(128, batch=4, heads=(2, 1), seqlens=(70, 400)),
    "d128 causal, the last two heads together": Case(128, batch=6, heads=(1, 1), seqlens=(300, 300), causal=True),
    "d96 window, sinks": Case(96, batch=6, heads=(2, 1), seqlens=(260, 150), window=(70, 20), sinks=True),
}


@pytest.fixture
def waves_of_one(emulated: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A tile of one head after the other."""
    prepared = emulated("launch").backward_pass
    monkeypatch.setattr(emulated("configs"), "prepares_ahead", lambda _: True)
    monkeypatch.setattr(emulated("configs"), "ENDING_SEQLEN_K", (300, 1024))
    monkeypatch.setattr(emulated("backward_plan"), "AHEAD_HEADS", 1)
    for rounds in ("AHEAD_ROUNDS", "CAUSAL_AHEAD_ROUNDS"):
        monkeypatch.setattr(emulated("backward_plan"), rounds, 1)
    counter = torch.zeros(1, dtype=torch.int32)  # a deadlock leaves it as it was
    monkeypatch.setattr(emulated("counters").HostCounters, "current", lambda *_: counter)
    prepared.cache_clear()
    yield emulated
    prepared.cache_clear()


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize("case", sampled(CASES, ("d64 causal", "d128 causal, deterministic", "d96 window, sinks")))
def test_heads_behind_the_front(case: Case, late_loads: bool, waves_of_one: Callable[[str], Any]) -> None:
    MODE.late_loads = late_loads
    plan = waves_of_one("backward_plan").backward_plan(case.problem, device.of(torch.device("cpu")))
    assert 0 < plan.front_items < plan.key_sizes.num_items
    together = case.head_dim == 128 and case.causal and not case.deterministic
    assert plan.last_items == plan.config.ENDING == (2 if together else 1)
    check_backward(case, waves_of_one)


# Without queries, without keys, of one length, and one that has as many keys as the longest but comes late.
LENGTHS = ((260, 140, 0, 70, 129, 1, 50), (260, 300, 200, 0, 100, 64, 260))
LISTED = {
    "d64, two heads together": (Case(heads=(2, 2), lengths=LENGTHS, causal=True, padding=5), 512, True),
    "d64, groups": (Case(heads=(6, 3), lengths=LENGTHS, causal=True), 256, False),
    "d128, one by one": (Case(128, heads=(2, 2), lengths=LENGTHS, causal=True), 0, False),
}


@pytest.mark.parametrize(("case", "together", "late_loads"), LISTED.values(), ids=LISTED.keys())
def test_packed_sequences_behind_the_front(
    case: Case, together: int, late_loads: bool, emulated: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    MODE.late_loads = late_loads
    monkeypatch.setattr(emulated("backward_plan").BackwardPlan, "together", lambda *_, **__: together)
    monkeypatch.setattr(emulated("configs"), "prepares_listed", lambda _: True)
    prepared = emulated("launch").backward_pass
    prepared.cache_clear()
    heads = set()
    prepare = emulated("preparing").prepare_tiles.function

    def noted(*args: Any) -> Any:
        heads.add((int(args[4][0]), int(args[2])))
        return prepare(*args)

    monkeypatch.setattr(emulated("preparing"), "prepare_tiles", noted)
    check_backward(case, emulated)
    prepared.cache_clear()
    pairs = {(sequence, head) for sequence, keys in enumerate(LENGTHS[1]) for head in range(case.heads[1]) if keys}
    assert heads < pairs
    assert heads >= {(sequence, head) for sequence, head in pairs if LENGTHS[0][sequence] <= 70}


# --- dQ leaves its sums to the kernel that adds to them: complete, once, and its ring is used again in time


# Of 256 keys: two tiles a head, so that a head's tiles are done at different times.
FINISHED = Case(batch=5, heads=(2, 2), seqlens=(200, 256))


@pytest.fixture
def short_ring(waves_of_one: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """DQ is finished in the main kernel, with as few places in the ring as there may be."""
    monkeypatch.setattr(waves_of_one("configs"), "finishes_inside", lambda _: True)
    monkeypatch.setattr(waves_of_one("backward_plan"), "FINISH_ROUNDS", 0)
    monkeypatch.setattr(waves_of_one("backward_plan"), "REUSE_ROUNDS", 0)
    return waves_of_one


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize("name", ["d64 causal", "d128, few queries"])
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
        check_backward(FINISHED, short_ring)
