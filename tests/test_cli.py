"""The command line: what each command prints, its JSON, its errors, and that nothing else loads its libraries."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from making import invoke
from tilewise import dispatch, settings
from tilewise.backends.cpu import cache
from tilewise.cli import COMMANDS, demo
from tilewise.cli.demo import Measurement, Round
from tilewise.units import counted

MIB = 1 << 20


def succeed(*arguments: str, columns: int = 80) -> str:
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def read(*arguments: str) -> Any:
    return json.loads(succeed(*arguments, "--json"))


# --- help and errors


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    text = succeed(name, "--help")
    assert "Example:" in text
    assert "--json" in text
    assert f"tilewise {name}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_has_a_short_name() -> None:
    for name in ((), *((name,) for name in COMMANDS)):
        assert succeed(*name, "-h") == succeed(*name, "--help")


def test_the_bare_command_lists_every_command() -> None:
    text = invoke().output
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h300"), "error: device: expected one of cpu, v100"),
        (("--heads", "3", "--kv-heads", "2"), "error: num_heads: expected a multiple"),
        (("--window", "3"), "error: --window: expected 'left,right'"),
        (("--window", "-1,0"), "error: --window: expected 'left,right'"),
        (("--dropout", "1.5"), "error: dropout: expected a probability"),
        (("--backend", "magic"), "error: backend: expected 'auto' or one of"),
        (("--head-dim", "1000"), "error: head_dim: expected at most 576"),
        (("--batch", "1000000000000"), "error: sizes: expected a tensor of less than 2^63 bytes"),
        (("--batch", "9" * 30), "error: sizes: expected a tensor of less than 2^63 bytes"),
        (("--plot", "plan.png"), "error: plot: expected a name that ends in .svg, got plan.png"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("explain", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["-5", "1e6", "", "17M", "9" * 30, "k", "²", "nan"])
def test_lengths_that_are_none_are_refused_at_once(text: str) -> None:
    result = invoke("explain", f"--seqlen={text}")
    assert result.exit_code == 2
    assert "up to 16M" in " ".join(result.stderr.split())


def test_nonsense_is_refused_by_the_parser() -> None:
    assert invoke("explain", "--dtype", "int8").exit_code == 2
    assert invoke("demo", "--max-seqlen", "1").exit_code == 2
    assert invoke("fly").exit_code == 2


def test_errors_are_json_on_stdout_where_json_was_asked_for() -> None:
    result = invoke("explain", "--json", "--device", "h300")
    assert (result.exit_code, result.stderr) == (2, "")
    assert json.loads(result.stdout)["error"].startswith("device: expected one of cpu, v100")


def test_version() -> None:
    assert succeed("--version") == f"tilewise {tw.__version__}\n"


# --- doctor


def test_doctor_shows_versions_devices_backends_and_settings() -> None:
    text = " ".join(succeed("doctor").split())
    assert f"torch {torch.__version__}" in text
    assert "measured:" in text
    for status in tw.backends():
        assert f"{status.name} {'available' if status.reason is None else 'no:'}" in text
    assert "check_values False" in text


def test_doctor_as_json() -> None:
    findings = read("doctor")
    assert findings["versions"]["tilewise"] == tw.__version__
    assert [found["name"] for found in findings["backends"]] == [status.name for status in tw.backends()]
    assert findings["devices"][0]["flops"]["float32"] > 1e8
    q = torch.empty(1, 1, 128, 64)
    assert findings["devices"][0]["backend"] == tw.explain(q, q, q).backend
    with settings.overridden(check_values=True):
        assert read("doctor")["settings"]["check_values"] is True


def test_doctor_shows_the_cpu_cache(tmp_path: Path) -> None:
    (tmp_path / cache.file_name("forward")).write_bytes(b"12345")
    with settings.overridden(cache_dir=tmp_path):
        found = {backend["name"]: backend["cache"] for backend in read("doctor")["backends"]}["cpu"]
        assert f"1 of {len(cache.programs())} programs, 5 B in {tmp_path}" in succeed("doctor", columns=300)
    counts = {"entries": 1, "entries_when_full": len(cache.programs()), "size_bytes": 5}
    assert found == {"path": str(tmp_path), "writable": True, "refused": None} | counts


def test_doctor_says_which_triton_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    releases = importlib.import_module("tilewise.backends.gpu.releases")
    for name in ("triton", "hopper"):
        monkeypatch.setattr(dispatch.load(name), "unavailable", lambda: None)
    for number, words in (
        ("3.9.0", "triton 3.9.0, a release that was tested"),
        ("3.10.1", "triton 3.10.1, newer than those that were tested (3.6 to 3.9); hopper kernels were tried"),
    ):
        monkeypatch.setattr(releases, "installed", lambda number=number: number)
        found = {backend["name"]: backend["compiler"] for backend in read("doctor")["backends"]}
        assert found["hopper"].startswith(words)
        assert found["cpu"] is None
        assert f"compiled by {words}" in succeed("doctor", columns=200)


# --- warmup


@pytest.fixture
def stub_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Programs of five bytes in a folder of their own."""
    monkeypatch.setattr(cache, "program", lambda name: (tmp_path / cache.file_name(name)).write_bytes(b"12345"))
    with settings.overridden(cache_dir=tmp_path):
        yield tmp_path


