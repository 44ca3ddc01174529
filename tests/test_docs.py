"""What the documentation shows runs: doctests, quick start and commands of the README, every link to a project file."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import build_app

ROOT = Path(__file__).parent.parent
# Commands that measure for long, wait for a browser or write files.
LONG = ("demo", "bench", "explore", "profile")
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


def commands_of_the_readme() -> list[list[str]]:
    """The arguments of each `tilewise ...` line, without its comment and without those that measure for long."""
    (block,) = re.findall(r"## Command line\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["tilewise"] and words[1] not in LONG]


def test_the_readme_shows_commands() -> None:
    assert {words[0] for words in commands_of_the_readme()} >= {"doctor", "explain"}


@pytest.mark.parametrize("arguments", commands_of_the_readme(), ids=" ".join)
def test_commands_of_the_readme(arguments: list[str]) -> None:
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
