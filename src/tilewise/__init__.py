"""tilewise: exact, IO-aware attention on CPUs and GPUs behind one contract.

`attention`, `attention_varlen` and `attention_paged` compute, `explain` says what would run and what it would cost.
"""

from typing import TYPE_CHECKING, Any

from tilewise import process  # noqa: F401  remembers the process before anybody forks
from tilewise.api import attention, attention_paged, attention_varlen, backends, merge
from tilewise.errors import InvalidProblem, OutOfPages, TilewiseError, Unsupported
from tilewise.version import __version__ as __version__

if TYPE_CHECKING:
    from tilewise.plan import Plan, explain

__all__ = [
    "InvalidProblem",
    "OutOfPages",
    "Plan",
    "TilewiseError",
    "Unsupported",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "explain",
    "merge",
]


def __dir__() -> list[str]:
    return [*globals(), "Plan", "explain"]


def __getattr__(name: str) -> Any:
    """Planning is loaded when it is first asked for: a third of the import time that computing does not need."""
    if name in ("Plan", "explain"):
        from tilewise import plan

        return getattr(plan, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
