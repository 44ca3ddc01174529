"""The scaling model: what must hold whatever the rates, and how the command shows it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from tilewise import InvalidProblem
from tilewise.cli import build_app
from tilewise.distributed import scaling
from tilewise.distributed.scaling import LINKS, METHODS, Link, Rates, Scenario

H200 = Rates.of_device("h200")
MILLION = Scenario(world=64, seqlen=1 << 20, causal=True)


def test_a_million_tokens_over_64_gpus_is_above_nine_tenths_of_ideal() -> None:
    """Published zigzag rings reach 85 % forward on 8 GPUs; transfers behind computing leave merges and launches."""
    for world in (8, 64):
        scenario = dataclasses.replace(MILLION, world=world)
        predicted = scaling.predict(scenario, H200, scaling.link_between("h200", world))
        assert predicted.forward.efficiency > 0.9
        assert predicted.backward.efficiency > 0.9
        assert predicted.forward.hidden > 10 * predicted.forward.exposed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backward", [False, True])
def test_time_is_never_below_ideal_and_falls_with_the_link(method: str, backward: bool) -> None:
    times = []
    for bandwidth in (1e9, 1e10, 1e11, 1e15):
        predicted = scaling.predict(
            dataclasses.replace(MILLION, world=16), H200, Link("any", bandwidth, 1.0, 0.0), method
        )
        one = predicted.backward if backward else predicted.forward
        assert one.seconds == pytest.approx(one.compute + one.exposed)
        assert 0.0 < one.efficiency <= 1.0
        times.append(one.seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.02 * times[-1]


def test_auto_takes_what_the_model_finds_fastest() -> None:
    def best(world: int, rows: int, device: str = "h200") -> str:
        return scaling.best_method(world, 32, 8, rows, 128, causal=True, device=device, itemsize=2)

    assert best(1, 4096) == "ring"
    # More ranks than heads: heads is out of the question.
    assert best(64, 16384) == "ring"
    assert best(8, 1024) == "heads"
    scenario = Scenario(8, 8 * 1024, causal=True)
    assert best(8, 1024) == scaling.compare(scenario, H200, scaling.link_between("h200", 8))[0].method


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidProblem, match="link"):
        scaling.link_between("h200", 2, "string")
    with pytest.raises(InvalidProblem, match="method"):
        scaling.predict(MILLION, H200, LINKS["nvlink4"], "star")


def test_the_command_prints_the_forecast() -> None:
    arguments = ["explain", "--context-parallel=64", "--seqlen=1M", "--heads=32", "--kv-heads=8", "--causal"]
    shown = CliRunner().invoke(build_app(), arguments)
    assert shown.exit_code == 0, shown.output
    assert "1048576 tokens x 1 over 64 ranks, 16384 tokens each" in shown.output
    assert "heads        not possible" in shown.output
    assert "infiniband-ndr" in shown.output
    plain = json.loads(CliRunner().invoke(build_app(), [*arguments, "--link", "ethernet-25g", "--json"]).output)
    assert plain["best"] in METHODS
    assert plain["predictions"][0]["forward"]["exposed"] > 0
    own = scaling.forecast(MILLION, link="ethernet-25g", dtype=torch.bfloat16).to_dict()
    assert plain == json.loads(json.dumps(own))


def test_auto_chooses_in_a_compiled_graph_of_any_length() -> None:
    """One graph for all lengths that have the same choice."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        name = scaling.best_method(2, 8, 8, x.shape[0], 64, causal=True, device="cpu", itemsize=4)
        return x + METHODS.index(name)

    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="eager")
    found = {rows: float(compiled(torch.zeros(rows))[0]) for rows in (64, 65, 1000, 4096)}
    assert found == {rows: float(chosen(torch.zeros(rows))[0]) for rows in found}
    assert len(set(found.values())) > 1


def test_one_of_a_kind_is_singular() -> None:
    arguments = ["explain", "--context-parallel=1", "--seqlen=1", "--heads=2", "--kv-heads=1"]
    shown = CliRunner().invoke(build_app(), arguments).output
    assert "1 token x 1 over 1 rank, 1 token each" in shown
    assert "2 heads, 1 K/V head," in shown


def test_a_length_that_is_none_is_named() -> None:
    assert CliRunner().invoke(build_app(), ["explain", "--seqlen", "many"]).exit_code != 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--link", "nvlink4"], "--link: expected --context-parallel too"),
        *(
            (["--context-parallel", "2", *more], f"{more[0]}: expected no such option with --context-parallel")
            for more in (["--bias"], ["--mask"], ["--tiles"], ["--seqlen-q", "1"], ["--backend", "cpu"])
        ),
    ],
)
def test_options_without_a_meaning_are_refused(options: list[str], named: str) -> None:
    shown = CliRunner().invoke(build_app(), ["explain", *options])
    assert shown.exit_code == 2
    assert named in shown.output
