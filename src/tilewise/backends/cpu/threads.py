"""Runs a program on several threads: torch's own OpenMP team if there is one, else a pool of Python threads.

Sharing torch's team means one pool that follows `torch.set_num_threads`, and no oversubscription of cores. Every thread
runs the same function on the same parameter block; counters inside the block distribute the work.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tilewise import process
from tilewise.backends.cpu.cache import Program

# A worker forked before tilewise was imported, from a process whose torch already had a team.
_IS_FORKED_WORKER = type(multiprocessing.current_process()).__name__ == "ForkProcess"
# GNU's, LLVM's and Intel's OpenMP all export GOMP_parallel.
OPENMP_NAMES = ("libgomp", "libomp", "libiomp5")


def num_threads() -> int:
    """How many threads a call may use: torch's setting, or one in a forked child.

    A thread team does not survive fork(), and waiting for it would hang.
    """
    return 1 if _IS_FORKED_WORKER or process.is_forked() else torch.get_num_threads()


def run(program: Program, block: array[int], threads: int, on_interrupt: Callable[[], object] | None = None) -> None:
    """Run a program with the parameter block on several threads, without the GIL.

    Returns, or raises what a signal handler raised, when no thread uses the block any more. `on_interrupt` is called to
    make that soon.
    """
    data, _ = block.buffer_info()
    if threads == 1:
        program.run(data)
        return
    parallel = _openmp_parallel()
    if parallel is not None:
        parallel(program.address, data, threads, 0)
        return
    others = [_pool(threads - 1).submit(program.run, data) for _ in range(threads - 1)]
    interruption: BaseException | None = None
    try:
        program.run(data)
    except BaseException as error:  # from a signal handler, raised below
        interruption = error
    while not all(other.done() for other in others):
        try:
            wait(others)
        except BaseException as error:  # noqa: PERF203
            interruption = error
            if on_interrupt is not None:
                on_interrupt()
    if interruption is not None:
        raise interruption


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="tilewise")


@functools.cache
def _openmp_parallel() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP runtime torch uses, or None."""
    path = openmp_library()
    if path is None:
        return None
    function = ctypes.CDLL(str(path)).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def openmp_library() -> Path | None:
    """The OpenMP runtime this process has loaded (torch's), or the one torch ships if the system cannot report it."""
    if "OpenMP" not in torch.__config__.parallel_info():
        return None
    maps = Path("/proc/self/maps")
    if maps.exists():
        mapped = {
            Path(line.split(None, 5)[5].strip())
            for line in maps.read_text().splitlines()
            if len(line.split(None, 5)) == 6
        }
        loaded = sorted(path for path in mapped if path.name.startswith(OPENMP_NAMES))
        # Two runtimes may be loaded (scikit-learn brings one): torch's is in its own folder, or in one beside it.
        # The kernel lists paths without symbolic links.
        package = Path(torch.__file__).resolve().parent
        own = [path for path in loaded if {package, package.with_name("torch.libs")} & set(path.parents)]
        return next(iter(own or loaded), None)
    shipped = [path for name in OPENMP_NAMES for path in Path(torch.__file__).parent.glob(f"lib/{name}*")]
    return shipped[0] if shipped else None
