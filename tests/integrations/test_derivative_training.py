"""Losses that contain a derivative of the model: trained by tilewise they fall as with torch's math kernel."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.integrations import sdpa
from tilewise.testing.threads import one_thread

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

STEPS, TOKENS, WIDTH, HEADS = 8, 24, 16, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(torch.nn.Module):
    """One layer of attention between two linear ones, conditioned on times."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.enter, self.qkv = torch.nn.Linear(WIDTH + 2, WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.leave = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *times: Tensor) -> Tensor:
        h = torch.tanh(self.enter(torch.cat([x, *[t.expand(*x.shape[:-1], 1) for t in times]], -1)))
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).movedim(-2, 1).unbind(3)
        out: Tensor = self.leave(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


def mean_flow(model: Block, x: Tensor) -> Tensor:
    """The loss of MeanFlow: the target of the average velocity u(z, r, t) contains its derivative along the flow."""
    noise, r, t = x.roll(1, 0), torch.full((1,), 0.2), torch.full((1,), 0.7)
    velocity = noise - x
    found = torch.func.jvp(model, ((1 - t) * x + t * noise, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
    u, dudt = found[0], found[1]
    # Half of the target is held fixed, as MeanFlow does; the gradient through the other half is one of a jvp.
    tangent = 0.5 * (dudt + dudt.detach())
    loss: Tensor = (u - (velocity - (t - r) * tangent)).square().mean()
    return loss


def penalised(model: Block, x: Tensor) -> Tensor:
    """A critic's loss with a penalty on the norm of its gradient."""
    x, zero = x.clone().requires_grad_(), torch.zeros(1)
    score = model(x, zero, zero).mean((1, 2))
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss: Tensor = score.mean() + 10.0 * (gradient.flatten(1).norm(dim=1) - 1.0).square().mean()
    return loss


def curve(loss_of: Callable[[Block, Tensor], Tensor], attend: Attend, where: AbstractContextManager[object]) -> Tensor:
    torch.manual_seed(0)
    model = Block(attend)
    data, optimiser = torch.randn(3, TOKENS, WIDTH), torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with one_thread(), where:
        for _ in range(STEPS):
            loss = loss_of(model, data)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("loss_of", [mean_flow, penalised])
def test_losses_fall_as_with_the_math_kernel(loss_of: Callable[[Block, Tensor], Tensor]) -> None:
    expected = curve(loss_of, F.scaled_dot_product_attention, sdpa_kernel(SDPBackend.MATH))
    assert expected[-1] < 0.95 * expected[0]

    def routed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa.routed():
            return F.scaled_dot_product_attention(q, k, v)

    for attend in (tilewise.attention, routed):
        mine = curve(loss_of, attend, contextlib.nullcontext())
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_multihead_modules_have_both_derivatives() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    mine = tilewise.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    mine.load_state_dict(theirs.state_dict())
    x, along = torch.randn(2, TOKENS, WIDTH), torch.randn(2, TOKENS, WIDTH)

    def results(module: torch.nn.Module) -> list[Tensor]:
        def call(x: Tensor) -> Tensor:
            out: Tensor = module(x, x, x, need_weights=False)[0]
            return out

        def energy(x: Tensor) -> Tensor:
            return call(x).square().sum()

        hvp = torch.func.jvp(torch.func.grad(energy), (x,), (along,))[1]
        return [*torch.func.jvp(call, (x,), (along,)), hvp]

    with one_thread(), sdpa_kernel(SDPBackend.MATH):
        expected = results(theirs)
    torch.testing.assert_close(results(mine), expected, rtol=1e-4, atol=1e-5)
