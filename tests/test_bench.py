"""The benchmark: what it counts, that it catches a wrong result, judges each contestant by what it may round, and
reports honestly.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from suite import report, results, runner, verdicts
from suite.__main__ import main
from suite.cases import Bar, Case
from suite.checking import Checker
from suite.cpu_cases import cpu_cases
from suite.gpu_cases import gpu_cases
from suite.implementations import Implementation, NotApplicable, Prepared, results_of
from suite.inputs import Inputs, make_inputs
from suite.peers import implementations
from suite.results import CaseResult, Measured, Results
from tilewise.errors import InvalidProblem

REGISTRIES = (cpu_cases("aarch64"), cpu_cases("x86_64"), gpu_cases())
LIMITS = runner.Limits(seconds_per_case=0.02, max_seconds=60.0, threads=1)


def small(**fields: Any) -> Case:
    defaults: dict[str, Any] = {
        "name": "small", "group": "test", "measure": "forward", "device": "cpu", "dtype": "float32", "batch": 2,
        "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 70, "seqlen_k": 70, "head_dim": 16,
        "implementations": ("sdpa",),
    }  # fmt: skip
    return Case(**(defaults | fields))


def by_name(registry: tuple[Case, ...], name: str) -> Case:
    return next(case for case in registry if case.name == name)


# --- the registries


@pytest.mark.parametrize("registry", REGISTRIES, ids=["aarch64", "x86_64", "gpu"])
def test_names_are_unique_and_every_bar_can_be_judged(registry: tuple[Case, ...]) -> None:
    names = [case.name for case in registry]
    assert len(set(names)) == len(names)
    known = set(implementations(registry[0].device)) | {"tilewise-hopper", "tilewise-hopper-deterministic"}
    for case in registry:
        assert set(case.implementations) <= known, case.name
        for bar in case.bars:
            assert bar.subject in (*case.implementations, "tilewise"), case.name
            assert set(bar.against) <= set(case.implementations), case.name
            assert bar.case is None or bar.case in names, case.name
    assert 5 < sum(case.quick for case in registry) < len(registry) / 2


def test_work_is_counted_as_documented() -> None:
    full = by_name(gpu_cases(), "forward-d128-full-n16384")
    assert full.flops == 4 * 16 * 16384**2 * 128
    assert by_name(gpu_cases(), "forward-d128-causal-n16384").flops == full.flops / 2
    assert by_name(gpu_cases(), "backward-d128-full-n16384").flops == full.flops * 2.5
    decode = by_name(gpu_cases(), "decode-b1-n8192")
    assert decode.kv_bytes == 2 * 8 * 8192 * 128 * 2
    # 30 us at 1,114 GB/s: the published pair.
    assert decode.rate(30.1e-6) == pytest.approx(1114e9, rel=0.01)
    ragged = small(kind="varlen", batch=2, seqlens=(3, 5), seqlen_q=5, seqlen_k=5)
    assert ragged.flops == 4 * 4 * 16 * (9 + 25)
    window = small(causal=True, window=(7, 0))
    rows = sum(len([j for j in range(70) if i - 7 <= j <= i]) for i in range(70))
    assert window.pairs == 2 * rows
    assert small(measure="overhead").rate(1.0) is None


# --- the run


def contestants() -> dict[str, Implementation]:
    def off(case: Case, inputs: Inputs) -> Prepared:
        right = implementations("cpu")["sdpa"].prepare(case, inputs)
        return dataclasses.replace(right, call=lambda: right.call() + 1e-3)

    def refuses(_case: Case, _inputs: Inputs) -> Prepared:
        raise NotApplicable("not for this one")

    def raises(_case: Case, _inputs: Inputs) -> Prepared:
        raise RuntimeError("broken\nwith a long tail")

    def fails_later(case: Case, inputs: Inputs) -> Prepared:
        right, calls = implementations("cpu")["sdpa"].prepare(case, inputs), iter(range(3))

        def call() -> Tensor:
            if next(calls, None) is None:
                raise RuntimeError("once too often")
            return right.call()

        return dataclasses.replace(right, call=call)

    fakes = {"off": off, "refuses": refuses, "raises": raises, "fails-later": fails_later}
    found = {name: Implementation(name, prepare) for name, prepare in fakes.items()}
    found["absent"] = Implementation("absent", off, missing="package absent is not installed")
    return found | {name: i for name, i in implementations("cpu").items() if name in ("sdpa", "naive")}


def run_small(**fields: Any) -> CaseResult:
    names = ("sdpa", "naive", "off", "refuses", "raises", "fails-later", "absent", "unheard-of")
    case = small(
        implementations=names, bars=(Bar("naive", 1e9, against=("sdpa",)), Bar("off", 1.0, against=("sdpa",))), **fields
    )
    return next(iter(runner.run([case], contestants(), LIMITS, lambda _: None)))


def whole(*cases: CaseResult, device: str = "cpu", name: str = "Test Chip(R) 1") -> Results:
    machine = {"cpu": name, "gpu": name, "cores": 2}
    options = {"device": device, "threads": 2}
    return Results(machine, {"torch": "2.10"}, "0123456789ab", "2030-01-02T03:04:05Z", options, cases)


def test_nobody_is_fatal_and_a_wrong_ones_speed_is_not_kept() -> None:
    result = run_small()
    status = {m.implementation: m.status for m in result.measured}
    assert status == {
        "sdpa": "ok", "naive": "ok", "off": "wrong", "refuses": "skipped", "raises": "failed", "fails-later": "failed",
        "absent": "missing", "unheard-of": "missing",
    }  # fmt: skip
    found = {m.implementation: m for m in result.measured}
    assert found["off"].value is None
    assert found["off"].error == pytest.approx(1e-3, rel=0.2)
    assert found["raises"].detail == "RuntimeError: broken"
    assert found["sdpa"].value is not None
    assert found["sdpa"].rate == pytest.approx(result.case.flops / found["sdpa"].value)
    text = report.plain(whole(result))
    for part in ("wrong", "failed", "once too often", "absent is not installed", "not for this one", "MISS naive"):
        assert part in text
    assert "0 passed, 1 missed, 1 could not be judged" in text


def test_results_survive_the_file(tmp_path: Path) -> None:
    everything = whole(run_small(window=(5, None), causal=False), run_small(measure="backward"))
    path = tmp_path / "file.json"
    results.write(everything, path, verdicts.judge_all(everything))
    assert results.read(path) == everything
    assert report.plain(results.read(path)) == report.plain(everything)
    path.write_text('{"format": 99}')
    with pytest.raises(InvalidProblem):
        results.read(path)


# --- who is wrong


KINDS = [
    small(),
    small(causal=True, window=(9, 0), seqlen_q=65, seqlen_k=130),
    small(causal=True, measure="backward"),
    small(dtype="bfloat16", measure="backward"),
    small(kind="varlen", batch=3, seqlens=(70, 1, 33), causal=True, measure="backward"),
    small(kind="varlen", batch=2, seqlens=(70, 70), causal=True, measure="backward"),
    small(kind="paged", seqlen_q=1, page_size=16, seqlen_k=50),
    small(dtype="bfloat16", causal=True, e4m3_values=True, recorded=True),
]


@pytest.mark.parametrize("case", KINDS, ids=lambda c: f"{c.kind}-{c.batch}-{c.measure}-{c.dtype}")
def test_right_results_pass_and_slightly_wrong_ones_do_not(case: Case) -> None:
    inputs = make_inputs(case)
    checker = Checker(case, inputs)
    peer = {"dense": "sdpa", "varlen": "sdpa-padded", "paged": "sdpa-gather"}[case.kind]
    as_dense = case.kind == "paged" or (case.kind == "varlen" and len({*case.seqlens}) == 1)
    for name in ("tilewise", *("tilewise-fp8",) * case.e4m3_values, *("tilewise-dense",) * as_dense, peer):
        with torch.set_grad_enabled(case.needs_grad):
            found = results_of(case, implementations("cpu")[name].prepare(case, inputs))
        assert checker.judge(found).complaint is None, name
        for result in found:
            # The last component of the last sequence (of the first one, where they are packed) is off by half.
            broken = dict(found) | {result: found[result].detach().clone()}
            broken[result][69 if case.kind == "varlen" else -1, ..., -1] *= 1.5
            assert checker.judge(broken).complaint is not None, (name, result)
            assert checker.judge(broken).error > checker.judge(found).error
    poisoned = dict(found) | {"out": torch.full_like(found["out"], torch.nan)}
    assert checker.judge(poisoned).complaint is not None


def test_only_packed_sequences_of_one_length_are_compared_with_dense_tensors() -> None:
    case = small(kind="varlen", batch=2, seqlens=(70, 33))
    with pytest.raises(NotApplicable, match="of one length"):
        implementations("cpu")["tilewise-dense"].prepare(case, make_inputs(case))


def test_only_contestants_that_round_as_fp8_tensor_cores_do_may_be_as_coarse() -> None:
    names = ("fine", "coarse", "sdpa")
    case = small(dtype="bfloat16", num_kv_heads=4, seqlen_k=300, e4m3_values=True, implementations=names)

    def rounding(case: Case, inputs: Inputs) -> Prepared:
        """Probabilities in e4m3, of which the largest of a row is 256."""
        right = implementations("cpu")["sdpa"].prepare(case, inputs)
        s = inputs.q.double() @ inputs.k.double().mT / math.sqrt(case.head_dim)
        p = torch.exp(s - s.amax(-1, keepdim=True)) * 256.0
        out = (p.to(torch.float8_e4m3fn).double() @ inputs.v.double()) / p.sum(-1, keepdim=True)
        return dataclasses.replace(right, call=lambda: out.bfloat16())

    known = {
        "fine": Implementation("fine", rounding),
        "coarse": Implementation("coarse", rounding, coarse=True),
        "sdpa": implementations("cpu")["sdpa"],
    }
    measured = next(iter(runner.run([case], known, LIMITS, lambda _: None))).measured
    assert [(m.implementation, m.status) for m in measured] == [("fine", "wrong"), ("coarse", "ok"), ("sdpa", "ok")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_may_be_coarse(device: str) -> None:
    """On a CPU e4m3 operands have the bits of the dequantised tensors' attention."""
    coarse = [name for name, i in implementations(device).items() if i.coarse]
    assert coarse == ([] if device == "cpu" else ["tilewise-fp8"])


