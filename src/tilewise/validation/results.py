"""Validates memory that the caller gives for a result: no gradients, no shared elements, no input in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.memory import extent, overlaps_itself
from tilewise.operands import Operands
from tilewise.symbolic import NotTraceableError, largest, smallest


def check_out(out: Tensor, *, needs_grad: bool) -> None:
    """What needs no address, so that compilers can trace it. `needs_grad`: autograd would record the call."""
    if needs_grad or (out.requires_grad and torch.is_grad_enabled()):
        got = "a call that autograd records" if needs_grad else "an out that requires a gradient"
        fix = "Call it under torch.no_grad(), or let the call allocate its result."
        raise InvalidProblem("out", "a call without gradients: they need a result of their own", got, fix)
    if not torch.compiler.is_compiling():  # the op checks it again
        check_strides(out)


def check_strides(out: Tensor) -> None:
    """Every element has memory of its own."""
    if out.is_neg():
        raise InvalidProblem(
            "out", "memory that holds its values", "a negated view", "Pass the tensor it is a view of."
        )
    if overlaps_itself(out):
        expected, fix = "elements with memory of their own", "Allocate it, as torch.empty does."
        raise InvalidProblem("out", expected, f"strides {tuple(out.stride())} of {tuple(out.shape)}", fix)


class Disjoint:
    """Checks for calls of one signature that no other tensor lies in the memory of `out`, from the first element to the
    last. `tensors` are those of the first call; absent ones are None.
    """

    __slots__ = ("_at", "_extents", "_names", "_size")

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        present = [(name, tensor) for name, tensor in zip(names, tensors, strict=False) if tensor is not None]
        self._names = [name for name, _ in present]
        self._extents = [extent(tensor) for _, tensor in present]
        self._at = self._names.index("out")
        self._size = self._extents[self._at]
        # Not compared with itself.
        self._extents[self._at] = -self._size

    def check(self, tensors: Sequence[Tensor | None], places: Sequence[int] | None = None) -> None:
        """Raise if they overlap. `places` are the addresses of the tensors that are not None, if they are known."""
        if places is None:
            places = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        begin = places[self._at]
        end = begin + self._size
        for place, size in zip(places, self._extents, strict=True):
            if place < end and begin < place + size:
                name = next(n for n, p in zip(self._names, places, strict=True) if p == place and n != "out")
                expected = f"memory that does not overlap {name}"
                fix = "Kernels read it after the first results are written: allocate out, or copy the operand."
                raise InvalidProblem("out", expected, "an address range that both have", fix)


def check_traced_result(tensors: Operands) -> None:
    """The same for tensors of a trace, and for every later call of its plan. What is not so is left to `check_result`,
    which raises.
    """
    out: Any = tensors.out
    begin, end = out.data_ptr(), out.data_ptr() + extent(out)
    others = [tensor for tensor in tensors if tensor is not None and tensor is not out]
    if any(type(tensor.data_ptr()) is int for tensor in others):
        raise NotTraceableError("an int64 index tensor is converted: a trace does not know where it lies")
    # The bytes between it and another, on the one side or the other.
    between = [largest(t.data_ptr() - end, begin - t.data_ptr() - extent(t)) for t in others]
    if not out.is_contiguous() or smallest(*between) < 0:
        raise NotTraceableError("out overlaps something, or may")


def check_result(tensors: Operands) -> None:
    """Everything about the memory of `out` that needs real tensors."""
    assert tensors.out is not None
    check_strides(tensors.out)
    Disjoint(Operands._fields, tensors).check(tensors)
