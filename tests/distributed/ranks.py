"""`ranks.py FOLDER`: gloo ranks that are forked from one process, which imports torch and its compiler for all of them.

Each (worker, number of ranks) leaves a report in the folder: "ok" or what went wrong, by the name of a check.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import decoding_worker
import dtensor_worker
import torch
import worker

RUNS = {
    "context_parallel": (worker, (1, 2, 3, 4)),
    "decoding": (decoding_worker, (1, 2, 3)),
    "dtensors": (dtensor_worker, (2,)),
}


def run(name: str, world: int, folder: Path) -> None:
    """Start the ranks and wait for them."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                place = f"file://{folder}/{name}-{world}.store"
                RUNS[name][0].main(folder / f"{name}-{world}.json", place, rank, world)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    # Most of what a first compilation takes is imports. Without gradients: where autograd has run before a fork, a
    # build of torch with CUDA refuses it in the children.
    torch.compile(torch.square, backend="aot_eager")(torch.ones(1))
    for name, (_, worlds) in RUNS.items():
        for world in worlds:
            run(name, world, Path(sys.argv[1]))
