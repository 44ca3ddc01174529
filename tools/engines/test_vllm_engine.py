"""vLLM's CPU engine with tilewise gives what it gives with its own attention. Run by `make test-vllm`.

Each backend runs in a process of its own (engines.generate), all scenarios in a row. The processes start when the first
test asks for results; a variable VLLM_RESULTS names a folder whose results are used instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.generate import SCENARIOS

CASES = [f"{scenario}/{model}" for scenario, (models, _, _) in SCENARIOS.items() for model in models]
# Largest difference of a token's log-probability, fp32.
LOGPROBS = 1e-4
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """By backend: what `engines.generate` wrote."""
    given = os.environ.get("VLLM_RESULTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("vllm")
    found = {}
    for name, chosen in (("cpu_attn", "0"), ("tilewise", "1")):
        output = folder / f"{name}.json"
        if not output.exists():
            command = [sys.executable, "-m", "engines.generate", "--models", str(folder), "--output", str(output)]
            environment = os.environ | SETTINGS | {"TILEWISE_VLLM_CPU": chosen, "PYTHONPATH": "tools"}
            with (folder / f"{name}.log").open("w") as log:
                subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
        found[name] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_cpu_attn(results: dict[str, Results], case: str) -> None:
    """Tokens equal, log-probabilities close, and not all of them certain."""
    theirs, ours = results["cpu_attn"][case], results["tilewise"][case]
    assert "error" not in theirs, theirs
    assert "error" not in ours, ours
    latent = case.endswith("deepseek")
    assert theirs["backends"] in ([["CPUMLAImpl"], ["AMXMLAImpl"]] if latent else [["CPUAttentionBackendImpl"]])
    assert ours["backends"] == ["TilewiseMLAImpl" if latent else "TilewiseImpl"]
    assert ours["tokens"] == theirs["tokens"]
    differences = [
        abs(a - b)
        for one, other in zip(ours["logprobs"], theirs["logprobs"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert max(differences) < LOGPROBS
    # A model that is sure of every token would hide wrong attention.
    assert min(min(one) for one in theirs["logprobs"]) < -0.5


def test_the_scenario_of_preemption_preempts(results: dict[str, Results]) -> None:
    """Requests gave their blocks back and started again."""
    assert results["tilewise"]["preempted/llama"]["preemptions"] > 0
