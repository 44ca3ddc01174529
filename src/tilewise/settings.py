"""The only reader of the environment. Every variable is optional and read once, when a setting is first needed.

| variable                | default | meaning                                                            |
|-------------------------|---------|--------------------------------------------------------------------|
| `TILEWISE_BACKEND`      | `auto`  | backend used where a call says `backend="auto"`                    |
| `TILEWISE_CHECK_VALUES` | `0`     | `1`: check index tensors on a GPU too (one synchronisation a call) |
| `TILEWISE_CACHE_DIR`    | (user)  | where compiled kernels are kept: a folder of the user's alone      |
| `TILEWISE_NVTX`         | `0`     | `1`: an NVTX range around each forward and backward (Nsight)       |
| `TILEWISE_VLLM_CPU`     | `0`     | `1`: vLLM's CPU platform runs attention here, instead of its own   |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidProblem

# torch's profiler reads it when it first starts; 6 is above its levels (errors are 4, its two lines a run are 5).
PROFILER_LEVEL = "KINETO_LOG_LEVEL"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force."""

    backend: str = "auto"
    check_values: bool = False
    cache_dir: Path | None = None
    nvtx: bool = False
    vllm_cpu: bool = False


_current: Settings | None = None


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from a mapping of variables; a value that makes no sense is an error, not a default."""
    cache = environ.get("TILEWISE_CACHE_DIR")
    return Settings(
        backend=environ.get("TILEWISE_BACKEND", "auto"),
        check_values=_switch(environ, "TILEWISE_CHECK_VALUES"),
        cache_dir=Path(cache) if cache else None,
        nvtx=_switch(environ, "TILEWISE_NVTX"),
        vllm_cpu=_switch(environ, "TILEWISE_VLLM_CPU"),
    )


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "0")
    if value not in ("0", "1"):
        raise InvalidProblem(name, "0 or 1", repr(value), "Unset it or set it to 0 or 1.")
    return value == "1"


def current() -> Settings:
    """The settings in force now."""
    global _current
    if _current is None:
        _current = read(os.environ)
    return _current


@contextlib.contextmanager
def overridden(**changes: Any) -> Iterator[Settings]:
    """Within the block some settings differ: `with settings.overridden(check_values=True): ...`."""
    global _current
    before = current()
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Within the block torch's profiler starts without lines of its own on stderr, unless the user chose a level."""
    chosen = PROFILER_LEVEL in os.environ
    if not chosen:
        os.environ[PROFILER_LEVEL] = "6"
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop(PROFILER_LEVEL, None)
