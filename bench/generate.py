"""`transformers.generate` of a Llama-like model on a GPU, with tilewise and with torch's SDPA.

    python bench/generate.py [--output FILE]

8 layers, 16 query heads on 4 K/V heads of 128, random weights, bf16, greedy. Both models take turns; after the first
round, which compiles, medians and the fastest runs are reported. Few sequences are limited by the host, whose time
varies from run to run: there the fastest run tells more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from suite.measuring import commit
from tilewise.bench.machine import machine, versions
from tilewise.integrations.transformers import register

# (sequences, tokens of a prompt, new tokens, rounds)
CASES = ((1, 512, 64, 16), (16, 2048, 64, 6), (8, 16384, 32, 4))
NAMES = ("sdpa", "tilewise")


def models() -> dict[str, Any]:
    """The same model with both."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, vocab_size=32000, max_position_embeddings=40000,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name in NAMES:
        torch.manual_seed(0)
        with torch.device("cuda"):
            found[name] = LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16).eval()  # noqa: SLF001
    return found


def measure(both: dict[str, Any], batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """One case."""
    ids = torch.randint(1, 32000, (batch, prompt), device="cuda")
    taken: dict[str, list[float]] = {name: [] for name in both}
    tokens = {}
    for number in range(rounds + 1):
        for name, model in both.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            tokens[name] = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            if number:
                taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    least = {name: min(times) for name, times in taken.items()}
    return {
        "batch": batch, "prompt": prompt, "new tokens": new, "median s": medians, "fastest s": least,
        "speedup": medians["sdpa"] / medians["tilewise"], "speedup, fastest": least["sdpa"] / least["tilewise"],
        "equal tokens": float((tokens["sdpa"] == tokens["tilewise"]).float().mean()),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    register()
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "cases": []}
    both = models()
    with torch.no_grad():
        for case in CASES:
            results["cases"].append(measure(both, *case))
            print(json.dumps(results["cases"][-1]), flush=True)
            if given.output:
                given.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
