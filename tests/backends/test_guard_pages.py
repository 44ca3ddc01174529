"""CPU kernels touch no byte outside their memory: inputs, outputs and workspaces lie against forbidden pages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise

PROGRAM = Path(__file__).with_name("guarded_memory.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="pages are forbidden by Linux's mprotect"),
]


def guarded(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(tilewise.__file__).parents[1])}
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    last = (done.stdout.splitlines() or [""])[-1]
    assert done.returncode == 0, f"exit status {done.returncode} at: {last}\n{done.stderr[-3000:]}"
    assert last.endswith(" done")


def test_kernels_stay_within_their_memory() -> None:
    assert_clean(guarded("cases", "0.15"))


def test_a_tile_mask_written_behind_torch_s_back_reads_no_other_memory() -> None:
    """Through NumPy, which no count of writes notices: tiles that name no bits are hidden, in every pass."""
    assert_clean(guarded("masks"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", ["NEON", "AVX2", "GENERIC", None])
def test_kernels_of_all_processors_stay_within_their_memory(table: str | None) -> None:
    assert_clean(guarded("cases", "1.0", *(("--isa", table) if table else ())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's autograd does not survive a fork where there is a GPU")
def test_accesses_beyond_the_memory_are_seen() -> None:
    """A row of q, a key, an element before q, one behind dk, a cache line of a workspace: each ends a process."""
    done = guarded("faults")
    seen = dict(line.split() for line in done.stdout.splitlines())
    assert seen.pop("none") == "0", done.stderr
    assert set(seen) == {"row", "key", "element", "workspace", "gradient"}
    assert set(seen.values()) == {str(-signal.SIGSEGV)}, seen
