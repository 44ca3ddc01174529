"""The Hopper decode kernel compiles for sm_90a here, without a GPU, and its machine code is as recorded."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hopper_spills import hold
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.6")
aot = pytest.importorskip("hopper_aot")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
offline = pytest.importorskip("tilewise.backends.hopper.offline")
gpu_offline = pytest.importorskip("tilewise.backends.gpu.offline")
launch = pytest.importorskip("tilewise.backends.hopper.launch")
launch_decode = pytest.importorskip("tilewise.backends.hopper.launch_decode")

SMEM_LIMIT = 227 * 1024


class Recorded(NamedTuple):
    """One configuration: what makes the problem special, and what its machine code holds."""

    features: dict[str, Any]
    hgmma: int
    fast: bool = False


PAGED: dict[str, Any] = {"kind": "paged", "page_size": 64}
FP8: dict[str, Any] = {**PAGED, "fp8": ("k", "v")}
SEVERAL: dict[str, Any] = {"seqlen_q": 4, "causal": True}
HALF: dict[str, Any] = {"dtype": torch.float16}
PACKED: dict[str, Any] = {"kind": "varlen"}
CAPPED: dict[str, Any] = {"softcap": 30.0}
RECORDS = {
    "d128": Recorded({}, 32, fast=True),
    "d64": Recorded({"d": 64}, 16),
    "d256": Recorded({"d": 256}, 32),
    "fp16": Recorded({"dtype": torch.float16}, 32),
    "unequal": Recorded({"d": 192, "head_dim_v": 128}, 24),
    "64 rows": Recorded({"num_kv_heads": 2, **SEVERAL}, 16),
    "32 rows, d256": Recorded({"num_kv_heads": 4, "d": 256, **SEVERAL}, 32),
    "e4m3, 64 rows": Recorded({**FP8, "num_kv_heads": 2, **SEVERAL}, 16),
    "e4m3, 32 rows, d256": Recorded({**FP8, "num_kv_heads": 4, "d": 256, **SEVERAL}, 32),
    "everything": Recorded({"softcap": 30.0, "has_sinks": True, "window_left": 999, **SEVERAL}, 32),
    "packed": Recorded({"kind": "varlen", **SEVERAL}, 32),
    "pages of 8": Recorded({**PAGED, "page_size": 8}, 32),
    "pages of 16": Recorded({**PAGED, "page_size": 16}, 32),
    "pages of 64": Recorded(PAGED, 32, fast=True),
    "one sequence in pages": Recorded({**PAGED, "batch": 1}, 32),
    "two sequences in pages": Recorded({**PAGED, "batch": 2}, 32),
    "four sequences in pages": Recorded({**PAGED, "batch": 4}, 32),
    "several tokens from pages": Recorded({**PAGED, **SEVERAL}, 32),
    "e4m3 pages": Recorded(FP8, 64, fast=True),
    "e4m3 pages of 16, d64": Recorded({**FP8, "page_size": 16, "d": 64}, 16),
    "e4m3, d256": Recorded({**FP8, "d": 256}, 64),
    "e4m3, everything": Recorded({**FP8, "softcap": 30.0, "has_sinks": True, "window_left": 999, **SEVERAL}, 32),
    # What test_hopper_records.py asks for beside all these, several choices in one.
    "fp16, e4m3 pages of 128, 16 rows": Recorded(
        {"d": 64, **HALF, **FP8, "page_size": 128, **CAPPED, "window_left": 999, "num_kv_heads": 2}, 32
    ),
    "fp16, packed, everything, d256": Recorded(
        {"d": 256, **HALF, **PACKED, **CAPPED, **SEVERAL, "window_left": 999, "batch": 2}, 32
    ),
    "fp16, e4m3 pages of 8, 16 rows, d256": Recorded(
        {"d": 256, **HALF, **FP8, "page_size": 8, **CAPPED, "num_kv_heads": 2}, 32
    ),
    "fp16, e4m3 pages of 8, 32 rows": Recorded(
        {"d": 64, **HALF, **FP8, "page_size": 8, **SEVERAL, "num_kv_heads": 4}, 16
    ),
    "e4m3 pages of 16, 32 rows, unequal": Recorded(
        {"d": 192, "head_dim_v": 128, **FP8, "page_size": 16, **SEVERAL, "window_left": 999, "num_kv_heads": 4}, 24
    ),
    "one sequence in pages of 8, d256": Recorded({"d": 256, **PAGED, "page_size": 8, "batch": 1}, 32),
    "four sequences in pages of 16, d256": Recorded({"d": 256, **PAGED, "page_size": 16, "batch": 4}, 32),
    "e4m3 pages of 32, unequal": Recorded({"d": 192, "head_dim_v": 128, **FP8, "page_size": 32}, 48),
    "pages of 32, 32 rows": Recorded({"d": 64, **PAGED, "page_size": 32, **SEVERAL, "num_kv_heads": 4}, 16),
    "pages of 128, d64": Recorded({"d": 64, **PAGED, "page_size": 128}, 16),
    "pages of 32, d256": Recorded({"d": 256, **PAGED, "page_size": 32}, 32),
    "pages of 64, d256": Recorded({"d": 256, **PAGED}, 32),
    "e4m3 pages of 32, 16 rows, d256": Recorded({"d": 256, **FP8, "page_size": 32, "num_kv_heads": 2}, 32),
    "e4m3, 16 rows, d64": Recorded({"d": 64, **FP8, **SEVERAL}, 32),
}


def described(**features: Any) -> AttentionProblem:
    """16 sequences of 8192 keys, one query each; `d` is the head dim."""
    d, batch, seqlen_q = features.pop("d", 128), features.get("batch", 16), features.get("seqlen_q", 1)
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 16, "seqlen_q": 1, "seqlen_k": 8192,
        "total_q": batch * seqlen_q, "total_k": batch * 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": d,
        "head_dim_v": d, "scale": 1.0,
    }  # fmt: skip
    return AttentionProblem(**values | features)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, id=n, marks=[] if r.fast else [pytest.mark.exhaustive]) for n, r in RECORDS.items()],
)
def test_machine_code_is_as_recorded(name: str) -> None:
    record = RECORDS[name]
    call = offline.calls_of(described(**record.features), aot.HOPPER)[-1]
    found = aot.resources(compilation.compile_call(call, aot.HOPPER, -1))
    assert found.hgmma == record.hgmma
    assert not found.serialised
    hold(f"decode {name}", found.local, 0)
    assert found.smem_bytes <= SMEM_LIMIT


def test_tokens_far_apart_are_found_by_64_bits() -> None:
    """Tokens outermost in memory, 2^29 elements apart: the fifth one is past what 32 bits count to."""
    problem = described(batch=32768, seqlen_q=8, num_heads=32, num_kv_heads=8)
    views = gpu_offline.operand_views(problem, packed_queries=False)
    views |= {name: made.view for name, made in launch.result_allocations(problem).items()}
    (near,) = launch_decode.decode_calls(problem, aot.HOPPER, views)
    views["q"] = views["q"]._replace(strides=(32 * 128, 128, 1 << 29, 1))
    (far,) = launch_decode.decode_calls(problem, aot.HOPPER, views)
    kinds = {name: compilation.types_of(call).signature[0] for name, call in (("near", near), ("far", far))}
    assert kinds == {"near": ("*bf16", "i32", "i32", "i32"), "far": ("*bf16", "i32", "i32", "i64")}
    found = aot.resources(compilation.compile_call(far, aot.HOPPER, -1))
    assert not found.serialised
    hold("decode, tokens far apart", found.local, 0)
