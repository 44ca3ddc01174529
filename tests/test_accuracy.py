"""`tilewise accuracy`: what FP8 loses, and that it loses what was published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from making import invoke
from tilewise.cli import accuracy
from tilewise.cli.accuracy import DISTRIBUTIONS, make_sample

SMALL = ("accuracy", "--seqlen", "64", "--heads", "1", "--head-dim", "32", "--rows", "16")


def quiet(_: str) -> None:
    """No progress."""


def test_the_table_orders_what_it_must() -> None:
    found, _ = accuracy.measure("outliers", 256, 2, 64, 64, 0, quiet)
    rmse = {m.recipe.name: m.rmse for m in found}
    assert rmse["fp16"] < rmse["bf16"] < rmse["fp8 per tensor rotated"] < rmse["fp8 per tensor"]
    # Caches: int8 with a scale per token has more bits than e4m3, and an outlier costs its own row only.
    assert rmse["fp16"] < rmse["int8 per token"] < rmse["fp8 per page"]
    assert set(rmse) == {recipe.name for recipe in accuracy.recipes()}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_published_errors_at_8192_tokens() -> None:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001): 2.4e-2 per tensor, 9.1e-3 with the rotation; fp16 1.9e-4."""
    found, _ = accuracy.measure("outliers", 8192, 4, 128, 256, 0, quiet)
    rmse = {m.recipe.name: m.rmse for m in found}
    assert 2.1e-2 < rmse["fp8 per tensor"] < 2.7e-2
    assert rmse["fp8 per tensor rotated"] <= 9.4e-3
    assert rmse["fp16"] < 2.5e-4


@pytest.mark.slow
def test_the_model_learns() -> None:
    sample = make_sample("model", 128, 0, 0, 0, quiet)
    loss = float(sample.note.split("loss ")[1].split(" ")[0])
    assert loss < 2.6
    assert sample.causal
    assert sample.q.shape == (1, 2, 128, 64)


def test_json_and_plot(tmp_path: Path) -> None:
    picture = tmp_path / "accuracy.svg"
    result = invoke(*SMALL, "--distribution", "normal", "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    errors = json.loads(result.stdout)["errors"]
    assert len(errors) == len(list(accuracy.recipes()))
    assert all(0.0 < row["rmse"] < row["largest"] < 1.0 for row in errors)
    assert "<svg" in picture.read_text()


def test_text_names_every_recipe_and_the_distribution() -> None:
    text = invoke(*SMALL, "--distribution", "outliers", columns=120).stdout
    assert "fp8 per block rotated" in text
    assert "Bernoulli" in text


@pytest.mark.parametrize("bad", [("--distribution", "cauchy"), ("--plot", "accuracy.png"), ("--seqlen", "1")])
def test_bad_options_are_refused(bad: tuple[str, str]) -> None:
    assert invoke(*SMALL, *bad).exit_code == 2
    assert DISTRIBUTIONS == ("normal", "outliers", "model")
