"""Before and after the main backward kernel, in plain Triton: row statistics and zeros, then dQ from its accumulator.

The accumulator holds, for every query tile of BLOCK_M rows, 64 x 64 blocks in the order of a warpgroup's wgmma
registers (dq_tiles.py). Summed in fixed point, a row counts units of its own. bound_units of them, 2^30 at most, make a
bound of its sum: |dQ_id| <= sum_j P_ij |dP_ij - delta_i| |K_jd| <= (|dO_i| max_j |V_j| + |delta_i|) max |K|, because P
sums to at most 1 (softcap and sinks make it less; dlse is part of delta).

Rounding makes the true sum exceed this bound by a factor below 1.005, and a part or a sum may be up to 2 bounds
(primitives.count_units). The parts of that factor: dS is rounded by 2^-8 of itself in bf16, by 2^-11 in fp16; dP, exp2
and the logarithms here by less than 2^-12 together; every part by half a unit, which is 2^13 units for 2^20 keys. Only
P's rounding grows with the scores: lse is rounded three times and two constants once, so P sums to at most
2^(5 * 2^-24 |lse|). That is 1.17 at 5e5 nats; SLACK leaves space for it at any size.

Figures: bench/results/hopper-backward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Strides come in units of 16 bytes, so the compiler knows that rows are aligned without specialising on strides.
UNIT = tl.constexpr(8)
# Programs that share the search for a head's bounds, and how many numbers each finds.
BOUND_PARTS = tl.constexpr(32)
NUM_BOUNDS = tl.constexpr(3)
# Bounds of key blocks that are read at a time.
READ_BOUNDS = tl.constexpr(32)
# The bits of infinity; as integers, NaNs are larger.
INFINITE = tl.constexpr(0x7F800000)
NEVER = tl.constexpr(2147483647)
# log2 of the most units that make 1: their inverse is still a normal number.
MOST_BITS = tl.constexpr(126.0)
# The main kernel counts units as multiples of 2^-22, and adds this bias to each part of a sum (primitives.count_units).
MAIN_UNIT, COUNT_BIAS = tl.constexpr(2.0**-22), tl.constexpr(0x40400000)
# By how many bits P may exceed 1, per |lse| in log2 units; its roundings come to 5 * 2^-24. Below USUAL_LSE nats this
# is less than 0.01 bits, which the bound covers anyway.
SLACK, MOST_SLACK = tl.constexpr(2.0**-21), tl.constexpr(100.0)
USUAL_LSE = tl.constexpr(2.0**13)
# Rows with a larger |lse| (in nats) count as empty. Such an lse is a multiple of 4, so the rounding of score - lse
# makes P meaningless.
LARGEST_LSE = tl.constexpr(2.0**25)
# Rows whose squared lengths, sizes of dS and bounds lie between these need no logarithms.
LEAST_SQUARE, MOST_SIZE = tl.constexpr(2.0**-80), tl.constexpr(2.0**100)
LEAST_BOUND, MOST_BOUND = tl.constexpr(2.0**-90), tl.constexpr(2.0**90)
TINY = tl.constexpr(2.0**-126)
# Sequences that are compared with a tile at a time.
SEARCHED = tl.constexpr(64)


@triton.jit
def let_next_start():
    """Allow the next kernel to start once all programs have called this; it must wait for this kernel's end itself."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def await_kernel_before():
    """Wait until the kernel before has ended and its writes are visible."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def row_span(cu_seqlens, batch_idx, seqlen_q, PACKED: tl.constexpr):
    """(first packed row, length) of a sequence."""
    if PACKED:
        first = tl.load(cu_seqlens + batch_idx)
        return first, tl.load(cu_seqlens + batch_idx + 1) - first
    else:
        return batch_idx * 0, seqlen_q + batch_idx * 0


@triton.jit
def row_tile_at(cu_seqlens, tile, batch, BLOCK_M: tl.constexpr):
    """(sequence, first packed row, length, query tile) of a tile of row statistics; see schedule.row_tile_of.

    A sequence's tiles begin at cu_seqlens // BLOCK_M + its number. That leaves space for all of its tiles; some tiles
    belong to no sequence or lie past the end of one.
    """
    sequence = -1
    first = 0
    last = 2147483647
    begin = 0
    for base in range(0, batch + 1, SEARCHED):
        sequences = base + tl.arange(0, SEARCHED)
        inside = sequences <= batch
        rows = tl.load(cu_seqlens + sequences, mask=inside, other=2147483647)
        begins = rows // BLOCK_M + sequences
        before = (begins <= tile) & inside
        sequence += tl.sum(before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(before, rows, 0), 0))
        last = tl.minimum(last, tl.min(tl.where(before, 2147483647, rows), 0))
        begin = tl.maximum(begin, tl.max(tl.where(before, begins, 0), 0))
    return tl.minimum(sequence, batch - 1), first, tl.where(sequence < batch, last - first, 0), tile - begin


@triton.jit
def tile_of(item, row_tile, cu_seqlens, num_heads, seqlen_q, batch, BLOCK_M: tl.constexpr, PACKED: tl.constexpr):
    """(sequence, batch_idx in memory, first row there, length, query tile) of an item's tile of row statistics."""
    if PACKED:
        sequence, first, length, m_block = row_tile_at(cu_seqlens, row_tile, batch, BLOCK_M)
        return sequence, (item * 0).to(tl.int64), first, length, m_block
    else:
        batch_idx = item // num_heads
        return batch_idx, batch_idx.to(tl.int64), item * 0, seqlen_q + item * 0, row_tile


