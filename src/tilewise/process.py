"""Forked children: the threads of torch's OpenMP team do not survive fork(), and a child that waits for them hangs.

A child that is forked after tilewise was imported therefore works with one thread, torch's own operations included:
many of them surround the kernels (casts, zeros, sums of gradients). A DataLoader does the same for its workers.
"""

import os

import torch

__all__ = ["is_forked"]

_IMPORTED_IN = os.getpid()


def is_forked() -> bool:
    """Whether this process was forked after tilewise had been imported."""
    return os.getpid() != _IMPORTED_IN


def _work_alone() -> None:
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_work_alone)
