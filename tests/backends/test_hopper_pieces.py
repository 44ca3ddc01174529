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


@pytest.mark.parametrize("sms", [1, 3, 78, 132])
@pytest.mark.parametrize(("batch", "heads", "seqlens"), [(1, 7, 8192), (3, 5, 2304)])
def test_every_query_tile_belongs_to_one_piece(
    sms: int, batch: int, heads: int, seqlens: int, cut: Callable[[str], Any]
) -> None:
    """And every part has room of its own, in which whoever joins them looks for it."""
    case = Case(128, batch=batch, heads=(heads, heads), seqlens=(seqlens, seqlens))
    plan = plan_of(case, cut, sms)
    sizes, line = plan.key_sizes, plan.line
    if line is None:
        assert sizes.num_tiles % sms in (0, sizes.num_tiles) or line_is_not_worth_it(sizes, sms)
        return
    pieces = cut("backward_pieces")
    seen: dict[tuple[int, int], int] = {}
    room = set()
    for program in range(line.programs):
        step, end = program * line.length, min((program + 1) * line.length, line.total)
        while step < end:
            tile, lo, hi = map(int, pieces.piece_at(step, end, line))
            assert lo < hi
            for m_block in range(lo, hi):
                seen[tile, m_block] = seen.get((tile, m_block), 0) + 1
            part = program + tile - line.first_tile
            assert part not in room
            room.add(part)
            number = tile - line.first_tile
            first, last = number * line.query_tiles, (number + 1) * line.query_tiles - 1
            assert first // line.length <= program <= last // line.length
            step += hi - lo
    assert len(seen) == (sizes.num_tiles - line.first_tile) * sizes.row_tiles == sum(seen.values())
    assert max(room) < plan.piece_words // (2 * 128 * plan.config.D)
    # What is joined was all written.
    assert len(room) == sum(
        ((n + 1) * line.query_tiles - 1) // line.length - n * line.query_tiles // line.length + 1
        for n in range(sizes.num_tiles - line.first_tile)
    )
    assert plan.main_sizes.num_tiles % sms == 0


def line_is_not_worth_it(sizes: Any, sms: int) -> bool:
    left: int = sizes.num_tiles % sms
    return bool(sizes.row_tiles - -(-left * sizes.row_tiles // sms) < 1)
