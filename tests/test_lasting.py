"""What outlives a call is made by a thread of its own, outside of any pool of the calling one."""

import inspect
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from tilewise import lasting
from tilewise.fp8 import rotation

CPU = torch.device("cpu")


def test_another_thread_without_the_callers_modes() -> None:
    with torch.inference_mode():
        made, thread = lasting.outside_pools(lambda: (torch.ones(3, device=CPU), threading.get_ident()), CPU)
    assert not made.is_inference()
    assert thread != threading.get_ident()


def test_errors_come_through() -> None:
    with pytest.raises(ZeroDivisionError):
        lasting.outside_pools(lambda: 1 // 0, CPU)


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


def test_made_by_the_caller_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert lasting.outside_pools(threading.get_ident, CPU) == threading.get_ident()


def test_constants_are_made_so(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[int] = []

    def watched(*args: object, **options: object) -> Tensor:
        makers.append(threading.get_ident())
        return torch.zeros(1 << 16, dtype=torch.uint8, device=CPU)

    monkeypatch.setattr(torch, "tensor", watched)
    rotation.part_sizes(509, CPU)
    inspect.unwrap(rotation.part_sizes)(508, CPU)  # as compilers see it
    assert [maker == threading.get_ident() for maker in makers] == [False, True]
