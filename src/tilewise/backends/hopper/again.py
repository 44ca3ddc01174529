"""Recompute the rows that overflowed in the forward without maxima (AT_ONCE, see scores.py), with ordinary maxima.

A row overflows if P reaches 2^100 in its last tile (a score 55 to 69 nats above all before, because the reference may
lag by 2^20), or 2^127 in an earlier tile, after which sums move into the reference; if V holds infinities or NaN; or if
a sink lies far above a row whose reference lags. The forward then writes LOST_MARK as the row's lse, whatever its O is.
So the kernels communicate through the result of this call: there is nothing to clear, and nothing is shared between
streams or kept between calls.

Programs: P, each for every P-th block of 64 rows of lse, which balances causal masks. A program checks SPAN rows at a
time, nearly always finds no marker and ends. The kernel starts while the forward ends (programmatic dependent launch)
and waits for the forward's last store. For a block with a marker it computes all rows of one sequence and writes those
with a marker: a row's result depends on no other row, and on no keys but those that its block sees. The loop is plain
and slow, 64 keys a step, because overflow is rare.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, RET505

import triton
import triton.language as tl

# A NaN with bits that no GPU arithmetic produces: its own NaN is 0x7FFFFFFF.
LOST_MARK = tl.constexpr(0x7FC10057)
# Rows of lse that a program checks at a time: 16 a thread.
SPAN = tl.constexpr(2048)
ROWS, KEYS = tl.constexpr(64), tl.constexpr(64)
# Sequences that are compared with a row at a time.
COMPARED = tl.constexpr(64)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def await_forward():
    """Wait until the kernel before has ended and its writes are visible."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def exp2(x):
    """2^x; subnormal results become 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def place_of(at, num_rows, cu_seqlens_q, cu_seqlens_k, batch, sizes, IS_VARLEN: tl.constexpr):
    """(batch_idx, head, row, first query row and number, first key row and number) of a row of lse."""
    item = (at // num_rows).to(tl.int32)
    row = (at - at // num_rows * num_rows).to(tl.int32)
    if IS_VARLEN:
        sequence = row * 0
        for first in range(0, batch, COMPARED):
            others = first + tl.arange(0, COMPARED)
            ends = tl.load(cu_seqlens_q + 1 + others, mask=others < batch, other=0x7FFFFFFF)
            sequence += tl.sum((ends <= row).to(tl.int32), 0)
        sequence = tl.minimum(sequence, batch - 1)
        q_first, k_first = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
        queries = q_first, tl.load(cu_seqlens_q + sequence + 1) - q_first
        keys = k_first, tl.load(cu_seqlens_k + sequence + 1) - k_first
        return item * 0, item, row - q_first, queries, keys
    else:
        batch_idx = item // sizes.num_heads
        return batch_idx, item - batch_idx * sizes.num_heads, row, (0, sizes.seqlen_q), (0, sizes.seqlen_k)


@triton.jit
def rows_at(ptr, strides, batch_idx, head, rows, inside, width, COLUMNS: tl.constexpr):
    """Addresses of rows of a tensor with strides (batch, head, row), and which elements exist: `width` of a row."""
    cols = tl.arange(0, COLUMNS)
    first = ptr + tl.cast(batch_idx, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return first + rows.to(tl.int64)[:, None] * strides[2] + cols[None, :], inside[:, None] & (cols < width)[None, :]


@triton.jit
def seen(rows, keys, seqlen_q, seqlen_k, sizes, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which keys each row sees."""
    shown = (keys < seqlen_k)[None, :] & (rows >= 0)[:, None]
    own = rows + (seqlen_k - seqlen_q)
    if HAS_RIGHT:
        shown = shown & (keys[None, :] <= (own + sizes.window_right)[:, None])
    if HAS_LEFT:
        shown = shown & (keys[None, :] >= (own - sizes.window_left)[:, None])
    return shown


