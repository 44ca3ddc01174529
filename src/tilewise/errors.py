"""The exceptions of tilewise.

    TilewiseError
    ├── InvalidProblem (ValueError)         an argument is wrong, for every backend
    │   └── UnexpectedArgument (TypeError)  there is no argument of that name; suggests the one that is meant
    ├── Unsupported (NotImplementedError)   the call is valid, but no permitted backend can run it here
    └── OutOfPages (MemoryError)            a paged cache has no page left; nothing was changed

Every message says what was given, what is accepted, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["InvalidProblem", "OutOfPages", "TilewiseError", "UnexpectedArgument", "Unsupported"]


class TilewiseError(Exception):
    """Base class of everything tilewise raises on purpose."""


class InvalidProblem(TilewiseError, ValueError):
    """An argument is wrong: says which one, what was expected, what was given, and the fix."""

    def __init__(self, argument: str, expected: str, got: object, fix: str) -> None:
        # Assigned, because torch.compile cannot trace super().__init__() and would report that instead.
        self.args = (f"{argument}: expected {expected}, got {got}. {fix}",)
        self.argument = argument
        self.expected = expected
        self.got = got
        self.fix = fix

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.argument, self.expected, self.got, self.fix)


class UnexpectedArgument(InvalidProblem, TypeError):
    """A keyword that a function does not take, such as another library's name for one of its arguments."""


class Unsupported(TilewiseError, NotImplementedError):
    """No permitted backend takes the problem; carries the reason each of them gave."""

    def __init__(self, summary: str, reasons: Sequence[tuple[str, str]] = ()) -> None:
        trace = "".join(f"\n  {backend}: {reason}" for backend, reason in reasons)
        self.args = (summary + trace,)
        self.summary = summary
        self.reasons = tuple(reasons)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.summary, self.reasons)


class OutOfPages(TilewiseError, MemoryError):
    """A paged KV cache has too few free pages for the request; the cache is unchanged."""
