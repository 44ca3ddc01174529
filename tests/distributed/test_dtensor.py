"""DTensors that are sharded by batch or heads, or replicated, on two gloo ranks; other placements are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "dtensor_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ranks-2")
def test_dtensors_on_two_ranks(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TILEWISE", "OMP"))}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "report.json")], capture_output=True, text=True, timeout=280,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (tmp_path / "report.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, str] = json.loads((tmp_path / "report.json").read_text())
    failed = {name: outcome for name, outcome in found.items() if outcome != "ok"}
    assert not failed, "\n\n".join(f"{name}: {outcome}" for name, outcome in failed.items())
    assert len(found) >= 12
