"""Validates the contents of index tensors: free on a CPU, a device synchronisation on a GPU."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.operands import Lengths, Operands
from tilewise.totals import checked_longest

if TYPE_CHECKING:
    # numpy.typing is slow to import.
    from numpy.typing import NDArray


def longest_sequences(operands: Operands, lengths: Lengths) -> Lengths:
    """The bounds on lengths (in the order of `operands.LENGTHS`), with the longest lengths where the caller left them
    open. Checks running totals, and the bounds that were given.
    """
    totals = [None if t is None else t.tolist() for t in (operands.cu_seqlens_q, operands.cu_seqlens_k)]
    return longest_within(totals, (operands.q.shape[0], operands.k.shape[0]), lengths)


def longest_within(totals: Sequence[Sequence[int] | None], rows: tuple[int, int], lengths: Lengths) -> Lengths:
    """`longest_sequences`, given the running totals and the rows that they may count."""
    (of_q, of_k), (given_q, given_k, *others) = totals, lengths
    longest_q = given_q if of_q is None else checked_longest("max_seqlen_q", "cu_seqlens_q", of_q, rows[0], given_q)
    longest_k = given_k if of_k is None else checked_longest("max_seqlen_k", "cu_seqlens_k", of_k, rows[1], given_k)
    return Lengths(longest_q, longest_k, *others)


def check_values(operands: Operands) -> None:
    """Check lengths and page numbers of a paged problem: everything read must exist."""
    if operands.block_table is None:
        return
    assert operands.seqlens_k is not None
    # As arrays, because comparing element by element in Python is several times slower.
    lengths = operands.seqlens_k.cpu().numpy()
    num_pages, page_size = operands.k.shape[:2]
    seqlen_k = operands.block_table.shape[1] * page_size
    if _all_within(lengths, operands.block_table, seqlen_k, page_size, num_pages):
        return
    for index in np.nonzero((lengths < 0) | (lengths > seqlen_k))[0].tolist():
        expected = f"lengths between 0 and max_pages * page_size = {seqlen_k}"
        # flash-attn's caches without a table are pages here, too.
        fix = "Give the sequence more pages in block_table, or a longer cache if there is no table."
        if lengths[index] < 0:
            fix = "A sequence without keys has length 0; its row of out is 0."
        raise InvalidProblem("seqlens_k", expected, f"{lengths[index]} at sequence {index}", fix)
    used = -(-lengths // page_size)
    # Only the columns in use: a table sized for the longest context would otherwise be read whole in every call.
    table = operands.block_table[:, : int(used.max(initial=0))].cpu().numpy()
    bad = ((table < 0) | (table >= num_pages)) & (np.arange(table.shape[1]) < used[:, None])
    for index in np.nonzero(bad.any(1))[0].tolist():
        expected = f"page numbers below num_pages = {num_pages}, none negative, for every page in use"
        fix = "Entries past the sequence's last page may be anything; this one is read."
        raise InvalidProblem("block_table", expected, f"{table[index][bad[index]][0]} at sequence {index}", fix)


def pages_in_use(operands: Operands, keys: Sequence[int]) -> tuple[int, bytes]:
    """How many columns of a block table on a CPU are read by sequences of these lengths, and what they hold. Raises as
    `check_values` does.
    """
    table = operands.block_table
    assert table is not None
    num_pages, page_size = operands.k.shape[:2]
    longest = max(keys, default=0)
    if min(keys, default=0) < 0 or longest > table.shape[1] * page_size:
        check_values(operands)
    columns = -(-longest // page_size)
    entries = first_columns(table, columns)
    # As numbers without a sign, of which negative ones are the largest.
    if max(array("I" if table.element_size() == 4 else "Q", entries), default=0) >= num_pages:
        check_values(operands)
    return columns, entries


def first_columns(table: Tensor, count: int) -> bytes:
    """What a matrix on a CPU holds in its first columns."""
    held: bytes = table.numpy()[:, :count].tobytes()
    return held


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
