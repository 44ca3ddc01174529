"""The tensors of a call, its options as the caller spells them, and the flags that go through `torch.library`.

Backends receive canonical operands: heads-first views of dense q, k, v; 4-D `bias` and `mask` expanded (stride 0) to
(batch, num_heads, seqlen_q, seqlen_k), and the map of a tile mask to (batch, num_heads, tiles of queries, tiles of
keys); `alibi_slopes` expanded to (batch, num_heads); the last dimension of q, k, v, of lengths and of the block table
contiguous; `out` heads first, with any strides.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import FLAG_DEFAULTS, FLAGS, OPTIONS, Shared

Window = tuple[int | None, int | None]


class Operands(NamedTuple):
    """Every tensor an attention call may have; for paged problems k and v are the pages."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    # A tile mask: its map, its bits, and on a GPU its lists, see tilewise.tiles.
    tiles: Tensor | None = None
    tile_bits: Tensor | None = None
    tile_lists: Tensor | None = None
    seed: Tensor | None = None
    # Scales of e4m3 operands: fp32 (batch, heads, blocks), of pages (pages, heads, 1), of int8 pages (pages, heads,
    # page_size); see tilewise.fp8.
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    # Memory of the caller that the result is written into.
    out: Tensor | None = None
    # (num_heads,), -inf: the backend raises it to the largest score of each head.
    max_logits: Tensor | None = None


# How many operands a caller passes as they are; the others are parts of arguments, or made.
ATTENDED = Operands._fields.index("tiles")


class Lengths(NamedTuple):
    """The bounds on lengths that a caller passes: sizes that no tensor has. Calls that differ in them alone have the
    same meaning.
    """

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    # The lengths that a tile mask was made for.
    mask_seqlen_q: int | None = None
    mask_seqlen_k: int | None = None


LENGTHS = Lengths._fields
NO_LENGTHS = Lengths()

if TYPE_CHECKING:
    # For type checkers, which cannot read the table of arguments.
    from typing_extensions import Self

    class _Record:
        """A named tuple."""

        _fields: tuple[str, ...]

        def __init__(self, *values: Any, **named: Any) -> None: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __getitem__(self, at: Any) -> Any: ...
        def _replace(self, **changes: Any) -> Self: ...

    class Options(_Record, Shared):
        """What a call means besides its tensors, as the caller spells it; `validation.normalise` checks it."""

        window: Window | None
        scale: float | None
        layout: str
        deterministic: bool | Literal["batch"] | None
        backend: str
        return_lse: bool
        return_max_logits: bool

    class Flags(_Record, Shared):
        """Validated options, and what validation found in tensors, in the order of the op schemas (see schemas.py)."""

        window_left: int | None
        window_right: int | None
        scale: float | None
        layout: str
        max_seqlen_q: int | None
        max_seqlen_k: int | None
        deterministic: bool
        needs_grad: bool
        backend: str
        # Rows that share a scale (None: all rows of a head), and the result's dtype if q is e4m3.
        q_block: int | None
        k_block: int | None
        v_block: int | None
        out_dtype: torch.dtype | None
        # The lengths that a tile mask was made for.
        mask_seqlen_q: int | None
        mask_seqlen_k: int | None
        # Whether the largest score of each head is wanted.
        max_logits: bool
        # Whether the bits of a sequence may not depend on its batch.
        batch_invariant: bool

        lengths: Lengths

        def with_lengths(self, lengths: Sequence[Any]) -> Self: ...  # noqa: D102

else:
    Options = namedtuple("Options", OPTIONS, defaults=[row.default for row in OPTIONS.values()])  # noqa: PYI024
    _Plain = namedtuple("_Plain", FLAGS, defaults=FLAG_DEFAULTS.values())  # noqa: PYI024

    class Flags(_Plain):
        """Validated options, and what validation found in tensors, in the order of the op schemas (see schemas.py)."""

        __slots__ = ()

        @property
        def lengths(self) -> Lengths:
            """The bounds on lengths."""
            return Lengths(self.max_seqlen_q, self.max_seqlen_k, self.mask_seqlen_q, self.mask_seqlen_k)

        def with_lengths(self, lengths: Sequence[Any]) -> Flags:
            """The same flags with other bounds, which may be numbers of a trace."""
            return self._replace(**dict(zip(LENGTHS, lengths, strict=True)))


class Wanted(NamedTuple):
    """Which gradients the caller asked for."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dbias: bool = False
    dsinks: bool = False


class Gradients(NamedTuple):
    """The results of a backward pass. One that was not wanted may be None. `dbias` has the problem's `bias_shape`."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


class Tangents(NamedTuple):
    """A direction for each differentiable operand, in its shape and dtype. None is zero."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
