"""The host's side of work_list.py: how many blocks packed sequences can have, and the call that lists them."""

from __future__ import annotations

import torch

from tilewise.backends.gpu.launching import Allocation
from tilewise.backends.gpu.symbols import Address, KernelCall
from tilewise.backends.gpu.work_list import ENTRY_WORDS, LISTED_BLOCKS, list_blocks_kernel
from tilewise.problem import AttentionProblem

__all__ = [
    "heads_per_wave",
    "list_allocation",
    "list_call",
    "list_size",
    "listed_parts",
    "most_blocks",
    "rows_together",
]

# At least so many programs, to share the rows past the last sequence.
CLEARING_PROGRAMS = 132
# At most so many programs for the heads of few sequences, which would else be listed one after the other (of 16 4 us of
# 7). Every one compares its sequence with all others, so that many sequences have one each.
LISTING_PROGRAMS = 512
# Tiles that a wave of heads should have of the longest sequence, or the last wave ends late: backward, 16 sequences of
# 7 to 4096 tokens, 8 of 16 heads a wave 419 TFLOP/s, all 16 (512 tiles) 426.
BUSY_TILES = 512
# What passes by the blocks of sequences of one length that are walked together, in this much of the 50 MiB of L2.
# Forward, 16 x 1024 tokens, 24/32/40/48/64 MiB: 428/453/417/440/408 TFLOP/s; 7 x 2304: 561/563/547/548/538.
LIST_L2_BYTES = 32 << 20


def most_blocks(total: int, block: int, batch: int) -> int:
    """Blocks that `batch` sequences of `total` rows in all can have: every one may end in a block that is not full.

    >>> most_blocks(300, 128, 2), most_blocks(2, 128, 2)
    (4, 2)
    """
    return total // block + batch


def heads_per_wave(heads: int, blocks: int, head_bytes: int) -> int:
    """Heads whose blocks are walked together, in equal waves: as many as fit into L2, but enough for all SMs.

    `blocks` of the longest sequence; `head_bytes` pass by them.

    >>> [heads_per_wave(h, b, m << 20) for h, b, m in ((16, 32, 2), (16, 128, 8), (24, 512, 2))]
    [16, 4, 12]
    """
    most = max(LIST_L2_BYTES // head_bytes, -(-BUSY_TILES // blocks))
    waves = -(-heads // most)
    return -(-heads // waves)


def rows_together(row_bytes: int, heads: int, *, banded: bool) -> int:
    """Rows of sequences of one length that are walked together, for so many heads; 0, one by one, without a mask.

    >>> rows_together(512, 16, banded=True)
    4096
    """
    return LIST_L2_BYTES // (row_bytes * heads) if banded else 0


def listed_parts(longest: int, block: int) -> int:
    """Programs that list one sequence, for the longest there may be; at least the one that writes how many there are.

    >>> listed_parts(4097, 128), listed_parts(0, 128)
    (2, 1)
    """
    return max(1, -(-longest // (block * int(LISTED_BLOCKS))))


def list_size(blocks: int) -> int:
    """Words of a list of so many blocks."""
    return (1 + blocks) * int(ENTRY_WORDS)


def list_allocation(blocks: int) -> Allocation:
    """Room for a list."""
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
    """List the blocks of queries (of keys) at `work`, for all heads or, if there are several, for each.

    Sequences of one length are walked together up to `together` keys (queries), see `rows_together`. `cleared` names
    what has rows past the last sequence: rows of queries and their lse, and two tensors of rows of keys. `beside`:
    where it is said which heads of which sequences may be made ready while blocks so many entries earlier run.
    """
    parts = listed_parts(problem.seqlen_k if of_keys else problem.seqlen_q, block)
    shares = max(1, min(heads, LISTING_PROGRAMS // max(problem.batch * parts, 1)))
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
    return KernelCall(list_blocks_kernel, (max(problem.batch * parts * shares, CLEARING_PROGRAMS), 1, 1), arguments)


def _widths(problem: AttentionProblem, forward: bool) -> tuple[int, int, int]:
    """Elements of a row of out or dq, dk, dv."""
    keys = problem.num_kv_heads
    width = problem.head_dim_v if forward else problem.head_dim
    return problem.num_heads * width, keys * problem.head_dim, keys * problem.head_dim_v
