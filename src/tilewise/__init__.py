"""tilewise: exact, IO-aware attention on CPUs and GPUs behind one contract.

`attention`, `attention_varlen` and `attention_paged` compute, `explain` says what would run and what it would cost.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tilewise import process  # noqa: F401  remembers the process before anybody forks
from tilewise.api import attention, attention_paged, attention_varlen, merge, register_backend, unregister_backend
from tilewise.errors import InvalidProblem, OutOfPages, TilewiseError, Unsupported
from tilewise.tile_masks import TileMask, tile_mask
from tilewise.version import __version__ as __version__

if TYPE_CHECKING:
    from tilewise.api import backends
    from tilewise.kv import PagedKVCache
    from tilewise.plan import Plan, explain
else:
    from tilewise import backends  # the package, which is callable

__all__ = [
    "InvalidProblem",
    "OutOfPages",
    "PagedKVCache",
    "Plan",
    "TileMask",
    "TilewiseError",
    "Unsupported",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "explain",
    "merge",
    "register_backend",
    "tile_mask",
    "unregister_backend",
]

# Names that are loaded on first use, and their modules.
_LAZY = {"PagedKVCache": "tilewise.kv", "Plan": "tilewise.plan", "explain": "tilewise.plan"}


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]


def __getattr__(name: str) -> Any:
    """Planning and the paged cache are loaded on first use: they take import time and are not needed to compute."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
