"""Runs a program while Python's signal handlers stay responsive: the host side of `stopping`."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from array import array
from collections.abc import Generator
from typing import Any

from tilewise.backends.cpu import params as f
from tilewise.backends.cpu import threads
from tilewise.backends.cpu.cache import Program

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int64)


def run(program: Program, block: array[int], count: int) -> None:
    """Like `threads.run`. In the main thread, pending signal handlers run about every 50 ms. An exception of a handler
    ends the call and is raised here.
    """
    functions = _functions()
    if functions is None or threading.get_ident() != threading.main_thread().ident:
        threads.run(program, block, count)
        return
    raised: list[BaseException] = []
    steps = _steps(block, raised)
    next(steps)
    callback = _CALLBACK(steps.__next__)
    block[f.THREAD_ID], block[f.CLOCK], block[f.SLEEP] = functions
    block[f.CALLER], block[f.CLOCK_ID] = threading.get_ident(), time.CLOCK_MONOTONIC
    block[f.POLL] = ctypes.cast(callback, ctypes.c_void_p).value or 0
    threads.run(program, block, count, on_interrupt=functools.partial(block.__setitem__, f.STOP, 1))
    if raised:
        raise raised.pop()


def _steps(block: array[int], raised: list[BaseException]) -> Generator[int, None, None]:
    """A generator whose steps the kernels call. Python runs signal handlers when the generator resumes, which is inside
    `try`. At the start of a plain function they would raise before anything could catch it.
    """
    while True:
        try:
            while True:
                yield 0
        except GeneratorExit:  # noqa: PERF203
            return
        except BaseException as error:  # raised by `run`
            block[f.STOP] = 1
            raised.append(error)


@functools.cache
def _functions() -> tuple[int, ...] | None:
    """Addresses of the C functions that kernels call: thread id, clock, and sleep in microseconds.

    None where the system lacks them: signals are then handled after the call.
    """
    try:
        library: Any = ctypes.CDLL(None)
        found: tuple[Any, ...] = library.pthread_self, library.clock_gettime, library.usleep
    except (AttributeError, OSError, TypeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found)
