"""Context parallelism on 1 to 4 gloo ranks, DTensors on 2: one torchrun for each runs all checks of a worker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT = 240
EXAMPLE = str(HERE.parents[1] / "examples" / "long_context.py")


def torchrun(script: str, world: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder on that many ranks."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TILEWISE", "OMP"))} | {
        "OMP_NUM_THREADS": "1"
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), str(HERE / script)]
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=TIMEOUT, env=environment,
        check=False,
    )  # fmt: skip


def ranks(world: int) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(f"ranks-{world}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "world", "least"),
    [
        pytest.param("worker.py", 1, 20, marks=ranks(1)),
        pytest.param("worker.py", 2, 48, marks=ranks(2)),
        pytest.param("worker.py", 3, 30, marks=ranks(3)),
        pytest.param("worker.py", 4, 22, marks=ranks(4)),
        pytest.param("dtensor_worker.py", 2, 12, marks=ranks(2)),
    ],
)
def test_every_check_holds(script: str, world: int, least: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = torchrun(script, world, str(report))
    assert report.exists(), f"{world} ranks wrote no report\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    found: dict[str, str] = json.loads(report.read_text())
    failed = {name: outcome for name, outcome in found.items() if outcome != "ok"}
    assert not failed, "\n\n".join(f"{name}: {outcome}" for name, outcome in failed.items())
    assert len(found) >= least


@pytest.mark.slow
@pytest.mark.xdist_group("ranks-1")
def test_the_example_trains_as_one_device_would() -> None:
    done = torchrun(EXAMPLE, 2, "--steps", "3", "--seqlen", "501", "--check")
    assert done.returncode == 0, done.stderr[-4000:]
    alone = re.search(r"on one device: ([\d.]+)", done.stdout)
    together = re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert alone is not None
    assert together is not None
    assert abs(float(alone[1]) - float(together[1])) < 1e-5
    assert float(together[2]) < float(together[1])
    assert "peak memory a rank" in done.stdout


THREADS = """
import pathlib, runpy, sys
sys.argv = [sys.argv[1], "--steps", "1", "--seqlen", "64"]
runpy.run_path(sys.argv[0], run_name="__main__")
print("threads:", [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
def test_the_examples_group_ends_with_its_threads() -> None:
    """Threads of gloo that outlive the interpreter abort the process, though rarely: when they let go of a tensor."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS, EXAMPLE], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert "threads:" in done.stdout
    assert "gloo" not in done.stdout.split("threads:")[1]
