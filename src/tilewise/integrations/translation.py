"""Translates arguments of other interfaces to tilewise's, and its errors to their names; shared by the drop-ins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.memory import check_allocated
from tilewise.subclasses import check_class

Window = tuple[int | None, int | None]
UNBOUNDED = (-1, -1)
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
# flash-attn's names of tilewise's arguments.
FLASH_NAMES = {"dropout": "dropout_p", "scale": "softmax_scale", "window": "window_size"}
CACHE_NAMES = FLASH_NAMES | {"k_pages": "k_cache", "v_pages": "v_cache", "seqlens_k": "cache_seqlens"}


class InvalidCall(InvalidProblem, RuntimeError):
    """A wrong argument of a drop-in. The original would raise RuntimeError or ValueError: this is both."""


def worded(names: dict[str, str] = FLASH_NAMES) -> Callable[[Callable[Arguments, Made]], Callable[Arguments, Made]]:
    """Makes the errors of a drop-in use its argument names, and be of a type that its callers expect."""

    def made(function: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
            try:
                return function(*args, **kwargs)
            except InvalidProblem as error:
                name = names.get(error.argument, error.argument)
                raise InvalidCall(name, error.expected, error.got, error.fix) from None

        # Ring attention asks `inspect.getfullargspec`, which ignores `__wrapped__`.
        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call

    return made


def require_tensors(**tensors: object) -> None:
    """Refuse anything but dense tensors, before any attribute is used."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidProblem(name, "a torch.Tensor", type(tensor).__name__, "Convert it with torch.as_tensor.")
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
            raise InvalidProblem(name, "a dense tensor", got, "Convert it with .to_dense() or .to_padded_tensor().")
        check_class(name, tensor)


def check_integers(name: str, tensor: object, shape: tuple[int, ...], fix: str) -> None:
    """Raise unless it is an integer tensor of this shape."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.int32, torch.int64) and tuple(tensor.shape) == shape:
        check_class(name, tensor)
        return
    got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
    raise InvalidProblem(name, f"a tensor of integers of shape {shape}", got, fix)


def flag_of(name: str, value: object) -> bool:
    """A bool from True or False, 1 and 0, NumPy or torch scalars, or None for False."""
    if value is True or value is False:
        return bool(value)
    given, value = value, number_of(value, name)
    if value is None:
        return False
    if not isinstance(value, int) or value not in (0, 1):
        raise InvalidProblem(name, "True or False", repr(given), "Pass a Python bool.")
    return bool(value)


def number_of(value: Any, name: str = "a number") -> Any:
    """A NumPy scalar or a tensor without dimensions as a Python number; anything else unchanged.

    A tensor on a GPU synchronises. One that requires a gradient is refused, because it would get none.
    """
    # First, because testing for a tensor is slow. NumPy's float64 is a float, too.
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, np.generic)):
        return value
    if not isinstance(value, (np.generic, np.ndarray, Tensor)) or value.ndim:
        return value
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        fix = "It gets none: pass it detached, and multiply q by it where it is to be learnt."
        raise InvalidProblem(name, "a number that requires no gradient", "one that does", fix)
    return value.item()


def stacked(name: str, tensor: object, parts: int, dim: int) -> tuple[Tensor, ...]:
    """The parts of a tensor (..., parts, heads, dim) whose dimension `dim` stacks them."""
    if not isinstance(tensor, Tensor) or tensor.dim() != dim + 3 or tensor.shape[dim] != parts:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        rows = "batch, seqlen" if dim == 2 else "total"
        fix = f"Stack the tensors along dimension {dim}."
        raise InvalidProblem(name, f"a tensor ({rows}, {parts}, heads, dim)", got, fix)
    check_class(name, tensor)
    check_allocated((name,), (tensor,))
    return tensor.unbind(dim)


def window_of(window_size: tuple[int, int]) -> Window | None:
    """flash-attn's window: a negative side is unbounded."""
    if window_size is UNBOUNDED:
        return None
    try:
        left, right = map(number_of, window_size)
        unbounded = bool(left < 0), bool(right < 0)
    except (TypeError, ValueError, RuntimeError):
        fix = "A causal window of the last n keys is (n - 1, 0); -1 is an unbounded side."
        raise InvalidProblem("window_size", "a pair (left, right) of integers", repr(window_size), fix) from None
    return None if all(unbounded) else (None if unbounded[0] else left, None if unbounded[1] else right)


def softcap_of(softcap: float) -> float | None:
    """flash-attn's softcap: anything above 0 switches it on."""
    cap = softcap if softcap.__class__ is float else number_of(softcap, "softcap")
    # A comparison, not math.isnan: compilers trace it.
    if not isinstance(cap, int | float) or cap != cap:
        raise InvalidProblem("softcap", "a number", repr(softcap), "0.0 switches it off.")
    return cap if cap > 0.0 else None


def length(name: str, value: int | Tensor | None) -> int | None:
    """A longest length, also as a tensor with one element or a NumPy number; None if unknown."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InvalidProblem(name, "an integer", f"a tensor of shape {tuple(value.shape)}", "Pass the longest one.")
        return int(value.item())
    longest: int | None = number_of(value)
    return longest


def places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(sequence, position) of every packed row. Rows past the last sequence get the sequence number `batch`."""
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    return sequence, rows - cu_seqlens[sequence]


def top_left(q: Tensor, k: Tensor, v: Tensor, dim: int = 2) -> tuple[bool, Window | None, Tensor, Tensor]:
    """(causal, window, k, v) that keep key j for query i iff j <= i; `dim` is that of the tokens."""
    seqlen_q, seqlen_k = q.shape[dim], k.shape[dim]
    if seqlen_q > seqlen_k:
        return False, (None, seqlen_q - seqlen_k), k, v
    if seqlen_q < seqlen_k:
        # No query sees the keys past the last query.
        k, v = k.narrow(dim, 0, seqlen_q), v.narrow(dim, 0, seqlen_q)
    return True, None, k, v
