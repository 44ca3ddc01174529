"""What the two GPU backends have in common: how their computations reach the package's `launch` module, and limits."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from torch import Tensor

from tilewise.backends.base import Backend, Bound
from tilewise.backends.gpu import trial
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

# Kernels add both lengths, a window of at most that size and the rows of a tile; TMA coordinates of packed rows start
# at 2^30. With this limit all of these stay below 2^31, so 32-bit index arithmetic is enough.
MAX_ROWS = 2**29


class GpuBackend(Backend):
    """The computations of a backend. Triton is imported by the first of them, with the package's `launch` module."""

    @functools.cached_property
    def _launch(self) -> ModuleType:
        return importlib.import_module(f"tilewise.backends.{self.name}.launch")

    def _gradients(self, problem: AttentionProblem) -> ModuleType:
        # The module that computes the gradients of a problem.
        del problem
        return self._launch

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse); see Backend."""
        out, lse = self._launch.run_forward(problem, self._with_out(problem, operands))
        return out, lse

    def _with_out(self, problem: AttentionProblem, operands: Operands) -> Operands:
        # Without an `out` that the kernels cannot address: the caller copies into it.
        if operands.out is None or self._launch.writes_into(problem, operands.out):
            return operands
        return operands._replace(out=None)

    def backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """The wanted gradients; see Backend."""
        passes = self._gradients(problem)
        gradients: Gradients = passes.run_backward(problem, operands, out, lse, dout, dlse, wanted)
        return gradients

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """See Backend."""
        operands = self._with_out(problem, operands)
        return _bound(self._launch.bind_forward(problem, operands, want_lse=want_lse))

    def bind_backward(
        self,
        problem: AttentionProblem,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Bound | None:
        """See Backend. Gradients of bias and sinks are computed from what the pass leaves, so it cannot stand alone."""
        if wanted.dbias or wanted.dsinks:
            return None
        given = (dout, dlse, out, lse, *operands)
        return _bound(self._gradients(problem).bind_backward(problem, given, operands.q, wanted))

    def compiler(self) -> str:
        """Which compiler is used and whether a trial kernel compiles, for `tilewise doctor`."""
        return trial.report(self.name)

    def launch_path(self) -> str:
        """How kernels are launched, for `tilewise doctor`."""
        return str(importlib.import_module("tilewise.backends.gpu.driver").launch_path())


def _bound(found: Any) -> Bound | None:
    """A pass that later calls may use. It is given tensors in the caller's layout, so it must not copy any."""
    bound: Bound | None = None if found is None or found.copied else found
    return bound


def too_long(problem: AttentionProblem) -> str | None:
    """Why a problem's sequences are too long; None if they are not."""
    for name, rows in (("seqlen_q", problem.seqlen_q), ("seqlen_k", problem.seqlen_k)):
        if rows > MAX_ROWS:
            hint = f" (max_{name} is the length of the longest sequence)" if problem.kind == "varlen" else ""
            return f"{name} {rows} is over {MAX_ROWS}, what 32-bit positions take{hint}"
    return None
