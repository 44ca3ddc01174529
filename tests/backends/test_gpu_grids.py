"""Grids have room for many sequences and heads: 2^31 - 1 programs along their first side, 65535 along the others.

Whatever the Hopper backend takes, it can describe: no call is outside of what the driver and TMA allow. What a forecast
says of Triton's kernels is what runs.
"""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.backends.hopper import BACKEND
from tilewise.backends.triton import BACKEND as TRITON
from tilewise.problem import AttentionProblem
from tilewise.validation import tensors

pytest.importorskip("triton", minversion="3.6")
quantising = pytest.importorskip("tilewise.backends.triton.quantising")
launch = pytest.importorskip("tilewise.backends.hopper.launch")
triton_launch = pytest.importorskip("tilewise.backends.triton.launch")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
symbols = pytest.importorskip("tilewise.backends.gpu.symbols")

HOPPER = device.named("h200")
# More than a side of a grid but the first, as windows of images or short packed sequences are.
MANY = 70_000
PLAIN = AttentionProblem(
    kind="dense", dtype=torch.bfloat16, batch=MANY, seqlen_q=80, seqlen_k=100, total_q=80 * MANY, total_k=100 * MANY,
    num_heads=2, num_kv_heads=2, head_dim=64, head_dim_v=64, scale=1.0, needs_grad=True,
)  # fmt: skip
MANY_HEADS: dict[str, Any] = {"batch": 2, "num_heads": MANY, "num_kv_heads": MANY, "total_q": 160, "total_k": 200}
PROBLEMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "many heads": MANY_HEADS,
    "fp8, many heads": {**MANY_HEADS, "needs_grad": False, "fp8": ("q", "k", "v")},
    "deterministic": {"deterministic": True, "causal": True},
    "wide": {"head_dim": 256, "head_dim_v": 256},
    "512 columns": {"head_dim": 512, "head_dim_v": 512},
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
    assert_fits(importlib.import_module(f"tilewise.backends.{package}.launch").calls_of(problem, HOPPER))


@pytest.mark.parametrize("mode", ["own", "shared"])
@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_of_quantising(mode: str, layout: str) -> None:
    job = quantising.Job(mode, MANY, 2, 300, 64, layout, 128 if mode == "own" else None, False, False, True)
    view = ((300 * 128, 64, 128, 1), torch.bfloat16, True)
    views = [view, ((1,), torch.int32, True) if layout == "packed" else None, *[None] * 4, view, view, view]
    assert_fits(quantising.quantising_calls(job, tuple(views)))


LENGTHS = (1, 2, 63, 64, 65, 128, 129, 255, 256, 300, 512, 1000, 1024, 1280, 2048, 4096, 4097, 8192, 16384, 1 << 20)
# Bytes of q, k, v and their like that a GPU can have.
MEMORY = 140e9


def drawn(draw: random.Random) -> AttentionProblem:
    kind: Any = draw.choice(("dense", "varlen", "paged"))
    batch, keys, group = draw.choice((1, 2, 5, 16, 257)), draw.choice((1, 2, 3, 8)), draw.choice((1, 1, 2, 3, 4, 8, 32))
    seqlen_q, seqlen_k = draw.choice(LENGTHS), draw.choice(LENGTHS)
    d = draw.choice((40, 64, 72, 96, 128, 160, 192, 256, 392, 512))
    page_size = draw.choice((8, 16, 64, 128, 192)) if kind == "paged" else None
    page_rows = page_size or 1
    fp8 = draw.choice(((), (), (), ("q", "k", "v"), ("k", "v")))
    blocks: Any = draw.choice(((None,) * 3, (128,) * 3)) if fp8 and page_size is None else (None,) * 3
    return AttentionProblem(
        kind=kind, dtype=draw.choice((torch.float16, torch.bfloat16)), batch=batch, seqlen_q=seqlen_q,
        seqlen_k=seqlen_k, total_q=batch * seqlen_q, total_k=batch * -(-seqlen_k // page_rows) * page_rows,
        num_heads=group * keys, num_kv_heads=keys, head_dim=d, head_dim_v=draw.choice((d, d, 64, 128, 256, 264)),
        scale=0.1,
        causal=draw.random() < 0.5, window_left=draw.choice((None, None, 0, 1000)),
        window_right=draw.choice((None, 3, -2)), softcap=draw.choice((None, None, 20.0)),
        has_sinks=draw.random() < 0.3, page_size=page_size,
        layout=draw.choice(("bhsd", "bshd")) if kind == "dense" else "bhsd", deterministic=draw.random() < 0.3,
        needs_grad=draw.random() < 0.5 and not fp8, fp8=fp8, scale_blocks=blocks,
    )  # fmt: skip


def assert_addressable(tile: Any) -> None:
    """What cuTensorMapEncodeTiled asks for."""
    itemsize = tile.address.dtype.itemsize
    assert all(0 < size < 2**31 for size in tile.shape)
    assert all(0 < stride * itemsize < 2**40 and stride * itemsize % 16 == 0 for stride in tile.strides[:-1])
    assert all(side <= 256 for side in tile.block)
    assert len(tile.shape) <= 5


def test_of_whatever_is_taken() -> None:
    draw, taken = random.Random(7), 0
    for _ in range(3000):
        problem, chip = drawn(draw), replace(HOPPER, num_sms=draw.choice((132, 114, 78, 16)))
        rows = problem.total_q * problem.num_heads + problem.total_k * problem.num_kv_heads
        fits = 4 * rows * (problem.head_dim + problem.head_dim_v) <= MEMORY
        if not fits or BACKEND.supports(problem, chip) is not None:
            continue
        calls = launch.calls_of(problem, chip)
        assert_fits(calls)
        for call in calls:
            compilation.types_of(call)
            for argument in call.arguments.values():
                if isinstance(argument, symbols.Tile):
                    assert_addressable(argument)
        taken += 1
    assert taken > 1000


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("length", "batch"), [(100, 1), (128, 40), (300, 1), (300, 40), (4096, 1), (4096, 5)])
@pytest.mark.parametrize("chip", ["h200", "a100"])
def test_explain_names_the_tile_that_runs(dim: int, length: int, batch: int, chip: str) -> None:
    spec, tokens = device.named(chip), batch * length
    sizes: dict[str, Any] = {
        "seqlen_q": length,
        "seqlen_k": length,
        "total_q": tokens,
        "total_k": tokens,
        "batch": batch,
    }
    heads: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim, "num_heads": 32, "num_kv_heads": 32}
    for flags in ({}, {"causal": True}, {"window_left": 50}, {"softcap": 20.0}):
        asked = replace(PLAIN, needs_grad=False, **sizes, **heads, **flags)
        (call,) = triton_launch.calls_of(asked, spec)
        shape = TRITON.tile_shape(asked, spec)
        assert (shape.block_m, shape.block_n) == (call.arguments["BLOCK_M"], call.arguments["BLOCK_N"]), flags


def test_whatever_may_come_beside_q_has_a_type() -> None:
    """Sinks and a bias in fp64 were let in and found no kernel."""
    for name, (dtypes, _) in tensors.DTYPES.items():
        for dtype in dtypes:
            if dtype != torch.bool:  # read as bytes
                assert compilation.type_name(symbols.Address(name, dtype)).startswith("*")
