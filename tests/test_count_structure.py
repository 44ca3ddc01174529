"""tools/count_structure.py counts what it says."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from pathlib import Path

import pytest

import count_structure
import tilewise.kv
from count_structure import device_lines, host_over_device, is_device, measured, mentions, most_parameters, touched


def test_lines_of_kernels_are_those_of_their_functions(tmp_path: Path) -> None:
    kernel = """
        import triton

        @triton.jit
        def helper(x):

            return x

        @gluon.jit(
            do_not_specialize=["n"],
        )
        def kernel(x, n):
            return x

        def launch(x):
            return x
    """
    path = tmp_path / "kernels.py"
    path.write_text(textwrap.dedent(kernel))
    assert device_lines(path) == 4 + 5
    assert [is_device(node) for node in ast.parse(path.read_text()).body] == [False, True, True, False]


def test_every_line_of_the_gpu_backends_is_counted_once() -> None:
    host, device = host_over_device()
    paths = [p for name in ("gpu", "triton", "hopper") for p in (count_structure.SRC / "backends" / name).glob("*.py")]
    assert host + device == sum(len(path.read_text().splitlines()) for path in paths)
    assert min(host, device) > 1000


def test_names_are_counted_as_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("clip = 1\nclipped = clip\nclips = 2\n")
    (tmp_path / "two.py").write_text("eclipse = 1\n")
    monkeypatch.setattr(count_structure, "SRC", tmp_path)
    assert mentions("clip") == {"one.py": 2}


def test_public_functions_are_not_counted_for_their_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api.py").write_text("def attention(a, b, c, *, d): ...\n")
    (tmp_path / "ops.py").write_text("def one(a, /, b, *, c): ...\n@gluon.jit\ndef kernel(a, b, c, d, e): ...\n")
    monkeypatch.setattr(count_structure, "SRC", tmp_path)
    assert most_parameters() == (3, "ops.py:one")


def test_functions_that_are_called_public_are() -> None:
    """Those beside the files and folders that hold nothing else."""
    counted = {name for _, name in count_structure.host_functions()}
    for prefix in count_structure.PUBLIC:
        assert any(name.startswith(prefix) for name in counted), prefix
    assert {"PagedKVCache", "append_rotated"} <= set(tilewise.kv.__all__)


def test_parts_of_compiled_programs_are_device_code() -> None:
    parts = "@kernel('iii')\ndef scores(e, a, b, c): ...\n@driver\ndef run(p): ...\n@functools.cache\ndef plan(): ...\n"
    assert [is_device(node) for node in ast.parse(parts).body] == [True, True, False]


def test_what_a_first_call_runs_through() -> None:
    found = measured()
    assert {"api.py", "ops.py", "backends/cpu/launch.py"} < set(found["files"])
    assert not {"simulator/forward.py", "plan/planning.py", "schemas.py"} & set(found["files"])
    assert "tilewise.calls._family" in found["caches"]


def test_places_are_changes_that_do_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "tilewise"
    source.mkdir(parents=True)
    monkeypatch.setattr(count_structure, "SRC", source)

    def commit(text: str) -> None:
        (source / "one.py").write_text(text)
        (tmp_path / "beside.py").write_text(text)
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(["git", *who, "commit", "-qm", "x"], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("a\nb\nc\n")
    commit("a\nb\nx\ny\nc\nz\n")
    assert touched("HEAD~1..HEAD") == {"one.py": 2}
    assert touched("HEAD..HEAD") == {}
