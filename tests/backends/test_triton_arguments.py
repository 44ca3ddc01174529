"""Tensors as Triton's kernels are told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import device as devices
from tilewise.problem import AttentionProblem

pytest.importorskip("triton", minversion="3.6")
compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
key_rows = pytest.importorskip("tilewise.backends.triton.arguments").key_rows
configs = pytest.importorskip("tilewise.backends.triton.configs")
planning = pytest.importorskip("tilewise.backends.triton.planning")
View = pytest.importorskip("tilewise.backends.gpu.launching").View
Multiple = pytest.importorskip("tilewise.backends.gpu.symbols").Multiple

BF16 = torch.bfloat16


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


def test_an_experiment_leaves_no_splits_behind() -> None:
    problem, h200 = problem_with(kind="dense", batch=1, seqlen_k=1024, total_k=1024), devices.named("h200")
    with configs.overridden({"decode": configs.Config(16, 128, 8, 3)}):
        tried = planning.plan_for(problem, h200, packed_q=False).num_splits
    kept = planning.plan_for(problem, h200, packed_q=False).num_splits
    assert (tried, kept) == (8, 16)
