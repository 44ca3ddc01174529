"""Tensors as Triton's kernels are told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import device as devices
from tilewise.backends.triton import BACKEND
from tilewise.problem import AttentionProblem
from tilewise.validation import tensors

pytest.importorskip("triton", minversion="3.6")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
arguments = pytest.importorskip("tilewise.backends.triton.arguments")
primitives = pytest.importorskip("tilewise.backends.triton.primitives")
configs = pytest.importorskip("tilewise.backends.triton.configs")
launch = pytest.importorskip("tilewise.backends.triton.launch")
planning = pytest.importorskip("tilewise.backends.triton.planning")
View = pytest.importorskip("tilewise.backends.gpu.launching").View
symbols = pytest.importorskip("tilewise.backends.gpu.symbols")
BF16 = torch.bfloat16


def problem_with(**changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "dtype": BF16, "batch": 2, "seqlen_q": 1, "seqlen_k": 300, "total_q": 2, "total_k": 600, "num_heads": 4,
        "num_kv_heads": 4, "head_dim": 128, "head_dim_v": 128, "scale": 0.1,
    }  # fmt: skip
    return AttentionProblem(**values | changes)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_seed_from_the_host_is_filled_in(shape: tuple[int, ...]) -> None:
    """All of its numbers, 64 bits each, without a copy that a graph could not capture."""
    seed = torch.arange(5)[: 5 if shape else 1].reshape(shape) + 2**40
    assert torch.equal(launch._filled(seed, torch.device("cpu")), seed)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("length", "batch"), [(100, 1), (128, 40), (300, 1), (300, 40), (4096, 1), (4096, 5)])
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_explain_names_the_tile_that_runs(dim: int, length: int, batch: int, device: str) -> None:
    spec, tokens = devices.named(device), batch * length
    sizes = {"seqlen_q": length, "seqlen_k": length, "total_q": tokens, "total_k": tokens, "batch": batch}
    problem = problem_with(kind="dense", head_dim=dim, head_dim_v=dim, num_heads=32, num_kv_heads=32, **sizes)
    for flags in ({}, {"causal": True}, {"window_left": 50}, {"softcap": 20.0}):
        asked = replace(problem, **flags)
        (call,) = launch.calls_of(asked, spec)
        shape = BACKEND.tile_shape(asked, spec)
        assert (shape.block_m, shape.block_n) == (call.arguments["BLOCK_M"], call.arguments["BLOCK_N"]), flags


def test_whatever_may_come_beside_q_has_a_type() -> None:
    """Sinks and a bias in fp64 were let in and found no kernel."""
    for name, (dtypes, _) in tensors.DTYPES.items():
        for dtype in dtypes:
            if dtype != torch.bool:  # read as bytes
                assert compilation.type_name(symbols.Address(name, dtype)).startswith("*")
