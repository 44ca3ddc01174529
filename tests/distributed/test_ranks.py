"""Context parallelism, decoding and DTensors on 1 to 4 gloo ranks, forked from one process, which run all checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "long_context.py"
# The reports, and how many checks each has at the least.
REPORTS = {
    "context_parallel-1": 24,
    "context_parallel-2": 70,
    "context_parallel-3": 62,
    "context_parallel-4": 26,
    "decoding-1": 25,
    "decoding-2": 27,
    "decoding-3": 28,
    "dtensors-2": 12,
}


def python(*arguments: str) -> str:
    """What a process of its own prints, with one thread for each of its ranks."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TILEWISE")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_check_holds(tmp_path: Path) -> None:
    python(str(HERE / "ranks.py"), str(tmp_path))
    for name, least in REPORTS.items():
        found: dict[str, str] = json.loads((tmp_path / f"{name}.json").read_text())
        failed = [f"{name}, {check}: {outcome}" for check, outcome in found.items() if outcome != "ok"]
        assert not failed, "\n\n".join(failed)
        assert len(found) >= least


THREADS = """
import pathlib, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("threads:", [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
def test_the_example_trains_as_one_device_would_and_ends_with_its_threads(tmp_path: Path) -> None:
    """Threads of gloo that outlive the interpreter abort the process, though rarely: when they let go of a tensor."""
    (script := tmp_path / "example.py").write_text(THREADS)
    options = [str(script), str(EXAMPLE), "--steps", "3", "--seqlen", "501", "--check"]
    said = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options)
    alone = re.search(r"on one device: ([\d.]+)", said)
    together = re.search(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert alone is not None
    assert together is not None
    assert abs(float(alone[1]) - float(together[1])) < 1e-5
    assert float(together[2]) < float(together[1])
    assert "peak memory a rank" in said
    assert said.count("threads:") == 2
    assert "gloo" not in "".join(said.split("threads:")[1:])
