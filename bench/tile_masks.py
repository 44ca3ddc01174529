"""Tile masks: time against density, against our native kernels, and against torch with the dense mask or FlexAttention.

    PYTHONPATH=src:bench python bench/tile_masks.py [--device cuda] [--seqlen 4096 16384] [--json FILE]

Entrants of a case run in turn, round after round; a figure is the least of its rounds. On a CPU it is CPU seconds of
one thread, so that other programs disturb it little; on a GPU the time between two events.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from suite.measuring import commit
from tilewise import TileMask, tile_mask
from tilewise.bench.machine import machine, versions

ROUNDS = {"cpu": 5, "cuda": 20}
# (batch, heads, dtype) of the operands.
SIZES = {"cpu": (1, 2, torch.float32), "cuda": (2, 16, torch.bfloat16)}
WINDOW = 1024
# Time in full time at a tenth of the tiles; native time in mask time; SDPA's or FlexAttention's time in ours.
BARS = {"of full": 0.16, "of native": 0.93, "sdpa": 5.0, "flex": 1.2}

Call = Callable[[], object]
Entrants = dict[str, Call]


def once(call: Call, device: str) -> float:
    """Seconds of one call."""
    if device == "cpu":
        start = time.thread_time()
        call()
        return time.thread_time() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3


def runs(name: str, call: Call, device: str) -> bool:
    """Whether a call works; compiles what it needs."""
    try:
        call()
        once(call, device)
    except (RuntimeError, tw.TilewiseError) as failure:
        print(f"  without {name}: {str(failure).splitlines()[0]}", flush=True)
        return False
    return True


def race(entrants: Entrants, device: str) -> dict[str, float]:
    """The least seconds of each; one that fails is left out."""
    best = {name: float("inf") for name, call in entrants.items() if runs(name, call, device)}
    for _ in range(ROUNDS[device]):
        for name in best:
            best[name] = min(best[name], once(entrants[name], device))
    return best


def masks(seqlen: int, device: str) -> dict[str, tuple[Callable[[], TileMask], dict[str, Any] | None]]:
    """How each mask is made, and the flags of the native kernels that compute the same."""
    position = torch.arange(seqlen, device=device)
    tiles = -(-seqlen // 128)
    listed = (torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(0)) < 0.1).to(device)
    side = 1 << (seqlen.bit_length() // 2)
    # Spans of 256 image tokens in every 1,024, which see each other inside causal text.
    span = torch.where(position % 1024 < 256, position // 1024 * 1024 + 256, position + 1)
    return {
        "causal": (lambda: tile_mask(lambda _b, _h, i, j: i >= j, seqlen, seqlen, device=device), {"causal": True}),
        "window": (
            lambda: TileMask.from_intervals((position - WINDOW + 1).clamp_min(0), position + 1, seqlen),
            {"causal": True, "window": (WINDOW - 1, 0)},
        ),
        "documents": (lambda: TileMask.documents(position // (seqlen // 16)), None),
        "prefix": (lambda: TileMask.prefix(seqlen // 4, seqlen, device=device), None),
        "image spans": (lambda: TileMask.from_intervals(torch.zeros_like(span), span, seqlen), None),
        "chunks": (lambda: TileMask.chunks(1024, seqlen, device=device), None),
        "neighbourhood": (
            lambda: TileMask.neighbourhood((seqlen // side, side), (13, 13), device=device),
            None,
        ),
        "random tiles": (
            lambda: TileMask.from_dense(listed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:seqlen, :seqlen]),
            None,
        ),
        "random bits": (
            lambda: TileMask.from_dense(
                listed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:seqlen, :seqlen] & (position % 3 > 0)
            ),
            None,
        ),
    }


def passes(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Entrants:
    """Forward alone, and forward with backward."""
    dout = torch.ones_like(q)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    return {"forward": forward, "training": lambda: torch.autograd.grad(attend(*leaves), leaves, dout)}


def flex(mask: TileMask) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with the same lists of blocks and the bits as a lookup in the dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dense = mask.dense()[0, 0]
    block = create_block_mask(
        lambda _b, _h, i, j: dense[i, j], None, None, mask.seqlen_q, mask.seqlen_k, device=str(mask.device)
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=block)


def measured(name: str, seqlen: int, head_dim: int, device: str) -> dict[str, Any]:
    """One mask: milliseconds of everybody, and the ratios that have a bar."""
    batch, heads, dtype = SIZES[device]
    make, native = masks(seqlen, device)[name]
    mask = make()
    make_seconds = min(once(make, device) for _ in range(3))
    draw = torch.Generator(device=device).manual_seed(0)
    q, k, v = (
        torch.randn(batch, heads, seqlen, head_dim, generator=draw, device=device, dtype=dtype) for _ in range(3)
    )
    attends: dict[str, Callable[..., Tensor]] = {
        "tiles": lambda *x: tw.attention(*x, mask=mask),
        "full": tw.attention,
    }
    if native is not None:
        attends["native"] = lambda *x: tw.attention(*x, **native)
    if device == "cpu":
        dense = mask.dense()
        attends["sdpa"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    else:
        attends["flex"] = flex(mask)
    found: dict[str, Any] = {
        "mask": name, "seqlen": seqlen, "head_dim": head_dim, "batch": batch, "heads": heads,
        "dtype": str(dtype).removeprefix("torch."), "density": round(mask.density, 4), "tiles": mask.counts._asdict(),
        "bytes of dense": round(mask.nbytes / (seqlen * seqlen), 5), "making ms": round(1e3 * make_seconds, 3),
    }  # fmt: skip
    for which in ("forward", "training"):
        times = race({who: passes(q, k, v, attend)[which] for who, attend in attends.items()}, device)
        found[f"{which} ms"] = {who: round(1e3 * seconds, 3) for who, seconds in times.items()}
        if "tiles" in times:
            ratios: dict[str, float] = {
                peer: times[peer] / times["tiles"] for peer in ("sdpa", "flex") if peer in times
            }
            ratios["of full"] = times["tiles"] / times["full"]
            if "native" in times:
                ratios["of native"] = times["native"] / times["tiles"]
            found[which] = {key: round(value, 3) for key, value in ratios.items()}
            found[which]["bars missed"] = missed(ratios, mask.density)
    return found


def missed(ratios: dict[str, float], density: float) -> list[str]:
    """The bars that these ratios do not reach; time in full time has one at a tenth of the tiles."""
    some: list[str] = [name for name in ("of native", "flex") if name in ratios and ratios[name] < BARS[name]]
    if density <= 0.11:
        some += ["of full"] * (ratios["of full"] > BARS["of full"] * density / 0.1)
        some += ["sdpa"] * (ratios.get("sdpa", BARS["sdpa"]) < BARS["sdpa"])
    return some


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=tuple(SIZES))
    parser.add_argument("--seqlen", type=int, nargs="+", default=[4096])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "what": "tile masks; least milliseconds of rounds in turn, one thread where it is a CPU",
        "machine": machine(), "versions": versions(), "commit": commit(), "cases": [],
    }  # fmt: skip
    for seqlen in options.seqlen:
        for head_dim in options.head_dim:
            for name in masks(seqlen, options.device):
                found = measured(name, seqlen, head_dim, options.device)
                results["cases"].append(found)
                print(json.dumps(found), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
