"""Tiny models with random weights, saved as folders that vLLM loads. transformers makes the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["CONFIGS", "saved"]

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = COMMON | {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}
# By name: the configuration's class, and its arguments.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "gemma3": (
        "Gemma3TextConfig",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        GROUPED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": None,
        },
    ),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    # Latent attention, of the only width that vLLM's own backend for CPUs takes.
    "deepseek": (
        "DeepseekV3Config",
        COMMON
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
        },
    ),
    "opt": ("OPTConfig", COMMON | {"ffn_dim": 256, "word_embed_proj_dim": 128, "do_layer_norm_before": True}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
}
# Standard deviation of embeddings, smaller where they are scaled or normalised before the first layer: if they counted
# for more than the layers, each token would be followed by itself.
EMBEDDING = {False: 0.2, True: 0.02}
SCALED = ("gemma2", "gemma3", "bloom")


def saved(name: str, folder: Path) -> Path:
    """The folder of a model; made if it is not there. Tokens depend on the layers more than on embeddings."""
    path = folder / name
    if (path / "config.json").exists():
        return path
    kind, arguments = CONFIGS[name]
    embedding = EMBEDDING[name in SCALED]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, embedding if "embed" in key else weight.shape[-1] ** -0.5)
            elif "sinks" in key:
                weight.normal_()
    model.float().save_pretrained(path)
    return path
