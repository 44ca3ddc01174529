"""A case: one attention problem of the conformance suite, which can be printed, hashed and rerun."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tilewise.arguments import Shared
from tilewise.problem import Kind, Layout

Strides = Literal["contiguous", "transposed", "sliced", "expanded", "strided_last"]
Values = Literal["normal", "large", "tiny"]
# Which operands are e4m3: none, k and v alone, or q, k and v with scales of that granularity; or pages in int8.
Quantised = Literal["", "kv", "int8", "tensor", "head", "block"]
Bounds = Literal["exact", "loose", "none"]

# Every differentiable operand and the name of its gradient among the results.
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
# How far a loose bound exceeds the longest sequence.
LOOSE_BY = 5
# Lengths of a dense case with an empty batch, which has no sequences to take them from.
LENGTH_WITHOUT_BATCH = 3


@dataclass(frozen=True, kw_only=True)
class Case(Shared):
    """Sizes, features and oddities of one problem; equal cases make equal tensors.

    `bias` and `mask` name a shape by one letter per dimension, "1" where it broadcasts: "bhqk", "1h1k", "qk"; empty is
    none. With `tiles` the mask has empty and full tiles and is given as a TileMask. `grad_of` names the operands that
    require a gradient (None: all there are, (): forward only). With `latent`, v is a view of k's first columns.
    `label` only names the case in reports.

        >>> Case(causal=True, seqlens_q=(3,), seqlens_k=(65,)).id
        'dense-fp32-q3-k65-h2:2-d40:40-causal'
    """

    kind: Kind = "dense"
    dtype: torch.dtype = torch.float32
    seqlens_q: tuple[int, ...] = (65, 65)
    seqlens_k: tuple[int, ...] = (65, 65)
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 40
    head_dim_v: int = 40
    # Fields of `Shared` that are repeated here have this position in the representation, which seeds the inputs.
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alibi: Literal["", "h", "bh"] = ""
    softcap: float | None = None
    bias: str = ""
    bias_holes: bool = False
    mask: str = ""
    masked_rows: bool = False
    tiles: bool = False
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None
    layout: Layout = "bhsd"
    strides: Strides = "contiguous"
    page_size: int = 16
    shared_pages: bool = False
    decode: bool = False
    padding: int = 0
    bounds: Bounds = "exact"
    values: Values = "normal"
    side_dtype: torch.dtype | None = None
    grad_of: tuple[str, ...] | None = None
    cotangents: tuple[str, ...] = ("out", "lse")
    expanded_dout: bool = False
    deterministic: bool | Literal["batch"] = False
    fp8: Quantised = ""
    rotation: bool = False
    latent: bool = False
    seed: int = 0
    label: str = field(default="", compare=False)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def seqlen_q(self) -> int:
        """The bound on query lengths that the call gets, and the size of bias and mask along it."""
        return self._bound(self.seqlens_q)

    @property
    def seqlen_k(self) -> int:
        """The bound on key lengths; for pages what the block table can hold."""
        if self.kind == "paged":
            return self.max_pages * self.page_size
        return self._bound(self.seqlens_k)

    @property
    def max_pages(self) -> int:
        """Columns of the block table: one more than the longest sequence fills."""
        return math.ceil(max(self.seqlens_k, default=0) / self.page_size) + 1

    @property
    def wants_grad(self) -> tuple[str, ...]:
        """The operands that require a gradient."""
        there = {"bias": bool(self.bias), "sinks": self.sinks}
        every = tuple(name for name in GRADIENTS if there.get(name, True))
        if self.fp8:
            return ()  # rounding to 8 bits has no gradient
        return every if self.grad_of is None else self.grad_of

    @property
    def results(self) -> tuple[str, ...]:
        """Names of everything the case computes."""
        return ("out", "lse", *(GRADIENTS[name] for name in self.wants_grad))

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of lse, and of sums inside a kernel."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def id(self) -> str:
        """A short name for test ids: the label or the features, and the sizes."""
        sizes = (
            f"{self.kind}-{_DTYPE_NAMES[self.dtype]}-q{_lengths(self.seqlens_q)}-k{_lengths(self.seqlens_k)}"
            f"-h{self.num_heads}:{self.num_kv_heads}-d{self.head_dim}:{self.head_dim_v}"
        )
        features = self.label or "-".join(
            name if value is True else f"{name}={value}".replace(" ", "")
            for name, value in self._differences(_FEATURES)
        )
        return f"{sizes}-{features}" if features else sizes

    def but(self, **changes: Any) -> Case:
        """The same problem with some fields changed."""
        return dataclasses.replace(self, **changes)

    def forward_only(self) -> Case:
        """The same problem without gradients."""
        return self.but(grad_of=())

    def unquantised(self) -> Case:
        """The same problem without 8-bit operands."""
        return self.but(fp8="", rotation=False, grad_of=()) if self.fp8 else self

    def __repr__(self) -> str:
        """Code that makes the case again, without defaults."""
        names = tuple(name for name in _FIELDS if name != "label")
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self._differences(names))})"

    def _differences(self, names: tuple[str, ...]) -> list[tuple[str, object]]:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return [(name, getattr(self, name)) for name in names if getattr(self, name) != defaults[name]]

    def _bound(self, lengths: tuple[int, ...]) -> int:
        longest = max(lengths, default=LENGTH_WITHOUT_BATCH if self.kind == "dense" else 0)
        return longest + LOOSE_BY if self.kind != "dense" and self.bounds == "loose" else longest


# The fields in the order in which a representation has them.
_FIELDS = tuple(dict.fromkeys((*Case.__annotations__, *(field.name for field in dataclasses.fields(Case)))))
# Those that an id does not spell out without a label: it has the sizes anyway.
_UNSPELLED = (
    "kind", "dtype", "seqlens_q", "seqlens_k", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "side_dtype",
    "seed", "label",
)  # fmt: skip
_FEATURES = tuple(name for name in _FIELDS if name not in _UNSPELLED)


def _lengths(lengths: tuple[int, ...]) -> str:
    distinct = sorted(set(lengths))
    return str(distinct[0]) if len(distinct) == 1 else ",".join(map(str, lengths)) or "none"
