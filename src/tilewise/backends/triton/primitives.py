"""Device functions that the kernels share: tile loads and stores, tile ranges, scores, online softmax, dropout bits.

Orientation: `m_idx` and `n_idx` are token indices within their sequence, shaped to broadcast against a score tile:
(BLOCK_M, 1) and (1, BLOCK_N) in the forward and dQ kernels, (1, BLOCK_M) and (BLOCK_N, 1) where dK/dV works on
transposed scores. `T` is a `Traits`. The tile ranges mirror tilewise.masks and are tested against it.

Boxes: tiles through tensor descriptors that know where rows end, so no pointer and no mask takes a register.
Dense rows use four dimensions: (batch, heads, rows, columns). Packed rows use five: (ROWS_APART, ends, heads, rows,
columns), so that the hardware knows where each sequence ends. One step along `ends` is one row. For a sequence whose
rows end before row `end`, row 0 has the coordinate `end` along `ends` and ROWS_APART - length along `rows`. The row
after the last one would then have the row coordinate ROWS_APART, which is out of bounds: it is read as zeros and not
stored. These coordinates are ROWS_APART rows too far. The first dimension compensates: its stride is 2^64 / ROWS_APART
less one row, taken ROWS_APART times, and addresses wrap at 2^64 (as in Triton's tools/ragged_tma.py).
"""

# Triton types the arguments, constexprs are CAPS, and a constexpr branch needs its own `if` and `else`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.records import DropoutOrigin, Place, RowTerms

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
# From this lse on (in nats) the backward of plain scores treats rows as empty: fp32 lse is a multiple of 4 there, so P
# = 2^(score - lse) would be pure rounding error.
LARGEST_LSE = tl.constexpr(2.0**25)
# Below this, tanh uses its series: 1 - 2 / (e^2x + 1) cancels near 0.
TANH_SERIES_BELOW = tl.constexpr(0.25)
# Sequences that a program searches at a time for its own: four per thread.
SEARCHED_SEQUENCES = tl.constexpr(512)
# The backward's statistics of a sequence fill whole tiles of this many rows (no table has a taller tile), so that they
# are loaded as vectors without a mask.
STAT_TILE = tl.constexpr(128)


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr):
    """A zero accumulator."""
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def dot(a, b, T: tl.constexpr):
    """Compute a @ b with fp32 accumulation. The interpreter multiplies bf16 bit patterns, so it gets fp32 operands."""
    if T.INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=T.PRECISION)


@triton.jit
def dot_add(a, b, acc, T: tl.constexpr):
    """Compute acc + a @ b."""
    if T.INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=T.PRECISION)


