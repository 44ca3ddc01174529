"""The Hopper kernels for latents run on the CPU over the stand-in for Gluon, against the fp64 specification."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulated_backend import Emulated
from gluon_emulator import MODE, PACKAGE
from sampling import sampled
from test_decode_protocol import one_each
from test_hopper_protocol import Case, assert_near, expected, in_pages, overflowing
from tilewise import device
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

LENGTHS = ((1, 1, 1, 1, 1), (300, 33, 1, 130, 64))
SEVERAL = ((2, 0, 1, 3, 0), (300, 33, 0, 200, 1))
WIDTHS: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512}
DENSE = {
    "two tiles of rows": Case(**WIDTHS, heads=(80, 1), batch=2, seqlens=(1, 200)),
    "one share": Case(**WIDTHS, heads=(3, 1), seqlens=(1, 40)),
    "two heads, several tokens": Case(**WIDTHS, heads=(40, 2), seqlens=(3, 333), causal=True),
    "narrower rest": Case(head_dim=536, head_dim_v=512, heads=(16, 1), seqlens=(1, 250)),
    "window": Case(**WIDTHS, heads=(16, 1), seqlens=(3, 400), window=(100, 1)),
    "softcap, sinks": Case(**WIDTHS, heads=(20, 1), seqlens=(2, 300), causal=True, softcap=2.0, sinks=True),
    "fewer keys than queries": Case(**WIDTHS, heads=(4, 1), seqlens=(6, 3), causal=True, sinks=True),
    "packed": Case(**WIDTHS, heads=(20, 1), lengths=SEVERAL, causal=True, padding=2),
    "packed window": Case(**WIDTHS, heads=(2, 2), lengths=SEVERAL, window=(40, 0), padding=1),
    "rising scores": Case(**WIDTHS, heads=(16, 1), seqlens=(1, 300), rising=3.0),
}
PAGED = {
    "a page a tile": (Case(**WIDTHS, heads=(70, 1), lengths=LENGTHS), 64, "rows first", False),
    "small pages": (Case(**WIDTHS, heads=(16, 1), lengths=LENGTHS, sinks=True), 16, "rows first", False),
    "tiny pages": (Case(**WIDTHS, heads=(4, 2), lengths=LENGTHS), 8, "heads first", False),
    "several tokens": (Case(**WIDTHS, heads=(40, 1), lengths=SEVERAL, causal=True), 64, "together", True),
    "large pages": (Case(**WIDTHS, heads=(20, 1), lengths=LENGTHS, window=(50, None)), 256, "rows first", False),
    "odd pages": (Case(**WIDTHS, heads=(4, 1), lengths=SEVERAL, causal=True, padding=2), 24, "heads first", True),
}


def latent(problem: AttentionProblem, operands: Operands) -> tuple[AttentionProblem, Operands]:
    """The same queries and keys, with values in the first columns of the keys."""
    return replace(problem, latent=True), operands._replace(v=operands.k[..., : problem.head_dim_v])


@pytest.fixture
def attend(emulated: Emulated) -> Callable[..., Any]:
    del emulated
    return importlib.import_module(f"{PACKAGE}.launch").run_forward  # type: ignore[no-any-return]


@pytest.mark.parametrize("late_loads", [False, True], ids=["loads at once", "loads late"])
@pytest.mark.parametrize("case", sampled(DENSE, set(DENSE) - {"one share", "packed window"}))
def test_rows(case: Case, late_loads: bool, attend: Callable[..., Any]) -> None:
    MODE.late_loads = late_loads
    problem, operands = latent(case.problem, case.inputs())
    assert_near(attend(problem, operands), expected(case, operands))


@pytest.mark.parametrize(("case", "page_size", "storage", "several"), PAGED.values(), ids=PAGED.keys())
def test_pages(case: Case, page_size: int, storage: str, several: bool, attend: Callable[..., Any]) -> None:
    """Pages in any order, NaN in every row that no sequence has, nonsense in the unused part of the table."""
    MODE.late_loads = True
    _, packed = latent(case.problem, case.inputs())
    operands, problem = one_each(*in_pages(case, packed, page_size, storage), several)
    problem, operands = latent(problem, operands)
    assert_near(attend(problem, operands), expected(case, packed))


def test_many_sequences(attend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are added up at a time, among them empty ones at both ends."""
    MODE.late_loads = False
    monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.decode_schedule"), "SCAN", 2)
    case = Case(**WIDTHS, heads=(20, 1), lengths=((0, 1, 0, 2, 1, 1, 0), (9, 300, 5, 70, 0, 129, 400)), causal=True)
    problem, operands = latent(case.problem, case.inputs())
    assert_near(attend(problem, operands), expected(case, operands))


@pytest.mark.parametrize(("heads", "shared"), [(18, False), (18, True), (70, True)])
def test_many_parts(
    heads: int, shared: bool, attend: Callable[..., Any], emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts and rows than a program merges at a time, and no multiples of them; warps may share the parts."""
    MODE.late_loads = False
    wanted = {"LATENT_MERGE_RATE": 10**6, "LATENT_PROGRAMS": 0, "LATENT_PARTS": 1 if shared else 100}
    for name, value in (wanted | {"LATENT_COLUMNS": (256, 256, 256)}).items():
        monkeypatch.setattr(emulated("decode_configs"), name, value)
    case = Case(**WIDTHS, heads=(heads, 1), seqlens=(1, 650))
    problem, operands = latent(case.problem, case.inputs())
    with device.overridden(replace(device.named("h200"), num_sms=7 if heads < 64 else 14)):
        assert_near(attend(problem, operands), expected(case, operands))


def test_scores_of_minus_infinity_weigh_nothing(attend: Callable[..., Any]) -> None:
    MODE.late_loads = False
    case = Case(**WIDTHS, heads=(16, 1), seqlens=(1, 300))
    problem, operands = latent(case.problem, overflowing(case.inputs(), slice(0, 64)))
    assert_near(attend(problem, operands), expected(case, operands))


@pytest.mark.parametrize("method", ["acquire", "wait"])
def test_what_is_not_waited_for_is_found(
    method: str, attend: Callable[..., Any], emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer must wait for released columns, a warpgroup for its tile and the other's P."""
    MODE.late_loads = method == "wait"
    monkeypatch.setattr("gluon_emulator.DEADLOCK_S", 2.0)
    monkeypatch.setattr("gluon_emulator.LATE_S", 0.1)  # not before a busy machine runs the warpgroups
    channels = emulated("channels")
    wait = channels.Ring.wait

    def wait_long(self: Any, at: Any) -> None:
        wait.function(self, at)
        time.sleep(0.1)

    def acquire_at_once(self: Any, at: Any, num_bytes: int) -> Any:
        channels.mbarrier.expect(self.ready.index(at.slot), num_bytes)
        return self.ready.index(at.slot)

    monkeypatch.setattr(channels.Ring, "wait", wait_long if method == "acquire" else lambda *_: None)
    if method == "acquire":
        monkeypatch.setattr(channels.Ring, "acquire", acquire_at_once)
    case = Case(**WIDTHS, heads=(16, 1), seqlens=(1, 700))
    problem, operands = latent(case.problem, case.inputs())
    with pytest.raises((AssertionError, RuntimeError)):
        assert_near(attend(problem, operands), expected(case, operands))


def test_results_repeat(attend: Callable[..., Any]) -> None:
    MODE.late_loads = True
    case = DENSE["two tiles of rows"]
    problem, operands = latent(case.problem, case.inputs())
    first, again = attend(problem, operands), attend(problem, operands)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