@triton.jit
def load_rows(ptr, strides, batch_idx, head, rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head in fp32, zero outside."""
    cols = tl.arange(0, BLOCK_D)
    at = (
        ptr
        + (batch_idx * strides.batch + head * strides.head) * UNIT
        + rows[:, None] * (strides.row * UNIT)
        + cols[None, :]
    )
    if HEAD_DIM == BLOCK_D:
        return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    else:
        return tl.load(at, mask=inside[:, None] & (cols < HEAD_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def lengths_of(x):
    """Euclidean lengths of rows, divided by 16. Rows are scaled by a power of two first, so no square overflows."""
    top = tl.max(tl.cast(tl.abs(x), tl.int32, bitcast=True), 1)
    exponent = tl.minimum(tl.maximum(top >> 23, 1), 253)
    x = x * tl.cast((254 - exponent) << 23, tl.float32, bitcast=True)[:, None]
    return tl.sqrt(tl.sum(x * x, 1)) * 0.0625 * tl.cast(exponent << 23, tl.float32, bitcast=True)


@triton.jit
def bound_rows(
    k_ptr, v_ptr, k_strides, v_strides, memory_batch, head, first, begin, end, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """(max |K_jd|, max |V_j| / 16, first non-finite key) of blocks of BLOCK_N keys, from `begin` to `end` by STEP.

    A key that is not finite, or whose value is not, enters no maximum. Non-negative floats are compared as integers,
    where NaN is above infinity.
    """
    largest = tl.zeros([BLOCK_N], tl.int32)
    longest = tl.zeros([BLOCK_N], tl.int32)
    lost = tl.zeros([BLOCK_N], tl.int32) + NEVER
    for row in range(begin, end, STEP):
        rows = row + tl.arange(0, BLOCK_N)
        memory_rows = (first + rows).to(tl.int64)
        k = load_rows(k_ptr, k_strides, memory_batch, head, memory_rows, rows < end, HEAD_DIM, BLOCK_D)
        size = tl.max(tl.cast(tl.abs(k), tl.int32, bitcast=True), 1)
        v = load_rows(v_ptr, v_strides, memory_batch, head, memory_rows, rows < end, HEAD_DIM_V, BLOCK_DV)
        reach = tl.cast(lengths_of(v), tl.int32, bitcast=True) & NEVER  # NaN may have a sign
        finite = tl.maximum(size, reach) < INFINITE
        largest = tl.maximum(largest, tl.where(finite, size, 0))
        longest = tl.maximum(longest, tl.where(finite, reach, 0))
        lost = tl.minimum(lost, tl.where(finite, NEVER, rows.to(tl.int32)))
    return tl.max(largest, 0), tl.max(longest, 0), tl.min(lost, 0)


@triton.jit(
    do_not_specialize=["k_strides", "v_strides", "num_heads", "seqlen_k", "batch"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)
def bound_keys_kernel(
    k_ptr, v_ptr, bounds_ptr, cu_seqlens, k_strides, v_strides, num_heads, seqlen_k, batch,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, BOUND_KEYS: tl.constexpr,
):  # fmt: skip
    """The bounds (bound_rows) of every BOUND_PARTS-th block of BLOCK_N keys of a head, or of BOUND_KEYS keys.

    Programs: (batch, kv head) pairs x parts. With BOUND_KEYS: blocks of all sequences x kv heads; blocks of packed
    sequences are numbered as query tiles are (row_tile_at).
    """
    let_next_start()
    STEP: tl.constexpr = BLOCK_N if BOUND_KEYS else BOUND_PARTS * BLOCK_N
    if BOUND_KEYS:
        blocks = (seqlen_k + BOUND_KEYS - 1) // BOUND_KEYS
        head = tl.program_id(1).to(tl.int64)
        slot = tl.program_id(0)
        _, memory_batch, first, length, block = tile_of(
            slot // blocks * num_heads, slot if PACKED else slot % blocks, cu_seqlens, num_heads, seqlen_k, batch,
            BOUND_KEYS, PACKED)  # fmt: skip
        begin, end = block * BOUND_KEYS, tl.minimum(block * BOUND_KEYS + BOUND_KEYS, length)
        at, between = bounds_ptr + head * (NUM_BOUNDS * tl.num_programs(0)) + slot, tl.num_programs(0)
    else:
        item = tl.program_id(0)
        batch_idx = (item // num_heads).to(tl.int64)
        head = (item % num_heads).to(tl.int64)
        part = tl.program_id(1)
        first, end = row_span(cu_seqlens, batch_idx, seqlen_k, PACKED)
        memory_batch = batch_idx * 0 if PACKED else batch_idx
        begin = part * BLOCK_N
        at, between = bounds_ptr + item * (NUM_BOUNDS * BOUND_PARTS) + part, BOUND_PARTS
    largest, longest, lost = bound_rows(
        k_ptr, v_ptr, k_strides, v_strides, memory_batch, head, first, begin, end, STEP, BLOCK_N, HEAD_DIM, HEAD_DIM_V,
        BLOCK_D, BLOCK_DV)  # fmt: skip
    tl.store(at, largest)
    tl.store(at + between, longest)
    tl.store(at + 2 * between, lost)


@triton.jit
def log2_of(x):
    """Log2 of x >= 0; smaller x than 2^-126 count as 2^-126, NaN gives NaN."""
    return tl.log2(tl.where(x < TINY, TINY, x))


@triton.jit
def bounds_of(bounds_ptr, item, num_keys):
    """Max |K_jd| and max |V_j| / 16 of a head, and whether a query tile meets a non-finite key.

    It does if the key's block of 128 begins within the first `num_keys`, because the tile is multiplied with it.
    """
    at = bounds_ptr + item * (NUM_BOUNDS * BOUND_PARTS) + tl.arange(0, BOUND_PARTS)
    largest = tl.cast(tl.max(tl.load(at), 0), tl.float32, bitcast=True)
    longest = tl.cast(tl.max(tl.load(at + BOUND_PARTS), 0), tl.float32, bitcast=True)
    lost = tl.min(tl.load(at + 2 * BOUND_PARTS), 0)
    return largest, longest, lost // 128 * 128 < num_keys


@triton.jit
def bounds_between(bounds_ptr, first_slot, begin, end, num_slots):
    """The same for blocks `begin` to `end` of a sequence, whose block 0 has slot first_slot of num_slots."""
    at = bounds_ptr + first_slot
    largest = tl.zeros([READ_BOUNDS], tl.int32)
    longest = tl.zeros([READ_BOUNDS], tl.int32)
    lost = tl.zeros([READ_BOUNDS], tl.int32) + NEVER
    for block in range(begin, end, READ_BOUNDS):
        blocks = block + tl.arange(0, READ_BOUNDS)
        inside = blocks < end
        largest = tl.maximum(largest, tl.load(at + blocks, mask=inside, other=0))
        longest = tl.maximum(longest, tl.load(at + num_slots + blocks, mask=inside, other=0))
        lost = tl.minimum(lost, tl.load(at + 2 * num_slots + blocks, mask=inside, other=NEVER))
    largest = tl.cast(tl.max(largest, 0), tl.float32, bitcast=True)
    return largest, tl.cast(tl.max(longest, 0), tl.float32, bitcast=True), tl.min(lost, 0) < NEVER


@triton.jit
def tile_bounds(
    bounds_ptr, cu_seqlens_k, sequence, head, num_heads, group_size, m_block, length, seqlen_k, window,
    num_slots, BLOCK_M: tl.constexpr, PACKED: tl.constexpr, BOUND_KEYS: tl.constexpr,
):  # fmt: skip
    """The bounds for a query tile: with BOUND_KEYS those of the key blocks that it is multiplied with, so that other
    keys cost it no bits.

    Without BOUND_KEYS those of all keys of its head; but a non-finite key counts only for tiles that meet it.
    """
    first_key, length_k = row_span(cu_seqlens_k, sequence, seqlen_k, PACKED)
    if BOUND_KEYS:
        own = m_block * BLOCK_M + (length_k - length)
        begin, end = tl.maximum(own - window.left, 0), tl.minimum(own + BLOCK_M + window.right, length_k)
        blocks = (seqlen_k + BOUND_KEYS - 1) // BOUND_KEYS
        first_slot = first_key // BOUND_KEYS + sequence if PACKED else sequence * blocks
        first_slot += head // group_size * (NUM_BOUNDS * num_slots)
        stop = (end + BOUND_KEYS - 1) // BOUND_KEYS
        return bounds_between(bounds_ptr, first_slot, begin // BOUND_KEYS, stop, num_slots)
    else:
        num_keys = (m_block + 1) * BLOCK_M + (length_k - length) + window.right
        return bounds_of(bounds_ptr, (sequence * num_heads + head) // group_size, num_keys)


@triton.jit
def usual_units(dout, delta, lse, bounds, bound_units):
    """(How many units make 1, whether that is valid) for rows of dQ, such that bound_units make the row's bound."""
    largest, longest, lost = bounds
    squares = tl.sum(dout * dout, 1)
    size = tl.sqrt(squares) * (longest * 16.0) + tl.abs(delta)
    bound = size * largest
    usual = (squares > LEAST_SQUARE) & (size < MOST_SIZE) & (bound > LEAST_BOUND) & (bound < MOST_BOUND)
    usual &= (tl.abs(lse) < USUAL_LSE) | (lse == float("inf"))
    return bound_units / bound, usual & (not lost)


@triton.jit
def units_at_the_ends(dout, delta, lse, bounds, bound_bits):
    """The units of rows of any size, computed in logarithms: dQ may be finite where a factor of the bound is not.

    NaN for rows that are not finite, or might become so in the main kernel, whose integers would hide it: where dS or
    the bound may exceed 2^127, or P may be infinite. (fp16 ends earlier; there the main kernel checks, see
    BackwardPlan.watches_rows.)
    """
    largest, longest, lost = bounds
    products = log2_of(lengths_of(dout)) + (log2_of(longest) + 8.0)
    deltas = log2_of(tl.abs(delta))
    top = tl.maximum(products, deltas)
    slack = tl.where(tl.abs(lse) < float("inf"), tl.abs(lse) * (SLACK * LOG2E), 0.0)
    size = top + tl.log2(tl.exp2(products - top) + tl.exp2(deltas - top)) + slack
    bound = size + log2_of(largest)
    fits = (lse == lse) & (slack < MOST_SLACK) & (size < 127.0) & (bound < 127.0) & (not lost)
    return tl.where(fits, tl.exp2(tl.minimum(bound_bits - bound, MOST_BITS)), float("nan"))


@triton.jit
def odd(x):
    """Floats with the last bit set. A float times a 24-bit odd number is never exactly 1 or 3 (count_units)."""
    return tl.cast(tl.cast(x, tl.int32, bitcast=True) | 1, tl.float32, bitcast=True)


@triton.jit
def in_register_order(units, BLOCK_M: tl.constexpr):
    """The units of a query tile's rows in register order (dq_tiles.py), 16 bytes a thread.

    Of 64 rows a warp has 16. Four threads share a row and the row 8 below it, and each holds both twice, for two
    columns.
    """
    pairs = tl.permute(tl.reshape(units, [BLOCK_M // 64, 4, 2, 8]), (0, 1, 3, 2))
    spread = tl.broadcast_to(tl.reshape(pairs, [BLOCK_M // 64, 4, 8, 1, 2, 1]), [BLOCK_M // 64, 4, 8, 4, 2, 2])
    return tl.reshape(spread, [8 * BLOCK_M])


@triton.jit(
    do_not_specialize=[
        "out_strides",
        "dout_strides",
        "num_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "window",
        "bound_slots",
        "total_q",
        "batch",
        "num_items",
        "cleared_items",
        "num_counts",
        "bound_units",
        "bound_bits",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "cu_seqlens", "cu_seqlens_k"],
)
def prepare_rows_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, stats_ptr, units_ptr, main_units_ptr, dq_acc_ptr, counts_ptr, bounds_ptr,
    cu_seqlens, cu_seqlens_k, out_strides, dout_strides, num_heads, group_size, seqlen_q, seqlen_k, window,
    bound_slots, total_q, batch, num_items, cleared_items, num_counts, bound_units,
    bound_bits, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DQ_BLOCKS: tl.constexpr,
    PACKED: tl.constexpr, BOUND_KEYS: tl.constexpr,
):  # fmt: skip
    """Write [lse * log2(e) | delta - dlse] of one query tile, for one TMA load, and zero its tile of the accumulator.

    dlse enters here: dS = P (dP - delta + dlse). With units_ptr also the rows' units of a fixed-point sum, and a copy
    for the main kernel, which may write NaN into the original (dq_tiles.py). Units come from the bounds of a K/V head
    or, with BOUND_KEYS, of its blocks, of which there are bound_slots. Programs: row tiles x items; packed, an item is
    a head.

    Where idle warps of the main kernel prepare later heads (preparing.py), only the first `cleared_items` are
    zeroed. counts_ptr holds their counts, which are zeroed here; packed, it says of every (sequence, head) whether idle
    warps prepare it (work_list.mark_beside).
    """
    item = tl.program_id(0) % num_items
    row_tile = tl.program_id(0) // num_items
    sequence, batch_idx, first, length, m_block = tile_of(
        item, row_tile, cu_seqlens, num_heads, seqlen_q, batch, BLOCK_M, PACKED
    )
    head = (item % num_heads).to(tl.int64)
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED and counts_ptr is not None:
        beside = tl.load(counts_ptr + (sequence * (num_items // group_size) + item // group_size) * 2) != 0
        if beside & (m_block * BLOCK_M < length):  # tiles past the sequence's end belong to no one: handle them here
            return
    inside = rows < length
    memory_rows = (first + rows).to(tl.int64)
    if units_ptr is not None and BOUND_KEYS:
        # Before the rows are loaded: a loop after that needs many more registers.
        await_kernel_before()
        bounds = tile_bounds(
            bounds_ptr, cu_seqlens_k, sequence, head, num_heads, group_size, m_block, length, seqlen_k, window,
            bound_slots, BLOCK_M, PACKED, BOUND_KEYS)  # fmt: skip
    out = load_rows(out_ptr, out_strides, batch_idx, head, memory_rows, inside, HEAD_DIM, BLOCK_D)
    dout = load_rows(dout_ptr, dout_strides, batch_idx, head, memory_rows, inside, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out * dout, 1)
    at = (head * total_q if PACKED else item.to(tl.int64) * seqlen_q) + memory_rows
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=inside, other=0.0)
    lse = tl.where(tl.abs(lse) > LARGEST_LSE, float("inf"), lse)
    tile = item.to(tl.int64) * (tl.num_programs(0) // num_items) + row_tile
    stats = stats_ptr + tile * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(stats, lse * LOG2E)
    tl.store(stats + BLOCK_M, delta)
    if counts_ptr is not None:
        for count in range(tl.program_id(0), num_counts, tl.num_programs(0)):
            tl.store(counts_ptr + count, 0)
    if dq_acc_ptr is not None:
        for block in range(tl.where(item < cleared_items, DQ_BLOCKS, 0)):
            zeros = dq_acc_ptr + (tile * DQ_BLOCKS + block) * 4096 + tl.arange(0, 4096)
            tl.store(zeros, tl.zeros([4096], dq_acc_ptr.dtype.element_ty))
    if units_ptr is not None:
        if not BOUND_KEYS:
            await_kernel_before()  # nothing so far depends on the bounds
            bounds = tile_bounds(
                bounds_ptr, cu_seqlens_k, sequence, head, num_heads, group_size, m_block, length, seqlen_k, window,
                bound_slots, BLOCK_M, PACKED, BOUND_KEYS)  # fmt: skip
        units, usual = usual_units(dout, delta, lse, bounds, bound_units)
        if (tl.min((usual | ~inside).to(tl.int32), 0) == 0) | bounds[2]:
            # Read dO again instead of keeping it in registers.
            dout = load_rows(dout_ptr, dout_strides, batch_idx, head, memory_rows, inside, HEAD_DIM, BLOCK_D)
            units = tl.where(usual, units, units_at_the_ends(dout, delta, lse, bounds, bound_bits))
        units = odd(tl.where(inside, units, 1.0))
        tl.store(units_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M), units)
        if BLOCK_M == 128:
            at = main_units_ptr + tile * (8 * BLOCK_M) + tl.arange(0, 8 * BLOCK_M)
            tl.store(at, in_register_order(units * MAIN_UNIT, BLOCK_M))
        else:
            tl.store(main_units_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M), units * MAIN_UNIT)


@triton.jit
def parts_of(m_block, length_q, length_k, window, BLOCK_M: tl.constexpr):
    """How many blocks of 128 keys add to a query tile: those whose schedule.query_tiles include it."""
    first_key = m_block * BLOCK_M + (length_k - length_q)
    end = tl.cdiv(tl.minimum(tl.maximum(first_key + BLOCK_M + window.right, 0), length_k), 128)
    return tl.maximum(end - tl.maximum(first_key - window.left, 0) // 128, 0)


@triton.jit(
    do_not_specialize=["scale", "dq_strides", "num_heads", "seqlen_q", "batch", "num_items", "seqlen_k", "window"],
    do_not_specialize_on_alignment=["cu_seqlens", "cu_seqlens_k"],
)
def finish_queries_kernel(
    dq_acc_ptr, units_ptr, dq_ptr, cu_seqlens, cu_seqlens_k, scale, dq_strides, num_heads, seqlen_q, seqlen_k,
    window, batch, num_items, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A query tile of dQ from its accumulator: scaled, rounded, in row order. Programs: row tiles x items, in the order
    of memory, which is faster than alternating between heads.
    """
    row_tiles = tl.num_programs(0) // num_items
    item = tl.program_id(0) // row_tiles
    row_tile = tl.program_id(0) % row_tiles
    sequence, batch_idx, first, length, m_block = tile_of(
        item, row_tile, cu_seqlens, num_heads, seqlen_q, batch, BLOCK_M, PACKED
    )
    head = (item % num_heads).to(tl.int64)
    place = tl.program_id(0).to(tl.int64)
    x = tl.load(dq_acc_ptr + place * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D))
    if units_ptr is not None:
        _, length_k = row_span(cu_seqlens_k, sequence, seqlen_k, PACKED)
        parts = parts_of(m_block, length, length_k, window, BLOCK_M)
        x -= tl.cast(parts * COUNT_BIAS, tl.int32)  # modulo 2^32
    x = x * scale
    x = tl.reshape(x, [BLOCK_M * BLOCK_D // 4096, 8, 4, 8, 4, 2, 2])
    # The two blocks of a tile are 128 rows at 64 columns, otherwise 128 columns.
    x = tl.permute(x, (0, 2, 5, 3, 1, 4, 6) if BLOCK_D == 64 else (2, 5, 3, 0, 1, 4, 6))
    x = tl.reshape(x, [BLOCK_M, BLOCK_D])
    row_in_tile = tl.arange(0, BLOCK_M)
    if units_ptr is not None:
        x = x / tl.load(units_ptr + place * BLOCK_M + row_in_tile)[:, None]
    rows = m_block * BLOCK_M + row_in_tile
    cols = tl.arange(0, BLOCK_D)
    base = dq_ptr + (batch_idx * dq_strides.batch + head * dq_strides.head) * UNIT
    memory_rows = (first + rows).to(tl.int64)
    target = base + memory_rows[:, None] * (dq_strides.row * UNIT) + cols[None, :]
    keep = (rows < length)[:, None]
    if HEAD_DIM != BLOCK_D:
        keep = keep & (cols < HEAD_DIM)[None, :]
    tl.store(target, x.to(dq_ptr.dtype.element_ty), mask=keep)
