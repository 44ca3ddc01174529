"""FP8 forward against bf16, cuDNN's FP8 and FA3's, in turn, on a GPU.

    PYTHONPATH=src:bench python3 bench/fp8_race.py [--seqlens 16384] [--scores normal sink40 spread16] [--json FILE]

cuDNN takes part where nvidia-cudnn-frontend can be imported, FA3 where FA3_LIBRARY names vLLM's library. All three read
the same e4m3 values, with one scale a tensor, and write bf16; cuDNN, which cannot on Hopper, writes e4m3. Errors are
the root mean square of 64 rows against fp64 of the same values, as a part of that of the result.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from suite.inputs import SCORES
from suite.measuring import device_seconds, store
from tilewise import fp8

TOKENS, CHANNELS = 16384, 2048
ROUNDS, REPEATS = 9, 4
# cuDNN rounds P, and its results, times this to e4m3.
P_SCALE, OUT_SCALE = 256.0, 64.0
Call = Callable[[], Tensor]


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """The FP8 forward of cuDNN."""
    frontend = importlib.import_module("cudnn")
    types = frontend.data_type
    handle = frontend.create_handle()
    frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = frontend.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle,
    )  # fmt: skip
    rows = [graph.tensor(dim=x.shape, stride=x.stride(), data_type=types.FP8_E4M3) for x in (q, k, v)]
    one = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": types.FLOAT}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(**one) for name in names}
    out, _, *largest = graph.sdpa_fp8(
        q=rows[0], k=rows[1], v=rows[2], **scales, generate_stats=False, attn_scale=q.shape[-1] ** -0.5,
        use_causal_mask=causal,
    )  # fmt: skip
    result = torch.full_like(q, math.nan)
    out.set_output(True).set_dim(result.shape).set_stride(result.stride()).set_data_type(types.FP8_E4M3)
    for x in largest:
        x.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(types.FLOAT)
    graph.build([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    values = dict.fromkeys(names, 1.0) | {"descale_s": 1.0 / P_SCALE, "scale_s": P_SCALE, "scale_o": OUT_SCALE}
    given = dict(zip(rows, (q, k, v), strict=True)) | {out: result}
    given |= {scales[name]: torch.full((1, 1, 1, 1), value, device="cuda") for name, value in values.items()}
    given |= {x: torch.zeros(1, 1, 1, 1, device="cuda") for x in largest}
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)

    def call() -> Tensor:
        graph.execute(given, workspace, handle=handle)
        return result

    return call


def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """FA3's FP8 forward, as built for vLLM."""
    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    forward = torch.ops._vllm_fa3_C.fwd  # noqa: SLF001, the name that the library registers
    batch, _, seqlen, head_dim = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
    scales = (torch.ones(batch, k.shape[1], device="cuda"),) * 3
    lists = (cu, cu, None, None, None, seqlen, seqlen, None, None, None, None, None, None, *scales)
    flags = (head_dim**-0.5, causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)

    def call() -> Tensor:
        out: Tensor = forward(q, k, v, None, None, None, None, *lists, *flags)[0]
        rows: Tensor = out.unflatten(0, (batch, seqlen))
        return rows.transpose(1, 2)

    return call


def error(out: Tensor, inputs: list[Tensor], causal: bool) -> float:
    """Of 64 rows of the first head."""
    q, k, v = (x[0, 0].double() for x in inputs)
    rows = torch.linspace(0, len(q) - 1, 64, device="cuda").long()
    s = q[rows] @ k.T / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.arange(len(k), device="cuda") > rows[:, None], -math.inf)
    want = s.softmax(-1) @ v
    return float((out[0, 0, rows].double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


def entrants(wide: list[Tensor], inputs: list[Tensor], causal: bool) -> Iterator[tuple[str, Call | str]]:
    """Name, and the call or why there is none; of q, k and v in bf16 and in e4m3."""
    made = [fp8.quantize(x, granularity="tensor", scale=1.0) for x in wide]
    yield "bf16", lambda: tw.attention(*wide, causal=causal)
    yield "ours", lambda: tw.attention(*made, causal=causal)
    for name, make in (("cudnn", cudnn), ("fa3", fa3)):
        yield name, attempted(make, inputs, causal)


def attempted(make: Callable[..., Call], inputs: list[Tensor], causal: bool) -> Call | str:
    """A peer's call, or what it says against it."""
    try:
        call = make(*inputs, causal)
        call()
        torch.cuda.synchronize()
    except Exception as reason:
        return f"{type(reason).__name__}: {str(reason)[:160]}"
    return call


def raced(head_dim: int, seqlen: int, causal: bool, kind: str) -> dict[str, Any]:
    """TFLOP/s and errors of one cell."""
    shape = (TOKENS // seqlen, CHANNELS // head_dim, seqlen, head_dim)
    draw = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(shape, device="cuda", generator=draw) for _ in range(3))
    if kind != "normal":
        q, k = SCORES[kind](q, k)
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    inputs = [x.to(torch.float8_e4m3fn) for x in wide]
    cell: dict[str, Any] = {"head_dim": head_dim, "seqlen": seqlen, "causal": causal, "scores": kind}
    calls: dict[str, Call] = {}
    for name, call in entrants(wide, inputs, causal):
        if isinstance(call, str):
            cell[name] = call
        else:
            calls[name] = call
            out = call().float() / (OUT_SCALE if name == "cudnn" else 1.0)
            cell[f"{name} error"] = float(f"{error(out, wide if name == 'bf16' else inputs, causal):.3g}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        # In both orders: clocks depend on who came before.
        for name in list(calls)[:: 1 if number % 2 else -1]:
            torch.cuda._sleep(4_000_000)  # noqa: SLF001, the host gets ahead of the device
            times[name].append(device_seconds(calls[name], REPEATS) / REPEATS)
    flops = 4.0 * shape[0] * shape[1] * seqlen**2 * head_dim / (2 if causal else 1)
    return cell | {name: round(1e-12 * flops / statistics.median(t), 1) for name, t in times.items()}


def main() -> None:
    """All cells, printed as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--scores", nargs="+", default=["normal"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = []
    for head_dim in (64, 128, 256):
        for seqlen in args.seqlens:
            for causal in (False, True):
                for kind in args.scores:
                    cells.append(cell := raced(head_dim, seqlen, causal, kind))
                    print(*(f"{k} {v}" for k, v in cell.items()), sep=", ", flush=True)
    if args.json:
        store(args.json, "TFLOP/s of the forward in e4m3 next to bf16, medians of rounds in turn", cells=cells)


if __name__ == "__main__":
    main()
