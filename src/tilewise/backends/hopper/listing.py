"""The host's side of work_list.py: how many blocks packed sequences can have, and the call that lists them."""

from __future__ import annotations

import torch

from tilewise.backends.gpu.launching import Allocation
from tilewise.backends.gpu.symbols import Address, KernelCall
from tilewise.backends.hopper.work_list import ENTRY_WORDS, LISTED_BLOCKS, list_blocks_kernel
from tilewise.problem import AttentionProblem

__all__ = ["list_allocation", "list_call", "list_size", "most_blocks"]

# At least so many programs, to share the rows past the last sequence.
CLEARING_PROGRAMS = 132


def most_blocks(total: int, block: int, batch: int) -> int:
    """Blocks that `batch` sequences of `total` rows in all can have: every one may end in a block that is not full.

    >>> most_blocks(300, 128, 2), most_blocks(2, 128, 2)
    (4, 2)
    """
    return total // block + batch


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
    chunk_rows: int,
    banded: bool,
    of_keys: bool = False,
    cleared: tuple[str | None, str | None, str | None, str | None] = (None, None, None, None),
) -> KernelCall:
    """List the blocks of queries (of keys) at `work`; `cleared` names what has rows past the last sequence.

    These are rows of queries and their lse, and two tensors of rows of keys.
    """
    longest = problem.seqlen_k if of_keys else problem.seqlen_q
    parts = -(-longest // (block * int(LISTED_BLOCKS)))
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
        "seqlen_k": problem.seqlen_k,
        "chunk_rows": chunk_rows,
        "totals": (problem.total_q, problem.total_k),
        "widths": _widths(problem, cleared[1] is not None),
        "num_heads": problem.num_heads,
        "BLOCK": block,
        "OF_KEYS": of_keys,
        "IS_BANDED": banded,
        "IS_PAGED": paged,
    }
    return KernelCall(list_blocks_kernel, (max(problem.batch * parts, CLEARING_PROGRAMS), 1, 1), arguments)


def _widths(problem: AttentionProblem, forward: bool) -> tuple[int, int, int]:
    """Elements of a row of out or dq, dk, dv."""
    keys = problem.num_kv_heads
    width = problem.head_dim_v if forward else problem.head_dim
    return problem.num_heads * width, keys * problem.head_dim, keys * problem.head_dim_v
