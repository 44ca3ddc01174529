"""Tile masks beside FlashAttention 4's block sparsity (flash_attn.cute), on a GPU.

    FA4=<its site folder> PYTHONPATH=src:bench python3 bench/mask_race.py [--seconds 240] [--flex] [--json FILE]

FlashAttention 4 compiles a kernel for every mask function, head_dim and pass, for a minute or more. Each of these has a
process of its own, so that they compile at the same time; then they take turns on the GPU. A process whose turn it is
checks each entrant, one head against fp64 and all heads against ours, then times those that are right, in turn, round
after round. Lengths are no part of what is compiled, except where the mask function holds one. A cell without a time
says why. FlexAttention takes part on request: it compiles for every mask and length.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from suite.measuring import commit
from tile_masks import BARS, SIZES, TOLERANCE, Made, apart, flex, masks, passes, race
from tilewise.bench.machine import machine, versions

NAMES = ("prefix", "image spans", "documents", "chunks", "neighbourhood", "random tiles", "random bits")
PASSES = ("forward", "backward")
DEVICE = "cuda"
# Seconds of a turn; who takes longer hangs, and is ended.
TURN = 60
# Query rows of which the fp64 reference holds all scores at once.
ROWS = 2048


def exact(inputs: tuple[Tensor, ...], made: Made) -> tuple[Tensor, ...]:
    """Output, dq, dk and dv of one head in fp64, of q, k, v and dout (seqlen, head_dim)."""
    q, k, v, dout = (x.double() for x in inputs)
    at = torch.arange(len(q), device=q.device)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for rows in at.split(ROWS):
        seen = made.pairs(rows, rows, rows[:, None], at)
        scores = (q[rows] @ k.T).mul_(q.shape[1] ** -0.5).masked_fill_(~seen, -torch.inf)
        p = scores.softmax(-1).nan_to_num_(0.0)
        out[rows] = p @ v
        dv += p.T @ dout[rows]
        ds = dout[rows] @ v.T
        ds = ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[1] ** -0.5)
        dq[rows] = ds @ k
        dk += ds.T @ q[rows]
    return out, dq, dk, dv


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that results of this size take next, so that it is seen if nobody writes them."""
    for _ in [torch.full_like(like, torch.nan) for _ in range(4)]:
        pass


class Cell:
    """One mask, length, head_dim and pass."""

    def __init__(self, name: str, seqlen: int, head_dim: int, which: str, *, with_flex: bool) -> None:
        batch, heads, dtype = SIZES[DEVICE]
        self.name, self.seqlen, self.head_dim, self.which = name, seqlen, head_dim, which
        self.made = masks(seqlen, DEVICE)[name]
        self.mask = self.made.make()
        draw = torch.Generator(device=DEVICE).manual_seed(0)
        self.inputs = tuple(
            torch.randn(batch, seqlen, heads, head_dim, generator=draw, device=DEVICE, dtype=dtype).transpose(1, 2)
            for _ in range(4)
        )
        self.without: dict[str, str] = {}
        self.calls: dict[str, Callable[[], Any]] = {"tiles": self.called(lambda *x: tw.attention(*x, mask=self.mask))}
        if with_flex:
            self.calls["flex"] = self.called(flex(self.mask, self.made.pairs))

    def called(self, attend: Callable[..., Any]) -> Callable[[], Any]:
        """The pass of a function that autograd knows."""
        q, k, v, dout = self.inputs
        return passes(q, k, v, attend, dout)[self.which]

    def add_fa4(self) -> None:
        """Compile FlashAttention 4 if it is not yet: its first call, on numbers that do not matter."""
        q, k, v, dout = self.inputs

        def compiled() -> Callable[[], Any]:
            import fa4_masks

            name, constants, tensors = self.made.compiled
            seen = getattr(fa4_masks, name)
            attention = fa4_masks.Attention(self.mask.tiles, seen(*constants) if constants else seen, tensors)
            if self.which == "forward":
                attention.forward(q, k, v)
                return lambda: attention.forward(q, k, v)
            lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
            attention.backward(q, k, v, torch.zeros_like(q), lse, dout)

            def backward() -> Any:
                if not made:
                    out, lse = tw.attention(q, k, v, mask=self.mask, return_lse=True)
                    # In the layout of q, as its own forward would write it.
                    made.extend((torch.empty_like(q).copy_(out), lse))
                return attention.backward(q, k, v, made[0], made[1], dout)

            made: list[Tensor] = []
            return backward

        if (call := self.tried("fa4", compiled)) is not None:
            self.calls["fa4"] = call

    def tried(self, who: str, call: Callable[[], Any]) -> Any:
        """What a call returns, or None: then `without` says why."""
        try:
            found = call()
            torch.cuda.synchronize()
        except Exception as failure:  # peers may fail in any way
            self.without[who] = " ".join(f"{type(failure).__name__}: {failure}".split())[:400]
            self.calls.pop(who, None)
            return None
        return found

    def measured(self) -> dict[str, Any]:
        """Milliseconds of everybody who is right."""
        out, *gradients = exact(tuple(x[-1, -1] for x in self.inputs), self.made)
        wanted = (out,) if self.which == "forward" else tuple(gradients)
        errors: dict[str, float] = {}
        ours: Any = None
        for who, call in list(self.calls.items()):
            poison(self.inputs[0])
            if (found := self.tried(who, call)) is None:
                continue
            results = found if isinstance(found, tuple) else (found,)
            ours = results if ours is None else ours
            errors[who] = round(max(apart(tuple(x[-1, -1] for x in results), wanted), apart(results, ours)), 4)
            if errors[who] > TOLERANCE:
                self.without[who] = f"wrong: RMS error of some 128 rows {errors[who]} of theirs"
                del self.calls[who]
        times = race(self.calls, DEVICE)
        ratios = {who: round(times[who] / times["tiles"], 3) for who in times if who != "tiles" and "tiles" in times}
        return {
            **self.key(), "density": round(self.mask.density, 4), "tiles": self.mask.counts._asdict(),
            "ms": {who: round(1e3 * seconds, 4) for who, seconds in times.items()}, "of ours": ratios,
            "bars missed": [who for who in ratios if ratios[who] < BARS[who]],
            "RMS error": errors, "without": self.without,
        }  # fmt: skip

    def key(self) -> dict[str, Any]:
        """What names the cell."""
        return {"mask": self.name, "seqlen": self.seqlen, "head_dim": self.head_dim, "pass": self.which}


