"""The order of the backward's tiles: how many heads are walked together, and how long SMs wait for the last ones."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.problem import AttentionProblem

pytest.importorskip("triton", minversion="3.6")
plans = pytest.importorskip("tilewise.backends.hopper.backward_plan")

H200 = device.named("h200")


def plan_of(seqlen: int, batch: int, d: int = 128, kv_heads: int = 8, **features: Any) -> Any:
    """32 query heads, causal."""
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen,
        "total_q": batch * seqlen, "total_k": batch * seqlen, "num_heads": 32, "num_kv_heads": kv_heads, "head_dim": d,
        "head_dim_v": d, "scale": 1.0, "causal": True, "needs_grad": True,
    }  # fmt: skip
    return plans.backward_plan(AttentionProblem(**values | features), H200)


def busy(plan: Any) -> float:
    """How much of the time SMs compute, if a tile takes its query tiles and two more."""
    sizes = plan.key_sizes
    free = [0] * H200.num_sms
    for first in range(0, sizes.num_items, sizes.items_per_wave):
        for block in range(sizes.num_blocks):
            steps = sizes.group_size * (sizes.row_tiles - block * plan.config.BLOCK_N // plan.config.BLOCK_M)
            for _ in range(min(sizes.items_per_wave, sizes.num_items - first)):
                heapq.heapreplace(free, free[0] + steps + 2)
    return sum(free) / len(free) / max(free)


@pytest.mark.parametrize("features", [{}, {"deterministic": True}, {"softcap": 30.0}], ids=["plain", "fixed", "capped"])
@pytest.mark.parametrize(("seqlen", "batch"), [(1024, 8), (2048, 4), (4096, 2)])
def test_a_wave_of_groups_is_a_round_of_ctas(seqlen: int, batch: int, features: dict[str, Any]) -> None:
    """N=4096: 128 tiles 585 TFLOP/s, twice as many 563, half as many 445, whose last tiles come too late."""
    plan = plan_of(seqlen, batch, **features)
    assert plan.wave_tiles == 128
    assert busy(plan) > 0.95
    half = plan._replace(key_sizes=plan.key_sizes._replace(items_per_wave=plan.key_sizes.items_per_wave // 2))
    assert busy(half) < 0.85


@pytest.mark.parametrize(
    ("seqlen", "batch", "features", "tiles"),
    [
        (8192, 1, {}, 256),
        (4096, 2, {"d": 64}, 512),
        (4096, 2, {"window_left": 512}, 256),
        (4096, 2, {"kv_heads": 32}, 128),  # heads alone, prepared beside the main kernel
        (4096, 2, {"causal": False}, 32),
    ],
    ids=["long", "d64", "window", "heads alone", "full"],
)
def test_other_waves_are_as_timed(seqlen: int, batch: int, features: dict[str, Any], tiles: int) -> None:
    assert plan_of(seqlen, batch, **features).wave_tiles == tiles
