"""The FP8 Hopper kernels compile for sm_90a here, without a GPU, and their machine code is as recorded.

What is recorded was read from Triton 3.6.0's output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hopper_spills import hold
from tilewise import device
from tilewise.problem import AttentionProblem

pytestmark = pytest.mark.slow

pytest.importorskip("triton", minversion="3.6")
aot = pytest.importorskip("hopper_aot")
fp8_launch = pytest.importorskip("tilewise.backends.hopper.fp8_launch")
launching = pytest.importorskip("tilewise.backends.gpu.launching")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
quantising = pytest.importorskip("tilewise.backends.triton.launch_quantising")

HOPPER = device.named("h200")
SMEM_LIMIT = 227 * 1024
E4M3 = torch.float8_e4m3fn


class Recorded(NamedTuple):
    """What makes a problem special, the wgmma its code holds, and its spills as in test_hopper_aot.py."""

    features: dict[str, Any]
    wgmma: int
    edge_spills: int = 0
    fast: bool = False


CAUSAL: dict[str, Any] = {"causal": True}
HALF: dict[str, Any] = {"dtype": torch.float16}
WINDOW: dict[str, Any] = {"window_left": 100, "window_right": 50}
PACKED: dict[str, Any] = {"kind": "varlen"}
BLOCKS: dict[str, Any] = {"scale_blocks": (128, 128, 128)}
RECORDS = (
    Recorded({"d": 64}, 36, fast=True),
    Recorded({"d": 64, **CAUSAL}, 54),
    Recorded({"d": 64, **WINDOW, **PACKED}, 48),
    Recorded({"d": 128}, 48, fast=True),
    # In the loop of tiles that the diagonal crosses, one or two of a block's; 914 -> 925 TFLOP/s at 16k all the same.
    Recorded({"d": 128, **CAUSAL}, 48, edge_spills=80, fast=True),
    Recorded({"d": 128, **WINDOW}, 64),
    Recorded({"d": 128, **CAUSAL, **PACKED, **BLOCKS, "has_sinks": True}, 48),
    Recorded({"d": 256}, 64, fast=True),
    Recorded({"d": 256, **CAUSAL}, 96, edge_spills=4),
    Recorded({"d": 256, **CAUSAL, **PACKED}, 96, edge_spills=2),
    # What test_hopper_records.py asks for beside all these, several choices in one. At D=256 a window alone spills 76
    # times at edges, and values with scales of blocks 162 times in hot loops.
    Recorded({"d": 64, **HALF, **PACKED, **BLOCKS}, 36),
    Recorded({"d": 64, **HALF, **WINDOW, **BLOCKS}, 48),
    Recorded({"d": 256, **HALF, **WINDOW, **BLOCKS}, 128, edge_spills=564),
    Recorded({"d": 128, **HALF, **BLOCKS}, 32),
    Recorded({"d": 128, **HALF, **PACKED}, 48),
)


def problem(d: int, **features: Any) -> AttentionProblem:
    """A problem of 4096 tokens a sequence."""
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "total_q": 8192,
        "total_k": 8192, "num_heads": 4, "num_kv_heads": 2, "head_dim": d, "head_dim_v": d, "scale": 1.0,
        "fp8": ("q", "k", "v"), "scale_blocks": (128, 128, None),
    }  # fmt: skip
    return AttentionProblem(**values | features)


def views(described: AttentionProblem) -> dict[str, Any]:
    """Contiguous operands, results and scratch memory."""
    made = fp8_launch.fp8_allocations(described)
    made |= {name: launching.Allocation.contiguous(s, E4M3) for name, s in fp8_launch.shapes_of(described).items()}
    small = launching.Allocation.contiguous
    made |= {f"{name}_scale": small((2, 4, 32), torch.float32) for name in "qkv"}
    if described.kind == "varlen":
        made |= {f"cu_seqlens_{name}": small((3,), torch.int32) for name in "qk"}
    if described.has_sinks:
        made["sinks"] = small((4,), torch.float32)
    return {name: allocation.view for name, allocation in made.items()}


def marked(record: Recorded) -> Any:
    """The ordinary run compiles some, the exhaustive one all of them."""
    return pytest.param(record, id=name_of(record), marks=() if record.fast else pytest.mark.exhaustive)


def name_of(record: Recorded) -> str:
    return " ".join(["fp8", *(f"{key}={value}" for key, value in record.features.items())])


@pytest.mark.parametrize("record", [marked(record) for record in RECORDS])
def test_machine_code(record: Recorded) -> None:
    described = problem(**record.features)
    calls = fp8_launch.fp8_calls(described, HOPPER, views(described))
    *others, forward = [compilation.compile_call(call, HOPPER, -1) for call in calls]
    assert len(others) == (2 if described.kind == "varlen" else 1)
    found = aot.resources(forward)
    assert found.hgmma == record.wgmma
    assert not found.serialised
    assert found.smem_bytes <= SMEM_LIMIT
    hold(name_of(record), found.local, record.edge_spills)


def test_every_conversion_of_p_is_a_hardware_one() -> None:
    """64 probabilities a thread and tile: 32 instructions that round two each, and no shuffle to become an operand."""
    described = problem(128)
    *_, forward = fp8_launch.fp8_calls(described, HOPPER, views(described))
    ptx = compilation.compile_call(forward, HOPPER, -1).asm["ptx"]
    # Three warpgroups, each with one loop and the tile after it.
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 3 * 2 * 32
    assert "prmt" not in ptx or ptx.count("shfl.sync.idx") == 0


@pytest.mark.parametrize(("head_dim", "rotation"), [(128, False), (128, True), (256, True)])
def test_quantising_spills_nothing(head_dim: int, rotation: bool) -> None:
    """Tiles are small so that all of it fits into registers."""
    job = quantising.Job("own", 1, 2, 4096, head_dim, "bhsd", 128, False, rotation)
    shape, small = (1, 2, 4096, head_dim), launching.Allocation.contiguous
    basis = {"signs": torch.float32, "sizes": torch.int32, "norms": torch.float32, "directions": torch.bfloat16}
    made = {
        "x": small(shape, torch.bfloat16),
        "data": small(shape, torch.uint8),
        "scale": small((1, 2, 32), torch.float32),
    }
    made |= {name: small((head_dim,), dtype) for name, dtype in basis.items() if rotation}
    found = tuple(tuple(made[name].view) if name in made else None for name in quantising.NAMES)
    (call,) = quantising.quantising_calls(job, found, hardware=True)
    resources = aot.resources(compilation.compile_call(call, HOPPER, -1))
    assert resources.spill_bytes == 0
