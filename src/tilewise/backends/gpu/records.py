"""Records of both GPU backends: what the host fills and kernels take, by name, then what kernels make and pass on.

Each is a NamedTuple, which Triton and Gluon take as an argument and make in device code, as the interpreter and the
emulator of the tests do. A part that a problem does not have is None. Triton 3.6 returns no None from a function of the
device, so a record with a part that may be absent is made where it is used; and a constant in a record in a record is
lost there in branches and loops, so constants stand in the outer one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A tensor of token rows, or of scales: pointer and strides of (sequence or page, head, token or block)."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any


class Grid(NamedTuple):
    """A (batch, head, query, key) tensor: pointer and strides, 0 where it is broadcast."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any
    stride_col: Any


class Strides(NamedTuple):
    """The strides of token rows, in a unit that the kernel knows."""

    batch: Any
    head: Any
    row: Any


class Parts(NamedTuple):
    """The first columns of wide rows, and the rest: tensor maps, tiles or their memory."""

    first: Any
    rest: Any


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


class Terms(NamedTuple):
    """What changes scores and probabilities: bias and mask as Rows and the stride of their columns, the slopes of ALiBi
    as Rows, the seed of dropout as a pointer.
    """

    bias: Any
    bias_stride: Any
    mask: Any
    mask_stride: Any
    alibi_slopes: Any
    seed: Any


class BiasShape(NamedTuple):
    """The shape of a bias, with 1 where it is broadcast."""

    batch: Any
    heads: Any
    rows: Any
    cols: Any


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


class Sources(NamedTuple):
    """The Sources of keys and values, and of their tangents."""

    k: Any
    v: Any
    dot_k: Any
    dot_v: Any


class QueryTile(NamedTuple):
    """The tile of queries of a program: its first token (or row), the token of each row, head and sequence."""

    m_first: Any
    m_idx: Any
    head: Any
    batch_idx: Any


class KeyTile(NamedTuple):
    """The tile of keys of a program: its first key, its first (query or K/V) head, the sequence, and the first row of
    that one's queries.
    """

    n_first: Any
    head: Any
    batch_idx: Any
    q_start: Any


class Stretch(NamedTuple):
    """What a loop walks: begin..gap_begin and gap_end..end. Of all that a program visits, the gap needs no mask."""

    begin: Any
    gap_begin: Any
    gap_end: Any
    end: Any


class RowTerms(NamedTuple):
    """The Terms of some rows of scores: slopes, pointers to key 0 of the rows of bias and mask, with the strides of
    keys, and the seed or its DropoutOrigin. 0 where unused.
    """

    slope: Any
    bias_rows: Any
    bias_stride: Any
    mask_rows: Any
    mask_stride: Any
    seed: Any


class DropoutOrigin(NamedTuple):
    """The seed of dropout, and what is added to the sequence, head, row and draw that its random numbers are for."""

    seed: Any
    batch: Any
    head: Any
    row: Any
    draw: Any


class Columns(NamedTuple):
    """The even and the odd columns of a tile."""

    even: Any
    odd: Any


class QuantisedQueries(NamedTuple):
    """Queries for 8-bit keys: Columns of the first part and of the tail, and the unit of each row."""

    first: Any
    unit: Any
    tail: Any


class KeyScales(NamedTuple):
    """The scales of single keys, and for each row the largest of a key that it sees."""

    scales: Any
    tops: Any


class Statistics(NamedTuple):
    """The numbers of rows that a backward needs: `mean` is lse', `rate` is dout . out' (see triton.twice)."""

    lse: Any
    delta: Any
    mean: Any
    rate: Any


class TangentState(NamedTuple):
    """What a loop over keys carries for a tile of queries: the sums of P v and of P ((S' - mean) v + v'), row_max,
    row_sum, the sum of P S', and mean.
    """

    acc: Any
    dot_acc: Any
    row_max: Any
    row_sum: Any
    dot_sum: Any
    mean: Any


class BiasTile(NamedTuple):
    """The tile of dbias that a program owns a share of."""

    share: Any
    n_block: Any
    m_block: Any
    head: Any
    batch: Any


class Repetitions(NamedTuple):
    """The repetitions of a bias tile: how many along queries, keys and heads, and which of all a program sums."""

    along_m: Any
    along_n: Any
    heads: Any
    first: Any
    end: Any
