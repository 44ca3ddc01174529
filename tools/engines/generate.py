"""Runs vLLM's CPU engine on tiny models and writes tokens and log-probabilities as JSON.

Each case runs in a forked process of its own, because vLLM's CPU engine cannot start twice in a process that has loaded
llvmlite: it searches all modules for its kernels, and llvmlite has an object that cannot be searched.

python -m engines.generate --models FOLDER --output FILE [--only llama]

The attention backend is the one of the process: CPU_ATTN, or tilewise with TILEWISE_VLLM_CPU=1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from engines.models import CONFIGS, VOCABULARY, saved

__all__ = ["SCENARIOS", "main"]

# By name: the models it runs, the engine's arguments, and (number of requests, tokens of each).
EVERY = tuple(CONFIGS)
SCENARIOS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, int]]] = {
    "plain": (EVERY, {"enable_prefix_caching": False, "enable_chunked_prefill": False}, (6, 24)),
    "prefixes": (EVERY, {"enable_prefix_caching": True, "enable_chunked_prefill": False}, (6, 24)),
    "chunked": (
        EVERY,
        {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        (6, 24),
    ),
    # Too few blocks for the requests that run at a time: some are preempted and start again later.
    "preempted": (
        ("llama",),
        {"num_gpu_blocks_override": 24, "enable_prefix_caching": False, "max_num_seqs": 16},
        (16, 60),
    ),
    "many": (("llama", "gemma3"), {"enable_prefix_caching": True, "max_num_seqs": 64}, (200, 12)),
}


def prompts(count: int) -> list[list[int]]:
    """Token ids: lengths from 3 to 250; two of three start with the same 100 tokens."""
    draw = random.Random(count)
    stem = [draw.randrange(3, VOCABULARY) for _ in range(100)]
    made = []
    for number in range(count):
        own = [draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(3, 150))]
        made.append(own if number % 3 == 0 else stem + own)
    return made


def run(folder: Path, options: dict[str, Any], amount: tuple[int, int]) -> dict[str, Any]:
    """Greedy tokens, their log-probabilities, and what the engine says about itself."""
    from vllm import LLM, SamplingParams

    count, tokens = amount
    settings = {"max_model_len": 512, "block_size": 32, "enforce_eager": True, "seed": 0} | options
    if settings.get("max_num_batched_tokens") is None and not settings.get("enable_chunked_prefill", True):
        settings["max_num_batched_tokens"] = 2048
    engine = LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, disable_log_stats=False, **settings)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    requests = [{"prompt_token_ids": ids} for ids in prompts(count)]
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    preempted = sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
    backends = {
        type(layer.impl).__name__
        for layer in engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        if hasattr(layer, "impl")
    }
    found = [output.outputs[0] for output in outputs]
    values = [[step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)] for one in found]
    return {
        "tokens": [list(one.token_ids) for one in found],
        "logprobs": values,
        "preemptions": preempted,
        "backends": sorted(backends),
        "seconds": seconds,
    }


def main() -> None:
    """Run the scenarios that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of the saved models")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--only", action="append", help="a model, or a scenario")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    import vllm  # noqa: F401 - before forking, so that it is imported once

    for scenario, (models, options, amount) in SCENARIOS.items():
        for model in models:
            name = f"{scenario}/{model}"
            if chosen.only and not {model, scenario, name} & set(chosen.only):
                continue
            results[name] = forked(chosen.output.with_suffix(".part"), chosen.models, model, options, amount)
            chosen.output.write_text(json.dumps(results))


def forked(part: Path, models: Path, model: str, options: dict[str, Any], amount: tuple[int, int]) -> dict[str, Any]:
    """`run` in a child process, which leaves its results in a file."""
    part.unlink(missing_ok=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"error": "the process died"}
        return found
    try:
        result = run(saved(model, models), options, amount)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    part.write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
