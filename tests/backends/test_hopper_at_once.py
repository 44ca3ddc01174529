"""P from the reference of before: rows whose scores outgrow it slowly, and rows that are lost and computed again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gluon_emulator import MODE
from sampling import marks_of
from test_hopper_protocol import PACKED, Case, check_forward, expected

pytestmark = pytest.mark.slow

CASES = {
    "d64": Case(seqlens=(300, 600), tile="D64_AT_ONCE"),
    "d64 whole tiles": Case(seqlens=(100, 256), sinks=True, tile="D64_AT_ONCE"),
    "d64 causal": Case(seqlens=(200, 600), causal=True, tile="D64_BANDED_AT_ONCE"),
    "d64 causal, tiles passed over": Case(seqlens=(700, 900), causal=True, tile="D64_CAUSAL"),
    "d64 causal, odd diagonal": Case(seqlens=(400, 333), heads=(1, 1), causal=True, tile="D64_CAUSAL"),
    "d64 causal, four warpgroups": Case(seqlens=(300, 300), batch=2, causal=True, tile="D64_QUAD_AT_ONCE"),
    "d64 window": Case(seqlens=(200, 400), window=(150, 20), sinks=True, tile="D64_QUAD_AT_ONCE"),
    "d128": Case(128, seqlens=(200, 400), tile="D128_AT_ONCE"),
    "d128 causal": Case(128, seqlens=(300, 300), causal=True, tile="D128_AT_ONCE"),
    "d96": Case(96, seqlens=(70, 300), tile="D128_AT_ONCE"),
    "d192": Case(192, seqlens=(130, 300), sinks=True, tile="D192_MENDED"),
    "d192 packed": Case(192, lengths=PACKED, padding=2, tile="D192_MENDED"),
    "d192 causal, tiles passed over": Case(192, seqlens=(300, 333), causal=True, tile="D192_CAUSAL_MENDED"),
    "d128, P mended": Case(128, seqlens=(200, 400), tile="D128_MENDED"),
    "d128 packed causal": Case(128, lengths=PACKED, padding=2, causal=True, tile="D128_AT_ONCE"),
    "packed": Case(64, lengths=PACKED, padding=2, tile="D64_AT_ONCE"),
    "packed causal": Case(64, lengths=PACKED, padding=2, causal=True, tile="D64_QUAD_AT_ONCE"),
}
HALF = {
    "d64 half": Case(seqlens=(300, 600), tile="D64_MENDED"),
    "d64 half, causal, tiles passed over": Case(seqlens=(700, 900), causal=True, tile="D64_CAUSAL_MENDED"),
    "d64 half, four warpgroups": Case(seqlens=(300, 300), batch=2, causal=True, sinks=True, tile="D64_QUAD_MENDED"),
    "d64 half, window": Case(seqlens=(200, 400), window=(150, 20), sinks=True, tile="D64_QUAD_MENDED"),
    "d64 half, packed": Case(64, lengths=PACKED, padding=2, causal=True, tile="D64_BANDED_MENDED"),
    "d128 half": Case(128, seqlens=(200, 400), sinks=True, tile="D128_MENDED"),
    "d128 half, causal": Case(128, seqlens=(300, 300), causal=True, tile="D128_MENDED"),
    "d128 half, packed causal": Case(128, lengths=PACKED, padding=2, causal=True, tile="D128_MENDED"),
    "d192 half": Case(192, seqlens=(130, 300), sinks=True, tile="D192_MENDED"),
    "d192 half, causal": Case(192, seqlens=(300, 300), causal=True, sinks=True, tile="D192_CAUSAL_MENDED"),
}
CASES |= {name: replace(case, dtype=torch.float16) for name, case in HALF.items()}
# How much scores grow from one end of the keys to the other: within a tile by less and by more than 2^127.
RISES = {"even": 0.0, "lost": 2000.0}
TILES = [
    pytest.param(tile, marks=marks_of(tile in ("D64_AT_ONCE", "D64_QUAD_MENDED")))
    for tile in ("D64_AT_ONCE", "D64_QUAD_AT_ONCE", "D64_MENDED", "D64_CAUSAL_MENDED", "D64_QUAD_MENDED")
]
Emulated = Callable[[str], Any]


def dtype_of(tile: str) -> torch.dtype:
    """What a row of the table is for."""
    return torch.float16 if tile.endswith("MENDED") else torch.bfloat16


def use(tile: str | None, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every forward with a row of the table."""
    configs = emulated("configs")
    emulated("launch").forward_pass.cache_clear()
    monkeypatch.setattr(configs, "_forward_tile", lambda _: getattr(configs, tile or ""))


