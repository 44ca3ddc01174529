"""Allocates tensors that outlive the call, outside of memory pools that belong to the call.

With `torch.compile(mode="reduce-overhead")` the first, uncaptured run of a graph allocates from the graphs' memory
pool; torch raises if anything in it survives that the graph does not return. `torch.cuda.use_mem_pool` fills a pool of
the user's. Nested pools do not help, because torch's allocator uses the outermost one. But both kinds of pool apply to
one thread, so lasting tensors are made in another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Made = TypeVar("Made")


def outside_pools(make: Callable[[], Made], device: torch.device) -> Made:
    """The result of `make`, run on the device's current stream, in memory of no pool. Nothing may be captured there.

    Starting a thread is slow, so this is for tensors made once. No mode of the caller (fake tensors, inference) applies
    in the thread. If no thread can be started, at interpreter exit, the caller's thread runs `make`.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    made: Future[Made] = Future()

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # Not a thread pool: pools take no work after the main thread has ended, though other threads may still serve.
    worker = threading.Thread(target=work, name="tilewise-lasting", daemon=True)
    try:
        worker.start()
    except RuntimeError:
        work()
    else:
        worker.join()
    return made.result()
