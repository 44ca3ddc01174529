"""Forked children: the threads of torch's OpenMP team do not survive fork(), and a child that waits for them hangs.

A child forked after tilewise was imported therefore uses one thread, also for torch's own operations, many of which
surround the kernels (casts, zeros, sums of gradients). DataLoader workers do the same.
"""

import os

import torch

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after tilewise was imported."""
    return os.getpid() != _IMPORTED_IN


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
