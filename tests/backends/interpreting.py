"""Triton's interpreter, which is chosen when triton is imported: pytest in a process of its own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
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
    """Leave out what Triton's interpreter does in vain, over half of its time. It has no public place for this; a
    release without these names stays slow.

    - Every integer operation is repeated in 64 bits for an assertion that only debug mode makes.
    - triton.language is replaced at every call of a device function, though the launch has replaced it already.
    - The table of NumPy's dtypes is built at every lookup.
    - Every value computes its shape again, and every operation the type of its result.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and not builder.options.debug and hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _replace_language_once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_dtypes(interpreter)
    core: Any = importlib.import_module("triton.language.core")
    if hasattr(core, "block_type") and hasattr(core, "tensor"):
        _remember_types(core)


def _replace_language_once(interpreter: Any) -> None:
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()  # the modules whose functions see the replaced language, in this launch

    def once(function: Any) -> Any:
        if id(function.__globals__) in replaced:
            return None
        replaced.add(id(function.__globals__))
        return replace(function)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        try:
            return run(executor, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launch


def _remember_dtypes(interpreter: Any) -> None:
    plain = interpreter._get_np_dtype
    core: Any = importlib.import_module("triton.language.core")
    scalar = functools.cache(plain)

    def dtype_of(kind: Any) -> Any:
        inner = kind.element_ty if isinstance(kind, core.block_type) else kind
        return plain(inner) if isinstance(inner, core.pointer_type) else scalar(inner)

    interpreter._get_np_dtype = dtype_of


def _remember_types(core: Any) -> None:
    """Types of equal elements and shape share what they hold, and values of one type all but their handle."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_type(block: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(block, element_ty, shape)
            types[key] = vars(block)  # which keeps element_ty, so that no other type gets its id
        block.__dict__ = types[key]

    def init_value(value: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if "members" not in vars(type):
            make_value(value, None, type)
            type.members = dict(vars(value))
        vars(value).update(type.members, handle=handle)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_value
