"""What a backend is: five questions and two computations.

A backend package exposes one instance as `BACKEND`. Importing the package must be cheap: compilers (llvmlite, triton)
are imported on the first launch, not to answer `supports`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["Backend", "TileShape"]


class TileShape(NamedTuple):
    """Rows of queries and of keys that a kernel holds at once."""

    block_m: int
    block_n: int


class Backend(Protocol):
    """One implementation of the contract, complete or partial."""

    name: str

    def unavailable(self) -> str | None:
        """None if this backend can run on this machine at all, else the reason and what would help."""

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """None if the problem (with its backward, if `needs_grad`) would run on such a device, else why not."""

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        """The forward tile this backend would use."""

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) of canonical operands; dense out is heads-first over the memory order of `problem.layout`."""

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
        """Gradients of `sum(out * dout) + sum(lse * dlse)`, in the shapes and dtypes of the canonical operands."""
