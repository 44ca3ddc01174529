"""Triton's interpreter, which is chosen when triton is imported: pytest in a process of its own."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The interpreter computes with NumPy, which warns where a GPU gives inf, where a scalar has one dimension, and where a
# tile holds rows of the next sequence (NaN in tests), which are computed and not stored.
IGNORED = (
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered:RuntimeWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)


def interpret(*arguments: str) -> None:
    """Run pytest with the interpreter on, and fail with its report, or where nothing passed."""
    warnings = [part for ignored in IGNORED for part in ("-W", ignored)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *warnings, *arguments]
    # It has no use for threads, and two on a busy machine wait for each other at every product.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def hasten() -> None:
    """Look through triton.language for what has to be replaced once and not at every call of a device function, which
    takes a third of the interpreter's time. It has no public place for this; one without these names stays slow.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")

    @functools.cache
    def builtins(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            # What is replaced is no builtin any more.
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        interpreter._patch_builtin = patch
