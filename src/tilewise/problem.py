"""One frozen description of an attention call, without its tensors.

`AttentionProblem` is all that crosses from validation to dispatch, planning and the backends. Together with strides,
alignment and the device it decides which kernels run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewise.arguments import Shared
from tilewise.symbolic import Number

# The contract's limits for head_dim and head_dim_v, for every backend. A latent has 64 columns more than its values.
MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512
# Positions within a sequence, and running totals of packed rows, are int32.
MAX_SEQLEN = 2**31 - 1

Kind = Literal["dense", "varlen", "paged"]
Layout = Literal["bhsd", "bshd"]


@dataclass(frozen=True, slots=True)
class AttentionProblem(Shared):
    """Sizes, dtype and semantics of one attention call (docs/contract.md defines the semantics).

    For packed and paged problems `seqlen_q` and `seqlen_k` are bounds on the longest sequence, and `total_q`, `total_k`
    count the stored rows (for paged keys: every slot of every page). `dropout_origin` marks a part of a larger problem:
    the seed is followed by the batch entry, head, row and key (a multiple of 4) at which dropout starts counting.
    `tiles_shape` is the shape of a tile mask's map. `fp8` names the operands in 8 bits with scales, ("k", "v") or ("q",
    "k", "v"): e4m3, or with `int8` pages in int8. `scale_blocks` are the rows of q, k, v that share a scale (None: all
    rows of a head; of pages, a page's; 1 for int8 pages); `dtype` is then the result's. `higher` asks for a pass beyond
    the backward: a tangent (jvp) or a second derivative. `max_logits` asks for the largest score of each head.
    `batch_invariant`: the bits of a sequence's results may not depend on the other sequences, their number or the
    device's size. `latent`: v is a view of k's first columns, so a kernel may read both at once.
    """

    kind: Kind
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    bias_shape: tuple[int, int, int, int] | None = None
    bias_dtype: torch.dtype | None = None
    mask_shape: tuple[int, int, int, int] | None = None
    tiles_shape: tuple[int, int, int, int] | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    layout: Layout = "bhsd"
    page_size: int | None = None
    deterministic: bool = False
    needs_grad: bool = False
    dropout_origin: bool = False
    fp8: tuple[str, ...] = ()
    int8: bool = False
    scale_blocks: tuple[int | None, int | None, int | None] = (None, None, None)
    higher: bool = False
    max_logits: bool = False
    batch_invariant: bool = False
    latent: bool = False

    def __hash__(self) -> int:
        # Only fields that differ between the calls of a program: caches of exact sizes hash the problem, and all fields
        # take longer.
        return hash((self.kind, self.batch, self.seqlen_q, self.seqlen_k, self.total_q, self.num_heads, self.causal))

    @property
    def is_traced(self) -> bool:
        """Whether sizes are numbers of a trace (tilewise.symbolic): such a problem is no key of a cache."""
        return isinstance(self.batch, Number)

    @property
    def group_size(self) -> int:
        """Query heads served by one K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_own_width(self) -> bool:
        """Whether rows of v are not as wide as those of k."""
        return self.head_dim_v != self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in all K/V heads, without scales; a latent counts once."""
        columns = self.head_dim + (0 if self.latent else self.head_dim_v)
        return self.num_kv_heads * columns * (1 if "k" in self.fp8 else self.dtype.itemsize)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The window as (left, right) with causality folded in; None is unbounded."""
        if not self.causal:
            return self.window_left, self.window_right
        return self.window_left, 0 if self.window_right is None else min(0, self.window_right)

    @property
    def codes(self) -> str:
        """The 8-bit numbers of the operands in `fp8`, for reports."""
        return "int8" if self.int8 else "e4m3"

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Softmax, accumulation and lse: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of `out` in the caller's layout."""
        if self.kind != "dense":
            return (self.total_q, self.num_heads, self.head_dim_v)
        if self.layout == "bshd":
            return (self.batch, self.seqlen_q, self.num_heads, self.head_dim_v)
        return (self.batch, self.num_heads, self.seqlen_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of `lse`: (batch, num_heads, seqlen_q), or (num_heads, total_q) when packed."""
        if self.kind == "dense":
            return (self.batch, self.num_heads, self.seqlen_q)
        return (self.num_heads, self.total_q)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of everything beyond plain attention that this problem uses, for reports and refusals."""
        used: dict[str, None] = {}
        for field, default, name in _FEATURES:
            value = getattr(self, field)
            # A side of a window may be symbolic, which is compared with numbers alone.
            if value is not None if default is None else value != default:
                used[name] = None
        if self.int8:
            used.pop("fp8", None)
        return tuple(used)


# The fields that every backend takes: sizes, dtypes and layouts; what the results are needed for; and a view that may
# be read as two tensors. `higher` needs a backend that is `Differentiating` (backends.base).
PLAIN = frozenset(
    (
        "kind", "dtype", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "num_kv_heads", "head_dim",
        "head_dim_v", "scale", "layout", "page_size", "deterministic", "needs_grad", "higher",
    )
)  # fmt: skip
# Features by field, where they are not called like it, and the order of reports. A field that is neither here nor in
# PLAIN is a feature of its own name.
_NAMES = {
    "causal": "causal",
    "window_left": "window",
    "window_right": "window",
    "group_size": "gqa",
    "has_own_width": "head_dim_v",
    "has_alibi": "alibi",
    "softcap": "softcap",
    "bias_shape": "bias",
    "bias_dtype": "bias",
    "mask_shape": "mask",
    "tiles_shape": "tile mask",
    "has_sinks": "sinks",
    "dropout": "dropout",
    "dropout_origin": "dropout",
    "fp8": "fp8",
    "scale_blocks": "fp8",
    "int8": "int8",
    "max_logits": "max_logits",
    "batch_invariant": "batch-invariant",
    "latent": "latent",
}


def _features_of(problem: type[AttentionProblem]) -> tuple[tuple[str, Any, str], ...]:
    """Field, value without the feature, and name of every feature."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(problem)}
    defaults |= {"group_size": 1, "has_own_width": False}
    names = _NAMES | {name: _NAMES.get(name, name) for name in defaults if name not in PLAIN}
    return tuple((field, defaults[field], name) for field, name in names.items())


_FEATURES = _features_of(AttentionProblem)
# Every feature that a problem may have.
FEATURES = frozenset(name for *_, name in _FEATURES)
