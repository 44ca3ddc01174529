"""The bodies of the public calls, made from the table of arguments.

The calls are written out in `api`, with signatures and docstrings. What each of them passes on follows from its
parameters: `with_body` compiles it once, at import, in place of OWN_ARGUMENTS.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from tilewise.arguments import ARGUMENTS, KINDS, ROWS, taken_by
from tilewise.operands import ATTENDED, LENGTHS, Operands, Options
from tilewise.problem import Kind

Function = TypeVar("Function", bound=Callable[..., Any])

# Stands for the arguments of the call in whose body it is, as `api._attend` takes them.
OWN_ARGUMENTS: tuple[Any, ...] = ()


def with_body(kind: Kind) -> Callable[[Function], Function]:
    """Compiles the body of a call. Its code is replaced, so nothing stands between the caller and the function."""

    def complete(function: Function) -> Function:
        code = function.__code__
        module = compile(source(kind, function.__name__, code), code.co_filename, "exec", dont_inherit=True)
        (function.__code__,) = [value for value in module.co_consts if isinstance(value, CodeType)]
        return function

    return complete


def source(kind: Kind, name: str, code: CodeType) -> str:
    """A call with the given name, as Python. Its statements are in the lines in which they are written, because
    tracebacks show those.
    """
    first, last = code.co_firstlineno, max(line for *_, line in code.co_lines() if line)
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    passed = "".join(f"        {argument},\n" for argument in (f"'{kind}'", *passed_on(kind)))
    lines = {
        first: f"def {name}({', '.join(positional)}, *, {', '.join(keywords)}, **unknown):",
        last - 2: "    if unknown:",
        last - 1: f"        raise validation.unexpected({name}, unknown)",
        # Over several lines, so that a traceback underlines all of the written call.
        last: f"    return _attend(\n{passed}    )",
    }
    return "\n".join(lines.get(number, "") for number in range(1, last + 1))


def passed_on(kind: Kind) -> list[str]:
    """What a call gives `api._attend` after its kind: operands, options, lengths, seed, out and shared_prefix."""
    call = KINDS[kind]
    taken = taken_by(call)
    rows = {row.operands[0]: row for row in ARGUMENTS if row.operands and row.name in taken}
    names = Operands._fields[:ATTENDED]
    operands = [rows[name].name if name in rows else "None" for name in names]
    # A cached call is shorter without what comes after the operands that it needs, if none of that is given.
    count = 1 + max(i for i, name in enumerate(names) if name in rows and call in rows[name].required)
    options = [name if name in taken else repr(ROWS[name].default) for name in Options._fields]
    lengths = [name if name in taken else "None" for name in LENGTHS]
    return [
        f"({', '.join(operands[:count])}) if {_are_absent(operands[count:])} else ({', '.join(operands)})",
        f"_record(Options, ({', '.join(options)}))",
        f"calls.NO_LENGTHS if {_are_absent(lengths)} else _record(Lengths, ({', '.join(lengths)}))",
        *[name if name in taken else "None" for name in ("seed", "out", "shared_prefix")],
    ]


def _are_absent(names: list[str]) -> str:
    return " and ".join(f"{name} is None" for name in names if name != "None") or "True"
