"""Every shipped Hopper configuration compiles for sm_90a here, without a GPU, and its machine code is as recorded.

What is recorded was read from Triton 3.6.0's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.6")
aot = pytest.importorskip("tilewise.backends.hopper.aot")
configs = pytest.importorskip("tilewise.backends.hopper.configs")

SMEM_LIMIT = 227 * 1024
FORWARD, BACKWARD, KEYS, QUERIES = "forward", "backward", "key gradients", "query gradient"


class Recorded(NamedTuple):
    """One configuration: its kernel, what makes the problem special, and what its machine code holds.

    `hot_spills` counts local loads and stores in the innermost loops that multiply.
    """

    kernel: str
    features: dict[str, Any]
    registers: int
    hgmma: int
    hot_spills: int = 0
    fast: bool = False


def problem(**features: Any) -> AttentionProblem:
    """A problem of 4096 tokens a sequence; `d` is the head dim, `dv` that of V."""
    d = features.pop("d")
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "total_q": 8192,
        "total_k": 8192, "num_heads": 4, "num_kv_heads": 2, "head_dim": d, "head_dim_v": features.pop("dv", d),
        "scale": 1.0,
    }  # fmt: skip
    return AttentionProblem(**values | features)


CAUSAL: dict[str, Any] = {"causal": True}
WINDOW: dict[str, Any] = {"window_left": 100, "window_right": 50}
PACKED: dict[str, Any] = {"kind": "varlen"}
PAGED: dict[str, Any] = {"kind": "paged", "page_size": 64}
CAPPED: dict[str, Any] = {"softcap": 30.0}
FIXED: dict[str, Any] = {"deterministic": True}
# The forward's loops keep everything in registers. The fused backward's do not: dK, dV, S^T and dP^T take 192 of 240,
# and at D=256 dV (or dK), S^T and two blocks of dQ 224; what spills there are addresses of operands.
RECORDS: tuple[Recorded, ...] = (
    Recorded(FORWARD, {"d": 64}, 128, 72, fast=True),
    Recorded(FORWARD, {"d": 64, **CAUSAL}, 128, 108),
    Recorded(FORWARD, {"d": 128}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 128, **CAUSAL}, 168, 96, fast=True),
    Recorded(FORWARD, {"d": 192}, 168, 80),
    Recorded(FORWARD, {"d": 192, **CAUSAL}, 168, 120),
    Recorded(FORWARD, {"d": 256}, 168, 80),
    Recorded(FORWARD, {"d": 256, **CAUSAL}, 168, 120, fast=True),
    Recorded(FORWARD, {"d": 64, "seqlen_q": 1024, **CAUSAL}, 168, 72),
    Recorded(FORWARD, {"d": 192, "dv": 128, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 96, **CAUSAL, "has_sinks": True}, 168, 96),
    Recorded(FORWARD, {"d": 64, **WINDOW}, 168, 96),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **CAPPED}, 168, 72),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PACKED}, 128, 108),
    Recorded(FORWARD, {"d": 128, **WINDOW}, 168, 128),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **CAPPED}, 168, 96),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **PACKED}, 168, 96),
    Recorded(FORWARD, {"d": 256, **WINDOW}, 168, 160),
    Recorded(FORWARD, {"d": 256, **CAUSAL, **CAPPED}, 168, 120),
    Recorded(FORWARD, {"d": 256, **CAUSAL, **PACKED}, 168, 120, hot_spills=2),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **CAPPED, **PACKED, "window_left": 100, "has_sinks": True}, 168, 128),
    Recorded(FORWARD, {"d": 128, **PACKED}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 64, **PAGED}, 128, 72),
    Recorded(FORWARD, {"d": 128, **PAGED}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 128, **PAGED, "page_size": 128, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 192, **PAGED, **CAUSAL}, 168, 120),
    Recorded(FORWARD, {"d": 256, **PAGED, "page_size": 256, **CAUSAL}, 168, 120),
    Recorded(BACKWARD, {"d": 64}, 168, 64, hot_spills=9),
    Recorded(BACKWARD, {"d": 64, **CAUSAL}, 168, 128, hot_spills=4, fast=True),
    Recorded(BACKWARD, {"d": 64, "seqlen_k": 4000, **CAUSAL}, 168, 128, hot_spills=1),
    Recorded(BACKWARD, {"d": 64, **WINDOW}, 168, 192, hot_spills=152),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **PACKED}, 168, 128, hot_spills=6),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **CAPPED}, 168, 128, hot_spills=97),
    Recorded(BACKWARD, {"d": 64, **FIXED, **CAUSAL}, 168, 128, hot_spills=14),
    Recorded(KEYS, {"d": 64, **CAUSAL}, 168, 96, hot_spills=8),
    Recorded(QUERIES, {"d": 64}, 168, 32),
    Recorded(QUERIES, {"d": 64, **CAUSAL}, 168, 64),
    Recorded(QUERIES, {"d": 64, **WINDOW, **PACKED}, 168, 96),
    Recorded(BACKWARD, {"d": 128}, 168, 64, hot_spills=2, fast=True),
    Recorded(BACKWARD, {"d": 128, **CAUSAL}, 168, 128, hot_spills=16),
    Recorded(BACKWARD, {"d": 128, "seqlen_k": 4000, **CAUSAL}, 168, 128, hot_spills=22),
    Recorded(BACKWARD, {"d": 128, **WINDOW}, 168, 192, hot_spills=55),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **PACKED}, 168, 128, hot_spills=31),
    Recorded(BACKWARD, {"d": 128, **CAPPED}, 168, 64, hot_spills=16, fast=True),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **CAPPED}, 168, 128, hot_spills=48),
    Recorded(BACKWARD, {"d": 128, **FIXED}, 168, 64, hot_spills=3, fast=True),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL}, 168, 128, hot_spills=12),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL, **PACKED}, 168, 128, hot_spills=23),
    Recorded(KEYS, {"d": 128, **CAUSAL}, 168, 96),
    Recorded(QUERIES, {"d": 128}, 168, 48, fast=True),
    Recorded(QUERIES, {"d": 128, **CAUSAL}, 168, 96),
    Recorded(QUERIES, {"d": 128, **WINDOW, **PACKED}, 168, 144, hot_spills=42),
    Recorded(BACKWARD, {"d": 192}, 168, 52, fast=True),
    Recorded(BACKWARD, {"d": 192, **CAUSAL}, 168, 80),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **CAUSAL}, 168, 68),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **FIXED, **CAUSAL, **PACKED}, 168, 68),
    Recorded(BACKWARD, {"d": 64, "dv": 128}, 168, 24),
    Recorded(BACKWARD, {"d": 256, "dv": 64, **CAUSAL}, 168, 72),
    Recorded(BACKWARD, {"d": 256}, 168, 56, hot_spills=35, fast=True),
    Recorded(BACKWARD, {"d": 256, **CAUSAL}, 168, 84, hot_spills=58),
    Recorded(BACKWARD, {"d": 256, "seqlen_k": 4000, **CAUSAL}, 168, 84, hot_spills=67),
    Recorded(BACKWARD, {"d": 256, **WINDOW}, 168, 112, hot_spills=111),
    Recorded(BACKWARD, {"d": 256, **CAUSAL, **CAPPED}, 168, 84, hot_spills=62),
    Recorded(BACKWARD, {"d": 256, **CAUSAL, **PACKED}, 168, 84, hot_spills=50),
    Recorded(BACKWARD, {"d": 256, **FIXED, **CAUSAL}, 168, 84, hot_spills=71),
    Recorded(KEYS, {"d": 192, "dv": 128, **CAUSAL}, 168, 48),
    Recorded(KEYS, {"d": 256, **CAUSAL}, 168, 60),
    Recorded(QUERIES, {"d": 192, "dv": 128, **CAUSAL}, 168, 112),
    Recorded(QUERIES, {"d": 256}, 168, 72, hot_spills=46),
    Recorded(QUERIES, {"d": 256, **CAUSAL}, 168, 144, hot_spills=134),
)


def compiled(record: Recorded) -> Any:
    """The kernel of a record."""
    described = problem(**record.features)
    compile_it: dict[str, Callable[[], Any]] = {
        FORWARD: lambda: aot.compile_forward(described),
        BACKWARD: lambda: aot.compile_backward(described),
        KEYS: lambda: aot.compile_backward(described, configs.split_config(configs.backward_config(described))),
        QUERIES: lambda: aot.compile_query_gradient(
            described, configs.split_config(configs.backward_config(described))
        ),
    }
    return compile_it[record.kernel]()


def name_of(record: Recorded) -> str:
    return record.kernel + " " + " ".join(f"{k}={v}" for k, v in record.features.items())


@pytest.mark.parametrize(
    "record",
    [pytest.param(r, id=name_of(r), marks=() if r.fast else pytest.mark.exhaustive) for r in RECORDS],
)
def test_machine_code(record: Recorded) -> None:
    found = aot.resources(compiled(record))
    assert not found.serialised, "ptxas waits after every wgmma"
    assert found.smem_bytes <= SMEM_LIMIT
    assert found.hgmma == record.hgmma
    assert found.registers == record.registers
    assert found.spills_in_hot_loops <= record.hot_spills


def test_spills_are_counted_in_hot_loops_only() -> None:
    """A loop is hot if it multiplies; straight code and other loops may spill."""
    lines = ["STL [R1], R2", ".L_x_1:", "HGMMA.64x64x16 R4", "LDL R3, [R1]", "@P0 BRA `(.L_x_1)"]
    lines += [".L_x_2:", "LDL R3, [R1]", "@P0 BRA `(.L_x_2)"]
    sass = "\n".join(line if line.startswith(".L") else f"        /*0000*/ {line} ;" for line in lines)
    assert aot._spills_in_hot_loops(sass) == 1
