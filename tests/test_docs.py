"""What the documentation shows runs: doctests, the quick start of the README, every link to a file of this project."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])


@pytest.mark.parametrize("module", ["tilewise.api", "tilewise.masks", "tilewise.dispatch"])
def test_docstring_examples(module: str) -> None:
    found = importlib.import_module(module)
    results = doctest.testmod(found, extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_quick_start_of_the_readme() -> None:
    (code,) = re.findall(r"## Quick start\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code.replace("4096", "96"), "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
