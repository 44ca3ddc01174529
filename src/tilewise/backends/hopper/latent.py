"""Decoding from latents for sm_90: many query heads on keys of 576 columns, of which the first 512 are the values.

Grid: (shares of the key tiles, tiles of 64 query rows). A row is a (token, head of the K/V head's group) pair. A share
is one contiguous part of the key tiles of all (sequence, K/V head) items, see decode_schedule.py. The CTAs of all row
tiles read it at the same time, so it comes from memory once. Roles, one function each:
  producer   one warp: feeds two slots for latent tiles (64 keys) by TMA
  consumer   two warpgroups, left and right: left computes S = Q K^T and the softmax of an item's even tiles, right of
             its odd ones. Both add all tiles to O, in order: left to O[:, :256], right to O[:, 256:].
A tile is loaded once for K, V and all 64 rows. O takes 128 registers of a thread in each warpgroup. Shared memory holds
Q (72 KiB), two tiles (144 KiB) and P (8 KiB), and has no room for a third tile.

    left     S_0 | softmax_0 | O += P_0 V_0 | O += P_1 V_1 |    S_2    | softmax_2 | O += P_2 V_2 | ...
    right    S_1 ...         | O += P_0 V_0 | O += P_1 V_1 |    S_3 ...            | O += P_2 V_2 | ...
                             | softmax_1    |                                      | softmax_3    |

Whoever computed P keeps it in registers for its own columns and hands it to the other one through shared memory, with
the rows' references: each softmax continues from the reference of the tile before. There is one buffer for P.
A warpgroup stores its own P there when it has multiplied with the other's, which nobody else reads.

A slot has two halves: the columns that left adds, with those behind V, and the columns that right adds. Each half is
loaded again as soon as its warpgroup is done with it, and scores begin with the half that is there first.

Up to FEW_LATENT_ROWS query rows are read by the decode kernel instead, whose parts are merged here too.

An item whose tiles all lie in one share is finished there. For other items every share writes a part (unnormalised O,
maxima, sums) into the workspace, and `merge_latent_kernel` merges them in key order. So results repeat.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="assignment, misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.gpu.records import Span
from tilewise.backends.gpu.releases import aggregate, async_load
from tilewise.backends.hopper import decode_configs
from tilewise.backends.hopper.channels import Ring, make_ring, start
from tilewise.backends.hopper.decode import (
    clear_tail,
    finish,
    first_pages,
    guess_pages,
    look_up,
    place_in_part,
    place_rows,
    say_parts,
)
from tilewise.backends.hopper.decode_schedule import advance, ask, extent_of, key_tiles_of, locate
from tilewise.backends.hopper.layouts import accumulator_layout, left_operand_layout, slots_shape, tile_at
from tilewise.backends.hopper.primitives import NEG_INF, await_kernel_before, exp2, let_next_start, pin, rebuilt
from tilewise.backends.hopper.scores import beside, capped, no_rows, rescale, soften

# Query rows of a CTA, columns of V in each warpgroup, and columns of a TMA box, which also hold those behind V.
ROWS, HALF, PANEL = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64)
# What a program merges at a time.
MERGED_NUMBERS = gl.constexpr(decode_configs.MERGED_NUMBERS)


@aggregate
class Pipeline:
    """The shared memory of a CTA. `rest` are the columns behind V. The rings' slots are those of the latent tiles.
    What a warpgroup tells the other one has a slot of `told` for either direction: P, queries, sums.
    """

    q_smem: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    k_rest: gl.shared_memory_descriptor
    p_smem: gl.shared_memory_descriptor
    rows_smem: gl.shared_memory_descriptor
    left_ring: Ring
    right_ring: Ring
    told: Ring


# ---- producer


@gluon.jit
def fetch_box(desc, ready, at, span, head, row, pages, page_rows, pipe, COLUMN: gl.constexpr, C: gl.constexpr):
    """Start the copy of PANEL columns of a latent tile. Rows past the sequence's end arrive as zeros (see tile_at)."""
    CHUNK: gl.constexpr = C.CHUNK
    PACKED: gl.constexpr = C.IS_VARLEN or C.IS_PAGED
    DIM: gl.constexpr = 3 if PACKED else 2
    for c in gl.static_range(C.BLOCK_N // C.CHUNK):
        first = row + c * CHUNK
        keys = span
        if C.IS_PAGED:
            page_row = first % C.PAGE_SIZE
            inside = max(min(span.length - (first - page_row), C.PAGE_SIZE), 0)
            keys = Span(0, pages[c] * page_rows, inside)
            first = page_row
        if COLUMN < C.DV:
            box = pipe.k_smem.index(at.slot).slice(c * CHUNK, CHUNK, dim=DIM).slice(COLUMN, PANEL, dim=DIM + 1)
        else:
            box = pipe.k_rest.index(at.slot).slice(c * CHUNK, CHUNK, dim=DIM)
        async_load(desc, tile_at(keys, head, first, COLUMN, PACKED), ready, box)


@gluon.jit
def fetch_half(desc, at, span, head, row, pages, page_rows, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """Start the copies of one warpgroup's columns when it has released them."""
    REST: gl.constexpr = 0 if SIDE else PANEL
    ring = pipe.right_ring if SIDE else pipe.left_ring
    ready = ring.acquire(at, C.BLOCK_N * (HALF + REST) * 2)
    for box in gl.static_range(HALF // PANEL):
        fetch_box(desc, ready, at, span, head, row, pages, page_rows, pipe, SIDE * HALF + box * PANEL, C)
    if SIDE == 0:
        fetch_box(desc, ready, at, span, head, row, pages, page_rows, pipe, C.DV, C)


@gluon.jit
def fetch(desc, at, span, head, row, pages, page_rows, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """Fill the slot of left's or of right's tiles, beginning with the columns that its warpgroup adds."""
    fetch_half(desc, at, span, head, row, pages, page_rows, pipe, SIDE, C)
    fetch_half(desc, at, span, head, row, pages, page_rows, pipe, 1 - SIDE, C)


@gluon.jit
def producer(k_desc, out, lse, lengths, paging, sizes, pipe, C: gl.constexpr):
    """Feed the slots with the tiles of this CTA's share; an item begins with left's."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    even = start(1)
    odd = start(1).lane(1, 2)
    program = gl.program_id(0)
    asked = ()
    if not C.IS_UNIFORM:
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
        for _i in range(steps // 2):
            fetch(k_desc, even, keys, head, row, pages, paging.k_rows, pipe, 0, C)
            pages = look_up(paging, batch_idx, row + BLOCK_N, seqlen_k, C)
            fetch(k_desc, odd, keys, head, row + BLOCK_N, pages, paging.k_rows, pipe, 1, C)
            pages = look_up(paging, batch_idx, row + 2 * BLOCK_N, seqlen_k, C)
            even = even.next()
            odd = odd.next()
            row += 2 * BLOCK_N
        if steps % 2 == 1:
            fetch(k_desc, even, keys, head, row, pages, paging.k_rows, pipe, 0, C)
            even = even.next()
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        extent = extent_of(lengths, batch_idx, sizes, flat < end, C)
        tile = tile * 0
    if C.PACKED_Q:
        clear_tail(out, lse, lengths.cu_seqlens_q, sizes, C)


# ---- scores


@gluon.jit
def load_query_columns(q, offsets, ok, first, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Columns `first` .. of the query rows at `offsets`; 0 for missing rows and columns."""
    cols = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inside = ok[:, None] & (cols < C.HEAD_DIM)[None, :]
    return gl.load(q.ptr + offsets[:, None] + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """Store half of the columns of this CTA's query rows in shared memory; left also stores those behind V."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = row // C.GROUP_SIZE
    offsets = place_rows(q, batch_idx, q_start, token, head * C.GROUP_SIZE + row % C.GROUP_SIZE, C)
    ok = token < seqlen_q
    values = load_query_columns(q, offsets, ok, SIDE * HALF, HALF, LAYOUT, C)
    if SIDE == 0:
        pipe.q_rest.store(load_query_columns(q, offsets, ok, C.DV, PANEL, LAYOUT, C))
    pipe.q_smem.index(0).slice(SIDE * HALF, HALF, dim=1).store(values)
    fence_async_shared()  # orders the stores above before wgmma's reads


@gluon.jit
def add_scores(scores, at, pipe, SIDE: gl.constexpr, FRESH: gl.constexpr, C: gl.constexpr):
    """Issue S += Q K^T over one warpgroup's columns of a tile when they are there; FRESH: S =."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    here = rebuilt(0, at.parity, True)  # Q has 36 descriptors
    ring = pipe.right_ring if SIDE else pipe.left_ring
    ring.wait(at)
    q = pipe.q_smem.index(here).slice(SIDE * HALF, HALF, dim=1)
    k = pipe.k_smem.index(at.slot + here).reshape([BLOCK_N, DV]).slice(SIDE * HALF, HALF, dim=1)
    scores = warpgroup_mma(q, k.permute([1, 0]), scores, use_acc=not FRESH, is_async=True)
    if SIDE == 0:
        rest = pipe.k_rest.index(at.slot + here).reshape([BLOCK_N, PANEL])
        scores = warpgroup_mma(pipe.q_rest, rest.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
def compute_scores(at, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """S = Q K^T of this warpgroup's tile, beginning with the columns that arrive first."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    scores = add_scores(scores, at, pipe, SIDE, True, C)
    scores = add_scores(scores, at, pipe, 1 - SIDE, False, C)
    return warpgroup_mma_wait(0, deps=[scores])


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
            seen = seen & (keys[None, :] <= (token + sizes.window.right)[:, None])
        if C.HAS_LEFT:
            seen = seen & (keys[None, :] >= (token - sizes.window.left)[:, None])
    return gl.where(seen, scores, NEG_INF)


@gluon.jit
def soften_tile(scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C: gl.constexpr):
    """(P, rescaling factor, reference in log2 units, sum) after a tile of scores, see scores.py."""
    # Multiplied before the reference is subtracted: fused, scores above 2^30 would make P wrong.
    scores = capped(scores, cap_scale, C) * scale_log2
    complete = seqlen_k
    if C.HAS_RIGHT:  # the first query sees the fewest keys on the right, the last one on the left
        complete = min(complete, seqlen_k - seqlen_q + 1 + sizes.window.right)
    crossed = row + C.BLOCK_N > complete
    if C.HAS_LEFT:
        crossed = crossed | (row < seqlen_k - 1 - sizes.window.left)
    if crossed:
        scores = mask_keys(scores, row, seqlen_q, seqlen_k, sizes, C)
        p, factor, ref, total, _ = soften(scores, ref, total, 1.0, True, C)
    else:
        p, factor, ref, total, _ = soften(scores, ref, total, 1.0, False, C)
    return p, factor, ref, total


# ---- one tile


@gluon.jit
def values_of(at, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """One warpgroup's columns of V in a slot."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.DV
    return pipe.k_smem.index(at.slot).reshape([BLOCK_N, DV]).slice(SIDE * HALF, HALF, dim=1)


@gluon.jit
def release(at, pipe, SIDE: gl.constexpr):
    """This warpgroup's columns may be loaded again. Scores come before P, so nobody reads the columns for them now."""
    ring = pipe.right_ring if SIDE else pipe.left_ring
    ring.release(at)


@gluon.jit
def hand_over(p, ref, says, pipe, SIDE: gl.constexpr):
    """Store P and the references for the other warpgroup; P as the left operand of this one."""
    narrow = p.to(pipe.p_smem.dtype)
    pipe.p_smem.store(narrow)
    pipe.rows_smem.index(SIDE).store(gl.max(ref, axis=1))
    fence_async_shared()  # orders the stores above before the other warpgroup's wgmma reads them
    pipe.told.signal(says)
    return gl.convert_layout(narrow, left_operand_layout(accumulator_layout(HALF)))


@gluon.jit
def add_own(acc, operand, factor, at, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """O * factor + P V of this warpgroup's tile."""
    issued = warpgroup_mma(operand, values_of(at, pipe, SIDE, C), rescale(acc, factor, HALF, C), is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[issued, operand])
    release(at, pipe, SIDE)
    return acc


@gluon.jit
def issue_other(acc, ref, total, at, said, pipe, SIDE: gl.constexpr, C: gl.constexpr):
    """Issue O * factor + P V of the other warpgroup's tile when its P is there; (O, reference, sum) after it."""
    _, zeros = no_rows(C)
    pipe.told.wait(said)
    new_ref = beside(pipe.rows_smem.index(1 - SIDE).load(gl.SliceLayout(1, zeros.type.layout)), zeros) + zeros
    shift = gl.where(new_ref == NEG_INF, 0.0, new_ref)
    factor = gl.where(new_ref == ref, 1.0, exp2(ref - shift))
    acc = rescale(acc, factor, HALF, C)
    return warpgroup_mma(pipe.p_smem, values_of(at, pipe, SIDE, C), acc, is_async=True), new_ref, total * factor


@gluon.jit
def await_other(acc, at, pipe, SIDE: gl.constexpr):
    """Wait for what `issue_other` issued. The buffer of P is then this warpgroup's."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(at, pipe, SIDE)
    return acc


@gluon.jit
def exchange(at, pipe, SIDE: gl.constexpr):
    """Tell the other warpgroup that something is stored, and wait until it says so."""
    pipe.told.signal(at.lane(SIDE, 1))
    pipe.told.wait(at.lane(1 - SIDE, 1))


@gluon.jit
def consumer(
    q, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, scale_log2, cap_scale, sizes, pipe,
    SIDE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Left or right: scores and softmax of every other tile, half of the columns of the result, item after item."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_N))
    BLOCK_N: gl.constexpr = C.BLOCK_N
    mine = start(1).lane(SIDE, 2)
    others = start(1).lane(1 - SIDE, 2)
    says = start(1).lane(SIDE, 2)
    said = start(1).lane(1 - SIDE, 2)
    met = start(1)
    program = gl.program_id(0)
    asked = ()
    if not C.IS_UNIFORM:
        asked = ask(lengths, sizes, 4, C)
    all_tiles, flat, end, batch_idx, head, tile, extent = locate(lengths, asked, program, sizes, 4, C)
    while flat < end:
        q_start, seqlen_q, _, seqlen_k = extent
        first, count = key_tiles_of(seqlen_q, seqlen_k, sizes, C)
        steps = min(count - tile, end - flat)
        row = (first + tile + SIDE) * BLOCK_N
        # The other warpgroup has computed all scores of the item before: it has told its sums.
        load_queries(q, batch_idx, q_start, seqlen_q, head, pipe, SIDE, C)
        exchange(met.lane(2, 6), pipe, SIDE)
        acc = gl.zeros([ROWS, HALF], gl.float32, accumulator_layout(HALF))
        ref, total = no_rows(C)
        for _i in range(steps // 2):
            scores = compute_scores(mine, pipe, SIDE, C)
            if SIDE == 1:
                acc, ref, total = issue_other(acc, ref, total, others, said, pipe, SIDE, C)
            p, factor, ref, total = soften_tile(
                scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C
            )
            if SIDE == 1:
                total = pin(total)  # the product with the other's tile runs until here
                acc = await_other(acc, others, pipe, SIDE)
            operand = hand_over(p, ref, says, pipe, SIDE)
            acc = add_own(acc, operand, factor, mine, pipe, SIDE, C)
            if SIDE == 0:
                acc, ref, total = issue_other(acc, ref, total, others, said, pipe, SIDE, C)
                acc = await_other(acc, others, pipe, SIDE)
            mine = mine.next()
            others = others.next()
            says = says.next()
            said = said.next()
            row += 2 * BLOCK_N
        if steps % 2 == 1:  # a tile of left's is left over
            if SIDE == 0:
                scores = compute_scores(mine, pipe, SIDE, C)
                p, factor, ref, total = soften_tile(
                    scores, ref, total, row, seqlen_q, seqlen_k, scale_log2, cap_scale, sizes, C
                )
                operand = hand_over(p, ref, says, pipe, SIDE)
                acc = add_own(acc, operand, factor, mine, pipe, SIDE, C)
                mine = mine.next()
                says = says.next()
            else:
                acc, ref, total = issue_other(acc, ref, total, others, said, pipe, SIDE, C)
                acc = await_other(acc, others, pipe, SIDE)
                others = others.next()
                said = said.next()
        if flat + steps >= end:
            let_next_start()
        pipe.rows_smem.index(2 + SIDE).store(gl.sum(total, axis=1))
        exchange(met.lane(4, 6), pipe, SIDE)
        met = met.next()
        top = gl.convert_layout(gl.max(ref, axis=1), LAYOUT)
        row_sum = pipe.rows_smem.index(2).load(LAYOUT) + pipe.rows_smem.index(3).load(LAYOUT)
        part = part_of(program, tile)
        if SIDE == 0:
            if steps < count:
                rows = gl.arange(0, ROWS, LAYOUT)
                gl.store(stats_ptr + part * (2 * ROWS) + rows, top)
                gl.store(stats_ptr + part * (2 * ROWS) + ROWS + rows, row_sum)
            if (tile == 0) & (gl.program_id(1) == 0):  # one CTA begins an item, and says so for all
                say_parts(items_ptr, batch_idx * sizes.num_kv_heads + head, all_tiles, flat, count, C)
        store_half(
            acc, top, row_sum, steps == count, out, lse, sinks_ptr, parts_ptr, part, batch_idx, q_start, seqlen_q,
            head, SIDE, C)  # fmt: skip
        flat += steps
        batch_idx, head = advance(lengths, batch_idx, head, flat < end, sizes, C)
        extent = extent_of(lengths, batch_idx, sizes, flat < end, C)
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
    rows = gl.program_id(1) * ROWS + place
    token = rows // C.GROUP_SIZE
    ok = token < seqlen_q
    if finished:
        heads = head * C.GROUP_SIZE + rows % C.GROUP_SIZE
        tops = gl.convert_layout(top, gl.SliceLayout(1, LAYOUT))
        totals = gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))
        factor, lse_rows = finish(tops, totals, heads, sinks_ptr, C)
        offsets = place_rows(out, batch_idx, q_start, token, heads, C)
        values = (acc * factor[:, None]).to(out.ptr.dtype.element_ty)
        gl.store(out.ptr + offsets[:, None] + cols[None, :], values, mask=ok[:, None])
        if SIDE == 0:
            gl.store(lse.ptr + place_rows(lse, batch_idx, q_start, token, heads, C), lse_rows, mask=ok)
    else:
        at = parts_ptr + part.to(gl.int64) * (ROWS * C.DV) + place_in_part(place[:, None], cols[None, :], C)
        gl.store(at, acc, mask=ok[:, None])


@gluon.jit(
    do_not_specialize=["out", "lse", "num_shares", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "lengths", "items_ptr"],
)
def merge_latent_kernel(
    out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, num_shares, sizes, C: gl.constexpr,
    COLUMNS: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    """Merge COLUMNS columns of an item's parts, which SPREAD warps share, 8 rows at a time. Grid: item, programs
    that share an item's rows, columns // COLUMNS. Most items may have nothing to merge.

    The parts come from consecutive shares: the second part of the first one, which ends inside the item, then the first
    part of each other one.
    """
    WARPS: gl.constexpr = 4
    ROWS: gl.constexpr = C.ROWS
    DV: gl.constexpr = C.DV
    PARTS: gl.constexpr = MERGED_NUMBERS // (COLUMNS * 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [SPREAD, 1, WARPS // SPREAD], [2, 1, 0])
    BY_PART: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    MERGED: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    item = gl.program_id(0)
    batch_idx = item // sizes.num_kv_heads
    q_start = batch_idx * sizes.seqlen_q
    seqlen_q = sizes.seqlen_q
    if C.PACKED_Q:
        q_start = gl.load(lengths.cu_seqlens_q + batch_idx)
        seqlen_q = gl.load(lengths.cu_seqlens_q + batch_idx + 1) - q_start
    let_next_start()
    await_kernel_before()
    first = gl.load(items_ptr + 2 * item)  # of an item without rows this is anything, and not used
    count = gl.load(items_ptr + 2 * item + 1)
    num_rows = gl.where(count > 1, seqlen_q * C.GROUP_SIZE, 0)
    for begin_row in range(gl.program_id(1) * 8, num_rows, gl.num_programs(1) * 8):
        row = begin_row + gl.arange(0, 8, gl.SliceLayout(0, BY_PART))
        ok = row < num_rows
        cols = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, MERGED))
        acc = gl.zeros([8, COLUMNS], gl.float32, MERGED)
        total = gl.zeros([8], gl.float32, gl.SliceLayout(0, BY_PART))
        top = total + NEG_INF
        for begin in range(0, count, PARTS):
            number = begin + gl.arange(0, PARTS, gl.SliceLayout(1, BY_PART))
            share_part = 2 * (first + number) + gl.where(number == 0, 1, 0)
            part = share_part[:, None] + (row // ROWS * (2 * num_shares))[None, :]
            there = (number < count)[:, None] & ok[None, :]
            stats = stats_ptr + part * (2 * ROWS) + (row % ROWS)[None, :]
            tops = gl.load(stats, mask=there, other=NEG_INF)
            totals = gl.load(stats + ROWS, mask=there, other=0.0)
            columns = gl.convert_layout(cols, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
            places = place_in_part((row % ROWS)[None, :][:, :, None], columns, C)
            at = parts_ptr + ((part * (ROWS * DV))[:, :, None] + places)
            values = gl.load(at, mask=there[:, :, None], other=0.0)
            new_top = gl.maximum(top, gl.max(tops, axis=0))
            shift = gl.where(new_top == NEG_INF, 0.0, new_top)
            weights = exp2(tops - shift[None, :])
            alpha = exp2(top - shift)
            total = total * alpha + gl.sum(totals * weights, axis=0)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, MERGED))
            acc = acc * alpha[:, None] + gl.sum(values * weights[:, :, None], axis=0)
            top = new_top
        head = item % sizes.num_kv_heads * C.GROUP_SIZE + row % C.GROUP_SIZE
        token = row // C.GROUP_SIZE
        factor, lse_rows = finish(top, total, head, sinks_ptr, C)
        at = gl.convert_layout(place_rows(out, batch_idx, q_start, token, head, C), gl.SliceLayout(1, MERGED))
        factor = gl.convert_layout(factor, gl.SliceLayout(1, MERGED))
        kept = gl.convert_layout(ok, gl.SliceLayout(1, MERGED))
        values = (acc * factor[:, None]).to(out.ptr.dtype.element_ty)
        gl.store(out.ptr + at[:, None] + cols[None, :], values, mask=kept[:, None])
        if gl.program_id(2) == 0:
            gl.store(lse.ptr + place_rows(lse, batch_idx, q_start, token, head, C), lse_rows, mask=ok)


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
    q_rest = gl.allocate_shared_memory(DTYPE, [ROWS, PANEL], P_LAYOUT)
    k_smem = gl.allocate_shared_memory(DTYPE, slots_shape(2, C.BLOCK_N, C.DV, PACKED), k_desc.layout)
    k_rest = gl.allocate_shared_memory(DTYPE, slots_shape(2, C.BLOCK_N, PANEL, PACKED), k_desc.layout)
    p_smem = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_LAYOUT)
    rows_smem = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    left_ring = make_ring(2, 1)
    right_ring = make_ring(2, 1)
    told = make_ring(6, 0)
    fence_async_shared()  # the barriers are initialised before TMA reports to them
    return Pipeline(q_smem, q_rest, k_smem, k_rest, p_smem, rows_smem, left_ring, right_ring, told)


@gluon.jit(
    do_not_specialize=["q", "out", "lse", "paging", "scale_log2", "cap_scale", "sizes"],
    do_not_specialize_on_alignment=["sinks_ptr", "lengths", "items_ptr"],
)
def latent_kernel(
    q, k_desc, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, paging, scale_log2, cap_scale, sizes,
    C: gl.constexpr,
):  # fmt: skip
    """Out and lse of items that are finished in a share, parts of the others. Arguments are those of decode_kernel; of
    every item, items_ptr gets the first share that has a part of it and their number.
    """
    pipe = make_pipeline(k_desc, C)
    await_kernel_before()
    # Argument tuples must be written out: bound to a name, their constexprs would become tensors.
    gl.warp_specialize([
        (consumer, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, scale_log2, cap_scale, sizes,
                    pipe, 0, C)),
        (consumer, (q, out, lse, sinks_ptr, parts_ptr, stats_ptr, items_ptr, lengths, scale_log2, cap_scale, sizes,
                    pipe, 1, C)),
        (producer, (k_desc, out, lse, lengths, paging, sizes, pipe, C)),
    ], [4, 1], [C.CONSUMER_REGS, C.PRODUCER_REGS])  # fmt: skip
