"""What the documentation shows runs: doctests, quick start and commands of the README, every link to a project file."""

import doctest
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise import settings
from tilewise.cli import build_app

ROOT = Path(__file__).parent.parent
# Commands that measure for long, wait for a browser or write files.
LONG = ("accuracy", "bench", "demo", "explore", "profile")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])


@pytest.mark.parametrize("module", ["tilewise.api", "tilewise.masks", "tilewise.dispatch", "tilewise.plan.cost"])
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


def blocks_that_stand_alone() -> list[tuple[str, str]]:
    """The Python blocks of the pages under docs that import all they need."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        found += [(page.name, code) for code in blocks if re.search("^import (torch|numpy)", code, re.MULTILINE)]
    return [(name, code) for name, code in found if name != "README.md"]


def test_pages_show_code_that_stands_alone() -> None:
    assert {name for name, _ in blocks_that_stand_alone()} >= {"explain.md", "serving.md"}


# Of torch's own rules for forward derivatives.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("page", "code"), blocks_that_stand_alone())
def test_code_of_the_pages(page: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, page, "exec"), {})
    shown = capsys.readouterr().out
    if "cache.free" in code:
        assert "requests=0" in shown  # the guide ends with every request freed


def shown_commands() -> list[tuple[str, list[str], str]]:
    """(page, arguments, what is printed) of the blocks that show a command behind a $ with its output."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```\n\$ tilewise (.*?)```", page.read_text(), re.DOTALL):
            command, output = block.split("\n", 1)
            found.append((page.name, shlex.split(re.sub(r" --plot \S+", "", command)), output))
    return found


def test_pages_show_what_commands_print() -> None:
    assert "explain.md" in {page for page, _, _ in shown_commands()}


@pytest.mark.parametrize(("page", "arguments", "output"), shown_commands())
def test_output_of_the_pages(page: str, arguments: list[str], output: str) -> None:
    assert CliRunner().invoke(build_app(), arguments).stdout == output, page


