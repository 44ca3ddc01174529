"""What SGLang may ask for and tilewise cannot do, with the reasons. Nothing here imports SGLang."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.errors import Unsupported
from tilewise.fp8.container import E4M3
from tilewise.integrations.engines import DTYPES
from tilewise.problem import MAX_HEAD_DIM

MODES = ("DECODE", "EXTEND", "IDLE", "MIXED")
LAYOUTS = ("nhd", "hnd")


def refuse_runner(runner: Any) -> None:
    """Raise for a model or a server that needs more than pages of keys and values."""
    config = runner.model_config
    if runner.use_mla_backend:
        raise Unsupported("latent attention (MLA): its cache holds latent rows instead of keys and values")
    if config.is_encoder_decoder:
        raise Unsupported("encoder-decoder models: SGLang keeps the encoder's keys in the same table of slots")
    if getattr(config, "is_local_attention_model", False):
        raise Unsupported("attention in chunks (Llama 4): a query sees only keys of its own chunk")
    if not runner.spec_algorithm.is_none():
        raise Unsupported(
            "speculative decoding: drafts are verified with masks that tilewise's paged calls do not take"
        )
    if getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
        raise Unsupported(
            "a unified memory pool, whose slots have virtual numbers; start without --enable-unified-memory"
        )


def refuse_pool(pool: Any, plain: type, dtype: torch.dtype) -> None:
    """Raise for a pool other than plain keys and values in the model's dtype or in e4m3."""
    kind = type(pool)
    if kind is not plain:
        raise Unsupported(
            f"the KV pool {kind.__name__}: tilewise reads {plain.__name__}. For models with sliding windows "
            "start with --disable-hybrid-swa-memory"
        )
    if pool.kv_cache_layout not in LAYOUTS:
        raise Unsupported(f"the KV layout {pool.kv_cache_layout!r}: tilewise reads {', '.join(LAYOUTS)}")
    if pool.is_quantized_kv_cache or (pool.dtype != E4M3 and pool.dtype != dtype) or dtype not in DTYPES:
        raise Unsupported(
            f"a KV cache of {pool.dtype} for a model of {dtype}: tilewise reads the model's dtype, or fp8_e4m3"
        )


def refuse_layer(layer: Any) -> None:
    """Raise for scores that tilewise does not compute."""
    for dim in (layer.qk_head_dim, layer.v_head_dim):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise Unsupported(f"head_dim {dim}: tilewise takes 1 to {MAX_HEAD_DIM}")
    if layer.is_cross_attention:
        raise Unsupported("cross attention: SGLang keeps the encoder's keys in the same table of slots")
    if layer.attn_type.value not in ("decoder", "encoder_only"):
        raise Unsupported(f"attention of type {layer.attn_type.value!r}: tilewise takes decoder and encoder_only")
    if layer.pos_encoding_mode != "NONE":
        raise Unsupported(f"positions encoded by attention ({layer.pos_encoding_mode})")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise Unsupported(f"logits capped by {layer.logit_capping_method!r}: tilewise caps by tanh")
    if layer.xai_temperature_len > 0:
        raise Unsupported("a temperature that depends on the position (xai_temperature_len)")


def refuse_batch(batch: Any) -> None:
    """Raise for a step that asks for more than lengths, slots and one direction."""
    if batch.forward_mode.name not in MODES:
        raise Unsupported(f"forward mode {batch.forward_mode.name}: tilewise takes {', '.join(MODES)}")
    if batch.spec_info is not None:
        raise Unsupported("speculative decoding: a step with spec_info")
    if batch.attn_cp_metadata is not None or batch.attn_dcp_metadata is not None or batch.dcp_kv_mask is not None:
        raise Unsupported("context parallelism: each rank holds a part of the keys, tilewise attends to all")
    if batch.multi_item_delimiter_indices is not None:
        raise Unsupported("multi-item scoring: items of a request do not see each other")


def refuse_captured_mode(batch: Any) -> None:
    """Raise for a CUDA graph of anything but decoding."""
    if not batch.forward_mode.is_decode_or_idle():
        raise Unsupported(
            f"a CUDA graph of {batch.forward_mode.name}: tilewise is captured in decoding. Start with "
            "--disable-prefill-cuda-graph"
        )


def refuse_others(others: dict[str, Any]) -> None:
    """Raise for arguments of a layer's call that would change its result."""
    asked = [name for name, value in others.items() if value is not None and value is not False]
    if asked:
        raise Unsupported(f"{', '.join(asked)}: tilewise takes q, k, v and sinks")
