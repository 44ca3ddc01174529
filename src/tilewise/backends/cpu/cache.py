"""Compiled programs on disk, and loading them into the process.

A program is compiled once per tilewise version, processor and source. It is kept as an object file after a checksum, in
a folder that only its owner can write to. If there is no such folder, or it cannot be written, programs are compiled in
every process, with one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding

from tilewise import machine_code, settings
from tilewise.backends.cpu import objects
from tilewise.backends.cpu.isa import host
from tilewise.backends.cpu.private_folder import PrivateFolder, UntrustedFolder
from tilewise.version import __version__

# Entry points; the module is imported only to compile.
PROGRAMS = {
    "forward": "tilewise.backends.cpu.forward",
    "forward_matrix": "tilewise.backends.cpu.forward_matrix",
    "decode": "tilewise.backends.cpu.decode",
    "backward": "tilewise.backends.cpu.backward",
    "tangent": "tilewise.backends.cpu.tangent",
    "twice": "tilewise.backends.cpu.twice",
    "write_rows": "tilewise.backends.cpu.pages",
    "append_int8": "tilewise.backends.cpu.pages",
    "append_quantised": "tilewise.backends.cpu.pages",
}
# Programs that need a matrix unit.
MATRIX_PROGRAMS = ("forward_matrix",)
SUFFIX = ".tilewise-cpu"
DIGEST_BYTES = 32
# How long a process waits for another one that compiles, before it compiles too.
PATIENCE_SECONDS = 30.0


class Program(NamedTuple):
    """Machine code in memory, owned by the engine, and the function that takes the address of a parameter block."""

    address: int
    run: Callable[[int], None]
    engine: Any


def programs() -> tuple[str, ...]:
    """The programs for this machine."""
    has_matrix = host().matrix is not None
    return tuple(name for name in PROGRAMS if has_matrix or name not in MATRIX_PROGRAMS)


def cache_dir() -> Path:
    """The directory of compiled programs."""
    chosen = settings.current().cache_dir
    return chosen if chosen is not None else Path.home() / ".cache" / "tilewise"


@functools.cache
def fingerprint() -> str:
    """Everything machine code depends on: version, processor, instruction table, compiler and source."""
    digest = hashlib.sha256()
    features = binding.get_host_cpu_features().flatten()
    for part in (
        __version__,
        binding.get_default_triple(),
        binding.get_host_cpu_name(),
        features,
        host().name,
        llvmlite_version,
        str(binding.llvm_version_info),
    ):
        digest.update(part.encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(machine_code.__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def file_name(name: str) -> str:
    """The cache file of a program."""
    return f"{name}-{__version__}-{fingerprint()}{SUFFIX}"


def cache_state() -> dict[str, Any]:
    """Where programs are kept, how many of this version and processor, and why the folder is not used, if so."""
    path = cache_dir()
    state = {"path": str(path), "writable": False, "entries": 0, "entries_when_full": len(programs()), "size_bytes": 0}
    try:
        with contextlib.closing(PrivateFolder(path, create=False)) as folder:
            kept = [folder.read(file_name(name)) for name in programs()]
    except UntrustedFolder as untrusted:
        return state | {"refused": untrusted.reason}
    except OSError:
        kept = []
    sizes = [len(content) for content in kept if content is not None]
    found = {"writable": _is_writable(path), "entries": len(sizes), "size_bytes": sum(sizes), "refused": None}
    return state | found


def _is_writable(path: Path) -> bool:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def warmup(progress: Callable[[str, int, int], None]) -> None:
    """Compile and keep every program; `progress(name, done, total)` is called before each one."""
    names = programs()
    for done, name in enumerate(names):
        progress(name, done, len(names))
        program(name)


@functools.cache
def program(name: str) -> Program:
    """A program ready to run, from this process, from disk, or compiled now."""
    with machine_code.lock:
        return _loaded(name)


@functools.cache
def _loaded(name: str) -> Program:
    folder = _open_folder()
    if folder is None:
        return _into_memory(name, _compiled(name))
    with contextlib.closing(folder):
        found = _kept(folder, name)
        if found is not None:
            return found
        with folder.locked(PATIENCE_SECONDS):
            # The process that held the lock has most likely compiled the same program.
            found = _kept(folder, name)
            if found is not None:
                return found
            code = _compiled(name)
            try:
                folder.write(file_name(name), _digest(name, code) + code)
            except OSError as error:
                _warn_unwritable(str(cache_dir()), error.strerror or str(error))
    return _into_memory(name, code)


def _open_folder() -> PrivateFolder | None:
    path = cache_dir()
    try:
        return PrivateFolder(path, create=True)
    except UntrustedFolder as untrusted:
        _warn_untrusted(str(path), untrusted.reason, untrusted.is_own)
    except OSError as error:
        _warn_unwritable(str(path), error.strerror or str(error))
    return None


def _compiled(name: str) -> bytes:
    from tilewise.backends.cpu.compiler import compile_object

    return compile_object(getattr(importlib.import_module(PROGRAMS[name]), name))


def _kept(folder: PrivateFolder, name: str) -> Program | None:
    """A program from disk, if its file exists, is complete, and matches its name."""
    content = folder.read(file_name(name))
    if content is None:
        return None
    code = content[DIGEST_BYTES:]
    if _digest(name, code) != content[:DIGEST_BYTES] or not _is_loadable(name, code):
        return None
    return _into_memory(name, code)


def _digest(name: str, code: bytes) -> bytes:
    """The checksum of a file, which binds the code to its program, processor and compiler."""
    return hashlib.sha256(file_name(name).encode() + b"\0" + code).digest()


def _is_loadable(name: str, code: bytes) -> bool:
    """Whether LLVM can load this object: it aborts on a malformed one."""
    if platform.system() in ("Darwin", "Windows"):
        return True
    return objects.provides(code, platform.machine(), symbol(name))


@functools.cache
def _warn_unwritable(directory: str, reason: str) -> None:
    warnings.warn(
        f"tilewise cannot keep compiled CPU kernels in {directory} ({reason}); every process compiles them. "
        "Set TILEWISE_CACHE_DIR to a writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_untrusted(directory: str, reason: str, is_own: bool) -> None:
    own = f"Make it yours alone (chmod 700 {directory}), or set" if is_own else "Set"
    warnings.warn(
        f"tilewise does not use the compiled CPU kernels in {directory}: {reason}, so others could have put their code "
        f"there; every process compiles them. {own} TILEWISE_CACHE_DIR to a directory of your own.",
        RuntimeWarning,
        stacklevel=2,
    )


def symbol(name: str) -> str:
    """The entry point of a program."""
    return f"tilewise_{name}"


def _into_memory(name: str, code: bytes) -> Program:
    address, engine = machine_code.load(code, symbol(name))
    return Program(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), engine)