def test_warmup_fills_the_cache_and_says_what_it_left_out(stub_compiler: Path) -> None:
    count = len(cache.programs())
    assert f"cpu: {count} of {count} programs, {5 * count} B in {stub_compiler}" in succeed("warmup")
    assert "reference: skipped, " in succeed("warmup")
    filled = {found["name"]: found for found in read("warmup")["backends"]}
    assert list(filled) == [status.name for status in tw.backends()]
    assert filled["cpu"]["skipped"] is None
    assert filled["cpu"]["cache"]["entries"] == count
    assert filled["reference"]["cache"] is None


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_warmup_says_what_a_compiler_could_not_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence for each backend, and with an exit status that a build of an image stops at."""
    pytest.importorskip("triton")

    def broken(call: Any, *_: Any) -> Any:
        raise RuntimeError(f"no such name in {call.kernel.__name__}\nand a page of details")

    monkeypatch.setattr(importlib.import_module("tilewise.backends.gpu.warmup"), "compile_call", broken)
    releases = importlib.import_module("tilewise.backends.gpu.releases")
    result = invoke("warmup", "--device", "h200", columns=200)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    line = rf"{name}: failed, triton {releases.installed()} could not compile \w+ for .*: RuntimeError: no such name"
    assert re.search(line, result.output)
    found = {one["name"]: one for one in json.loads(invoke("warmup", "--device", "h200", "--json").stdout)["backends"]}
    assert "no such name" in found[name]["failed"]


@pytest.mark.usefixtures("stub_compiler")
def test_warmup_that_keeps_too_little_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "program", lambda _name: None)
    result = invoke("warmup", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["backends"]


@pytest.fixture
def stub_gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Kernels for a GPU are counted instead of compiled."""
    pytest.importorskip("triton")
    warmup = importlib.import_module("tilewise.backends.gpu.warmup")
    compiled: list[tuple[str, Any]] = []

    def compile_call(call: Any, gpu: Any, index: int) -> Any:
        assert index == -1
        compiled.append((call.kernel.__name__, gpu))
        return types.SimpleNamespace(kernel=b"12345")

    monkeypatch.setattr(warmup, "compile_call", compile_call)
    return compiled


def test_warmup_compiles_for_a_gpu_that_is_not_here(stub_gpu_compiler: list[tuple[str, Any]]) -> None:
    filled = {found["name"]: found for found in read("warmup", "--device", "h200")["backends"]}
    assert filled["cpu"]["skipped"] == "compiles nothing for h200"
    names = [name for name, _ in stub_gpu_compiler]
    assert {gpu.name for _, gpu in stub_gpu_compiler} == {"NVIDIA H200"}
    assert {"backward_kernel", "decode_kernel", "combine_kernel"} <= set(names)
    found = filled["hopper"]["cache"]["entries"] + filled["triton"]["cache"]["entries"]
    assert found == len(names)
    assert filled["triton"]["cache"]["size_bytes"] == 5 * filled["triton"]["cache"]["entries"]


