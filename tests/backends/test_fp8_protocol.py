"""The FP8 Hopper kernels run on the CPU over the stand-in for Gluon, against the fp64 specification.

Products are exact there, so what is left is the rounding of P, which docs/contract.md states.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulated_backend import Emulated
from gluon_emulator import MODE, PACKAGE
from test_hopper_protocol import PACKED, Case, reference
from tilewise import fp8
from tilewise.operands import Operands
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

# (case, granularity of q and k, of v)
CASES: dict[str, tuple[Case, str, str]] = {
    "d64": (Case(64, seqlens=(200, 300)), "block", "head"),
    "d64 causal": (Case(64, seqlens=(333, 457), causal=True, batch=2), "tensor", "tensor"),
    "d128": (Case(128, seqlens=(300, 600)), "block", "head"),
    "d128 causal, blocks of v": (Case(128, seqlens=(300, 300), causal=True), "block", "block"),
    "d96 one tile": (Case(96, seqlens=(64, 100), causal=True), "head", "head"),
    "d256": (Case(256, seqlens=(200, 333)), "block", "head"),
    "d256 causal": (Case(256, seqlens=(333, 300), causal=True), "block", "block"),
    "fewer keys": (Case(64, seqlens=(500, 100), causal=True), "block", "head"),
    "window": (Case(128, seqlens=(600, 500), window=(100, 30)), "block", "head"),
    "sinks": (Case(128, seqlens=(400, 200), sinks=True, causal=True), "block", "head"),
    "packed": (Case(128, lengths=PACKED, padding=3), "block", "head"),
    "packed causal": (Case(64, lengths=PACKED, causal=True, padding=5, sinks=True), "head", "block"),
    "packed window": (Case(256, lengths=PACKED, window=(20, 30)), "tensor", "head"),
}


def quantised(case: Case, qk: Any, v: Any) -> tuple[AttentionProblem, Operands]:
    """The case with e4m3 operands."""
    operands = case.inputs()
    cu_seqlens = {"q": operands.cu_seqlens_q, "k": operands.cu_seqlens_k, "v": operands.cu_seqlens_k}
    made = {
        name: fp8.quantize(getattr(operands, name), granularity=v if name == "v" else qk, cu_seqlens=cu_seqlens[name])
        for name in ("q", "k", "v")
    }
    problem = replace(
        case.problem, fp8=("q", "k", "v"), scale_blocks=(made["q"].block, made["k"].block, made["v"].block)
    )
    data = {name: t.data for name, t in made.items()} | {f"{name}_scale": t.scale for name, t in made.items()}
    return problem, operands._replace(**data)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, late: bool, emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    MODE.late_loads = late
    problem, operands = quantised(*CASES[name])
    launch = importlib.import_module(f"{PACKAGE}.launch")
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(emulated("counters").HostCounters, "current", lambda *_: counter)
    out, lse = launch.run_forward(problem, operands)
    expected, expected_lse = reference().forward(replace(problem, dtype=torch.float64), operands)
    assert int(counter) == 0
    assert torch.equal(torch.isfinite(lse), torch.isfinite(expected_lse))
    finite = torch.isfinite(expected_lse)
    assert float((lse.double() - expected_lse)[finite].abs().max()) < 1e-4
    # P is off by at most 1/16 of itself in either direction, and out is rounded to bf16.
    values = operands._replace(v=operands.v.float().abs().to(operands.v.dtype))
    reach = reference().forward(replace(problem, dtype=torch.float64), values)[0]
    assert bool(((out.double() - expected).abs() <= reach * (1 / 16 + 1 / 128) + 1e-6).all())
    error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.04
