"""The page's files and data, and the page itself in its two forms: served in parts, or exported as one file."""

from __future__ import annotations

import json
import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from tilewise import device
from tilewise.device import DEVICES, DeviceSpec
from tilewise.errors import InvalidProblem
from tilewise.explorer.kernels import kernel_table
from tilewise.explorer.presets import CHIPS, PRESETS
from tilewise.explorer.questions import HEAD_DIMS, LIMITS
from tilewise.version import __version__

__all__ = ["assets", "chapter_names", "exported_page", "page_data", "served_page"]

DATA = re.compile(r'(<script type="application/json" id="tilewise-data">).*?(</script>)', re.DOTALL)
STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
SCRIPTS = re.compile(
    r'<script type="importmap">.*?</script>\s*<script type="module" src="js/main\.js"></script>', re.DOTALL
)
LOADER = "js/standalone.js"
CHAPTERS = "js/lesson/chapters/"


def assets() -> dict[str, str]:
    """Every file of the page by its path, such as "js/main.js"."""
    return dict(_files(resources.files("tilewise.explorer").joinpath("web"), ""))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".html", ".css", ".js")):
            found.append((f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")))
    return found


def chapter_names() -> tuple[str, ...]:
    """The lesson's chapters by name: each is a file."""
    paths = [path for path in assets() if path.startswith(CHAPTERS)]
    return tuple(path.removeprefix(CHAPTERS).removesuffix(".js") for path in paths)


def page_data(*, served: bool, chapter: str | None = None) -> dict[str, Any]:
    """What Python tells the page: devices, presets, limits; exported, also which kernel would run.

    A file of one chapter has no use for the kernels: "My problem" is not in it.
    """
    # The CPU is the one that serves. An exported page is opened on another.
    here = {"cpu": device.measured_cpu()} if served else {}
    data: dict[str, Any] = {
        "version": __version__,
        "served": served,
        "devices": {key: _device(spec) for key, spec in (DEVICES | here).items()},
        "presets": [preset._asdict() for preset in PRESETS],
        "lesson_devices": [chip._asdict() for chip in CHIPS],
        "head_dims": HEAD_DIMS,
        "limits": LIMITS,
    }
    if chapter is not None:
        return data | {"chapter": chapter}
    return data if served else data | {"kernels": kernel_table()}


def _device(spec: DeviceSpec) -> dict[str, Any]:
    return {
        "name": f"this machine: {spec.name}" if spec.type == "cpu" else spec.name,
        "type": spec.type,
        "num_sms": spec.num_sms,
        "smem_bytes": spec.smem_bytes,
        "l2_bytes": spec.l2_bytes,
        "memory_bytes": spec.memory_bytes,
        "bandwidth": spec.bandwidth,
        "flops": {str(dtype).removeprefix("torch."): rate for dtype, rate in spec.flops.items()},
    }


def served_page(files: dict[str, str]) -> str:
    """index.html with the data; styles and modules are fetched separately."""
    return _with_data(files["index.html"], page_data(served=True))


def exported_page(chapter: str | None = None) -> str:
    """Everything, or one chapter, in one file that works from a disk, without a server and without a network."""
    if chapter is not None and chapter not in chapter_names():
        names = ", ".join(chapter_names())
        raise InvalidProblem("chapter", f"one of {names}", chapter, "Name a chapter of the lesson.")
    files = assets()
    page = _with_data(files["index.html"], page_data(served=False, chapter=chapter))
    page = STYLE.sub(lambda found: f"<style>\n{files[found[1]]}</style>", page)
    modules = [
        f'<script type="text/plain" data-module="tilewise/{path.removeprefix("js/")}">\n{_inline(source)}</script>'
        for path, source in files.items()
        if path.startswith("js/") and path != LOADER
    ]
    # The modules stay readable; the loader hands them to the browser's own module system.
    loader = f"<script>\n{_inline(files[LOADER])}</script>"
    body = "\n".join([*modules, loader])
    page = SCRIPTS.sub("", page)
    return page.replace("</body>", f"{body}\n</body>")


def _with_data(page: str, data: dict[str, Any]) -> str:
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return DATA.sub(lambda found: found[1] + text + found[2], page)


def _inline(source: str) -> str:
    """JavaScript that cannot close its <script> element: in a string, the backslash changes nothing."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")
