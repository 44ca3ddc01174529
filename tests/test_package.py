"""What is published: the wheel and the sdist, and what a package index shows of them."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/tilewise/tilewise"
# Where the built README finds files of the repository.
FILES = (f"{HOME}/blob/main/", "https://raw.githubusercontent.com/tilewise/tilewise/main/")

# One group: the wheel is shared.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package")]
pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")

# Python has it from 3.11.4 on.
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def build(source: Path, target: str, folder: Path) -> Path:
    """The wheel or sdist of a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (found,) = [text for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(found)


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **FILTER)
    again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path / "again")
    assert again.name == wheel.name == f"{sdist.name.removesuffix('.tar.gz')}-py3-none-any.whl"
    expected, found = contents(wheel), contents(again)
    assert sorted(found) == sorted(expected)
    assert [name for name in found if found[name] != expected[name]] == []


def test_the_wheel_has_the_whole_package(wheel: Path) -> None:
    package = ROOT / "src"
    shipped = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    shipped = {name for name in shipped if "__pycache__" not in name and ".egg-info" not in name}
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == shipped
    assert "tilewise/py.typed" in shipped


def test_the_page_of_an_index_leads_to_the_project(wheel: Path) -> None:
    urls = dict(line.split(", ") for line in metadata(wheel).get_all("Project-URL", []))
    assert urls["Homepage"] == HOME
    assert set(urls) >= {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(HOME) for url in urls.values())


def test_links_and_images_of_the_readme_work_on_an_index(wheel: Path) -> None:
    """README.md links to files beside it; the built one to where they are read from anywhere."""
    page = metadata(wheel)
    assert page["Description-Content-Type"] == "text/markdown"
    text = str(page.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert len([image for image, _ in links if image]) >= 2
    for image, target in links:
        assert target.startswith(("https://", "#")), target
        if target.startswith(FILES):
            where = FILES[1] if image else FILES[0]
            assert target.startswith(where), target
            assert (ROOT / target.removeprefix(where).split("#")[0]).exists(), target
    assert "](docs/" in (ROOT / "README.md").read_text()


def test_versions_of_python_agree(wheel: Path) -> None:
    """Those named as tested are among those that may install it."""
    page = metadata(wheel)
    (least,) = re.findall(r">=3\.(\d+)", page["Requires-Python"])
    named = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c) for c in page.get_all("Classifier", [])]
    assert min(int(found[1]) for found in named if found) >= int(least)