@triton.jit
def attend(
    q, k_ptr, v_ptr, k_strides, v_strides, batch_idx, kv_head, row, queries, keys, widths, scale_log2, sizes,
    COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(O, largest score, sum) of 64 rows from `row` on. Negative rows belong to another sequence and see nothing."""
    seqlen_q, seqlen_k = queries[1], keys[1]
    rows = row + tl.arange(0, ROWS)
    begin, stop = 0, seqlen_k
    if HAS_RIGHT:
        stop = tl.minimum(stop, row + ROWS + (seqlen_k - seqlen_q) + sizes.window_right)
    if HAS_LEFT:
        begin = tl.maximum(row + (seqlen_k - seqlen_q) - sizes.window_left, 0)
    acc = tl.zeros([ROWS, COLUMNS_V], tl.float32)
    row_max = tl.zeros([ROWS], tl.float32) + NEG_INF
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(begin // KEYS * KEYS, stop, KEYS):
        cols = first + tl.arange(0, KEYS)
        # Do not load values that none of the 64 rows sees: 0 times infinity would be NaN.
        there = cols < stop
        if HAS_LEFT:
            there = there & (cols >= begin)
        at, inside = rows_at(k_ptr, k_strides, batch_idx, kv_head, keys[0] + cols, there, widths[0], COLUMNS)
        scores = tl.dot(q, tl.trans(tl.load(at, mask=inside, other=0.0))) * scale_log2
        shown = seen(rows, cols, seqlen_q, seqlen_k, sizes, HAS_LEFT, HAS_RIGHT)
        # Mask after the multiplication, so that the product is rounded before the maximum is subtracted. Fused, scores
        # above 2^30 would leave a difference that makes P wrong.
        scores = tl.where(shown, scores, NEG_INF)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == NEG_INF, 0.0, new_max)
        p = exp2(scores - shift[:, None])
        factor = exp2(row_max - shift)
        row_sum = row_sum * factor + tl.sum(p, 1)
        at, inside = rows_at(v_ptr, v_strides, batch_idx, kv_head, keys[0] + cols, there, widths[1], COLUMNS_V)
        v = tl.load(at, mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def finish(row_max, row_sum, sinks_ptr, head):
    """(factor that normalises O, lse); a row without keys gets 0 and -inf."""
    shift = row_max
    weight = row_sum * 0.0 + 1.0
    total = row_sum
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(row_max, sink)
        shift = tl.where(top == NEG_INF, 0.0, top)
        weight = exp2(row_max - shift)
        total = row_sum * weight + tl.where(sink == shift, 1.0, exp2(sink - shift))
    empty = total == 0.0
    return tl.where(empty, 0.0, weight / total), tl.where(empty, NEG_INF, (shift + tl.log2(total)) * LN2)


@triton.jit
def mend_block(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, marks_ptr, sinks_ptr, q_strides, k_strides, v_strides, out_strides, block,
    batch_idx, head, row, queries, keys, widths, lse_rows, scale_log2, sizes,
    COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Recompute the marked rows of one sequence among the 64 rows of lse from `block` on; the first is its `row`."""
    rows = row + tl.arange(0, ROWS)
    lse_at = block + tl.arange(0, ROWS)
    there = (rows >= 0) & (rows < queries[1])
    marked = there & (lse_at < lse_rows)
    marked = marked & (tl.load(marks_ptr + lse_at, mask=marked, other=0) == LOST_MARK)
    where, inside = rows_at(q_ptr, q_strides, batch_idx, head, queries[0] + rows, there, widths[0], COLUMNS)
    q = tl.load(where, mask=inside, other=0.0)
    acc, row_max, row_sum = attend(
        q, k_ptr, v_ptr, k_strides, v_strides, batch_idx, head // sizes.group_size, row, queries, keys, widths,
        scale_log2, sizes, COLUMNS, COLUMNS_V, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    factor, lse = finish(row_max, row_sum, sinks_ptr, head)
    where, inside = rows_at(out_ptr, out_strides, batch_idx, head, queries[0] + rows, marked, widths[1], COLUMNS_V)
    tl.store(where, (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all threads have read the markers before lse overwrites them
    tl.store(lse_ptr + lse_at, lse, mask=marked)


@triton.jit(
    do_not_specialize=["widths", "batch", "num_rows", "lse_rows", "scale_log2", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_seqlens_q", "cu_seqlens_k"],
)
def again_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, marks_ptr, sinks_ptr, cu_seqlens_q, cu_seqlens_k,
    q_strides, k_strides, v_strides, out_strides, widths, batch, num_rows, lse_rows, scale_log2, sizes,
    COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Recompute the rows of out and lse that are marked in lse; marks_ptr is lse read as integers.

    lse has lse_rows rows, num_rows of them for every head (dense: of every sequence). Strides are of (batch, head,
    row). widths are the columns of K and V; COLUMNS and COLUMNS_V are the powers of two that cover them.
    """
    await_forward()
    places = tl.arange(0, SPAN)
    programs = tl.num_programs(0)
    for first_row in range(0, lse_rows, programs * SPAN):
        begin = first_row + tl.program_id(0).to(tl.int64) * ROWS
        at = begin + places // ROWS * (programs * ROWS) + places % ROWS
        bits = tl.load(marks_ptr + at, mask=at < lse_rows, other=0)
        lost = tl.where(bits == LOST_MARK, places, SPAN)
        first = tl.min(lost, 0)
        while first < SPAN:
            block = begin + first // ROWS * (programs * ROWS)
            batch_idx, head, row, queries, keys = place_of(
                block + first % ROWS, num_rows, cu_seqlens_q, cu_seqlens_k, batch, sizes, IS_VARLEN)  # fmt: skip
            row -= first % ROWS
            mend_block(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, marks_ptr, sinks_ptr, q_strides, k_strides, v_strides,
                out_strides, block, batch_idx, head, row, queries, keys, widths, lse_rows, scale_log2, sizes, COLUMNS,
                COLUMNS_V, HAS_LEFT, HAS_RIGHT)  # fmt: skip
            # Skip at least this row: one that belongs to no sequence may look marked if its lse was never written.
            done = first // ROWS * ROWS + tl.minimum(queries[1] - row, ROWS)
            lost = tl.where(places < tl.maximum(done, first + 1), SPAN, lost)
            first = tl.min(lost, 0)
