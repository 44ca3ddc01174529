"""The process that imported tilewise first: a forked child must not wait for threads that it does not have."""

import os

__all__ = ["is_forked"]

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after tilewise had been imported."""
    return os.getpid() != _IMPORTED_IN
