"""Packed sequences, block by block: a small kernel lists them for the persistent kernels, on the device.

Only the device knows the lengths. A grid made for the longest sequence would be mostly empty (16 sequences of 7 to 4096
tokens: 6096 of 8192 tiles, 45 us of taking and skipping in a forward of 260), so the blocks that exist are listed: one
entry for a block of a sequence, for all heads. What an entry holds is said in schedule.LIST_WORDS; the first entry's
place holds the number of entries. Every program computes where its entries belong from cu_seqlens alone, so none waits
for another one.

Order. Under a causal mask heavy blocks come first within a chunk of sequences whose rows fit into L2, for all heads of
a wave; without one, blocks of long sequences come first. The last tiles are light ones either way.

Rows past the last sequence belong to no block: the same launch clears them.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, RET505

import triton
import triton.language as tl

from tilewise.backends.hopper.tails import clear_rows

__all__ = ["ENTRY_WORDS", "LISTED_BLOCKS", "list_blocks_kernel"]

# As schedule.LIST_WORDS.
ENTRY_WORDS = tl.constexpr(8)
# Blocks that a program lists, and sequences it compares them with at a time.
LISTED_BLOCKS, COMPARED = tl.constexpr(32), tl.constexpr(64)


@triton.jit
def lengths_at(sequences, inside, cu_seqlens_q, seqlens_k, IS_PAGED: tl.constexpr):
    """(first query row, query rows, first key row, keys) of sequences; paged keys have lengths only."""
    q_first = tl.load(cu_seqlens_q + sequences, mask=inside, other=0)
    q_rows = tl.load(cu_seqlens_q + sequences + 1, mask=inside, other=0) - q_first
    if IS_PAGED:
        return q_first, q_rows, sequences * 0, tl.load(seqlens_k + sequences, mask=inside, other=0)
    else:
        k_first = tl.load(seqlens_k + sequences, mask=inside, other=0)
        return q_first, q_rows, k_first, tl.load(seqlens_k + sequences + 1, mask=inside, other=0) - k_first


@triton.jit
def blocks_of(
    sequences, lengths, chunk_rows, seqlen_k, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_PAGED: tl.constexpr
):
    """(number of blocks, weight of the lightest, chunk) of sequences; a block weighs one more than the lighter one.

    The lightest block of queries is the first one, that of keys the last one. A sequence belongs to the chunk in which
    the rows begin that its blocks stream.
    """
    q_first, q_rows, k_first, keys = lengths
    query_blocks = (q_rows + BLOCK - 1) // BLOCK
    key_blocks = (keys + BLOCK - 1) // BLOCK
    if OF_KEYS:
        return key_blocks, sequences * 0, q_first // chunk_rows
    else:
        begin = sequences * seqlen_k if IS_PAGED else k_first
        return query_blocks, key_blocks - query_blocks, begin // chunk_rows


@triton.jit
def list_blocks(
    sequence, part, work_ptr, cu_seqlens_q, seqlens_k, batch, seqlen_k, chunk_rows,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_BANDED: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Write LISTED_BLOCKS entries of a sequence where they belong; the first program also writes their number."""
    everywhere = sequence >= 0
    lengths = lengths_at(sequence, everywhere, cu_seqlens_q, seqlens_k, IS_PAGED)
    count, lightest, chunk = blocks_of(sequence, lengths, chunk_rows, seqlen_k, BLOCK, OF_KEYS, IS_PAGED)
    streamed = lengths[1] if OF_KEYS else lengths[3]
    ranks = part * LISTED_BLOCKS + tl.arange(0, LISTED_BLOCKS)  # from the lightest block on
    weights = (lightest + ranks)[:, None]
    place = tl.zeros([LISTED_BLOCKS], tl.int32)
    total = tl.zeros([COMPARED], tl.int32)
    for first in range(0, batch, COMPARED):
        others = first + tl.arange(0, COMPARED)
        inside = others < batch
        other_lengths = lengths_at(others, inside, cu_seqlens_q, seqlens_k, IS_PAGED)
        counts, floors, chunks = blocks_of(others, other_lengths, chunk_rows, seqlen_k, BLOCK, OF_KEYS, IS_PAGED)
        counts = tl.where(inside, counts, 0)
        total += counts
        if IS_BANDED:
            rank = weights - floors[None, :]  # of a block that weighs as much
            ahead = tl.minimum(tl.maximum(counts[None, :] - 1 - rank, 0), counts[None, :])
            ahead += ((others < sequence)[None, :] & (rank >= 0) & (rank < counts[None, :])).to(tl.int32)
            ahead = tl.where((chunks == chunk)[None, :], ahead, tl.where(chunks < chunk, counts, 0)[None, :])
            place += tl.sum(ahead, 1)
        else:
            other_streamed = other_lengths[1] if OF_KEYS else other_lengths[3]
            longer = (other_streamed > streamed) | ((other_streamed == streamed) & (others < sequence))
            place += tl.sum(tl.where(longer, counts, 0), 0)
    blocks = ranks
    if OF_KEYS:
        blocks = count - 1 - ranks
    if not IS_BANDED:
        place += ranks
    entry = work_ptr + (place + 1) * ENTRY_WORDS
    exists = ranks < count
    tl.store(entry + 1, blocks, mask=exists)
    tl.store(entry + 3, ranks * 0 + sequence, mask=exists)
    tl.store(entry + 4, ranks * 0 + lengths[0], mask=exists)
    tl.store(entry + 5, ranks * 0 + lengths[1], mask=exists)
    tl.store(entry + 6, ranks * 0 + lengths[2], mask=exists)
    tl.store(entry + 7, ranks * 0 + lengths[3], mask=exists)
    if (sequence == 0) & (part == 0):
        tl.store(work_ptr, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["batch", "parts", "seqlen_k", "chunk_rows", "totals", "widths", "num_heads"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seqlens_k", "q_rows_ptr", "lse_ptr", "k_rows_ptr", "v_rows_ptr"],
)
def list_blocks_kernel(
    work_ptr, cu_seqlens_q, seqlens_k, q_rows_ptr, lse_ptr, k_rows_ptr, v_rows_ptr, batch, parts, seqlen_k, chunk_rows,
    totals, widths, num_heads,
    BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, IS_BANDED: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """List the blocks of BLOCK queries (keys); zero rows past the last sequence, -inf in their lse.

    Programs: at least batch x parts of a sequence's blocks; all together clear. seqlens_k is cu_seqlens_k, or the
    lengths of paged keys; totals and widths are of (queries, keys, values), a tensor that is None is not cleared.
    """
    program = tl.program_id(0)
    if program < batch * parts:
        list_blocks(
            program // parts, program % parts, work_ptr, cu_seqlens_q, seqlens_k, batch, seqlen_k, chunk_rows,
            BLOCK, OF_KEYS, IS_BANDED, IS_PAGED)  # fmt: skip
    if q_rows_ptr is not None:
        clear_rows(q_rows_ptr, lse_ptr, tl.load(cu_seqlens_q + batch), totals[0], num_heads, widths[0])
    if k_rows_ptr is not None:
        clear_rows(k_rows_ptr, None, tl.load(seqlens_k + batch), totals[1], num_heads, widths[1])
        clear_rows(v_rows_ptr, None, tl.load(seqlens_k + batch), totals[1], num_heads, widths[2])
