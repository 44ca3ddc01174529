"""The cache of compiled CPU kernels: nobody else's code is run, damage is compiled again, one process compiles."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tilewise as tw
from tilewise import settings
from tilewise.backends.cpu import BACKEND, cache, compiler
from tilewise.cli.console import cache_line

# One group: the process that forks others is shared.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kernel-cache")]

SOURCE = Path(tw.__file__).parents[1]
# The program of these tests: the smallest.
PROGRAM = "write_rows"

# Prints whether it copied right, and whether it compiled.
CALL = """
import sys, warnings
warnings.simplefilter("always")
import torch, tilewise
from tilewise.kv.writing import write_rows
k = torch.arange(24.0).view(3, 2, 4)
pages = torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, 2, 4)
write_rows(k, k, *pages, torch.tensor([3, 0, 1]))
right = torch.equal(pages[0].flatten(0, 1)[[3, 0, 1]], k)
print("right" if right else "wrong", "compiled" if "tilewise.backends.cpu.compiler" in sys.modules else "loaded")
"""

# Code of an attacker: ends the process with 77 when it is called.
PLANT = """
import tilewise
from llvmlite import binding
from tilewise import machine_code
from tilewise.backends.cpu import compiler
def planted(_entry):
    source = "declare void @_exit(i32) define void @tilewise_write_rows(i64) { call void @_exit(i32 77) ret void }"
    return bytes(machine_code.target_machine().emit_object(binding.parse_assembly(source)))
compiler.compile_object = planted
"""


# Importing torch takes seconds: one process does it, and forks another one for every code it is given.
SERVER = """
import json, os, sys, traceback
import torch, tilewise, tilewise.kv.writing, llvmlite.binding
for line in sys.stdin:
    code, folder, printed = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(printed, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.environ["TILEWISE_CACHE_DIR"] = folder
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs code in a process of its own, with a folder for kernels."""
    printed = [str(tmp_path_factory.mktemp("printed") / name) for name in ("stdout", "stderr")]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )

    def run(code: str, folder: Path, check: bool = True) -> Done:
        assert server.stdin is not None
        assert server.stdout is not None
        for path in printed:
            Path(path).unlink(missing_ok=True)
        server.stdin.write(json.dumps([textwrap.dedent(code), str(folder), printed]) + "\n")
        server.stdin.flush()
        done = Done(int(server.stdout.readline()), *(Path(path).read_text() for path in printed))
        assert not check or done.returncode == 0, done
        return done

    with server:
        yield run


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE)} | variables


@pytest.fixture(scope="module")
def planted(run_python: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an attacker's program in the place of ours."""
    folder = tmp_path_factory.mktemp("planted")
    assert run_python(PLANT + CALL, folder, check=False).returncode == 77
    assert run_python(CALL, folder, check=False).returncode == 77, "the plant is run where it is trusted"
    return folder


@pytest.fixture
def folder(planted: Path, tmp_path: Path) -> Path:
    """The same to play with."""
    copied = tmp_path / "cache"
    shutil.copytree(planted, copied)
    return copied


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the administrator gives files to others")
    os.chown(path, 54321, 54321)


def load(folder: Path) -> bool:
    """Bring the program into this process; whether it was compiled."""
    compiled: list[object] = []
    plain = compiler.compile_object

    def counted(entry: object) -> bytes:
        compiled.append(entry)
        return plain(entry)

    with pytest.MonkeyPatch.context() as patch, settings.overridden(cache_dir=folder):
        patch.setattr(compiler, "compile_object", counted)
        assert cache._loaded.__wrapped__(PROGRAM).address != 0
    return bool(compiled)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777], ids=oct)
def test_code_in_a_folder_that_others_can_write_is_not_run(run_python: Run, folder: Path, mode: int) -> None:
    folder.chmod(mode)
    before = only_file(folder).read_bytes()
    done = run_python(CALL + CALL, folder)
    assert done.stdout.split() == ["right", "compiled"] * 2
    assert done.stderr.count(f"chmod 700 {folder}") == 1
    assert only_file(folder).read_bytes() == before, "nothing is written there"


def test_code_in_another_user_s_folder_is_not_run(run_python: Run, folder: Path) -> None:
    give_away(folder)
    done = run_python(CALL, folder)
    assert done.stdout.split() == ["right", "compiled"]
    assert "belongs to user 54321" in done.stderr
    assert "Set TILEWISE_CACHE_DIR to a directory of your own" in done.stderr


@pytest.mark.parametrize("mode", [None, 0o666, 0o620], ids=["another user's", "0o666", "0o620"])
def test_a_file_that_others_own_or_can_write_is_not_run_but_replaced(
    run_python: Run, folder: Path, mode: int | None
) -> None:
    file = only_file(folder)
    give_away(file) if mode is None else file.chmod(mode)
    assert run_python(CALL, folder).stdout.split() == ["right", "compiled"]
    assert (only_file(folder).stat().st_uid, mode_of(only_file(folder))) == (os.geteuid(), 0o600)
    assert run_python(CALL, folder).stdout.split() == ["right", "loaded"]


