"""Decoding from latents for sm_90: many query heads on keys of 576 columns, of which the first 512 are the values.

Grid: (shares of the key tiles, tiles of 64 query rows). A row is a (token, head of the K/V head's group) pair. A share
is one contiguous part of the key tiles of all (sequence, K/V head) items, see decode_schedule.py. The CTAs of all row
tiles read it at the same time, so it comes from memory once. Roles, one function each:
  producer   one warp: feeds two slots for latent tiles (64 keys) by TMA, in boxes of 64 columns
  left       one warpgroup: S = Q K^T and the softmax; hands P and the rescaling factors to the other warpgroup through
             shared memory; O[:, :256] += P V[:, :256]
  right      one warpgroup: O[:, 256:] += P V[:, 256:]
A tile is loaded once for K, V and all 64 rows. O takes 128 registers of a thread in each warpgroup. Shared memory holds
Q (72 KiB), two tiles (144 KiB) and P (8 KiB), and has no room for a third tile. So that loading begins early, a tile
comes in two parts, each of which is loaded again as soon as its warpgroup is done with it: the columns of V that `left`
adds, with those behind V, and the columns that `right` adds. `left` issues S of the next tile right behind its product
with V, and begins with the part that comes first.

An item whose tiles all lie in one share is finished there. For other items every share writes a part (unnormalised O,
maxima, sums) into the workspace, and `merge_latent_kernel` merges them in key order. So results repeat.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="assignment, misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.releases import aggregate, async_load
from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.decode import finish, first_pages, guess_pages, look_up, place_rows
from tilewise.backends.hopper.decode_schedule import advance, ask, key_tiles_of, locate, program_of, spans_of
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.primitives import NEG_INF, exp2, rebuilt
from tilewise.backends.hopper.scores import capped, no_rows, quads, rescale, soften

# Query rows of a CTA, columns of V in each warpgroup, and columns of a TMA box, which also hold those behind V.
ROWS, HALF, PANEL = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64)
# Columns of Q that are stored at a time.
Q_COLUMNS = gl.constexpr(128)


@aggregate
class Pipeline:
    """The shared memory of a CTA. `rest` are the columns behind V. P and two numbers for each of the four threads of a
    row go from left to right.
    """

    q_smem: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    k_rest: gl.shared_memory_descriptor
    p_smem: gl.shared_memory_descriptor
    rows_smem: gl.shared_memory_descriptor
    left_ring: Ring
    right_ring: Ring
    p_ring: Ring

    @gluon.constexpr_function
    def __init__(self, q_smem, q_rest, k_smem, k_rest, p_smem, rows_smem, left_ring, right_ring, p_ring):
        self.q_smem = q_smem
        self.q_rest = q_rest
        self.k_smem = k_smem
        self.k_rest = k_rest
        self.p_smem = p_smem
        self.rows_smem = rows_smem
        self.left_ring = left_ring
        self.right_ring = right_ring
        self.p_ring = p_ring


# ---- producer


@gluon.jit
def fetch(desc, at, span, head, row, pages, page_rows, pipe, C: gl.constexpr):
    """Start the copies of a latent tile into its slot. Rows past the sequence's end arrive as zeros (see tile_at)."""
    CHUNK: gl.constexpr = C.CHUNK
    PACKED: gl.constexpr = C.IS_VARLEN or C.IS_PAGED
    DIM: gl.constexpr = 3 if PACKED else 2
    PANELS: gl.constexpr = HALF // PANEL
    for side in gl.static_range(2):
        if side == 0:
            ready = pipe.left_ring.acquire(at, C.BLOCK_N * (HALF + PANEL) * 2)
        else:
            ready = pipe.right_ring.acquire(at, C.BLOCK_N * HALF * 2)
        for c in gl.static_range(C.BLOCK_N // C.CHUNK):
            first = row + c * CHUNK
            keys = span
            if C.IS_PAGED:
                page_row = first % C.PAGE_SIZE
                inside = max(min(span[2] - (first - page_row), C.PAGE_SIZE), 0)
                keys = (0, pages[c] * page_rows, inside)
                first = page_row
            rows = pipe.k_smem.index(at.slot).slice(c * CHUNK, CHUNK, dim=DIM)
            for panel in gl.static_range(side * PANELS, (side + 1) * PANELS):
                box = rows.slice(panel * PANEL, PANEL, dim=DIM + 1)
                async_load(desc, tile_at(keys, head, first, panel * PANEL, PACKED), ready, box)
            if side == 0:
                box = pipe.k_rest.index(at.slot).slice(c * CHUNK, CHUNK, dim=DIM)
                async_load(desc, tile_at(keys, head, first, C.DV, PACKED), ready, box)


@gluon.jit
def producer(k_desc, lengths, paging, sizes, pipe, C: gl.constexpr):
    """Feed the slots with the tiles of this CTA's share."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    at = start(C.NUM_STAGES)
    program = gl.program_id(0)
    asked = ()
    if not C.IS_UNIFORM:
        asked = ask(lengths, sizes, 1, C)
    guessed = ()
    if C.IS_PAGED:
        guessed = guess_pages(paging, program, sizes, C)
    _, flat, end, batch_idx, head, tile, span = locate(lengths, asked, program, sizes, 1, C)
    while flat < end:
        _, seqlen_q, k_start, seqlen_k = span
        first, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        keys = (batch_idx, k_start, seqlen_k)
        steps = min(count - tile, end - flat)
        row = (first + tile) * BLOCK_N
        pages = first_pages(paging, guessed, batch_idx, row, seqlen_k, C)
        for _i in range(steps):
            fetch(k_desc, at, keys, head, row, pages, paging[2], pipe, C)
            pages = look_up(paging, batch_idx, row + BLOCK_N, seqlen_k, C)
            at = at.next()
            row += BLOCK_N
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        span = spans_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0


# ---- left


@gluon.jit
def load_query_columns(q, offsets, ok, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Columns `first` .. of the query rows at `offsets`; 0 for missing rows and columns."""
    cols = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inside = ok[:, None] & (cols < C.HEAD_DIM)[None, :]
    return gl.load(q[0] + offsets[:, None] + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, C: gl.constexpr):
    """Store this CTA's query rows of an item in shared memory, a few columns at a time to save registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = row // C.GROUP_SIZE
    offsets = place_rows(q, batch_idx, q_start, token, head * C.GROUP_SIZE + row % C.GROUP_SIZE, C)
    ok = token < seqlen_q
    for part in gl.static_range(C.DV // Q_COLUMNS):
        values = load_query_columns(q, offsets, ok, part * Q_COLUMNS, Q_COLUMNS, LAYOUT, C)
        pipe.q_smem.index(0).slice(part * Q_COLUMNS, Q_COLUMNS, dim=1).store(values)
    pipe.q_rest.index(0).store(load_query_columns(q, offsets, ok, C.DV, PANEL, LAYOUT, C))
    fence_async_shared()  # orders the stores above before wgmma's reads


@gluon.jit
def issue_scores(at, pipe, C: gl.constexpr):
    """Issue S = Q K^T, as three products: the first columns of V, those behind V, and the others when they are there.
    `rebuilt`: Q has 36 descriptors.
    """
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    here = rebuilt(0, at.slot, True)
    q = pipe.q_smem.index(here)
    k = pipe.k_smem.index(at.slot).reshape([BLOCK_N, DV])
    rest = pipe.k_rest.index(at.slot).reshape([BLOCK_N, PANEL]).permute([1, 0])
    pipe.left_ring.wait(at)
    first = k.slice(0, HALF, dim=1).permute([1, 0])
    scores = warpgroup_mma(q.slice(0, HALF, dim=1), first, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma(pipe.q_rest.index(here), rest, scores, is_async=True)
    pipe.right_ring.wait(at)
    others = k.slice(HALF, HALF, dim=1).permute([1, 0])
    return warpgroup_mma(q.slice(HALF, HALF, dim=1), others, scores, is_async=True)


@gluon.jit
def mask_keys(scores, row, seqlen_q, seqlen_k, sizes, C: gl.constexpr):
    """-inf for keys past the end or outside a query's window."""
    LAYOUT: gl.constexpr = accumulator_layout(C.BLOCK_N)
    keys = row + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    seen = (keys < seqlen_k)[None, :]
    if C.HAS_RIGHT or C.HAS_LEFT:
        rows = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        token = rows // C.GROUP_SIZE + (seqlen_k - seqlen_q)
        if C.HAS_RIGHT:
            seen = seen & (keys[None, :] <= (token + sizes.window_right)[:, None])
        if C.HAS_LEFT:
            seen = seen & (keys[None, :] >= (token - sizes.window_left)[:, None])
    return gl.where(seen, scores, NEG_INF)


@gluon.jit
def soften_tile(scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C: gl.constexpr):
    """(P, rescaling factor, reference in log2 units, sum) after a tile of scores, see scores.py."""
    # Multiplied before the reference is subtracted: fused, scores above 2^30 would make P wrong.
    scores = capped(scores, cap_scale, C) * scale_log2
    complete = seqlen_k
    if C.HAS_RIGHT:  # the first query sees the fewest keys on the right, the last one on the left
        complete = min(complete, seqlen_k - seqlen_q + 1 + sizes.window_right)
    crossed = row + C.BLOCK_N > complete
    if C.HAS_LEFT:
        crossed = crossed | (row < seqlen_k - 1 - sizes.window_left)
    if crossed:
        scores = mask_keys(scores, row, seqlen_q, seqlen_k, sizes, C)
        p, factor, ref, total, _ = soften(scores, ref, total, 1.0, True, C)
    else:
        p, factor, ref, total, _ = soften(scores, ref, total, 1.0, False, C)
    return p, factor, ref, total


@gluon.jit
def add_values(p, factor, at, turn, acc, pipe, C: gl.constexpr):
    """Hand P and the factors over to the other warpgroup, and issue O = O * factor + P V for the first columns of V."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    narrow = p.to(pipe.p_smem.dtype)
    pipe.p_ring.await_free(turn)
    pipe.p_smem.store(narrow)
    pipe.rows_smem.index(0).store(factor)
    fence_async_shared()  # orders the stores above before the other warpgroup's wgmma reads them
    pipe.p_ring.signal(turn)
    operand = gl.convert_layout(narrow, left_operand_layout(accumulator_layout(HALF)))
    v = pipe.k_smem.index(at.slot).reshape([BLOCK_N, DV]).slice(0, HALF, dim=1)
    return warpgroup_mma(operand, v, rescale(acc, factor, HALF, C), is_async=True), operand


@gluon.jit
def left(
    q, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, scale_log2, cap_scale, sizes, pipe,
    C: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and the first columns of the result over this CTA's share, item after item."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_N))
    BLOCK_N: gl.constexpr = C.BLOCK_N
    at = start(C.NUM_STAGES)
    turn = start(1)
    program = gl.program_id(0)
    asked = ()
    if not C.IS_UNIFORM:
        asked = ask(lengths, sizes, 4, C)
    all_tiles, flat, end, batch_idx, head, tile, span = locate(lengths, asked, program, sizes, 4, C)
    while flat < end:
        q_start, seqlen_q, _, seqlen_k = span
        first, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        steps = min(count - tile, end - flat)
        row = (first + tile) * BLOCK_N
        load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, C)
        acc = gl.zeros([ROWS, HALF], gl.float32, accumulator_layout(HALF))
        ref, total = no_rows(C)
        scores = warpgroup_mma_wait(0, deps=[issue_scores(at, pipe, C)])
        for _i in range(steps - 1):
            p, factor, ref, total = soften_tile(
                scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C
            )
            issued, operand = add_values(p, factor, at, turn, acc, pipe, C)
            following = at.next()
            issued_scores = issue_scores(following, pipe, C)
            # Three products of the scores may be in flight: V is read.
            acc, operand = warpgroup_mma_wait(3, deps=[issued, operand])
            pipe.left_ring.release(at)
            scores = warpgroup_mma_wait(0, deps=[issued_scores])
            at = following
            turn = turn.next()
            row += BLOCK_N
        p, factor, ref, total = soften_tile(
            scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C
        )
        issued, operand = add_values(p, factor, at, turn, acc, pipe, C)
        acc, operand = warpgroup_mma_wait(0, deps=[issued, operand])
        pipe.left_ring.release(at)
        at = at.next()
        turn = turn.next()
        pipe.p_ring.await_free(turn)
        pipe.rows_smem.index(0).store(ref)
        pipe.rows_smem.index(1).store(total)
        pipe.p_ring.signal(turn)
        turn = turn.next()
        top = gl.convert_layout(gl.max(ref, axis=1), LAYOUT)
        row_sum = gl.convert_layout(gl.sum(total, axis=1), LAYOUT)
        part = part_of(program, tile)
        num_parts = 1
        from_program = program
        if steps < count:
            from_program = program_of(all_tiles, flat - tile, C)
            num_parts = program_of(all_tiles, flat - tile + count - 1, C) - from_program + 1
            rows = gl.arange(0, ROWS, LAYOUT)
            gl.store(stats_ptr + part * (2 * ROWS) + rows, top)
            gl.store(stats_ptr + part * (2 * ROWS) + ROWS + rows, row_sum)
        if (tile == 0) & (gl.program_id(1) == 0):  # one CTA begins an item, and says so for all
            item = items_ptr + 2 * (batch_idx * sizes.num_kv_heads + head)
            gl.store(item, from_program)
            gl.store(item + 1, num_parts)
        store_half(
            acc, top, row_sum, steps == count, out, lse, sinks_ptr, parts_ptr, part, batch_idx, q_start, seqlen_q,
            head, 0, C)  # fmt: skip
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        span = spans_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0


# ---- right


@gluon.jit
def right(out, lse, sinks_ptr, parts_ptr, lengths, sizes, pipe, C: gl.constexpr):
    """The other columns of the result. P comes after the scores, so these no longer need a tile released here."""
    LAYOUT: gl.constexpr = accumulator_layout(HALF)
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    at = start(C.NUM_STAGES)
    turn = start(1)
    program = gl.program_id(0)
    asked = ()
    if not C.IS_UNIFORM:
        asked = ask(lengths, sizes, 4, C)
    _, flat, end, batch_idx, head, tile, span = locate(lengths, asked, program, sizes, 4, C)
    while flat < end:
        q_start, seqlen_q, _, seqlen_k = span
        _, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        steps = min(count - tile, end - flat)
        acc = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
        THREADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads(acc, HALF).type.layout))
        for _i in range(steps):
            pipe.p_ring.wait(turn)
            acc = rescale(acc, pipe.rows_smem.index(0).load(THREADS), HALF, C)
            pipe.right_ring.wait(at)
            v = pipe.k_smem.index(at.slot).reshape([BLOCK_N, DV]).slice(HALF, HALF, dim=1)
            acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(pipe.p_smem, v, acc, is_async=True)])
            pipe.right_ring.release(at)
            pipe.p_ring.release(turn)
            at = at.next()
            turn = turn.next()
        pipe.p_ring.wait(turn)
        top = gl.max(pipe.rows_smem.index(0).load(THREADS), axis=1)
        total = gl.sum(pipe.rows_smem.index(1).load(THREADS), axis=1)
        pipe.p_ring.release(turn)
        turn = turn.next()
        store_half(
            acc, top, total, steps == count, out, lse, sinks_ptr, parts_ptr, part_of(program, tile), batch_idx,
            q_start, seqlen_q, head, 1, C)  # fmt: skip
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        span = spans_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0


# ---- results


@gluon.jit
def part_of(program, tile):
    """The number of this CTA's part of an item: a share ends inside one item (part 1) and begins inside another (0)."""
    return gl.program_id(1) * (2 * gl.num_programs(0)) + 2 * program + gl.where(tile == 0, 1, 0)


@gluon.jit
def store_half(
    acc, top, total, finished, out, lse, sinks_ptr, parts_ptr, part, batch_idx, q_start, seqlen_q, head,
    SIDE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Write one warpgroup's columns: results of an item that is `finished` in this share, else its part."""
    LAYOUT: gl.constexpr = accumulator_layout(HALF)
    place = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    cols = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    if finished:
        rows = gl.program_id(1) * ROWS + place
        token = rows // C.GROUP_SIZE
        heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
        ok = token < seqlen_q
        tops = gl.convert_layout(top, gl.SliceLayout(1, LAYOUT))
        totals = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
        factor, lse_rows = finish(tops, totals, heads, sinks_ptr, C)
        offsets = place_rows(out, batch_idx, q_start, token, heads, C)
        values = (acc * factor[:, None]).to(out[0].dtype.element_ty)
        gl.store(out[0] + offsets[:, None] + cols[None, :], values, mask=ok[:, None])
        if SIDE == 0:
            gl.store(lse[0] + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)
    else:
        gl.store(parts_ptr + part.to(gl.int64) * (ROWS * C.DV) + (place * C.DV)[:, None] + cols[None, :], acc)


@gluon.jit(
    do_not_specialize=["out", "lse", "num_shares", "num_rows", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_seqlens_q", "items_ptr"],
)
def merge_latent_kernel(
    out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, cu_seqlens_q, num_shares, num_rows, sizes, C: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Merge the parts of one row of an item, COLUMNS columns at a time. Grid: item * num_rows (the most rows that an
    item has), columns // COLUMNS.

    The parts come from consecutive shares: the second part of the first one, which ends inside the item, then the first
    part of each other one.
    """
    PARTS: gl.constexpr = C.MERGED_NUMBERS // COLUMNS
    DV: gl.constexpr = C.DV
    WARPS: gl.constexpr = COLUMNS // 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4 // WARPS, WARPS], [1, 0])
    item = gl.program_id(0) // num_rows
    row = gl.program_id(0) % num_rows
    batch_idx = item // sizes.num_kv_heads
    head = (item % sizes.num_kv_heads) * C.GROUP_SIZE + row % C.GROUP_SIZE
    token = row // C.GROUP_SIZE
    q_start = batch_idx * sizes.seqlen_q
    seqlen_q = sizes.seqlen_q
    if C.PACKED_Q:
        q_start = gl.load(cu_seqlens_q + batch_idx)
        seqlen_q = gl.load(cu_seqlens_q + batch_idx + 1) - q_start
    if token < seqlen_q:  # of an item without rows there is nothing to read
        first = gl.load(items_ptr + 2 * item)
        count = gl.load(items_ptr + 2 * item + 1)
        if count > 1:
            cols = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            acc = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, LAYOUT))
            top = gl.to_tensor(float("-inf"))
            total = gl.to_tensor(0.0)
            for begin in range(0, count, PARTS):
                number = begin + gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))
                part = (row // ROWS) * (2 * num_shares) + 2 * (first + number) + gl.where(number == 0, 1, 0)
                there = number < count
                stats = stats_ptr + part * (2 * ROWS) + row % ROWS
                tops = gl.load(stats, mask=there, other=NEG_INF)
                totals = gl.load(stats + ROWS, mask=there, other=0.0)
                places = part.to(gl.int64) * (ROWS * DV) + (row % ROWS) * DV
                values = gl.load(parts_ptr + places[:, None] + cols[None, :], mask=there[:, None], other=0.0)
                new_top = gl.maximum(top, gl.max(tops, axis=0))
                shift = gl.where(new_top == NEG_INF, 0.0, new_top)
                weights = exp2(tops - shift)
                alpha = exp2(top - shift)
                total = total * alpha + gl.sum(totals * weights, axis=0)
                acc = acc * alpha + gl.sum(values * weights[:, None], axis=0)
                top = new_top
            factor, lse_row = finish(top, total, head, sinks_ptr, C)
            at = place_rows(out, batch_idx, q_start, token, head, C)
            gl.store(out[0] + at + cols, (acc * factor).to(out[0].dtype.element_ty))
            if gl.program_id(1) == 0:
                gl.store(lse[0] + place_rows(lse, batch_idx, q_start, token, head, C), lse_row)


# ---- kernel


@gluon.jit
def make_pipeline(k_desc, C: gl.constexpr):
    """Allocate everything the roles share."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    PACKED: gl.constexpr = C.IS_VARLEN or C.IS_PAGED
    DTYPE: gl.constexpr = k_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DV], DTYPE)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [1, ROWS, DV], Q_LAYOUT)
    q_rest = gl.allocate_shared_memory(DTYPE, [1, ROWS, PANEL], P_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, slots_shape(C.NUM_STAGES, C.BLOCK_N, C.DV, PACKED), k_desc.layout)
    k_rest = gl.allocate_shared_memory(DTYPE, slots_shape(C.NUM_STAGES, C.BLOCK_N, PANEL, PACKED), k_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_LAYOUT)
    rows_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    left_ring = make_ring(C.NUM_STAGES, 1)
    right_ring = make_ring(C.NUM_STAGES, 1)
    p_ring = make_ring(1, 1)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, q_rest, k_smem, k_rest, p_smem, rows_smem, left_ring, right_ring, p_ring)


@gluon.jit(
    do_not_specialize=["q", "out", "lse", "table_stride", "k_page_rows", "scale_log2", "cap_scale", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "cu_seqlens_q", "cu_seqlens_k", "items_ptr", "block_table"],
)
def latent_kernel(
    q, k_desc, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, cu_seqlens_q, cu_seqlens_k, block_table,
    table_stride, k_page_rows, scale_log2, cap_scale, sizes, C: gl.constexpr,
):  # fmt: skip
    """Out and lse of items that are finished in a share, parts of the others. Arguments are those of decode_kernel; of
    every item, items_ptr gets the first share that has a part of it and their number.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k)
    paging = (block_table, table_stride, k_page_rows)
    pipe = make_pipeline(k_desc, C)
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    gl.warp_specialize([
        (left, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, scale_log2, cap_scale, sizes, pipe,
                C)),
        (right, (out, lse, sinks_ptr, parts_ptr, lengths, sizes, pipe, C)),
        (producer, (k_desc, lengths, paging, sizes, pipe, C)),
    ], [4, 1], [C.CONSUMER_REGS, C.PRODUCER_REGS])  # fmt: skip
