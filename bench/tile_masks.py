"""Tile masks: time against density, our native kernels, torch with the dense mask, FlexAttention.

    PYTHONPATH=src:bench python bench/tile_masks.py [--device cuda] [--seqlen 4096 ...] [--mask NAME ...] [--json FILE]

Entrants of a case run in turn, round after round; a figure is the least of its rounds. On a CPU it is CPU seconds of
one thread, so that other programs disturb it little; on a GPU the time between two events, with the host ahead of the
device. FlexAttention gets the same lists of blocks, and a mask_mod that computes the mask, not one that looks it up.
The row names who fails ("without"), and who is timed but has other results ("differs"). FlashAttention 4 compiles for
minutes: see mask_race.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from suite.measuring import commit, device_seconds
from tilewise import TileMask, tile_mask
from tilewise.bench.machine import machine, versions
from tilewise.tiles import FULL, TILE

ROUNDS = {"cpu": 5, "cuda": 12}
PASSES = {"cpu": ("forward", "training"), "cuda": ("forward", "backward")}
# Cycles that the device spends on nothing while the host starts what is measured: about two milliseconds.
HEAD_START = 4_000_000
# (batch, heads, dtype) of the operands.
SIZES = {"cpu": (1, 2, torch.float32), "cuda": (2, 16, torch.bfloat16)}
WINDOW = 1024
# Time in full time at a tenth of the tiles; native time in mask time; SDPA's or FlexAttention's time in ours.
BARS = {"of full": 0.16, "of native": 0.93, "sdpa": 5.0, "flex": 1.2, "fa4": 1.0}
# The largest difference that rounding explains, see apart.
TOLERANCE = 0.03

Call = Callable[[], object]
Entrants = dict[str, Call]
Pairs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Compiled(NamedTuple):
    """A mask function for FlashAttention 4: its name in fa4_masks, what it is compiled for, and tensors it reads."""

    name: str
    constants: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()


class Made(NamedTuple):
    """How a mask is made, its functions for FlexAttention and FlashAttention 4, and the flags of the native kernels
    that do the same.
    """

    make: Callable[[], TileMask]
    pairs: Pairs
    compiled: Compiled
    native: dict[str, Any] | None = None


def once(call: Call, device: str) -> float:
    """Seconds of one call."""
    if device == "cpu":
        start = time.thread_time()
        call()
        return time.thread_time() - start
    torch.cuda._sleep(HEAD_START)  # noqa: SLF001
    return device_seconds(call)


def failure_of(call: Call, device: str) -> str | None:
    """Why a call does not work; compiles what it needs."""
    try:
        call()
        once(call, device)
    except Exception as failure:  # peers may fail in any way
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
    return None


def apart(found: object, wanted: object) -> float:
    """The largest difference of a pass's results: RMS of 128 rows of a head in the RMS of what is wanted there. Packed
    ones have another shape: not judged.
    """
    worst = 0.0
    for some, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        assert isinstance(some, Tensor)
        assert isinstance(right, Tensor)
        if some.shape == right.shape:
            both = some.double() - right.double(), right.double()
            error, size = (x.square().mean(-1).unflatten(-1, (-1, TILE)).mean(-1).sqrt() for x in both)
            # Where hardly anything is wanted the scale is that of the whole.
            distance = (error / size.clamp_min(0.1 * float(size.mean()))).nan_to_num(nan=torch.inf).max()
            worst = max(worst, float(distance))
    return worst


def race(entrants: Entrants, device: str) -> dict[str, float]:
    """The least seconds of each."""
    best = dict.fromkeys(entrants, float("inf"))
    for _ in range(ROUNDS[device]):
        for name in best:
            best[name] = min(best[name], once(entrants[name], device))
    return best


def ranged(make: Callable[[], TileMask], starts: Tensor, ends: Tensor, native: dict[str, Any] | None = None) -> Made:
    """Query i sees the keys starts[i] .. ends[i] - 1."""
    compiled = Compiled("in_range", (), (starts, ends))
    return Made(make, lambda _b, _h, i, j: (j >= starts[i]) & (j < ends[i]), compiled, native)


def masks(seqlen: int, device: str) -> dict[str, Made]:
    """The masks by name."""
    position = torch.arange(seqlen, device=device)
    zero, tiles = torch.zeros_like(position), -(-seqlen // 128)
    listed = (torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(0)) < 0.1).to(device)
    width = 1 << (seqlen.bit_length() // 2)
    height = seqlen // width
    # Spans of 256 image tokens in every 1,024, which see each other inside causal text.
    span = torch.where(position % 1024 < 256, position // 1024 * 1024 + 256, position + 1)
    window, document = (position - WINDOW + 1).clamp_min(0), position // (seqlen // 16) * (seqlen // 16)
    chunk = position // 1024 * 1024

    def first(i: Tensor, size: int) -> Tensor:
        return (i - 6).clamp(0, size - 13)

    def near(i: Tensor, j: Tensor, size: int) -> Tensor:
        return (j >= first(i, size)) & (j < first(i, size) + 13)

    def every(third: int) -> Callable[[], TileMask]:
        def make() -> TileMask:
            dense = listed.repeat_interleave(128, 0).repeat_interleave(128, 1)[:seqlen, :seqlen]
            return TileMask.from_dense(dense & (position % 3 >= third))

        return make

    def drawn(third: int) -> Pairs:
        return lambda _b, _h, i, j: listed[i // 128, j // 128] & (j % 3 >= third)

    return {
        "causal": ranged(
            lambda: tile_mask(lambda _b, _h, i, j: i >= j, seqlen, seqlen, device=device),
            zero,
            position + 1,
            {"causal": True},
        ),
        "window": ranged(
            lambda: TileMask.from_intervals(window, position + 1, seqlen),
            window,
            position + 1,
            {"causal": True, "window": (WINDOW - 1, 0)},
        ),
        "documents": ranged(lambda: TileMask.documents(position // (seqlen // 16)), document, document + seqlen // 16),
        "prefix": ranged(
            lambda: TileMask.prefix(seqlen // 4, seqlen, device=device), zero, (position + 1).clamp_min(seqlen // 4)
        ),
        "image spans": ranged(lambda: TileMask.from_intervals(zero, span, seqlen), zero, span),
        "chunks": ranged(lambda: TileMask.chunks(1024, seqlen, device=device), chunk, chunk + 1024),
        "neighbourhood": Made(
            lambda: TileMask.neighbourhood((height, width), (13, 13), device=device),
            lambda _b, _h, i, j: near(i // width, j // width, height) & near(i % width, j % width, width),
            Compiled("near", (width, 13), (first(position // width, height), first(position % width, width))),
        ),
        # No tile of the first is partial, so its function is not asked and may be the second's.
        "random tiles": Made(every(0), drawn(0), Compiled("thirds", (1,))),
        "random bits": Made(every(1), drawn(1), Compiled("thirds", (1,))),
    }


def passes(q: Tensor, k: Tensor, v: Tensor, attend: Attend, dout: Tensor | None = None) -> Entrants:
    """Forward alone, backward alone, and both; `dout`, or ones, is the gradient of the output."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    made: list[Tensor] = []

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def backward() -> object:
        if not made:
            out = attend(*leaves)
            made.extend((out, torch.ones_like(out) if dout is None else dout))
        return torch.autograd.grad(made[0], leaves, made[1], retain_graph=True)

    def training() -> object:
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)

    return {"forward": forward, "backward": backward, "training": training}


