"""Decoding for sm_90: few query rows against many keys, at memory speed.

Grid: at most one CTA per SM. Each reads one contiguous share of the key tiles of all (sequence, K/V head) items, see
decode_schedule.py. Roles, one function each:
  producer   one warp: feeds deep rings of K and V tiles by TMA, without a pause between items
  consumer   one warpgroup. The product is transposed: S^T = K Q^T has keys as wgmma's 64 rows, and the query rows of a
             K/V head (tokens x heads of its group) as columns, of which 8 are enough. P^T goes through shared memory
             into O^T += V^T P^T
LANES == 2 (8-bit pages): two such pairs in a CTA, each with its own rings and share.

An item whose tiles all lie in one share is finished there. For other items every share writes a part (unnormalised O,
maximum, sum) into the workspace, and the CTA that arrives last merges the parts in key order. So results repeat.

Pages in e4m3 or int8: tiles become fp16 left operands, from shared memory to registers with wide loads and no shuffles.
wgmma expects a thread's elements of a left operand far apart, but wide loads give adjacent bytes. The order of summed
columns does not matter, and permuted rows of a result can be restored when they are stored. So a thread reads adjacent
bytes and treats them as the elements that wgmma expects of it:
  K   (keys x columns)  16 bytes of a row are the thread's columns of four wgmmas; Q's columns are permuted to match
  V^T (columns x keys)  2 adjacent bytes for every 64 columns are the thread's rows of the operand, hence of O^T
Both are exact in fp16. One instruction converts two e4m3 numbers (for bf16 it would take three), and three convert two
int8 ones.
D_REST (latents): one tile is K, and V in its first columns. 8-bit ones are converted in pieces of 128 columns. A second
kernel merges the parts (latent.py), because one CTA would take long for their rows of 512 columns.

Figures: bench/results/hopper-decode-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="assignment, misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Span
from tilewise.backends.gpu.releases import aggregate, async_load, barrier
from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.decode_schedule import (
    advance,
    ask,
    asks_first,
    extent_of,
    guess,
    key_tiles_of,
    locate,
    program_of,
)
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    await_kernel_before,
    exp2,
    let_next_start,
    log2,
    rebuilt,
    widened,
)
from tilewise.backends.hopper.scores import capped, sink_weight

# Page ids that the producer reads speculatively, one per lane of its warp.
PAGES_AHEAD = gl.constexpr(32)
# Lower bound for scales of V, whose smallest is 2^-105: the logarithm of 0 would be -inf.
MIN_SCALE = gl.constexpr(2.0**-110)
# Columns of K and of V (a quarter) of an e4m3 latent that are converted at a time.
KEY_PIECE, VALUE_PIECE = gl.constexpr(128), gl.constexpr(128)


@aggregate
class Pipeline:
    """The shared memory of a CTA. `rest` are the columns behind V of a latent, whose V is K's; others have none."""

    q_smem: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    p_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    k_rest: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    k_ring: Ring
    v_ring: Ring


# ---- producer


