"""The interface of a backend. Callers use nothing else of it.

Every backend is a `Backend`: it computes, and reports how. One that writes pages and merges results is `Serving`, too;
one with tangents and second derivatives is `Differentiating`. A backend package exposes one instance as `BACKEND`.
Importing the package must be cheap: compilers (llvmlite, triton) are imported by the first launch, not to answer
`supports`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Tangents, Wanted
from tilewise.problem import AttentionProblem
from tilewise.symbolic import Trace


class TileShape(NamedTuple):
    """Rows of queries and of keys in one tile."""

    block_m: int
    block_n: int


class QuantisedRows(NamedTuple):
    """Rows of K and V, or of latents (k alone), the 8-bit pages they go to, their scales and slots."""

    k: Tensor
    v: Tensor | None
    k_pages: Tensor
    v_pages: Tensor | None
    k_scale: Tensor
    v_scale: Tensor | None
    slots: Tensor


# A launch prepared for tensors with certain shapes, strides, alignment and device. It takes such tensors, and the
# addresses of those that are not None if they are known.
Launch = Callable[..., Any]


class Bound(Protocol):
    """A pass prepared for tensors with certain shapes, strides, alignment and device, or, after `open`, for all sizes
    that its trace takes.
    """

    @property
    def made(self) -> tuple[str, ...]:
        """The names of the results."""

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, sized: Any = None, /
    ) -> list[Tensor] | None:
        """The results in the caller's layout, possibly followed by internal tensors. None if this call must take the
        general path. `places` are the addresses of the tensors that are not None, if they are known; `sized` is what
        the function made by `open` computed for them.
        """

    def open(self, trace: Trace) -> Callable[..., Any]:
        """Of a pass that was prepared with numbers in place of sizes (see tilewise.symbolic): a function of the tensors
        that are not None, and of the bounds on lengths. It returns what the pass needs for their sizes, or None if they
        need another pass. A pass of a backend from outside that lacks `open` serves the sizes that it was prepared for.
        """


class Backend(ABC):
    """One implementation of the contract, complete or partial.

    The abstract methods are all that a backend needs; the defaults of the others suit one that prepares nothing, keeps
    no compiled kernels, widens 8-bit operands before its kernels and sums in a fixed order.

    `honours` are the features of problems that it knows (`AttentionProblem.features`). A problem with another one is
    refused even if `supports` returns None, so that what is added later is not ignored. `supports` may still refuse a
    feature, or a combination, with its own reason; "max_logits" means that it raises `operands.max_logits`, which is
    -inf, to the largest score of each head, and "batch-invariant" that the bits of a sequence do not depend on its
    batch.
    """

    name: str
    honours: frozenset[str] = frozenset()

    @abstractmethod
    def unavailable(self) -> str | None:
        """None if this backend can run on this machine, else the reason and what would help."""

    @abstractmethod
    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """None if the problem (with its backward, if `needs_grad`) would run on such a device, else the reason.

        Its sizes may be `tilewise.symbolic.Number`s, which record what is asked of them. Where that raises, the call is
        prepared for its own sizes alone.
        """

    @abstractmethod
    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        """The forward tile this backend would use."""

    @abstractmethod
    def forward(self, problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
        """(out, lse) of canonical operands; dense out is heads-first over the memory order of `problem.layout`."""

    @abstractmethod
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

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """A pass that makes `out`, and `lse` if wanted, for operands with the strides and alignment of these canonical
        ones: it saves host time in repeated calls. It takes the fields of `Operands`; trailing Nones may be left out.
        None if every call must inspect or copy them.
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
        """A pass that makes the wanted ones of `dq`, `dk`, `dv`; it takes dout, dlse, out and lse before the operands.
        None as for the forward, or if others are wanted.
        """

    def fp8_path(self, problem: AttentionProblem) -> str:
        """How 8-bit operands are computed, for `explain()`."""
        del problem
        return "dequantised before the kernels"

    def unordered(self, problem: AttentionProblem) -> str | None:
        """Sums without a fixed order, if any: they make results differ in their last bits between runs."""

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """How empty tiles of tile masks (operands `tiles` and `tile_bits`) are skipped, for `explain()`."""
        del problem
        return "the backend does not say how"

    def compiler(self) -> str | None:
        """What compiles the kernels, for `tilewise doctor`."""

    def launch_path(self) -> str | None:
        """How kernels are launched, for `tilewise doctor`."""

    def cache_state(self) -> Mapping[str, Any] | None:
        """Where compiled kernels are kept on disk, and how many of all are there. None if none are kept."""

    def warmup(self, progress: Callable[[str, int, int], None]) -> None:
        """Compiles all that are kept; `progress(name, done, total)` is called before each one."""


class Differentiating(Backend):
    """A backend with the passes beyond the backward (docs/derivatives.md). It is asked by `supports` with
    `problem.higher`.
    """

    @abstractmethod
    def forward_tangent(
        self,
        problem: AttentionProblem,
        operands: Operands,
        tangents: Tangents,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(out, lse, out', lse') along canonical tangents; a row without keys has out' = 0 and lse' = 0. `known` are
        (out, lse) where a forward made them: a backend may use and return them.
        """

    @abstractmethod
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
        """Gradients of `sum(out' * dout) + sum(lse' * dlse)` with respect to the operands, tangents held fixed;
        `results` are those of `forward_tangent`.
        """


class Serving(Backend):
    """A backend with the passes that a paged cache needs in addition to attention. See tilewise.kv,
    tilewise.cascade.
    """

    @abstractmethod
    def write_rows(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Writes rows of K and V into slots of pages. A negative slot is skipped."""

    @abstractmethod
    def bind_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Launch:
        """`write_rows` for tensors with the shapes, strides and alignment of these."""

    @abstractmethod
    def append_quantised(self, rows: QuantisedRows) -> None:
        """Writes rows into slots of e4m3 or int8 pages, and their scales."""

    def quantize(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        """(data, scale) in e4m3: see tilewise.fp8.quantisation. None without a kernel: torch operations compute it."""

    def bind_rotated(
        self, tensors: Sequence[Tensor | None], *, interleaved: bool, norm_eps: float | None, in_place: bool
    ) -> Launch | None:
        """One launch that normalises and rotates q and k and writes k and v, for tensors with these shapes, strides and
        addresses: the fields of `tilewise.kv.rotated_arguments.Step`. `in_place`: out is q. None as in `quantize`.
        """

    @abstractmethod
    def splits_prefixes(self, problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> bool:
        """Whether `attend_prefixes` suits such groups. If not, separate calls and `merge_rows` are faster."""

    @abstractmethod
    def attend_prefixes(
        self,
        problem: AttentionProblem,
        operands: Operands,
        num_rows: int,
        rows: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attends query rows to the prefix of their group and merges into `out` and `lse` of their own keys."""

    @abstractmethod
    def bind_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, *results: Tensor | None
    ) -> Launch | None:
        """`attend_prefixes` bound to operands, rows, out and lse with such strides. None if they must be copied. The
        launch returns None if its call must take the general path.
        """

    def bind_after(
        self, own: Bound, prefixes: Launch, count: int, unread: Sequence[str], problem: AttentionProblem
    ) -> Bound | None:
        """One pass for the own keys (`problem`) and the prefixes together. It takes the first `count` operands and the
        tensors of a hint, and does not make the results in `unread`. None if the two passes cannot be joined.
        """

    @abstractmethod
    def merge_rows(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
        """Merges rows of a partial result over other keys into `out` and `lse`."""
