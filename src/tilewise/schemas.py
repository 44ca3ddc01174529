"""The arguments of the `torch.library` ops, made from the table of arguments: operands, then flags."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from tilewise import arguments
from tilewise.operands import Flags, Operands
from tilewise.problem import Kind

# The operands of each op, and whether it needs them.
OPERANDS: dict[Kind, dict[str, bool]] = {
    "dense": arguments.operands_of("dense"),
    "varlen": arguments.operands_of("varlen"),
    "paged": arguments.operands_of("paged"),
}
_NAMES = {kind: list(operands) for kind, operands in OPERANDS.items()}
# Where each of all operands is among those of an op, and after them a None.
_PLACES = {
    kind: operator.itemgetter(*[names.index(name) if name in names else len(names) for name in Operands._fields])
    for kind, names in _NAMES.items()
}


def operand_names(kind: Kind) -> list[str]:
    """The operands of an op, in order."""
    return _NAMES[kind]


def unpack(kind: Kind, args: Sequence[Any]) -> tuple[Operands, Flags]:
    """Operands and flags from the arguments of an op."""
    count = len(_NAMES[kind])
    return Operands._make(_PLACES[kind]((*args[:count], None))), Flags(*args[count:])


def schema(kind: Kind) -> str:
    """The arguments of an op in torch.library's schema syntax."""
    operands = [f"Tensor{'' if needed else '?'} {name}" for name, needed in OPERANDS[kind].items()]
    return ", ".join([*operands, *[f"{kind} {name}" for name, kind in arguments.FLAGS.items()]])
