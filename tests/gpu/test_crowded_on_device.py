"""A GPU that other processes use as well: kernels are interrupted there, and wait where they never do alone.

An interrupted kernel finds its barriers again, also where it keeps something else by now. Tiles were left out only here
(docs/log/hopper-forward.md, "Unused barriers").
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tilewise as tw

pytestmark = [pytest.mark.hopper, pytest.mark.exhaustive]

NUM_OTHERS, SECONDS, IN_A_ROW = 8, 8.0, 12
# Until it is told to stop, by the end of its input.
OTHER = """
import sys, threading, torch
a = torch.randn(4096, 4096, device="cuda").bfloat16()
(a @ a).sum().item()
print("ready", flush=True)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""
# (sequences, heads, keys, head dim): later heads are prepared in idle warps.
SHAPES = {"d128": (19, 8, 512, 128), "d64": (8, 16, 1024, 64)}
# (sequences, heads, tokens, columns of K, of V): a kernel is interrupted most likely just where a CTA takes a tile.
FORWARDS = {
    "d64 short": (4, 16, 512, 64, 64),
    "d64": (1, 16, 2048, 64, 64),
    "d128": (2, 16, 700, 128, 128),
    "d192/128": (2, 16, 700, 192, 128),
    "d256": (2, 16, 700, 256, 256),
}


@pytest.fixture(scope="module", autouse=True)
def others() -> Iterator[None]:
    """Processes that multiply matrices all the time."""
    command, pipe = [sys.executable, "-c", OTHER], subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(NUM_OTHERS)]
    try:
        for other in started:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
        yield
    finally:
        for other in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.communicate(timeout=30)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out = tw.attention(q, k, v, causal=True, backend="hopper")
    return torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_backwards_in_a_row_beside_other_processes(shape: tuple[int, int, int, int]) -> None:
    """Statistics of the last replay are those of another dout, so that one which is not written again is seen."""
    batch, heads, seqlen, dim = shape
    q, k, v = (torch.randn(batch, heads, seqlen, dim, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    douts = [torch.randn_like(q).detach() for _ in range(2)]
    dout = douts[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [gradients(q, k, v, given)[1:] for given in douts]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = [gradients(q, k, v, dout) for _ in range(IN_A_ROW)]
    wrong, replays = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        dout.copy_(douts[replays % 2])
        graph.replay()
        for dq, *keys in made:
            differ = [(a != b).any() for a, b in zip(keys, expected[replays % 2], strict=True)]
            wrong += torch.stack([*differ, ~dq.isfinite().all()]).any()
        replays += 1
        torch.cuda.synchronize()
    assert replays > 1
    assert int(wrong) == 0, f"{int(wrong)} of {replays * IN_A_ROW} backwards are wrong"


@pytest.mark.parametrize("shape", FORWARDS.values(), ids=FORWARDS.keys())
def test_forwards_in_a_row_beside_other_processes(shape: tuple[int, int, int, int, int]) -> None:
    batch, heads, seqlen, dim, dim_v = shape
    q, k, v = (torch.randn(batch, heads, seqlen, d, device="cuda").bfloat16() for d in (dim, dim, dim_v))
    expected = tw.attention(q, k, v, causal=True, backend="hopper")
    outs = [torch.empty_like(expected) for _ in range(IN_A_ROW)]
    wrong, rounds = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(IN_A_ROW):
            for out in outs:
                out.fill_(float("nan"))
            for out in outs:
                tw.attention(q, k, v, causal=True, backend="hopper", out=out)
            for out in outs:
                wrong += (out != expected).any()
        rounds += 1
        torch.cuda.synchronize()
    assert rounds > 1
    assert int(wrong) == 0, f"{int(wrong)} of {rounds * IN_A_ROW**2} forwards are wrong"