@pytest.mark.usefixtures("one_rank")
def test_code_of_the_page_on_context_parallelism() -> None:
    """With one rank, and tensors in the place of a model's. tests/distributed runs it on several."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/distributed.md").read_text(), re.DOTALL)
    q = torch.randn(1, 2, 61, 16)
    local = torch.nn.functional.pad(q, (0, 0, 0, 3))
    names: dict[str, Any] = {"tokens": torch.arange(61)[None], "q": local, "k": local, "v": local}
    exec(compile(code.replace('"cuda", (8,)', '"cpu", (1,)'), "distributed.md", "exec"), names)
    torch.testing.assert_close(names["whole"], tilewise.attention(q, q, q, causal=True))
    assert names["positions"].tolist() == list(range(64))


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_no_commit(page: Path) -> None:
    """Readers have no history to look them up in; the linked JSON files say what was measured."""
    text = re.sub(r"\([^()\s]*\)", "", page.read_text())  # without the targets of links
    words = re.findall(r"(?<![\w.,-])(?:[0-9a-f]{7,12}|[0-9a-f]{40})(?![\w,-])", text)
    assert [word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)] == []
    assert re.findall(r"\bcommit [0-9a-f]{7,40}\b", text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in headings(linked), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for path in re.findall(r"`((?:src|tests|bench|docs|examples)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_source_package_has_what_pages_link_to() -> None:
    """Its tests follow the links, too."""
    tomllib = pytest.importorskip("tomllib")
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    kept = {*targets["sdist"]["include"], "pyproject.toml"}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)", page.read_text()):
            first = (page.parent / target).resolve().relative_to(ROOT).parts[0]
            assert first in kept, f"{page.name} links to {target}"


def test_every_committed_result_is_linked_by_a_page() -> None:
    """A file of figures that no page links to supports no statement. What a run left here itself is not asked for."""
    listed = subprocess.run(["git", "ls-files", "bench/results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    links = {Path(link).name for page in PAGES for link in re.findall(r"\]\(([^)#:]*)", page.read_text())}
    assert {Path(name).name for name in listed.stdout.splitlines()} <= links


def test_the_notebook_runs_and_is_committed_without_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "flash_attention_in_numpy.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    names: dict[str, Any] = {}
    for number, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert "merged halves agree" in capsys.readouterr().out


def test_the_page_of_settings_has_all_of_them() -> None:
    """A setting that is read, its default and its name in the docstring, in the page: nothing more, nothing less."""
    source = (ROOT / "src" / "tilewise" / "settings.py").read_text()
    row = re.compile(r"^\| `(TILEWISE_\w+)` +\| (\S+) +\| ", re.MULTILINE)
    read = set(re.findall(r'"(TILEWISE_\w+)"', source))
    shown = dict(row.findall((ROOT / "docs" / "settings.md").read_text()))
    assert set(shown) == read == set(dict(row.findall(source)))
    assert {f"TILEWISE_{name.upper()}" for name in settings.Settings.__dataclass_fields__} == read
    given = {name: default.strip("`") for name, default in shown.items() if name != "TILEWISE_CACHE_DIR"}
    assert settings.read(given) == settings.read({})
    assert settings.read({}).cache_dir is None
    for page in PAGES:
        assert set(re.findall(r"TILEWISE_[A-Z_]+", page.read_text())) <= read, page.name


def test_the_figures_of_the_h200_are_those_of_the_stored_runs() -> None:
    """Every figure of the tables of speeds, and its ratio, from the JSON that the page calls the official run."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    peers = ("fa4", "fa3", "sdpa-cudnn")
    (name,) = re.findall(r"^The official run of .*?/results/([\w.-]+\.json)", page, re.MULTILINE)
    run = json.loads((ROOT / "bench" / "results" / name).read_text())
    rates = {
        (result["case"]["name"], each["implementation"]): each["rate"] / 1e12
        for result in run["cases"]
        for each in result["measured"]
        if each["status"] == "ok" and each["rate"]
    }
    for lengths, columns in (
        ((1024, 4096, 16384), ("tilewise-hopper", *peers)),
        ((4096,), ("tilewise-triton", "sdpa-flash")),
    ):
        compared = columns[0] == "tilewise-hopper"
        table = page.split("### Against FA4, FA3 and cuDNN" if compared else "### Other kernels")[1].split("\n### ")[0]
        rows = re.findall(r"^\| (forward|backward) D=(\d+) (full|causal) \| (.*) \|$", table, re.MULTILINE)[:12]
        assert len(rows) == 12
        for direction, dim, mask, text in rows:
            cells = [cell.split("/") for cell in text.split(" | ")]
            cases = [f"{direction}-d{dim}-{mask}-n{n}" for n in lengths]
            for who, shown in zip(columns, cells, strict=False):
                if shown == ["–"]:
                    assert (cases[0], who) not in rates
                    continue
                expected = [f"{rates[case, who]:.0f}" for case in cases]
                assert shown == expected, (direction, dim, who)
            if compared:
                best = [max(rates[case, who] for who in peers if (case, who) in rates) for case in cases]
                ratios = [rates[case, columns[0]] / rate for case, rate in zip(cases, best, strict=True)]
                assert cells[-1] == [f"{ratio:.2f}" for ratio in ratios]


def test_the_ratios_of_masks_are_those_of_their_table() -> None:
    """Of a tile mask and the call's own flag: from the least to the most, but for the one that is named."""
    page = (ROOT / "docs" / "masks.md").read_text()
    cells = re.findall(r"([\d.]+) / ([\d.]+)", page.split("| mask, as a tile mask")[1].split("\n\n")[0])
    *ratios, most = sorted(float(mask) / float(flag) for mask, flag in cells)
    shown = re.findall(
        r"^Forward and backward take ([\d.]+) to ([\d.]+) times .*128 ([\d.]+) times", page, re.MULTILINE
    )
    assert shown == [(f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}", f"{most:.2f}")]
    assert len(cells) == 24


def test_the_diagrams_are_what_their_script_draws(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "images"
    spec = importlib.util.spec_from_file_location("diagrams", folder / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HERE = tmp_path
    module.main()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for path in drawn:
        assert path.read_text() == (folder / path.name).read_text(), f"run docs/images/diagrams.py: {path.name}"


def test_the_hopper_page_names_every_file() -> None:
    page = (ROOT / "docs" / "kernels" / "hopper.md").read_text()
    table = page.split("### Files, in the order to read them")[1].split("\n##")[0]
    modules = {path.name for path in (ROOT / "src" / "tilewise" / "backends" / "hopper").glob("*.py")}
    assert {name for name in modules if f"`{name}`" not in table} == {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", table)) <= modules
