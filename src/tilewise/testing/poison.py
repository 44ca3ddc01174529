"""Poisoned memory: what a kernel leaves unwritten becomes NaN instead of an old correct result."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = ("empty", "empty_like", "empty_strided")
METHODS = ("new_empty", "new_empty_strided")
# The allocators of inductor's code and of the GPU backends.
GUARDS = ("_empty_strided_cpu", "_empty_strided_cuda")


@contextlib.contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Within the block torch.empty and related functions return NaN (integers: their largest value), in every thread.

    torch has such a mode too (`torch.utils.deterministic`), but only together with deterministic algorithms, which
    would change what is tested.
    """
    functions = {name: getattr(torch, name) for name in FUNCTIONS}
    methods = {name: getattr(Tensor, name) for name in METHODS}
    guards: Any = torch._C._dynamo.guards  # noqa: SLF001
    guarded = {name: getattr(guards, name) for name in GUARDS}
    for name, allocate in functions.items():
        setattr(torch, name, _poisoned(allocate))
    for name, allocate in methods.items():
        setattr(Tensor, name, _poisoned(allocate))
    for name, allocate in guarded.items():
        setattr(guards, name, _poisoned(allocate))
    try:
        yield
    finally:
        for name, allocate in functions.items():
            setattr(torch, name, allocate)
        for name, allocate in guarded.items():
            setattr(guards, name, allocate)
        for name in methods:
            # The class inherits these: removing the override uncovers the original.
            delattr(Tensor, name)


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.detach().fill_(math.nan).requires_grad_(tensor.requires_grad)
        if tensor.dtype != torch.bool and not tensor.is_complex():
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return allocate_poisoned
