"""Forked children: the threads of torch's OpenMP team do not survive fork(), and a child that waits for them hangs.

A child forked after tilewise was imported therefore uses one thread, also for torch's own operations, many of which
surround the kernels (casts, zeros, sums of gradients). DataLoader workers do the same.
"""

import os

import torch

_is_forked = False


def is_forked() -> bool:
    """Whether this process was forked after tilewise was imported. Asked in every call, so without a system call."""
    return _is_forked


def _in_child() -> None:
    global _is_forked
    _is_forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
