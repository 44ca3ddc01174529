"""Argument names of other libraries: refused with an error that gives the name used here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from tilewise.arguments import ARGUMENTS, EVERY, EXPLAIN, Argument
from tilewise.errors import UnexpectedArgument


def _listed(row: Argument) -> str:
    """The calls that take an argument; `explain` where it is the only one."""
    calls = [call for call in row.calls if call != EXPLAIN] or [EXPLAIN]
    return " and ".join(filter(None, (", ".join(calls[:-1]), calls[-1])))


# Foreign names and what to write here: those in the table of arguments, and those that need no argument.
MEANT = {
    "enable_gqa": "no argument: q may have more heads than k and v",
    "need_weights": "no argument: weights are never computed; tilewise.nn.MultiheadAttention returns them",
    "num_splits": "no argument: the backend splits keys where that is faster",
} | {name: meant or f"{row.name}=" for row in ARGUMENTS for name, meant in row.foreign.items()}
# Arguments that only some calls take.
ELSEWHERE = {row.name: f"taken by {_listed(row)}{row.elsewhere}" for row in ARGUMENTS if row.calls != EVERY}


def unexpected(function: Callable[..., Any], names: Iterable[str]) -> UnexpectedArgument:
    """The error for keyword arguments that a function does not take. It names the first one."""
    taken = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
    name = next(iter(names))
    if name in MEANT:
        fix = f"Here it is {MEANT[name]}."
    elif name in ELSEWHERE:
        fix = f"It is {ELSEWHERE[name]}."
    else:
        close = difflib.get_close_matches(name, taken, 1)
        fix = f"Did you mean {close[0]}=?" if close else "docs/contract.md says what each of them does."
    return UnexpectedArgument(name, f"an argument of {function.__name__} ({', '.join(taken)})", "another name", fix)
