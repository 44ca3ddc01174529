"""The conformance suite with the CPU kernels of other processors: their lanes and tiles, compiled for this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "test_conformance.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", ["NEON", "AVX2", "GENERIC"])
def test_kernels_of_other_processors_conform(table: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(SUITE), "--backend", "cpu", "--isa", table]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
