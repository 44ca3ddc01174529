"""The order of a backward's tiles. Row statistics and zeros are made beside the kernel that needs them: never late, and
without waiting in a circle. A last round is cut into pieces.

With 3 SMs and one K/V head a wave, two of the heads here come from the row kernel, all others from the preparers.
Everything that is not written is NaN (test_hopper_protocol.poisoned).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from emulated_backend import Emulated
from gluon_emulator import MODE
from sampling import sampled
from test_hopper_protocol import LATE_FIRST, Case, backward_inputs, check_backward, run_backward
from tilewise import device
from tilewise.problem import AttentionProblem

backward_plan = pytest.importorskip("tilewise.backends.hopper.backward_plan")

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
def waves_of_one(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A tile of one head after the other."""
    prepared = emulated("launch").launching.kept
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
def test_heads_behind_the_front(case: Case, late_loads: bool, waves_of_one: Emulated) -> None:
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
    case: Case, together: int, late_loads: bool, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODE.late_loads = late_loads
    monkeypatch.setattr(emulated("backward_plan").BackwardPlan, "together", lambda *_, **__: together)
    monkeypatch.setattr(emulated("configs"), "prepares_listed", lambda _: True)
    prepared = emulated("launch").launching.kept
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


# --- a tile waits for shares that were handed out with lower-numbered tiles, on any chip


def plan_of(seqlen_q: int, seqlen_k: int, items: int, num_sms: int) -> Any:
    """Causal, head_dim 128, so many heads, on a chip of so many SMs."""
    problem = AttentionProblem(
        kind="dense", dtype=torch.bfloat16, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, total_q=seqlen_q,
        total_k=seqlen_k, num_heads=items, num_kv_heads=items, head_dim=128, head_dim_v=128, scale=0.1, causal=True,
        needs_grad=True,
    )  # fmt: skip
    plan = backward_plan.backward_plan(problem, dataclasses.replace(device.named("h200"), num_sms=num_sms))
    assert plan.config.AHEAD
    return plan


def items_of(plan: Any) -> list[int]:
    """The K/V head of every tile, in the order of schedule.place_of."""
    sizes, found, first = plan.key_sizes, [], 0
    while first < sizes.num_items:
        last = first >= sizes.num_items - plan.last_items
        end = sizes.num_items if last else first + sizes.items_per_wave
        found += list(range(first, end)) * sizes.num_blocks
        first = end
    return found


def late_shares(plan: Any) -> list[int]:
    """Heads whose first tile waits for a share that is handed out with it or later, or with no tile of the counter."""
    tiles: dict[int, list[int]] = {}
    for tile, item in enumerate(items_of(plan)):
        tiles.setdefault(item, []).append(tile)
    programs, lead = plan.key_grid[0], plan.front_tiles - plan.key_grid[0]
    return [
        item
        for item, (first, *_, last) in ((item, (of[0], *of)) for item, of in tiles.items())
        if item >= plan.front_items and not programs <= first - lead <= last - lead < first
    ]


def test_the_order_of_tiles_is_the_kernels(emulated: Any) -> None:
    for queries, keys, items in ((1024, 4096, 11), (1024, 1024, 40), (64, 1024, 3)):
        plan = plan_of(queries, keys, items, 7)
        sizes, place_of = plan.key_sizes, emulated("schedule").place_of
        places = [place_of(tile, sizes, False, plan.config.ENDING) for tile in range(sizes.num_tiles)]
        assert [int(item) for _, item in places] == items_of(plan)


@pytest.mark.parametrize(
    "share", [pytest.param(16, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
def test_tiles_wait_for_lower_numbers(share: int) -> None:
    """On chips of 1 to 132 SMs; of the grid of lengths and heads every 16th, others for every number of SMs."""
    waves, ahead = set(), 0
    queries, keys = (2, 64, 1024, 2340, 4000, 8192, 16384), (128, 256, 1024, 1152, 1280, 2048, 4096)
    grid = [(q, k, items) for q in queries for k in keys for items in (*range(1, 20), 31, 32, 33, 64, 65, 100)]
    for num_sms in range(1, 133):
        for q, k, items in grid[num_sms % share :: 8 * share]:
            plan = plan_of(q, k, items, num_sms)
            waves.add(plan.key_sizes.items_per_wave)
            ahead += plan.front_items < plan.key_sizes.num_items
            assert late_shares(plan) == [], (q, k, items, num_sms)
    assert waves >= {1, 2, 4, 7, 8}
    assert ahead > 100


def test_a_short_lead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(1024, 4096, 40, 132)
    assert plan.front_items < plan.key_sizes.num_items
    assert late_shares(plan) == []
    monkeypatch.setattr(backward_plan.BackwardPlan, "front_items", property(lambda _: 4))
    assert late_shares(plan)


# --- the last round of a backward without a mask, cut along its queries: every query tile once, parts joined in order.
# The stand-in's chip has 3 SMs, so 5 key tiles are a round and two that are cut.


CUT = {
    "d64, a tile left": (Case(batch=2, heads=(2, 2), seqlens=(700, 128)), 3),
    "d128, two tiles left, few queries": (Case(128, heads=(1, 1), seqlens=(300, 640)), 3),
    "d128, two tiles of two heads": (Case(128, batch=2, heads=(2, 2), seqlens=(260, 256)), 3),
    "d96, deterministic": (Case(96, heads=(1, 1), seqlens=(333, 640), deterministic=True), 3),
    "d64 / d128, two tiles left": (Case(64, 128, heads=(1, 1), seqlens=(330, 640), deterministic=True), 3),
    "d64, a chip of two": (Case(heads=(1, 1), seqlens=(333, 384)), 2),
    "d128, pieces of less than a tile": (Case(128, heads=(1, 1), seqlens=(450, 1152)), 7),
}


@pytest.fixture
def cut(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Whatever is to be gained, and pieces of any length."""
    prepared = emulated("launch").launching.kept
    monkeypatch.setattr(emulated("configs"), "prepares_ahead", lambda _: False)
    monkeypatch.setattr(emulated("backward_plan"), "cuts_last_round", lambda _: True)
    monkeypatch.setattr(emulated("backward_plan"), "PIECES_GAIN", 1)
    monkeypatch.setattr(emulated("backward_plan"), "PIECE_TILES", 1)
    prepared.cache_clear()
    yield emulated
    prepared.cache_clear()


@pytest.mark.parametrize("late_loads", LATE_FIRST)
@pytest.mark.parametrize(("case", "num_sms"), sampled(CUT, (*CUT,)[::2]))
def test_pieces(case: Case, num_sms: int, late_loads: bool, cut: Emulated) -> None:
    MODE.late_loads = late_loads
    chip = dataclasses.replace(device.named("h200"), num_sms=num_sms)
    line = cut("backward_plan").backward_plan(case.problem, chip).line
    assert line is not None
    assert line.programs > 1
    with device.overridden(chip):
        check_backward(case, cut)


def test_pieces_of_a_deterministic_backward_repeat(cut: Emulated) -> None:
    case, _ = CUT["d96, deterministic"]
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
