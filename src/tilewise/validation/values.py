"""Validates the contents of index tensors: free on a CPU, a device synchronisation on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.operands import Flags, Operands
from tilewise.problem import AttentionProblem
from tilewise.totals import check_totals, longest_of

if TYPE_CHECKING:
    # numpy.typing is slow to import.
    from numpy.typing import NDArray


def longest_sequences(operands: Operands, flags: Flags) -> Flags:
    """Fill in the longest lengths that the caller left open, and check those that were given."""
    return flags._replace(
        max_seqlen_q=_longest("q", operands.cu_seqlens_q, operands.q.shape[0], flags.max_seqlen_q),
        max_seqlen_k=_longest("k", operands.cu_seqlens_k, operands.k.shape[0], flags.max_seqlen_k),
    )


def check_values(problem: AttentionProblem, operands: Operands) -> None:
    """Check lengths and page numbers of a paged problem: everything read must exist."""
    if problem.kind != "paged":
        return
    assert operands.seqlens_k is not None
    assert operands.block_table is not None
    assert problem.page_size is not None
    # As arrays, because comparing element by element in Python is several times slower.
    lengths = operands.seqlens_k.cpu().numpy()
    num_pages = operands.k.shape[0]
    if _all_within(lengths, operands.block_table, problem.seqlen_k, problem.page_size, num_pages):
        return
    for index in np.nonzero((lengths < 0) | (lengths > problem.seqlen_k))[0].tolist():
        expected = f"lengths between 0 and max_pages * page_size = {problem.seqlen_k}"
        # flash-attn's caches without a table are pages here, too.
        fix = "Give the sequence more pages in block_table, or a longer cache if there is no table."
        if lengths[index] < 0:
            fix = "A sequence without keys has length 0; its row of out is 0."
        raise InvalidProblem("seqlens_k", expected, f"{lengths[index]} at sequence {index}", fix)
    used = -(-lengths // problem.page_size)
    # Only the columns in use: a table sized for the longest context would otherwise be read whole in every call.
    table = operands.block_table[:, : int(used.max(initial=0))].cpu().numpy()
    bad = ((table < 0) | (table >= num_pages)) & (np.arange(table.shape[1]) < used[:, None])
    for index in np.nonzero(bad.any(1))[0].tolist():
        expected = f"page numbers below num_pages = {num_pages}, none negative, for every page in use"
        fix = "Entries past the sequence's last page may be anything; this one is read."
        raise InvalidProblem("block_table", expected, f"{table[index][bad[index]][0]} at sequence {index}", fix)


def pages_in_use(problem: AttentionProblem, operands: Operands) -> int:
    """Columns of the block table up to the last page of the longest sequence."""
    assert operands.seqlens_k is not None
    assert problem.page_size is not None
    return -(-int(operands.seqlens_k.numpy().max(initial=0)) // problem.page_size)


def _all_within(lengths: NDArray[np.integer], table: Tensor, seqlen_k: int, page_size: int, num_pages: int) -> bool:
    """Whether everything is in range, entries past a sequence's last page too. A few reductions: serving pays for it in
    every layer.
    """
    if not len(lengths):
        return True
    longest = int(lengths.max())
    if int(lengths.min()) < 0 or longest > seqlen_k:
        return False
    columns = -(-longest // page_size)
    if not columns:
        return True
    entries = table[:, :columns].cpu().numpy()
    return bool(entries.min() >= 0 and entries.max() < num_pages)


def _longest(side: str, cu_seqlens: Tensor | None, total: int, given: int | None) -> int | None:
    if cu_seqlens is None:
        return given
    name = f"cu_seqlens_{side}"
    entries = cu_seqlens.tolist()
    check_totals(name, entries, total)
    return longest_of(f"max_seqlen_{side}", name, entries, given)
