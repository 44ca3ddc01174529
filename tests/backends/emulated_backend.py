"""The Hopper backend over the stand-in for Gluon in gluon_emulator.py."""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_emulator import MODULES, PACKAGE, SHARED
from tilewise import device

# A module of the backend, by its name.
Emulated = Callable[[str], Any]


def poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What results and workspaces are made with: full of NaN, also where bytes are read as numbers."""
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return made.fill_(math.nan if made.is_floating_point() else 255 if dtype == torch.uint8 else -1)


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    """Import modules of the backend over the stand-in; afterwards everything is as it was."""
    for package in (PACKAGE, SHARED):  # what is imported first under the stand-in would keep its names
        importlib.import_module(package)
    replaced = ("triton.", f"{PACKAGE}.", f"{SHARED}.")
    ours = [name for name in sys.modules if name == "triton" or name.startswith(replaced)]
    saved = {name: sys.modules.pop(name) for name in ours}
    # `from package import module` would find the real module as an attribute of its package.
    packages = [vars(sys.modules[package]) for package in (PACKAGE, SHARED)]
    attributes = [dict(names) for names in packages]
    for names in packages:
        for name in [n for n, value in names.items() if isinstance(value, types.ModuleType)]:
            del names[name]
    guards: Any = torch._C._dynamo.guards
    plain_type, plain_empty = torch.Tensor.type, guards._empty_strided_cpu
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    torch.Tensor.type = property(lambda _: types.SimpleNamespace(layout=None))  # type: ignore[assignment,method-assign]
    guards._empty_strided_cpu = poisoned
    try:
        with device.overridden(replace(device.named("h200"), num_sms=3)):
            counter = torch.zeros(1, dtype=torch.int32)
            importlib.import_module(f"{PACKAGE}.launch")
            vars(sys.modules[f"{SHARED}.counters"])["HostCounters"].current = lambda *_: counter
            yield lambda name: sys.modules.get(f"{PACKAGE}.{name}") or sys.modules[f"{SHARED}.{name}"]
    finally:
        torch.Tensor.type = plain_type  # type: ignore[method-assign]
        guards._empty_strided_cpu = plain_empty
        for name in [n for n in sys.modules if n == "triton" or n.startswith(replaced)]:
            del sys.modules[name]
        sys.modules.update(saved)
        for names, before in zip(packages, attributes, strict=True):
            names.clear()
            names.update(before)
