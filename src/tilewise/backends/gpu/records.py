"""Records of both GPU backends: what the host fills, kernels take and their functions pass on, by name.

Each is a NamedTuple, which Triton and Gluon take as an argument and make in device code, as the interpreter and the
emulator of the tests do. A part that a problem does not have is None. Triton 3.6 returns no None from a function of the
device, so a record with a part that may be absent is made where it is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """Coordinates of token 0 of a (sequence, head) in a tensor map; `end` counts for packed rows alone (see
    triton.primitives).
    """

    batch: Any
    end: Any
    head: Any
    row: Any
    column: Any


class Source(NamedTuple):
    """Where tiles of K or V, or of their tangents, come from.

    `base` points to token 0 of the (sequence, head), or to slot 0 of page 0 of the head, whose pages `table` names.
    `box` is a tensor map, in which `place` is where token 0 lies. `scales` are those of 8-bit rows.
    """

    rows: Any
    base: Any
    table: Any
    box: Any
    place: Any
    scales: Any


class Span(NamedTuple):
    """The rows of a sequence: its number, its first row in a packed tensor, and how many it has."""

    sequence: Any
    start: Any
    length: Any


class Extent(NamedTuple):
    """Where a sequence has its queries and its keys."""

    q_start: Any
    seqlen_q: Any
    k_start: Any
    seqlen_k: Any


class Rows(NamedTuple):
    """A tensor of token rows, or of scales: pointer and strides of (sequence or page, head, token or block)."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any


class Lengths(NamedTuple):
    """Where packed sequences begin, and how many keys sequences have in pages."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_k: Any


class Paging(NamedTuple):
    """The pages of sequences: pointer and stride of the block table, and after how many rows of K and of V a page
    begins in the tensor maps that see all pages as rows.
    """

    table: Any
    stride: Any
    k_rows: Any
    v_rows: Any


class Scales(NamedTuple):
    """The scales of 8-bit operands, each as Rows."""

    q: Any
    k: Any
    v: Any


class Window(NamedTuple):
    """The window with causality folded in: query i sees keys from `i + diagonal - left` to `i + diagonal + right`."""

    left: Any
    right: Any


class Strides(NamedTuple):
    """The strides of token rows, in a unit that the kernel knows."""

    batch: Any
    head: Any
    row: Any