def flex(mask: TileMask, pairs: Pairs) -> Attend:
    """FlexAttention, compiled, with the same lists of blocks."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001

    def blocks(listed: Tensor) -> tuple[Tensor, Tensor]:
        order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return listed.sum(-1, dtype=torch.int32), order.to(torch.int32)

    (partial, partial_at), (full, full_at) = blocks(mask.tiles >= 0), blocks(mask.tiles == FULL)
    block = BlockMask.from_kv_blocks(
        partial, partial_at, full, full_at, BLOCK_SIZE=128, mask_mod=pairs, seq_lengths=mask.shape[2:]
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block)


def entrants(made: Made, mask: TileMask, device: str) -> dict[str, Attend]:
    """Everybody who computes the same, and on a CPU full attention."""
    found: dict[str, Attend] = {"tiles": lambda *x: tw.attention(*x, mask=mask)}
    if made.native is not None:
        flags = made.native
        found["native"] = lambda *x: tw.attention(*x, **flags)
        if device == "cuda":
            found["native triton"] = lambda *x: tw.attention(*x, backend="triton", **flags)
    if device == "cpu":
        found["full"] = tw.attention
        dense = mask.dense()
        found["sdpa"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    else:
        found["tiles triton"] = lambda *x: tw.attention(*x, mask=mask, backend="triton")
        found["flex"] = flex(mask, made.pairs)
    return found


def packed_documents(q: Tensor, backend: str) -> Attend:
    """Sixteen documents of each batch entry as packed sequences: what our kernels for those take for the same work."""
    batch, _, seqlen, _ = q.shape
    length = seqlen // 16
    bounds = torch.arange(0, batch * seqlen + 1, length, dtype=torch.int32, device=q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        return tw.attention_varlen(q, k, v, bounds, bounds, max_seqlen_q=length, max_seqlen_k=length, backend=backend)

    return attend


class Case:
    """One mask and one size, ready to be timed."""

    def __init__(self, name: str, seqlen: int, head_dim: int, device: str) -> None:
        batch, heads, dtype = SIZES[device]
        made = masks(seqlen, device)[name]
        self.device, self.mask = device, made.make()
        self.making = made.make
        draw = torch.Generator(device=device).manual_seed(0)
        # The heads of a token next to each other, so that packing costs nothing.
        q, k, v = (
            torch.randn(batch, seqlen, heads, head_dim, generator=draw, device=device, dtype=dtype).transpose(1, 2)
            for _ in range(3)
        )
        attends = entrants(made, self.mask, device)
        if name == "documents" and device == "cuda":
            attends |= {"native": packed_documents(q, "auto"), "native triton": packed_documents(q, "triton")}
        calls = {who: passes(q, k, v, attend) for who, attend in attends.items()}
        self.runs: dict[str, Entrants] = {which: {} for which in PASSES[device]}
        failed: dict[str, str] = {}
        differing: dict[str, float] = {}
        for which, able in self.runs.items():
            for who, call in calls.items():
                reason = failure_of(call[which], device)
                if reason is not None:
                    failed[f"{who}, {which}"] = reason
                    continue
                able[who] = call[which]
                distance = 0.0 if who == "full" or "tiles" not in able else apart(call[which](), able["tiles"]())
                if distance > TOLERANCE:
                    differing[f"{who}, {which}"] = round(distance, 3)
        self.facts: dict[str, Any] = {
            "mask": name, "seqlen": seqlen, "head_dim": head_dim, "batch": batch, "heads": heads,
            "dtype": str(dtype).removeprefix("torch."), "density": round(self.mask.density, 4),
            "tiles": self.mask.counts._asdict(), "bytes of dense": round(self.mask.nbytes / (seqlen * seqlen), 5),
            "without": failed, "differs": differing,
        }  # fmt: skip

    def made(self) -> float:
        """Seconds that making the mask takes, the host's among them."""
        if self.device == "cpu":
            return once(self.making, self.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.making()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def measured(self) -> dict[str, Any]:
        """Milliseconds of everybody, and the ratios that have a bar."""
        found = self.facts | {"making ms": round(1e3 * min(self.made() for _ in range(5)), 3)}
        for which, calls in self.runs.items():
            times = race(calls, self.device)
            found[f"{which} ms"] = {who: round(1e3 * seconds, 3) for who, seconds in times.items()}
            if "tiles" in times:
                ratios: dict[str, float] = {
                    peer: times[peer] / times["tiles"] for peer in ("sdpa", "flex") if peer in times
                }
                if "full" in times:
                    ratios["of full"] = times["tiles"] / times["full"]
                if "native" in times:
                    ratios["of native"] = times["native"] / times["tiles"]
                found[which] = {key: round(value, 3) for key, value in ratios.items()}
                found[which]["bars missed"] = missed(ratios, self.mask.density)
        return found


def missed(ratios: dict[str, float], density: float) -> list[str]:
    """The bars that these ratios do not reach; time in full time has one at a tenth of the tiles."""
    some: list[str] = [name for name in ("of native", "flex", "fa4") if name in ratios and ratios[name] < BARS[name]]
    if density <= 0.11:
        some += ["of full"] * (ratios.get("of full", 0.0) > BARS["of full"] * density / 0.1)
        some += ["sdpa"] * (ratios.get("sdpa", BARS["sdpa"]) < BARS["sdpa"])
    return some


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=tuple(SIZES))
    parser.add_argument("--seqlen", type=int, nargs="+", default=[4096])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mask", nargs="+", help="names of masks; all of them by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "what": "tile masks; least milliseconds of rounds in turn, one thread where it is a CPU",
        "machine": machine(), "versions": versions(), "commit": commit(), "cases": [],
    }  # fmt: skip
    for seqlen in options.seqlen:
        for head_dim in options.head_dim:
            for name in options.mask or masks(seqlen, options.device):
                found = Case(name, seqlen, head_dim, options.device).measured()
                results["cases"].append(found)
                print(json.dumps(found), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