def test_warmup_refuses_devices_it_does_not_know() -> None:
    assert "one of cpu, " in invoke("warmup", "--device", "abacus").output
    assert "none is visible to torch" in invoke("warmup", "--device", "cuda").output or torch.cuda.is_available()


# --- explain


def test_explain_prints_the_plan() -> None:
    q = torch.empty(2, 8, 512, 64, dtype=torch.float16, device="meta", requires_grad=True)
    kv = torch.empty(2, 4, 1024, 64, dtype=torch.float16, device="meta")
    v = torch.empty(2, 4, 1024, 32, dtype=torch.float16, device="meta")
    plan = tw.explain(q, kv, v, causal=True, window=(100, None), device="a100")
    sizes = shlex.split("--batch 2 --seqlen-q 512 --seqlen-k 1024 --heads 8 --kv-heads 4 --head-dim 64 --head-dim-v 32")
    flags = shlex.split("--dtype float16 --causal --window 100, --backward --device a100")
    assert succeed("explain", *sizes, *flags) == f"{plan}\n"
    assert read("explain", *sizes, *flags) == json.loads(json.dumps(plan.to_dict()))


def test_explain_takes_every_feature() -> None:
    flags = shlex.split("--seqlen 256 --softcap 30 --alibi --sinks --bias --mask --dropout 0.1 --device h100")
    assert read("explain", *flags)["features"] == ["alibi", "softcap", "bias", "mask", "sinks", "dropout"]


@pytest.mark.parametrize("queries", [1, 5])
def test_explain_takes_pages(queries: int) -> None:
    pages = torch.empty(3 * 65, 16, 2, 64, dtype=torch.bfloat16, device="meta")
    q = torch.empty(3 * queries, 8, 64, dtype=torch.bfloat16, device="meta")
    table, lengths, cu = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((3, 65), (3,), (4,)))
    packed: dict[str, Any] = {} if queries == 1 else {"cu_seqlens_q": cu, "max_seqlen_q": 5}
    plan = tw.explain(q, pages, pages, block_table=table, seqlens_k=lengths, causal=True, device="h200", **packed)
    sizes = f"--batch 3 --seqlen-q {queries} --seqlen-k 1025 --heads 8 --kv-heads 2 --head-dim 64 --page-size 16"
    assert succeed("explain", *sizes.split(), "--causal", "--device", "h200") == f"{plan}\n"


@pytest.mark.parametrize("short", ["fp16", "bf16", "fp32", "fp64"])
def test_explain_takes_short_names_of_dtypes(short: str) -> None:
    long_name = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[short]
    plan = read("explain", "--device", "cpu", "--dtype", short)
    assert plan == read("explain", "--device", "cpu", "--dtype", long_name)
    assert plan["problem"]["dtype"] == long_name


def test_explain_fails_where_no_backend_takes_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.load("reference"), "supports", lambda *_: "not today")
    for flags in ((), ("--json",)):
        result = invoke("explain", "--backend", "reference", "--device", "cpu", *flags)
        assert result.exit_code == 1
        assert "not today" in result.stdout


# --- demo