@triton.jit
def sequence_of(slot, cu_seqlens, batch, BLOCK: tl.constexpr):
    """(sequence, its first slot). Sequence b owns the slots from cu_seqlens[b] // BLOCK + b on: at least as many as it
    has tiles, at most one more.
    """
    below = slot * 0
    for first in tl.range(0, batch, SEARCHED_SEQUENCES):
        idx = first + tl.arange(0, SEARCHED_SEQUENCES)
        start = tl.load(cu_seqlens + idx, mask=idx < batch, other=0)
        below += tl.sum(((start // BLOCK + idx <= slot) & (idx < batch)).to(tl.int32))
    return below - 1, tl.load(cu_seqlens + below - 1) // BLOCK + below - 1


@triton.jit
def work_item(num_blocks, num_heads, sizes, LAST_FIRST: tl.constexpr):
    """(block, head, batch_idx) of this program: waves of `heads_per_wave` heads whose K and V stay in L2, with blocks
    outermost.

    With LAST_FIRST the last blocks come first: under a causal mask they are the longest, and short ones fill the tail.
    """
    pid = tl.program_id(0)
    wave_programs = sizes.heads_per_wave * num_blocks
    first_item = pid // wave_programs * sizes.heads_per_wave
    wave_heads = tl.minimum(sizes.heads_per_wave, sizes.batch * num_heads - first_item)
    rank = pid % wave_programs
    item = first_item + rank % wave_heads
    block = rank // wave_heads
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, item % num_heads, item // num_heads


@triton.jit
def query_span(lengths, sizes, batch_idx, T: tl.constexpr):
    """(first packed row, number of rows) of a sequence's queries."""
    if T.PACKED_Q:
        start = tl.load(lengths.cu_seqlens_q + batch_idx)
        return start, tl.load(lengths.cu_seqlens_q + batch_idx + 1) - start
    return batch_idx * 0, sizes.seqlen_q + batch_idx * 0


@triton.jit
def key_span(lengths, sizes, batch_idx, T: tl.constexpr):
    """(first packed row, number of rows) of a sequence's keys."""
    if T.PACKED_K:
        start = tl.load(lengths.cu_seqlens_k + batch_idx)
        return start, tl.load(lengths.cu_seqlens_k + batch_idx + 1) - start
    elif T.PAGED:
        return batch_idx * 0, tl.load(lengths.seqlens_k + batch_idx)
    else:
        return batch_idx * 0, sizes.seqlen_k + batch_idx * 0


@triton.jit
def head_base(rows, batch_idx, head, start, PACKED: tl.constexpr):
    """Pointer to token 0 of a (sequence, head); 64-bit, because a tensor may exceed 2^31 elements."""
    base = rows.ptr + tl.cast(head, tl.int64) * rows.stride_head
    if PACKED:
        return base + tl.cast(start, tl.int64) * rows.stride_row
    return base + tl.cast(batch_idx, tl.int64) * rows.stride_batch


@triton.jit
def stat_base(stats, batch_idx, head, q_start, T: tl.constexpr):
    """Pointer to the statistics of token 0 of a (sequence, head). Those of packed sequences fill whole tiles
    of slots.
    """
    base = stats.ptr + tl.cast(head, tl.int64) * stats.stride_head
    if T.PACKED_Q:
        return base + tl.cast(q_start // STAT_TILE + batch_idx, tl.int64) * STAT_TILE
    return base + tl.cast(batch_idx, tl.int64) * stats.stride_batch


@triton.jit
def page_base(rows, head):
    """Pointer to slot 0 of page 0 of a head."""
    return rows.ptr + tl.cast(head, tl.int64) * rows.stride_head


@triton.jit
def tile_pointers(base, stride_row, first, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) pointers to the rows from `first` on: one 64-bit base plus 32-bit offsets within the tile."""
    origin = base + tl.cast(first, tl.int64) * stride_row
    return origin + (tl.arange(0, BLOCK)[:, None] * stride_row + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def load_tile(pointers, first, num_rows, CHECK_ROWS: tl.constexpr, DIM: tl.constexpr):
    """A (BLOCK, BLOCK_D) tile. Rows past `num_rows` (if checked) and columns past DIM are 0."""
    BLOCK: tl.constexpr = pointers.shape[0]
    BLOCK_D: tl.constexpr = pointers.shape[1]
    row_ok = first + tl.arange(0, BLOCK)[:, None] < num_rows
    col_ok = tl.arange(0, BLOCK_D)[None, :] < DIM
    if CHECK_ROWS:
        if BLOCK_D == DIM:
            return tl.load(pointers, mask=row_ok, other=0.0)
        return tl.load(pointers, mask=row_ok & col_ok, other=0.0)
    if BLOCK_D == DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=col_ok, other=0.0)


@triton.jit
def load_rows(
    base,
    stride_row,
    first,
    num_rows,
    CHECK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows `first` to `first + BLOCK` of a (sequence, head)."""
    return load_tile(tile_pointers(base, stride_row, first, BLOCK, BLOCK_D), first, num_rows, CHECK_ROWS, DIM)


@triton.jit
def load_queries(
    rows, box, batch_idx, head, q_start, first, seqlen_q,
    CHECK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A tile of q, dout, out or the tangent of one, by its box if there is one."""
    if box is not None:
        return load_box(box, box_place(batch_idx, head, q_start, seqlen_q, T.PACKED_Q), first, BLOCK_M, BLOCK_D)
    else:
        base = head_base(rows, batch_idx, head, q_start, T.PACKED_Q)
        return load_rows(base, rows.stride_row, first, seqlen_q, CHECK_ROWS, BLOCK_M, DIM, BLOCK_D)


@triton.jit
def store_rows(tile, base, stride_row, first, num_rows, DIM: tl.constexpr):
    """Write a tile's rows below `num_rows` and columns below DIM, in the tensor's dtype."""
    BLOCK: tl.constexpr = tile.shape[0]
    BLOCK_D: tl.constexpr = tile.shape[1]
    row_ok = first + tl.arange(0, BLOCK)[:, None] < num_rows
    col_ok = tl.arange(0, BLOCK_D)[None, :] < DIM
    pointers = tile_pointers(base, stride_row, first, BLOCK, BLOCK_D)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=row_ok & col_ok)


@triton.jit
def clear_rows(
    rows,
    head,
    block,
    num_blocks,
    cu_seqlens,
    batch,
    total,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Zero the packed rows that belong to no sequence, divided among the `num_blocks` programs of a head."""
    begin = tl.load(cu_seqlens + batch)
    zero = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    base = rows.ptr + tl.cast(head, tl.int64) * rows.stride_head
    for first in tl.range(begin + block * BLOCK, total, num_blocks * BLOCK):
        store_rows(zero, base, rows.stride_row, first, total, DIM)


@triton.jit
def key_base(rows, batch_idx, kv_head, k_start, T: tl.constexpr):
    """Pointer to key 0 of a (sequence, head), or to slot 0 of page 0 of a head; 0 without rows."""
    if rows is None:
        return 0
    elif T.PAGED:
        return page_base(rows, kv_head)
    else:
        return head_base(rows, batch_idx, kv_head, k_start, T.PACKED_K)


@triton.jit
def page_table(paging, batch_idx, T: tl.constexpr):
    """Pointer to the table entries of a sequence; 0 without pages."""
    if T.PAGED:
        return paging.table + tl.cast(batch_idx, tl.int64) * paging.stride
    else:
        return 0


@triton.jit
def key_pages(source, first, seqlen_k, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """The table entries for keys first..first+BLOCK_N of a Source: one if a page holds the whole tile, else one per
    key. 0 past the end and without pages.
    """
    if not T.PAGED:
        return 0
    elif T.PAGE_SIZE % BLOCK_N == 0:
        return tl.load(source.table + first // T.PAGE_SIZE, mask=first < seqlen_k, other=0)
    else:
        n_idx = first + tl.arange(0, BLOCK_N)
        return tl.load(source.table + n_idx // T.PAGE_SIZE, mask=n_idx < seqlen_k, other=0)


@triton.jit
def load_keys(
    source,
    pages,
    first,
    seqlen_k,
    CHECK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
):
    """The one loader of K and V tiles, for dense and packed rows and for pages. `pages` are the tile's entries from
    key_pages of the Source.

    Boxes load all tiles of rows, and complete tiles of pages, which then hold whole ones. Pages smaller than a tile are
    gathered row by row. A loop looks its pages up one tile ahead: a lookup in the iteration that needs it would take a
    pipeline stage and leave one tile less in flight.
    """
    if source.box is not None and not T.PAGED:
        return load_box(source.box, source.place, first, BLOCK_N, BLOCK_D)
    elif source.box is not None and not CHECK_ROWS:
        return load_box(source.box, page_place(pages, source.place), first % T.PAGE_SIZE, BLOCK_N, BLOCK_D)
    elif not T.PAGED:
        return load_rows(source.base, source.rows.stride_row, first, seqlen_k, CHECK_ROWS, BLOCK_N, DIM, BLOCK_D)
    elif T.PAGE_SIZE % BLOCK_N == 0:
        origin = source.base + tl.cast(pages, tl.int64) * source.rows.stride_batch
        origin += first % T.PAGE_SIZE * source.rows.stride_row
        offsets = tl.arange(0, BLOCK_N)[:, None] * source.rows.stride_row + tl.arange(0, BLOCK_D)[None, :]
        return load_tile(origin + offsets, first, seqlen_k, CHECK_ROWS, DIM)
    else:
        slots = (first + tl.arange(0, BLOCK_N)) % T.PAGE_SIZE
        row_offsets = pages.to(tl.int64) * source.rows.stride_batch + slots * source.rows.stride_row
        pointers = source.base + row_offsets[:, None] + tl.arange(0, BLOCK_D)[None, :]
        return load_tile(pointers, first, seqlen_k, CHECK_ROWS, DIM)


@triton.jit
def key_range(m_first, seqlen_q, seqlen_k, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """(begin, full_begin, full_end, end): the keys a query tile visits, and within them the tiles that need no mask.

    All but `end` are multiples of BLOCK_N, and begin <= full_begin <= full_end <= end unless nothing is visited.
    """
    diagonal = seqlen_k - seqlen_q
    m_last = tl.minimum(m_first + BLOCK_M, seqlen_q) - 1
    begin = seqlen_k * 0
    full_begin = begin
    end = seqlen_k
    full_end = seqlen_k
    if T.HAS_LEFT:
        begin = tl.maximum(m_first + diagonal - window.left, 0)
        full_begin = (tl.maximum(m_last + diagonal - window.left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if T.HAS_RIGHT:
        end = tl.maximum(tl.minimum(seqlen_k, m_last + diagonal + window.right + 1), 0)
        full_end = tl.maximum(tl.minimum(seqlen_k, m_first + diagonal + window.right + 1), 0)
    end = tl.where(begin < end, end, 0)
    full_begin = tl.minimum(full_begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_end = tl.maximum(tl.minimum(full_end, end) // BLOCK_N * BLOCK_N, full_begin)
    return begin // BLOCK_N * BLOCK_N, full_begin, full_end, end


@triton.jit
def query_range(n_first, seqlen_q, seqlen_k, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """(begin, full_begin, full_end, end): the queries that see a key tile, and within them the tiles that need no mask.

    Keys past seqlen_k need no mask here: row n of dK and dV depends on key n alone and is not stored.
    """
    diagonal = seqlen_k - seqlen_q
    n_last = tl.minimum(n_first + BLOCK_N, seqlen_k) - 1
    begin = seqlen_q * 0
    full_begin = begin
    end = seqlen_q
    full_end = seqlen_q
    if T.HAS_RIGHT:
        begin = tl.maximum(n_first - diagonal - window.right, 0)
        full_begin = (tl.maximum(n_last - diagonal - window.right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if T.HAS_LEFT:
        end = tl.maximum(tl.minimum(seqlen_q, n_last - diagonal + window.left + 1), 0)
        full_end = tl.maximum(tl.minimum(seqlen_q, n_first - diagonal + window.left + 1), 0)
    end = tl.where(begin < end, end, 0)
    full_begin = tl.minimum(full_begin, (end + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_end = tl.maximum(tl.minimum(full_end, end) // BLOCK_M * BLOCK_M, full_begin)
    return begin // BLOCK_M * BLOCK_M, full_begin, full_end, end


@triton.jit
def around_gap(position, gap_begin, gap_end, EDGE: tl.constexpr):
    """Token index of a loop position. An edge loop covers both sides of the unmasked tiles and skips over them."""
    if EDGE:
        return position + tl.where(position >= gap_begin, gap_end - gap_begin, 0)
    else:
        return position


@triton.jit
def keep_in_band(m_idx, n_idx, seqlen_q, seqlen_k, window, T: tl.constexpr):
    """Which (query, key) pairs of an edge tile exist and are not masked by causality or window."""
    diagonal = seqlen_k - seqlen_q
    # One bound per row and one comparison per score.
    last = seqlen_k - 1
    if T.HAS_RIGHT:
        last = tl.minimum(m_idx + (diagonal + window.right), last)
    keep = n_idx <= last
    if T.HAS_LEFT:
        keep = keep & (n_idx >= m_idx + (diagonal - window.left))
    return keep


@triton.jit
def row_pointers(rows, batch_idx, head, m_idx, seqlen_q):
    """Pointers to key 0 of the rows of a bias or mask; rows past the end are clamped, so no row mask is needed."""
    row = tl.minimum(m_idx, seqlen_q - 1).to(tl.int64)
    base = rows.ptr + tl.cast(batch_idx, tl.int64) * rows.stride_batch + tl.cast(head, tl.int64) * rows.stride_head
    return base + row * rows.stride_row


@triton.jit
def score_terms(terms, batch_idx, head, m_idx, seqlen_q, T: tl.constexpr):
    """The RowTerms of these rows."""
    slope = 0.0
    bias_rows = 0
    bias_stride = 0
    mask_rows = 0
    mask_stride = 0
    seed = 0
    if T.HAS_ALIBI:
        slopes = terms.alibi_slopes
        slope = tl.load(slopes.ptr + batch_idx * slopes.stride_batch + head * slopes.stride_head)
    if T.HAS_BIAS:
        bias_rows = row_pointers(terms.bias, batch_idx, head, m_idx, seqlen_q)
        bias_stride = terms.bias_stride
    if T.HAS_MASK:
        mask_rows = row_pointers(terms.mask, batch_idx, head, m_idx, seqlen_q)
        mask_stride = terms.mask_stride
    if T.HAS_DROPOUT:
        seed = tl.load(terms.seed)
    if T.DROPOUT_ORIGIN:
        # The counter's words have 32 bits. Four keys share a draw, and the first of them is a multiple of four.
        batch_origin = tl.load(terms.seed + 1).to(tl.int32)
        head_origin = tl.load(terms.seed + 2).to(tl.int32)
        row_origin = tl.load(terms.seed + 3).to(tl.int32)
        draw_origin = (tl.load(terms.seed + 4) // 4).to(tl.int32)
        seed = DropoutOrigin(seed, batch_origin, head_origin, row_origin, draw_origin)  # type: ignore[assignment]
    return RowTerms(slope, bias_rows, bias_stride, mask_rows, mask_stride, seed)


@triton.jit
def load_columns(pointers, stride_col, n_idx, seqlen_k, CHECK: tl.constexpr):
    """A score-shaped tile of a bias or mask."""
    at = pointers + n_idx.to(tl.int64) * stride_col
    if CHECK:
        return tl.load(at, mask=n_idx < seqlen_k, other=0)
    return tl.load(at)


@triton.jit
def tanh(x):
    """Compute tanh to about 1e-7 relative: a series near 0, exponentials elsewhere."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < TANH_SERIES_BELOW, series, tl.where(x < 0.0, -far, far))


@triton.jit
def natural_scores(dots, m_idx, n_idx, row_terms, scalars, seqlen_q, seqlen_k, CHECK: tl.constexpr, T: tl.constexpr):
    """(scores, capped): the contract's steps 1 to 4 and the boolean mask. `capped` is the score right after the
    softcap.
    """
    scores = dots * scalars.scale
    if T.HAS_SOFTCAP:
        scores = scalars.softcap * tanh(scores / scalars.softcap)
    capped = scores
    if T.HAS_ALIBI:
        scores -= row_terms.slope * tl.abs(m_idx + (seqlen_k - seqlen_q) - n_idx).to(tl.float32)
    if T.HAS_BIAS:
        scores += load_columns(row_terms.bias_rows, row_terms.bias_stride, n_idx, seqlen_k, CHECK).to(tl.float32)
    if T.HAS_MASK:
        seen = load_columns(row_terms.mask_rows, row_terms.mask_stride, n_idx, seqlen_k, CHECK)
        if T.HAS_DROPOUT:
            seen = unrelated(seen, T)
        scores = tl.where(seen != 0, scores, NEG_INF)
    return scores, capped


@triton.jit
def unrelated(octets, T: tl.constexpr):
    """The same bytes, by an instruction through which Triton does not trace the operand of a product.

    Triton lays out an operand by the narrowest load that it is computed from, and halves that width once if dropout
    bits are joined on the way: 16, 8 or, with a mask of bytes and dropout, 4 bits. In the layout for 4 bits, products
    over 16 rows or keys come out wrong (mma.sync in Triton 3.6 and 3.7): half of the terms count twice.
    """
    if T.INTERPRETED:
        return octets
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [octets], dtype=octets.dtype, is_pure=False, pack=4
    )  # fmt: skip


@triton.jit
def softmax_step(scores, tops, row_max, row_sum, unit):
    """One online-softmax step: (p, row_max, row_sum, alpha) after a tile of scores whose row maxima are `tops`; a score
    times `unit` is in log2.

    A row that has seen no key keeps row_max -inf. Its exponentials are taken against 0, so they are 0 and not NaN.
    """
    new_max = tl.maximum(row_max, tops)
    anchor = tl.where(new_max == NEG_INF, 0.0, new_max)
    alpha = tl.exp2((row_max - anchor) * unit)
    p = tl.exp2((scores - anchor[:, None]) * unit)
    return p, new_max, add_to_sums(row_sum, alpha, p), alpha


@triton.jit
def softmax_step_scaled(dots, tops, row_max, row_sum, scale_log2):
    """`softmax_step` for plain scores, -inf where masked: the (positive) scale goes into one multiply-add per score."""
    new_max = tl.maximum(row_max, tops * scale_log2)
    anchor = tl.where(new_max == NEG_INF, 0.0, new_max)
    alpha = tl.exp2(row_max - anchor)
    p = tl.exp2(dots * scale_log2 - anchor[:, None])
    return p, new_max, add_to_sums(row_sum, alpha, p), alpha


@triton.jit
def lse_in_log2(lse):
    """The lse that the backward subtracts, in log2. +inf for rows without keys or with P below rounding error."""
    return tl.where(tl.abs(lse) > LARGEST_LSE, float("inf"), lse * LOG2E)


@triton.jit
def add_to_sums(row_sum, alpha, p):
    """The running sums with a tile of P added. Per-column sums are reduced at the end."""
    if len(row_sum.shape) == 2:
        return row_sum * alpha[:, None] + p
    else:
        return row_sum * alpha + tl.sum(p, 1)


@triton.jit
def dropout_keep(seed, m_idx, first, head, batch_idx, drop_below, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """The contract's dropout bits for keys first..first+BLOCK_N as (rows, BLOCK_N). m_idx is (rows,), `head` a scalar
    or (rows,).

    One Philox call serves four neighbouring keys, so (rows, BLOCK_N / 4) counters are drawn and their words
    interleaved.
    """
    BLOCK_M: tl.constexpr = m_idx.shape[0]
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    first_draw = first // 4
    if T.DROPOUT_ORIGIN:
        batch_idx += seed.batch
        head += seed.head
        m_idx += seed.row
        first_draw += seed.draw
        seed = seed.seed
    draw = zero + (first_draw + tl.arange(0, BLOCK_N // 4))[None, :]
    rows = zero + m_idx[:, None]
    heads = zero + (head + tl.zeros([BLOCK_M], tl.int32))[:, None]
    w0, w1, w2, w3 = tl.philox(seed, draw, rows, heads, zero + batch_idx)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [BLOCK_M, BLOCK_N]) >= tl.cast(drop_below, tl.uint32)


# More rows than a packed tensor in boxes may have.
ROWS_APART = tl.constexpr(1 << 30)


@triton.jit
def box_place(batch_idx, head, start, length, PACKED: tl.constexpr):
    """The Place of token 0 of a (sequence, head). A packed sequence begins at row `start` and has `length` rows."""
    if PACKED:
        # The run-time value comes first: Triton 3.9's interpreter makes a constant of a constant minus a run-time
        # value.
        return Place(ROWS_APART, start + length, head, -length + ROWS_APART, 0)
    else:
        return Place(batch_idx, batch_idx * 0, head, batch_idx * 0, 0)


@triton.jit
def page_place(page, place):
    """The same place in a page."""
    return Place(page, place.end, place.head, place.row, place.column)


@triton.jit
def load_box(box, place, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `first` to `first + BLOCK` after `place`. Rows past the end of the sequence are 0."""
    if len(box.block_shape) == 5:
        return box.load([place.batch, place.end, place.head, place.row + first, place.column]).reshape([BLOCK, WIDTH])
    else:
        return box.load([place.batch, place.head, place.row + first, place.column]).reshape([BLOCK, WIDTH])


@triton.jit
def store_box(box, place, first, tile):
    """Write a tile to the rows from `first` on. Rows past the end of the sequence are dropped."""
    rows = tile.to(box.dtype).reshape(box.block_shape)
    if len(box.block_shape) == 5:
        box.store([place.batch, place.end, place.head, place.row + first, place.column], rows)
    else:
        box.store([place.batch, place.head, place.row + first, place.column], rows)


@triton.jit
def in_registers(tile, T: tl.constexpr):
    """The same tile of 16-bit numbers, forced into registers: wgmma then does not read it from shared memory."""
    if T.INTERPRETED:
        return tile
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2)
