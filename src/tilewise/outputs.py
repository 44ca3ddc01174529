"""Files that commands write. A path that cannot be written is reported before the work, with its option."""

from __future__ import annotations

from pathlib import Path

from tilewise.errors import InvalidProblem


def ensure_writable(path: Path, option: str) -> None:
    """Raise before long measurements, not after them. `option` gave the path: "output" for --output.

    A folder that does not exist is refused and not made: it is often a name that was mistyped.
    """
    _require_folder(path, option)
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, option, error) from error


def write(path: Path, text: str, option: str) -> None:
    """Write text to a file in a folder that exists."""
    _require_folder(path, option)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, option, error) from error


def _require_folder(path: Path, option: str) -> None:
    if not path.parent.exists():
        fix = f"Make the folder first (mkdir -p), or choose another path with --{option}."
        raise InvalidProblem(option, "a file in a folder that exists", f"{path}: there is no {path.parent}", fix)


def _unwritable(path: Path, option: str, error: OSError) -> InvalidProblem:
    got = f"{path} ({error.strerror})"
    return InvalidProblem(option, "a file that can be written", got, f"Choose another path with --{option}.")
