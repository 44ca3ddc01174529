"""What only a real GPU can show of the Hopper backend.

The conformance suite runs there with `pytest tests/backends/test_conformance.py --backend hopper --device cuda`, odd
shapes of every configuration with `bench/hopper_check.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytestmark = pytest.mark.hopper

REPEATS = 1000
# More tiles than SMs, so that the counter hands them out in another order every time; lengths are odd on purpose.
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "d64": (2, 16, 16, 1100, 64, 64),
    "d64, later heads prepared beside": (8, 16, 16, 1024, 64, 64),
    "d128 grouped": (2, 32, 8, 900, 128, 128),
    "d192/128": (2, 16, 16, 700, 192, 128),
    "d256": (2, 16, 8, 700, 256, 256),
    "d512": (2, 16, 8, 700, 512, 512),
}


def inputs(batch: int, num_heads: int, num_kv_heads: int, seqlen: int, head_dim: int, head_dim_v: int) -> list[Tensor]:
    """q, k, v with gradients, and dout."""
    generator = torch.Generator("cuda").manual_seed(seqlen)
    shapes = [(num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim_v), (num_heads, head_dim_v)]
    made = [torch.randn(batch, h, seqlen, d, device="cuda", generator=generator).bfloat16() for h, d in shapes]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def attend(q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> tuple[Tensor, Tensor]:
    out = tw.attention(q, k, v, backend="hopper", return_lse=True, **flags)
    assert isinstance(out, tuple)
    return out


def count_of_others(first: tuple[Tensor, ...], again: Any) -> int:
    """In how many of REPEATS calls anything differs by a bit; counted on the device, so that calls follow closely."""
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        changed = [(a != b).any() for a, b in zip(first, again(), strict=True)]
        different += torch.stack(changed).any()
    return int(different)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_thousand_runs_are_equal_to_the_bit(name: str, causal: bool) -> None:
    """The forward, and the deterministic backward."""
    q, k, v, dout = inputs(*SHAPES[name])
    out, lse = attend(q, k, v, causal=causal, deterministic=True)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    assert count_of_others(backward(), backward) == 0
    room = torch.empty_like(out)

    def forward() -> tuple[Tensor, ...]:
        return attend(q, k, v, causal=causal, deterministic=True, out=room.fill_(float("nan")))

    with torch.no_grad():
        assert count_of_others((out.detach(), lse.detach()), forward) == 0


@pytest.mark.parametrize(
    "shape", [SHAPES["d64, later heads prepared beside"], SHAPES["d128 grouped"]], ids=["d64", "d128"]
)
def test_deterministic_gradients_do_not_depend_on_the_order_of_sequences(
    shape: tuple[int, int, int, int, int, int],
) -> None:
    """Which heads come first decides who prepares them, and when; not a bit of the result."""
    q, k, v, dout = inputs(*shape)
    grads = torch.autograd.grad(attend(q, k, v, causal=True, deterministic=True)[0], (q, k, v), dout)
    turned = [t.detach().flip(0).contiguous().requires_grad_() for t in (q, k, v)]
    out, _ = attend(turned[0], turned[1], turned[2], causal=True, deterministic=True)
    for a, b in zip(grads, torch.autograd.grad(out, turned, dout.flip(0).contiguous()), strict=True):
        assert torch.equal(a, b.flip(0))


@pytest.mark.parametrize(("heads", "dim"), [(5, 128), (9, 64)])
def test_gradients_of_keys_repeat_where_the_last_round_is_cut(heads: int, dim: int) -> None:
    """Pieces of a key tile are joined in their order, whoever comes first; dQ is added in any."""
    q, k, v, dout = inputs(1, heads, heads, 8192, dim, dim)
    out, _ = attend(q, k, v)

    def again() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (k, v), dout, retain_graph=True)

    assert count_of_others(again(), again) == 0
