"""The words of other interfaces in those of tilewise, and its errors in theirs; shared by the drop-ins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidProblem

__all__ = [
    "Window",
    "flag_of",
    "length",
    "number_of",
    "places",
    "renamed",
    "softcap_of",
    "stacked",
    "window_of",
    "worded",
]

Window = tuple[int | None, int | None]
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
# What flash-attn calls arguments that have another name in tilewise.
FLASH_NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size"}


def renamed(error: InvalidProblem, names: dict[str, str]) -> InvalidProblem:
    """The same error about the argument that the caller knows."""
    return InvalidProblem(names.get(error.argument, error.argument), error.expected, error.got, error.fix)


def worded(function: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """A function of flash-attn whose errors name its arguments as they are written there."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        try:
            return function(*args, **kwargs)
        except InvalidProblem as error:
            raise renamed(error, FLASH_NAMES) from None

    return call


def flag_of(name: str, value: object) -> bool:
    """True or False, which callers also write as 1 and 0, as numpy's own, or as None for False."""
    if value is None or isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, int) or value not in (0, 1):
        raise InvalidProblem(name, "True or False", repr(value), "Pass a Python bool.")
    return bool(value)


def number_of(value: Any) -> Any:
    """A number of numpy's as one of Python's; anything else as it is."""
    return value.item() if isinstance(value, (np.floating, np.integer)) else value


def stacked(name: str, tensor: object, parts: int, dim: int) -> tuple[Tensor, ...]:
    """The parts of a tensor (..., parts, heads, dim) whose dimension `dim` stacks them."""
    if not isinstance(tensor, Tensor) or tensor.dim() != dim + 3 or tensor.shape[dim] != parts:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        rows = "batch, seqlen" if dim == 2 else "total"
        fix = f"Stack the tensors along dimension {dim}."
        raise InvalidProblem(name, f"a tensor ({rows}, {parts}, heads, dim)", got, fix)
    return tensor.unbind(dim)


def window_of(window_size: tuple[int, int]) -> Window | None:
    """flash-attn's window: a negative side is unbounded."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        fix = "A causal window of the last n keys is (n - 1, 0); -1 is an unbounded side."
        raise InvalidProblem("window_size", "a pair (left, right)", repr(window_size), fix) from None
    if left < 0 and right < 0:
        return None
    return None if left < 0 else left, None if right < 0 else right


def softcap_of(softcap: float) -> float | None:
    """flash-attn's softcap: anything above 0 switches it on."""
    return number_of(softcap) if softcap > 0.0 else None


def length(value: int | Tensor) -> int:
    """A longest length, which callers also pass as a tensor with one element."""
    return int(value.item()) if isinstance(value, Tensor) else value


def places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every packed row; rows past the last sequence get the sequence number `batch`."""
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    return sequence, rows - cu_seqlens[sequence]
