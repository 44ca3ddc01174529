"""What the Hopper backend refuses, and that asking costs nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewise import device
from tilewise.backends.hopper import BACKEND
from tilewise.problem import AttentionProblem

PLAIN = AttentionProblem(
    kind="dense", dtype=torch.bfloat16, batch=2, seqlen_q=300, seqlen_k=400, total_q=600, total_k=800, num_heads=8,
    num_kv_heads=2, head_dim=128, head_dim_v=128, scale=0.1,
)  # fmt: skip
CAUSAL = {"causal": True}
E4M3_PAGES: dict[str, Any] = {"kind": "paged", "page_size": 64, "fp8": ("k", "v")}
LATENTS: dict[str, Any] = {**E4M3_PAGES, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": torch.float16},
    "causal": {"causal": True},
    "window": {"window_left": 3, "window_right": 5},
    "softcap": {"softcap": 30.0, "needs_grad": True},
    "sinks": {"has_sinks": True, "needs_grad": True},
    "packed": {"kind": "varlen", "needs_grad": True},
    "pages": {"kind": "paged", "page_size": 64, "causal": True},
    "larger pages": {"kind": "paged", "page_size": 192, "head_dim": 192, "head_dim_v": 192},
    "deterministic": {"deterministic": True, "needs_grad": True},
    "wide heads": {"head_dim": 256, "head_dim_v": 256, "needs_grad": True},
    "512 columns": {"head_dim": 512, "head_dim_v": 512, "needs_grad": True, "has_sinks": True, "softcap": 30.0},
    "392 and 264 columns in pages": {"head_dim": 392, "head_dim_v": 264, "kind": "paged", "page_size": 64},
    "unequal": {"head_dim": 192, "head_dim_v": 128, "needs_grad": True, "deterministic": True},
    "tile mask": {"tiles_shape": (1, 8, 3, 4), "needs_grad": True, "softcap": 30.0, "has_sinks": True},
    "decoding": {"seqlen_q": 1},
    "decoding, 512 columns": {"seqlen_q": 1, "head_dim": 512, "head_dim_v": 512, "kind": "paged", "page_size": 16},
    "several tokens": {"batch": 32, "seqlen_q": 16, "causal": True},
    "decoding from pages": {"kind": "paged", "page_size": 8, "seqlen_q": 1, "has_sinks": True, "softcap": 30.0},
    "decoding from e4m3 latents": {**LATENTS, "batch": 16, "seqlen_q": 2},
    **{
        f"all e4m3, {changes}": {"fp8": ("q", "k", "v"), **changes}
        for changes in ({}, CAUSAL, {"num_kv_heads": 1}, {"window_left": 9}, {"has_sinks": True}, {"kind": "varlen"})
    },
    "decoding from e4m3 pages": {"kind": "paged", "page_size": 16, "batch": 8, "seqlen_q": 2, "fp8": ("k", "v")},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "float32"),
    "small pages": ({"kind": "paged", "page_size": 16}, "pages of 16 rows"),
    "uneven pages": ({"kind": "paged", "page_size": 96}, "pages of 96 rows"),
    "paged decoding": ({"kind": "paged", "page_size": 64, "seqlen_q": 1, "num_heads": 256}, "one query row"),
    "paged gradients": ({"kind": "paged", "page_size": 64, "needs_grad": True}, "no gradient"),
    "few rows and keys": ({"seqlen_q": 1, "seqlen_k": 200}, "fill no warpgroup"),
    "decoding, tiny pages": ({"kind": "paged", "page_size": 4, "seqlen_q": 1}, "pages of 4 rows"),
    "decoding, alibi": ({"seqlen_q": 1, "has_alibi": True}, "alibi"),
    "decoding, all e4m3": ({"kind": "paged", "page_size": 64, "seqlen_q": 1, "fp8": ("q", "k", "v")}, "beside q"),
    "many rows, int8": ({"kind": "paged", "page_size": 64, "fp8": ("k", "v"), "int8": True}, "k, v in int8"),
    "decoding, e4m3 rows": ({"seqlen_q": 1, "fp8": ("k", "v")}, "in pages"),
    "decoding, wide": ({"batch": 32, "seqlen_q": 16, "head_dim_v": 256}, "registers of a warpgroup"),
    "decoding, wide e4m3 keys": (
        {"kind": "paged", "page_size": 64, "fp8": ("k", "v"), "batch": 32, "seqlen_q": 16, "head_dim": 256},
        "converted keys of 256 columns",
    ),
    "decoding, few pairs": ({"seqlen_q": 8}, "to merge"),
    "alibi": ({"has_alibi": True}, "alibi"),
    "bias": ({"bias_shape": (1, 1, 300, 400), "bias_dtype": torch.bfloat16}, "bias"),
    "mask": ({"mask_shape": (1, 1, 300, 400)}, "mask"),
    "dropout": ({"dropout": 0.1}, "dropout"),
    "tile mask, causal": ({"tiles_shape": (1, 1, 3, 4), "causal": True}, "next to causal"),
    "tile mask, window": ({"tiles_shape": (1, 1, 3, 4), "window_left": 9}, "or a window"),
    "tile mask, packed": ({"tiles_shape": (1, 1, 3, 4), "kind": "varlen"}, "varlen sequences"),
    "tile mask, wide": ({"tiles_shape": (1, 1, 3, 4), "head_dim_v": 256}, "wider than 128"),
    "tile mask, few rows": ({"tiles_shape": (1, 1, 1, 4), "seqlen_q": 1}, "few query rows"),
    "tile mask, e4m3": ({"tiles_shape": (1, 1, 3, 4), "fp8": ("q", "k", "v")}, "e4m3"),
    "odd head": ({"head_dim": 63, "head_dim_v": 63}, "head_dim 63"),
    "narrow head": ({"head_dim": 32, "head_dim_v": 32}, "head_dim 32"),
    "wide head": ({"head_dim": 520, "head_dim_v": 512}, "head_dim 520"),
    "one wide side": ({"head_dim": 512}, "head_dim 512 and head_dim_v 128"),
    "decoding, 512 columns of e4m3": (
        {"kind": "paged", "page_size": 64, "seqlen_q": 1, "fp8": ("k", "v"), "head_dim": 512, "head_dim_v": 512},
        "more than 256 columns",
    ),
    "e4m3 latents, many rows": ({**LATENTS, "batch": 64, "seqlen_q": 3}, "at most 16 query rows a K/V head"),
    "e4m3, 512 columns": ({"fp8": ("q", "k", "v"), "head_dim": 512, "head_dim_v": 512}, "up to 256"),
    "odd values": ({"head_dim_v": 100}, "head_dim_v 100"),
    "negative scale": ({"scale": -1.0}, "scale"),
    "decoding, negative scale": ({"batch": 32, "seqlen_q": 16, "causal": True, "scale": -1.0}, "scale"),
    "decoding, scale 0": ({"seqlen_q": 1, "scale": 0.0}, "scale"),
    "no keys": ({"seqlen_k": 0, "total_k": 0}, "nothing to compute"),
}


@pytest.mark.parametrize("changes", TAKEN.values(), ids=TAKEN.keys())
def test_takes(changes: dict[str, Any]) -> None:
    assert BACKEND.supports(replace(PLAIN, **changes), device.named("h200")) is None


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in (BACKEND.supports(replace(PLAIN, **changes), device.named("h200")) or "")


def test_gradients_of_512_columns_have_a_fixed_order() -> None:
    """Triton's kernels compute them."""
    assert BACKEND.unordered(replace(PLAIN, head_dim=512, head_dim_v=512, needs_grad=True)) is None
    assert "dq" in (BACKEND.unordered(replace(PLAIN, needs_grad=True)) or "")


@pytest.mark.parametrize("name", ["a100", "b200", "cpu"])
def test_refuses_other_devices(name: str) -> None:
    assert "wgmma" in (BACKEND.supports(PLAIN, device.named(name)) or "")


def test_asking_loads_no_compiler() -> None:
    code = (
        "import sys, torch; from tilewise.backends.hopper import BACKEND; before = set(sys.modules);"
        "from tilewise import device; from tilewise.problem import AttentionProblem as P;"
        "p = P('dense', torch.bfloat16, 1, 4096, 4096, 4096, 4096, 1, 1, 64, 64, 1.0); d = device.named('h100');"
        "assert BACKEND.supports(p, d) is None; print(BACKEND.tile_shape(p, d).block_m, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["192", "False"]
