"""compute-sanitizer over small calls: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

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
    """The cases under the tool. It need not judge what calls of the driver return: tilewise and torch check that, and
    Triton 3.9 asks on purpose for an attribute of kernels that older drivers refuse.
    """
    judged = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitiser(), "--tool", tool, *judged, "--error-exitcode", str(FOUND), sys.executable, str(CASES), which]
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


@pytest.mark.hopper
@pytest.mark.exhaustive
def test_racecheck_of_hopper_kernels_finds_nothing_but_what_mbarriers_order() -> None:
    """racecheck knows bar.sync, but neither mbarriers nor TMA.

    It therefore reports two hand-overs that mbarriers or Triton's start of the roles do order: the number of the next
    tile in the mailbox, and the word through which `warp_specialize` tells a warp its role. Anything else is a race.
    """
    done = sanitised("racecheck", "hopper")
    said = done.stdout + done.stderr
    assert "finished" in said, said[-3000:]
    assert "COMPUTE-SANITIZER" in said, said[-3000:]
    places = set(re.findall(r"in (\w+\.py):(\d+)", said))
    assert [place for place in places if not is_hand_over(*place)] == [], said[-3000:]


def is_hand_over(file: str, line: str) -> bool:
    """Whether a source line is of the mailbox, or of a kernel's own body, which only starts the roles."""
    source = Path(tilewise.__file__).parent / "backends" / "hopper" / file
    if not source.exists():
        return False
    above = source.read_text().splitlines()[: int(line)]
    place = next((text for text in reversed(above) if re.match("(class|def) ", text)), "")
    return place == "class Mailbox:" or re.match(r"def \w+_kernel\(", place) is not None


def test_a_broken_kernel_is_found() -> None:
    done = sanitised("memcheck", "broken")
    assert done.returncode == FOUND, done.stdout[-4000:] + done.stderr[-2000:]
    assert "out_of_bounds_kernel" in done.stdout