# --- bars


def measured(case: Case, name: str, seconds: float) -> Measured:
    return Measured(name, "ok", value=seconds, low=seconds, high=seconds, samples=5, calls=1, rate=case.rate(seconds))


def result_of(case: Case, auto: str | None = None, **seconds: float) -> CaseResult:
    return CaseResult(case, auto, tuple(measured(case, name.replace("_", "-"), s) for name, s in seconds.items()))


@pytest.mark.parametrize(
    ("bar", "value", "passed"),
    [
        (Bar("tilewise", 1.5, against=("sdpa", "fa4")), 2.0, True),
        (Bar("tilewise", 2.5, against=("sdpa", "fa4")), 2.0, False),
        (Bar("tilewise", 1.0, against=("fa4",)), None, None),
        (Bar("nobody", 1.0, against=("sdpa",)), None, None),
        (Bar("tilewise", 0.4, case="other", by="rate"), 0.5, True),
        (Bar("tilewise", 0.6, case="other", by="speed"), 0.5, False),
        (Bar("tilewise", 1.0, case="elsewhere"), None, None),
        (Bar("tilewise", 1.1, by="seconds"), 1.0, True),
        (Bar("tilewise", 0.9, by="seconds"), 1.0, False),
    ],
)
def test_verdicts(bar: Bar, value: float | None, passed: bool | None) -> None:
    case = small(bars=(bar,))
    result = result_of(case, tilewise=1.0, sdpa=2.0)
    other = result_of(small(name="other"), tilewise=0.5)
    (verdict,) = verdicts.judge_case(result, [result, other], "chip")
    assert (verdict.value, verdict.passed) == (value, passed)
    assert ("pass" in verdict.text, "MISS" in verdict.text) == (passed is True, passed is False)


