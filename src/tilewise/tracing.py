"""Profiler events of a call: `tilewise::attention` and `tilewise::attention_backward`, with backend and shapes.

torch's profilers show an event of that name whose inputs are q, k, v and so on, with `backend`, `kind` and `features`
next to their shapes (`record_shapes=True`), and inside it one whose name ends in the backend's. With `TILEWISE_NVTX=1`
the same is an NVTX range. While no profiler runs, a repeated call only reads one attribute (`profiler` below).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise import settings
from tilewise.errors import Unsupported
from tilewise.problem import AttentionProblem

__all__ = ["BACKWARD", "FORWARD", "MERGE", "TANGENT", "TWICE", "is_on", "profiler", "span"]

FORWARD, BACKWARD, MERGE = "tilewise::attention", "tilewise::attention_backward", "tilewise::merge"
TANGENT, TWICE = "tilewise::attention_tangent", "tilewise::attention_twice"
NOTHING: AbstractContextManager[None] = nullcontext()


def is_on() -> bool:
    """Whether a torch profiler runs in any thread, or NVTX ranges are requested."""
    return profiler._is_profiler_enabled or settings.current().nvtx  # noqa: SLF001


def span(
    name: str, tensors: Sequence[Tensor | None], backend: str | None = None, problem: AttentionProblem | None = None
) -> AbstractContextManager[None]:
    """Emits the event around a block. Does nothing if no profiler is on."""
    if torch.compiler.is_compiling() or not is_on():
        return NOTHING
    return _span(name, tensors, backend, problem)


@contextlib.contextmanager
def _span(
    name: str, tensors: Sequence[Tensor | None], backend: str | None, problem: AttentionProblem | None
) -> Iterator[None]:
    about = {} if backend is None else {"backend": backend}
    if problem is not None:
        about |= {"kind": problem.kind, "features": ", ".join(problem.features)}
    with contextlib.ExitStack() as stack:
        if settings.current().nvtx:
            stack.enter_context(_nvtx_range(name, tensors, about))
        # torch's own event for compiled kernels: unlike record_function it has inputs with shapes.
        event = torch._C._profiler._RecordFunctionFast  # noqa: SLF001
        stack.enter_context(event(name, tuple(tensors), about))
        if backend is not None:
            stack.enter_context(event(f"{name}.{backend}"))
        yield


@contextlib.contextmanager
def _nvtx_range(name: str, tensors: Sequence[Tensor | None], about: dict[str, str]) -> Iterator[None]:
    words = [name, *(f"[{text}]" if key == "features" else text for key, text in about.items() if text)]
    words += [str(tensors[0].dtype).removeprefix("torch.")] if tensors[0] is not None else []
    words += [str(tuple(tensor.shape)) for tensor in tensors if tensor is not None]
    try:
        torch.cuda.nvtx.range_push(" ".join(words))
    except RuntimeError as error:
        raise Unsupported(f"TILEWISE_NVTX=1 asks for NVTX ranges, which this torch has not: {error}") from error
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
