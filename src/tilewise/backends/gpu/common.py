"""The problems whose kernels are compiled ahead of time: what training and serving of usual models run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tilewise.problem import AttentionProblem

__all__ = ["common_problems"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128)
# Query heads of a K/V head are compiled in where they share a tile; page sizes always.
GROUP_SIZES = (1, 4, 8)
PAGE_SIZES = (16, 64)
# No kernel knows a length; these only decide between the kernels for short and for long sequences.
LONG, KEYS = 4096, 8192


def common_problems() -> Iterator[tuple[str, AttentionProblem]]:
    """(what it is, the problem)."""
    for (name, dtype), dim in itertools.product(DTYPES.items(), HEAD_DIMS):
        label = f"{name} head_dim {dim}"
        for causal in (False, True):
            kind = "causal" if causal else "full"
            yield f"training, {kind}, {label}", _problem(dtype, dim, 16, causal=causal, needs_grad=True)
        packed = _problem(dtype, dim, 16, kind="varlen", causal=True, needs_grad=True)
        yield f"packed training, causal, {label}", packed
        for group in GROUP_SIZES:
            sizes = {"seqlen_q": 1, "seqlen_k": KEYS, "total_q": 1, "total_k": KEYS}
            yield f"decoding, {group} heads share, {label}", _problem(dtype, dim, 32, group, **sizes)
            for page_size in PAGE_SIZES:
                paged = _problem(dtype, dim, 32, group, kind="paged", page_size=page_size, **sizes)
                yield f"decoding, {group} heads share, pages of {page_size}, {label}", paged


def _problem(dtype: torch.dtype, dim: int, heads: int, group: int = 1, **more: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "kind": "dense", "dtype": dtype, "batch": 1, "seqlen_q": LONG, "seqlen_k": LONG, "total_q": LONG,
        "total_k": LONG, "num_heads": heads, "num_kv_heads": heads // group, "head_dim": dim, "head_dim_v": dim,
        "scale": dim**-0.5,
    }  # fmt: skip
    return AttentionProblem(**values | more)
