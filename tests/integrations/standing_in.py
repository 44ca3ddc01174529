"""Modules that stand in for a library that is not installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def standing_in(modules: dict[str, dict[str, Any]], *ours: str) -> Iterator[None]:
    """Within the block imports find these modules, and packages above them; `ours`, which import them, are forgotten
    after it.
    """
    names = {".".join(name.split(".")[:depth]) for name in modules for depth in range(1, name.count(".") + 2)}
    made = {name: types.ModuleType(name) for name in names}
    for name, contents in modules.items():
        vars(made[name]).update(contents)
    before = {name: sys.modules.get(name) for name in (*made, *ours)}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
