"""torch.compile(mode="reduce-overhead"): a graph's first run allocates from the graphs' own pool, later ones are
captured and replayed. What tilewise keeps from call to call lies elsewhere, or torch refuses to go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from making import cuda_randn as randn
from tilewise import fp8

pytestmark = [
    pytest.mark.hopper,
    # Importing inductor is enough for torch 2.11 to warn about its own use of TorchScript.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    # Trees of graphs begin with one that nothing is captured in.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

HEADS, HEAD_DIM, TOKENS, KEYS = 4, 128, 256, 3000
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """As in a new process: the compiled call is the first one that wants counters and constants."""
    from tilewise import calls
    from tilewise.backends.gpu import counters, launching
    from tilewise.fp8 import rotation

    torch._dynamo.reset()
    kept: list[Any] = [counters.counters_of, launching.kept, calls._family, calls._slot]
    kept += [cell.cell_contents for name in rotation.__all__ for cell in getattr(rotation, name).__closure__ or ()]
    for one in kept:
        if hasattr(one, "cache_clear"):
            one.cache_clear()
    yield
    torch._dynamo.reset()


def disturb() -> None:
    """Other calls, on other streams too, and NaN in whatever memory is free."""
    q, k = randn(2, 8, 192, 64), randn(2, 8, 777, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        tw.attention(q, k, k)
    tw.attention(q[:, :, :1], k, k)
    torch.cuda.synchronize()
    rubbish = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 10, 1 << 18, 1 << 21, 1 << 28)]
    del rubbish


def recorded_graphs() -> int:
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else sum(map(len, manager.roots.values()))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, of rows in the order (batch, rows, heads, dim)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(
        torch.ones(TOKENS, TOKENS, device=q.device).triu(1).bool(), -torch.inf
    )
    out: Tensor = scores.softmax(-1) @ v
    return out.transpose(1, 2)


class Layer(nn.Module):
    """Attention between two projections."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.attend = attend
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, HEAD_DIM)).split(HEADS, 2)
        mixed: Tensor = self.out(self.attend(q, k, v).flatten(2))
        return mixed


def model_with(attend: Attend, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Layer(attend), Layer(attend)).to(torch.bfloat16).to("cuda", dtype)


def results(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of all weights."""
    out = run(x)
    found = [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]
    return [tensor.detach().clone() for tensor in found]


def test_training_steps() -> None:
    """Compiled steps err as eager ones do, whatever happens between them."""
    model = model_with(partial(tw.attention, causal=True, layout="bshd"), torch.bfloat16)
    truth = model_with(exact, torch.float64)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(5):
        x = randn(2, TOKENS, HEADS * HEAD_DIM)
        torch.compiler.cudagraph_mark_step_begin()
        found = results(compiled, model, x)
        disturb()
        for one, other, want in zip(found, results(model, model, x), results(truth, truth, x.double()), strict=True):
            errors = [float((tensor.double() - want).square().mean().sqrt()) for tensor in (one, other)]
            assert errors[0] <= 2 * errors[1]
    assert recorded_graphs()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tw.attention(q, k, v)


def quantised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tw.attention(*(fp8.quantize(x, granularity="block") for x in (q, k, v)))


_numbers = itertools.count()


def opaque(attend: Attend) -> Attend:
    """As an op of somebody's own: compilers do not look into it, so calls in there are ordinary ones."""

    @torch.library.custom_op(f"tilewise_tests::attend_{next(_numbers)}", mutates_args=())
    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    op.register_fake(lambda q, *_: torch.empty_like(q))
    return op


@pytest.mark.parametrize("rows", [TOKENS, 1], ids=["prompt", "decode"])
@pytest.mark.parametrize("attend", [plain, opaque(plain), opaque(quantised)], ids=["plain", "opaque", "quantised"])
def test_two_compiled_functions_take_turns(attend: Attend, rows: int) -> None:
    """Each is first run while the other one is replayed already."""
    k, v = randn(2, HEADS, KEYS, HEAD_DIM), randn(2, HEADS, KEYS, HEAD_DIM)
    functions = [lambda q: attend(q * 2, k, v) + 1, lambda q: attend(q / 2, v, k) - 1]
    compiled = [torch.compile(function, mode="reduce-overhead", fullgraph=True) for function in functions]
    for turn in range(7):
        for number in (0, 1) if turn > 2 else (0,):
            q = randn(2, HEADS, rows, HEAD_DIM)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled[number](q).clone()
            disturb()
            torch.testing.assert_close(found, functions[number](q), atol=1e-2, rtol=1e-2)
    assert recorded_graphs() >= 2
