"""Compiled programs on disk, and their way into the process.

A program is compiled once per tilewise version, processor and source, and kept as an object file with a checksum
before it. Where nothing can be written, programs are compiled in every process, which is said once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding

from tilewise import settings
from tilewise.backends.cpu.isa import host
from tilewise.version import __version__

__all__ = ["PROGRAMS", "CacheState", "Program", "cache_state", "program", "programs", "warmup"]

# Entry points: the module is imported only to compile.
PROGRAMS = {
    "forward": "tilewise.backends.cpu.forward",
    "forward_matrix": "tilewise.backends.cpu.forward_matrix",
    "decode": "tilewise.backends.cpu.decode",
    "backward": "tilewise.backends.cpu.backward",
    "write_rows": "tilewise.backends.cpu.writing",
    "append_quantised": "tilewise.backends.cpu.quantising",
    "merge_rows": "tilewise.backends.cpu.partial_rows",
}
# Programs for processors with a matrix unit only.
MATRIX_PROGRAMS = ("forward_matrix",)
SUFFIX = ".tilewise-cpu"
_lock = threading.Lock()


class Program(NamedTuple):
    """Machine code in memory; the engine owns it."""

    address: int
    engine: Any


class CacheState(NamedTuple):
    """Where compiled programs are kept and how many there are; `entries` and `size` count this version and processor
    only.
    """

    path: Path
    writable: bool
    entries: int
    size: int


def programs() -> tuple[str, ...]:
    """The programs that this machine runs."""
    has_matrix = host().matrix is not None
    return tuple(name for name in PROGRAMS if has_matrix or name not in MATRIX_PROGRAMS)


def cache_dir() -> Path:
    """The directory of compiled programs."""
    chosen = settings.current().cache_dir
    return chosen if chosen is not None else Path.home() / ".cache" / "tilewise"


@functools.cache
def fingerprint() -> str:
    """What machine code depends on: version, processor, instruction table, compiler, and the source of this package."""
    digest = hashlib.sha256()
    features = binding.get_host_cpu_features().flatten()
    for part in (
        __version__,
        binding.get_host_cpu_name(),
        features,
        host().name,
        llvmlite_version,
        str(binding.llvm_version_info),
    ):
        digest.update(part.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def file_name(name: str) -> str:
    """The cache file of a program."""
    return f"{name}-{__version__}-{fingerprint()}{SUFFIX}"


def cache_state() -> CacheState:
    """The state of the cache, for `tilewise doctor`."""
    path = cache_dir()
    files = [path / file_name(name) for name in programs()]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return CacheState(path, _is_writable(path), len(sizes), sum(sizes))


def _is_writable(path: Path) -> bool:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def warmup(progress: Callable[[str, int, int], None] | None = None) -> CacheState:
    """Compile and keep every program; `progress(name, done, total)` is told before each one."""
    names = programs()
    for done, name in enumerate(names):
        if progress is not None:
            progress(name, done, len(names))
        program(name)
    return cache_state()


@functools.cache
def program(name: str) -> Program:
    """A program ready to run, from this process, from disk, or compiled now."""
    # LLVM's global context takes one thread at a time.
    with _lock:
        return _loaded(name)


@functools.cache
def _loaded(name: str) -> Program:
    path = cache_dir() / file_name(name)
    code = _read(path)
    if code is None:
        from tilewise.backends.cpu.compiler import compile_object

        code = compile_object(getattr(importlib.import_module(PROGRAMS[name]), name))
        _write(path, code)
    return _into_memory(name, code)


def _read(path: Path) -> bytes | None:
    """A program's machine code, if the file is there and whole."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    code = kept[32:]
    return code if hashlib.sha256(code).digest() == kept[:32] else None


def _write(path: Path, code: bytes) -> None:
    """Keep a program; two processes may do it at once, so the file appears by renaming."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        partial.replace(path)
    except OSError as error:
        _warn_once(str(path.parent), error.strerror or str(error))


@functools.cache
def _warn_once(directory: str, reason: str) -> None:
    warnings.warn(
        f"tilewise cannot keep compiled CPU kernels in {directory} ({reason}); every process compiles them. "
        "Set TILEWISE_CACHE_DIR to a writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )


def _into_memory(name: str, code: bytes) -> Program:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault", reloc="pic")
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Program(engine.get_function_address(f"tilewise_{name}"), engine)
