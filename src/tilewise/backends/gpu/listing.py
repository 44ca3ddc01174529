"""The host's side of work_list.py: how many blocks packed sequences can have, and the call that lists them.

Figures: bench/results/gpu-host-choices.csv, by name.
"""

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
    most = max(LIST_L2_BYTES // head_bytes, -(-BUSY_TILES // blocks))
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
    return max(1, -(-longest // (block * int(LISTED_BLOCKS))))


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
