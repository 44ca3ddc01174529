"""A child that was forked after torch started its threads must not wait for them."""

import subprocess
import sys

import pytest

FORKED = """
import os, torch, tilewise as tw
torch.set_num_threads(2)
q = torch.randn(1, 4, 256, 64)
(torch.randn(512, 512) @ torch.randn(512, 512)).sum()  # torch's team is up before the fork
{before}
child = os.fork()
if child == 0:
    out = tw.attention(q, q, q, causal=True)
    os._exit(0 if out[0, 0, -1].isfinite().all() else 1)  # a small op: a large one of torch would wait for its team
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("before", ["", "tw.attention(q, q, q)"], ids=["first call in the child", "called before"])
def test_a_plain_fork_works_alone(before: str) -> None:
    code = FORKED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"
