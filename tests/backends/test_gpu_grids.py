"""Grids have room for many sequences and heads: 2^31 - 1 programs along their first side, 65535 along the others."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.problem import AttentionProblem

pytest.importorskip("triton", minversion="3.6")
quantising = pytest.importorskip("tilewise.backends.triton.launch_quantising")

HOPPER = device.named("h200")
# More than a side of a grid but the first, as windows of images or short packed sequences are.
MANY = 70_000
PLAIN = AttentionProblem(
    kind="dense", dtype=torch.bfloat16, batch=MANY, seqlen_q=80, seqlen_k=100, total_q=80 * MANY, total_k=100 * MANY,
    num_heads=2, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=1.0, needs_grad=True,
)  # fmt: skip
PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "many heads": {"batch": 2, "num_heads": MANY, "num_kv_heads": MANY, "total_q": 160, "total_k": 200},
    "deterministic": {"deterministic": True, "causal": True},
    "wide": {"head_dim": 256, "head_dim_v": 256},
    "packed": {"kind": "varlen", "causal": True},
    "short": {"seqlen_q": 49, "seqlen_k": 49, "total_q": 49 * MANY, "total_k": 49 * MANY},
    "decoding": {"seqlen_q": 1, "total_q": MANY, "seqlen_k": 300, "total_k": 300 * MANY, "needs_grad": False},
    "fp8": {"fp8": ("q", "k", "v"), "scale_blocks": (128, 128, None), "needs_grad": False},
    "fp8 packed": {"kind": "varlen", "fp8": ("q", "k", "v"), "scale_blocks": (128, 128, 128), "needs_grad": False},
}


def assert_fits(calls: list[Any]) -> None:
    assert calls
    for call in calls:
        assert 0 < call.grid[0] < 2**31, call.kernel
        assert max(call.grid[1:]) <= 65535, call.kernel


@pytest.mark.parametrize("package", ["hopper", "triton"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_of_attention(name: str, package: str) -> None:
    problem = replace(PLAIN, **PROBLEMS[name])
    module = importlib.import_module(f"tilewise.backends.{package}")
    if module.BACKEND.supports(problem, HOPPER) is not None:
        pytest.skip("not taken")
    assert_fits(importlib.import_module(f"tilewise.backends.{package}.offline").calls_of(problem, HOPPER))


@pytest.mark.parametrize("mode", ["own", "shared"])
@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_of_quantising(mode: str, layout: str) -> None:
    job = quantising.Job(mode, MANY, 2, 300, 64, layout, 128 if mode == "own" else None, False, False)
    view = ((300 * 128, 64, 128, 1), torch.bfloat16, True)
    views = [view, ((1,), torch.int32, True) if layout == "packed" else None, *[None] * 4, view, view, view]
    assert_fits(quantising.quantising_calls(job, tuple(views), hardware=True))
