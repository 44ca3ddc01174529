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
Multiple = symbols.Multiple

BF16 = torch.bfloat16
key_rows = arguments.key_rows


def problem_with(**changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "dtype": BF16, "batch": 2, "seqlen_q": 1, "seqlen_k": 300, "total_q": 2, "total_k": 600, "num_heads": 4,
        "num_kv_heads": 4, "head_dim": 128, "head_dim_v": 128, "scale": 0.1,
    }  # fmt: skip
    return AttentionProblem(**values | changes)


def test_rows_far_apart_are_reached_with_64_bits() -> None:
    """Of a dense tile its rows are counted from a 64-bit address, of a page its slots."""
    dense = View((2**33, 2**33, 2**25, 1), BF16, aligned=True)
    problem = problem_with(kind="dense")
    assert key_rows(problem, "k", dense).stride_row == Multiple(2**25, 8, wide=True)
    assert key_rows(problem, "k", dense._replace(strides=(2**33, 128, 4096, 1))).stride_row == Multiple(4096, 8)
    pages, apart = View((2**32, 4096, 128, 1), BF16, aligned=True), View((2**32, 4096, 128, 1), BF16, aligned=False)
    long = problem_with(kind="paged", page_size=2**20)
    assert key_rows(long, "k", pages).stride_row == Multiple(4096, 8, wide=True)
    assert key_rows(long, "k", apart).stride_row == Multiple(4096, 1, wide=True)
    assert key_rows(problem_with(kind="paged", page_size=64), "k", pages).stride_row == Multiple(4096, 8)
    assert compilation.type_name(Multiple(4096, 8, wide=True)) == "i64"


@pytest.mark.parametrize("strides", [(512, 128, 1), (128, 128 * 4000, 1), (3 * 512, 128, 1)])
def test_boxes_of_packed_rows_end_with_a_sequence(strides: tuple[int, int, int]) -> None:
    """Coordinates of a sequence's rows lead to their addresses, modulo 2^64 as hardware counts, and past its end there
    is nothing.
    """
    problem, total, apart = problem_with(kind="varlen", num_kv_heads=4), 4000, int(primitives.ROWS_APART)
    rows = key_rows(problem, "k", View(strides, BF16, aligned=True))
    box = arguments.packed_box_of(rows, 4, total, 64, 128)
    assert box is not None
    assert box.block == (1, 1, 1, 64, 128)
    # What the driver asks of a tensor map: sizes of 32 bits, strides below 2^40 bytes and multiples of 16.
    assert max(box.shape) < 2**32
    assert all(0 < 2 * stride < 2**40 and 2 * stride % 16 == 0 for stride in box.strides[:-1])
    for start, length, head, row in ((0, 4000, 0, 0), (0, 1, 3, 0), (3999, 1, 1, 0), (17, 333, 2, 300), (5, 0, 0, 0)):
        place = (apart, start + length, head, apart - length + row, 0)
        inside = [0 <= at < size for at, size in zip(place, box.shape, strict=True)]
        assert inside == [True, True, True, row < length, True]
        offset = sum(2 * at * stride for at, stride in zip(place, box.strides, strict=True))
        assert offset % 2**64 == 2 * ((start + row) * strides[0] + head * strides[1])


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
