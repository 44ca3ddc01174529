"""What a backend is, and what it may be beyond that: nothing else of a backend is called.

`Backend` is what every one has: its name, three questions and two computations. The other protocols are optional, and
callers ask with isinstance. A backend package exposes one instance as `BACKEND`. Importing the package must be cheap:
compilers (llvmlite, triton) are imported on the first launch, not to answer `supports`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tilewise.device import DeviceSpec
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = [
    "Backend",
    "Binding",
    "Bound",
    "Caching",
    "Compiling",
    "Explaining",
    "Prefixes",
    "Quantising",
    "Serving",
    "TileShape",
]


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


class Prefixes(Protocol):
    """`Serving.attend_prefixes`, prepared for tensors with certain shapes, strides, alignment and device."""

    def __call__(
        self, tensors: Sequence[Tensor | None], places: tuple[int, ...] | None = None, /
    ) -> Sequence[Tensor] | None:
        """Done for operands, rows, out and lse; None if it must be done the ordinary way this time."""


@runtime_checkable
class Serving(Protocol):
    """A backend with the passes that a paged cache needs beside attention: see tilewise.kv and tilewise.cascade."""

    name: str

    def write_rows(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Rows of K and V into slots of pages; a negative slot is no slot."""

    def append_quantised(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor, v_scale: Tensor, slots: Tensor
    ) -> None:
        """Rows of K and V into slots of e4m3 pages, whose scales grow as needed."""

    def splits_prefixes(self, problem: AttentionProblem, num_rows: int, device: DeviceSpec) -> bool:
        """Whether `attend_prefixes` is for such groups; if not, ordinary calls and `merge_rows` are faster."""

    def attend_prefixes(
        self,
        problem: AttentionProblem,
        operands: Operands,
        num_rows: int,
        rows: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """What query rows see of the prefix of their group, merged into `out` and `lse` of their own keys."""

    def bind_prefixes(
        self, problem: AttentionProblem, operands: Operands, num_rows: int, *results: Tensor | None
    ) -> Prefixes | None:
        """`attend_prefixes` for operands, rows, out and lse that lie like these; None if they must be copied first."""

    def bind_after(
        self, own: Bound, prefixes: Prefixes, count: int, unread: Sequence[str], problem: AttentionProblem
    ) -> Bound | None:
        """The pass of the own keys (`problem`) and that of the prefixes as one, for the first `count` operands and the
        tensors of a hint, without what is `unread`; None if they stay two.
        """

    def merge_rows(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
        """Rows of a partial result over other keys merged into `out` and `lse`."""


@runtime_checkable
class Quantising(Protocol):
    """A backend with a kernel that rounds to e4m3: see tilewise.fp8.quantisation."""

    def quantize(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """(data, scale)."""


@runtime_checkable
class Explaining(Protocol):
    """A backend that tells `explain()` more about a problem."""

    def fp8_path(self, problem: AttentionProblem) -> str:
        """What becomes of e4m3 operands."""

    def unordered(self, problem: AttentionProblem) -> str | None:
        """What is summed in no fixed order, if anything: results then differ in their last bits from run to run."""


@runtime_checkable
class Compiling(Protocol):
    """A backend that tells `tilewise doctor` how its kernels are compiled and started."""

    def compiler(self) -> str:
        """What compiles the kernels."""

    def launch_path(self) -> str:
        """How they are started."""


@runtime_checkable
class Caching(Protocol):
    """A backend whose compiled kernels are kept on disk: see `tilewise warmup`."""

    def cache_state(self) -> Mapping[str, Any]:
        """Where they are, and how many of how many."""

    def warmup(self, progress: Callable[[str, int, int], None]) -> None:
        """Compile them all; `progress(name, done, total)` is called before each one."""