TINY = ("--max-seqlen", "512", "--heads", "1", "--head-dim", "16")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of each implementation instead of up to twenty."""
    monkeypatch.setattr(demo, "MOST_CALLS", 2)


@pytest.mark.usefixtures("hurried")
def test_demo_compares_time_memory_and_error() -> None:
    text = succeed("demo", *TINY)
    for part in ("full:", "causal:", "256", "512", "You saw the same attention at 512 tokens", "exact up to rounding"):
        assert part in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("hurried")
def test_demo_as_json_is_measured() -> None:
    result = read("demo", *TINY)
    assert [(r["seqlen"], r["causal"]) for r in result["rounds"]] == [
        (256, False), (256, True), (512, False), (512, True),
    ]  # fmt: skip
    for played in result["rounds"]:
        for side in ("naive", "tiled"):
            assert 0 < played[side]["seconds"] < 60
            assert played[side]["error"] < 1e-5
        # Two matrices of scores: what naive attention cannot do without.
        assert played["naive"]["extra_memory"] > 1.5 * played["seqlen"] ** 2 * 4
    assert result["rounds"][2]["tiled"]["extra_memory"] < result["rounds"][2]["naive"]["extra_memory"]


def test_the_summary_tells_slow_and_wrong_results_as_they_are() -> None:
    good, slow = Measurement(1.0, 100 * MIB, 1e-7), Measurement(2.0, 10 * MIB, 1e-2)
    summary = demo._summary("cpu", [Round(256, False, good, slow, 0)])
    assert "2.0x slower" in summary
    assert "10x less extra memory" in summary
    assert "its error is larger than rounding explains" in summary
    assert demo._summary("cpu", [Round(256, False, None, slow, 0)]).startswith("Nothing was compared")
    full = Round(256, False, good, slow, 0)
    for said, seconds in {"1.2x faster": 2.0 / 1.2, "here it was not": 2.5}.items():
        causal = Round(256, True, good, Measurement(seconds, 10 * MIB, 1e-7), 0)
        assert said in demo._summary("cpu", [full, causal])


def test_demo_says_why_it_stops() -> None:
    some, limits = Measurement(1.0, MIB, 1e-7), demo.Limits(16384, 45.0, 6.0, 2 * MIB)
    rounds = [Round(4096, causal, some, some, MIB) for causal in (False, True)]
    assert demo._stopped([*rounds, Round(16384, True, some, some, MIB)], limits) is None
    assert demo._stopped(rounds, limits) == (
        "Stopped at 4,096 of 16,384 tokens: the next length would have ended after 45 s; --seconds allows more."
    )
    for needs, option in ((4 * MIB, "more than 2.00 MiB from here on; --naive-memory"), (MIB, "--naive-seconds")):
        assert option in str(demo._stopped([Round(8192, False, None, some, needs)], limits))


@pytest.mark.usefixtures("hurried")
def test_demo_that_stops_says_so_with_its_limit() -> None:
    text = succeed("demo", *TINY, "--seconds", "0")
    assert "Stopped at 256 of 512 tokens" in text
    assert "would have ended after 0 s" in " ".join(text.split())
    assert "1 head," in text
    assert read("demo", *TINY, "--seconds", "0")["stopped"].startswith("Stopped at 256 of 512")


# --- numbers


def test_one_thing_is_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [counted(n, "thread") for n in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
    assert counted(1, "query", "queries") == "1 query"
    assert counted(1200, "query", "queries", spec=",") == "1,200 queries"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = " ".join(succeed("doctor").split())
    assert "1 thread" in found
    assert "1 threads" not in found
    text = succeed("explain", "--seqlen-q", "1", "--seqlen-k", "1", "--heads", "1", "--device", "h200")
    assert "1 head, 1 query x 1 key," in " ".join(text.split())
    ranks = ("--context-parallel", "1", "--seqlen", "1", "--heads", "1", "--device", "h200")
    assert "1 token x 1 over 1 rank, 1 token each" in " ".join(succeed("explain", *ranks).split())
    cache = tw.PagedKVCache(1, 1, 1, 1, 8, dtype=torch.float32, device="cpu")
    assert "1 page of 1 token, 1 layer of" in repr(cache)


# --- files


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("explore --export", "export"),
        ("profile --trace", "trace"),
        ("explain --device h200 --plot", "plot"),
        ("bench --quick --output", "output"),
        ("accuracy --plot", "plot"),
    ],
)
def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path: Path, command: str, option: str) -> None:
    ending = {"export": "html", "plot": "svg"}.get(option, "json")
    result = invoke(*command.split(), str(tmp_path / "new" / f"file.{ending}"))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option}: expected a file in a folder that exists")
    assert f"there is no {tmp_path / 'new'}" in result.stderr
    assert not (tmp_path / "new").exists()


# --- the process


def test_python_m_tilewise() -> None:
    command = [sys.executable, "-m", "tilewise", "explain", "--device", "h300"]
    bad = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: device: expected one of")
    assert "Traceback" not in bad.stderr
