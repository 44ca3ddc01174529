"""The arguments of the `torch.library` ops: operands, then flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.operands import Flags, Operands
from tilewise.problem import Kind

# The operands of each op; a question mark marks an optional one.
_SCORES = "bias? mask? alibi_slopes? sinks? tiles? tile_bits? tile_lists?"
_SCALES = "q_scale? k_scale? v_scale?"
OPERANDS: dict[Kind, str] = {
    "dense": f"q k v {_SCORES} seed? {_SCALES}",
    "varlen": f"q k v cu_seqlens_q cu_seqlens_k {_SCORES} seed? {_SCALES}",
    "paged": f"q k v block_table seqlens_k cu_seqlens_q? {_SCORES} {_SCALES}",
}

# The flags, in the order of `Flags`.
FLAGS = (
    "bool causal, SymInt? window_left, SymInt? window_right, float? scale, float? softcap, float dropout, str layout, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, bool needs_grad, str backend, "
    "int? q_block, int? k_block, int? v_block, ScalarType? out_dtype, "
    "SymInt? mask_seqlen_q, SymInt? mask_seqlen_k, bool max_logits, "
    "bool batch_invariant"
)


def operand_names(kind: Kind) -> list[str]:
    """The operands of an op, in order."""
    return OPERANDS[kind].replace("?", "").split()


def unpack(kind: Kind, args: Sequence[Any]) -> tuple[Operands, Flags]:
    """Operands and flags from the arguments of an op."""
    names = operand_names(kind)
    return Operands(**dict(zip(names, args, strict=False))), Flags(*args[len(names) :])


def schema(kind: Kind) -> str:
    """The arguments of an op in torch.library's schema syntax."""
    operands = ", ".join(
        f"Tensor{'?' if n.endswith('?') else ''} {n.removesuffix('?')}" for n in OPERANDS[kind].split()
    )
    return f"{operands}, {FLAGS}"
