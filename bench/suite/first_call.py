"""The first call of a fresh process, with an empty kernel cache or a filled one; a process for each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any

from suite.cases import Case

__all__ = ["first_call_seconds"]

LEAST_PROCESSES, TIMEOUT = 2, 120

# Importing is not counted; the cache directory is set here, so that the user's own cache stays as it is.
CHILD = """
import pathlib, sys, time
import torch
import tilewise
from tilewise import settings
folder, threads, shape, dtype, causal = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "True"
torch.set_num_threads(threads)
q = torch.randn(tuple(map(int, shape.split(",")))).to(getattr(torch, dtype))
with settings.overridden(cache_dir=pathlib.Path(folder)):
    start = time.perf_counter()
    tilewise.attention(q, q, q, causal=causal)
    print(time.perf_counter() - start)
"""


def first_call_seconds(case: Case, threads: int) -> list[float]:
    """Seconds of a first call, once per process; where the case is not cold, a process before them filled the cache."""
    with tempfile.TemporaryDirectory() as filled:
        if not case.cold:
            _first_call(case, filled, threads)
        return [_in_folder(case, filled, threads) for _ in range(LEAST_PROCESSES)]


def _in_folder(case: Case, filled: str, threads: int) -> float:
    if not case.cold:
        return _first_call(case, filled, threads)
    with tempfile.TemporaryDirectory() as empty:
        return _first_call(case, empty, threads)


def _first_call(case: Case, folder: str, threads: int) -> float:
    shape = ",".join(map(str, (case.batch, case.num_heads, case.seqlen_q, case.head_dim)))
    arguments: list[Any] = [sys.executable, "-c", CHILD, folder, threads, shape, case.dtype, case.causal]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the process failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)
