"""compute-sanitizer over small calls: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("sanitised_cases.py")
FOUND = 9


def sanitiser() -> str:
    """Where the tool is: on the path, in a CUDA toolkit, or in a wheel of NVIDIA's."""
    toolkits = Path("/usr/local").glob("cuda*/bin")
    wheels = (place for entry in sys.path for place in Path(entry).glob("nvidia/*/bin"))
    for place in (None, *toolkits, *wheels):
        tool = shutil.which("compute-sanitizer", path=None if place is None else str(place))
        if tool is not None:
            return tool
    pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")


def sanitised(tool: str, which: str) -> subprocess.CompletedProcess[str]:
    command = [sanitiser(), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(CASES), which]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_nothing_is_found() -> None:
    done = sanitised("memcheck", "all")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "finished" in done.stdout


def test_warps_do_not_race() -> None:
    """Errors only. Warnings are hazards between lanes of one warp, which run in step: Triton 3.7 lets an elected lane
    initialise a barrier that lane 0 then uses."""
    done = sanitised("racecheck", "all")
    assert "RACECHECK SUMMARY" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert "(0 errors," in done.stdout, done.stdout[-4000:]
    assert "finished" in done.stdout


def test_nothing_is_found_where_warps_of_their_own_load() -> None:
    """Memcheck only: racecheck names the byte by which Triton tells a warp its role, though all meet in between."""
    done = sanitised("memcheck", "many_tiles")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "finished" in done.stdout


def test_a_broken_kernel_is_found() -> None:
    done = sanitised("memcheck", "broken")
    assert done.returncode == FOUND, done.stdout[-4000:] + done.stderr[-2000:]
    assert "out_of_bounds_kernel" in done.stdout