@pytest.mark.parametrize(
    ("case", "rising"),
    [
        pytest.param(case, rising, id=f"{name}, {how}", marks=marks_of(number % 2 == which))
        for number, (name, case) in enumerate(CASES.items())
        for which, (how, rising) in enumerate(RISES.items())
    ],
)
def test_forward(case: Case, rising: float, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    MODE.late_loads = bool(rising)
    use(case.tile, emulated, monkeypatch)
    check_forward(replace(case, rising=rising), emulated)


@pytest.mark.parametrize("tile", TILES)
def test_references_follow_scores_that_outgrow_them_slowly(
    tile: str, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 2^127 in all, 2^20 from tile to tile: nothing is lost, so nothing needs to be computed again. That is
    past the end of fp16, whose P shrink before they are rounded.
    """
    MODE.late_loads = False
    for name in ("forward", "forward_quad"):
        monkeypatch.setattr(emulated(name), "lost_rows", lambda *_: False)
    use(tile, emulated, monkeypatch)
    check_forward(Case(seqlens=(64, 1300), heads=(1, 1), rising=40, dtype=dtype_of(tile)), emulated)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("top", "sink"), [(87.0, 88.0), (87.5, None)])
def test_sums_that_end_close_to_the_largest_number(
    tile: str, top: float, sink: float | None, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 0 but for the key that is visited last, which is nearly 2^127 above; a sink weighs as much as it."""
    MODE.late_loads = False
    use(tile, emulated, monkeypatch)
    case = Case(seqlens=(64, 700), heads=(1, 1), sinks=sink is not None, dtype=dtype_of(tile))
    given = case.inputs()
    q, k = torch.zeros_like(given.q), torch.zeros_like(given.k)
    q[..., 0], k[..., 0, 0] = 8.0, top
    sinks = None if sink is None else torch.full((1,), sink)
    operands = given._replace(q=q, k=k, v=given.v / 64, sinks=sinks)  # a sum over the columns of O stays finite
    out, lse = emulated("launch").run_forward(case.problem, operands)
    ref, ref_lse = expected(case, operands)
    torch.testing.assert_close(out.double(), ref, atol=3e-4, rtol=0.02)
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5)


# Of the key that is visited last, all others have 0; of a sink, with what no finite number weighs.
TOPS = (69.0, 69.5, 87.0, 88.5, math.nan)
SINKS = (-math.inf, -88.0, 88.0, math.inf, math.nan)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("sink", SINKS)
def test_sinks_beside_sums_of_any_size(
    tile: str, sink: float, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are kept and sums that are lost, on both sides of 2^100, a score of 69.3."""
    MODE.late_loads = False
    use(tile, emulated, monkeypatch)
    case = Case(seqlens=(64, 200), heads=(1, 1), sinks=True, dtype=dtype_of(tile))
    given = case.inputs()
    q, sinks = torch.zeros_like(given.q), torch.full((1,), sink)
    q[..., 0] = 8.0
    for top in TOPS:
        k = torch.zeros_like(given.k)
        k[..., 0, 0] = top
        operands = given._replace(q=q, k=k, v=given.v / 64, sinks=sinks)
        out, lse = emulated("launch").run_forward(case.problem, operands)
        ref, ref_lse = expected(case, operands)
        scale = float(ref.nan_to_num().abs().max())  # of 5.6e-9 v as well: a sink of 88 beside a score of 69
        smallest = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
        torch.testing.assert_close(out.double(), ref, atol=0.02 * scale + smallest, rtol=0.0, equal_nan=True)
        torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sink", SINKS)
def test_rows_without_a_key_beside_sinks(
    sink: float,
    emulated: Emulated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first 100 queries see no key; of others, some sums are lost."""
    MODE.late_loads = False
    for tile in ("D64_BANDED_AT_ONCE", "D64_QUAD_MENDED"):
        case = Case(seqlens=(300, 200), heads=(1, 1), causal=True, sinks=True, rising=2000.0, dtype=dtype_of(tile))
        given = case.inputs()._replace(sinks=torch.full((1,), sink))
        ref, ref_lse = expected(case, given)
        use(tile, emulated, monkeypatch)
        out, lse = emulated("launch").run_forward(case.problem, given)
        empty, seen = slice(0, 100), slice(100, None)
        assert torch.equal(out[:, :, empty].float().isnan(), ref[:, :, empty].isnan())
        if not math.isnan(sink):
            assert not out[:, :, empty].any()
        torch.testing.assert_close(out[:, :, seen].double(), ref[:, :, seen], atol=0.03, rtol=0.02, equal_nan=True)
        torch.testing.assert_close(lse.double(), ref_lse, atol=1e-3, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("tile", TILES)
def test_rows_beside_lost_ones_keep_their_bits(tile: str, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of both heads and warpgroups are lost, one by one and all of the last ones; no other row changes."""
    MODE.late_loads = False
    use(tile, emulated, monkeypatch)
    case = Case(seqlens=(200, 300), heads=(2, 2), dtype=dtype_of(tile))
    given = case.inputs()
    k = given.k.clone()
    k[..., 0], k[:, :, 7, 0] = 0.0, 1.0
    plain, q = given._replace(k=k), given.q.clone()
    plain.q[..., 0] = q[..., 0] = 0.0
    lost = torch.zeros(2, 200, dtype=torch.bool)
    lost[0, 3] = lost[0, 64] = lost[1, 0] = True
    lost[1, 130:] = True
    q[0, lost, 0] = 8.0 * 3000.0
    out, lse = emulated("launch").run_forward(case.problem, plain._replace(q=q))
    before = emulated("launch").run_forward(case.problem, plain)
    assert torch.equal(out[0][~lost], before[0][0][~lost])
    assert torch.equal(lse[0][~lost], before[1][0][~lost])
    ref, ref_lse = expected(case, plain._replace(q=q))
    torch.testing.assert_close(out.double(), ref, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5)


# The diagonal is 50 keys off, so that the first row that the forward loses is not the first one of a block.
@pytest.mark.parametrize(("key", "tile"), [(250, "D64_BANDED_AT_ONCE"), (242, "D64_QUAD_AT_ONCE")])
def test_values_that_are_not_finite_reach_no_block_of_rows_before_them(
    tile: str, key: int, emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 0 times infinity in tiles that the forward masks, up to 190 rows before them, and were in 126 still."""
    MODE.late_loads = False
    use(tile, emulated, monkeypatch)
    case = Case(seqlens=(300, 350), heads=(1, 1), causal=True)
    given = case.inputs()
    v = given.v.clone()
    v[:, :, key, 3] = math.inf
    out, lse = emulated("launch").run_forward(case.problem, given._replace(v=v))
    ref, ref_lse = expected(case, given)
    torch.testing.assert_close(lse.double(), ref_lse, atol=1e-4, rtol=1e-5)
    before = slice(0, (key - 50) // 64 * 64)
    torch.testing.assert_close(out[:, :, before].double(), ref[:, :, before], atol=0.02, rtol=0.02)
    assert bool((out[:, :, key - 50 :, 3] == math.inf).all())


def test_marked_rows_of_one_block_may_be_of_several_heads(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """37 rows each: blocks of 64 rows of lse begin within a head, and everything is lost."""
    MODE.late_loads = False
    use("D64_AT_ONCE", emulated, monkeypatch)
    case = Case(seqlens=(37, 200), heads=(5, 5), batch=2, rising=2000.0)
    for programs in (1, 2, 100):
        monkeypatch.setattr(emulated("launch"), "AGAIN_PROGRAMS", programs)
        emulated("launch").forward_pass.cache_clear()
        check_forward(case, emulated)
