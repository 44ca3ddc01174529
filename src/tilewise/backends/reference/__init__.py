"""The specification: every feature of the contract in plain fp64, with materialised scores. Written to be read."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.base import Differentiating, TileShape
from tilewise.backends.reference import derivatives, specification
from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import FEATURES, AttentionProblem

__all__ = ["BACKEND"]


class ReferenceBackend(Differentiating):
    """Accepts every valid problem wherever torch computes in fp64. Memory grows with seqlen_q * seqlen_k."""

    name = "reference"
    honours = FEATURES

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Everything; only devices without fp64 are refused."""
        del problem
        return "needs fp64, which Apple's GPUs lack" if device.type == "mps" else None

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        """The whole score matrix is one tile."""
        del device
        return TileShape(max(1, problem.seqlen_q), max(1, problem.seqlen_k))

    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """Exact attention and its log-sum-exp."""
        return specification.forward(problem, operands)

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
        """Every gradient by the textbook formulas. `out` and `lse` are recomputed in fp64, because the given ones are
        rounded.
        """
        del out, lse
        return specification.backward(problem, operands, dout, dlse, wanted)

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """Nothing is skipped."""
        del problem
        return "no tile is skipped: the mask hides scores that are all computed"

    def forward_tangent(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, out', lse'), all computed."""
        del known
        return derivatives.forward_tangent(problem, operands, tangents)

    def backward_twice(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        results: tuple[Tensor, Tensor, Tensor, Tensor],
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """Second derivatives. The results are recomputed in fp64, because the given ones are rounded."""
        del results
        return derivatives.backward_twice(problem, operands, tangents, dout, dlse, wanted)


BACKEND = ReferenceBackend()
