"""What a backend is: three questions and two computations.

A backend package exposes one instance as `BACKEND`. Importing the package must be cheap: compilers (llvmlite, triton)
are imported on the first launch, not to answer `supports`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["Backend", "Binding", "Bound", "TileShape"]


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


class Bound(Protocol):
    """A pass that was prepared for tensors with certain shapes, strides, alignment and device."""

    @property
    def made(self) -> tuple[str, ...]:
        """The names of what a call returns."""

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, /
    ) -> list[Tensor] | None:
        """What was made (and more, which is not the caller's), in the caller's layout; None if it must be computed the
        ordinary way this time. `places` are the addresses of the tensors that are not None, if they are known.
        """


@runtime_checkable
class Binding(Protocol):
    """A backend that saves host time in repeated calls: its passes may be bound to how tensors lie in memory.

    A bound pass is given the fields of `Operands`; a backward dout, dlse, out and lse before them. Nones at the end may
    be left out.
    """

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """A pass that makes `out`, `lse` if wanted (and whatever else it needs) for operands that lie like these
        canonical ones, or None if they must be looked at or copied in every call.
        """

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
        """A pass that makes the wanted among `dq`, `dk`, `dv`; None as for the forward, or if others are wanted."""
