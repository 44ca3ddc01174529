"""Let `import name` find a drop-in module in this process, and undo it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

from tilewise.errors import TilewiseError

__all__ = ["put_in_place", "take_out"]

# Modules that an installation displaced, by name. Like `sys.modules`, this is state of the process.
_displaced: dict[str, ModuleType] = {}


def put_in_place(modules: Mapping[str, ModuleType], *, force: bool) -> None:
    """Enter the modules into `sys.modules`. Refuses to displace a foreign module unless `force`."""
    top, ours = next(iter(modules)).split(".")[0], list(modules.values())
    foreign = {name: m for name, m in sys.modules.items() if _is_below(name, top) and m not in ours}
    if foreign and not force:
        where = getattr(foreign.get(top), "__file__", None) or "an unknown place"
        raise TilewiseError(
            f"{top} is already imported from {where}, and code that has taken names from it keeps them. Call install() "
            "before anything imports it, or pass force=True to displace it for later imports."
        )
    for name in foreign:
        del sys.modules[name]
    _displaced.update(foreign)
    sys.modules.update(modules)


def take_out(modules: Mapping[str, ModuleType]) -> None:
    """Remove the modules from `sys.modules` and restore what they displaced."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    for name in [name for name in _displaced if _is_below(name, next(iter(modules)).split(".")[0])]:
        sys.modules[name] = _displaced.pop(name)


def _is_below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")
