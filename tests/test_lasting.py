"""What outlives a call is made by a thread of its own, outside of any pool of the calling one."""

import subprocess
import sys
import threading

import torch

from tilewise import lasting

CPU = torch.device("cpu")


def test_another_thread_without_the_callers_modes() -> None:
    with torch.inference_mode():
        made, thread = lasting.outside_pools(lambda: (torch.ones(3, device=CPU), threading.get_ident()), CPU)
    assert not made.is_inference()
    assert thread != threading.get_ident()


def test_made_also_after_the_main_thread_has_ended() -> None:
    """A thread that serves may outlive it."""
    code = """
import threading, torch
from tilewise import fp8

def serve():
    threading.main_thread().join()
    fp8.quantize(torch.ones(1, 1, 4, 16), rotation=True)
    print("served")

threading.Thread(target=serve).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "served\n", done.stderr
