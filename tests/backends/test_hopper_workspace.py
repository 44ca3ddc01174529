"""The backward's workspace: nobody lies in another one's part, and addresses are as aligned as kernels are told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.problem import AttentionProblem

pytest.importorskip("triton", minversion="3.6")
offline = pytest.importorskip("tilewise.backends.gpu.offline")
launch = pytest.importorskip("tilewise.backends.hopper.launch")
symbols = pytest.importorskip("tilewise.backends.gpu.symbols")

H200 = device.named("h200")
BASE = AttentionProblem(
    kind="dense", dtype=torch.bfloat16, batch=3, seqlen_q=0, seqlen_k=0, total_q=0, total_k=0, num_heads=6,
    num_kv_heads=6, head_dim=64, head_dim_v=64, scale=1.0, needs_grad=True,
)  # fmt: skip


def problems() -> Iterator[AttentionProblem]:
    lengths = ((1, 1), (65, 130), (1000, 1024), (1024, 1024), (16384, 4096), (4096, 16384))
    kinds: tuple[dict[str, Any], ...] = ({}, {"num_kv_heads": 2}, {"kind": "varlen"}, {"batch": 1, "num_heads": 5})
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_left": 70, "window_right": 3})
    options: tuple[dict[str, Any], ...] = ({}, {"deterministic": True}, {"softcap": 30.0})
    for (q, k), kind, mask, option, d in itertools.product(lengths, kinds, masks, options, (64, 128, 256)):
        heads = kind.get("num_heads", 6)
        sizes = {"seqlen_q": q, "seqlen_k": k, "num_kv_heads": heads, "head_dim": d, "head_dim_v": d}
        made = replace(BASE, **{**sizes, **kind, **mask, **option})
        yield replace(made, total_q=made.batch * q, total_k=made.batch * k)


def sections_of(plan: Any) -> dict[str, tuple[Any, int]]:
    """Where each begins, and its words."""
    found = {name: (plan.at(name), words) for name, (words, _) in plan.sections.items()}
    return {name: (address, words) for name, (address, words) in found.items() if address is not None}


@pytest.mark.parametrize("num_sms", [132, 78])
def test_sections_do_not_overlap(num_sms: int) -> None:
    seen: set[str] = set()
    for problem in problems():
        plan = launch.backward_plan(problem, replace(H200, num_sms=num_sms))
        sections = sections_of(plan)
        seen |= set(sections)
        end = 0
        for name, (address, words) in sorted(sections.items(), key=lambda section: section[1][0].offset):
            assert address.offset >= end, (name, problem)
            end = address.offset + 4 * words
        (words_held,) = plan.workspace.shape
        assert end <= words_held * plan.workspace.dtype.itemsize, problem
    assert seen == set(plan.sections)


def test_addresses_are_aligned_as_they_say() -> None:
    for problem in problems():
        views = offline.operand_views(problem, packed_queries=True)
        views |= {name: made.view for name, made in launch.result_allocations(problem).items()}
        views["dout"] = views["out"]
        views |= {name: made.view for name, made in launch.gradient_allocations(problem).items()}
        for call in launch.backward_calls(launch.backward_plan(problem, H200), views):
            for argument in call.arguments.values():
                address = argument.address if isinstance(argument, symbols.Tile) else argument
                if isinstance(address, symbols.Address) and address.aligned:
                    assert address.offset % symbols.ALIGNMENT == 0, (call.kernel, problem)


def test_only_rows_whose_units_wait_for_bounds_start_early() -> None:
    """What starts while the kernel before it ends waits for that one itself: of these kernels one does."""
    for problem in problems():
        plan = launch.backward_plan(problem, H200)
        views = offline.operand_views(problem, packed_queries=True)
        views |= {name: made.view for name, made in launch.result_allocations(problem).items()}
        views["dout"] = views["out"]
        views |= {name: made.view for name, made in launch.gradient_allocations(problem).items()}
        for call in launch.backward_calls(plan, views):
            waits = call.arguments.get("bounds_ptr") is not None and "units_ptr" in call.arguments
            assert call.overlaps == waits, (call.kernel, problem)
