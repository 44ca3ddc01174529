"""What is shown of a plan and of a run: tile advice, `explain --plot` and `--tiles`, `profile`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from making import invoke
from tilewise.cli import profile
from tilewise.device import DEVICES
from tilewise.masks import TileGrid


def plan(device: str = "h100", dtype: torch.dtype = torch.float16, **sizes: Any) -> tw.Plan:
    shape = {"seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 128, "grad": False} | sizes
    q = torch.empty(1, 4, shape["seqlen_q"], shape["head_dim"], dtype=dtype, device="meta")
    k = torch.empty(1, 4, shape["seqlen_k"], shape["head_dim"], dtype=dtype, device="meta")
    return tw.explain(q.requires_grad_(shape["grad"]), k, k, device=device)


# --- tile advice


@pytest.mark.parametrize(
    ("device", "head_dim", "best"),
    [
        ("v100", 64, (128, 128)),
        ("v100", 128, (128, 64)),
        ("v100", 256, (64, 32)),
        ("a100", 128, (128, 128)),
        ("a100", 256, (64, 64)),
        ("rtx4090", 128, (128, 64)),
        ("h100", 128, (128, 128)),
        ("h100", 256, (128, 64)),
        ("b200", 128, (128, 128)),
    ],
)
def test_the_largest_tile_that_fits(device: str, head_dim: int, best: tuple[int, int]) -> None:
    advice = plan(device, head_dim=head_dim).advice
    assert advice.best == TileGrid(*best)
    option = advice.option(TileGrid(*best))
    assert option is not None
    # One tile of Q, two of K and of V, two bytes an element.
    assert option.fast_bytes == (best[0] + 4 * best[1]) * head_dim * 2 <= DEVICES[device].smem_bytes
    assert option.flops_per_byte == best[0]


def test_advice_says_why_not_the_next_larger_one() -> None:
    text = str(plan("v100", head_dim=128).advice)
    assert text.startswith("128 x 64 is the largest that fits: 96.0 KiB of 96.0 KiB")
    assert text.endswith("not 128 x 128: 160 KiB of fast memory")
    assert str(plan("v100", torch.float64, head_dim=512).advice).startswith("none fits 96.0 KiB")


def test_explain_lists_tiles_and_has_them_in_its_json() -> None:
    text = invoke("explain", "--device", "v100", "--dtype", "fp16", "--backend", "reference", "--tiles").stdout
    assert re.search(r"128 x 64 +96.0 KiB +96 +128  yes", text)
    assert "128 x 128        160 KiB        128        128  no: 160 KiB of fast memory" in text
    found = json.loads(invoke("explain", "--device", "v100", "--dtype", "fp16", "--json").stdout)["advice"]
    assert found["best"] == {"block_m": 128, "block_n": 64}
    assert len(found["options"]) == 7


# --- explain --plot


def test_explain_draws_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    result = invoke("explain", "--device", "h200", "--seqlen-q", "1", "--plot", str(path))
    assert (result.exit_code, result.stderr.strip()) == (0, f"written: {path}")
    assert path.read_text().startswith("<?xml")


# --- profile

TINY = ("--seqlen", "256", "--heads", "2", "--head-dim", "16", "--calls", "2", "--device", "cpu")


@pytest.mark.parametrize("flags", [(), ("--causal", "--backward", "--kv-heads", "1")])
def test_profile_tells_where_the_time_goes(flags: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    result = invoke("profile", *TINY, *flags, "--trace", str(trace), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    naive, ours = found["naive"]["by_category"], found["tilewise"]["by_category"]
    assert naive["matmul"] > 0
    assert naive["softmax"] > 0
    assert naive["fused"] == ours["matmul"] == ours["softmax"] == 0
    assert ours["fused"] > 0.3 * found["tilewise"]["seconds"]
    assert found["largest_difference"] < 1e-5
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    backend = found["backend"]
    for label in ("naive", "naive.scores", "naive.softmax", "naive.values", f"tilewise.attention [{backend}]"):
        assert names.count(label) == 2
    assert ("naive.backward" in names) == ("--backward" in flags)


def test_profile_prints_a_table_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    result = invoke("profile", *TINY, "--trace", str(tmp_path / "run.json.gz"), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in ("matrix products", "softmax", "fused kernel", "in all", "Mean of 2 calls", "FLOP/s (measured here)"):
        assert part in text
    drawn = picture.read_text()
    assert "milliseconds of a call" in drawn
    assert "fused kernel" in drawn


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain --device h200 --plot plan.png", "plot: expected a name that ends in .svg, got plan.png"),
        ("explain --device h200 --plot /dev/null/plan.svg", "plot: expected a file that can be written"),
        ("explain --device h200 --plot plan.svg --seqlen 0", "plot: expected a problem with work to do"),
        ("profile --trace run.txt", "trace: expected a name that ends in .json"),
        ("profile --trace /dev/null/run.json", "trace: expected a file that can be written"),
        ("profile --plot run.png", "plot: expected a name that ends in .svg"),
        ("profile --device h100", "device: expected auto, cpu or cuda"),
        ("profile --seqlen 10000000", "seqlen: expected a length whose score matrix fits"),
        ("profile --heads 3 --kv-heads 2", "num_heads: expected a multiple"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured_or_written(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "_call", pytest.fail)
    result = invoke(*command.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(profile, "_call", pytest.fail)
    arguments = ("--trace", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg"))
    result = invoke("profile", *arguments)
    assert result.exit_code == 2
    assert "tilewise[bench]" in result.stderr


def test_the_reference_is_no_fused_kernel(tmp_path: Path) -> None:
    result = invoke("profile", *TINY, "--dtype", "fp64", "--calls", "1", "--trace", str(tmp_path / "run.json"))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Only the reference takes this problem here" in text
    assert "Mean of 1 call under" in text
    assert re.search(r"fused kernel, all at once - -", text)
