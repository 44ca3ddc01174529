"""What only a real GPU can show of the Triton forward with warps of their own for loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import device as devices
from tilewise.testing import BackendImplementation, Case, check

triton = pytest.importorskip("triton")
configs = pytest.importorskip("tilewise.backends.triton.configs")
passes = pytest.importorskip("tilewise.backends.triton.passes")
releases = pytest.importorskip("tilewise.backends.gpu.releases")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPECIALISED = configs.Config(128, 128, 4, 2, specialised=True)
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the forward passes of a test are made of: this kernel and no other, or the test has shown nothing."""
    if not devices.of(torch.device("cuda")).has_wgmma or not releases.serves_specialised_forward():
        pytest.skip("the kernel is for Hopper and compilers that were read")
    made: list[Any] = []
    original = passes.specialised_call

    def noted(plan: Any, views: Any) -> Any:
        made.append(original(plan, views))
        return made[-1]

    monkeypatch.setattr(passes, "specialised_call", noted)
    yield made
    assert None not in made


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    with configs.overridden({"forward": SPECIALISED}):
        out, lse = tw.attention(q, k, v, causal=causal, backend="triton", return_lse=True)
    return out, lse


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"),
    [(40, 16, 16, 128, 128), (40, 8, 2, 512, 512), (30, 16, 4, 333, 333), (40, 8, 8, 100, 1000), (20, 8, 8, 300, 70)],
    ids=["one_tile", "whole", "ragged", "few_queries", "few_keys"],
)
def test_many_tiles_a_program(
    dim: int, causal: bool, batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Half a hundred runs give the same bits; NaN in one head stays there."""
    torch.manual_seed(0)
    q, k, v = randn(batch, heads, seqlen_q, dim), *(randn(batch, kv_heads, seqlen_k, dim) for _ in range(2))
    k[-1, -1] = torch.nan
    out, lse = attend(q, k, v, causal)
    row, key = torch.arange(seqlen_q, device="cuda"), torch.arange(seqlen_k, device="cuda")
    keep = (key[None, :] <= row[:, None] + seqlen_k - seqlen_q) | (not causal)
    group = heads // kv_heads
    k_rows, v_rows = (x.repeat_interleave(group, 1)[:-1] for x in (k, v))
    scores = (q[:-1].float() @ k_rows.float().mT * dim**-0.5).masked_fill(~keep, float("-inf"))
    want = scores.softmax(-1).masked_fill(~keep.any(1)[:, None], 0.0) @ v_rows.float()
    torch.testing.assert_close(out[:-1].float(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:-1], scores.logsumexp(-1), atol=1e-3, rtol=1e-4)
    assert not out[-1, : heads - group].isnan().any()
    for _ in range(50):
        again, again_lse = attend(q, k, v, causal)
        assert torch.equal(again[:-1], out[:-1])
        assert torch.equal(again_lse[:-1], lse[:-1])


def plain(**features: Any) -> Case:
    """A case with tiles for every multiprocessor of an H200, which the kernel gets without being asked for."""
    sizes: dict[str, Any] = {"seqlens_q": (129,) * 16, "seqlens_k": (129,) * 16, "num_heads": 8, "num_kv_heads": 8}
    return Case(**(sizes | {"dtype": BF16, "head_dim": 128, "head_dim_v": 128} | features))


@pytest.mark.parametrize(
    "case",
    [
        plain(),
        plain(causal=True),
        plain(dtype=FP16, num_kv_heads=2),
        plain(layout="bshd", causal=True),
        plain(strides="transposed"),
        plain(values="large", seqlens_q=(130,) * 16),  # a call of its own, not the first one's remembered
        plain(values="tiny", scale=3.0),
        plain(head_dim=64, head_dim_v=64, seqlens_q=(128,) * 16, seqlens_k=(128,) * 16, num_heads=16, num_kv_heads=16),
        plain(seqlens_k=(1,) * 16),
        plain(seqlens_q=(200,) * 16, seqlens_k=(65,) * 16, causal=True),
        plain(seqlens_k=(700,) * 16),
    ],
    ids=lambda case: case.id,
)
def test_cases_of_the_conformance_suite(case: Case, calls: list[Any]) -> None:
    check(case, BackendImplementation("triton", "cuda"))
    assert calls


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_where_a_profiler_looks_on(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are then started by Triton's launcher, which has to be told what of a query tile is copied at once."""
    q, k, v = (randn(16, 8, 200, 128) for _ in range(3))
    out, lse = attend(q, k, v, causal)
    seen: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", seen.append)
    again, again_lse = attend(q, k, v, causal)
    assert seen
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)
