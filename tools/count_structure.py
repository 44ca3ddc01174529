"""Counts what the structure of the source costs a reader: `python tools/count_structure.py [--argument softcap]`.

Prints a table with the bar of each figure. The first call, and the next length, are attention on this machine's CPU.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SRC = Path(__file__).parent.parent / "src" / "tilewise"
GPU_BACKENDS = ("gpu", "triton", "hopper")
# Decorators whose functions a compiler turns into device code: Triton's, and those of the CPU's programs.
DEVICE = ("triton.jit", "gluon.jit", "jit", "kernel", "driver")


class Row(NamedTuple):
    """One figure, and the most it should be."""

    what: str
    figure: float
    bar: float
    where: str = ""


def mentions(name: str) -> dict[str, int]:
    """How many lines of each file of src have the name of an argument as a word."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    found = {
        str(path.relative_to(SRC)): sum(map(bool, map(word.search, path.read_text().splitlines())))
        for path in SRC.rglob("*.py")
    }
    return {path: count for path, count in sorted(found.items()) if count}


def is_device(node: ast.AST) -> bool:
    """Whether it is a function in device code."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(ast.unparse(d).partition("(")[0] in DEVICE for d in node.decorator_list)


def device_lines(path: Path) -> int:
    """Lines within functions and records of device code."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if is_device(node) and isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *[d.lineno for d in node.decorator_list]])
            count += (node.end_lineno or first) - first + 1
    return count


def host_over_device() -> tuple[int, int]:
    """Lines of the GPU backends that run on the host, and those of kernels."""
    paths = [path for name in GPU_BACKENDS for path in (SRC / "backends" / name).rglob("*.py")]
    device = sum(device_lines(path) for path in paths)
    return sum(len(path.read_text().splitlines()) for path in paths) - device, device


def host_functions() -> Iterator[tuple[int, str]]:
    """The number of parameters of each function that runs on the host, and its name."""
    for path in SRC.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = {id(inner) for node in ast.walk(tree) if is_device(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in inside:
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                yield count, f"{path.relative_to(SRC)}:{node.name}"


# Functions whose parameters people write: public calls and commands, and drop-ins for the functions of others.
PUBLIC = (
    "api.py", "plan/planning.py:explain", "cli/", "integrations/", "nn/multihead.py", "distributed/attention.py",
    "distributed/decoding.py", "kv/cache.py", "kv/rotated.py:append_rotated",
)  # fmt: skip


def most_parameters() -> tuple[int, str]:
    """The longest parameter list of a host function that is not public."""
    return max((count, name) for count, name in host_functions() if not name.startswith(PUBLIC))


def first_call() -> dict[str, Any]:
    """Run in a process of its own: the files that a first call runs through, and the caches a new length asks."""
    import torch

    import tilewise

    def attend(tokens: int) -> None:
        q = torch.ones(1, 2, tokens, 32)
        tilewise.attention(q, q, q, causal=True)

    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        # What a module does while it is imported is not the call's.
        if event == "call" and name != "<module>" and path.startswith(str(SRC)) and not _importing(frame):
            files.add(str(Path(path).relative_to(SRC)))

    sys.setprofile(note)
    attend(40)
    sys.setprofile(None)
    for tokens in range(41, 45):
        attend(tokens)
    before = {id(cache): _asked(cache) for cache in _caches()}
    attend(57)
    asked = [f"{c.__module__}.{c.__qualname__}" for c in _caches() if _asked(c) != before.get(id(c), 0)]
    return {"files": sorted(files), "caches": sorted(asked)}


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and str(SRC) in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _caches() -> list[Any]:
    """Every `functools` cache of the package."""
    kind = type(functools.lru_cache(len))
    every = [found for found in gc.get_objects() if isinstance(found, kind)]
    return [found for found in every if str(found.__module__).startswith("tilewise")]


def _asked(cache: Any) -> int:
    info = cache.cache_info()
    return int(info.hits + info.misses)


def measured() -> dict[str, Any]:
    """`first_call` in a fresh process; an earlier one has compiled its kernels."""
    for _ in range(2):
        command = [sys.executable, "-c", "import count_structure as c, json; print(json.dumps(c.first_call()))"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(argument: str) -> list[Row]:
    """Every figure. The bar of the first is that of a new argument, which few integrations know."""
    named, call, (host, device) = mentions(argument), measured(), host_over_device()
    parameters, function = most_parameters()
    return [
        Row(f"files of src that name {argument}", len(named), 9, f"{sum(named.values())} lines"),
        Row("host files that a first call runs through", len(call["files"]), 14, "on a CPU"),
        Row("functools caches that a new length asks", len(call["caches"]), 3, "on a CPU"),
        Row("host lines over device lines of GPU backends", round(host / device, 2), 0.85, f"{host} / {device}"),
        Row("most parameters of a host function", parameters, 12, function),
    ]


def touched(commits: str) -> dict[str, int]:
    """By file of src: the separate places (hunks without context) that a range of commits changes."""
    command = ["git", "diff", "-U0", "--no-color", commits, "--", str(SRC)]
    found: dict[str, int] = {}
    path = ""
    for line in subprocess.run(command, cwd=SRC, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            path = line.partition("tilewise/")[2]
        elif line.startswith("@@"):
            found[path] = found.get(path, 0) + 1
    return found


def main() -> None:
    """Print the table, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--argument", default="softcap", help="the argument whose name is counted")
    parser.add_argument("--json", action="store_true", help="the files, caches and functions themselves")
    parser.add_argument("--diff", metavar="A..B", help="the files and places that commits change, for a trial of one")
    given = parser.parse_args()
    if given.json:
        longest = sorted(host_functions(), reverse=True)[:20]
        found = {"named": mentions(given.argument), **measured(), "parameters": longest}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    if given.diff is not None:
        places = touched(given.diff)
        rows = [*places.items(), (f"{len(places)} files", sum(places.values()))]
        sys.stdout.writelines(f"{path:46} {count:>6}\n" for path, count in rows)
        return
    sys.stdout.writelines(f"{r.what:46} {r.figure:>6} (bar {r.bar})  {r.where}\n" for r in table(given.argument))


if __name__ == "__main__":
    main()
