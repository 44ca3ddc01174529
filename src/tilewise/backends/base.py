"""The interface of a backend. Callers use nothing else of it.

Every backend satisfies `Backend`: a name, the features it knows, three questions and two computations. The other
protocols are optional; callers test them with isinstance. A backend package exposes one instance as `BACKEND`.
Importing the package must be cheap: compilers (llvmlite, triton) are imported by the first launch, not to answer
`supports`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


class Backend(Protocol):
    """One implementation of the contract, complete or partial.

    `honours` are the features of problems that it knows (`AttentionProblem.features`). It is not asked about a problem
    with another one, so that what is added later is refused and not ignored. `supports` may still refuse a feature, or
    a combination, with its own reason; "max_logits" means that it raises `operands.max_logits`, which is -inf, to the
    largest score of each head, and "batch-invariant" that the bits of a sequence do not depend on its batch.
    """

    name: str

    @property
    def honours(self) -> frozenset[str]:
        """The features it knows; a class attribute will do."""

    def unavailable(self) -> str | None:
        """None if this backend can run on this machine, else the reason and what would help."""

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """None if the problem (with its backward, if `needs_grad`) would run on such a device, else the reason."""

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


@runtime_checkable
class Differentiating(Protocol):
    """A backend with the passes beyond the backward (docs/derivatives.md). It is asked by `supports` with
    `problem.higher`.
    """

    name: str

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


@runtime_checkable
class TileMasking(Protocol):
    """A backend that says how it reads tile masks: operands `tiles` and `tile_bits` (see tilewise.tiles)."""

    name: str

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """How tiles that are empty are skipped, for reports."""


class Bound(Protocol):
    """A pass prepared for tensors with certain shapes, strides, alignment and device."""

    @property
    def made(self) -> tuple[str, ...]:
        """The names of the results."""

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, sized: Any = None, /
    ) -> list[Tensor] | None:
        """The results in the caller's layout, possibly followed by internal tensors. None if this call must take the
        general path. `places` are the addresses of the tensors that are not None, if they are known; `sized` is what
        `Opening.open` computed for them.
        """


@runtime_checkable
class Opening(Bound, Protocol):
    """A pass that was prepared with numbers in place of sizes and may serve others (see tilewise.symbolic)."""

    def open(self, trace: Trace) -> Callable[..., Any]:
        """A function of the tensors that are not None and the bounds on lengths. It returns what the pass needs for
        their sizes, a record with a method `kept`, or None if they need another pass.
        """


@runtime_checkable
class Binding(Protocol):
    """A backend that saves host time in repeated calls: its passes can be bound to strides and alignment.

    A bound forward takes the fields of `Operands`; a bound backward takes dout, dlse, out and lse before them. Trailing
    Nones may be left out.
    """

    def bind_forward(self, problem: AttentionProblem, operands: Operands, *, want_lse: bool) -> Bound | None:
        """A pass that makes `out`, and `lse` if wanted, for operands with the strides and alignment of these canonical
        ones. None if every call must inspect or copy them.
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
        """A pass that makes the wanted ones of `dq`, `dk`, `dv`. None as for the forward, or if others are wanted."""


class Prefixes(Protocol):
    """`Serving.attend_prefixes`, prepared for tensors with certain shapes, strides, alignment and device."""

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, /
    ) -> Sequence[Tensor] | None:
        """Runs for operands, rows, out and lse. None if this call must take the general path."""


# Takes the tensors of `write_rows`, and their addresses if they are known.
Writing = Callable[[Sequence[Tensor], tuple[int, ...] | None], object]


@runtime_checkable
class Serving(Protocol):
    """A backend with the passes that a paged cache needs in addition to attention. See tilewise.kv,
    tilewise.cascade.
    """

    name: str

    def write_rows(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Writes rows of K and V into slots of pages. A negative slot is skipped."""

    def bind_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Writing:
        """`write_rows` for tensors with the shapes, strides and alignment of these."""

    def append_quantised(self, rows: QuantisedRows) -> None:
        """Writes rows into slots of e4m3 or int8 pages, and their scales."""

    def splits_prefixes(self, problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> bool:
        """Whether `attend_prefixes` suits such groups. If not, separate calls and `merge_rows` are faster."""

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

    def bind_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, *results: Tensor | None
    ) -> Prefixes | None:
        """`attend_prefixes` bound to operands, rows, out and lse with such strides. None if they must be copied."""

    def bind_after(
        self, own: Bound, prefixes: Prefixes, count: int, unread: Sequence[str], problem: AttentionProblem
    ) -> Bound | None:
        """One pass for the own keys (`problem`) and the prefixes together. It takes the first `count` operands and the
        tensors of a hint, and does not make the results in `unread`. None if the two passes cannot be joined.
        """

    def merge_rows(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
        """Merges rows of a partial result over other keys into `out` and `lse`."""


@runtime_checkable
class Quantising(Protocol):
    """A backend with a kernel that rounds to e4m3: see tilewise.fp8.quantisation."""

    def quantize(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns (data, scale)."""


@runtime_checkable
class Rotating(Protocol):
    """A backend with one kernel that normalises and rotates q and k and writes k and v: see tilewise.kv.rotated."""

    def bind_rotated(
        self, tensors: Sequence[Tensor | None], *, interleaved: bool, norm_eps: float | None, in_place: bool
    ) -> Callable[[Sequence[Tensor | None]], object]:
        """A launch for tensors with these shapes, strides and addresses: the fields of
        `tilewise.kv.rotated_arguments.Step`. `in_place`: out is q.
        """


@runtime_checkable
class Explaining(Protocol):
    """A backend that tells `explain()` more about a problem."""

    def fp8_path(self, problem: AttentionProblem) -> str:
        """How 8-bit operands are computed."""

    def unordered(self, problem: AttentionProblem) -> str | None:
        """Sums without a fixed order, if any: they make results differ in their last bits between runs."""


@runtime_checkable
class Compiling(Protocol):
    """A backend that tells `tilewise doctor` how its kernels are compiled and started."""

    def compiler(self) -> str:
        """What compiles the kernels."""

    def launch_path(self) -> str:
        """How kernels are launched."""


@runtime_checkable
class Caching(Protocol):
    """A backend whose compiled kernels are kept on disk: see `tilewise warmup`."""

    def cache_state(self) -> Mapping[str, Any]:
        """Where they are kept, and how many of all are there."""

    def warmup(self, progress: Callable[[str, int, int], None]) -> None:
        """Compiles all of them; `progress(name, done, total)` is called before each one."""
