"""A folder of machine code that only its owner can write to.

A folder or file is trusted if it belongs to this user (or to the administrator, who owns Python and torch as well) and
neither its group nor others may write to it. Checks use open descriptors, never names, so nothing can be swapped
between check and use. On systems without owners and modes (Windows), the user's profile is trusted to protect it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

FOLDER_MODE, FILE_MODE = 0o700, 0o600
HAS_OWNERS = hasattr(os, "geteuid")
ADMINISTRATOR = 0
# Follow no links, do not block on a pipe, and read bytes unchanged.
FILE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
SECONDS_BETWEEN_TRIES = 0.02


class UntrustedFolder(OSError):
    """Another user may have written to the folder. Says whether this user owns it and could change its mode."""

    def __init__(self, reason: str, *, is_own: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_own = reason, is_own


def _distrust(status: os.stat_result) -> str | None:
    """Why a folder or file with this status is not trusted, or None."""
    if not HAS_OWNERS:
        return None
    if status.st_uid not in (os.geteuid(), ADMINISTRATOR):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users write to it"
    return None


class PrivateFolder:
    """An open folder, to be closed. Raises OSError if there is none, and UntrustedFolder if it is not private."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._path = path
        self._fd: int | None = None
        if not HAS_OWNERS:
            return
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(self._fd)
        reason = _distrust(status)
        if reason is not None:
            self.close()
            raise UntrustedFolder(reason, is_own=status.st_uid == os.geteuid())

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self, name: str) -> bytes | None:
        """A file's content, or None if there is no trusted file of that name."""
        try:
            fd = os.open(self._at(name), os.O_RDONLY | FILE_FLAGS, dir_fd=self._fd)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or _distrust(status) is not None:
                return None
            try:
                return file.read()
            except OSError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file atomically, by renaming."""
        partial = f"{name}.{secrets.token_hex(8)}"
        try:
            fd = os.open(
                self._at(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, FILE_MODE, dir_fd=self._fd
            )
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            os.replace(self._at(partial), self._at(name), src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._at(partial), dir_fd=self._fd)
            raise

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold a lock that one process has at a time. Continues without it after `seconds`, or if the file system has
        none.

        The system releases the lock of a process that ends, however it ends.
        """
        end, held = time.monotonic() + seconds, False
        while HAS_LOCKS and self._fd is not None and not held:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except OSError as error:  # noqa: PERF203
                if not isinstance(error, BlockingIOError) or time.monotonic() >= end:
                    break
                time.sleep(SECONDS_BETWEEN_TRIES)
        try:
            yield
        finally:
            if held and self._fd is not None:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _at(self, name: str) -> str:
        """A file's name relative to the folder's descriptor, or its path if there is none."""
        return name if self._fd is not None else str(self._path / name)
