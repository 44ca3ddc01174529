"""What only a real GPU can show of the Hopper backend.

The conformance suite runs there with `pytest tests/backends/test_conformance.py --backend hopper --device cuda`, odd
shapes of every configuration with `bench/hopper_check.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
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
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_thousand_forwards_are_equal_to_the_bit(shape: tuple[int, int, int, int, int, int], causal: bool) -> None:
    q, k, v, _ = inputs(*shape)
    first = tuple(t.detach() for t in attend(q, k, v, causal=causal))
    with torch.no_grad():
        assert count_of_others(first, lambda: attend(q, k, v, causal=causal)) == 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_thousand_deterministic_backwards_are_equal_to_the_bit(
    shape: tuple[int, int, int, int, int, int], causal: bool
) -> None:
    q, k, v, dout = inputs(*shape)
    out, _ = attend(q, k, v, causal=causal, deterministic=True)

    def again() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    assert count_of_others(again(), again) == 0


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


def sanitizer() -> str | None:
    """compute-sanitizer, on the path or where CUDA's toolkits are installed."""
    found = [shutil.which("compute-sanitizer"), *map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))]
    return next((name for name in found if name), None)


# Few and small: the sanitizer makes a kernel some hundred times slower.
SANITIZED = """
import torch, tilewise as tw
for d, deterministic in ((128, False), (128, True), (256, False)):
    q, k, v = (torch.randn(1, 2, 130, d, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = tw.attention(q, k, v, causal=True, backend="hopper", deterministic=deterministic)
    torch.autograd.grad(out.float().sum(), (q, k, v))
torch.cuda.synchronize()
"""


def sanitized(tool: str) -> subprocess.CompletedProcess[str]:
    """Forward and backward of small problems under the sanitizer."""
    command = [sanitizer() or "", "--tool", tool, "--error-exitcode", "7", sys.executable, "-c", SANITIZED]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ), check=False)


needs_sanitizer = pytest.mark.skipif(sanitizer() is None, reason="needs compute-sanitizer (CUDA toolkit)")


@needs_sanitizer
@pytest.mark.exhaustive
def test_racecheck_finds_nothing_but_what_mbarriers_order() -> None:
    """racecheck knows bar.sync, but neither mbarriers nor TMA.

    It therefore reports two hand-overs that mbarriers or Triton's start of the roles do order: the number of the next
    tile in the mailbox, and the word through which `warp_specialize` tells a warp its role. Anything else is a race.
    """
    done = sanitized("racecheck")
    said = done.stdout + done.stderr
    assert "COMPUTE-SANITIZER" in said, said[-3000:]
    places = set(re.findall(r"in (\w+\.py):(\d+)", said))
    unexpected = [place for place in places if not is_hand_over(*place)]
    assert not unexpected, said[-3000:]


def is_hand_over(file: str, line: str) -> bool:
    """Whether a source line is of the mailbox, or of a kernel's own body, which only starts the roles."""
    source = Path(tw.__file__).parent / "backends" / "hopper" / file
    if not source.exists():
        return False
    above = source.read_text().splitlines()[: int(line)]
    place = next((text for text in reversed(above) if re.match("(class|def) ", text)), "")
    return place == "class Mailbox:" or re.match(r"def \w+_kernel\(", place) is not None