def work(task: dict[str, Any], folder: Path) -> None:
    """One process: compile, wait for a turn, check and time each cell. Without a pass it compiles ours for all."""
    start, head_dim = time.time(), task["head_dim"]
    if task["pass"] is None:
        for which in PASSES:
            for name, seqlen in task["cells"]:
                Cell(name, seqlen, head_dim, which, with_flex=False).calls["tiles"]()
        print(f"ours, head_dim {head_dim}: compiled in {time.time() - start:.0f} s", flush=True)
        return
    cells = [Cell(name, seqlen, head_dim, task["pass"], with_flex=task["flex"]) for name, seqlen in task["cells"]]
    for cell in cells:
        # They have the same kernel: what fails once is not compiled again.
        if (failed := cells[0].without.get("fa4")) is None:
            cell.add_fa4()
        else:
            cell.without["fa4"] = failed
    seconds = time.time() - start
    for cell in cells:
        for who in set(cell.calls) - {"fa4"}:
            cell.tried(who, cell.calls[who])
    with (folder / "turn").open("w") as turn, (folder / f"{task['index']}.jsonl").open("w") as results:
        fcntl.flock(turn, fcntl.LOCK_EX)
        print(f"{cells[0].key()} and {len(cells) - 1} more: compiled in {seconds:.0f} s", flush=True)
        signal.alarm(TURN)
        for cell in cells:
            results.write(json.dumps({**cell.measured(), "compiling s": round(seconds)}) + "\n")
            results.flush()


def tasks(seqlens: list[int], head_dims: list[int], names: list[str], *, with_flex: bool) -> list[dict[str, Any]]:
    """What each process does: the cells of one mask function. The first ones compile our kernels."""
    groups: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    for seqlen in seqlens:
        for name in names:
            compiled = masks(seqlen, "cpu")[name].compiled
            groups.setdefault((compiled.name, compiled.constants), []).append((name, seqlen))
    ours: list[dict[str, Any]] = [
        {"head_dim": head_dim, "pass": None, "cells": [(names[0], seqlen) for seqlen in seqlens]}
        for head_dim in head_dims
    ]
    theirs: list[dict[str, Any]] = [
        {"head_dim": head_dim, "pass": which, "cells": cells, "flex": with_flex}
        for which in reversed(PASSES)
        for head_dim in head_dims
        for cells in groups.values()
    ]
    return [{**task, "index": index} for index, task in enumerate(ours + theirs)]


def run(all_tasks: list[dict[str, Any]], folder: Path, until: float) -> list[dict[str, Any]]:
    """The cells of all processes; those that are not done at the deadline have no times."""
    site = os.environ.get("FA4")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path += [site, f"{site}/nvidia_cutlass_dsl/dsl_packages"] if site else []
    # Each has one core.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    started = [
        subprocess.Popen([sys.executable, __file__, "--work", json.dumps(task), str(folder)], env=env)
        for task in all_tasks
    ]
    while any(one.poll() is None for one in started) and time.time() < until:
        time.sleep(0.2)
    found: list[dict[str, Any]] = []
    for task, one in zip(all_tasks, started, strict=True):
        reason = "not run: no time left" if one.poll() is None else f"not run: the process ended with {one.returncode}"
        one.kill()
        one.wait()
        file = folder / f"{task['index']}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for name, seqlen in task["cells"][len(rows) :] if task["pass"] else ():
            key = {"mask": name, "seqlen": seqlen, "head_dim": task["head_dim"], "pass": task["pass"]}
            rows.append({**key, "ms": {}, "of ours": {}, "without": {"all": reason}})
        found += rows
    return found


def main() -> None:
    """Race, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mask", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--flex", action="store_true", help="FlexAttention takes part")
    parser.add_argument("--seconds", type=float, default=240.0, help="what is not done by then is not run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(json.loads(options.work[0]), Path(options.work[1]))
        return
    until = time.time() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        todo = tasks(options.seqlen, options.head_dim, options.mask, with_flex=options.flex)
        cells = run(todo, Path(folder), until)
    for cell in cells:
        key = f"{cell['mask']:14} {cell['seqlen']:6} {cell['head_dim']:4} {cell['pass']:9}"
        print(key, cell["ms"], cell["of ours"], cell["without"] or "")
    if options.json:
        batch, heads, dtype = SIZES[DEVICE]
        results = {
            "what": "tile masks beside FlashAttention 4 with blocks of 128 x 128; least milliseconds of rounds in turn",
            "batch": batch, "heads": heads, "dtype": str(dtype).removeprefix("torch."),
            "machine": machine(), "versions": versions(), "commit": commit(), "cases": cells,
        }  # fmt: skip
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
