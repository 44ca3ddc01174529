"""What the installed Triton makes of the kernels, in a minute or two: every family once, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.backends.gpu import driver, releases, trial
from tilewise.device import of as device_of


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
