"""The longest sequences that the kernels' 32-bit index arithmetic can handle."""

from __future__ import annotations

from tilewise.problem import AttentionProblem

# Kernels add both lengths, a window of at most that size and the rows of a tile; TMA coordinates of packed rows start
# at 2^30. With this limit all of these stay below 2^31.
MAX_ROWS = 2**29


def too_long(problem: AttentionProblem) -> str | None:
    """Why a problem's sequences are too long; None if they are not."""
    for name, rows in (("seqlen_q", problem.seqlen_q), ("seqlen_k", problem.seqlen_k)):
        if rows > MAX_ROWS:
            hint = f" (max_{name} is the length of the longest sequence)" if problem.kind == "varlen" else ""
            return f"{name} {rows} is over {MAX_ROWS}, what 32-bit positions take{hint}"
    return None
