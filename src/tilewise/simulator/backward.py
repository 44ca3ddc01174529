"""Schedules of the backward: five kernels on a stored P, and FA-2, which keeps q, k, v, out, lse and recomputes P."""

from __future__ import annotations

from tilewise.masks import TileKind
from tilewise.simulator.events import ArraySpec, Span, Workload
from tilewise.simulator.forward import attention_arrays
from tilewise.simulator.tape import Tape, key_blocks, length_of, row_blocks

# What the forward leaves for the backward.
KEPT = ("q", "k", "v", "out", "lse")
NAIVE_KEPT = ("q", "k", "v", "p")


def _gradient_arrays(work: Workload) -> dict[str, ArraySpec]:
    return {
        "dout": ArraySpec(work.seqlen_q, work.head_dim_v),
        "dq": ArraySpec(work.seqlen_q, work.head_dim, fill="empty"),
        "dk": ArraySpec(work.seqlen_k, work.head_dim, fill="empty"),
        "dv": ArraySpec(work.seqlen_k, work.head_dim_v, fill="empty"),
    }


def backward_arrays(work: Workload) -> dict[str, ArraySpec]:
    """What the forward kept, dout, delta, and dq while it is being summed."""
    kept = attention_arrays(work) | {
        "out": ArraySpec(work.seqlen_q, work.head_dim_v),
        "lse": ArraySpec(work.seqlen_q, 1, wide=True),
    }
    return (
        kept
        | _gradient_arrays(work)
        | {
            "delta": ArraySpec(work.seqlen_q, 1, wide=True, fill="empty"),
            "dq_sum": ArraySpec(work.seqlen_q, work.head_dim, wide=True, fill="zero"),
        }
    )


def naive_backward_arrays(work: Workload) -> dict[str, ArraySpec]:
    """P was kept; dP and dS are two more matrices."""
    matrix = ArraySpec(work.seqlen_q, work.seqlen_k, fill="empty")
    arrays = {name: spec for name, spec in attention_arrays(work).items() if name in ("q", "k", "v")}
    return arrays | _gradient_arrays(work) | {"p": ArraySpec(work.seqlen_q, work.seqlen_k), "dp": matrix, "ds": matrix}


def backward(tape: Tape) -> None:
    """delta; then K/V outside: dk, dv of a tile of keys stay in fast memory while the queries stream past."""
    work = tape.workload
    for m_block, rows in row_blocks(work):
        tape.at("delta", m_block)
        tape.load("out", rows)
        tape.load("dout", rows)
        tape.compute("delta", "delta", ("out", "dout"), (length_of(rows), 1))
        tape.store("delta", rows)
        tape.free("out", "dout", "delta")
    for n_block, keys in key_blocks(work):
        _key_tile(tape, n_block, keys)
    for m_block, rows in row_blocks(work):
        tape.at("round", m_block)
        tape.load("dq", rows, array="dq_sum")
        tape.store("dq", rows)
        tape.free("dq")


def _key_tile(tape: Tape, n_block: int, keys: Span) -> None:
    work = tape.workload
    tape.at("setup", n_block=n_block)
    tape.load("k", keys)
    tape.load("v", keys)
    tape.compute("init", "dk", (), (length_of(keys), work.head_dim))
    tape.compute("init", "dv", (), (length_of(keys), work.head_dim_v))
    for m_block, rows in row_blocks(work):
        kind = work.visible.tile_kind(m_block, n_block, work.grid)
        if kind is TileKind.SKIP:
            tape.skip(m_block, n_block, rows, keys)
        else:
            _gradient_tile(tape, m_block, n_block, rows, keys, masked=kind is TileKind.PARTIAL)
    tape.at("finish", n_block=n_block)
    tape.store("dk", keys)
    tape.store("dv", keys)
    tape.free("dk", "dv", "k", "v")


def _gradient_tile(tape: Tape, m_block: int, n_block: int, rows: Span, keys: Span, *, masked: bool) -> None:
    """Five products: S again, dV, dP, dK, dQ."""
    work = tape.workload
    shape = length_of(rows), length_of(keys)
    tape.at("recompute", m_block, n_block)
    for name in ("q", "dout", "lse", "delta"):
        tape.load(name, rows)
    tape.compute("scores", "s", ("q", "k"), shape, inner=work.head_dim)
    if masked:
        tape.compute("mask", "s", ("s",), shape, replaces="s", tokens=(rows, keys))
    tape.compute("probabilities", "p", ("s", "lse"), shape, replaces="s")
    tape.at("values", m_block, n_block)
    tape.update("dv", "dv", ("p", "dout"), (length_of(keys), work.head_dim_v), inner=length_of(rows))
    tape.compute("dp", "dp", ("dout", "v"), shape, inner=work.head_dim_v)
    tape.at("gradients", m_block, n_block)
    tape.load("dq", rows, array="dq_sum")
    tape.compute("ds", "ds", ("dp", "p", "delta"), shape, replaces="dp")
    tape.update("dk", "dk", ("ds", "q"), (length_of(keys), work.head_dim), inner=length_of(rows))
    tape.update("dq", "dq", ("ds", "k"), (length_of(rows), work.head_dim), inner=length_of(keys))
    tape.store("dq", rows, array="dq_sum")
    tape.free("p", "ds", "dq", "q", "dout", "lse", "delta")


def naive_backward(tape: Tape) -> None:
    """P, dO -> dV; dO, V -> dP; P, dP -> dS; dS, K -> dQ; dS, Q -> dK: seven crossings of a score matrix."""
    work, keys = tape.workload, tape.workload.seqlen_k

    def dp(_: int, rows: Span) -> None:
        tape.compute("dp", "dp", ("dout", "v"), (length_of(rows), keys), inner=work.head_dim_v)

    def ds(_: int, rows: Span) -> None:
        tape.compute("softmax_gradient", "ds", ("dp", "p"), (length_of(rows), keys), replaces="dp")

    def dq(_: int, rows: Span) -> None:
        tape.compute("init", "dq", (), (length_of(rows), work.head_dim))
        tape.update("dq", "dq", ("ds", "k"), (length_of(rows), work.head_dim), inner=keys)

    _naive_sum(tape, "dv", "p", "dout", work.head_dim_v)
    tape.kernel("dp", ("dout",), dp, "dp", ("dout", "dp"), resident="v")
    tape.kernel("ds", ("p", "dp"), ds, "ds", ("p", "ds"))
    tape.kernel("dq", ("ds",), dq, "dq", ("ds", "dq"), resident="k")
    _naive_sum(tape, "dk", "ds", "q", work.head_dim)


def _naive_sum(tape: Tape, target: str, matrix: str, operand: str, width: int) -> None:
    """One of dV += P^T dO and dK += dS^T Q: the sum stays while rows stream past."""
    work = tape.workload
    tape.at(target)
    tape.compute("init", target, (), (work.seqlen_k, width))
    for m_block, rows in row_blocks(work):
        tape.at(target, m_block, 0)
        tape.load(matrix, rows)
        tape.load(operand, rows)
        tape.update(target, target, (matrix, operand), (work.seqlen_k, width), inner=length_of(rows))
        tape.free(matrix, operand)
    tape.at(target)
    tape.store(target, (0, work.seqlen_k))
    tape.free(target)
