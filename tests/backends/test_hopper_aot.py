"""Every shipped Hopper configuration compiles for sm_90a here, without a GPU, and its machine code is as recorded.

What is recorded was read from Triton 3.6.0's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from hopper_spills import hold, is_recorded
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.6")
aot = pytest.importorskip("hopper_aot")

SMEM_LIMIT = 227 * 1024
FORWARD, BACKWARD, PIECES, QUERIES = "forward", "backward", "pieces", "query gradient"


class Recorded(NamedTuple):
    """One configuration: its kernel, what makes the problem special, and what its machine code holds.

    Spills in hot loops are in hopper_spills.py; `edge_spills` are those in the loops over tiles that are not whole.
    """

    kernel: str
    features: dict[str, Any]
    registers: int
    hgmma: int
    edge_spills: int = 0
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
HALF: dict[str, Any] = {"dtype": torch.float16}
# Up to 128 columns dK, dV, S^T and dP^T of the backward take 192 of 240 registers, and those of dQ at D=256 with S and
# dP as many. What spills are addresses.
# Where heads are prepared beside the main kernel, its loops spill a few addresses more, and D=64 causal, N=1024, is 8 %
# faster: 303 -> 328 TFLOP/s (with 7 spills instead of 13 and the statistics' 130 elsewhere it was 294 -> 314). With dQ
# finished there as well, D=128 causal, N=8192, is 4 % faster: 501 -> 521.
# In fp16 and under a softcap sums in fixed point mark rows that are not finite, off the way that whole tiles take.
ALONE: dict[str, Any] = {"num_kv_heads": 4, "seqlen_k": 1024}
FINISHED: dict[str, Any] = {"num_kv_heads": 4, "seqlen_k": 8192}
SHORT: dict[str, Any] = {"seqlen_q": 1024, "seqlen_k": 1024}
# 320 tiles, of which 56 are cut.
CUT: dict[str, Any] = {"num_heads": 5, "num_kv_heads": 5, "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192}
RECORDS: tuple[Recorded, ...] = (
    Recorded(FORWARD, {"d": 64}, 128, 72, fast=True),
    Recorded(FORWARD, {"d": 64, **HALF}, 128, 72),
    Recorded(FORWARD, {"d": 64, **PACKED}, 128, 72),
    Recorded(FORWARD, {"d": 64, "seqlen_k": 8192, **CAUSAL}, 128, 108),
    Recorded(FORWARD, {"d": 64, "seqlen_k": 8192, **CAUSAL, **HALF}, 128, 108),
    Recorded(FORWARD, {"d": 64, "seqlen_k": 1024}, 80, 32, fast=True),
    Recorded(FORWARD, {"d": 64, **CAUSAL}, 80, 32, fast=True),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **HALF}, 80, 32),
    Recorded(FORWARD, {"d": 128}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 128, **CAUSAL}, 168, 96, fast=True),
    Recorded(FORWARD, {"d": 128, "seqlen_k": 2048}, 168, 64),
    Recorded(FORWARD, {"d": 128, "seqlen_k": 2048, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 192}, 168, 80),
    Recorded(FORWARD, {"d": 192, **CAUSAL}, 168, 120),
    Recorded(FORWARD, {"d": 256}, 168, 80),
    Recorded(FORWARD, {"d": 256, **CAUSAL}, 168, 120, edge_spills=1, fast=True),
    Recorded(FORWARD, {"d": 256, **CAUSAL, **HALF}, 168, 120, edge_spills=1),
    Recorded(FORWARD, {"d": 256, "dv": 64, **CAUSAL}, 168, 120),
    Recorded(FORWARD, {"d": 256, **CAPPED}, 168, 80),
    Recorded(FORWARD, {"d": 64, "batch": 8, **CAUSAL, **PACKED}, 80, 32),
    Recorded(FORWARD, {"d": 64, "batch": 32, **PAGED}, 80, 32),
    Recorded(FORWARD, {"d": 192, "dv": 128, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 96, **CAUSAL, "has_sinks": True}, 168, 96),
    Recorded(FORWARD, {"d": 64, **WINDOW}, 80, 48),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **CAPPED}, 80, 32),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PACKED}, 128, 108),
    Recorded(FORWARD, {"d": 128, **WINDOW}, 168, 128),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **CAPPED}, 168, 96),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **PACKED}, 168, 96),
    Recorded(FORWARD, {"d": 256, **WINDOW}, 168, 160, edge_spills=2),
    Recorded(FORWARD, {"d": 256, **CAUSAL, **CAPPED}, 168, 120, edge_spills=1),
    Recorded(FORWARD, {"d": 256, **CAUSAL, **PACKED}, 168, 120),
    Recorded(FORWARD, {"d": 128, **CAUSAL, **CAPPED, **PACKED, "window_left": 100, "has_sinks": True}, 168, 128),
    Recorded(FORWARD, {"d": 128, **PACKED}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 64, **PAGED}, 128, 72),
    Recorded(FORWARD, {"d": 128, **PAGED}, 168, 64, fast=True),
    Recorded(FORWARD, {"d": 128, **PAGED, "page_size": 128, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 192, **PAGED, **CAUSAL}, 168, 120),
    Recorded(FORWARD, {"d": 256, **PAGED, "page_size": 256, **CAUSAL}, 168, 120),
    Recorded(BACKWARD, {"d": 64}, 168, 64),
    Recorded(BACKWARD, {"d": 64, **CAUSAL}, 168, 128, edge_spills=4, fast=True),
    Recorded(BACKWARD, {"d": 64, "seqlen_k": 4000, **CAUSAL}, 168, 128, edge_spills=1),
    Recorded(BACKWARD, {"d": 64, **WINDOW}, 168, 192, edge_spills=152),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **PACKED}, 168, 128),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **PACKED, **ALONE}, 168, 128, edge_spills=2),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **CAPPED}, 168, 128, edge_spills=56),
    Recorded(BACKWARD, {"d": 64, **FIXED, **CAUSAL}, 168, 128),
    Recorded(BACKWARD, {"d": 64, **ALONE}, 168, 64),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, **ALONE}, 168, 128, edge_spills=2, fast=True),
    Recorded(BACKWARD, {"d": 64, **CAUSAL, "num_kv_heads": 4}, 168, 128, edge_spills=3),
    Recorded(BACKWARD, {"d": 64, **FIXED, **CAUSAL, **ALONE}, 168, 128),
    Recorded(BACKWARD, {"d": 128, **ALONE}, 168, 64),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **ALONE}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **ALONE, **SHORT}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **FINISHED}, 168, 132, edge_spills=3),
    Recorded(BACKWARD, {"d": 128}, 168, 64, fast=True),
    Recorded(BACKWARD, {"d": 128, **CAUSAL}, 168, 132),
    Recorded(BACKWARD, {"d": 128, "seqlen_k": 4000, **CAUSAL}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **WINDOW}, 168, 196),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **PACKED}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **PACKED, **ALONE}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **CAPPED}, 168, 64, fast=True),
    Recorded(BACKWARD, {"d": 128, **CAUSAL, **CAPPED}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **FIXED}, 168, 64, fast=True),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL, **ALONE}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL, **PACKED}, 168, 132),
    Recorded(PIECES, {"d": 64, **CUT}, 168, 64),
    Recorded(PIECES, {"d": 128, **CUT}, 168, 64, fast=True),
    Recorded(PIECES, {"d": 128, **HALF, **CUT}, 168, 64),
    Recorded(PIECES, {"d": 64, **FIXED, **CUT}, 168, 64),
    Recorded(PIECES, {"d": 128, **FIXED, **CUT}, 168, 64),
    Recorded(BACKWARD, {"d": 64, **FIXED, **CAUSAL, **ALONE, **HALF}, 168, 128),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL, **HALF}, 168, 132),
    Recorded(BACKWARD, {"d": 128, **FIXED, **CAUSAL, **CAPPED}, 168, 132, edge_spills=4),
    Recorded(BACKWARD, {"d": 192}, 168, 40, fast=True),
    Recorded(BACKWARD, {"d": 192, **CAUSAL}, 168, 60),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **CAUSAL}, 168, 48),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **CAUSAL, **PACKED}, 168, 48),
    Recorded(BACKWARD, {"d": 64, "dv": 128}, 168, 64),
    Recorded(BACKWARD, {"d": 256, "dv": 64, **CAUSAL}, 168, 48),
    Recorded(BACKWARD, {"d": 256}, 168, 40),
    Recorded(BACKWARD, {"d": 256, **CAUSAL}, 168, 60, fast=True),
    Recorded(BACKWARD, {"d": 256, "seqlen_k": 4000, **CAUSAL}, 168, 60),
    Recorded(BACKWARD, {"d": 256, **WINDOW}, 168, 80),
    Recorded(BACKWARD, {"d": 256, **CAUSAL, **CAPPED}, 168, 60),
    Recorded(BACKWARD, {"d": 256, **CAUSAL, **PACKED}, 168, 60),
    Recorded(QUERIES, {"d": 192}, 168, 64),
    Recorded(QUERIES, {"d": 192, **CAUSAL}, 168, 128),
    Recorded(QUERIES, {"d": 192, "dv": 128, **CAUSAL}, 168, 112),
    Recorded(QUERIES, {"d": 192, "dv": 128, **CAUSAL, **PACKED}, 168, 112),
    Recorded(QUERIES, {"d": 256}, 168, 72, fast=True),
    Recorded(QUERIES, {"d": 256, **CAUSAL}, 168, 144),
    # What test_hopper_records.py asks for beside all these, several choices in one.
    Recorded(FORWARD, {"d": 192, **HALF, **WINDOW, **PACKED, **CAPPED, **SHORT}, 168, 160),
    Recorded(FORWARD, {"d": 64, "dv": 128, **HALF, **PAGED, "page_size": 128, **CAPPED, **SHORT}, 168, 48),
    Recorded(FORWARD, {"d": 64, **HALF, **PACKED, **CAPPED, **SHORT}, 80, 32),
    Recorded(FORWARD, {"d": 64, **HALF, **SHORT}, 80, 32),
    Recorded(FORWARD, {"d": 192, **PACKED, "has_sinks": True}, 168, 80),
    Recorded(FORWARD, {"d": 192, **HALF}, 168, 80),
    Recorded(FORWARD, {"d": 128, **HALF}, 168, 64),
    Recorded(FORWARD, {"d": 128, **HALF, **PACKED}, 168, 64),
    Recorded(FORWARD, {"d": 64, **CAUSAL, "window_left": 2000}, 80, 48),
    Recorded(FORWARD, {"d": 64, **PACKED, "batch": 8}, 80, 32),
    Recorded(FORWARD, {"d": 64, "dv": 128, **HALF, **CAUSAL, **PAGED, **SHORT}, 168, 72),
    Recorded(FORWARD, {"d": 256, "dv": 64, **HALF, **SHORT}, 168, 80),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PAGED, **SHORT}, 128, 108),
    Recorded(FORWARD, {"d": 64, **PAGED, "page_size": 128, **SHORT}, 128, 72),
    Recorded(FORWARD, {"d": 64, **HALF, **PACKED, **SHORT}, 128, 72),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PACKED, **CAPPED, **SHORT}, 80, 32),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PAGED, "page_size": 128, **SHORT}, 128, 108),
    Recorded(FORWARD, {"d": 64, **HALF, **CAUSAL, **PACKED, **SHORT}, 128, 108),
    Recorded(FORWARD, {"d": 64, **CAUSAL, **PAGED, **CAPPED, **SHORT}, 80, 32),
    Recorded(FORWARD, {"d": 64, **HALF, **CAPPED, **SHORT}, 80, 32),
    Recorded(FORWARD, {"d": 64, "batch": 8, **HALF, **CAUSAL, **PACKED, "has_sinks": True}, 80, 32),
    Recorded(FORWARD, {"d": 64, **HALF, **PAGED, "page_size": 128, **SHORT}, 128, 72),
    Recorded(FORWARD, {"d": 64, **HALF, **WINDOW, **PAGED, **SHORT}, 80, 48),
    Recorded(FORWARD, {"d": 64, **HALF, **CAUSAL, **PAGED, "page_size": 128, **SHORT}, 128, 108),
    Recorded(FORWARD, {"d": 64, "dv": 128, **HALF}, 168, 48),
    Recorded(FORWARD, {"d": 64, "dv": 128, **HALF, **PACKED}, 168, 48),
    Recorded(FORWARD, {"d": 128, **HALF, **CAUSAL}, 168, 96),
    Recorded(FORWARD, {"d": 128, **HALF, **CAUSAL, **PACKED}, 168, 96),
    Recorded(FORWARD, {"d": 192, "dv": 128, **HALF, **PAGED}, 168, 64),
    Recorded(FORWARD, {"d": 192, **HALF, **CAUSAL}, 168, 120),
    Recorded(BACKWARD, {"d": 256, "dv": 64, **HALF, **PACKED, **CAPPED, **SHORT}, 168, 48),
    Recorded(BACKWARD, {"d": 192, **HALF, **WINDOW, **PACKED, **CAPPED, **SHORT}, 168, 80),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **HALF, **CAPPED, **SHORT}, 168, 32),
    Recorded(BACKWARD, {"d": 64, **HALF, **SHORT}, 168, 64),
    Recorded(BACKWARD, {"d": 96, **HALF, **SHORT}, 168, 64),
    Recorded(BACKWARD, {"d": 256, **HALF, **SHORT}, 168, 40),
    Recorded(BACKWARD, {"d": 192, "dv": 128, **WINDOW, **SHORT}, 168, 64),
    Recorded(BACKWARD, {"d": 256, "dv": 64, **WINDOW, **SHORT}, 168, 68),
    Recorded(QUERIES, {"d": 256, "dv": 64, **SHORT}, 168, 48),
    Recorded(QUERIES, {"d": 192, **HALF, **WINDOW, **PACKED, **CAPPED, **SHORT}, 168, 192),
    Recorded(QUERIES, {"d": 256, **HALF, **WINDOW, **PACKED, **CAPPED, **SHORT}, 168, 216, edge_spills=84),
    Recorded(QUERIES, {"d": 256, "dv": 64, **HALF, **CAUSAL, **PACKED, **CAPPED, **SHORT}, 168, 96),
    Recorded(QUERIES, {"d": 192, "dv": 128, **HALF, **CAPPED, **SHORT}, 168, 56),
    Recorded(QUERIES, {"d": 192, "dv": 128, **WINDOW, **SHORT}, 168, 168),
    Recorded(QUERIES, {"d": 256, "dv": 64, **WINDOW, **SHORT}, 168, 144),
)


def compiled(record: Recorded) -> Any:
    """The kernel of a record."""
    described = problem(**record.features)
    compile_it: dict[str, Callable[[], Any]] = {
        FORWARD: lambda: aot.compile_forward(described),
        BACKWARD: lambda: aot.compile_backward(described),
        PIECES: lambda: aot.compile_pieces(described),
        QUERIES: lambda: aot.compile_query_gradient(described),
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
    assert found.registers == record.registers or not is_recorded()
    hold(name_of(record), found.local, record.edge_spills)


@pytest.mark.parametrize(
    "features",
    [{"d": 128, **CAUSAL, "has_sinks": True}, {"d": 64, **CAUSAL, **PACKED}, {"d": 64, **CAUSAL, "window_left": 2000}],
    ids=["d128 sinks", "d64 packed", "d64 window"],
)
def test_lost_rows_get_a_kernel_that_overlaps_the_forward(features: dict[str, Any]) -> None:
    """It waits for the forward's results before it reads any, and what it computes is not one wgmma after the other."""
    kernel = aot.compile_again(problem(**features))
    found = aot.resources(kernel)
    assert not found.serialised
    assert found.hgmma > 0
    hold("again", found.local, 0)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.launch_pdl
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
    assert "griddepcontrol.launch_dependents" in aot.compile_forward(problem(**features)).asm["ptx"]


@pytest.mark.parametrize(
    ("features", "spills"), [({"d": 192}, 0), ({"d": 192, **PACKED, "has_sinks": True}, 19)], ids=["dense", "packed"]
)
def test_lost_rows_of_192_columns_spill_as_recorded(features: dict[str, Any], spills: int) -> None:
    """O, S and P take more than the 255 registers of a thread; the kernel nearly never computes anything."""
    found = aot.resources(aot.compile_again(problem(**features)))
    assert not found.serialised
    assert found.local.hot == spills or not is_recorded()
