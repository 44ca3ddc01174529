"""Schedules of a matrix product: element by element, and in tiles, where each load is used `block` times."""

from __future__ import annotations

import itertools

from tilewise.simulator.events import ArraySpec, Workload
from tilewise.simulator.tape import Tape, blocks, key_blocks, length_of, row_blocks


def matmul_arrays(work: Workload) -> dict[str, ArraySpec]:
    """The product c (seqlen_q, seqlen_k) = a (seqlen_q, head_dim) b (head_dim, seqlen_k)."""
    return {
        "a": ArraySpec(work.seqlen_q, work.head_dim),
        "b": ArraySpec(work.head_dim, work.seqlen_k),
        "c": ArraySpec(work.seqlen_q, work.seqlen_k, fill="empty"),
    }


def matmul_naive(tape: Tape) -> None:
    """One element of c after the other, each from a row of a and a column of b."""
    work = tape.workload
    inner = 0, work.head_dim
    for row in range(work.seqlen_q):
        for col in range(work.seqlen_k):
            tape.at("product", row, col, part=0)
            tape.load("a", (row, row + 1), cols=inner)
            tape.load("b", inner, cols=(col, col + 1))
            tape.compute("init", "c", (), (1, 1))
            tape.update("product_sum", "c", ("a", "b"), (1, 1), inner=work.head_dim)
            tape.store("c", (row, row + 1), cols=(col, col + 1))
            tape.free("a", "b", "c")


def matmul(tape: Tape) -> None:
    """One tile of c after the other: it stays while tiles of a and b stream past."""
    work = tape.workload
    for (m_block, rows), (n_block, cols) in itertools.product(row_blocks(work), key_blocks(work)):
        shape = length_of(rows), length_of(cols)
        tape.at("setup", m_block, n_block)
        tape.compute("init", "c", (), shape)
        for part, inner in blocks(work.head_dim, work.block_k):
            tape.at("product", m_block, n_block, part=part)
            tape.load("a", rows, cols=inner)
            tape.load("b", inner, cols=cols)
            tape.update("product_sum", "c", ("a", "b"), shape, inner=length_of(inner))
            tape.free("a", "b")
        tape.at("finish", m_block, n_block)
        tape.store("c", rows, cols=cols)
        tape.free("c")
