"""What the installed Triton makes of the kernels, in a minute or two: every family once, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import fp8
from tilewise.backends.gpu import driver, releases, trial
from tilewise.device import of as device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Distance from fp64 as a part of the result, in bf16 and in e4m3.
TOLERANCE, FP8_TOLERANCE = 0.012, 0.08


@pytest.fixture(params=["hopper", "triton"])
def taker(request: pytest.FixtureRequest) -> str:
    if request.param == "hopper" and not device_of(torch.device("cuda")).has_wgmma:
        pytest.skip("needs an H100 or H200")
    return str(request.param)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """In fp64, with as many query heads of a K/V head as there are; the last query sees all keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows, keys = (torch.arange(x.shape[2], device="cuda") for x in (q, k))
        hidden = keys > rows[:, None] + (len(keys) - len(rows))
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ v


def distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def test_kernels_start_directly(taker: str) -> None:
    """Whatever the release: its kernels have the parameters that are laid out."""
    assert driver.launch_path() == "direct"
    assert releases.installed() in trial.report(taker)
    q, k, v = (randn(1, 2, 256, 64) for _ in range(3))
    tw.attention(q, k, v, backend=taker)
    started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.Launch, "start", lambda *_: started.append(1))
        tw.attention(q, k, v, backend=taker)
    assert not started


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [333, 4096])
def test_training(taker: str, head_dim: int, causal: bool, seqlen: int) -> None:
    q, k, v = (randn(1, heads, seqlen, head_dim).requires_grad_() for heads in (4, 2, 2))
    dout = randn(1, 4, seqlen, head_dim)
    out = tw.attention(q, k, v, causal=causal, backend=taker)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    wanted_out = exact(q, k, v, causal=causal)
    wanted = [wanted_out, *torch.autograd.grad(wanted_out, (q, k, v), dout.double())]
    assert max(map(distance, found, wanted)) < TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decoding(taker: str, head_dim: int) -> None:
    q, k, v = randn(4, 16, 1, head_dim), randn(4, 4, 3000, head_dim), randn(4, 4, 3000, head_dim)
    wanted = exact(q, k, v, causal=True)
    assert distance(tw.attention(q, k, v, causal=True, backend=taker), wanted) < TOLERANCE
    pages = 3008 // 64
    table = torch.randperm(4 * pages, device="cuda").int().view(4, pages)
    k_pages, v_pages = (torch.zeros(4 * pages, 64, 4, head_dim, dtype=k.dtype, device="cuda") for _ in range(2))
    for x, paged in ((k, k_pages), (v, v_pages)):
        rows = torch.nn.functional.pad(x, (0, 0, 0, 8)).permute(0, 2, 1, 3).reshape(4, pages, 64, 4, head_dim)
        paged[table.long()] = rows
    lengths = torch.full((4,), 3000, dtype=torch.int32, device="cuda")
    out = tw.attention_paged(q[:, :, 0], k_pages, v_pages, table, lengths, backend=taker)
    assert distance(out, wanted[:, :, 0]) < TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fp8(taker: str, head_dim: int, causal: bool) -> None:
    q, k, v = (randn(1, 4, 2048, head_dim) for _ in range(3))
    out = tw.attention(*[fp8.quantize(x) for x in (q, k, v)], causal=causal, backend=taker)
    assert distance(out, exact(q, k, v, causal=causal)) < FP8_TOLERANCE


def test_a_graph_repeats_the_call(taker: str) -> None:
    q, k, v = (randn(1, 4, 1024, 128) for _ in range(3))
    tw.attention(q, k, v, causal=True, backend=taker)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(q, k, v, causal=True, backend=taker)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert distance(out, exact(q, k, v, causal=True)) < TOLERANCE
