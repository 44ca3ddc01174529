"""The same work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_concurrently(work: Callable[[], None], threads: int = 4) -> None:
    """Call `work` in so many threads; the first exception of any of them is raised here."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=guarded) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failures:
        raise failures[0]