# --- output


def test_text_command_runs_and_reports_a_stored_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    common = ["--device", "cpu", "--only", "overhead", "--seconds-per-case", "0.05"]
    assert main([*common, "--threads", "1", "--output", str(path)]) == 0
    first = capsys.readouterr()
    assert "overhead-n1" in first.out
    assert "[1/1]" in first.err
    assert main(["--results", str(path)]) == 0
    assert capsys.readouterr().out == first.out
    stored = results.read(path)
    assert stored.options["threads"] == 1
    assert stored.machine["cores"] > 0
    assert {"tilewise", "python", "torch"} <= set(stored.versions)
    assert main(["--device", "tpu"]) == 2
    assert "auto, cpu or cuda" in capsys.readouterr().err


@pytest.mark.parametrize("contents", [None, "no JSON", "[]", '{"format": 1}', '{"format": 1, "cases": [{}]}'])
def test_a_file_without_results_is_one_line_and_status_2(
    contents: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if contents is not None:
        path.write_text(contents)
    assert main(["--results", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: results: expected a benchmark file")
    assert len(said.err.splitlines()) == 1


def test_output_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "run.json"):
        assert main(["--device", "cpu", "--output", str(path)]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: output: expected a file that can be written")
        assert len(said.err.splitlines()) == 1
    assert main(["--device", "cpu", "--output", str(tmp_path / "new" / "run.json")]) == 2
    assert "there is no " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    results.ensure_writable(tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()
