"""What only a real GPU can show of the backward of short sequences: with a gradient of lse, which conformance cases
have, other kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import device as devices
from tilewise.testing import BackendImplementation, Case, check, check_repeatable, uninitialised_is_nan

triton = pytest.importorskip("triton")
launch = pytest.importorskip("tilewise.backends.triton.launch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16
TRITON = BackendImplementation("triton", "cuda")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the backward passes of a test are made of; None where other kernels run."""
    if not devices.of(torch.device("cuda")).has_wgmma:
        pytest.skip("the kernels are for Hopper")
    made: list[Any] = []
    original = launch.short_backward_calls

    def noted(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(launch, "short_backward_calls", noted)
    launch._kept_backward.cache_clear()
    yield made
    assert made, "every pass was remembered: the test has shown nothing"


def case_of(lengths: tuple[int, int], **features: Any) -> Case:
    dim = features.pop("dim", 128)
    heads: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": dim, "head_dim_v": dim}
    seqlens: dict[str, Any] = {"seqlens_q": (lengths[0],) * 2, "seqlens_k": (lengths[1],) * 2}
    return Case(**{"dtype": BF16, "cotangents": ("out",), **heads, **seqlens, **features})


# Tiles have 64 rows and 32 or 64 keys: filled, one row over, one short; more queries than keys, and fewer.
LENGTHS = [(512, 512), (65, 65), (129, 129), (511, 511), (192, 192), (129, 512), (512, 99), (333, 475), (411, 200)]
LENGTHS += [(160, 288)]
FEATURES: dict[str, dict[str, Any]] = {
    "four_heads": {"num_heads": 4},
    "no_groups": {"num_kv_heads": 2},
    "rows_first": {"layout": "bshd"},
    "transposed": {"strides": "transposed"},
    "same_dout": {"expanded_dout": True},
    "sinks": {"sinks": True},
    "queries_alone": {"grad_of": ("q",)},
    "large": {"values": "large"},
    "tiny": {"values": "tiny"},
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(dim: int, lengths: tuple[int, int], causal: bool, dtype: torch.dtype, calls: list[Any]) -> None:
    check(case_of(lengths, dim=dim, causal=causal, dtype=dtype), TRITON)
    assert None not in calls


@pytest.mark.parametrize(
    ("name", "dim", "causal"), [(name, *rest) for name in FEATURES for rest in ((64, True), (128, False), (128, True))]
)
def test_features(name: str, dim: int, causal: bool, calls: list[Any]) -> None:
    check(case_of((201, 301), dim=dim, causal=causal, **FEATURES[name]), TRITON)
    assert None not in calls


@pytest.mark.parametrize("window", [(40, 17), (None, 3), (150, None), (0, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 300), (300, 140), (140, 300)], ids=str)
def test_windows(lengths: tuple[int, int], window: tuple[int | None, int | None], calls: list[Any]) -> None:
    check(case_of(lengths, window=window), TRITON)
    assert None not in calls


def test_rows_that_tma_cannot_address(calls: list[Any]) -> None:
    check(case_of((201, 301), causal=True, strides="sliced"), TRITON)
    assert all(made is None for made in calls)


def test_heads_that_share_their_keys_have_boxes(calls: list[Any]) -> None:
    check(case_of((201, 301), causal=True, strides="expanded"), TRITON)
    assert None not in calls


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_same_bits_in_every_run(dim: int, causal: bool, calls: list[Any]) -> None:
    check_repeatable(case_of((333, 475), dim=dim, causal=causal, deterministic=True), TRITON)
    assert None not in calls


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_amid_nan(dim: int, causal: bool, calls: list[Any]) -> None:
    """Views that TMA can address into tensors of NaN: the bits of tensors without gaps."""

    def amid(values: Tensor) -> Tensor:
        batch, heads, rows, columns = values.shape
        around = torch.full((batch + 1, heads + 1, rows + 9, columns + 64), math.nan, device="cuda", dtype=BF16)
        view = around[1:, 1:, 5 : 5 + rows, 64:]
        return view.copy_(values)

    plain = [torch.randn(2, 4, n, dim, device="cuda", dtype=BF16) for n in (333, 475, 475, 333)]
    results = []
    for tensors in (plain, [amid(t) for t in plain]):
        q, k, v = leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = tw.attention(q, k, v, causal=causal, backend="triton")
        with uninitialised_is_nan():
            results.append(torch.autograd.grad(out, leaves, tensors[3]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert all(t.isfinite().all() for t in results[0])
    assert None not in calls
