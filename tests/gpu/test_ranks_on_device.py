"""Context parallelism with CUDA tensors: two ranks that share one GPU, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_ranks_on_one_gpu() -> None:
    script = Path(__file__).parent / "ranks_on_one_gpu.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert "12 calls agree" in done.stdout, done.stdout[-2000:] + done.stderr[-6000:]
