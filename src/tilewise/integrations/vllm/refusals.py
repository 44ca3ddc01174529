"""What vLLM may ask for and tilewise cannot do, with the reasons. Nothing here imports vLLM."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.errors import Unsupported
from tilewise.problem import MAX_HEAD_DIM_V

# What a cache may hold, by vLLM's names: the model's own dtype, e4m3 with a scale per tensor or per K/V head, or int8
# with a scale per token and K/V head.
OWN = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LATENT_CACHE_DTYPES = ("auto", *OWN, "fp8", "fp8_e4m3")
INT8 = "int8_per_token_head"
KV_CACHE_DTYPES = (*LATENT_CACHE_DTYPES, INT8)


def why_not_head_size(head_size: int) -> str | None:
    """The reason against a head size."""
    return None if 1 <= head_size <= MAX_HEAD_DIM_V else f"head size {head_size}: tilewise takes 1 to {MAX_HEAD_DIM_V}"


def why_not_cache_dtype(name: str | None, dtype: torch.dtype, known: tuple[str, ...] = KV_CACHE_DTYPES) -> str | None:
    """The reason against a cache of this name, which is to be one of the `known`, for a model of this dtype."""
    if name is None or name == "auto":
        return None
    if name not in known:
        return f"kv_cache_dtype {name}: tilewise reads {', '.join(known)}"
    if name in OWN and OWN[name] != dtype:
        return f"kv_cache_dtype {name} for a model of {dtype}: tilewise reads a cache in the model's dtype, or fp8"
    return None


def why_not_latent_layer(*, is_decoder: bool, indexer: Any, **others: Any) -> str | None:
    """The reason against a layer of latent attention."""
    if indexer is not None:
        return "sparse latent attention (DeepSeek V3.2's indexer): tilewise attends to all keys"
    asked = [name for name, value in others.items() if value]
    if asked or not is_decoder:
        return f"latent attention with {', '.join(asked) or 'an encoder'}: tilewise serves it in plain decoder layers"
    return None


def refuse_cache(device: torch.device, kv_transfer_config: Any) -> None:
    """Raise for a cache that other code would write in another order."""
    if device.type == "cpu" and kv_transfer_config is not None:
        raise Unsupported(
            "KV connectors on vLLM's CPU platform store blocks in the order of its own kernels, which tilewise does "
            "not read; unset TILEWISE_VLLM_CPU"
        )


def spans_of(common: Any) -> dict[int, list[tuple[int, int]]]:
    """The spans of tokens that see each other in both directions, images, of each request that has any."""
    ranges = getattr(common, "mm_req_doc_ranges", None) or {}
    return {n: spans for n, spans in ranges.items() if spans}


def refuse_batch(common: Any, *, takes_spans: bool = False) -> None:
    """Raise for a step that asks for more than lengths, pages, one direction and, if taken, spans."""
    if isinstance(common.causal, torch.Tensor):
        raise Unsupported("a step in which some requests are causal and others are not: tilewise takes one of them")
    if spans_of(common) and not (takes_spans and common.causal):
        raise Unsupported(
            "image tokens that see each other (PrefixLM): tilewise takes them in causal layers, not in latent attention"
        )
    if getattr(common, "rswa_prefix_lens", None) is not None:
        raise Unsupported("reference sliding windows (R-SWA), whose prefix stays visible past the window")
    if getattr(common, "dcp_local_seq_lens", None) is not None:
        raise Unsupported("decode context parallelism: each rank holds a part of the keys, tilewise attends to all")
