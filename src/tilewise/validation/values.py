"""Judges the contents of index tensors: free on a CPU, a device synchronisation on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from tilewise.errors import InvalidProblem
from tilewise.operands import Flags, Operands
from tilewise.problem import AttentionProblem

__all__ = ["check_values", "longest_sequences"]


def longest_sequences(operands: Operands, flags: Flags) -> Flags:
    """Fill in the longest lengths that the caller left open, and check the ones that were given."""
    return flags._replace(
        max_seqlen_q=_longest("q", operands.cu_seqlens_q, operands.q.shape[0], flags.max_seqlen_q),
        max_seqlen_k=_longest("k", operands.cu_seqlens_k, operands.k.shape[0], flags.max_seqlen_k),
    )


def check_values(problem: AttentionProblem, operands: Operands) -> None:
    """Lengths and page numbers of a paged problem; everything read must exist."""
    if problem.kind != "paged":
        return
    assert operands.seqlens_k is not None
    assert operands.block_table is not None
    assert problem.page_size is not None
    lengths = operands.seqlens_k.tolist()
    for index, length in enumerate(lengths):
        if not 0 <= length <= problem.seqlen_k:
            expected = f"lengths between 0 and max_pages * page_size = {problem.seqlen_k}"
            fix = "Give the sequence more pages in block_table."
            raise InvalidProblem("seqlens_k", expected, f"{length} at sequence {index}", fix)
    num_pages = operands.k.shape[0]
    # Only the columns in use: a table sized for the longest context would be converted whole at every call.
    columns = -(-max(lengths, default=0) // problem.page_size)
    table = operands.block_table[:, :columns].tolist()
    for index, (length, pages) in enumerate(zip(lengths, table, strict=True)):
        used = -(-length // problem.page_size)
        bad = next((page for page in pages[:used] if not 0 <= page < num_pages), None)
        if bad is not None:
            expected = f"page numbers below num_pages = {num_pages} for every page in use"
            fix = "Entries past the sequence's last page may be anything; this one is read."
            raise InvalidProblem("block_table", expected, f"{bad} at sequence {index}", fix)


def _longest(side: str, cu_seqlens: Tensor | None, total: int, given: int | None) -> int | None:
    if cu_seqlens is None:
        return given
    name = f"cu_seqlens_{side}"
    entries = cu_seqlens.tolist()
    _check_cumulative(name, entries, total)
    longest: int = max((stop - start for start, stop in itertools.pairwise(entries)), default=0)
    if given is not None and given < longest:
        fix = "Pass the longest length or more, or None."
        raise InvalidProblem(f"max_seqlen_{side}", f"at least {longest}, the longest in {name}", given, fix)
    return longest if given is None else given


def _check_cumulative(name: str, entries: Sequence[int], total: int) -> None:
    if entries[0] != 0:
        raise InvalidProblem(name, "0 as its first entry", entries[0], "Prepend the 0: it holds running totals.")
    for index, (start, stop) in enumerate(itertools.pairwise(entries)):
        if stop < start:
            got = f"{start} followed by {stop} at entry {index + 1}"
            raise InvalidProblem(name, "entries that never decrease", got, "Pass running totals, not lengths.")
    if entries[-1] > total:
        fix = "The last entry counts the packed rows in use."
        raise InvalidProblem(name, f"a last entry of at most {total}, the rows stored", entries[-1], fix)