@gluon.jit
def columns_from(first):
    """PAGES_AHEAD consecutive columns of the block table, one per lane of a warp."""
    return first + gl.arange(0, PAGES_AHEAD, gl.BlockedLayout([PAGES_AHEAD // 32], [32], [1], [0]))


@gluon.jit
def guess_pages(paging, program, sizes, C: gl.constexpr):
    """(sequence, first column, ids) of PAGES_AHEAD entries of the block table, around the position where this program's
    share would begin if all sequences had the maximum length.

    They are read at the same time as the lengths, which tell where the share really begins. Columns past the bound on
    lengths are not read. Ids past a sequence's end may be anything and are not used.
    """
    batch_idx, row = guess(program, sizes)
    width = (sizes.seqlen_k + C.PAGE_SIZE - 1) // C.PAGE_SIZE
    first = max(min(row // C.PAGE_SIZE - PAGES_AHEAD // 2, width - PAGES_AHEAD), 0)
    columns = columns_from(first)
    table = paging.table + batch_idx.to(gl.int64) * paging.stride
    return batch_idx, first, gl.load(table + columns, mask=columns < width, other=0)


@gluon.jit
def first_pages(paging, guessed, batch_idx, row, length, C: gl.constexpr):
    """Like `look_up`, for the first key tile of an item, whose pages may be among the guessed ones."""
    pages = ()
    if C.IS_PAGED:
        CHUNK: gl.constexpr = C.CHUNK
        sequence, begin, ids = guessed
        table = paging.table + batch_idx.to(gl.int64) * paging.stride
        for c in gl.static_range(C.BLOCK_N // C.CHUNK):
            first = row + c * CHUNK
            column = first // C.PAGE_SIZE
            known = (batch_idx == sequence) & (column >= begin) & (column < begin + PAGES_AHEAD)
            found = gl.sum(gl.where(columns_from(begin) == column, ids, 0), axis=0)
            loaded = gl.load(table + column, mask=(first < length) & (known == 0), other=0)
            page = gl.where(known & (first < length), found, loaded)
            pages = pages + (page,)  # noqa: RUF005  (Triton knows no unpacking)
    return pages


@gluon.jit
def look_up(paging, batch_idx, row, length, C: gl.constexpr):
    """The pages of a key tile, one for every CHUNK rows; 0 for rows past the end."""
    pages = ()
    if C.IS_PAGED:
        CHUNK: gl.constexpr = C.CHUNK
        table = paging.table + batch_idx.to(gl.int64) * paging.stride
        for c in gl.static_range(C.BLOCK_N // C.CHUNK):
            first = row + c * CHUNK
            page = gl.load(table + first // C.PAGE_SIZE, mask=first < length, other=0)
            pages = pages + (page,)  # noqa: RUF005  (Triton knows no unpacking)
    return pages


@gluon.jit
def fetch_pages(
    desc, smem, slot, ready, span, head, row, pages, page_rows, FIRST: gl.constexpr, D: gl.constexpr, C: gl.constexpr
):
    """Start the copies of D columns from FIRST on of a paged key tile, in boxes of CHUNK rows of one page and 128
    bytes, which are one panel of the swizzled tile. Rows past the sequence's end arrive as zeros (see tile_at).
    """
    CHUNK: gl.constexpr = C.CHUNK
    PAGE_SIZE: gl.constexpr = C.PAGE_SIZE
    PANEL: gl.constexpr = min(D, 128 // C.ITEMSIZE)
    for c in gl.static_range(C.BLOCK_N // C.CHUNK):
        first = row + c * CHUNK
        page_row = first % PAGE_SIZE
        inside = max(min(span.length - (first - page_row), PAGE_SIZE), 0)
        for panel in gl.static_range(D // PANEL):
            box = smem.index(slot).slice(c * CHUNK, CHUNK, dim=3).slice(panel * PANEL, PANEL, dim=4)
            place = tile_at(Span(0, pages[c] * page_rows, inside), head, page_row, FIRST + panel * PANEL, True)
            async_load(desc, place, ready, box)


@gluon.jit
def fetch_columns(
    desc, smem, at, ready, span, head, row, pages, page_rows, FIRST: gl.constexpr, D: gl.constexpr, C: gl.constexpr
):
    """Start the copies of D columns from FIRST on of a key tile."""
    if C.IS_PAGED:
        fetch_pages(desc, smem, at.slot, ready, span, head, row, pages, page_rows, FIRST, D, C)
    else:
        # A box has at most 256 columns.
        COLUMNS: gl.constexpr = min(D, 256)
        DIM: gl.constexpr = 4 if C.IS_VARLEN else 3
        for part in gl.static_range(D // COLUMNS):
            box = smem.index(at.slot).slice(part * COLUMNS, COLUMNS, dim=DIM)
            async_load(desc, tile_at(span, head, row, FIRST + part * COLUMNS, C.IS_VARLEN), ready, box)


@gluon.jit
def fetch(desc, smem, at, ring, span, head, row, pages, page_rows, D: gl.constexpr, C: gl.constexpr):
    """Start the copy of a key tile into the ring."""
    ready = ring.acquire(at, C.BLOCK_N * D * C.ITEMSIZE)
    fetch_columns(desc, smem, at, ready, span, head, row, pages, page_rows, 0, D, C)


@gluon.jit
def fetch_latents(desc, rest, at, span, head, row, pages, page_rows, pipe, C: gl.constexpr):
    """Start the copy of a tile of latents, which are K and V, into the ring."""
    ready = pipe.k_ring.acquire(at, C.BLOCK_N * (C.D + C.D_REST) * C.ITEMSIZE)
    fetch_columns(desc, pipe.k_smem, at, ready, span, head, row, pages, page_rows, 0, C.D, C)
    fetch_columns(rest, pipe.k_rest, at, ready, span, head, row, pages, page_rows, C.D, C.D_REST, C)


@gluon.jit
def clear_tail(out, lse, cu_seqlens_q, sizes, C: gl.constexpr):
    """Zeros in the rows of out that belong to no sequence, -inf in their lse. All CTAs share them, one warp of each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    DV: gl.constexpr = C.DV
    cols = gl.arange(0, DV, LAYOUT)
    zeros = gl.zeros([DV], out.ptr.dtype.element_ty, LAYOUT)
    first = gl.load(cu_seqlens_q + sizes.batch) + gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    for i in range(first, sizes.total_q, gl.num_programs(0) * gl.num_programs(1)):
        row = gl.to_tensor(i)
        for j in range(sizes.num_kv_heads * C.GROUP_SIZE):
            head = gl.to_tensor(j)
            gl.store(out.ptr + place_rows(out, 0, row, 0, head, C) + cols, zeros)
            gl.store(lse.ptr + place_rows(lse, 0, row, 0, head, C), NEG_INF)


@gluon.jit
def producer(k_desc, k_rest, v_desc, out, lse, lengths, paging, sizes, pipe, LANE: gl.constexpr, C: gl.constexpr):
    """Feed the rings with the tiles of this CTA's share."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    at = start(C.NUM_STAGES)
    program = gl.program_id(0) * C.LANES + LANE
    asked = ()
    if asks_first(C):
        asked = ask(lengths, sizes, 1, C)
    guessed = ()
    if C.IS_PAGED:
        guessed = guess_pages(paging, program, sizes, C)
    _, flat, end, batch_idx, head, tile, extent = locate(lengths, asked, program, sizes, 1, C)
    while flat < end:
        _, seqlen_q, k_start, seqlen_k = extent
        first, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        keys = Span(batch_idx, k_start, seqlen_k)
        steps = min(count - tile, end - flat)
        row = (first + tile) * BLOCK_N
        pages = first_pages(paging, guessed, batch_idx, row, seqlen_k, C)
        for _i in range(steps):
            # Look up the next tile's pages after K is requested, so that K does not wait for it. 8-bit pages: before
            # the wait for a slot, which takes as long.
            if C.IS_FP8:
                following = look_up(paging, batch_idx, row + BLOCK_N, seqlen_k, C)
            if C.D_REST:
                fetch_latents(k_desc, k_rest, at, keys, head, row, pages, paging.k_rows, pipe, C)
            else:
                fetch(k_desc, pipe.k_smem, at, pipe.k_ring, keys, head, row, pages, paging.k_rows, C.D, C)
            if not C.IS_FP8:
                following = look_up(paging, batch_idx, row + BLOCK_N, seqlen_k, C)
            if not C.D_REST:
                fetch(v_desc, pipe.v_smem, at, pipe.v_ring, keys, head, row, pages, paging.v_rows, C.DV, C)
            at = at.next()
            row += BLOCK_N
            pages = following
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        extent = extent_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0
    if C.D_REST and C.PACKED_Q and LANE == 0:
        clear_tail(out, lse, lengths.cu_seqlens_q, sizes, C)


# ---- consumer


@gluon.jit
def load_query_rest(q, batch_idx, q_start, seqlen_q, head, C: gl.constexpr):
    """The columns of the query rows that meet those behind V of a latent."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(1, LAYOUT))
    cols = C.D + query_column(gl.arange(0, C.D_REST, gl.SliceLayout(0, LAYOUT)), C)
    token = rows // C.GROUP_SIZE
    offsets = place_rows(q, batch_idx, q_start, token, head * C.GROUP_SIZE + rows % C.GROUP_SIZE, C)
    ok = (token < seqlen_q)[:, None] & (cols < C.HEAD_DIM)[None, :]
    return gl.load(q.ptr + offsets[:, None] + cols[None, :], mask=ok, other=0.0)


@gluon.jit
def load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, C: gl.constexpr):
    """Store the query rows of an item in shared memory, with zeros for missing rows; returns the rows' units.

    With 8-bit keys the rows are fp16. Each row is divided by a power of two, its unit, so that bf16 rows keep all bits
    above 2^-24 of their largest number.
    """
    ACROSS: gl.constexpr = min(C.D // 8, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(1, LAYOUT))
    cols = query_column(gl.arange(0, C.D, gl.SliceLayout(0, LAYOUT)), C)
    token = rows // C.GROUP_SIZE
    offsets = place_rows(q, batch_idx, q_start, token, head * C.GROUP_SIZE + rows % C.GROUP_SIZE, C)
    ok = (token < seqlen_q)[:, None] & (cols < C.HEAD_DIM)[None, :]
    values = gl.load(q.ptr + offsets[:, None] + cols[None, :], mask=ok, other=0.0)
    units = 1.0
    if C.IS_FP8:
        values = values.to(gl.float32)
        largest = gl.max(gl.abs(values), axis=1)
        if C.D_REST:
            rest = load_query_rest(q, batch_idx, q_start, seqlen_q, head, C).to(gl.float32)
            ROW: gl.constexpr = gl.SliceLayout(1, rest.type.layout)
            largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(rest), axis=1), gl.SliceLayout(1, LAYOUT)))
            rest = rest * gl.convert_layout(1.0 / power_of_two(largest), ROW)[:, None]
            pipe.q_rest.index(0).store(rest.to(pipe.q_rest.dtype))
        units = power_of_two(largest)
        values = values * (1.0 / units)[:, None]
        units = gl.convert_layout(units, gl.SliceLayout(0, accumulator_layout(C.ROWS)))
    elif C.D_REST:
        pipe.q_rest.index(0).store(load_query_rest(q, batch_idx, q_start, seqlen_q, head, C))
    pipe.q_smem.index(0).store(values.to(pipe.q_smem.dtype))
    fence_async_shared()  # orders the stores above before wgmma's reads
    return units


@gluon.jit
def mask_keys(scores, row, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """-inf for keys (rows here) past the end or outside a query's window."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    keys = row + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, LAYOUT))
    seen = (keys < seqlen_k)[:, None]
    if C.HAS_RIGHT or C.HAS_LEFT:
        token = gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT)) // C.GROUP_SIZE + (seqlen_k - seqlen_q)
        if C.HAS_RIGHT:
            seen = seen & (keys[:, None] <= (token + sizes.window.right)[None, :])
        if C.HAS_LEFT:
            seen = seen & (keys[:, None] >= (token - sizes.window.left)[None, :])
    return gl.where(seen, scores, NEG_INF)


@gluon.jit
def pages_of(paging, batch_idx, row, seqlen_k, C: gl.constexpr):
    """The pages of a tile's keys, for their scales."""
    if C.IS_FP8:
        keys = row + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, accumulator_layout(C.ROWS)))
        table = paging.table + batch_idx.to(gl.int64) * paging.stride
        return (gl.load(table + keys // C.PAGE_SIZE, mask=keys < seqlen_k, other=0),)
    else:
        return ()


@gluon.jit
def scales_of(scales, pages, head, row, seqlen_k, C: gl.constexpr):
    """(scale of K, scale of V) for every key of a tile, whose first is `row`."""
    if C.IS_FP8:
        keys = row + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, accumulator_layout(C.ROWS)))
        k_scale = scale_of(scales.k, pages[0], head, keys, seqlen_k, C)
        v_scale = scale_of(scales.v, pages[0], head, keys, seqlen_k, C)
        return k_scale, v_scale
    else:
        return ()


@gluon.jit
def scale_of(scale, pages, head, keys, seqlen_k, C: gl.constexpr):
    """One of both. Past the end there may be any scale."""
    at = scale.ptr + pages.to(gl.int64) * scale.stride_batch + head * scale.stride_head
    if C.IS_INT8:
        at += keys % C.PAGE_SIZE * scale.stride_row
    return gl.load(at, mask=keys < seqlen_k, other=1.0)


@gluon.jit
def issue_scores(smem, here, pipe, C: gl.constexpr):
    """Compute S^T = K Q^T and wait for it; `here` is 0."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    ROWS: gl.constexpr = C.ROWS
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, accumulator_layout(C.ROWS))
    q = pipe.q_smem.index(here).permute([1, 0])
    if C.IS_FP8:
        k = keys_operand(smem, C.D, C)
        issued = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
        scores, k = warpgroup_mma_wait(0, deps=[issued, k])
    else:
        scores = warpgroup_mma_wait(0, deps=[warpgroup_mma(smem, q, zeros, use_acc=False, is_async=True)])
    return scores


@gluon.jit
def score_latents(slot, here, pipe, C: gl.constexpr):
    """Compute S^T = K Q^T of a tile of latents in 16 bits and wait for it; `here` is 0."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    ROWS: gl.constexpr = C.ROWS
    D: gl.constexpr = C.D
    D_REST: gl.constexpr = C.D_REST
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, accumulator_layout(C.ROWS))
    k = pipe.k_smem.index(slot).reshape([BLOCK_N, D])
    rest = pipe.k_rest.index(slot).reshape([BLOCK_N, D_REST])
    scores = warpgroup_mma(rest, pipe.q_rest.index(here).permute([1, 0]), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma(k, pipe.q_smem.index(here).permute([1, 0]), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def score_pieces(slot, pipe, C: gl.constexpr):
    """Compute S^T = K Q^T of a tile of 8-bit latents and wait for it, KEY_PIECE columns at a time: a converted operand
    of all would not fit the registers. The next piece is converted while the one before is multiplied.
    """
    BLOCK_N: gl.constexpr = C.BLOCK_N
    ROWS: gl.constexpr = C.ROWS
    D: gl.constexpr = C.D
    D_REST: gl.constexpr = C.D_REST
    PIECE: gl.constexpr = KEY_PIECE
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, accumulator_layout(C.ROWS))
    smem = pipe.k_smem.index(slot).reshape([BLOCK_N, D])
    here = rebuilt(0, slot, True)
    k = keys_operand(pipe.k_rest.index(slot).reshape([BLOCK_N, D_REST]), D_REST, C)
    scores = warpgroup_mma(k, pipe.q_rest.index(here).permute([1, 0]), zeros, use_acc=False, is_async=True)
    for c in gl.static_range(C.D // KEY_PIECE):
        following = keys_operand(smem.slice(c * PIECE, PIECE, dim=1), PIECE, C)
        scores, k = warpgroup_mma_wait(0, deps=[scores, k])
        q = pipe.q_smem.index(here).slice(c * PIECE, PIECE, dim=1)
        scores = warpgroup_mma(following, q.permute([1, 0]), scores, is_async=True)
        k = following
    scores, k = warpgroup_mma_wait(0, deps=[scores, k])
    return scores


@gluon.jit
def add_pieces(acc, others, alpha, slot, pipe, C: gl.constexpr):
    """Compute O^T = O^T * alpha + V^T P^T of 8-bit latents and wait for it, VALUE_PIECE columns of V at a time."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    D: gl.constexpr = C.D
    PIECE: gl.constexpr = VALUE_PIECE
    p = pipe.p_smem.permute([1, 0])
    smem = pipe.k_smem.index(slot).reshape([BLOCK_N, D])
    pieces = (acc, others[0], others[1], others[2])
    added = ()
    for c in gl.static_range(C.DV // VALUE_PIECE):
        v = values_operand(smem.slice(c * PIECE, PIECE, dim=1), PIECE, C)
        piece, v = warpgroup_mma_wait(0, deps=[warpgroup_mma(v, p, pieces[c] * alpha[None, :], is_async=True), v])
        added = added + (piece,)  # noqa: RUF005  (Triton knows no unpacking)
    return added[0], (added[1], added[2], added[3])


@gluon.jit
def whole(acc, others, C: gl.constexpr):
    """O^T of all columns of V."""
    if C.D_REST and C.IS_FP8:
        DV: gl.constexpr = C.DV
        ROWS: gl.constexpr = C.ROWS
        pieces = gl.join(gl.join(acc, others[0]), gl.join(others[1], others[2]))
        pieces = gl.reshape(gl.permute(pieces, [3, 2, 0, 1]), [DV, ROWS])
        acc = gl.convert_layout(pieces, accumulator_layout(C.ROWS))
    return acc


@gluon.jit
def add_values(acc, smem, pipe, C: gl.constexpr):
    """Compute O^T += V^T P^T and wait for it."""
    p = pipe.p_smem.permute([1, 0])
    if C.IS_FP8:
        v = values_operand(smem, C.DV, C)
        issued = warpgroup_mma(v, p, acc, is_async=True)
        acc, v = warpgroup_mma_wait(0, deps=[issued, v])
    else:
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(smem.permute([1, 0]), p, acc, is_async=True)])
    return acc


@gluon.jit
def attend(
    at,
    acc,
    others,
    top,
    sums,
    row,
    units,
    scales,
    seqlen_q,
    seqlen_k,
    scale_log2,
    cap_scale,
    sizes,
    pipe,
    C: gl.constexpr,
):
    """One key tile: S^T = K Q^T, softmax over the keys, O^T += V^T P^T. `others`: more pieces of an 8-bit latent's O^T.

    `top` is the running maximum of P's exponents, in log2 units. `sums` [BLOCK_N, ROWS] is summed over keys only at the
    end. Scales of V multiply P, but not the sums.
    """
    BLOCK_N: gl.constexpr = C.BLOCK_N
    D: gl.constexpr = C.D
    DV: gl.constexpr = C.DV
    # Tiles of wide heads stay in their only slots, and have more descriptors than a thread has registers to spare.
    WIDE: gl.constexpr = D > 256
    pipe.k_ring.wait(at)
    if C.D_REST and C.IS_FP8:
        scores = score_pieces(at.slot, pipe, C)
    elif C.D_REST:
        here = rebuilt(0, at.parity, True)
        scores = score_latents(at.slot + here, here, pipe, C)
    else:
        k_smem = pipe.k_smem.index(rebuilt(at.slot, at.parity, WIDE)).reshape([BLOCK_N, D])
        scores = issue_scores(k_smem, rebuilt(0, at.parity, WIDE), pipe, C)
        pipe.k_ring.release(at)
    if C.IS_FP8:
        scores = scores * scales[0][:, None] * units[None, :]
    # Mask after the multiplication, so that the product is rounded before the maximum is subtracted. Fused, scores
    # above 2^30 would leave a difference that makes P wrong.
    scores = mask_keys(capped(scores, cap_scale, C) * scale_log2, row, seqlen_q, seqlen_k, sizes, C)
    weighted = scores
    if C.IS_FP8:
        size = gl.abs(scales[1])
        weighted = scores + log2(gl.where(size < MIN_SCALE, MIN_SCALE, size))[:, None]  # NaN stays NaN
    new_top = gl.maximum(top, gl.max(weighted, axis=0))
    shift = gl.where(new_top == NEG_INF, 0.0, new_top)
    alpha = exp2(top - shift)
    p = exp2(weighted - shift[None, :])
    if C.IS_FP8:
        p = gl.where((scales[1] < 0.0)[:, None], -p, p)
    pipe.p_smem.permute([1, 0]).store(p.to(pipe.p_smem.dtype))
    fence_async_shared()  # orders the stores above before wgmma's reads
    terms = p
    if C.IS_FP8:
        terms = exp2(scores - shift[None, :])
    sums = sums * alpha[None, :] + terms
    if C.D_REST and C.IS_FP8:
        acc, others = add_pieces(acc, others, alpha, at.slot, pipe, C)
        pipe.k_ring.release(at)
    elif C.D_REST:
        v_smem = pipe.k_smem.index(rebuilt(at.slot, at.parity, True)).reshape([BLOCK_N, DV])
        acc = add_values(acc * alpha[None, :], v_smem, pipe, C)
        pipe.k_ring.release(at)
    else:
        pipe.v_ring.wait(at)
        v_smem = pipe.v_smem.index(rebuilt(at.slot, at.parity, WIDE)).reshape([BLOCK_N, DV])
        acc = add_values(acc * alpha[None, :], v_smem, pipe, C)
        pipe.v_ring.release(at)
    return acc, others, new_top, sums


@gluon.jit
def consumer(
    q, out, lse, sinks_ptr, parts_ptr, stats_ptr, counters_ptr, lengths, paging, key_scales, scale_log2, cap_scale,
    sizes, pipe, LANE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Softmax(Q K^T) V over this CTA's share of the keys, item after item."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    BLOCK_N: gl.constexpr = C.BLOCK_N
    ROWS: gl.constexpr = C.ROWS
    COLUMNS: gl.constexpr = VALUE_PIECE if C.D_REST and C.IS_FP8 else C.DV
    at = start(C.NUM_STAGES)
    program = gl.program_id(0) * C.LANES + LANE
    asked = ()
    if asks_first(C):
        asked = ask(lengths, sizes, 4, C)
    total, flat, end, batch_idx, head, tile, extent = locate(lengths, asked, program, sizes, 4, C)
    while flat < end:
        q_start, seqlen_q, _, seqlen_k = extent
        first, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        steps = min(count - tile, end - flat)
        row = (first + tile) * BLOCK_N
        units = load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, C)
        acc = gl.zeros([COLUMNS, ROWS], gl.float32, LAYOUT)
        others = ()
        if C.D_REST and C.IS_FP8:
            others = (acc, acc, acc)
        top = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(0, LAYOUT))
        sums = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
        # Scales are loaded one tile ahead, and their pages two.
        scales = scales_of(key_scales, pages_of(paging, batch_idx, row, seqlen_k, C), head, row, seqlen_k, C)
        pages = pages_of(paging, batch_idx, row + BLOCK_N, seqlen_k, C)
        for _i in range(steps):
            next_scales = scales_of(key_scales, pages, head, row + BLOCK_N, seqlen_k, C)
            pages = pages_of(paging, batch_idx, row + 2 * BLOCK_N, seqlen_k, C)
            acc, others, top, sums = attend(
                at, acc, others, top, sums, row, units, scales, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes,
                pipe, C)  # fmt: skip
            at = at.next()
            row += BLOCK_N
            scales = next_scales
        acc = whole(acc, others, C)
        row_sum = gl.sum(sums, axis=0)
        if C.D_REST:
            if flat + steps >= end:
                let_next_start()
            if tile == 0:
                say_parts(counters_ptr, batch_idx * sizes.num_kv_heads + head, total, flat, count, C)
        if steps == count:
            store_item(acc, top, row_sum, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q, head, C)
        elif C.D_REST:
            part = 2 * program + gl.where(tile == 0, 1, 0)
            store_part(acc, top, row_sum, parts_ptr, stats_ptr, part, C)
        else:
            part = 2 * program + gl.where(tile == 0, 1, 0)
            store_part(acc, top, row_sum, parts_ptr, stats_ptr, part, C)
            from_program = program_of(total, flat - tile, C)
            num_parts = program_of(total, flat - tile + count - 1, C) - from_program + 1
            counter = counters_ptr + batch_idx * sizes.num_kv_heads + head
            barrier()  # every thread has written its part before one of them counts it
            if gl.atomic_add(counter, 1) == num_parts - 1:
                gl.store(counter, 0)
                merge_parts(
                    parts_ptr, stats_ptr, from_program, num_parts, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q,
                    head, C)  # fmt: skip
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        extent = extent_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0


# ---- kernel


@gluon.jit
def make_pipeline(k_desc, k_rest, v_desc, C: gl.constexpr):
    """Allocate everything the roles share."""
    ROWS: gl.constexpr = C.ROWS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    D: gl.constexpr = C.D
    PACKED: gl.constexpr = C.IS_VARLEN or C.IS_PAGED
    KEYS: gl.constexpr = k_desc.dtype
    DTYPE: gl.constexpr = gl.float16 if C.IS_FP8 else k_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, ROWS, D], Q_LAYOUT)
    p_smem = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_LAYOUT)
    k_smem = gl.allocate_shared_memory(KEYS, slots_shape(C.NUM_STAGES, C.BLOCK_N, C.D, PACKED), k_desc.layout)
    k_ring = make_ring(C.NUM_STAGES, 1)
    if C.D_REST:
        D_REST: gl.constexpr = C.D_REST
        REST_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_REST], DTYPE)
        q_rest_smem = gl.allocate_shared_memory(DTYPE, [1, ROWS, D_REST], REST_LAYOUT)
        shape: gl.constexpr = slots_shape(C.NUM_STAGES, C.BLOCK_N, C.D_REST, PACKED)
        k_rest_smem = gl.allocate_shared_memory(KEYS, shape, k_rest.layout)
        v_smem = k_smem
        v_ring = k_ring
    else:
        q_rest_smem = q_smem
        k_rest_smem = k_smem
        v_smem = gl.allocate_shared_memory(KEYS, slots_shape(C.NUM_STAGES, C.BLOCK_N, C.DV, PACKED), v_desc.layout)
        v_ring = make_ring(C.NUM_STAGES, 1)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, q_rest_smem, p_smem, k_smem, k_rest_smem, v_smem, k_ring, v_ring)


@gluon.jit(
    do_not_specialize=["q", "out", "lse", "paging", "scales", "scale_log2", "cap_scale", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "lengths", "counters_ptr"],
)  # fmt: skip
def decode_kernel(
    q, k_desc, k_rest, v_desc, out, lse, sinks_ptr, parts_ptr, stats_ptr, counters_ptr, lengths, paging,
    scales, scale_log2, cap_scale, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """Out and lse. What a problem does not have is None."""
    pipe = make_pipeline(k_desc, k_rest, v_desc, C)
    if C.D_REST:
        await_kernel_before()
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    if C.LANES == 1:
        gl.warp_specialize([
            (consumer, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, counters_ptr, lengths, paging, scales,
                        scale_log2, cap_scale, sizes, pipe, 0, C)),
            (producer, (k_desc, k_rest, v_desc, out, lse, lengths, paging, sizes, pipe, 0, C)),
        ], [1], [C.PRODUCER_REGS])  # fmt: skip
    else:
        other = make_pipeline(k_desc, k_rest, v_desc, C)
        gl.warp_specialize([
            (consumer, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, counters_ptr, lengths, paging, scales,
                        scale_log2, cap_scale, sizes, pipe, 0, C)),
            (consumer, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, counters_ptr, lengths, paging, scales,
                        scale_log2, cap_scale, sizes, other, 1, C)),
            (producer, (k_desc, k_rest, v_desc, out, lse, lengths, paging, sizes, pipe, 0, C)),
            (producer, (k_desc, k_rest, v_desc, out, lse, lengths, paging, sizes, other, 1, C)),
        ], [4, 1, 1], [C.CONSUMER_REGS, C.PRODUCER_REGS, C.PRODUCER_REGS])  # fmt: skip


@gluon.constexpr_function
def _powers(first, stop):
    """first, 2 * first ... below stop."""
    found = []
    while first < stop:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def _key_layout(rows, columns):
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    registers += [[0, c] for c in _powers(64, columns)] + [[r, 0] for r in _powers(64, rows)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.constexpr_function
def _value_layout(rows, columns):
    side = columns // 32  # adjacent bytes of a row that a thread reads: 2 for every 64 columns
    registers = [[0, c] for c in _powers(1, side)] + [[1, 0], [8, 0]] + [[r, 0] for r in _powers(16, rows)]
    lanes = [[2, 0], [4, 0], [0, side], [0, 2 * side], [0, 4 * side]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * side], [0, 16 * side]], [], [rows, columns])


@gluon.jit
def keys_operand(smem, D: gl.constexpr, C: gl.constexpr):
    """D columns of K (keys x columns) in fp16, in the order of `query_column`."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    k = widened(smem.load(_key_layout(BLOCK_N, D)))
    k = gl.permute(gl.reshape(k, [BLOCK_N, D // 64, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return gl.convert_layout(gl.reshape(k, [BLOCK_N, D]), left_operand_layout(accumulator_layout(C.ROWS)))


@gluon.jit
def query_column(position, C: gl.constexpr):
    """Which column of Q belongs at a position, so that it meets the same column of K."""
    if C.IS_FP8:
        within = (position & 1) + (position >> 3 & 1) * 2 + (position >> 4 & 3) * 4 + (position >> 1 & 3) * 16
        return within + (position >> 6) * 64
    else:
        return position


@gluon.jit
def values_operand(smem, DV: gl.constexpr, C: gl.constexpr):
    """V^T (DV columns x keys) in fp16, its rows in the order of `value_column`."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    v = widened(smem.load(_value_layout(BLOCK_N, DV)))
    v = gl.reshape(gl.permute(v, [1, 0]), [4, 8, DV // 64, 2, BLOCK_N])
    v = gl.reshape(gl.permute(v, [2, 0, 3, 1, 4]), [DV, BLOCK_N])
    return gl.convert_layout(v, left_operand_layout(accumulator_layout(C.ROWS)))


@gluon.jit
def value_column(row, C: gl.constexpr):
    """Which column of V a row of O^T belongs to; rows of a latent come in pieces."""
    if C.IS_FP8:
        SIDE: gl.constexpr = (VALUE_PIECE if C.D_REST else C.DV) // 32
        first = 0
        if C.D_REST:
            first = row // VALUE_PIECE * VALUE_PIECE
            row -= first
        return first + (row >> 3 & 1) + (row >> 6) * 2 + (row & 7) * SIDE + (row >> 4 & 3) * (8 * SIDE)
    else:
        return row


@gluon.jit
def power_of_two(x):
    """The power of two at or below x >= 0; 1 for 0."""
    whole = gl.cast(gl.cast(x, gl.int32, bitcast=True) & 0x7F800000, gl.float32, bitcast=True)
    return gl.where(whole == 0.0, 1.0, whole)


@gluon.jit
def place_rows(rows, batch_idx, q_start, token, head, C: gl.constexpr):
    """Offsets of the rows of (token, head) in a tensor."""
    at = head.to(gl.int64) * rows.stride_head + token * rows.stride_row
    if C.PACKED_ROWS:
        return at + q_start.to(gl.int64) * rows.stride_row
    else:
        return at + batch_idx.to(gl.int64) * rows.stride_batch


@gluon.jit
def finish(top, total, heads, sinks_ptr, C: gl.constexpr):
    """(factor that normalises O, lse) of rows from their maximum (log2 units) and sum; rows without keys: 0, -inf."""
    weight = 1.0
    if C.HAS_SINKS:
        sink = gl.load(sinks_ptr + heads).to(gl.float32) * LOG2E
        new_top = gl.maximum(top, sink)
        shift = gl.where(new_top == NEG_INF, 0.0, new_top)
        weight = exp2(top - shift)
        total = total * weight + sink_weight(sink, shift)
        top = new_top
    empty = total == 0.0
    factor = gl.where(empty, 0.0, weight / gl.where(empty, 1.0, total))
    lse = gl.where(empty, NEG_INF, (top + gl.log2(gl.where(empty, 1.0, total))) * LN2)
    return factor, lse


@gluon.jit
def store_item(acc, top, total, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q, head, C: gl.constexpr):
    """Write the rows of an item that is finished in this share."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT))
    cols = value_column(gl.arange(0, C.DV, gl.SliceLayout(1, LAYOUT)), C)
    token = rows // C.GROUP_SIZE
    heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
    ok = token < seqlen_q
    factor, lse_rows = finish(top, total, heads, sinks_ptr, C)
    offsets = place_rows(out, batch_idx, q_start, token, heads, C)
    values = (acc * factor[None, :]).to(out.ptr.dtype.element_ty)
    gl.store(out.ptr + offsets[None, :] + cols[:, None], values, mask=ok[None, :] & (cols < C.HEAD_DIM_V)[:, None])
    gl.store(lse.ptr + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)


@gluon.jit
def say_parts(items_ptr, item, all_tiles, begin, count, C: gl.constexpr):
    """Store the first share that has a part of an item of `count` tiles from `begin` on, and their number."""
    from_program = program_of(all_tiles, begin, C)
    gl.store(items_ptr + 2 * item, from_program)
    gl.store(items_ptr + 2 * item + 1, program_of(all_tiles, begin + count - 1, C) - from_program + 1)


@gluon.jit
def place_in_part(rows, cols, C: gl.constexpr):
    """Where a part that a second kernel merges has a number of O: in blocks of 8 x 8, as wgmma's accumulators are."""
    return rows // 8 * (8 * C.DV) + cols // 8 * 64 + rows % 8 * 8 + cols % 8


@gluon.jit
def store_part(acc, top, total, parts_ptr, stats_ptr, part, C: gl.constexpr):
    """Store this share's part of an item in the workspace: O row by row, and [maxima | sums]."""
    LAYOUT: gl.constexpr = accumulator_layout(C.ROWS)
    rows = gl.arange(0, C.ROWS, gl.SliceLayout(0, LAYOUT))
    cols = value_column(gl.arange(0, C.DV, gl.SliceLayout(1, LAYOUT)), C)
    if C.D_REST:
        at = parts_ptr + part.to(gl.int64) * (C.ROWS * C.DV) + place_in_part(rows[None, :], cols[:, None], C)
    else:
        at = parts_ptr + part * (C.ROWS * C.DV) + (rows * C.DV)[None, :] + cols[:, None]
    gl.store(at, acc)
    gl.store(stats_ptr + part * (2 * C.ROWS) + rows, top)
    gl.store(stats_ptr + part * (2 * C.ROWS) + C.ROWS + rows, total)


@gluon.jit
def merge_parts(
    parts_ptr, stats_ptr, first, count, out, lse, sinks_ptr, batch_idx, q_start, seqlen_q, head, C: gl.constexpr
):
    """Merge an item's parts and write its rows. The parts come from `count` programs from `first` on: the second part
    of that program (its share ends inside this item), then the first part of each other one.
    """
    ROWS: gl.constexpr = C.MERGED_ROWS
    DV: gl.constexpr = C.DV
    PARTS: gl.constexpr = C.MERGED_PARTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([PARTS, 1, C.DV // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    rows = gl.arange(0, ROWS, ROW)
    cols = gl.arange(0, DV, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    ok = rows // C.GROUP_SIZE < seqlen_q
    acc = gl.zeros([ROWS, DV], gl.float32, FLAT)
    top = gl.full([ROWS], NEG_INF, gl.float32, ROW)
    total = gl.zeros([ROWS], gl.float32, ROW)
    for begin in range(0, count, PARTS):
        number = begin + gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        part = 2 * (first + number) + gl.where(number == 0, 1, 0)
        there = (number < count)[:, None] & ok[None, :]
        stats = stats_ptr + (part * (2 * C.ROWS))[:, None] + rows[None, :]
        tops = gl.load(stats, mask=there, other=NEG_INF, cache_modifier=".cg")
        totals = gl.load(stats + C.ROWS, mask=there, other=0.0, cache_modifier=".cg")
        places = (part * (C.ROWS * DV))[:, None] + (rows * DV)[None, :]
        values = gl.load(
            parts_ptr + places[:, :, None] + cols[None, None, :], mask=there[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = gl.maximum(top, gl.max(tops, axis=0))
        shift = gl.where(new_top == NEG_INF, 0.0, new_top)
        weights = exp2(tops - shift[None, :])
        alpha = exp2(top - shift)
        total = total * alpha + gl.sum(totals * weights, axis=0)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, FLAT))[:, None]
        acc = acc + gl.sum(values * weights[:, :, None], axis=0)
        top = new_top
    # The same rows and columns, in the layout of `acc`.
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    cols = gl.arange(0, DV, gl.SliceLayout(0, FLAT))
    top = gl.convert_layout(top, gl.SliceLayout(1, FLAT))
    total = gl.convert_layout(total, gl.SliceLayout(1, FLAT))
    token = rows // C.GROUP_SIZE
    ok = token < seqlen_q
    heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
    factor, lse_rows = finish(top, total, heads, sinks_ptr, C)
    offsets = place_rows(out, batch_idx, q_start, token, heads, C)
    values = (acc * factor[:, None]).to(out.ptr.dtype.element_ty)
    gl.store(out.ptr + offsets[:, None] + cols[None, :], values, mask=ok[:, None] & (cols < C.HEAD_DIM_V)[None, :])
    gl.store(lse.ptr + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)
