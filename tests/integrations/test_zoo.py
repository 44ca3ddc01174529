"""The zoo finds what it is for, and some of its models are right or refused; `make test-transformers` walks all."""

from __future__ import annotations

import csv
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from zoo import table, walk
from zoo.judge import judge
from zoo.tiny import tiny_config
from zoo.yardstick import Yardstick

ROOT = Path(__file__).parent.parent.parent

# What tests/integrations/test_transformers.py does not have: an encoder and a decoder, pictures
# between words, and sounds.
RIGHT = ("bart", "llava", "wav2vec2")
OWN_ATTENTION = ("xglm",)

# One group: what eager attention computes is shared.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("zoo")]


def forgets_the_mask(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    weights = torch.softmax(query @ key.mT * kwargs["scaling"], dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def scales_a_little(*args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)[0] * 1.001, None


def forgets_a_gradient(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key.detach(), value, *args, **kwargs)


def gives_up(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("scores")


@functools.cache
def yardstick() -> Yardstick:
    return Yardstick(transformers.LlamaForCausalLM, tiny_config("llama"))


@pytest.mark.parametrize(
    ("attention", "outcome", "cases"),
    [
        (forgets_the_mask, "wrong", {"plain", "left", "right", "future", "hidden", "generate"}),
        (scales_a_little, "wrong", {"plain", "left", "right", "generate"}),
        (forgets_a_gradient, "wrong", {"plain", "left", "right"}),
        (gives_up, "unclear", {"plain", "left", "right", "future", "hidden", "generate"}),
    ],
)
def test_the_judge_finds_wrong_attention(attention: Any, outcome: str, cases: set[str]) -> None:
    AttentionInterface.register("found_out", attention)
    AttentionMaskInterface.register("found_out", transformers.masking_utils.sdpa_mask)
    cls, config = transformers.LlamaForCausalLM, tiny_config("llama")
    finding = judge(cls, config, "found_out", lambda: 0, yardstick())
    assert finding.outcome == outcome
    assert {case for case, said in finding.cases.items() if said.startswith(outcome)} >= cases


def test_the_judge_accepts_sdpa() -> None:
    cls, config = transformers.LlamaForCausalLM, tiny_config("llama")
    finding = judge(cls, config, "sdpa", lambda: 0, yardstick())
    assert set(finding.cases.values()) - {"right"} == {finding.cases["weights"]}


def test_a_gradient_that_jumps_excuses_itself_alone() -> None:
    reference = Yardstick(transformers.LlamaForCausalLM, tiny_config("llama")).eager
    before = reference.allowed("plain", 1)
    outputs, gradients = reference.results["plain"]
    jumping, *others = gradients
    off = gradients[jumping] + 0.1 * gradients[jumping].abs().max()
    reference.samples.append({"plain": (outputs, gradients | {jumping: off})})
    after = reference.allowed("plain", 1)
    assert after[jumping] == pytest.approx(0.3, rel=1e-2)
    assert {name: after[name] for name in others} == {name: before[name] for name in others}


def test_some_models_are_right(tmp_path: Path) -> None:
    """In a process of its own: models warn, and warnings are errors here."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zoo", "--types", ",".join(RIGHT + OWN_ATTENTION), "--jobs", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "found.json")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {entry["type"] for entry in found["results"]} == {*RIGHT, *OWN_ATTENTION}
    for entry in found["results"]:
        expected = {"untouched"} if entry["type"] in OWN_ATTENTION else {"right", "untouched"}
        assert entry["outcome"] in expected, entry


def entry(model_type: str, name: str, outcome: str, reason: str = "") -> dict[str, Any]:
    return {"type": model_type, "class": model_type.title(), "name": name, "outcome": outcome, "reason": reason}


def test_the_table_says_what_was_found() -> None:
    refusal = "build: refused: Unsupported: Cow has no masks"
    old = {"transformers": "5.1", "results": [entry("ant", "t", "right"), entry("cow", "t", "refused", refusal)]}
    new = {"transformers": "5.2", "results": [entry("ant", "t", "right"), entry("bee", "", "not built", "too large")]}
    text = table.render([old, new])
    assert "| right | 1 | 1 |" in text
    assert "| refused | 1 | 0 |" in text
    assert "| differs from eager attention | 0 | 0 |" in text
    assert "| cow | `t` | 5.1 | the model has no masks |" in text
    assert table.models([old, new]).splitlines() == [
        "type,5.1,5.2",
        "ant,right,right",
        "bee,not in this release,not built offline: too large",
        "cow,refused,not in this release",
    ]


def test_the_page_counts_what_the_csv_lists() -> None:
    with (ROOT / "docs" / "transformers-models.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs" / "transformers.md").read_text()
    for title in table.OUTCOMES.values():
        counts = [sum(row[name].split(": ")[0] == title for row in rows) for name in ("5.17.0", "5.22.2")]
        assert f"| {title} | {counts[0]} | {counts[1]} |" in page, title


def test_every_type_is_walked() -> None:
    known = walk.types()
    assert len(known) > 500
    assert all(walk.classes_of(model_type) for model_type in known)