def test_a_link_is_not_followed_but_replaced(folder: Path, tmp_path: Path) -> None:
    file = only_file(folder)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert load(folder)
    assert not only_file(folder).is_symlink()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder: Path) -> None:
    file = only_file(folder)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert load(folder)


def test_folders_are_made_for_the_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert load(tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new" / "cache") == 0o700
    assert mode_of(only_file(tmp_path / "new" / "cache")) == 0o600


GARBAGE = """
import tilewise
from tilewise.backends.cpu import compiler
real = compiler.compile_object
def garbage(entry):
    code = real(entry)
    return {made}
compiler.compile_object = garbage
"""


@pytest.mark.parametrize(
    "made",
    [
        "b''",
        "b'garbage' * 1000",
        "code[:-100]",
        "code[:64] + bytes(range(256)) * 20",
        "code[:18] + (243).to_bytes(2, 'little') + code[20:]",
        "code.replace(b'tilewise_write_rows', b'tilewise_other_rows')",
    ],
    ids=["empty", "bytes", "truncated", "header alone", "another machine", "another program"],
)
def test_garbage_with_a_right_checksum_is_compiled_again(run_python: Run, made: str, tmp_path: Path) -> None:
    """Whoever wrote the file knew how: its checksum is right, what it covers is no object for this machine."""
    run_python(GARBAGE.format(made=made) + CALL, tmp_path, check=False)
    written = only_file(tmp_path).read_bytes()
    assert run_python(CALL, tmp_path).stdout.split() == ["right", "compiled"]
    assert only_file(tmp_path).read_bytes() != written


@pytest.mark.parametrize("place", [0, 20, 40, 1000, -1])
def test_a_flipped_bit_is_compiled_again(place: int, tmp_path: Path) -> None:
    load(tmp_path)
    content = bytearray(only_file(tmp_path).read_bytes())
    content[place] ^= 4
    only_file(tmp_path).write_bytes(content)
    assert load(tmp_path)
    assert not load(tmp_path)


def test_a_full_disk_leaves_no_partial_file(run_python: Run, tmp_path: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    done = run_python(limited + CALL, tmp_path)
    assert done.stdout.split() == ["right", "compiled"]
    assert done.stderr.count("TILEWISE_CACHE_DIR") == 1
    assert list(tmp_path.iterdir()) == []


EIGHT = """
import os, time
import torch, tilewise
from tilewise.backends.cpu import compiler, cache
plain = compiler.compile_object
def counted(entry):
    os.write(1, b"compiled ")
    time.sleep(0.5)
    return plain(entry)
compiler.compile_object = counted
begin, go = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(begin, 1)
        os._exit(0 if cache.program("write_rows").address else 1)
    children.append(child)
os.close(go)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_eight_cold_processes_compile_once(run_python: Run, tmp_path: Path) -> None:
    assert run_python(EIGHT, tmp_path).stdout.split() == ["compiled", *"00000000"]
    assert mode_of(only_file(tmp_path)) == 0o600, "and leave nothing but the program"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process has the lock: locks belong to open descriptors, so it may be this one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_a_process_that_never_ends_is_waited_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PATIENCE_SECONDS", 0.3)
    start = time.monotonic()
    with held(tmp_path):
        assert load(tmp_path)
    assert time.monotonic() - start >= 0.3
    assert not load(tmp_path)


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert load(tmp_path)
    assert not load(tmp_path)


def test_systems_without_owners_and_locks_keep_kernels_too(run_python: Run, tmp_path: Path) -> None:
    """As on Windows: no fcntl, no user numbers, no descriptors of folders."""
    elsewhere = """
    import os, sys
    assert "tilewise.backends.cpu.private_folder" not in sys.modules
    sys.modules["fcntl"] = None
    for name in ("geteuid", "getuid", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "register_at_fork"):
        delattr(os, name)
    """
    code = textwrap.dedent(elsewhere) + CALL
    assert run_python(code, tmp_path / "new").stdout.split() == ["right", "compiled"]
    assert run_python(code, tmp_path / "new").stdout.split() == ["right", "loaded"]


def test_a_fork_during_a_compilation_does_not_hang(run_python: Run, tmp_path: Path) -> None:
    code = """
    import os, signal, threading, time
    from tilewise.backends.cpu import cache, compiler
    plain, begun = compiler.compile_object, threading.Event()
    def slow(entry):
        begun.set()
        time.sleep(0.5)
        return plain(entry)
    compiler.compile_object = slow
    threading.Thread(target=cache.program, args=("write_rows",)).start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if cache.program("append_quantised").address else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code, tmp_path).stdout.split() == ["0"]


def test_reports_say_that_a_folder_is_not_used(tmp_path: Path) -> None:
    load(tmp_path)
    with settings.overridden(cache_dir=tmp_path):
        state = BACKEND.cache_state()
        assert (state["entries"], state["writable"], state["refused"]) == (1, True, None)
        tmp_path.chmod(0o777)
        state = BACKEND.cache_state()
    assert (state["entries"], state["writable"]) == (0, False)
    assert cache_line(state) == f"{tmp_path} is not used: its mode 0777 lets other users write to it"
