"""The kernels for AVX-512 with AMX, on any processor: conformance with their instructions emulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("-k", "bf16 and paged and not tangents and not fp8", "--size", "small"), id="pages"),
        pytest.param(("-k", "bf16"), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_conformance(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    # A cache of its own: code for other instructions would have the same name.
    environment = os.environ | {"TILEWISE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    suite = (str(HERE / "test_conformance.py"), "--backend", "cpu")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "emulated_tiles", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *suite, *chosen], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 20
