"""Tensors that outlive the call which makes them: they must not lie in a pool that is meant for that call.

With `torch.compile(mode="reduce-overhead")` a graph's first run, in which nothing is captured yet, allocates from the
memory pool of the graphs; torch gives up when anything of it is still there afterwards that the graph does not return.
`torch.cuda.use_mem_pool` fills a pool of the user's. Pools within pools do not help, as torch's allocator takes the
outermost one, but both kinds hold for one thread: what is to last is made in another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

__all__ = ["outside_pools"]

Made = TypeVar("Made")


def outside_pools(make: Callable[[], Made], device: torch.device) -> Made:
    """What `make` makes on the device's current stream, in memory of no pool; nothing may be captured on that stream.

    Starting a thread takes 0.1 ms, so this is for what is made once. No mode of the caller's (of fake tensors, of
    inference) is in force there. Where no thread can be started any more, as the interpreter ends, the caller makes it.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    made: Future[Made] = Future()

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # Not a pool of threads: those take no work once the main thread has ended, though others may still serve.
    worker = threading.Thread(target=work, name="tilewise-lasting", daemon=True)
    try:
        worker.start()
    except RuntimeError:
        work()
    else:
        worker.join()
    return made.result()
