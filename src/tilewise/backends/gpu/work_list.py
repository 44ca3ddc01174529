"""A list of the blocks of packed sequences, made on the device, for persistent kernels and for one program per block.

Only the device knows the lengths. A grid for the longest sequence would be mostly empty, so the blocks that exist are
listed: one entry for a block of a sequence, for all heads or for each head. schedule.LIST_WORDS says what an entry
holds; entry 0 holds the number of entries. Every program computes the positions of its entries from cu_seqlens alone,
so none waits for another.

The lengths come from the device, but how many programs list a sequence follows from the caller's maximum length. If
that is too small, the rest of a sequence is left out of everything: what is not listed must not be read.

Order: long sequences first, and within a sequence heavy blocks first, so that the last tiles are light. Under a causal
mask, sequences of equal length are walked together, heavy blocks first, as many as fit into L2, because one alone may
have too few heavy blocks for all SMs. Where every head has entries, a sequence that does not fit into L2 with all of
its heads is walked in waves of heads.

Rows past the last sequence belong to no block; the same launch clears them, or another kernel (clear_rows).

The host's side is below the kernel: how many blocks packed sequences can have, and the call that lists them. Figures:
bench/results/gpu-host-choices.csv, by name.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, RET505

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewise.backends.gpu.launching import Allocation
from tilewise.backends.gpu.symbols import Address, KernelCall
from tilewise.problem import AttentionProblem
from tilewise.symbolic import largest, smallest

# The same as schedule.LIST_WORDS.
ENTRY_WORDS = tl.constexpr(8)
# Blocks that a program lists, and sequences it compares them with at a time.
LISTED_BLOCKS, COMPARED = tl.constexpr(32), tl.constexpr(64)


@triton.jit
def lengths_at(
    sequences, inside, cu_seqlens_q, seqlens_k, most, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr
):  # fmt: skip
    """(first query row, query rows, first key row, keys) of sequences. The rows that are listed are capped at `most`.
    For paged keys seqlens_k holds lengths, and the first key row is 0.
    """
    q_first = tl.load(cu_seqlens_q + sequences, mask=inside, other=0)
    q_rows = tl.load(cu_seqlens_q + sequences + 1, mask=inside, other=0) - q_first
    if IS_PAGED:
        k_first = sequences * 0
        keys = tl.load(seqlens_k + sequences, mask=inside, other=0)
    else:
        k_first = tl.load(seqlens_k + sequences, mask=inside, other=0)
        keys = tl.load(seqlens_k + sequences + 1, mask=inside, other=0) - k_first
    if OF_KEYS:
        return q_first, q_rows, k_first, tl.minimum(keys, most)
    else:
        return q_first, tl.minimum(q_rows, most), k_first, keys


@triton.jit
def blocks_of(lengths, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """(number of blocks, weight of the lightest, blocks of the other side) of sequences.

    Under a causal mask a block weighs one more than the next lighter one. The lightest query block is the first one,
    the lightest key block the last one.
    """
    query_blocks = (lengths[1] + BLOCK - 1) // BLOCK
    key_blocks = (lengths[3] + BLOCK - 1) // BLOCK
    if OF_KEYS:
        return key_blocks, key_blocks * 0, query_blocks
    else:
        return query_blocks, key_blocks - query_blocks, key_blocks


@triton.jit
def heads_together(passed, rows_together, BLOCK: tl.constexpr):
    """How many heads of sequences are walked together, if `passed` blocks of the other side stream past each."""
    return tl.maximum(rows_together // tl.maximum(passed * BLOCK, 1), 1)


@triton.jit
def wave_of(room, follow, heads):
    """Heads of a wave, in equal waves: as many as fit (`room`), at the end of the list (follow == 0) twice as many."""
    return tl.cdiv(heads, tl.cdiv(heads, tl.where(follow > 0, room, 2 * room)))


@triton.jit
def list_blocks(
    sequence, part, parts, work_ptr, cu_seqlens_q, seqlens_k, batch, rows_together,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr, first_head=0, shares=1, heads=1,
):  # fmt: skip
    """Write up to LISTED_BLOCKS entries of a sequence: those of `part` of `parts`, for `first_head` and every
    `shares`-th head after it of `heads` (1 where an entry is for all heads). The first program also writes the total
    number of entries.
    """
    most = parts * (LISTED_BLOCKS * BLOCK)
    lengths = lengths_at(sequence, sequence >= 0, cu_seqlens_q, seqlens_k, most, OF_KEYS, IS_PAGED)
    count, lightest, passed = blocks_of(lengths, BLOCK, OF_KEYS)
    room = heads_together(passed, rows_together, BLOCK)
    group_size = tl.maximum(room // heads, 1)
    ranks = part * LISTED_BLOCKS + tl.arange(0, LISTED_BLOCKS)  # from the lightest block on
    place = tl.zeros([LISTED_BLOCKS], tl.int32)  # position within the group of sequences walked together
    ahead_of = tl.zeros([COMPARED], tl.int32)
    behind = tl.zeros([COMPARED], tl.int32)
    total = tl.zeros([COMPARED], tl.int32)
    for first in range(0, batch, COMPARED):
        others = first + tl.arange(0, COMPARED)
        inside = others < batch
        counts, floors, other_passed = blocks_of(
            lengths_at(others, inside, cu_seqlens_q, seqlens_k, most, OF_KEYS, IS_PAGED), BLOCK, OF_KEYS
        )
        counts = tl.where(inside, counts, 0)
        total += counts
        alike = other_passed == passed
        together = alike & (others // group_size == sequence // group_size)
        ahead = (other_passed > passed) | (alike & (others // group_size < sequence // group_size))
        ahead_of += tl.where(ahead, counts, 0)
        behind += tl.where(ahead | together, 0, counts)
        rank = (lightest + ranks)[:, None] - floors[None, :]  # of the other sequence's block with equal weight
        heavier = tl.minimum(tl.maximum(counts[None, :] - 1 - rank, 0), counts[None, :])
        heavier += ((others < sequence)[None, :] & (rank >= 0) & (rank < counts[None, :])).to(tl.int32)
        place += tl.sum(tl.where(together[None, :], heavier, 0), 1)
    blocks = ranks
    if OF_KEYS:
        blocks = count - 1 - ranks
    exists = ranks < count
    before = tl.sum(ahead_of, 0)
    wave = wave_of(room, tl.sum(behind, 0), heads)
    for head in range(first_head, heads, shares):
        first = head // wave * wave
        at = before * heads + first * count + place * tl.minimum(wave, heads - first) + (head - first)
        entry = work_ptr + (at + 1) * ENTRY_WORDS
        tl.store(entry + 1, blocks, mask=exists)
        tl.store(entry + 2, ranks * 0 + head, mask=exists)
        tl.store(entry + 3, ranks * 0 + sequence, mask=exists)
        tl.store(entry + 4, ranks * 0 + lengths[0], mask=exists)
        tl.store(entry + 5, ranks * 0 + lengths[1], mask=exists)
        tl.store(entry + 6, ranks * 0 + lengths[2], mask=exists)
        tl.store(entry + 7, ranks * 0 + lengths[3], mask=exists)
    if (sequence == 0) & (part == 0) & (first_head == 0):
        tl.store(work_ptr, tl.sum(total, 0) * heads)


@triton.jit
def mark_beside(
    sequence, parts, beside_ptr, heads, lead, cu_seqlens_q, seqlens_k, batch, rows_together,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Mark the heads of a sequence that can be prepared while tiles `lead` entries earlier run (hopper/preparing.py).

    A head can be if the heads that are walked together with it have at most `lead` entries, and at least `lead` entries
    come before them. A head has two words: this mark, and a count that starts at 0.
    """
    most = parts * (LISTED_BLOCKS * BLOCK)
    lengths = lengths_at(sequence, sequence >= 0, cu_seqlens_q, seqlens_k, most, OF_KEYS, IS_PAGED)
    own = blocks_of(lengths, BLOCK, OF_KEYS)
    passed = own[2]
    room = heads_together(passed, rows_together, BLOCK)
    group_size = tl.maximum(room // heads, 1)
    ahead_of = tl.zeros([COMPARED], tl.int32)
    alongside = tl.zeros([COMPARED], tl.int32)
    behind = tl.zeros([COMPARED], tl.int32)
    for first in range(0, batch, COMPARED):
        others = first + tl.arange(0, COMPARED)
        inside = others < batch
        others_lengths = lengths_at(others, inside, cu_seqlens_q, seqlens_k, most, OF_KEYS, IS_PAGED)
        others_own = blocks_of(others_lengths, BLOCK, OF_KEYS)
        counts = tl.where(inside, others_own[0], 0)
        alike = others_own[2] == passed
        ahead = (others_own[2] > passed) | (alike & (others // group_size < sequence // group_size))
        together = alike & (others // group_size == sequence // group_size)
        ahead_of += tl.where(ahead, counts, 0)
        alongside += tl.where(together, counts, 0)
        behind += tl.where(ahead | together, 0, counts)
    before, companions = tl.sum(ahead_of, 0), tl.sum(alongside, 0)
    wave = wave_of(room, tl.sum(behind, 0), heads)
    for first in range(0, heads, COMPARED):
        head = first + tl.arange(0, COMPARED)
        first_head = head // wave * wave
        fits = companions * tl.minimum(wave, heads - first_head) <= lead
        late = before * heads + first_head * own[0] >= lead
        at = beside_ptr + (sequence * heads + head) * 2
        tl.store(at, ((own[0] > 0) & fits & late).to(tl.int32), mask=head < heads)
        tl.store(at + 1, head * 0, mask=head < heads)


@triton.jit(
    do_not_specialize=["batch", "parts", "rows_together", "totals", "widths", "num_heads", "heads", "shares", "lead"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seqlens_k", "q_rows_ptr", "lse_ptr", "k_rows_ptr", "v_rows_ptr"],
)
def list_blocks_kernel(
    work_ptr, cu_seqlens_q, seqlens_k, q_rows_ptr, lse_ptr, k_rows_ptr, v_rows_ptr, batch, parts, rows_together,
    totals, widths, num_heads, beside_ptr, heads, shares, lead,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """List the blocks of BLOCK queries (keys); write zeros into rows past the last sequence, -inf into their lse.

    Programs: at least batch x parts of a sequence's blocks x shares of its heads; all programs share the clearing.
    seqlens_k is cu_seqlens_k, or the lengths of paged keys. rows_together: rows of equally long sequences walked
    together, 0 without a causal mask. totals are of (queries, keys), widths of (queries, keys, values); a tensor that
    is None is not cleared. beside_ptr: see mark_beside, or None. heads: 1 where an entry is for all heads.
    """
    program = tl.program_id(0)
    if beside_ptr is not None:  # noqa: SIM102  (resolved at compile time)
        if program < batch:
            mark_beside(
                program, parts, beside_ptr, heads, lead, cu_seqlens_q, seqlens_k, batch, rows_together,
                BLOCK, OF_KEYS, IS_PAGED)  # fmt: skip
    if program < batch * parts * shares:
        item = program // shares
        list_blocks(
            item // parts, item % parts, parts, work_ptr, cu_seqlens_q, seqlens_k, batch, rows_together,
            BLOCK, OF_KEYS, IS_PAGED, program % shares, shares, heads)  # fmt: skip
    if q_rows_ptr is not None:
        clear_rows(q_rows_ptr, lse_ptr, tl.load(cu_seqlens_q + batch), totals[0], num_heads, widths[0])
    if k_rows_ptr is not None:
        clear_rows(k_rows_ptr, None, tl.load(seqlens_k + batch), totals[1], num_heads, widths[1])
        clear_rows(v_rows_ptr, None, tl.load(seqlens_k + batch), totals[1], num_heads, widths[2])


@triton.jit
def listed_item(work, num_blocks, num_heads, heads_per_wave, DIRECT: tl.constexpr = False):
    """(block, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k) of this program. There is one program for each
    head and each of the `num_blocks` entries that fit into the list; past the list's end all lengths are 0.

    DIRECT: program ids are (head within its wave, entry, wave), so no division is needed.
    """
    if DIRECT:
        head = tl.program_id(2) * heads_per_wave + tl.program_id(0)
        place = tl.program_id(1)
    else:
        pid = tl.program_id(0)
        wave_programs = heads_per_wave * num_blocks
        first_head = pid // wave_programs * heads_per_wave
        wave_heads = tl.minimum(heads_per_wave, num_heads - first_head)
        rank = pid % wave_programs
        place = rank // wave_heads
        head = first_head + rank % wave_heads
    entry = work + (1 + place) * ENTRY_WORDS
    # Issue all loads together. Entries that were never written are read, but not used.
    count = tl.load(work)
    block = tl.load(entry + 1)
    batch_idx = tl.load(entry + 3)
    q_start = tl.load(entry + 4)
    seqlen_q = tl.load(entry + 5)
    k_start = tl.load(entry + 6)
    seqlen_k = tl.load(entry + 7)
    exists = place < count
    if DIRECT:  # the last wave may have fewer heads than the grid
        exists = exists & (head < num_heads)
    block = tl.where(exists, block, 0)
    batch_idx = tl.where(exists, batch_idx, 0)
    q_start = tl.where(exists, q_start, 0)
    seqlen_q = tl.where(exists, seqlen_q, 0)
    k_start = tl.where(exists, k_start, 0)
    seqlen_k = tl.where(exists, seqlen_k, 0)
    return block, head, batch_idx, q_start, seqlen_q, k_start, seqlen_k


# At least so many programs, which share the clearing of rows past the last sequence.
CLEARING_PROGRAMS = 132
# With few sequences, up to so many programs list their heads in parallel. Every program compares its sequence with all
# others, so with many sequences each has only one.
LISTING_PROGRAMS = 512
# A wave of heads should have so many tiles of the longest sequence, or the last wave ends late.
BUSY_TILES = 512
# Sequences of equal length are walked together if what streams past their blocks fits into so much of the 50 MiB of L2.
LIST_L2_BYTES = 32 << 20


def most_blocks(total: int, block: int, batch: int) -> int:
    """The most blocks that `batch` sequences with `total` rows together can have: each may end in a partial block.

    >>> most_blocks(300, 128, 2), most_blocks(2, 128, 2)
    (4, 2)
    """
    return total // block + batch


def heads_per_wave(heads: int, blocks: int, head_bytes: int) -> int:
    """Heads of a wave, in equal waves: as many as fit into L2, but enough for all SMs.

    `blocks`: of the longest sequence; `head_bytes`: what streams past the blocks of a head.

    >>> [heads_per_wave(h, b, m << 20) for h, b, m in ((16, 32, 2), (16, 128, 8), (24, 512, 2))]
    [16, 4, 12]
    """
    most = largest(LIST_L2_BYTES // head_bytes, -(-BUSY_TILES // blocks))
    waves = -(-heads // most)
    return -(-heads // waves)


def rows_together(row_bytes: int, heads: int, *, banded: bool) -> int:
    """How many rows of equally long sequences are walked together, for so many heads; 0 (none) without a mask.

    >>> rows_together(512, 16, banded=True)
    4096
    """
    return LIST_L2_BYTES // (row_bytes * heads) if banded else 0


def listed_parts(longest: int, block: int) -> int:
    """Programs that list one sequence of the maximum length; at least one, which writes the number of entries.

    >>> listed_parts(4097, 128), listed_parts(0, 128)
    (2, 1)
    """
    return largest(1, -(-longest // (block * int(LISTED_BLOCKS))))


def list_size(blocks: int) -> int:
    """Words of a list of so many blocks."""
    return (1 + blocks) * int(ENTRY_WORDS)


def list_allocation(blocks: int) -> Allocation:
    """The workspace of a list."""
    return Allocation.contiguous((list_size(blocks),), torch.int32)


def list_call(
    problem: AttentionProblem,
    work: Address,
    block: int,
    *,
    together: int,
    of_keys: bool = False,
    cleared: tuple[str | None, str | None, str | None, str | None] = (None, None, None, None),
    heads: int = 1,
    beside: tuple[Address, int] | None = None,
) -> KernelCall:
    """List the blocks of queries (of keys) at `work`: one entry for all heads, or with `heads` > 1 one for each head.

    Equally long sequences are walked together up to `together` keys (queries), see `rows_together`. `cleared` names the
    tensors whose rows past the last sequence are cleared: query rows, their lse, and two tensors of key rows. `beside`:
    (address, lead) for work_list.mark_beside, which marks the heads that can be prepared `lead` entries ahead.
    """
    parts = listed_parts(problem.seqlen_k if of_keys else problem.seqlen_q, block)
    shares = _shares(heads, problem.batch * parts)
    dtypes = (problem.dtype, torch.float32, problem.dtype, problem.dtype)
    rows = [name and Address(name, dtype, aligned=False) for name, dtype in zip(cleared, dtypes, strict=True)]
    paged = problem.page_size is not None
    arguments = {
        "work_ptr": work,
        "cu_seqlens_q": Address("cu_seqlens_q", torch.int32, aligned=False),
        "seqlens_k": Address("seqlens_k" if paged else "cu_seqlens_k", torch.int32, aligned=False),
        **dict(zip(("q_rows_ptr", "lse_ptr", "k_rows_ptr", "v_rows_ptr"), rows, strict=True)),
        "batch": problem.batch,
        "parts": parts,
        "rows_together": together,
        "totals": (problem.total_q, problem.total_k),
        "widths": _widths(problem, cleared[1] is not None),
        "num_heads": problem.num_heads,
        "heads": heads,
        "shares": shares,
        **dict(zip(("beside_ptr", "lead"), beside or (None, 0), strict=True)),
        "BLOCK": block,
        "OF_KEYS": of_keys,
        "IS_PAGED": paged,
    }
    return KernelCall(list_blocks_kernel, (_programs(problem.batch * parts * shares), 1, 1), arguments)


def _shares(heads: int, programs: int) -> int:
    """Programs that list the heads of one sequence in parallel."""
    return largest(1, smallest(heads, LISTING_PROGRAMS // largest(programs, 1)))


def _programs(listing: int) -> int:
    return largest(listing, CLEARING_PROGRAMS)


def _widths(problem: AttentionProblem, forward: bool) -> tuple[int, int, int]:
    """Elements of a row of out or dq, dk, dv."""
    keys = problem.num_kv_heads
    width = problem.head_dim_v if forward else problem.head_dim
    return problem.num_heads * width, keys * problem.head_dim, keys * problem.head_dim_v


BLOCK = tl.constexpr(1024)


@triton.jit
def clear_rows(rows_ptr, lse_ptr, begin, total, num_heads, row_width):
    """Zeros in rows begin .. total-1 of (total, row_width), -inf in lse (num_heads, total); programs share the rows."""
    for row in range(begin + tl.program_id(0), total, tl.num_programs(0)):
        for first in range(0, row_width, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            at = rows_ptr + tl.cast(row, tl.int64) * row_width + cols
            tl.store(at, tl.zeros([BLOCK], rows_ptr.dtype.element_ty), mask=cols < row_width)
        if lse_ptr is not None:
            for first in range(0, num_heads, BLOCK):
                heads = first + tl.arange(0, BLOCK)
                at = lse_ptr + heads.to(tl.int64) * total + row
                tl.store(at, tl.zeros([BLOCK], tl.float32) - float("inf"), mask=heads < num_heads)


@triton.jit(
    do_not_specialize=["batch", "total", "num_heads", "row_width"],
    do_not_specialize_on_alignment=["rows_ptr", "lse_ptr", "cu_seqlens"],
)
def clear_tail_kernel(rows_ptr, lse_ptr, cu_seqlens, batch, total, num_heads, row_width):
    """Zeros in rows cu_seqlens[batch] .. total-1 of (total, row_width), -inf in lse (num_heads, total)."""
    clear_rows(rows_ptr, lse_ptr, tl.load(cu_seqlens + batch), total, num_heads, row_width)
